"""Writes segments as packed bytes into the blocks of one layer's KV cache.

Owns the way of tensors into a head's string of bytes (`packed_layout`). Refuses to choose places or
to change a key or a value, but for moving keys along the sequence.
"""

from collections.abc import Callable, Sequence

import torch

from cartridge_engine_ext.artifact_pool import TORCH_DTYPES
from cartridge_engine_ext.packed_layout import PackedPrefix, block_spans

Rows = Callable[[int, int], torch.Tensor]
"""Rows [begin, end) of a part: [num_kv_heads, end - begin, head_dim], in any float dtype."""


class PackedWriter:
    """One layer's blocks of one request.

    Args:
        memory: [num_blocks, num_kv_heads, bytes], uint8; the layer's whole cache.
        block_ids: of the prefix.
        first_block: of these, the first that is to be written.
        chunk_tokens: rows that are taken at a time.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        block_ids: Sequence[int],
        first_block: int,
        chunk_tokens: int,
    ) -> None:
        self._memory = memory
        self._block_ids = block_ids
        self._first_block = first_block
        self._chunk_tokens = chunk_tokens

    def write(self, at: int, num_rows: int, dtype: str, rows: Rows) -> int:
        """Write a part at byte `at` in the type that it is packed in; returns bytes written.

        Raises:
            ValueError: that type has no number for some element.
        """
        written = 0
        for begin in range(0, num_rows, self._chunk_tokens):
            end = min(begin + self._chunk_tokens, num_rows)
            written += self._write_rows(at, begin, _exactly(rows(begin, end), TORCH_DTYPES[dtype]))
        return written

    def _write_rows(self, at: int, begin: int, rows: torch.Tensor) -> int:
        given = rows.contiguous().view(torch.uint8).reshape(rows.shape[0], -1)
        row_bytes = given.shape[1] // rows.shape[1]
        written = 0
        spans = block_spans(
            at + begin * row_bytes, given.shape[1], self._memory.shape[2], self._first_block
        )
        for span in spans:
            piece = given[:, span.begin : span.end].to(self._memory.device)
            self._memory[self._block_ids[span.block], :, span.at : span.at + piece.shape[1]] = piece
            written += piece.numel()
        return written


def _exactly(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if rows.dtype == dtype:
        return rows
    cast = rows.to(dtype)
    if not bool(cast.isfinite().all()):
        raise ValueError(f"{rows.dtype} keys or values do not fit {dtype}")
    return cast


def write_prefix(
    writer: PackedWriter,
    prefix: PackedPrefix,
    keys: Callable[[int], Rows],
    values: Callable[[int], Rows],
    scales: Callable[[int], torch.Tensor],
) -> int:
    """Write all segments of a prefix in one layer; returns bytes written.

    Args:
        writer: of the layer.
        prefix: its layout.
        keys: of segment i, moved to where they belong.
        values: of segment i, as stored.
        scales: of segment i, [num_kv_heads] or [num_kv_heads, head_dim] float32.
    """
    written = 0
    for index, segment in enumerate(prefix.segments):
        count = segment.num_tokens
        written += writer.write(segment.keys_at, count, segment.key_dtype, keys(index))
        written += writer.write(segment.values_at, count, segment.value_dtype, values(index))
        if segment.scales_at is not None:
            scale = scales(index)
            # Keys are as wide, but would be moved to be looked at.
            head_dim = values(index)(0, 1).shape[-1]
            rows = scale.reshape(scale.shape[0], 1, -1).expand(-1, 1, head_dim)
            written += writer.write(segment.scales_at, 1, "F32", lambda *_, rows=rows: rows)
    return written
