"""Slot and block arithmetic: every position has one slot, every row one place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_engine_ext.virtual_prefix import (
    context_overrun,
    num_blocks,
    rows_of_range,
    slot_range,
)

block_sizes = st.sampled_from([1, 2, 3, 16, 128])


@given(st.integers(0, 10_000), block_sizes)
def test_blocks_cover_the_tokens_and_no_more(num_tokens: int, block_size: int) -> None:
    """The blocks hold every position, and one block less would not."""
    count = num_blocks(num_tokens, block_size)
    assert count * block_size >= num_tokens > (count - 1) * block_size


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Distinct block ids in any order, a range within them, and the block size."""
    block_size = draw(block_sizes)
    block_ids = draw(st.lists(st.integers(0, 999), min_size=1, max_size=8, unique=True))
    stop = draw(st.integers(0, len(block_ids) * block_size))
    return block_ids, draw(st.integers(0, stop)), stop, block_size


@given(ranges())
def test_each_position_has_one_slot_in_its_block(drawn: tuple[list[int], int, int, int]) -> None:
    """Slots of a range are distinct, in order, and each lies in the block of its position."""
    block_ids, start, stop, block_size = drawn
    slots = slot_range(block_ids, start, stop, block_size)
    assert len(set(slots)) == len(slots) == stop - start
    for position, slot in zip(range(start, stop), slots, strict=True):
        block, place = divmod(slot, block_size)
        assert block_ids.index(block) * block_size + place == position


@given(ranges(), st.data())
def test_two_parts_of_a_range_are_the_whole(
    drawn: tuple[list[int], int, int, int], data: st.DataObject
) -> None:
    """Splitting a range anywhere gives the same slots."""
    block_ids, start, stop, size = drawn
    middle = data.draw(st.integers(start, stop))
    parts = slot_range(block_ids, start, middle, size) + slot_range(block_ids, middle, stop, size)
    assert parts == slot_range(block_ids, start, stop, size)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 9), (9, 9)])
def test_positions_beyond_the_blocks_are_refused(start: int, stop: int) -> None:
    """A range that is not within two blocks of four is an error, never a slot of somebody else."""
    with pytest.raises(ValueError, match="2 blocks of 4"):
        slot_range([7, 3], start, stop, 4)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.data())
def test_rows_cover_a_range_once_and_in_order(lengths: list[int], data: st.DataObject) -> None:
    """Laid behind one another the named rows are exactly the positions of the range."""
    stop = data.draw(st.integers(0, sum(lengths)))
    start = data.draw(st.integers(0, stop))
    everything = [(index, row) for index, length in enumerate(lengths) for row in range(length)]
    named = [
        (part.index, row)
        for part in rows_of_range(lengths, start, stop)
        for row in range(part.begin, part.end)
    ]
    assert named == everything[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 8)])
def test_rows_beyond_the_segments_are_refused(start: int, stop: int) -> None:
    """A range that is not within the segments is an error."""
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        rows_of_range([3, 4], start, stop)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 1000))
def test_a_request_fits_with_one_position_left(
    num_virtual: int, num_live: int, max_model_len: int
) -> None:
    """One position is kept for the first new token; a refusal names the three numbers."""
    overrun = context_overrun(num_virtual, num_live, max_model_len)
    assert (overrun is None) == (num_virtual + num_live + 1 <= max_model_len)
    if overrun is not None:
        numbers = [int(word) for word in overrun.split() if word.isdigit()]
        assert numbers == [num_virtual, num_live, max_model_len]
