"""CPU time and peak memory of a process and all its children.

Owns the reading of /proc and of the kernel's CPU clocks. Refuses wall time, which lies on machines
that others use too.
"""

import contextlib
import os
import time
from pathlib import Path

_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_CPU_CLOCK = 2
"""CPUCLOCK_SCHED. Source: linux/posix-timers.h."""


def tree_of(root: int) -> list[int]:
    """A process and its living descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (fields := _stat(int(folder.name))):
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def cpu_s(root: int) -> float:
    """User and system time of all threads of a process and its descendants, dead ones included.

    What /proc/PID/stat shows in ticks of 10 ms, read from the clock behind it in nanoseconds;
    descendants that have ended are in their parent's ticks.
    """
    total_ns = 0
    for process in tree_of(root):
        fields = _stat(process)
        if fields:
            total_ns += (int(fields[13]) + int(fields[14])) * _NS_PER_TICK
            with contextlib.suppress(OSError):  # it has ended by now
                total_ns += time.clock_gettime_ns((~process << 3) | _CPU_CLOCK)
    return total_ns / 1e9


def peak_bytes(root: int) -> int:
    """Sum of the peak resident sizes of a process and its living descendants."""
    return sum(_peak_bytes(process) for process in tree_of(root))


def _peak_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def _stat(process: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on; empty when it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()
