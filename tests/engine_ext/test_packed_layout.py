"""Where packed bytes lie: nothing overlaps, everything is aligned, and fewer blocks are taken."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_engine_ext.packed_layout import (
    BlockSpan,
    CacheGeometry,
    PackedSegment,
    StoredSegment,
    block_spans,
    packed_prefix,
)
from cartridge_proto.manifest import ITEM_BYTES

F32 = CacheGeometry(block_size=32, head_dim=64, dtype="F32")
BF16 = CacheGeometry(block_size=16, head_dim=128, dtype="BF16")

segments = st.builds(
    lambda num_tokens, key, value: StoredSegment(num_tokens, 0, key, value, value == "F8_E4M3"),
    st.integers(1, 700),
    st.sampled_from(["F32", "BF16", "F16"]),
    st.sampled_from(["F32", "BF16", "F16", "F8_E4M3"]),
)


def parts_of(segment: PackedSegment, head_dim: int) -> list[tuple[int, int, int]]:
    """(begin, end, bytes of a row) of the parts of a segment."""
    key_row = head_dim * ITEM_BYTES[segment.key_dtype]
    value_row = head_dim * ITEM_BYTES[segment.value_dtype]
    found = [
        (segment.keys_at, segment.keys_at + segment.num_tokens * key_row, key_row),
        (segment.values_at, segment.values_at + segment.num_tokens * value_row, value_row),
    ]
    if segment.scales_at is not None:
        found.append((segment.scales_at, segment.scales_at + 4 * head_dim, 4 * head_dim))
    return sorted(found)


@given(st.lists(segments, min_size=1, max_size=6), st.sampled_from([F32, BF16]))
def test_parts_lie_apart_and_rows_within_blocks(
    stored: list[StoredSegment], cache: CacheGeometry
) -> None:
    """No two parts overlap, all lie in the blocks, and no row is cut by a block's edge."""
    prefix = packed_prefix(stored, cache)
    plain_blocks = -(-sum(segment.num_tokens for segment in stored) // cache.block_size)
    if prefix is None:
        return
    assert prefix.num_blocks < plain_blocks
    assert prefix.num_positions == sum(segment.num_tokens for segment in stored)
    parts = [part for segment in prefix.segments for part in parts_of(segment, cache.head_dim)]
    assert all(one[1] <= other[0] for one, other in pairwise(parts))
    assert parts[0][0] == 0
    assert parts[-1][1] <= prefix.num_blocks * cache.block_bytes
    assert parts[-1][1] > (prefix.num_blocks - 1) * cache.block_bytes
    assert all(begin % row == 0 and cache.block_bytes % row == 0 for begin, _, row in parts)


@pytest.mark.parametrize("num_tokens", [1024, 4096, 100_000])
def test_k16v8_takes_three_quarters_of_bf16(num_tokens: int) -> None:
    """In a cache of bfloat16: 75 % of its slots, but for scales and the last block."""
    prefix = packed_prefix([StoredSegment(num_tokens, 0, "BF16", "F8_E4M3", True)], BF16)
    assert prefix is not None
    exact = num_tokens * 3 / 4
    assert exact <= prefix.num_slots <= exact + 2 * BF16.block_size


def test_what_saves_nothing_is_left_plain() -> None:
    """Numbers as wide as the cache's, or too few of small ones, take plain slots."""
    assert packed_prefix([StoredSegment(500, 0, "F32", "F32", False)], F32) is None
    assert packed_prefix([StoredSegment(500, 0, "BF16", "BF16", False)], BF16) is None
    assert packed_prefix([StoredSegment(20, 0, "BF16", "F8_E4M3", True)], F32) is None


def test_wider_numbers_are_packed_as_the_caches_are() -> None:
    """float32 keys beside 8-bit values become bfloat16 in a cache of bfloat16, as plain ones do."""
    prefix = packed_prefix([StoredSegment(500, 7, "F32", "F8_E4M3", True)], BF16)
    assert prefix is not None
    [segment] = prefix.segments
    assert (segment.key_dtype, segment.value_dtype, segment.offset) == ("BF16", "F8_E4M3", 7)


@given(st.integers(0, 300), st.integers(1, 300), st.integers(1, 64), st.integers(0, 6))
def test_spans_cover_a_part_once(at: int, num_bytes: int, block_bytes: int, first: int) -> None:
    """Every byte from the first block on is in one span, at its place."""
    covered = {}
    for span in block_spans(at, num_bytes, block_bytes, first):
        for byte in range(span.begin, span.end):
            assert byte not in covered
            covered[byte] = span.block * block_bytes + span.at + byte - span.begin
            assert 0 <= span.at + byte - span.begin < block_bytes
    expected = {b: at + b for b in range(num_bytes) if (at + b) // block_bytes >= first}
    assert covered == expected


def test_spans_of_a_part_inside_a_block() -> None:
    """A part that ends where a block does has no empty span behind it."""
    assert block_spans(4, 4, 8, 0) == [BlockSpan(0, 4, 0, 4)]
