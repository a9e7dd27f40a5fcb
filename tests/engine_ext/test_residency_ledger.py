"""The ledger: one row for each digest, at its fastest tier, told once for each change."""

import pytest

from cartridge_engine_ext import residency_ledger
from cartridge_engine_ext.residency_ledger import ResidencyLedger, ResidencyRow
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.residency import Tier

ONE, OTHER = sha256_digest(b"one"), sha256_digest(b"other")


class RecordedPublication:
    """Keeps what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[Digest, Tier | None, int, bool]] = []

    def put(self, digest: Digest, tier: Tier, size_bytes: int, *, is_pinned: bool = False) -> None:
        """Keep a row."""
        self.told.append((digest, tier, size_bytes, is_pinned))

    def withdraw(self, digest: Digest) -> None:
        """Keep a withdrawal."""
        self.told.append((digest, None, 0, False))


def test_the_fastest_tier_is_told() -> None:
    """A faster tier replaces the row, and when it leaves the slower one is told again."""
    publication = RecordedPublication()
    ledger = ResidencyLedger(publication)
    ledger.enter(ONE, Tier.NVME, 10)
    ledger.enter(ONE, Tier.DRAM, 12)
    ledger.leave(ONE, Tier.DRAM)
    ledger.leave(ONE, Tier.NVME)
    assert publication.told == [
        (ONE, Tier.NVME, 10, False),
        (ONE, Tier.DRAM, 12, False),
        (ONE, Tier.NVME, 10, False),
        (ONE, None, 0, False),
    ]
    assert ledger.rows() == []
    assert ledger.tiers(ONE) == []


def test_a_slower_tier_changes_nothing() -> None:
    """What is in dram already is not told again when the file arrives, nor when it goes."""
    publication = RecordedPublication()
    ledger = ResidencyLedger(publication)
    ledger.enter(ONE, Tier.DRAM, 12)
    ledger.enter(ONE, Tier.NVME, 10)
    assert ledger.tiers(ONE) == [Tier.DRAM, Tier.NVME]
    ledger.leave(ONE, Tier.NVME)
    assert publication.told == [(ONE, Tier.DRAM, 12, False)]


def test_loaded_anew_while_evicted() -> None:
    """The old bytes' leave does not hide the new ones."""
    publication = RecordedPublication()
    ledger = ResidencyLedger(publication)
    ledger.enter(ONE, Tier.DRAM, 12)
    ledger.enter(ONE, Tier.DRAM, 12)
    ledger.leave(ONE, Tier.DRAM)
    assert ledger.rows() == [ResidencyRow(ONE, Tier.DRAM, 12, is_pinned=False)]
    assert publication.told == [(ONE, Tier.DRAM, 12, False)]


def test_leave_of_what_never_came() -> None:
    """It changes nothing and tells nobody."""
    publication = RecordedPublication()
    ledger = ResidencyLedger(publication)
    ledger.leave(ONE, Tier.DRAM)
    ledger.enter(ONE, Tier.NVME, 1)
    ledger.leave(ONE, Tier.DRAM)
    ledger.set_pinned(ONE, Tier.HBM, is_pinned=True)
    assert publication.told == [(ONE, Tier.NVME, 1, False)]


def test_pinned() -> None:
    """A pin is told, and goes with its tier."""
    publication = RecordedPublication()
    ledger = ResidencyLedger(publication)
    ledger.enter(ONE, Tier.DRAM, 5)
    ledger.set_pinned(ONE, Tier.DRAM, is_pinned=True)
    ledger.leave(ONE, Tier.DRAM)
    ledger.enter(ONE, Tier.DRAM, 5)
    assert [told[3] for told in publication.told] == [False, True, False, False]


def test_watching() -> None:
    """A watcher sees what is there, then each change; afterwards it is not kept."""
    ledger = ResidencyLedger()
    ledger.enter(ONE, Tier.DRAM, 1)
    with ledger.watching() as changes:
        ledger.enter(OTHER, Tier.NVME, 2)
        ledger.leave(ONE, Tier.DRAM)
        rows = [changes.get_nowait() for _ in range(3)]
    assert [(row.digest, row.tier) for row in rows if row] == [
        (ONE, Tier.DRAM),
        (OTHER, Tier.NVME),
        (ONE, None),
    ]
    ledger.leave(OTHER, Tier.NVME)
    assert changes.empty()


def test_a_watcher_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watch ends with `None` instead of growing, and others go on."""
    monkeypatch.setattr(residency_ledger, "MAX_UNREAD", 2)
    ledger = ResidencyLedger()
    with ledger.watching() as slow, ledger.watching() as quick:
        for size_bytes in range(4):
            ledger.enter(ONE, Tier.DRAM, size_bytes)
            assert quick.get_nowait() is not None
        ends = [slow.get_nowait() for _ in range(slow.qsize())]
    assert len(ends) == 3
    assert ends[-1] is None
