"""The economics report as a folder: JSON, plots (PNG) and a page that shows them.

Owns what is drawn, in colours that colour-blind people tell apart (Okabe and Ito), with marks that
differ as well. Refuses to weigh anything; draws without a display.
"""

import html
from collections.abc import Callable
from pathlib import Path
from typing import Final

import matplotlib as mpl
import msgspec

from cartridge_loadtest.economics_costs import GIB
from cartridge_loadtest.economics_report import CartridgeRow, Report, table

mpl.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
"""Source: M. Okabe, K. Ito, Color Universal Design (2008)."""
_SIZE_INCHES: Final = (7.0, 4.4)
_DPI: Final = 120
TOP: Final = 50
"""Cartridges on the page; report.json has all."""


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write everything into a folder, made if there is none; returns the files.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "report.json"]
    files[0].write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    for name, (draw, words) in PLOTS.items():
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
        figure.suptitle(f"{words} ({report.workload})", fontsize="medium")
        draw(figure, report)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1])
    files.append(folder / "index.html")
    files[-1].write_text(_page(report), "utf-8")
    return files


def _cumulative(figure: Figure, report: Report) -> None:
    axes = figure.subplots()
    net = 0.0
    sums = [net := net + row.net_usd_if_kept for row in _by_net(report)]
    ranks = range(1, len(sums) + 1)
    axes.plot(ranks, sums, color=BLUE, marker="o", markersize=3, label="the first so many")
    num_kept = report.totals.num_kept
    axes.axvline(num_kept, color=ORANGE, linestyle="--", label=f"kept: {num_kept}")
    _finish(axes, "Cartridges, by net, best first", "cumulative net over the horizon [USD]")


def _by_net(report: Report) -> list[CartridgeRow]:
    """What is kept comes first: the rest would take from the sum."""
    return sorted(report.cartridges, key=lambda row: (row.kept_in is None, -row.net_usd_if_kept))


def _break_even(figure: Figure, report: Report) -> None:
    axes = figure.subplots()
    paying = [row for row in report.cartridges if row.break_even_requests]
    never = [row for row in report.cartridges if row.break_even_requests is None]
    for is_kept, color, marker, label in (
        (True, BLUE, "o", "kept"),
        (False, ORANGE, "^", "sent as text"),
    ):
        rows = [row for row in paying if (row.kept_in is not None) is is_kept]
        axes.scatter(
            [row.num_requests for row in rows],
            [row.break_even_requests or 0.0 for row in rows],
            color=color, marker=marker, s=18, label=f"{label} ({len(rows)})",
        )  # fmt: skip
    values = [
        value for row in paying for value in (row.num_requests, row.break_even_requests or 0.0)
    ]
    values += [row.num_requests for row in never]
    if values:
        low, high = min(values) / 2, max(values) * 2
        axes.plot([low, high], [low, high], color=GREY, linewidth=1, label="break-even = actual")
        axes.scatter(
            [row.num_requests for row in never], [high] * len(never),
            color=GREY, marker="x", s=18, label=f"never, shown on top ({len(never)})",
        )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
    _finish(axes, "requests in the horizon", "requests to break even")


def _tiers(figure: Figure, report: Report) -> None:
    left, right = figure.subplots(1, 2)
    names = [str(row.tier) for row in report.tiers]
    left.bar(names, [row.used_bytes / GIB for row in report.tiers], color=BLUE, label="kept")
    bounded = [row for row in report.tiers if row.room_bytes is not None]
    left.scatter(
        [str(row.tier) for row in bounded], [(row.room_bytes or 0.0) / GIB for row in bounded],
        color=ORANGE, marker="_", s=600, linewidths=2.5, label="room of the fleet",
    )  # fmt: skip
    left.set_yscale("symlog", linthresh=1)
    _finish(left, "tier", "bytes [GiB, log from 1]")
    right.bar(
        names, [row.net_usd for row in report.tiers], color=GREEN, hatch="//", edgecolor="white"
    )  # fmt: skip
    _finish(right, "tier", "net over the horizon [USD]")


def _gpu_price(figure: Figure, report: Report) -> None:
    axes = figure.subplots()
    at = [row.gpu_usd_per_hour for row in report.gpu_prices]
    anew = [row.planned_anew_usd for row in report.gpu_prices]
    axes.plot(at, anew, color=BLUE, marker="o", label="planned anew for the price")
    same = [row.same_plan_usd for row in report.gpu_prices]
    axes.plot(at, same, color=ORANGE, marker="^", linestyle="--", label="the plan of this report")
    today = report.costs.prices.gpu_usd_per_hour
    axes.axvline(today, color=GREY, linestyle=":", label=f"this report: {today:g}")
    _finish(axes, "price of a GPU [USD per hour]", "net over the horizon [USD]")


def _finish(axes: Axes, across: str, up: str) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


PLOTS: Final[dict[str, tuple[Callable[[Figure, Report], None], str]]] = {
    "cumulative-net": (_cumulative, "Cumulative net by rank of the Cartridge"),
    "break-even": (_break_even, "Requests to break even, and requests there are"),
    "tiers": (_tiers, "Bytes kept in each tier, and what they bring"),
    "gpu-price": (_gpu_price, "Net over the price of a GPU-hour"),
}
"""By the name of the file; with the words under it."""


def _page(report: Report) -> str:
    title = html.escape(f"Economics of {report.workload}")
    figures = "\n".join(
        f'<figure><img src="{name}.png" alt="{html.escape(words)}">'
        f"<figcaption>{html.escape(words)}</figcaption></figure>"
        for name, (_, words) in PLOTS.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:sans-serif;margin:2em}}pre{{overflow-x:auto}}img{{max-width:100%}}</style>
</head><body><h1>{title}</h1>
<pre>{html.escape(table(report, TOP))}</pre>
{figures}
<p>All figures: <a href="report.json">report.json</a></p>
</body></html>
"""
