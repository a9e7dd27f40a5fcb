"""Arithmetic of a virtual prefix: positions, blocks and slots. Pure integers.

Owns which slot a position has and which rows of which segment fill a range. Refuses to import
torch, vllm or anything that does I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that cover `num_tokens` positions."""
    return -(-num_tokens // block_size)


def slot_range(block_ids: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """Slots of positions [start, stop): block id times block size plus the place in the block.

    Raises:
        ValueError: the range is not within the blocks.
    """
    if not 0 <= start <= stop <= len(block_ids) * block_size:
        raise ValueError(
            f"positions [{start}, {stop}) are not within {len(block_ids)} blocks of {block_size}"
        )
    return [
        block_ids[position // block_size] * block_size + position % block_size
        for position in range(start, stop)
    ]


@dataclass(frozen=True)
class SegmentRows:
    """Rows [begin, end) of segment `index` of a composition."""

    index: int
    begin: int
    end: int


def rows_of_range(lengths: Sequence[int], start: int, stop: int) -> list[SegmentRows]:
    """Which rows of which segments stand at virtual positions [start, stop), in order.

    Segments lie behind one another in slot order, whatever their rotary offsets are.

    Raises:
        ValueError: the range is not within the segments.
    """
    if not 0 <= start <= stop <= sum(lengths):
        raise ValueError(f"positions [{start}, {stop}) are not within segments of {list(lengths)}")
    rows = []
    segment_start = 0
    for index, length in enumerate(lengths):
        begin, end = max(start - segment_start, 0), min(stop - segment_start, length)
        if begin < end:
            rows.append(SegmentRows(index, begin, end))
        segment_start += length
    return rows


def context_overrun(num_virtual: int, num_live: int, max_model_len: int) -> str | None:
    """Why a request does not fit, with the numbers; `None` when it fits.

    One position must stay free for the first generated token.
    """
    if num_virtual + num_live < max_model_len:
        return None
    return (
        f"{num_virtual} Cartridge tokens and {num_live} prompt tokens leave no room in a context "
        f"of {max_model_len}"
    )
