"""Plots of an open-loop run as SVG texts.

Owns axes, colours and line styles: those of Okabe and Ito, told apart by style too. Refuses
arithmetic that a table shows (`run_summary`).
"""

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from cartridge_loadtest.open_loop_records import RequestRecord
from cartridge_loadtest.run_summary import PLAIN, WARM_TIERS, Run, tier_of
from cartridge_proto.residency import Tier

TIERS: Final = (*(tier.value for tier in Tier), PLAIN)
COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442")
"""Source: Okabe and Ito, Color Universal Design (2008)."""
STYLES: Final = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
HATCHES: Final = ("", "//", "..", "xx", "--", "\\\\", "++")
NUM_BINS: Final = 20
"""Of the time of a run."""
WIDE: Final = 100.0
"""An axis whose ends are further apart has numbers at powers of ten only."""
BASE: Final[dict[Any, Any]] = {"svg.fonttype": "none", "svg.hashsalt": "cartridge", "font.size": 9}


def plots_of(run: Run) -> dict[str, str]:
    """SVG of each plot by its title."""
    with mpl.rc_context(BASE):
        return {
            "Latencies by tier": _latencies(run),
            "Tiers over time": _tiers_over_time(run),
            "Replica balance": _balance(run),
            "Cost terms of the decisions": _cost_terms(run),
            "Popularity of Cartridges": _popularity(run),
            "Requests over time": _over_time(run),
        }


def _by_tier(records: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
    found = defaultdict[str, list[RequestRecord]](list)
    for record in records:
        found[tier_of(record)].append(record)
    return {tier: found[tier] for tier in (*TIERS, *sorted(set(found) - set(TIERS))) if found[tier]}


def _look(name: str, names: Sequence[str] = TIERS) -> int:
    return names.index(name) % len(COLOURS) if name in names else len(COLOURS) - 1


def _latencies(run: Run) -> str:
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    kinds: tuple[tuple[str, Callable[[RequestRecord], list[float]]], ...] = (
        ("TTFT", lambda each: [] if each.ttft_s is None else [each.ttft_s]),
        ("ITL", lambda each: each.itl_s),
        ("TPOT", lambda each: [] if each.tpot_s is None else [each.tpot_s]),
    )
    tiers = _by_tier(run.complete)
    for axes, (title, values_of) in zip(figure.subplots(1, 3), kinds, strict=True):
        for tier, records in tiers.items():
            values = np.sort([value for each in records for value in values_of(each)])
            if not len(values):
                continue
            shares = np.arange(1, len(values) + 1) / len(values)
            look = _look(tier)
            label = f"{tier} ({len(records)})"
            axes.step(
                values, shares, where="post", color=COLOURS[look], ls=STYLES[look], label=label
            )
        _label(axes, f"{title}, seconds (log)", "share of values at most so long")
        if tiers:
            _log_scale(axes)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    _legend(figure.axes[-1], "tier (answers)")
    return _svg(figure)


def _tiers_over_time(run: Run) -> str:
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    axes = figure.subplots()
    edges = np.linspace(0, run.duration_s, NUM_BINS + 1)
    below = np.zeros(NUM_BINS)
    named = {
        **_by_tier(each for each in run.complete),
        "failed": [each for each in run.records if each.error is not None],
    }
    for tier, records in named.items():
        if not records:
            continue
        counts, _ = np.histogram([each.due_s for each in records], edges)
        look = _look(tier, (*TIERS, "failed"))
        axes.bar(
            *(edges[:-1], counts),
            width=np.diff(edges),
            align="edge",
            bottom=below,
            color=COLOURS[look],
            hatch=HATCHES[look],
            edgecolor="white",
            linewidth=0.5,
            label=tier,
        )
        below += counts
    _label(axes, "due, seconds after the start", "requests")
    _legend(axes, "tier")
    return _svg(figure)


def _balance(run: Run) -> str:
    names = list(run.num_by_replica)
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    axes = figure.subplots()
    below = np.zeros(len(names))
    for tier, records in _by_tier(run.complete).items():
        counts = np.array([sum(each.replica == name for each in records) for name in names], float)
        look = _look(tier)
        axes.bar(
            *(range(len(names)), counts),
            bottom=below,
            color=COLOURS[look],
            hatch=HATCHES[look],
            edgecolor="white",
            linewidth=0.5,
            label=tier,
        )
        below += counts
    if names:
        axes.axhline(float(below.mean()), color="black", ls="--", lw=1, label="mean")
        axes.set_xticks(range(len(names)), names)
    _label(axes, "replica", "complete answers")
    _legend(axes, "tier")
    return _svg(figure)


def _cost_terms(run: Run) -> str:
    figure = Figure(figsize=(10, 3.0), layout="constrained")
    means, against = figure.subplots(1, 2)
    told = [each for each in run.complete if each.terms_s]
    tiers = _by_tier(told)
    terms = sorted({name for each in told for name in each.terms_s})
    left = np.zeros(len(tiers))
    for name in terms:
        values = np.array(
            [fmean(each.terms_s.get(name, 0.0) for each in records) for records in tiers.values()]
        )
        look = _look(name, terms)
        means.barh(
            *(list(tiers), values),
            left=left,
            color=COLOURS[look],
            hatch=HATCHES[terms.index(name) % len(HATCHES)],
            edgecolor="white",
            linewidth=0.5,
            label=name,
        )
        left = left + values
    _label(means, "predicted, mean seconds of each term", "tier")
    _legend(means, "term")
    for tier, records in tiers.items():
        pairs = [(sum(r.terms_s.values()), r.ttft_s) for r in records if r.ttft_s is not None]
        _points(against, pairs, _look(tier), tier)
    if told:
        limit = max((each.ttft_s or 0.0) for each in told)
        against.plot([0, limit], [0, limit], color="black", lw=0.8, ls=":", label="equal")
    _label(against, "predicted, seconds", "TTFT, seconds")
    _legend(against, "tier")
    return _svg(figure)


def _popularity(run: Run) -> str:
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    axes = figure.subplots()
    rows = popularity_rows(run)
    known = [row for row in rows if row["ttft_p50_s"] is not None]
    for look, (label, is_warm) in enumerate(
        (("warm at least every second time", True), ("cold mostly", False))
    ):
        pairs = [
            (row["requests"], row["ttft_p50_s"])
            for row in known
            if (row["warm_ratio"] >= 0.5) is is_warm
        ]
        _points(axes, pairs, look, label)
    if known:
        _log_scale(axes)
    _label(axes, "requests that named the Cartridge (log)", "median TTFT, seconds")
    _legend(axes, "one for each Cartridge or set")
    return _svg(figure)


def popularity_rows(run: Run) -> list[dict[str, Any]]:
    """Each Cartridge or set: requests, share of warm answers, median TTFT; the most asked first."""
    named = defaultdict[str, list[RequestRecord]](list)
    for record in run.records:
        if record.cartridges:
            named["+".join(record.cartridges)].append(record)
    rows = []
    for name, records in named.items():
        complete = [each for each in records if each.error is None and each.tier is not None]
        times = [each.ttft_s for each in complete if each.ttft_s is not None]
        warm = sum(each.tier in WARM_TIERS for each in complete)
        rows.append(
            {
                "cartridges": name,
                "requests": len(records),
                "warm_ratio": warm / len(complete) if complete else None,
                "ttft_p50_s": median(times) if times else None,
            }
        )
    return sorted(rows, key=lambda row: (-row["requests"], row["cartridges"]))


def _over_time(run: Run) -> str:
    figure = Figure(figsize=(10, 3.0), layout="constrained")
    times, late = figure.subplots(1, 2)
    for tier, records in _by_tier(run.complete).items():
        pairs = [(each.due_s, each.ttft_s) for each in records if each.ttft_s is not None]
        _points(times, pairs, _look(tier), tier)
    failed = [(each.due_s, each.total_s) for each in run.records if each.error is not None]
    if failed:
        times.plot(*zip(*failed, strict=True), ls="", marker="x", color="black", label="failed")
    _label(times, "due, seconds after the start", "TTFT, or time until failure, seconds")
    _legend(times, "tier")
    late.plot(
        [each.due_s for each in run.records],
        [each.late_s * 1000 for each in run.records],
        ls="",
        marker=".",
        ms=3,
        color="black",
    )
    _label(late, "due, seconds after the start", "sent late by, milliseconds")
    return _svg(figure)


def _points(axes: Axes, pairs: Sequence[tuple[float, float]], look: int, label: str) -> None:
    if pairs:
        axes.plot(
            *zip(*pairs, strict=True),
            ls="",
            marker="os^Dv<>"[look],
            ms=3.5,
            alpha=0.7,
            color=COLOURS[look],
            label=label,
        )


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _log_scale(axes: Axes) -> None:
    """Logarithmic, with numbers as people write them, and room between them."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    is_wide = low > 0 and high / low > WIDE
    subs = (1.0,) if is_wide else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes, title: str) -> None:
    if axes.get_legend_handles_labels()[0]:
        # Beside the plot: inside it would hide points.
        axes.legend(
            title=title, fontsize=8, title_fontsize=8, loc="upper left", bbox_to_anchor=(1, 1)
        )


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
