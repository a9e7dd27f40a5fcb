"""Which artifact leaves a full tier first, and whether a prefetch is worth what would leave.

Owns the eviction policies and their names. Refuses I/O, clocks and locks: the tier says what
happened and when, calls under its own lock, and never offers what is used or pinned.
"""

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, Protocol

from cartridge_proto.digest import Digest

PER_LOAD_BYTES: Final = 4 << 20
"""What a load costs before its first byte, in bytes that could be moved in that time."""
MAX_EXPECTED: Final = 4096
"""Artifacts with hints of their next use that are kept; the oldest hints go first."""
MAX_TIMES: Final = 16
"""Hints kept for one artifact: the earliest."""

Rank = tuple[float, ...]


class EvictionPolicy(Protocol):
    """Ranks the artifacts of one tier. Times are `time.monotonic()` seconds."""

    def touch(self, digest: Digest, size_bytes: int) -> None:
        """An artifact came into the tier or was used in it."""

    def forget(self, digest: Digest, *, is_evicted: bool) -> None:
        """An artifact left: to make room (`is_evicted`), or because somebody said so."""

    def expect(self, digest: Digest, at_s: float) -> None:
        """A hint: an artifact, in the tier or not, will be wanted at a time."""

    def rank(self, digest: Digest, now_s: float) -> Rank:
        """Of two artifacts in the tier the one of the lower rank leaves first; ranks differ."""

    def admits(
        self, digest: Digest, size_bytes: int, victims: Sequence[Digest], now_s: float
    ) -> bool:
        """Whether an artifact that nobody asked for yet is worth all of `victims`."""


class _Recency:
    """The order of last uses."""

    def __init__(self) -> None:
        self._num_uses = 0
        self._last: dict[Digest, int] = {}

    def touch(self, digest: Digest) -> None:
        self._num_uses += 1
        self._last[digest] = self._num_uses

    def forget(self, digest: Digest) -> None:
        self._last.pop(digest, None)

    def of(self, digest: Digest) -> int:
        return self._last.get(digest, 0)


class LeastRecentlyUsed:
    """Least recently used first; every prefetch is admitted."""

    def __init__(self) -> None:
        self._recency = _Recency()

    def touch(self, digest: Digest, size_bytes: int) -> None:
        """Note the use."""
        self._recency.touch(digest)

    def forget(self, digest: Digest, *, is_evicted: bool) -> None:
        """Forget its last use."""
        self._recency.forget(digest)

    def expect(self, digest: Digest, at_s: float) -> None:
        """Hints say nothing here."""

    def rank(self, digest: Digest, now_s: float) -> Rank:
        """The last use."""
        return (self._recency.of(digest),)

    def admits(
        self, digest: Digest, size_bytes: int, victims: Sequence[Digest], now_s: float
    ) -> bool:
        """Always."""
        return True


class GreedyDualSizeFrequency:
    """Lowest value first: uses times the cost of a load, per byte, above what was last evicted.

    Priority = L + frequency * cost / size, where L is the priority of the last victim, so that
    what was valuable once ages. The cost is that of moving the bytes and `PER_LOAD_BYTES` more:
    small artifacts are dearer per byte to load again, and stay.

    Source: L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
    Caching Policy", HP Laboratories HPL-98-69 (R.1), 1998, section 3.
    """

    def __init__(self) -> None:
        self._recency = _Recency()
        self._floor = 0.0
        self._frequency: dict[Digest, int] = {}
        self._priority: dict[Digest, float] = {}

    def touch(self, digest: Digest, size_bytes: int) -> None:
        """One use more, valued from now on."""
        self._recency.touch(digest)
        frequency = self._frequency.get(digest, 0) + 1
        self._frequency[digest] = frequency
        self._priority[digest] = self._value(frequency, size_bytes)

    def forget(self, digest: Digest, *, is_evicted: bool) -> None:
        """Forget its uses; an eviction raises the floor for all that come after."""
        priority = self._priority.pop(digest, 0.0)
        self._frequency.pop(digest, None)
        self._recency.forget(digest)
        if is_evicted:
            self._floor = max(self._floor, priority)

    def expect(self, digest: Digest, at_s: float) -> None:
        """Hints say nothing here."""

    def rank(self, digest: Digest, now_s: float) -> Rank:
        """The value, then the last use."""
        return (self._priority.get(digest, 0.0), self._recency.of(digest))

    def admits(
        self, digest: Digest, size_bytes: int, victims: Sequence[Digest], now_s: float
    ) -> bool:
        """Whether one use of it is worth at least the most valuable victim."""
        dearest = max((self._priority.get(victim, 0.0) for victim in victims), default=0.0)
        return self._value(1, size_bytes) >= dearest

    def _value(self, frequency: int, size_bytes: int) -> float:
        return self._floor + frequency * (1 + PER_LOAD_BYTES / max(1, size_bytes))


class NextAccess:
    """What will be used latest goes first, as far as hints tell.

    An artifact without a hint counts as used after all that have one, and those are taken least
    recently used first. A hint whose time has passed is none.

    Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer",
    IBM Systems Journal 5(2), 1966 (the algorithm MIN), over hints instead of the future.
    """

    def __init__(self) -> None:
        self._recency = _Recency()
        self._expected: OrderedDict[Digest, list[float]] = OrderedDict()

    def touch(self, digest: Digest, size_bytes: int) -> None:
        """Note the use; time itself uses up the hints."""
        self._recency.touch(digest)

    def forget(self, digest: Digest, *, is_evicted: bool) -> None:
        """Forget its last use; hints stay, they are about the future."""
        self._recency.forget(digest)

    def expect(self, digest: Digest, at_s: float) -> None:
        """Keep the hint, up to `MAX_TIMES` for each of `MAX_EXPECTED` artifacts."""
        times = self._expected.setdefault(digest, [])
        self._expected.move_to_end(digest)
        bisect.insort(times, at_s)
        del times[MAX_TIMES:]
        if len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)

    def rank(self, digest: Digest, now_s: float) -> Rank:
        """Without a hint before all with one; the later hint first; then the last use."""
        at_s = self._next_s(digest, now_s)
        last = self._recency.of(digest)
        return (0.0, last) if at_s is None else (1.0, -at_s, last)

    def admits(
        self, digest: Digest, size_bytes: int, victims: Sequence[Digest], now_s: float
    ) -> bool:
        """Whether no victim is expected before it."""
        times = [self._next_s(victim, now_s) for victim in victims]
        soonest = min((at_s for at_s in times if at_s is not None), default=None)
        own = self._next_s(digest, now_s)
        return soonest is None or (own is not None and own <= soonest)

    def _next_s(self, digest: Digest, now_s: float) -> float | None:
        times = self._expected.get(digest)
        if times is None:
            return None
        del times[: bisect.bisect_left(times, now_s)]
        if not times:
            del self._expected[digest]
            return None
        return times[0]


class EvictionPolicyName(StrEnum):
    """How settings name them."""

    LRU = "lru"
    GDSF = "gdsf"
    NEXT_ACCESS = "next_access"


EVICTION_POLICIES: Final[dict[EvictionPolicyName, Callable[[], EvictionPolicy]]] = {
    EvictionPolicyName.LRU: LeastRecentlyUsed,
    EvictionPolicyName.GDSF: GreedyDualSizeFrequency,
    EvictionPolicyName.NEXT_ACCESS: NextAccess,
}
"""Setting `eviction_policy` -> what makes it."""
