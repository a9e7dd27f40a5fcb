"""The live view of a gateway in a terminal: what the page at `/ui` shows, for who has no browser.

Owns what is drawn, and how often the gateway is asked. Refuses to change anything, and control
characters in what it shows.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cartridge_router.errors import NotDone
from cartridge_router.operator_client import OperatorClient, health_of, plain

ONCE_ROWS: Final = 20
"""Of each table where nothing scrolls."""
PIPE_WIDTH: Final = 150
"""A pipe has no width of its own; the tables want room."""
_ROWS_AROUND: Final = 16
"""Lines of a screen that are headings and frames."""
_MIN_ROWS: Final = 3
_MODE_STYLES: Final = {"exact": "green", "degraded": "yellow", "fallback": "red"}
_TIER_STYLES: Final = {"hbm": "bold green", "dram": "blue", "nvme": "yellow"}


def print_once(client: OperatorClient, console: Console) -> None:
    """Ask, print, done.

    Raises:
        NotDone: the gateway says why, or did not answer.
    """
    console.print(view_of(client.state(), num_rows=ONCE_ROWS))


def watch(
    client: OperatorClient,
    console: Console,
    *,
    interval_s: float,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Show it until Ctrl-C; while the gateway does not answer, what it said last.

    Raises:
        NotDone: it does not answer the first time.
    """
    with contextlib.suppress(KeyboardInterrupt):
        state, answered_at = client.state(), time.strftime("%H:%M:%S")
        problem: str | None = None
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                num_around = _ROWS_AROUND + len(state["replicas"]["data"])
                num_rows = max(_MIN_ROWS, (console.height - num_around) // 2)
                live.update(view_of(state, num_rows=num_rows, problem=problem), refresh=True)
                pause(interval_s)
                try:
                    state, answered_at = client.state(), time.strftime("%H:%M:%S")
                    problem = None
                except NotDone as error:
                    problem = f"stale since {answered_at}: {error}"


def view_of(state: dict[str, Any], *, num_rows: int, problem: str | None = None) -> Group:
    """Everything, `num_rows` Cartridges and decisions at most."""
    return Group(
        _headline(state, problem),
        _replicas(state),
        _cartridges(state, num_rows),
        _decisions(state, num_rows),
    )


def _headline(state: dict[str, Any], problem: str | None) -> Text:
    mode, age_s = state["map"]["mode"], state["map"]["age_s"]
    line = Text("map ")
    line.append(mode, _MODE_STYLES.get(mode, ""))
    line.append(" never read" if age_s is None else f" {_seconds(age_s)} old")
    line.append(f"   in flight {state['totals']['in_flight']}")
    line.append(f"   waiting {state['totals']['queued']}")
    for kind, count in state["totals"]["requests"].items():
        line.append(f"   {kind} {count}")
    line.append(f"   policy {state['policy']}   up {state['uptime_s']:.0f} s")
    if state["is_draining"]:
        line.append("   draining", "yellow")
    if problem is not None:
        line.append_text(Text.assemble("\n", plain(problem), style="red"))
    return line


def _replicas(state: dict[str, Any]) -> Table:
    table = _table("Replicas", state["replicas"]["left_out"])
    for heading in ("replica", "health"):
        table.add_column(heading, overflow="fold")
    table.add_column("in flight", justify="right")
    for heading in ("Cartridges", "held, by fastest tier", "models"):
        table.add_column(heading, overflow="fold")
    for row in state["replicas"]["data"]:
        held = row["used_bytes"]
        table.add_row(
            plain(row["name"]),
            health_of(row) if row["status"] == "present" else Text(row["status"], "yellow"),
            str(row["num_in_flight"]),
            _ability(row),
            Text("not on the map", "dim") if held is None else _held(held),
            plain(", ".join(row["models"])),
        )
    return table


def _ability(row: dict[str, Any]) -> str:
    if row["is_draining"]:
        return "draining"
    return "registered" if row["is_registered"] else "not registered"


def _held(used_bytes: dict[str, int]) -> Text:
    parts = [
        Text.assemble((tier, _TIER_STYLES.get(tier, "")), f" {count / (1 << 30):.1f} GiB")
        for tier, count in used_bytes.items()
        if count
    ]
    return Text("  ").join(parts) if parts else Text("nothing", "dim")


def _cartridges(state: dict[str, Any], num_rows: int) -> Table:
    shown = state["cartridges"]
    rows = shown["data"][:num_rows]
    table = _table("Cartridges", shown["left_out"] + len(shown["data"]) - len(rows))
    table.add_column("Cartridge", overflow="fold")
    table.add_column("tokens", justify="right")
    table.add_column(f"requests in {shown['window_s'] / 60:.0f} min", justify="right")
    table.add_column("where")
    for row in rows:
        where = [
            Text.assemble(plain(replica), " ", (tier, _TIER_STYLES.get(tier, "")))
            for replica, tier in zip(shown["replicas"], row["tiers"], strict=True)
            if tier is not None
        ]
        table.add_row(
            plain(row["alias"]),
            str(row["num_tokens"]),
            str(row["num_requests"]),
            Text("  ").join(where) if where else Text("remote", "dim"),
        )
    return table


def _decisions(state: dict[str, Any], num_rows: int) -> Table:
    every = state["decisions"]["data"]
    rows = every[:num_rows]
    table = _table("Last decisions", len(every) - len(rows))
    for heading in ("time", "status", "Cartridges", "replica", "why", "first byte", "predicted"):
        table.add_column(
            heading, overflow="fold" if heading in {"Cartridges", "why"} else "ellipsis"
        )
    for row in rows:
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(row["at_s"])),
            "…" if row["status"] is None else str(row["status"]),
            plain(" + ".join(row["cartridges"]) or "–"),
            plain(row["replica"] or "–"),
            plain(row["reason"] or row["problem"] or "–"),
            _seconds(row["first_byte_s"]),
            _predicted(row["candidates"]),
        )
    return table


def _predicted(candidates: list[dict[str, Any]]) -> Text:
    """The terms of the chosen replica, and what the next best would have cost."""
    if not candidates:
        return Text("–")
    terms = " + ".join(f"{name} {_seconds(s)}" for name, s in candidates[0]["terms"].items())
    text = Text.assemble((_seconds(candidates[0]["total_s"]), "bold"), " = ", plain(terms))
    if candidates[1:]:
        text.append("; next ").append_text(plain(candidates[1]["replica"]))
        text.append(f" {_seconds(candidates[1]['total_s'])}")
    return text


def _table(title: str, num_left_out: int) -> Table:
    caption = f"{num_left_out} more" if num_left_out else None
    return Table(title=title, title_justify="left", caption=caption, expand=True)


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
