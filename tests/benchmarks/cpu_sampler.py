"""A gateway that notes its own stack at every few milliseconds of its CPU time.

Owns the counts of stacks and when they are written. Refuses wall time: what samples from outside
counts a process that waits for its core as one that works.
"""

import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from cartridge_router.cli import run

INTERVAL_S = 0.002
"""The kernel rounds it up to its own tick."""


class Sampler:
    """Counts stacks of the main thread; SIGUSR2 writes them to a file and begins anew."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stacks = Counter[str]()

    def start(self) -> None:
        """Sample from now on."""
        signal.signal(signal.SIGPROF, self._note)
        signal.signal(signal.SIGUSR2, self._write)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def _note(self, _: int, frame: FrameType | None) -> None:
        self._stacks[";".join(names_of(frame))] += 1

    def _write(self, _: int, __: FrameType | None) -> None:
        new = self._file.with_suffix(".new")
        new.write_text("".join(f"{stack} {count}\n" for stack, count in self._stacks.items()))
        new.replace(self._file)
        self._stacks.clear()


def names_of(frame: FrameType | None) -> list[str]:
    """Functions of a stack, the outermost first."""
    names = list[str]()
    while frame is not None:
        code = frame.f_code
        names.append(f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-2:])})")
        frame = frame.f_back
    return names[::-1]


def main(arguments: Sequence[str]) -> int:
    """`cartridge-router` with these arguments, after the file for the stacks."""
    file, *rest = arguments
    Sampler(Path(file)).start()
    return run(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
