"""What one replica holds at which tier: the one place that knows, and tells the fleet.

Owns a row for each artifact (tiers nvme and dram) and for each composition whose prefix is whole in
vLLM's own blocks (tier hbm). Refuses to move bytes: tiers say what they hold after it can be used,
and before it is given back.
"""

import contextlib
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cartridge_proto.digest import Digest
from cartridge_proto.residency import TIERS_FASTEST_FIRST, Tier

MAX_UNREAD = 1000
"""Changes kept for a watcher that does not read; then its watch ends, and it starts anew."""


@dataclass(frozen=True)
class ResidencyRow:
    """Fastest tier of one artifact or composition; `tier` is `None` when it is gone."""

    digest: Digest
    tier: Tier | None
    size_bytes: int
    is_pinned: bool


class Publication(Protocol):
    """Where rows go; see `ResidencyPublisher`."""

    def put(self, digest: Digest, tier: Tier, size_bytes: int, *, is_pinned: bool = False) -> None:
        """Note that a row is new or changed."""
        ...

    def withdraw(self, digest: Digest) -> None:
        """Note that a row is gone."""
        ...


class Observer(Protocol):
    """Counts what comes and goes; see `Activity`."""

    def note_entered(self, digest: Digest, tier: Tier, size_bytes: int) -> None:
        """A tier holds a digest."""
        ...

    def note_left(self, digest: Digest, tier: Tier, size_bytes: int) -> None:
        """A tier holds it no more."""
        ...


@dataclass
class _Holding:
    """Who holds one digest. A tier may hold it twice for a moment: loaded anew while evicted."""

    sizes: dict[Tier, int] = field(default_factory=dict)
    num_holders: Counter[Tier] = field(default_factory=Counter)
    pinned: set[Tier] = field(default_factory=set)
    needs: tuple[Digest, ...] = ()
    """Without any of these in dram it is not whole in hbm."""


class ResidencyLedger:
    """Rows of one replica. All methods may be called from any thread and return at once."""

    def __init__(
        self, publication: Publication | None = None, observer: Observer | None = None
    ) -> None:
        self._publication = publication
        self._observer = observer
        self._lock = threading.Lock()
        self._holdings: dict[Digest, _Holding] = {}
        self._needed_by: defaultdict[Digest, set[Digest]] = defaultdict(set)
        self._watchers: list[queue.Queue[ResidencyRow | None]] = []
        self._limits: dict[int, int] = {}

    def enter(self, digest: Digest, tier: Tier, size_bytes: int) -> None:
        """A tier holds a digest, and it can be used there."""
        with self._lock:
            before = self._row(digest)
            holding = self._holdings.setdefault(digest, _Holding())
            holding.sizes[tier] = size_bytes
            holding.num_holders[tier] += 1
            if self._observer is not None and holding.num_holders[tier] == 1:
                self._observer.note_entered(digest, tier, size_bytes)
            self._tell_change(digest, before)

    def enter_hbm(self, composition: Digest, size_bytes: int, needs: Sequence[Digest]) -> None:
        """A prefix is whole in hbm, as long as what it `needs` is in dram.

        Its row goes with the first of these that leaves dram, on the thread that takes it away.
        """
        with self._lock:
            if not all(self._is_in_dram(digest) for digest in needs):
                return
            before = self._row(composition)
            holding = self._holdings.setdefault(composition, _Holding())
            if Tier.HBM not in holding.sizes and self._observer is not None:
                self._observer.note_entered(composition, Tier.HBM, size_bytes)
            holding.sizes[Tier.HBM] = size_bytes
            holding.num_holders[Tier.HBM] = 1
            holding.needs = tuple(needs)
            for digest in needs:
                self._needed_by[digest].add(composition)
            self._tell_change(composition, before)

    def leave(self, digest: Digest, tier: Tier) -> None:
        """A tier is about to give a digest back; what was never entered is no change."""
        with self._lock:
            self._leave(digest, tier)
            if tier is Tier.DRAM and not self._is_in_dram(digest):
                for composition in list(self._needed_by.get(digest, ())):
                    self._leave(composition, Tier.HBM)

    def set_pinned(self, digest: Digest, tier: Tier, *, is_pinned: bool) -> None:
        """A tier keeps a digest until it is unpinned, or no longer does."""
        with self._lock:
            holding = self._holdings.get(digest)
            if holding is None or tier not in holding.sizes:
                return
            before = self._row(digest)
            (holding.pinned.add if is_pinned else holding.pinned.discard)(tier)
            self._tell_change(digest, before)

    def rows(self) -> list[ResidencyRow]:
        """All rows."""
        with self._lock:
            return [self._row(digest) for digest in self._holdings]

    def tiers(self, digest: Digest) -> list[Tier]:
        """Tiers that hold a digest, fastest first."""
        with self._lock:
            holding = self._holdings.get(digest)
            return [tier for tier in TIERS_FASTEST_FIRST if holding and tier in holding.sizes]

    @contextlib.contextmanager
    def watching(self) -> Iterator["queue.Queue[ResidencyRow | None]"]:
        """A queue of all rows, then of each change, in order.

        `None` ends it: the reader was too slow, and has to start anew.
        """
        changes: queue.Queue[ResidencyRow | None] = queue.Queue()
        with self._lock:
            for digest in self._holdings:
                changes.put(self._row(digest))
            # The first rows are no sign of a slow reader.
            self._limits[id(changes)] = len(self._holdings) + MAX_UNREAD
            self._watchers.append(changes)
        try:
            yield changes
        finally:
            with self._lock:
                del self._limits[id(changes)]
                if changes in self._watchers:
                    self._watchers.remove(changes)

    # --- with the lock held ----------------------------------------------------------------------
    def _leave(self, digest: Digest, tier: Tier) -> None:
        holding = self._holdings.get(digest)
        if holding is None or not holding.num_holders[tier]:
            return
        before = self._row(digest)
        holding.num_holders[tier] -= 1
        if not holding.num_holders[tier]:
            size_bytes = holding.sizes.pop(tier)
            del holding.num_holders[tier]
            if self._observer is not None:
                self._observer.note_left(digest, tier, size_bytes)
            holding.pinned.discard(tier)
            if tier is Tier.HBM:
                self._forget_needs(digest, holding)
        if not holding.sizes:
            del self._holdings[digest]
        self._tell_change(digest, before)

    def _forget_needs(self, composition: Digest, holding: _Holding) -> None:
        for digest in holding.needs:
            self._needed_by[digest].discard(composition)
            if not self._needed_by[digest]:
                del self._needed_by[digest]
        holding.needs = ()

    def _is_in_dram(self, digest: Digest) -> bool:
        holding = self._holdings.get(digest)
        return holding is not None and Tier.DRAM in holding.sizes

    def _row(self, digest: Digest) -> ResidencyRow:
        holding = self._holdings.get(digest)
        if holding is None or not holding.sizes:
            return ResidencyRow(digest, None, 0, is_pinned=False)
        tier = min(holding.sizes, key=TIERS_FASTEST_FIRST.index)
        return ResidencyRow(digest, tier, holding.sizes[tier], bool(holding.pinned))

    def _tell_change(self, digest: Digest, before: ResidencyRow) -> None:
        row = self._row(digest)
        if row == before:
            return
        if self._publication is not None:
            if row.tier is None:
                self._publication.withdraw(digest)
            else:
                self._publication.put(digest, row.tier, row.size_bytes, is_pinned=row.is_pinned)
        for watcher in list(self._watchers):
            if watcher.qsize() >= self._limits[id(watcher)]:
                self._watchers.remove(watcher)
                watcher.put(None)
            else:
                watcher.put(row)
