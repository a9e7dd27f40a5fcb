"""Segments that attention reads where they lie: in the sealed memory of the dram tier.

Owns the mappings, and moved keys, of segments that live requests use. Refuses to copy anything but
keys that stand at an offset.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from cartridge_engine_ext.artifact_pool import tensor_view
from cartridge_engine_ext.rotary import RotaryEmbedding
from cartridge_engine_ext.sealed_memory import map_memory
from cartridge_engine_ext.stored_segments import InPlacePrefix, Segment, TensorReference
from cartridge_kernels.plan import PagedRows, Representation, SegmentTensors
from cartridge_kernels.plan import Segment as PlanSegment


class InPlaceSegment:
    """One segment, mapped: the same for all requests that name it at the same offset."""

    def __init__(self, segment: Segment, rotary: Sequence[RotaryEmbedding], heads: slice) -> None:
        mapped: dict[tuple[int, int], memoryview] = {}

        def tensor(reference: TensorReference) -> torch.Tensor:
            memory = reference.memory
            key = (memory.descriptor, memory.inode)
            if key not in mapped:
                mapped[key] = memoryview(map_memory(memory))
            place = reference.dtype, reference.shape, reference.begin, reference.end
            return tensor_view(mapped[key], *place)[heads]

        # The same object on all layers: kernels prepare what depends on page ids once for each.
        page = torch.zeros(1, dtype=torch.int64)

        def rows(whole: torch.Tensor) -> PagedRows:
            return PagedRows(whole[None], page)

        self._layers = [
            SegmentTensors(
                rows(rotary[layer].move(tensor(segment.keys[layer]), segment.num_positions)),
                rows(tensor(segment.values[layer])),
                tensor(segment.value_scales[layer]) if segment.value_scales else None,
            )
            for layer in range(len(segment.keys))
        ]
        kind = Representation.K16V8 if segment.value_scales else Representation.FULL
        self.planned = PlanSegment(segment.num_tokens, segment.num_positions, kind)

    def tensors(self, layer: int, memory: torch.Tensor, head_dim: int) -> SegmentTensors:
        """Its keys and values in a layer; no part of that layer's cache."""
        return self._layers[layer]


class InPlaceSegments:
    """Of one worker; used on vLLM's model thread only."""

    def __init__(self, rotary: Sequence[RotaryEmbedding], heads: slice) -> None:
        self._rotary, self._heads = rotary, heads
        self._segments: dict[tuple[str, int], InPlaceSegment] = {}
        self._num_users: Counter[tuple[str, int]] = Counter()

    def acquire(self, prefix: InPlacePrefix) -> None:
        """Map what is not mapped yet; a request begins to use it.

        Raises:
            OSError: the memory of some segment is gone; none is in use by this call then.
        """
        mapped = {
            segment.place: InPlaceSegment(segment, self._rotary, self._heads)
            for segment in prefix.segments
            if segment.place not in self._segments
        }
        self._segments.update(mapped)
        self._num_users.update(segment.place for segment in prefix.segments)

    def release(self, prefix: InPlacePrefix) -> None:
        """A request is over; what no other uses is unmapped."""
        for segment in prefix.segments:
            place = segment.place
            self._num_users[place] -= 1
            if not self._num_users[place]:
                del self._segments[place], self._num_users[place]

    def segment(self, segment: Segment) -> InPlaceSegment:
        """One that is in use."""
        return self._segments[segment.place]

    def __len__(self) -> int:
        return len(self._segments)
