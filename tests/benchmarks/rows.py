"""The rows that benchmarks write and print, and their end: misses first.

Owns the shape of `build/bench/*.json`. Refuses to import anything but the standard library, so that
it runs where the project is not installed.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One result; `target` and `ok` are `None` where no figure is wanted."""

    name: str
    value: float
    unit: str
    target: str | None
    ok: bool | None
    against: str


def say(row: Row) -> None:
    """One line."""
    mark = {True: "ok    ", False: "MISSED", None: "      "}[row.ok]
    target = f"  target {row.target}" if row.target else ""
    sys.stdout.write(
        f"{mark} {row.name:<58} {row.value:10.4g} {row.unit:<9}{target}  ({row.against})\n"
    )
    sys.stdout.flush()


def report(rows: Sequence[Row], path: Path) -> int:
    """Write all rows, print them, and say whether a target was missed: 1, else 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    missed = [row for row in rows if row.ok is False]
    for row in [*missed, *(row for row in rows if row not in missed)]:
        say(row)
    return 1 if missed else 0
