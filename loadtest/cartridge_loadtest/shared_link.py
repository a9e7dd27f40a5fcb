"""A link that gives each of its transfers an equal share.

Owns processor sharing in O(log n) for each transfer. Refuses to know what is transferred.
"""

import heapq
from collections.abc import Callable

from cartridge_loadtest.event_heap import EventHeap


class SharedLink:
    """Transfers begin when they are asked for; each of n gets 1/n of the bandwidth.

    `_served` is what a transfer that was there from the beginning would have got: one that begins
    at s and needs b bytes ends when it reaches s + b, however many come and go meanwhile.
    """

    def __init__(self, clock: EventHeap, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.num_bytes = 0
        """That were asked for, ever."""
        self._clock = clock
        self._served = 0.0
        self._served_s = 0.0
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._num_begun = 0
        self._edition = 0

    @property
    def num_transfers(self) -> int:
        """That share it now."""
        return len(self._ends)

    def begin(self, size_bytes: int, done: Callable[[], None]) -> None:
        """`done` is called when the last byte has come."""
        self._advance()
        self._num_begun += 1
        self.num_bytes += size_bytes
        heapq.heappush(self._ends, (self._served + size_bytes, self._num_begun, done))
        self._plan()

    def drop_all(self) -> None:
        """Nobody waits any more: the machine behind it is gone."""
        self._advance()
        self._ends.clear()
        self._edition += 1

    def _advance(self) -> None:
        now_s = self._clock.now_s
        if self._ends:
            self._served += (now_s - self._served_s) * self.bytes_per_s / len(self._ends)
        self._served_s = now_s

    def _plan(self) -> None:
        self._edition += 1
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._served)
            delay_s = left * len(self._ends) / self.bytes_per_s
            self._clock.after(delay_s, self._end, self._edition)

    def _end(self, edition: int) -> None:
        if edition != self._edition:
            return
        self._advance()
        # The one that was planned for is done, whatever rounding says; so are its equals.
        reached = max(self._served, self._ends[0][0])
        done = list[Callable[[], None]]()
        while self._ends and self._ends[0][0] <= reached * (1 + 1e-12):
            done.append(heapq.heappop(self._ends)[2])
        self._plan()
        for each in done:
            each()
