"""Simulated time: what happens next, in one order for one seed.

Owns the clock and the heap of events. Refuses wall clocks; events of one instant happen in the
order in which they were planned.
"""

import heapq
from collections.abc import Callable
from typing import Any


class EventHeap:
    """A clock that jumps from event to event."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_planned = 0

    def after(self, delay_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        """Plan an event; there is no way to take it back, so its owner must know a stale one."""
        self.at(self.now_s + delay_s, happen, *arguments)

    def at(self, time_s: float, happen: Callable[..., None], *arguments: Any) -> None:
        """The same by the clock; what would lie in the past happens now."""
        self._num_planned += 1
        heapq.heappush(
            self._events, (max(time_s, self.now_s), self._num_planned, happen, arguments)
        )

    def run(self) -> None:
        """Let everything happen."""
        events = self._events
        while events:
            self.now_s, _, happen, arguments = heapq.heappop(events)
            self.num_events += 1
            happen(*arguments)
