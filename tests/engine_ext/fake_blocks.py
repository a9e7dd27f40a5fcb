"""A stand-in for the part of vLLM's block pool that the census of prefixes in HBM uses.

Owns which hashes are cached and who refers to their blocks. That vLLM's own pool has the same
methods is tested in `test_hbm_census.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence


class FakeBlockPool:
    """Blocks are named by their hash."""

    def __init__(self, num_gpu_blocks: int = 10) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.references: Counter[object] = Counter()
        self.freed: list[object] = []
        self._cached: set[bytes] = set()
        self._watchers: dict[object, Callable[[object], None]] = {}

    def hold(self, block_hashes: Iterable[bytes]) -> None:
        """Cache blocks."""
        self._cached.update(block_hashes)

    def drop(self, block_hashes: Iterable[bytes]) -> None:
        """Evict blocks that nobody refers to."""
        for block_hash in block_hashes:
            if not self.references[block_hash]:
                self._tell(block_hash)
                self._cached.discard(block_hash)

    def reset(self) -> bool:
        """Forget all blocks if nobody refers to any; no step of the scheduler follows."""
        if any(self.references.values()):
            return False
        self._cached.clear()
        for block in list(self._watchers):
            self._tell(block)
        return True

    def _tell(self, block: object) -> None:
        watcher = self._watchers.pop(block, None)
        if watcher is not None:
            watcher(block)

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: list[int]
    ) -> list[object] | None:
        """One block for each group, or `None`."""
        return [block_hash] * len(kv_cache_group_ids) if block_hash in self._cached else None

    def touch(self, blocks: Sequence[object]) -> None:
        """Refer to blocks."""
        self.references.update(blocks)

    def free_blocks(self, ordered_blocks: Sequence[object]) -> None:
        """Give references back."""
        self.references.subtract(ordered_blocks)
        self.freed.extend(ordered_blocks)

    def unpin_blocks(self, blocks: Iterable[object], on_reuse: Callable[[object], None]) -> None:
        """Give references back, and tell when a block goes."""
        for block in blocks:
            self.references[block] -= 1
            self._watchers[block] = on_reuse
