"""One simulated replica: an engine in fluid time, three tiers, and links to them.

Owns prefill, decode, slots, KV room, loads and evictions, and says what became resident. Refuses
placement, and tokens one by one: decoding advances by a step clock whose rate changes with events.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import Final

from cartridge_loadtest.bounded_tier import BoundedTier
from cartridge_loadtest.event_heap import EventHeap
from cartridge_loadtest.shared_link import SharedLink
from cartridge_loadtest.workloads import FleetRequest
from cartridge_policies.rates import CHUNK_BYTES, PRIORS, ReplicaRates, TierRate
from cartridge_policies.types import ArtifactDemand
from cartridge_proto.digest import Digest
from cartridge_proto.residency import ReplicaId, Tier

_GB: Final = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class EngineProfile:
    """What an engine and its machine can do. Defaults: 8B parameters in bf16 on one H100.

    Source: llm-d-inference-sim, docs/latency-profiles.md (prefill 25-40 ms + 0.15-0.30 ms/token);
    decode reads 128 KiB for each token of context at 3.35 TB/s; links as sold.
    """

    prefill_base_s: float = 0.03
    prefill_s_per_token: float = 0.0002
    prefill_s_per_token2: float = 1e-9
    step_tokens: int = 2048
    """Live tokens that one step takes; decoding requests get one token in each."""
    decode_base_s: float = 0.007
    decode_s_per_request: float = 0.0001
    decode_s_per_context_token: float = 4e-8
    max_num_seqs: int = 256
    kv_tokens: int = 450_000
    dram_bytes: int = 200 * _GB
    nvme_bytes: int = 2_000 * _GB
    tiers: dict[Tier, TierRate] = field(
        default_factory=lambda: {
            Tier.HBM: PRIORS.tiers[Tier.HBM],
            Tier.DRAM: TierRate(0.0005, 20e9),
            Tier.NVME: TierRate(0.002, 5e9),
            Tier.REMOTE: TierRate(0.02, 3e9, 0.001),
        }
    )

    @cached_property
    def rates(self) -> ReplicaRates:
        """What a gateway that has measured everything would predict with."""
        return ReplicaRates(
            prefill_base_s=self.prefill_base_s,
            prefill_s_per_token=self.prefill_s_per_token,
            prefill_s_per_token2=self.prefill_s_per_token2,
            queue_s_per_request=self.decode_s_per_request,
            decode_s_per_context_token=self.decode_s_per_context_token,
            step_tokens=self.step_tokens,
            num_slots=self.max_num_seqs,
            tiers=self.tiers,
        )

    def num_steps(self, num_live_tokens: int) -> int:
        """Of one prefill."""
        return max(1, ceil(num_live_tokens / self.step_tokens))

    def prefill_s(self, num_live_tokens: int, num_virtual_tokens: int) -> float:
        """Of one prefill on an idle engine."""
        return self.rates.prefill_s(num_live_tokens, num_virtual_tokens)

    def decode_s(self, num_decoding: int, context_tokens: int) -> float:
        """What decoding requests add to a step."""
        return (
            num_decoding * self.decode_s_per_request
            + context_tokens * self.decode_s_per_context_token
        )


@dataclass(eq=False, slots=True)
class Visit:
    """One request on one replica, from its coming to its end there."""

    request: FleetRequest
    came_s: float
    first_token: Callable[[], None]
    ended: Callable[[], None]
    failed: Callable[[], None]
    held: dict[Digest, Tier] = field(default_factory=dict)
    """Where each artifact was when it came; what another load was bringing counts as there."""
    num_missing: int = 0
    plain_s: float = 0.0
    """When its first token would have come without Cartridges, in seconds from its coming."""
    is_over: bool = False


Published = Callable[[ReplicaId, Digest, Tier | None], None]
"""Told of each change: the fastest tier that has it ready, or none."""


class ReplicaModel:
    """One replica. `send` it requests; `die` and `come_back` as failures are planned."""

    def __init__(
        self,
        name: ReplicaId,
        profile: EngineProfile,
        clock: EventHeap,
        store_link: SharedLink,
        published: Published,
    ) -> None:
        self.name = name
        self.profile = profile
        self.is_up = True
        self.links = {
            tier: SharedLink(clock, profile.tiers[tier].bytes_per_s)
            for tier in (Tier.DRAM, Tier.NVME, Tier.REMOTE)
        }
        self.num_evicted = 0
        self.prefetched_bytes = 0
        """That were asked for ahead of any request."""
        self.busy_s = 0.0
        """Of prefill."""
        self._clock, self._store_link, self._published = clock, store_link, published
        self._hbm = BoundedTier(profile.kv_tokens)
        self._dram = BoundedTier(profile.dram_bytes)
        self._nvme = BoundedTier(profile.nvme_bytes)
        self._boot = 0
        self._edition = 0
        self._begin_empty()

    def _begin_empty(self) -> None:
        self._boot += 1
        # Never from 0 again: ends that were planned before a death must stay stale.
        self._edition += 1
        self._visits = dict[Visit, None]()
        self._loading = dict[Digest, list[Visit]]()
        self._prefetches = dict[Digest, ArtifactDemand]()
        self._ready = deque[Visit]()
        self._ready_s = 0.0
        self._prefilling: Visit | None = None
        self._prefilled_s = 0.0
        self._live_tokens = 0
        self._context_tokens = 0
        self._steps = 0.0
        self._steps_per_s = 0.0
        self._stepped_s = self._clock.now_s
        self._decoding = list[tuple[float, int, Visit]]()
        self._num_decoded = 0
        for tier in (self._hbm, self._dram, self._nvme):
            tier.clear()
        self._hbm.capacity = self.profile.kv_tokens

    # --- from outside ----------------------------------------------------------------------------
    @property
    def num_visits(self) -> int:
        """Requests that are here."""
        return len(self._visits)

    def tier_of(self, digest: Digest) -> Tier:
        """The fastest that has an artifact."""
        if digest in self._hbm:
            return Tier.HBM
        if digest in self._dram:
            return Tier.DRAM
        return Tier.NVME if digest in self._nvme else Tier.REMOTE

    def send(self, visit: Visit) -> None:
        """A request comes; a dead replica refuses it at once."""
        if not self.is_up:
            visit.is_over = True
            visit.failed()
            return
        request = visit.request
        self._visits[visit] = None
        visit.plain_s = self._plain_s(request)
        for artifact in request.cartridges:
            visit.held[artifact.digest] = self.tier_of(artifact.digest)
        key = request.prefix
        if key is None:
            self._make_ready(visit)
        elif key in self._hbm:
            visit.held = dict.fromkeys(visit.held, Tier.HBM)
            self._hbm.touch(key)
            self._hbm.pin(key)
            self._make_ready(visit)
        else:
            self._load_missing(visit)

    @property
    def dram_bytes(self) -> tuple[int, int]:
        """Capacity, and what is used of it."""
        return int(self._dram.capacity), self._dram.used

    def prefetch(self, artifact: ArtifactDemand) -> None:
        """Bring an artifact to dram once no request waits for a load; nothing if it is there.

        As an engine's loaders do: one that has begun is not stopped by a request that comes.
        """
        digest = artifact.digest
        if not self.is_up or digest in self._dram or digest in self._loading:
            return
        self._prefetches[digest] = artifact
        self._begin_prefetch()

    def evict(self, digest: Digest) -> None:
        """Drop an artifact from dram."""
        if self.is_up and self._dram.drop(digest):
            self._tell({digest})

    def _begin_prefetch(self) -> None:
        while self._prefetches and not self._loading:
            digest = next(iter(self._prefetches))
            artifact = self._prefetches.pop(digest)
            if digest not in self._dram:
                self._loading[digest] = []
                tier = Tier.NVME if digest in self._nvme else Tier.REMOTE
                self.prefetched_bytes += artifact.size_bytes
                self._plan_load(artifact, tier)

    def die(self) -> None:
        """All that is here fails; nothing it held is left."""
        self.is_up = False
        visits = list(self._visits)
        for link in self.links.values():
            link.drop_all()
        self._begin_empty()
        for visit in visits:
            visit.is_over = True
            visit.failed()

    def come_back(self) -> None:
        """Cold."""
        self.is_up = True

    def check(self) -> None:
        """What must hold at any time."""
        problems = [
            name
            for name, is_wrong in (
                ("tokens", min(self._live_tokens, self._context_tokens) < 0),
                ("tiers", min(self._hbm.used, self._dram.used, self._nvme.used) < 0),
                ("dram", self._dram.used > self._dram.capacity),
                ("nvme", self._nvme.used > self._nvme.capacity),
                ("slots", self._num_running > self.profile.max_num_seqs),
                ("idle", not self._visits and (self._live_tokens or self._context_tokens)),
            )
            if is_wrong
        ]
        if problems:
            raise AssertionError(f"{self.name}: {', '.join(problems)}")

    def _plain_s(self, request: FleetRequest) -> float:
        """Until the first token, had it come here without Cartridges."""
        profile = self.profile
        num_tokens = request.num_live_tokens + request.num_virtual_tokens
        in_engine_s = (
            max(0.0, self._prefilled_s - self._clock.now_s) if self._prefilling else 0.0
        )  # fmt: skip
        return (
            in_engine_s
            + self._ready_s
            + profile.prefill_s(num_tokens, 0)
            + profile.num_steps(num_tokens)
            * profile.decode_s(len(self._decoding), self._context_tokens)
        )

    # --- loads -----------------------------------------------------------------------------------
    def _load_missing(self, visit: Visit) -> None:
        # All are asked for before the first can be done.
        visit.num_missing = len(visit.request.cartridges)
        for artifact in visit.request.cartridges:
            waiting = self._loading.get(artifact.digest)
            if waiting is not None:
                waiting.append(visit)
                continue
            self._loading[artifact.digest] = [visit]
            tier = visit.held[artifact.digest]
            if tier is Tier.HBM:
                # Alone in the cache, wanted in a set: its keys move at the cost of a dram read.
                tier = Tier.DRAM
            self._prefetches.pop(artifact.digest, None)
            self._plan_load(artifact, tier)

    def _plan_load(self, artifact: ArtifactDemand, tier: Tier) -> None:
        rate = self.profile.tiers[tier]
        num_chunks = ceil(artifact.size_bytes / CHUNK_BYTES)
        delay_s = rate.latency_s + num_chunks * rate.s_per_chunk
        self._clock.after(delay_s, self._begin_load, self._boot, artifact, tier)

    def _begin_load(self, boot: int, artifact: ArtifactDemand, tier: Tier) -> None:
        if boot != self._boot:
            return
        links = [self.links[tier]]
        if tier is Tier.REMOTE:
            links.append(self._store_link)
        # Done when every link on the way has let it through.
        left = [len(links)]

        def passed() -> None:
            left[0] -= 1
            if not left[0] and boot == self._boot:
                self._end_load(artifact)

        for link in links:
            link.begin(artifact.size_bytes, passed)

    def _end_load(self, artifact: ArtifactDemand) -> None:
        digest = artifact.digest
        changed = {digest}
        changed.update(self._nvme.put(digest, artifact.size_bytes))
        changed.update(self._dram.put(digest, artifact.size_bytes))
        self._tell(changed)
        for visit in self._loading.pop(digest):
            visit.num_missing -= 1
            if not visit.num_missing:
                self._hold_prefix(visit)
                self._make_ready(visit)
        self._begin_prefetch()

    def _hold_prefix(self, visit: Visit) -> None:
        key = visit.request.prefix
        if key is None:
            return
        changed = {key}
        changed.update(self._hbm.put(key, visit.request.num_virtual_tokens))
        if key not in self._hbm:
            # Larger than what is free just now: it runs all the same, and the next one waits.
            self._hbm.force(key, visit.request.num_virtual_tokens)
        self._hbm.pin(key)
        self._tell(changed)

    def _tell(self, changed: set[Digest]) -> None:
        for digest in sorted(changed):
            tier = self.tier_of(digest)
            if tier is Tier.REMOTE:
                self.num_evicted += 1
            self._published(self.name, digest, None if tier is Tier.REMOTE else tier)

    # --- the engine ------------------------------------------------------------------------------
    @property
    def _num_running(self) -> int:
        return len(self._decoding) + (self._prefilling is not None)

    def _make_ready(self, visit: Visit) -> None:
        self._ready.append(visit)
        request = visit.request
        self._ready_s += self.profile.prefill_s(request.num_live_tokens, request.num_virtual_tokens)
        self._advance()
        self._go_on()

    def _advance(self) -> None:
        now_s = self._clock.now_s
        self._steps += (now_s - self._stepped_s) * self._steps_per_s
        self._stepped_s = now_s

    def _go_on(self) -> None:
        """Begin the next prefill if there is room, set the step clock, plan what ends next."""
        profile = self.profile
        if self._prefilling is None and self._ready and self._has_room(self._ready[0].request):
            self._begin_prefill(self._ready.popleft())
        if self._prefilling is None:
            self._steps_per_s = 0.0
            if self._decoding:
                decode_s = profile.decode_s(len(self._decoding), self._context_tokens)
                self._steps_per_s = 1 / (profile.decode_base_s + decode_s)
        self._edition += 1
        if self._decoding:
            left = max(0.0, self._decoding[0][0] - self._steps)
            self._clock.after(left / self._steps_per_s, self._end_decodes, self._edition)

    def _has_room(self, request: FleetRequest) -> bool:
        if not self._num_running:
            return True
        if self._num_running >= self.profile.max_num_seqs:
            return False
        changed = self._hbm.make_room(request.num_own_tokens)
        if changed:
            self._tell(set(changed))
        return self._hbm.used + request.num_own_tokens <= self._hbm.capacity

    def _begin_prefill(self, visit: Visit) -> None:
        request, profile = visit.request, self.profile
        alone_s = profile.prefill_s(request.num_live_tokens, request.num_virtual_tokens)
        self._ready_s = self._ready_s - alone_s if self._ready else 0.0
        num_steps = profile.num_steps(request.num_live_tokens)
        took_s = alone_s + num_steps * profile.decode_s(len(self._decoding), self._context_tokens)
        self._prefilling = visit
        self._prefilled_s = self._clock.now_s + took_s
        self._steps_per_s = num_steps / took_s
        self.busy_s += took_s
        self._take_tokens(request.num_own_tokens)
        self._clock.after(took_s, self._end_prefill, self._boot)

    def _take_tokens(self, num_tokens: int) -> None:
        self._live_tokens += num_tokens
        self._hbm.capacity = self.profile.kv_tokens - self._live_tokens

    def _end_prefill(self, boot: int) -> None:
        if boot != self._boot or self._prefilling is None:
            return
        self._advance()
        visit, self._prefilling = self._prefilling, None
        request = visit.request
        self._context_tokens += request.num_context_tokens
        self._num_decoded += 1
        end = self._steps + max(0, request.num_output_tokens - 1)
        heapq.heappush(self._decoding, (end, self._num_decoded, visit))
        visit.first_token()
        self._pop_ended(only_first=False)
        self._go_on()

    def _end_decodes(self, edition: int) -> None:
        if edition != self._edition:
            return
        self._advance()
        self._pop_ended(only_first=True)
        self._go_on()

    def _pop_ended(self, *, only_first: bool) -> None:
        """End those whose last token has come; the first one has, if it was planned for now."""
        reached = self._steps
        if only_first:
            reached = max(reached, self._decoding[0][0])
        while self._decoding and self._decoding[0][0] <= reached + 1e-9:
            self._end(heapq.heappop(self._decoding)[2])

    def _end(self, visit: Visit) -> None:
        request = visit.request
        self._context_tokens -= request.num_context_tokens
        self._take_tokens(-request.num_own_tokens)
        if request.prefix is not None:
            self._hbm.unpin(request.prefix)
        del self._visits[visit]
        visit.is_over = True
        visit.ended()
