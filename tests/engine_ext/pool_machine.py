"""What any pool of verified artifacts does in any order of operations, beside a model of it.

Owns the rules that all pools share. Refuses to know which of several idle artifacts leaves first:
who does adds it.
"""

import time
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cartridge_engine_ext.dram_pool import DramPool
from cartridge_engine_ext.errors import Refusal
from cartridge_proto.digest import Digest
from cartridge_proto.residency import FailureReason
from cartridge_proto.stores import LocalStore
from tests.engine_ext.stored_artifacts import WAIT_S, blob_path, flip_bit, put_sample

NUM_ARTIFACTS = 6
indexes = st.integers(0, NUM_ARTIFACTS - 1)


class PoolMachine(RuleBasedStateMachine):
    """The model: what is resident, who uses and who pins it, and what had to fail.

    A subclass opens `pool` in an initial rule, with `on_ready` and `on_evict` of this object.
    """

    pool: DramPool
    capacity: int

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.store = LocalStore(Path(self.folder.name))
        samples = [
            put_sample(self.store, num_tokens=tokens, seed=tokens)
            for tokens in range(1, NUM_ARTIFACTS + 1)
        ]
        self.digests = [digest for digest, _ in samples]
        self.manifests = dict(samples)
        self.is_damaged = dict.fromkeys(self.digests, False)
        self.users: OrderedDict[Digest, int] = OrderedDict()
        """Of each resident artifact, least recently used first."""
        self.failed: dict[Digest, int] = {}
        self.pins: dict[Digest, set[str]] = {}
        self.announced: list[tuple[str, Digest]] = []
        self._num_settled = 0

    def choose_capacity(self, num_fitting: int) -> None:
        """A tier that holds some of the artifacts, at least the largest."""
        sizes = sorted(map(self.size, self.digests))
        self.capacity = max(sum(sizes[:num_fitting]), sizes[-1])

    def on_ready(self, digest: Digest, size_bytes: int) -> None:
        """The pool's announcement."""
        self.announced.append(("ready", digest))

    def on_evict(self, digest: Digest) -> None:
        """The pool's withdrawal."""
        self.announced.append(("evict", digest))

    # --- the model -------------------------------------------------------------------------------
    def size(self, digest: Digest) -> int:
        """Bytes of an artifact."""
        return self.manifests[digest].payload_bytes

    def is_idle(self, digest: Digest) -> bool:
        """Whether a resident artifact may leave."""
        return self.users[digest] == 0 and not self.pins.get(digest)

    def can_fit(self, digest: Digest) -> bool:
        """Whether dropping all that is idle makes room."""
        kept = [resident for resident in self.users if not self.is_idle(resident)]
        return sum(map(self.size, kept)) + self.size(digest) <= self.capacity

    def foresee_load(self, digest: Digest) -> bool:
        """Whether a load for a user succeeds."""
        return self.can_fit(digest) and not self.is_damaged[digest]

    def foresee_eviction(self, digest: Digest) -> None:
        """An artifact is dropped because somebody asked for it."""

    def settle(self) -> None:
        """Take what left out of the model; it must have been free to go."""
        for event, digest in self.announced[self._num_settled :]:
            if event == "evict":
                assert self.is_idle(digest)
                del self.users[digest]
        self._num_settled = len(self.announced)

    # --- rules -----------------------------------------------------------------------------------
    @rule(index=indexes)
    def acquire(self, index: int) -> None:
        """Use an artifact and wait for the end of its load."""
        digest = self.digests[index]
        was_ready = digest in self.users
        is_loaded = was_ready or self.foresee_load(digest)
        assert self.pool.acquire(digest, time.monotonic()) == was_ready
        if was_ready:
            self.users[digest] += 1
            self.users.move_to_end(digest)
            return
        num_users = self.failed.pop(digest, 0) + 1
        if is_loaded:
            assert self.pool.wait(digest, WAIT_S)[0].digest == digest
        else:
            with pytest.raises(Refusal) as caught:
                self.pool.wait(digest, WAIT_S)
            allowed = {FailureReason.CAPACITY, FailureReason.CORRUPT_ARTIFACT}
            assert caught.value.reason in allowed
        self.settle()
        (self.users if is_loaded else self.failed)[digest] = num_users

    @precondition(lambda self: any(self.users.values()) or self.failed)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """End one use of something."""
        held = [digest for digest, num_users in self.users.items() if num_users]
        digest = data.draw(st.sampled_from([*held, *self.failed]))
        counts = self.users if digest in self.users else self.failed
        counts[digest] -= 1
        if self.failed.get(digest) == 0:
            del self.failed[digest]
        self.pool.release(digest)

    @rule(index=indexes)
    def evict(self, index: int) -> None:
        """Ask to drop an artifact."""
        digest = self.digests[index]
        is_free = digest in self.users and self.is_idle(digest)
        if is_free:
            self.foresee_eviction(digest)
        assert (self.pool.evict(digest) is None) == is_free
        self.settle()

    @rule(index=indexes)
    def damage_or_repair(self, index: int) -> None:
        """Flip a bit on disk, or flip it back."""
        digest = self.digests[index]
        flip_bit(blob_path(self.store, self.manifests[digest]))
        self.is_damaged[digest] = not self.is_damaged[digest]

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Residents, users, pins and sizes are the model's."""
        self.pool.check_invariants()
        residents = {artifact.digest: count for artifact, count in self.pool.residents()}
        assert residents == dict(self.users)
        assert self.pool.used_bytes == sum(map(self.size, self.users))
        for holding in self.pool.holdings():
            assert set(holding.pinned_by) == self.pins.get(holding.digest, set())

    def teardown(self) -> None:
        """Close the pool and remove the store."""
        if hasattr(self, "pool"):
            self.pool.close()
        self.folder.cleanup()
