"""The economics report as a document, and as a table for people.

Owns names, units and layout of what is told. Refuses to weigh anything (`economics.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from cartridge_loadtest.economics import (
    Economics,
    Verdict,
    assess,
    at_gpu_prices,
    num_gpu_hours,
)
from cartridge_loadtest.economics_costs import (
    GIB,
    SECONDS_PER_DAY,
    SECONDS_PER_HOUR,
    BuildKind,
    Costs,
)
from cartridge_loadtest.workloads import Workload
from cartridge_proto.digest import Digest
from cartridge_proto.residency import TIERS_FASTEST_FIRST, Tier

TERMS: Final = ("build_usd", "store_usd", "residency_usd", "fill_usd", "load_usd")
"""What is taken from `saved_usd`; the rest is `net_usd`."""
NOT_KEPT: Final = "text"


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the document's parts."""


class InTier(_Part, frozen=True, kw_only=True):
    """One Cartridge, if it were kept in a tier."""

    tier: Tier
    net_usd: float
    break_even_requests: float | None
    """`None` = never: a load costs as much as a use saves."""
    load_s: float
    room_bytes: int


class CartridgeRow(_Part, frozen=True, kw_only=True):
    """One Cartridge over the horizon. Terms are those of `tier`."""

    name: str
    digest: str
    kept_in: Tier | None
    """`None`: send the document as text."""
    tier: Tier
    """`kept_in`, or where keeping it would lose least."""
    num_requests: float
    """In the horizon."""
    num_requests_in_trace: int
    source_tokens: int
    num_tokens: int
    stored_bytes: int
    saved_s_per_request: float
    load_s_per_request: float
    saved_usd: float
    saved_usd_per_request: float
    build_usd: float
    store_usd: float
    residency_usd: float
    fill_usd: float
    load_usd: float
    net_usd_if_kept: float
    """`saved_usd` less the five terms before this."""
    net_usd: float
    """The same, or 0 where it is not kept."""
    break_even_requests: float | None
    tiers: list[InTier]


class TierRow(_Part, frozen=True, kw_only=True):
    """What the plan keeps in a tier. The store has a copy of all that is kept."""

    tier: Tier
    num_cartridges: int
    used_bytes: int
    room_bytes: float | None
    """Of the fleet; `None` = without bound."""
    net_usd: float


class Totals(_Part, frozen=True, kw_only=True):
    """Sums over what is kept."""

    num_cartridges: int
    """Of the workload."""
    num_kept: int
    num_requests: float
    """In the horizon, with Cartridges or without."""
    plain_gpu_hours: float
    """For all requests as plain text: prefill, and decoding as far as it reads the context."""
    saved_gpu_hours: float
    """Of these; loads and builds not taken off."""
    saved_usd: float
    build_usd: float
    store_usd: float
    residency_usd: float
    fill_usd: float
    load_usd: float
    net_usd: float
    net_usd_with_all_room: float
    """Of the plan that would be made if every tier had room for everything."""


class AtPrice(_Part, frozen=True, kw_only=True):
    """Net at another price of GPUs."""

    gpu_usd_per_hour: float
    planned_anew_usd: float
    same_plan_usd: float


class Report(_Part, frozen=True, kw_only=True):
    """All of it; `cartridges` by net, best first."""

    workload: str
    about: str
    num_requests_in_trace: int
    trace_s: float
    horizon_s: float
    totals: Totals
    tiers: list[TierRow]
    cartridges: list[CartridgeRow]
    gpu_prices: list[AtPrice]
    costs: Costs


def document(workload: Workload, costs: Costs, names: Mapping[Digest, str]) -> Report:
    """Weigh a workload and tell all. `names` by digest; what has none is called by its digest.

    Raises:
        NothingToWeigh: the workload has no requests, or no time.
    """
    found = assess(workload, costs)
    roomy = assess(workload, costs, has_all_room=True)
    rows = [_row(verdict, names) for verdict in found.verdicts]
    kept = [row for row in rows if row.kept_in is not None]
    saved_s = found.scale * sum(verdict.usage.saved_s for verdict in found.kept)
    sums = {term: sum(getattr(row, term) for row in kept) for term in (*TERMS, "saved_usd")}
    return Report(
        workload=found.workload,
        about=found.about,
        num_requests_in_trace=found.num_requests,
        trace_s=found.trace_s,
        horizon_s=found.horizon_s,
        totals=Totals(
            num_cartridges=len(rows),
            num_kept=len(kept),
            num_requests=found.num_requests * found.scale,
            plain_gpu_hours=num_gpu_hours(found.plain_s, costs),
            saved_gpu_hours=num_gpu_hours(saved_s, costs),
            net_usd=found.net_usd,
            net_usd_with_all_room=roomy.net_usd,
            **sums,
        ),
        tiers=[_tier_row(tier, found, costs, kept) for tier in TIERS_FASTEST_FIRST],
        cartridges=rows,
        gpu_prices=[
            AtPrice(
                gpu_usd_per_hour=each.gpu_usd_per_hour,
                planned_anew_usd=each.planned_anew_usd,
                same_plan_usd=each.same_plan_usd,
            )
            for each in at_gpu_prices(workload, costs, found)
        ],
        costs=costs,
    )


def _row(verdict: Verdict, names: Mapping[Digest, str]) -> CartridgeRow:
    usage, shown = verdict.usage, verdict.shown
    return CartridgeRow(
        name=names.get(usage.digest, usage.digest[:19]),
        digest=usage.digest,
        kept_in=verdict.kept_in,
        tier=shown.tier,
        num_requests=shown.num_uses,
        num_requests_in_trace=usage.num_uses,
        source_tokens=usage.source_tokens,
        num_tokens=usage.num_tokens,
        stored_bytes=usage.stored_bytes,
        saved_s_per_request=usage.saved_s / usage.num_uses,
        load_s_per_request=shown.load_s,
        saved_usd=shown.saved_usd,
        saved_usd_per_request=shown.saved_usd / shown.num_uses,
        build_usd=shown.build_usd,
        store_usd=shown.store_usd,
        residency_usd=shown.residency_usd,
        fill_usd=shown.fill_usd,
        load_usd=shown.load_usd,
        net_usd_if_kept=shown.net_usd,
        net_usd=verdict.net_usd,
        break_even_requests=shown.break_even_uses,
        tiers=[
            InTier(
                tier=tier,
                net_usd=keeping.net_usd,
                break_even_requests=keeping.break_even_uses,
                load_s=keeping.load_s,
                room_bytes=keeping.room_bytes,
            )
            for tier, keeping in verdict.keepings.items()
        ],
    )


def _tier_row(tier: Tier, found: Economics, costs: Costs, kept: Sequence[CartridgeRow]) -> TierRow:
    here = [row for row in kept if row.kept_in is tier]
    room_bytes = costs.room_bytes_per_replica.get(tier)
    return TierRow(
        tier=tier,
        num_cartridges=len(here),
        used_bytes=found.room_bytes(tier),
        room_bytes=None if room_bytes is None else room_bytes * costs.fleet.num_replicas,
        net_usd=sum(row.net_usd for row in here),
    )


# --- for people ----------------------------------------------------------------------------------
def table(report: Report, top: int) -> str:
    """The best `top` Cartridges, tiers, totals."""
    totals, costs = report.totals, report.costs
    build = costs.build
    made = f"{costs.model.stored_bytes_per_token / 1024:g} KiB a token, built by one prefill"
    if build.kind is BuildKind.TRAINED:
        made = (
            f"{costs.model.stored_bytes_per_token / 1024:g} KiB a token, trained in "
            f"{build.gpu_hours_per_cartridge:g} GPU-hours each"
        )
    if build.source_tokens_per_token != 1:
        made += f", {build.source_tokens_per_token:g} tokens of text in one"
    lines = [
        f"{report.workload}: {report.about}",
        f"{report.num_requests_in_trace:,} requests in {span(report.trace_s)}, weighed over "
        f"{span(report.horizon_s)}; {costs.fleet.num_replicas} replicas of "
        f"{costs.fleet.gpus_per_replica} GPU at {figure(costs.prices.gpu_usd_per_hour)} USD "
        "an hour",
        made,
        "",
    ]
    if not report.cartridges:
        lines.append("No document comes in two requests: there is nothing to keep.")
        return "\n".join(lines)
    lines += _aligned([_HEAD, *(_cells(row) for row in report.cartridges[:top])])
    if (num_more := len(report.cartridges) - top) > 0:
        lines.append(f"… and {num_more:,} more (--top, --json)")
    lines += ["", *_aligned([_TIER_HEAD, *(_tier_cells(row) for row in report.tiers)]), ""]
    spent = " - ".join(
        f"{term.removesuffix('_usd')} {figure(getattr(totals, term))}" for term in TERMS
    )
    saved_share = totals.saved_gpu_hours / totals.plain_gpu_hours if totals.plain_gpu_hours else 0.0
    lines += [
        f"Keep {totals.num_kept:,} of {totals.num_cartridges:,}: net {figure(totals.net_usd)} USD "
        f"= saved {figure(totals.saved_usd)} - {spent}",
        f"GPU-hours saved before loads and builds: {figure(totals.saved_gpu_hours)} of "
        f"{figure(totals.plain_gpu_hours)} as plain text ({saved_share:.0%})",
        f"With room for everything in every tier: net {figure(totals.net_usd_with_all_room)} USD",
    ]
    return "\n".join(lines)


_HEAD: Final = (
    "Cartridge", "keep in", "requests", "break-even", "tokens", "MiB", "saved s/req", "load s/req",
    "saved USD", "build", "store", "resident", "fill", "load", "net USD",
)  # fmt: skip
_TIER_HEAD: Final = ("tier", "Cartridges", "GiB", "of GiB", "net USD")


def _cells(row: CartridgeRow) -> tuple[str, ...]:
    return (
        row.name,
        row.kept_in or f"{NOT_KEPT} ({row.tier})",
        f"{row.num_requests:,.0f}",
        "never" if row.break_even_requests is None else f"{row.break_even_requests:,.1f}",
        f"{row.num_tokens:,}",
        f"{row.stored_bytes / (1 << 20):,.0f}",
        f"{row.saved_s_per_request:.3f}",
        f"{row.load_s_per_request:.3f}",
        figure(row.saved_usd),
        figure(row.build_usd),
        figure(row.store_usd),
        figure(row.residency_usd),
        figure(row.fill_usd),
        figure(row.load_usd),
        figure(row.net_usd_if_kept),
    )


def _tier_cells(row: TierRow) -> tuple[str, ...]:
    return (
        row.tier,
        f"{row.num_cartridges:,}",
        f"{row.used_bytes / GIB:,.1f}",
        "any" if row.room_bytes is None else f"{row.room_bytes / GIB:,.1f}",
        figure(row.net_usd),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """First two columns to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides: list[Callable[[str, int], str]] = [str.ljust, str.ljust, *[str.rjust] * len(widths)]
    return [
        "  ".join(
            side(cell, width) for cell, width, side in zip(row, widths, sides, strict=False)
        ).rstrip()
        for row in rows
    ]


def figure(value: float) -> str:
    """Hundredths from one on (dollars, hours), three figures below."""
    if value == 0:
        return "0"
    return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.3g}"


def span(seconds: float) -> str:
    """In the unit that people would choose."""
    if seconds < 2 * SECONDS_PER_HOUR:
        return f"{seconds:,.0f} s"
    if seconds < 2 * SECONDS_PER_DAY:
        return f"{seconds / SECONDS_PER_HOUR:,.1f} hours"
    return f"{seconds / SECONDS_PER_DAY:,.1f} days"
