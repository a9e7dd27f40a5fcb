"""Where the bytes of a packed prefix lie in a request's KV blocks. Pure integers.

Owns the order of scales, keys and values behind one another, and how many blocks they need. Refuses
to import torch or vllm, and to know tensors.

vLLM gives a request blocks; in each a KV head has `block_size` slots of one key and one value. Seen
as bytes, the parts of a head in all blocks of a prefix are one string, and a packed prefix is
written into it without regard to slots: for each segment the scales of its values, its keys, its
values, each in the type it is stored in. So fewer slots are taken than there are positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cartridge_proto.manifest import ITEM_BYTES

PACKED_WORKER: Final = "cartridge_engine_ext.packed_worker.PackedCpuWorker"
"""What vLLM's `--worker-cls` must be for packed prefixes, on a CPU."""
PACKED_GPU_WORKER: Final = "cartridge_engine_ext.packed_gpu_worker.PackedGpuWorker"
"""The same on an NVIDIA GPU."""
_ALIGNED_TO: Final = 4
"""Bytes of the widest element: parts begin at a multiple of a row of such elements."""


@dataclass(frozen=True)
class CacheGeometry:
    """What a head has in one block: `block_size` slots of `2 * head_dim` elements of `dtype`."""

    block_size: int
    head_dim: int
    dtype: str
    """Its safetensors name."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one head in a block."""
        return self.block_size * 2 * self.head_dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredSegment:
    """What an artifact brings: safetensors names of its dtypes, and whether values have scales."""

    num_tokens: int
    offset: int
    key_dtype: str
    value_dtype: str
    has_scales: bool


@dataclass(frozen=True)
class PackedSegment:
    """One segment's place: byte offsets in a head's string. `scales_at` is `None` without scales.

    Keys are [num_tokens, head_dim] of `key_dtype`, values of `value_dtype`, scales [head_dim]
    float32.
    """

    num_tokens: int
    offset: int
    key_dtype: str
    value_dtype: str
    scales_at: int | None
    keys_at: int
    values_at: int


@dataclass(frozen=True)
class PackedPrefix:
    """A prefix of `num_positions` positions in the first `num_blocks` blocks of a request."""

    num_positions: int
    num_blocks: int
    block_size: int
    segments: tuple[PackedSegment, ...]

    @property
    def num_slots(self) -> int:
        """Slots of its blocks, all of them."""
        return self.num_blocks * self.block_size


def packed_prefix(segments: Sequence[StoredSegment], cache: CacheGeometry) -> PackedPrefix | None:
    """The layout of a prefix; `None` where plain slots take no more blocks.

    Keys and values that are wider than the cache's elements are packed as those are.
    """
    placed, at = [], 0
    step = _ALIGNED_TO * cache.head_dim
    for segment in segments:
        key_dtype = _narrowed(segment.key_dtype, cache.dtype)
        value_dtype = _narrowed(segment.value_dtype, cache.dtype)
        scales_at = None
        if segment.has_scales:
            scales_at, at = at, at + step
        key_bytes = segment.num_tokens * cache.head_dim * ITEM_BYTES[key_dtype]
        value_bytes = segment.num_tokens * cache.head_dim * ITEM_BYTES[value_dtype]
        keys_at = at
        values_at = keys_at + _rounded_up(key_bytes, step)
        at = values_at + _rounded_up(value_bytes, step)
        placed.append(
            PackedSegment(
                segment.num_tokens,
                segment.offset,
                key_dtype,
                value_dtype,
                scales_at,
                keys_at,
                values_at,
            )
        )
    num_positions = sum(segment.num_tokens for segment in segments)
    num_blocks = -(-at // cache.block_bytes)
    if num_blocks >= -(-num_positions // cache.block_size):
        return None
    return PackedPrefix(num_positions, num_blocks, cache.block_size, tuple(placed))


def _narrowed(dtype: str, cache_dtype: str) -> str:
    return cache_dtype if ITEM_BYTES[dtype] > ITEM_BYTES[cache_dtype] else dtype


@dataclass(frozen=True)
class BlockSpan:
    """Bytes [begin, end) of a part are bytes [at, at + end - begin) of a block of the prefix."""

    block: int
    at: int
    begin: int
    end: int


def block_spans(at: int, num_bytes: int, block_bytes: int, first_block: int) -> list[BlockSpan]:
    """How a part of `num_bytes` at byte `at` lies in blocks, from `first_block` on."""
    spans = []
    for block in range(max(at // block_bytes, first_block), -(-(at + num_bytes) // block_bytes)):
        begin = max(block * block_bytes, at)
        end = min((block + 1) * block_bytes, at + num_bytes)
        if begin < end:
            spans.append(BlockSpan(block, begin - block * block_bytes, begin - at, end - at))
    return spans


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
