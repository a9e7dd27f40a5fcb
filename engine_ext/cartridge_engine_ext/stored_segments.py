"""Segments as they lie in sealed memory: what one process of an engine tells another of them.

Owns the small frozen references. Refuses tensors: who reads them maps the memory.
"""

from dataclasses import dataclass

from cartridge_engine_ext.sealed_memory import MemoryReference


@dataclass(frozen=True)
class TensorReference:
    """One tensor inside sealed memory; bytes [begin, end), safetensors dtype name."""

    memory: MemoryReference
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Segment:
    """One artifact of a composition: keys and values by layer, [num_kv_heads, num_tokens, dim].

    `num_positions` is how far its keys move from where they were stored. `value_scales` are there
    if the values are quantised: [num_kv_heads] or [num_kv_heads, dim], by layer. Latents are keys,
    without values.
    """

    digest: str
    num_tokens: int
    num_positions: int
    keys: tuple[TensorReference, ...]
    values: tuple[TensorReference, ...]
    value_scales: tuple[TensorReference, ...] = ()

    @property
    def place(self) -> tuple[str, int]:
        """What tells it from others: bytes, and where they stand. Cheap to compare."""
        return self.digest, self.num_positions


@dataclass(frozen=True)
class InPlacePrefix:
    """A prefix that is read where it lies, in no block of vLLM's."""

    segments: tuple[Segment, ...]

    @property
    def num_positions(self) -> int:
        """Of all segments."""
        return sum(segment.num_tokens for segment in self.segments)
