"""Which compositions are whole in vLLM's own KV blocks, and which of them are pinned there.

Owns the look at vLLM's prefix cache after each scheduling step and when it is reset, and the
references that pins hold on blocks. Refuses to allocate blocks or to evict any: that is vLLM's.

Reads the block pool that vLLM hands to connectors instead of its KV cache events: those are on
only where the operator publishes them (docs/decisions/0006-hbm-residency.md).
"""

import logging
import queue
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from cartridge_engine_ext.residency_ledger import ResidencyLedger
from cartridge_proto.digest import Digest
from cartridge_proto.residency import Tier

logger = logging.getLogger(__name__)

MAX_WANTED = 1024
"""Prefixes that are to be pinned once they are whole."""
MAX_OWNERS = 64
"""Owners of pins, or of wishes for pins, on one prefix."""

BlockT = TypeVar("BlockT")


class BlockPool(Protocol[BlockT]):
    """What is used of vLLM's `BlockPool`."""

    num_gpu_blocks: int

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: list[int]
    ) -> list[BlockT] | None:
        """Blocks that hold this hash, one for each group."""
        ...

    def touch(self, blocks: Sequence[BlockT]) -> None:
        """Hold a reference to each block."""
        ...

    def free_blocks(self, ordered_blocks: Sequence[BlockT]) -> None:
        """Give references back; the first block is evicted first."""
        ...

    def unpin_blocks(self, blocks: Iterable[BlockT], on_reuse: Callable[[BlockT], None]) -> None:
        """Give references back; be told when a block is given out anew or the cache is reset."""
        ...


@dataclass
class _Prefix:
    """The full blocks of one composition's prefix."""

    block_hashes: tuple[bytes, ...]
    tail_digests: tuple[Digest, ...]
    """Artifacts of the positions after the last full block; each request loads these anew."""
    size_bytes: int
    is_whole: bool = False
    is_watched: bool = False
    """VLLM will tell when its first block goes."""
    num_users: int = 0
    pinned_blocks: list[object] = field(default_factory=list)
    pinned_by: frozenset[str] = frozenset()


class HbmCensus:
    """Compositions by identity.

    With `window_blocks` every layer has a window, and a prefix is so many of its last full blocks.

    `pin`, `unpin`, `keep` and `pinned_by` may be called from any thread, all else runs on the
    scheduler's.

    A prefix is whole while all of its full blocks are in the prefix cache, and the artifacts of
    the positions behind them are in dram. vLLM gives the blocks of a request back from its end, so
    the last full block goes first: that one is looked up after every step, all blocks of one
    prefix in turn besides. No step follows when an idle engine's prefix cache is reset, so vLLM is
    asked to tell of each first block, and no step when the tail leaves dram, which the ledger sees.
    """

    def __init__(
        self,
        ledger: ResidencyLedger,
        *,
        group_ids: Sequence[int],
        block_bytes: int,
        pinned_fraction: float,
        longest_request_blocks: int,
        window_blocks: int | None = None,
    ) -> None:
        self._ledger = ledger
        self._block_bytes = block_bytes
        self._group_ids = list(group_ids)
        self._pinned_fraction = pinned_fraction
        self._longest_request_blocks = longest_request_blocks
        self._window_blocks = window_blocks
        self._pool: BlockPool[object] | None = None
        self._prefixes: dict[Digest, _Prefix] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wanted: dict[Digest, dict[str, None]] = {}
        """Owners that wish a prefix pinned; the oldest first."""
        self._turn = 0

    def bind(self, pool: BlockPool[object]) -> None:
        """Take vLLM's block pool; before this nothing is whole."""
        self._pool = pool

    # --- requests --------------------------------------------------------------------------------
    def enter(
        self,
        composition: Digest,
        block_hashes: Sequence[bytes],
        tail_digests: Sequence[Digest],
    ) -> None:
        """A request with this prefix got its blocks; until `leave` the prefix is looked for.

        Under two names of one adapter the same prefix stands in other blocks. Those of the last
        request are listed, unless the others are pinned.
        """
        if not block_hashes:
            return
        if self._window_blocks is not None:
            block_hashes = block_hashes[-self._window_blocks :]
        prefix = self._prefixes.get(composition)
        if prefix is None:
            size_bytes = len(block_hashes) * self._block_bytes
            prefix = _Prefix(tuple(block_hashes), tuple(tail_digests), size_bytes)
            self._prefixes[composition] = prefix
        elif not prefix.pinned_blocks:
            prefix.block_hashes = tuple(block_hashes)
        prefix.num_users += 1

    def leave(self, composition: Digest) -> None:
        """The request has ended; its prefix stays listed while it is whole."""
        prefix = self._prefixes.get(composition)
        if prefix is not None:
            prefix.num_users = max(0, prefix.num_users - 1)

    def is_whole(self, composition: Digest, block_hashes: Sequence[bytes]) -> bool:
        """Whether a prefix was whole after the last step, in the blocks with these hashes."""
        prefix = self._prefixes.get(composition)
        if prefix is None or not prefix.is_whole or not block_hashes:
            return False
        # Hashes are chained: the last stands for all.
        return prefix.block_hashes[-1] == block_hashes[-1]

    def update(self) -> None:
        """Look again, after a scheduling step; tell the ledger what changed."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            command()
        self._turn += 1
        checked_whole = self._turn % max(1, len(self._prefixes))
        for index, (composition, prefix) in enumerate(list(self._prefixes.items())):
            must_check_all = index == checked_whole or not prefix.is_whole
            is_there = self._is_there(prefix, must_check_all=must_check_all)
            is_whole = is_there and self._has_tail(prefix)
            if is_whole and not (prefix.is_whole and self._is_listed(composition, prefix)):
                self._ledger.enter_hbm(composition, prefix.size_bytes, prefix.tail_digests)
                self._watch(composition, prefix)
                # A pin outlives the row: the tail may leave dram and come again.
                is_pinned = bool(prefix.pinned_blocks)
                self._ledger.set_pinned(composition, Tier.HBM, is_pinned=is_pinned)
            elif prefix.is_whole and not is_whole:
                self._ledger.leave(composition, Tier.HBM)
            prefix.is_whole = is_whole
            if is_whole:
                for owner in list(self._wanted.get(composition, ())):
                    self._pin(composition, owner)
            if not is_there and not prefix.num_users:
                self._release(prefix)
                del self._prefixes[composition]

    # --- pins ------------------------------------------------------------------------------------
    def pin(self, composition: Digest, owner: str) -> "Future[str | None]":
        """Keep the full blocks of a whole prefix from eviction, after the next step.

        They are kept until all owners have unpinned it. Pinning twice is pinning once.

        Returns:
            A future of why not; of `None` when it is pinned.
        """
        return self._command(lambda: self._pin(composition, owner))

    def unpin(self, composition: Digest, owner: str) -> "Future[str | None]":
        """End an owner's pin, after the next step.

        With the last one the blocks go back to vLLM's own eviction.
        """
        return self._command(lambda: self._unpin(composition, owner))

    def keep(self, composition: Digest, owner: str) -> None:
        """Pin a prefix now, or when it becomes whole; of `MAX_WANTED` wishes the oldest goes."""

        def command() -> None:
            if self._pin(composition, owner) is None:
                return
            owners = self._wanted.setdefault(composition, {})
            if len(owners) < MAX_OWNERS:
                owners[owner] = None
            if len(self._wanted) > MAX_WANTED:
                del self._wanted[next(iter(self._wanted))]

        self._commands.put(command)

    def pinned_by(self, composition: Digest) -> tuple[str, ...]:
        """Who holds pins on a prefix, sorted."""
        prefix = self._prefixes.get(composition)
        return tuple(sorted(prefix.pinned_by)) if prefix is not None else ()

    @property
    def pin_budget_blocks(self) -> int:
        """Blocks that pins may hold together; one request of the longest length always fits."""
        if self._pool is None:
            return 0
        num_blocks = self._pool.num_gpu_blocks
        # One block of vLLM's is never given out.
        spare = num_blocks - 1 - self._longest_request_blocks
        return max(0, min(int(num_blocks * self._pinned_fraction), spare))

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that pins hold now."""
        return sum(len(prefix.pinned_blocks) for prefix in self._prefixes.values())

    def unpin_all(self) -> None:
        """Give all pinned blocks back, whoever owns the pins (vLLM resets its cache)."""
        for composition, prefix in self._prefixes.items():
            # A wish that had no room would be granted now, and stand in the way of the reset.
            self._wanted.pop(composition, None)
            self._end_pins(composition, prefix)

    def _command(self, run: Callable[[], str | None]) -> "Future[str | None]":
        done: Future[str | None] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(run())
            except Exception as error:
                # The scheduler's thread goes on; who asked gets it.
                logger.exception("pin in HBM")
                done.set_exception(error)

        self._commands.put(command)
        return done

    def _pin(self, composition: Digest, owner: str) -> str | None:
        prefix = self._prefixes.get(composition)
        blocks = self._blocks(prefix) if prefix is not None else None
        if prefix is None or self._pool is None or blocks is None:
            return "its prefix is not whole in HBM"
        if owner not in prefix.pinned_by and len(prefix.pinned_by) >= MAX_OWNERS:
            return f"owner: the limit is {MAX_OWNERS} owners"
        if not prefix.pinned_by:
            if self.num_pinned_blocks + len(blocks) > self.pin_budget_blocks:
                return (
                    f"{len(blocks)} blocks; pins hold {self.num_pinned_blocks} of the "
                    f"{self.pin_budget_blocks} that hbm_pinned_fraction allows"
                )
            self._pool.touch(blocks)
            prefix.pinned_blocks = blocks
            self._ledger.set_pinned(composition, Tier.HBM, is_pinned=True)
        prefix.pinned_by |= {owner}
        self._drop_wish(composition, owner)
        return None

    def _unpin(self, composition: Digest, owner: str) -> str | None:
        self._drop_wish(composition, owner)
        prefix = self._prefixes.get(composition)
        if prefix is None or owner not in prefix.pinned_by:
            return f"not pinned by {owner}"
        prefix.pinned_by -= {owner}
        if not prefix.pinned_by:
            self._end_pins(composition, prefix)
        return None

    def _drop_wish(self, composition: Digest, owner: str) -> None:
        owners = self._wanted.get(composition, {})
        owners.pop(owner, None)
        if not owners:
            self._wanted.pop(composition, None)

    def _end_pins(self, composition: Digest, prefix: _Prefix) -> None:
        self._release(prefix)
        self._ledger.set_pinned(composition, Tier.HBM, is_pinned=False)

    def _release(self, prefix: _Prefix) -> None:
        if prefix.pinned_blocks and self._pool is not None:
            # As vLLM frees a request: from its end.
            self._pool.free_blocks(prefix.pinned_blocks[::-1])
        prefix.pinned_blocks, prefix.pinned_by = [], frozenset()

    # --- between steps ---------------------------------------------------------------------------
    def _watch(self, composition: Digest, prefix: _Prefix) -> None:
        """Withdraw a prefix as soon as its first block is given out or the cache is reset."""
        if prefix.is_watched or self._pool is None:
            return
        first = self._pool.get_cached_block(prefix.block_hashes[0], self._group_ids)
        if first is None:
            return

        def withdraw(block: object) -> None:
            prefix.is_watched = False
            if prefix.is_whole and self._prefixes.get(composition) is prefix:
                prefix.is_whole = False
                self._ledger.leave(composition, Tier.HBM)

        prefix.is_watched = True
        # A reference for no time: what is asked for is to be told.
        self._pool.touch(first)
        self._pool.unpin_blocks(first, withdraw)

    # --- look-ups --------------------------------------------------------------------------------
    def _is_listed(self, composition: Digest, prefix: _Prefix) -> bool:
        """Whether the row is there still; that of a prefix with a tail may go between steps."""
        return not prefix.tail_digests or Tier.HBM in self._ledger.tiers(composition)

    def _is_there(self, prefix: _Prefix, *, must_check_all: bool) -> bool:
        if self._pool is None:
            return False
        if self._pool.get_cached_block(prefix.block_hashes[-1], self._group_ids) is None:
            return False
        return not must_check_all or self._blocks(prefix) is not None

    def _has_tail(self, prefix: _Prefix) -> bool:
        return all(Tier.DRAM in self._ledger.tiers(digest) for digest in prefix.tail_digests)

    def _blocks(self, prefix: _Prefix) -> list[object] | None:
        """All full blocks in order; `None` when one is missing."""
        if self._pool is None:
            return None
        blocks: list[object] = []
        for block_hash in prefix.block_hashes:
            found = self._pool.get_cached_block(block_hash, self._group_ids)
            if found is None:
                return None
            blocks.extend(found)
        return blocks
