"""What each Cartridge of a workload saves and costs, what pays, and what to keep where.

Owns the arithmetic, in seconds of a replica, bytes and USD. Refuses files, clocks and output, and
formulas of its own for prefill and loads: those are the placement policies' (docs/economics.md).
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

import msgspec

from cartridge_loadtest.economics_costs import (
    GIB,
    SECONDS_PER_DAY,
    SECONDS_PER_HOUR,
    BuildKind,
    Costs,
)
from cartridge_loadtest.keeping_plan import Offer, plan
from cartridge_loadtest.workloads import FleetRequest, Workload
from cartridge_policies.types import ArtifactDemand
from cartridge_proto.digest import Digest
from cartridge_proto.residency import TIERS_FASTEST_FIRST, Tier

BOUNDED_TIERS: Final = (Tier.NVME, Tier.DRAM, Tier.HBM)
"""In the order in which the plan fills them."""
GPU_PRICE_FACTORS: Final = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)


class NothingToWeigh(Exception):
    """The workload has no requests, or no time."""


@dataclass(frozen=True)
class Usage:
    """What the requests of a workload do with one Cartridge."""

    digest: Digest
    num_uses: int
    num_alone: int
    """Of these, without other Cartridges: HBM holds what a request has as a whole."""
    source_tokens: int
    """Of the document as text."""
    num_tokens: int
    """Positions of the Cartridge."""
    stored_bytes: int
    hbm_bytes: int
    saved_s: float
    """Of a replica, by all uses: prefill and decoding that plain text would take more."""


@dataclass(frozen=True)
class Keeping:
    """One Cartridge in one tier for the whole horizon. All `…_usd` are totals over it."""

    tier: Tier
    num_uses: float
    saved_usd: float
    load_usd: float
    """Of all uses: seconds of a replica, and transfer where the tier is the store."""
    build_usd: float
    store_usd: float
    """The store has every Cartridge that is kept anywhere."""
    residency_usd: float
    fill_usd: float
    """Bringing the copies to their tier, once."""
    load_s: float
    """Of one use, on average."""
    room_bytes: int
    """Of all copies."""

    @property
    def fixed_usd(self) -> float:
        """What does not depend on how often it is used."""
        return self.build_usd + self.store_usd + self.residency_usd + self.fill_usd

    @property
    def margin_usd_per_use(self) -> float:
        """What one use saves beyond its load."""
        return (self.saved_usd - self.load_usd) / self.num_uses

    @property
    def net_usd(self) -> float:
        """Of all uses."""
        return self.saved_usd - self.load_usd - self.fixed_usd

    @property
    def break_even_uses(self) -> float | None:
        """Uses within the horizon that pay for everything; `None` = never, however many."""
        margin_usd = self.margin_usd_per_use
        return self.fixed_usd / margin_usd if margin_usd > 0 else None

    def net_usd_at(self, num_uses: float) -> float:
        """The same with another number of uses."""
        return num_uses * self.margin_usd_per_use - self.fixed_usd


@dataclass(frozen=True)
class Verdict:
    """What the plan says of one Cartridge."""

    usage: Usage
    keepings: Mapping[Tier, Keeping]
    kept_in: Tier | None
    """`None`: send the document as text."""

    @property
    def shown(self) -> Keeping:
        """Where it is kept; or where keeping it would lose least."""
        if self.kept_in is not None:
            return self.keepings[self.kept_in]
        return best_of(self.keepings)

    @property
    def net_usd(self) -> float:
        """Nothing is gained or lost by what is not kept."""
        return 0.0 if self.kept_in is None else self.shown.net_usd


@dataclass(frozen=True)
class Economics:
    """The plan for a workload; `verdicts` by what they bring, best first."""

    workload: str
    about: str
    num_requests: int
    trace_s: float
    horizon_s: float
    verdicts: tuple[Verdict, ...]
    plain_s: float
    """Of replicas, for all requests of the horizon as plain text, decoding of context included."""

    @property
    def scale(self) -> float:
        """Requests of the horizon for each one of the trace."""
        return _scale(self.trace_s, self.horizon_s)

    @property
    def kept(self) -> tuple[Verdict, ...]:
        """What is kept anywhere."""
        return tuple(verdict for verdict in self.verdicts if verdict.kept_in is not None)

    @property
    def net_usd(self) -> float:
        """Of the plan."""
        return sum(verdict.net_usd for verdict in self.verdicts)

    def room_bytes(self, tier: Tier) -> int:
        """What the plan takes of a tier, all copies. Of the store: every Cartridge that is kept."""
        if tier is Tier.REMOTE:
            return sum(verdict.usage.stored_bytes for verdict in self.kept)
        return sum(each.shown.room_bytes for each in self.kept if each.kept_in is tier)


def best_of(keepings: Mapping[Tier, Keeping]) -> Keeping:
    """The tier that brings most; the slowest of equals, which is the humblest."""
    slowest_first = [keepings[tier] for tier in reversed(TIERS_FASTEST_FIRST)]
    return max(slowest_first, key=lambda keeping: keeping.net_usd)


# --- what requests do ----------------------------------------------------------------------------
class RequestSeconds:
    """Seconds of a replica that requests take, without their loads and the tokens they write."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._rates = costs.rates

    def plain_s(self, request: FleetRequest) -> float:
        """All documents come as text; some are in the engine's own prefix cache."""
        num_live = request.num_live_tokens
        num_text = _source_tokens(request.cartridges)
        prefill_s = self._rates.prefill_s(num_text + num_live, 0)
        hit_share = self._costs.inference.prefix_cache_hit_share
        if num_text and hit_share:
            cached_s = self._rates.prefill_s(num_live, num_text)
            prefill_s = hit_share * cached_s + (1 - hit_share) * prefill_s
        return prefill_s + self._decode_s(request, num_text + num_live)

    def served_s(self, request: FleetRequest, kept: Set[Digest]) -> float:
        """Documents that are kept come as Cartridges; the others as text behind them."""
        held = [each for each in request.cartridges if each.digest in kept]
        if not held:
            return self.plain_s(request)
        num_virtual = sum(_num_tokens(each, self._costs) for each in held)
        num_live = request.num_live_tokens + _source_tokens(
            each for each in request.cartridges if each.digest not in kept
        )
        prefill_s = self._rates.prefill_s(num_live, num_virtual)
        return prefill_s + self._decode_s(request, num_live + num_virtual)

    def _decode_s(self, request: FleetRequest, num_context_tokens: int) -> float:
        per_token_s = self._costs.inference.decode_s_per_context_token * num_context_tokens
        return per_token_s * request.num_output_tokens


def usages(
    requests: Iterable[FleetRequest], costs: Costs, kept: Set[Digest] | None = None
) -> dict[Digest, Usage]:
    """What each Cartridge saves, where documents that are not `kept` (`None`: none) are text.

    What a request saves is shared by its Cartridges in proportion to their documents' tokens: the
    Shapley value of what the cost model says, as long as all stand for equally many tokens each.
    """
    seconds = RequestSeconds(costs)
    counts, alone = dict[Digest, int](), dict[Digest, int]()
    saved_s = dict[Digest, float]()
    artifacts = dict[Digest, ArtifactDemand]()
    for request in requests:
        held = [each for each in request.cartridges if kept is None or each.digest in kept]
        if not held:
            continue
        digests = {each.digest for each in held}
        saving_s = seconds.plain_s(request) - seconds.served_s(request, digests)
        all_tokens = _source_tokens(held)
        for each in held:
            counts[each.digest] = counts.get(each.digest, 0) + 1
            alone[each.digest] = alone.get(each.digest, 0) + (len(held) == 1)
            share_s = saving_s * each.num_tokens / all_tokens
            saved_s[each.digest] = saved_s.get(each.digest, 0.0) + share_s
            artifacts[each.digest] = each
    return {
        digest: _usage(artifact, costs, counts[digest], alone[digest], saved_s[digest])
        for digest, artifact in artifacts.items()
    }


def _usage(
    artifact: ArtifactDemand, costs: Costs, num_uses: int, num_alone: int, saved_s: float
) -> Usage:
    num_tokens = _num_tokens(artifact, costs)
    return Usage(
        digest=artifact.digest,
        num_uses=num_uses,
        num_alone=num_alone,
        source_tokens=artifact.num_tokens,
        num_tokens=num_tokens,
        stored_bytes=num_tokens * costs.model.stored_bytes_per_token,
        hbm_bytes=num_tokens * costs.model.hbm_bytes_per_token,
        saved_s=saved_s,
    )


def _source_tokens(artifacts: Iterable[ArtifactDemand]) -> int:
    return sum(artifact.num_tokens for artifact in artifacts)


def _num_tokens(artifact: ArtifactDemand, costs: Costs) -> int:
    return ceil(artifact.num_tokens / costs.build.source_tokens_per_token)


# --- what keeping costs --------------------------------------------------------------------------
def keepings(usage: Usage, costs: Costs, *, horizon_s: float, scale: float) -> dict[Tier, Keeping]:
    """One Cartridge in each tier. `scale`: uses in the horizon for each in the trace."""
    return {
        tier: _keeping(usage, costs, tier, horizon_s, scale)
        for tier in TIERS_FASTEST_FIRST
    }  # fmt: skip


def _keeping(usage: Usage, costs: Costs, tier: Tier, horizon_s: float, scale: float) -> Keeping:
    num_uses = usage.num_uses * scale
    copies = costs.copies[tier]
    size_bytes = usage.hbm_bytes if tier is Tier.HBM else usage.stored_bytes
    is_local = tier is not Tier.REMOTE
    per_byte_s = costs.usd_per_byte_s
    loads = {tier: 1.0}
    if tier is Tier.HBM:
        # A set is in HBM as a whole or not at all: what comes in sets is read for each of them.
        alone_share = usage.num_alone / usage.num_uses
        loads = {tier: alone_share, Tier.REMOTE: 1 - alone_share}
    residency_usd = per_byte_s[tier] * size_bytes * copies * horizon_s if is_local else 0.0
    return Keeping(
        tier=tier,
        num_uses=num_uses,
        saved_usd=usage.saved_s * scale * costs.replica_usd_per_s,
        load_usd=num_uses
        * sum(share * _load_usd(usage, costs, source) for source, share in loads.items()),
        build_usd=build_usd(usage, costs),
        store_usd=per_byte_s[Tier.REMOTE] * usage.stored_bytes * horizon_s,
        residency_usd=residency_usd,
        fill_usd=copies * _load_usd(usage, costs, Tier.REMOTE) if is_local else 0.0,
        load_s=sum(
            share * costs.rates.load_s(source, usage.stored_bytes)
            for source, share in loads.items()
        ),
        room_bytes=size_bytes * copies,
    )


def build_usd(usage: Usage, costs: Costs) -> float:
    """Making one, once."""
    if costs.build.kind is BuildKind.TRAINED:
        return costs.build.gpu_hours_per_cartridge * costs.prices.gpu_usd_per_hour
    return costs.rates.prefill_s(usage.source_tokens, 0) * costs.replica_usd_per_s


def _load_usd(usage: Usage, costs: Costs, tier: Tier) -> float:
    """Reading it from a tier once."""
    prices = costs.prices
    load_s = costs.rates.load_s(tier, usage.stored_bytes)
    transfer_gib = usage.stored_bytes / GIB if tier is Tier.REMOTE else 0.0
    return (
        load_s * prices.load_gpu_share * costs.replica_usd_per_s
        + transfer_gib * prices.transfer_usd_per_gib
    )


# --- what to keep where --------------------------------------------------------------------------
def assess(workload: Workload, costs: Costs, *, has_all_room: bool = False) -> Economics:
    """Weigh every Cartridge of a workload, and plan within the rooms of the fleet.

    Args:
        workload: the requests, in any order.
        costs: everything that they are multiplied with.
        has_all_room: plan as if every tier had room for everything, at the same prices.

    Raises:
        NothingToWeigh: it has no requests, or all come at once and `horizon_days` is absent.
    """
    trace_s, horizon_s = times(workload, costs)
    scale = _scale(trace_s, horizon_s)
    chosen = dict[Digest, tuple[Usage, dict[Tier, Keeping], Tier | None]]()
    candidates = usages(workload.requests, costs)
    # Without what is not kept the others of its requests save less: weighed again until all stay.
    while candidates:
        options = {
            digest: keepings(usage, costs, horizon_s=horizon_s, scale=scale)
            for digest, usage in candidates.items()
        }
        tiers = _plan(options, costs, has_all_room=has_all_room)
        for digest, usage in candidates.items():
            chosen[digest] = usage, options[digest], tiers[digest]
        kept = {digest for digest in candidates if tiers[digest] is not None}
        if len(kept) == len(candidates):
            break
        candidates = usages(workload.requests, costs, kept)
    seconds = RequestSeconds(costs)
    verdicts = [Verdict(*each) for each in chosen.values()]
    verdicts.sort(key=lambda each: (-each.net_usd, -each.shown.net_usd, each.usage.digest))
    return Economics(
        workload=workload.name,
        about=workload.about,
        num_requests=len(workload.requests),
        trace_s=trace_s,
        horizon_s=horizon_s,
        verdicts=tuple(verdicts),
        plain_s=scale * sum(map(seconds.plain_s, workload.requests)),
    )


def times(workload: Workload, costs: Costs) -> tuple[float, float]:
    """Seconds of the trace, and of the horizon.

    Raises:
        NothingToWeigh: there is no trace, or no time.
    """
    if not workload.requests:
        raise NothingToWeigh("the trace has no requests")
    arrivals = [request.arrival_s for request in workload.requests]
    trace_s = max(arrivals) - min(arrivals)
    if costs.horizon_days is not None:
        return trace_s, costs.horizon_days * SECONDS_PER_DAY
    if not trace_s:
        raise NothingToWeigh("all requests of the trace come at once: set horizon_days")
    return trace_s, trace_s


def _scale(trace_s: float, horizon_s: float) -> float:
    """What comes all at once comes once."""
    return horizon_s / trace_s if trace_s else 1.0


def _plan(
    options: Mapping[Digest, Mapping[Tier, Keeping]], costs: Costs, *, has_all_room: bool
) -> dict[Digest, Tier | None]:
    """A tier for each within the rooms of the fleet; `None` where none pays.

    The store has room for all: what it brings is the floor above which the others gain.
    """
    digests = list(options)
    rooms = costs.room_bytes_per_replica
    if has_all_room:
        rooms = dict.fromkeys(rooms, inf)
    floors = [max(0.0, options[digest][Tier.REMOTE].net_usd) for digest in digests]
    offers = [
        Offer(index, tier, keeping.room_bytes, keeping.net_usd - floors[index])
        for index, digest in enumerate(digests)
        for tier in BOUNDED_TIERS
        if (keeping := options[digest][tier]).net_usd > floors[index]
        # A copy is on one replica as a whole.
        and keeping.room_bytes <= rooms[tier] * costs.copies[tier]
    ]
    fleet_rooms: dict[str, float] = {
        str(tier): rooms[tier] * costs.fleet.num_replicas for tier in BOUNDED_TIERS
    }
    chosen = plan(offers, fleet_rooms)
    tiers = dict[Digest, Tier | None]()
    for index, digest in enumerate(digests):
        tiers[digest] = Tier.REMOTE if floors[index] > 0 else None
        if index in chosen:
            tiers[digest] = Tier(chosen[index].place)
    return tiers


@dataclass(frozen=True)
class AtGpuPrice:
    """What a plan brings at another price of GPUs."""

    gpu_usd_per_hour: float
    planned_anew_usd: float
    same_plan_usd: float


def at_gpu_prices(workload: Workload, costs: Costs, found: Economics) -> list[AtGpuPrice]:
    """Net over the price of a GPU-hour: with a plan for each, and with the plan for today's."""
    rows = []
    for factor in GPU_PRICE_FACTORS:
        usd_per_hour = costs.prices.gpu_usd_per_hour * factor
        prices = msgspec.structs.replace(costs.prices, gpu_usd_per_hour=usd_per_hour)
        changed = msgspec.structs.replace(costs, prices=prices)
        same_plan_usd = sum(
            _keeping(each.usage, changed, each.kept_in, found.horizon_s, found.scale).net_usd
            for each in found.kept
            if each.kept_in is not None
        )
        anew_usd = found.net_usd if factor == 1.0 else assess(workload, changed).net_usd
        rows.append(AtGpuPrice(usd_per_hour, anew_usd, same_plan_usd))
    return rows


def num_gpu_hours(seconds: float, costs: Costs) -> float:
    """Of so many seconds of a replica."""
    return seconds * costs.fleet.gpus_per_replica / SECONDS_PER_HOUR
