"""The census: a prefix is in HBM while all of its blocks are, and pins keep it there."""

import inspect

import pytest

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from cartridge_engine_ext import hbm_census
from cartridge_engine_ext.hbm_census import HbmCensus
from cartridge_engine_ext.residency_ledger import ResidencyLedger
from cartridge_proto.digest import sha256_digest
from cartridge_proto.residency import Tier
from tests.engine_ext.fake_blocks import FakeBlockPool

ONE, OTHER, TAIL = (sha256_digest(name) for name in (b"one", b"other", b"tail"))
HASHES = [b"1", b"2", b"3"]
BLOCK_BYTES = 100


@pytest.fixture
def blocks() -> FakeBlockPool:
    """VLLM's blocks."""
    return FakeBlockPool(num_gpu_blocks=10)


@pytest.fixture
def ledger() -> ResidencyLedger:
    """Where rows are told."""
    return ResidencyLedger()


@pytest.fixture
def census(blocks: FakeBlockPool, ledger: ResidencyLedger) -> HbmCensus:
    """A census whose pins may keep half of the blocks."""
    census = HbmCensus(
        ledger,
        group_ids=[0],
        block_bytes=BLOCK_BYTES,
        pinned_fraction=0.5,
        longest_request_blocks=2,
    )
    census.bind(blocks)
    return census


def in_hbm(ledger: ResidencyLedger) -> dict[str, tuple[int, bool]]:
    """Rows at hbm: bytes, and whether pinned."""
    rows = [row for row in ledger.rows() if row.tier is Tier.HBM]
    return {row.digest: (row.size_bytes, row.is_pinned) for row in rows}


def test_a_prefix_is_whole_when_all_blocks_are_there(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """Told after the last block is cached, with the bytes of the full blocks."""
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES[:2])
    census.update()
    assert in_hbm(ledger) == {}
    blocks.hold(HASHES)
    assert not census.is_whole(ONE, HASHES)
    census.update()
    assert census.is_whole(ONE, HASHES)
    assert in_hbm(ledger) == {ONE: (3 * BLOCK_BYTES, False)}


def test_a_hole_in_front_is_no_whole_prefix(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """The last block alone proves nothing before the prefix was seen whole."""
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES[1:])
    census.update()
    assert in_hbm(ledger) == {}


def test_withdrawn_with_its_last_block(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """VLLM evicts from the end; one step later nobody is told of the prefix any more."""
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES)
    census.update()
    census.leave(ONE)
    census.update()
    assert in_hbm(ledger) == {ONE: (300, False)}  # nobody uses it, and it is still there
    blocks.drop(HASHES[2:])
    census.update()
    assert in_hbm(ledger) == {}
    blocks.hold(HASHES)
    census.update()
    assert in_hbm(ledger) == {}  # forgotten: only a request makes it known again


def test_a_hole_is_found_in_turn(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """A block that went in front of others is noticed within as many steps as there are rows."""
    for composition, hashes in ((ONE, HASHES), (OTHER, [b"x", b"y"])):
        census.enter(composition, hashes, [])
        blocks.hold(hashes)
    census.update()
    blocks.drop([b"x", HASHES[0]])
    census.update()
    census.update()
    assert in_hbm(ledger) == {}


def test_the_tail_must_be_in_dram(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """Positions behind the last full block are loaded by each request: without them no row."""
    census.enter(ONE, HASHES, [TAIL])
    blocks.hold(HASHES)
    census.update()
    assert in_hbm(ledger) == {}
    ledger.enter(TAIL, Tier.DRAM, 7)
    census.update()
    assert in_hbm(ledger) == {ONE: (300, False)}
    ledger.leave(TAIL, Tier.DRAM)
    census.update()
    assert in_hbm(ledger) == {}


def test_a_reset_between_steps_withdraws_rows(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """An idle engine's prefix cache is reset and no step follows; each time anew."""
    for _ in range(2):
        census.enter(ONE, HASHES, [])
        blocks.hold(HASHES)
        census.update()
        assert in_hbm(ledger) == {ONE: (300, False)}
        assert blocks.reset()
        assert in_hbm(ledger) == {}
        assert not census.is_whole(ONE, HASHES)


def test_a_reset_of_vllms_own_pool_withdraws_rows(ledger: ResidencyLedger) -> None:
    """Its pool tells of the reset, and asking it to changes no count of references."""
    pool = BlockPool(num_gpu_blocks=8, enable_caching=True, hash_block_size=16)
    census = HbmCensus(
        ledger, group_ids=[0], block_bytes=100, pinned_fraction=0.5, longest_request_blocks=2
    )
    census.bind(pool)
    held = pool.get_new_blocks(3)
    for block_hash, block in zip(HASHES, held, strict=True):
        pool._insert_block_hash(make_block_hash_with_group_id(block_hash, 0), block, num_tokens=16)
    census.enter(ONE, HASHES, [])
    census.update()
    assert in_hbm(ledger) == {ONE: (300, False)}
    assert [block.ref_cnt for block in held] == [1, 1, 1]
    pool.free_blocks(held[::-1])
    census.leave(ONE)
    census.update()
    assert in_hbm(ledger) == {ONE: (300, False)}
    assert pool.reset_prefix_cache()
    assert in_hbm(ledger) == {}


def test_a_tail_that_leaves_dram_between_steps_takes_the_row_along(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """At once, without a step; when it is back, the next step tells the row again."""
    census.enter(ONE, HASHES, [TAIL])
    blocks.hold(HASHES)
    ledger.enter(TAIL, Tier.DRAM, 7)
    census.update()
    assert in_hbm(ledger) == {ONE: (300, False)}
    ledger.leave(TAIL, Tier.DRAM)
    assert in_hbm(ledger) == {}
    ledger.enter(TAIL, Tier.DRAM, 7)
    census.update()
    assert in_hbm(ledger) == {ONE: (300, False)}


def test_prefixes_without_a_full_block_are_not_listed(
    census: HbmCensus, ledger: ResidencyLedger
) -> None:
    """What no full block holds cannot be shared; with the prefix cache off nothing can."""
    census.enter(ONE, [], [TAIL])
    census.update()
    assert in_hbm(ledger) == {}
    assert not census.is_whole(ONE, HASHES)


def test_the_blocks_of_the_last_request_are_listed(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """Under two names of an adapter a prefix stands in other blocks: each is judged by its own."""
    others = [b"4", b"5", b"6"]
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES)
    census.update()
    assert not census.is_whole(ONE, others)
    census.enter(ONE, others, [])
    census.update()
    assert in_hbm(ledger) == {}  # they are being loaded
    blocks.hold(others)
    census.update()
    assert (census.is_whole(ONE, HASHES), census.is_whole(ONE, others)) == (False, True)
    assert in_hbm(ledger) == {ONE: (300, False)}


def test_pinned_blocks_stay_listed(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """A request with the same prefix in other blocks takes no pin away."""
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES)
    census.update()
    done = census.pin(ONE, "ops")
    census.update()
    assert done.result(0) is None
    census.enter(ONE, [b"4", b"5", b"6"], [])
    census.update()
    assert in_hbm(ledger) == {ONE: (300, True)}
    assert census.is_whole(ONE, HASHES)
    gone = census.unpin(ONE, "ops")
    census.update()
    assert gone.result(0) is None
    assert blocks.freed == HASHES[::-1]


def test_a_pin_keeps_blocks(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """Pinned blocks outlive their request, and are given back from the end when unpinned."""
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES)
    census.update()
    done = census.pin(ONE, "me")
    assert not done.done()  # the scheduler's thread does it
    census.update()
    assert done.result(timeout=0) is None
    assert in_hbm(ledger) == {ONE: (300, True)}
    census.leave(ONE)
    blocks.drop(HASHES)
    census.update()
    assert in_hbm(ledger) == {ONE: (300, True)}
    again = census.pin(ONE, "me")
    unpinned = census.unpin(ONE, "me")
    census.update()
    assert (again.result(timeout=0), unpinned.result(timeout=0)) == (None, None)
    assert blocks.freed == HASHES[::-1]
    assert blocks.references.total() == 0
    assert in_hbm(ledger) == {ONE: (300, False)}


def test_a_pin_lasts_as_long_as_any_owner_holds_it(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """One owner's unpin leaves the other's pin; blocks are referred to once for all of them."""
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES)
    for owner in ("b", "a", "a"):
        census.pin(ONE, owner)
    census.update()
    assert census.pinned_by(ONE) == ("a", "b")
    assert blocks.references.total() == 3
    first, again = census.unpin(ONE, "a"), census.unpin(ONE, "a")
    census.update()
    assert (first.result(timeout=0), again.result(timeout=0)) == (None, "not pinned by a")
    assert in_hbm(ledger) == {ONE: (300, True)}
    assert blocks.references.total() == 3
    census.unpin(ONE, "b")
    census.update()
    assert in_hbm(ledger) == {ONE: (300, False)}
    assert blocks.references.total() == 0
    assert census.pinned_by(ONE) == census.pinned_by(OTHER) == ()


def test_a_wish_is_its_owners(census: HbmCensus, blocks: FakeBlockPool) -> None:
    """An unpin takes back the wish of who asks for it, and no other."""
    for owner in ("a", "b"):
        census.keep(ONE, owner)
    census.unpin(ONE, "a")
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES)
    census.update()
    assert census.pinned_by(ONE) == ("b",)


def test_owners_are_bounded(
    census: HbmCensus, blocks: FakeBlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more is refused; who holds a pin may pin again."""
    monkeypatch.setattr(hbm_census, "MAX_OWNERS", 1)
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES)
    answers = [census.pin(ONE, owner) for owner in ("a", "b", "a")]
    census.update()
    assert [answer.result(timeout=0) for answer in answers] == [
        None,
        "owner: the limit is 1 owners",
        None,
    ]


def test_pins_have_a_budget(census: HbmCensus, blocks: FakeBlockPool) -> None:
    """A pin beyond the budget is refused with the numbers; nothing is referred to for it."""
    for composition, hashes in ((ONE, HASHES), (OTHER, [b"x", b"y", b"z"])):
        census.enter(composition, hashes, [])
        blocks.hold(hashes)
    first, second = census.pin(ONE, "me"), census.pin(OTHER, "me")
    census.update()
    assert first.result(timeout=0) is None
    assert second.result(timeout=0) == (
        "3 blocks; pins hold 3 of the 5 that hbm_pinned_fraction allows"
    )
    assert blocks.references.total() == 3
    census.unpin_all()
    assert blocks.references.total() == 0


@pytest.mark.parametrize("verb", ["pin", "unpin"])
def test_pins_of_what_is_not_there(census: HbmCensus, verb: str) -> None:
    """Neither an unknown prefix nor one without its blocks can be pinned or unpinned."""
    census.enter(ONE, HASHES, [])
    answers = [getattr(census, verb)(composition, "me") for composition in (ONE, OTHER)]
    census.update()
    text = {"pin": "its prefix is not whole in HBM", "unpin": "not pinned by me"}[verb]
    assert [answer.result(timeout=0) for answer in answers] == [text, text]


def test_before_vllm_gave_its_blocks(ledger: ResidencyLedger) -> None:
    """Nothing is whole and nothing can be pinned."""
    census = HbmCensus(
        ledger, group_ids=[0], block_bytes=1, pinned_fraction=0.5, longest_request_blocks=2
    )
    census.enter(ONE, HASHES, [])
    answer = census.pin(ONE, "me")
    census.update()
    assert answer.result(timeout=0) is not None
    assert census.pin_budget_blocks == 0
    assert in_hbm(ledger) == {}


@pytest.mark.parametrize("name", ["get_cached_block", "touch", "free_blocks", "unpin_blocks"])
def test_vllms_pool_has_what_is_used(name: str) -> None:
    """The stand-in's methods take the arguments that vLLM's own take."""
    theirs, ours = (
        list(inspect.signature(getattr(pool, name)).parameters)
        for pool in (BlockPool, FakeBlockPool)
    )
    assert theirs == ours


def test_kept_as_soon_as_it_is_whole(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """A wish is kept until the prefix comes, and taken back by `unpin`."""
    for composition in (ONE, OTHER):
        census.keep(composition, "me")
        census.enter(composition, HASHES, [])
    census.unpin(OTHER, "me")
    census.update()
    blocks.hold(HASHES)
    census.update()
    assert in_hbm(ledger) == {ONE: (300, True), OTHER: (300, False)}
    census.keep(OTHER, "me")
    census.update()
    assert blocks.references.total() == 3  # beyond the budget


def test_a_pin_outlives_the_row(
    census: HbmCensus, blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """While the tail is out of dram the row is gone, and the pin is kept; then both are told."""
    census.enter(ONE, HASHES, [TAIL])
    blocks.hold(HASHES)
    ledger.enter(TAIL, Tier.DRAM, 7)
    census.update()
    census.pin(ONE, "me")
    census.update()
    census.leave(ONE)
    ledger.leave(TAIL, Tier.DRAM)
    census.update()
    assert in_hbm(ledger) == {}
    assert census.num_pinned_blocks == 3
    ledger.enter(TAIL, Tier.DRAM, 7)
    census.update()
    assert in_hbm(ledger) == {ONE: (300, True)}


def test_pins_leave_room_for_the_longest_request(
    ledger: ResidencyLedger, blocks: FakeBlockPool
) -> None:
    """Whatever the fraction is, one request of the longest length fits beside all pins."""
    for longest, budget in ((2, 7), (8, 1), (9, 0), (20, 0)):
        census = HbmCensus(
            ledger,
            group_ids=[0],
            block_bytes=1,
            pinned_fraction=1.0,
            longest_request_blocks=longest,
        )
        census.bind(blocks)
        assert census.pin_budget_blocks == budget


def test_the_oldest_wish_goes(
    census: HbmCensus, blocks: FakeBlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wishes for what never comes do not disable later ones."""
    monkeypatch.setattr(hbm_census, "MAX_WANTED", 1)
    census.keep(OTHER, "me")
    census.keep(ONE, "me")
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES)
    census.update()
    assert census.num_pinned_blocks == 3


def test_with_a_window_the_last_blocks_are_the_prefix(
    blocks: FakeBlockPool, ledger: ResidencyLedger
) -> None:
    """Where every layer has a window, vLLM drops the blocks in front of it, and finds the rest."""
    census = HbmCensus(
        ledger,
        group_ids=[0],
        block_bytes=BLOCK_BYTES,
        pinned_fraction=0.5,
        longest_request_blocks=2,
        window_blocks=2,
    )
    census.bind(blocks)
    census.enter(ONE, HASHES, [])
    blocks.hold(HASHES[2:])
    census.update()
    assert in_hbm(ledger) == {}
    blocks.hold(HASHES[1:])
    census.update()
    assert in_hbm(ledger) == {ONE: (2 * BLOCK_BYTES, False)}
