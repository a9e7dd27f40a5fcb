"""Keys of artifacts moved along the sequence, and those that were moved before.

Owns the memory of moved keys: by artifact, layer and number of positions, least recently used first
out. Refuses to keep an artifact that would not fit whole.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from cartridge_engine_ext.rotary import RotaryEmbedding


class MovedKeys:
    """One for each worker; used on its writing thread only.

    Args:
        rotary: by layer.
        max_bytes: bound of what is kept; 0 keeps nothing.
    """

    def __init__(self, rotary: Sequence[RotaryEmbedding], max_bytes: int) -> None:
        self._rotary = rotary
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, int, int], torch.Tensor] = OrderedDict()
        self._size_bytes = 0

    def rows(
        self, digest: str, layer: int, num_positions: int, keys: torch.Tensor, begin: int, end: int
    ) -> torch.Tensor:
        """Rows [begin, end) of an artifact's keys, as if they stood `num_positions` further along.

        `keys` are those of the layer, [num_kv_heads, num_tokens, head_dim]; the result is in their
        dtype and must not be written to.
        """
        if num_positions == 0:
            return keys[:, begin:end]
        kept = self._kept.get((digest, layer, num_positions))
        if kept is None:
            if keys.nbytes * len(self._rotary) > self._max_bytes:
                return self._rotary[layer].move(keys[:, begin:end], num_positions)
            kept = self._rotary[layer].move(keys, num_positions)
            self._kept[digest, layer, num_positions] = kept
            self._size_bytes += kept.nbytes
        self._kept.move_to_end((digest, layer, num_positions))
        while self._size_bytes > self._max_bytes:
            self._size_bytes -= self._kept.popitem(last=False)[1].nbytes
        return kept[:, begin:end]
