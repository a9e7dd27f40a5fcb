"""The dram tier: verified bytes, one read for many users, least recently used first, bounds."""

import math
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

from cartridge_engine_ext.artifact_pool import Artifact, ArtifactPool, tensor_view
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.sealed_memory import SealedMemory, map_memory
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Manifest, ValueScale
from cartridge_proto.residency import FailureReason
from cartridge_proto.stores import LocalStore
from tests.engine_ext.pool_machine import PoolMachine
from tests.engine_ext.stored_artifacts import (
    WAIT_S,
    ObservedStore,
    blob_path,
    flip_bit,
    put_artifact,
    put_sample,
    with_blob,
)
from tests.proto.sample_artifact import engine_of, sample_artifact

MANIFEST, BLOB = sample_artifact()
SIZE = len(BLOB)
ENGINE = engine_of(MANIFEST)
ABSENT = sha256_digest(b"no such artifact")


def long_deadline() -> float:
    """A load deadline that no passing test reaches."""
    return time.monotonic() + WAIT_S


@contextmanager
def pool_over(
    store: LocalStore,
    *,
    capacity_bytes: int = 1 << 20,
    engine: EngineIdentity = ENGINE,
    num_loaders: int = 2,
    on_ready: Callable[[Digest, int], None] = lambda digest, size_bytes: None,
    on_evict: Callable[[Digest], None] = lambda digest: None,
) -> Iterator[ArtifactPool]:
    """A pool that is checked and closed at the end."""
    pool = ArtifactPool(
        store=store,
        engine=engine,
        capacity_bytes=capacity_bytes,
        num_loaders=num_loaders,
        on_ready=on_ready,
        on_evict=on_evict,
    )
    try:
        yield pool
        pool.check_invariants()
    finally:
        pool.close()


def use(pool: ArtifactPool, digest: Digest) -> Artifact:
    """Acquire, wait and release."""
    pool.acquire(digest, long_deadline())
    try:
        return pool.wait(digest, WAIT_S)[0]
    finally:
        pool.release(digest)


def failure(pool: ArtifactPool, digest: Digest, deadline_s: float | None = None) -> Refusal:
    """Acquire, wait for the refusal, release."""
    pool.acquire(digest, long_deadline() if deadline_s is None else deadline_s)
    with pytest.raises(Refusal) as caught:
        pool.wait(digest, WAIT_S)
    pool.release(digest)
    return caught.value


def resident_digests(pool: ArtifactPool) -> list[Digest]:
    """Digests of what is ready, least recently used first."""
    return [artifact.digest for artifact, _ in pool.residents()]


# --- loading -------------------------------------------------------------------------------------
def test_a_loaded_artifact_holds_the_bytes_of_the_store(tmp_path: Path) -> None:
    """What is ready is the manifest and exactly the blob it names, in sealed memory."""
    store = LocalStore(tmp_path)
    digest, manifest = put_sample(store)
    ready: list[tuple[Digest, int]] = []
    with pool_over(store, on_ready=lambda *row: ready.append(row)) as pool:
        assert pool.acquire(digest, long_deadline()) is False
        artifact, load_s = pool.wait(digest, WAIT_S)
        with map_memory(artifact.memories[manifest.payload[0].sha256].reference) as mapping:
            assert mapping[:] == BLOB
        assert (artifact.digest, artifact.manifest, artifact.size_bytes) == (digest, manifest, SIZE)
        assert pool.poll(digest) is artifact
        assert pool.acquire(digest, long_deadline()) is True
        assert load_s > 0
        assert (pool.used_bytes, ready) == (SIZE, [(digest, SIZE)])
        assert pool.residents() == [(artifact, 2)]


def test_a_load_in_progress_is_neither_ready_nor_failed(tmp_path: Path) -> None:
    """While bytes are read `poll` gives nothing, `evict` says so, and a wait runs into its end."""
    store = ObservedStore(tmp_path)
    digest, _ = put_sample(store)
    store.gate.clear()
    with pool_over(store) as pool:
        pool.acquire(digest, long_deadline())
        assert store.reading.acquire(timeout=WAIT_S)
        assert pool.poll(digest) is None
        assert pool.evict(digest) == "loading"
        with pytest.raises(Refusal) as caught:
            pool.wait(digest, 0.0)
        assert caught.value.reason is FailureReason.DEADLINE
        assert pool.acquire(digest, long_deadline()) is False
        assert pool.residents() == []
        store.gate.set()
        assert pool.wait(digest, WAIT_S)[0].digest == digest


def test_what_nobody_acquired_cannot_be_polled(tmp_path: Path) -> None:
    """Polling and waiting start no load."""
    store = ObservedStore(tmp_path)
    digest, _ = put_sample(store)
    with pool_over(store) as pool:
        with pytest.raises(Refusal, match="was not acquired"):
            pool.poll(digest)
        with pytest.raises(Refusal):
            pool.wait(digest, 0.0)
        assert store.reads.total() == 0


def test_many_acquires_are_one_read(tmp_path: Path) -> None:
    """Threads that want the same artifact at once share one load, and each counts as a user."""
    store = ObservedStore(tmp_path)
    digest, _ = put_sample(store)
    store.gate.clear()
    found: list[Artifact] = []
    with pool_over(store) as pool:

        def acquire_and_wait() -> None:
            pool.acquire(digest, long_deadline())
            found.append(pool.wait(digest, WAIT_S)[0])

        threads = [threading.Thread(target=acquire_and_wait) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert store.reading.acquire(timeout=WAIT_S)
        store.gate.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert store.reads.total() == 1
        assert pool.residents() == [(found[0], 8)]
        assert all(artifact is found[0] for artifact in found)


# --- refusals ------------------------------------------------------------------------------------
def with_nan(manifest: Manifest, blob: bytes) -> tuple[Manifest, bytes]:
    """The artifact with one value that is not a number."""
    begin, _ = manifest.tensors["layers.1.v"].byte_range
    changed = blob[:begin] + struct.pack("<f", float("nan")) + blob[begin + 4 :]
    return with_blob(manifest, changed), changed


def test_infinite_and_missing_numbers_are_refused(tmp_path: Path) -> None:
    """A NaN in a blob whose digests are all right is found, and the tensor is named."""
    store = LocalStore(tmp_path)
    digest = put_artifact(store, *with_nan(MANIFEST, BLOB))
    with pool_over(store) as pool:
        refusal = failure(pool, digest)
        assert refusal.reason is FailureReason.CORRUPT_ARTIFACT
        assert "layers.1.v" in refusal.detail


def test_a_header_that_differs_from_the_manifest_is_refused(tmp_path: Path) -> None:
    """A blob with the right digest whose own header says another dtype is not loaded."""
    store = LocalStore(tmp_path)
    changed = BLOB.replace(b'"F32"', b'"I32"', 1)
    digest = put_artifact(store, with_blob(MANIFEST, changed), changed)
    with pool_over(store) as pool:
        refusal = failure(pool, digest)
        assert refusal.reason is FailureReason.CORRUPT_ARTIFACT
        assert "I32" in refusal.detail


def truncate(file: Path) -> None:
    """Drop the last byte."""
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "reason", "text"),
    [
        (flip_bit, FailureReason.CORRUPT_ARTIFACT, "hash to"),
        (truncate, FailureReason.CORRUPT_ARTIFACT, f"{SIZE - 1} bytes"),
        (Path.unlink, FailureReason.UNKNOWN_ARTIFACT, "not in the store"),
    ],
    ids=["flipped", "truncated", "missing"],
)
def test_a_damaged_blob_is_refused(
    damage: Callable[[Path], None], reason: FailureReason, text: str, tmp_path: Path
) -> None:
    """One flipped bit, one byte less or no file: refused with its reason, and no memory is kept."""
    store = LocalStore(tmp_path)
    digest, manifest = put_sample(store)
    damage(blob_path(store, manifest))
    ready: list[Digest] = []
    with pool_over(store, on_ready=lambda digest, _: ready.append(digest)) as pool:
        refusal = failure(pool, digest)
        assert refusal.reason is reason
        assert text in refusal.detail
        assert (pool.used_bytes, pool.residents(), ready) == (0, [], [])


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    """A manifest that does not hash to its name is corrupt, not unknown."""
    store = LocalStore(tmp_path)
    digest, _ = put_sample(store)
    flip_bit(store.manifest_path(digest))
    with pool_over(store) as pool:
        assert failure(pool, digest).reason is FailureReason.CORRUPT_ARTIFACT


def test_an_unknown_artifact_is_refused(tmp_path: Path) -> None:
    """A digest without a manifest is unknown."""
    with pool_over(LocalStore(tmp_path)) as pool:
        assert failure(pool, ABSENT).reason is FailureReason.UNKNOWN_ARTIFACT


def test_an_artifact_of_another_model_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The differing field is named, and no blob is read for it."""
    store = ObservedStore(tmp_path)
    digest, manifest = put_sample(store)
    rope = msgspec.structs.replace(manifest.rope, theta=5000.0)
    with pool_over(store, engine=msgspec.structs.replace(ENGINE, rope=rope)) as pool:
        refusal = failure(pool, digest)
        assert refusal.reason is FailureReason.INCOMPATIBLE
        assert "rope.theta" in refusal.detail
        assert store.reads.total() == 0


def test_a_representation_that_is_not_served_yet_is_refused(tmp_path: Path) -> None:
    """Keys that do not stand from position 0 are valid, and unsupported."""
    store = LocalStore(tmp_path)
    sample, blob = sample_artifact()
    rope = msgspec.structs.replace(sample.rope, first_position=1)
    manifest = msgspec.structs.replace(sample, rope=rope)
    digest = put_artifact(store, manifest, blob)
    with pool_over(store, engine=engine_of(manifest)) as pool:
        refusal = failure(pool, digest)
        assert refusal.reason is FailureReason.UNSUPPORTED
        assert "rope.first_position" in refusal.detail


@pytest.mark.parametrize("granularity", ["head", "head_channel"])
def test_quantised_values_are_loaded(
    tmp_path: Path, granularity: Literal["head", "head_channel"]
) -> None:
    """K16/V8 artifacts are kept as they are: codes and scales."""
    store = LocalStore(tmp_path)
    scale = ValueScale(granularity=granularity, dtype="F32")
    digest, manifest = put_sample(store, v_scale=scale)
    with pool_over(store, engine=engine_of(manifest)) as pool:
        artifact = use(pool, digest)
        assert artifact.size_bytes == manifest.payload_bytes


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_is_refused(tmp_path: Path, code: int) -> None:
    """e4m3 has no infinity, and one NaN of each sign."""
    store = LocalStore(tmp_path)
    sample, blob = sample_artifact(v_scale=ValueScale(granularity="head", dtype="F32"))
    begin, _ = sample.tensors["layers.1.v"].byte_range
    damaged = blob[:begin] + bytes([code]) + blob[begin + 1 :]
    manifest = with_blob(sample, damaged)
    digest = put_artifact(store, manifest, damaged)
    with pool_over(store, engine=engine_of(manifest)) as pool:
        refusal = failure(pool, digest)
        assert refusal.reason is FailureReason.CORRUPT_ARTIFACT
        assert "layers.1.v: NaN" in refusal.detail


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e37])
def test_a_scale_that_makes_values_infinite_is_refused(tmp_path: Path, number: float) -> None:
    """A scale is refused if it is no number, or if the largest code under it would be none."""
    store = LocalStore(tmp_path)
    sample, blob = sample_artifact(v_scale=ValueScale(granularity="head", dtype="F32"))
    begin, _ = sample.tensors["layers.1.v_scale"].byte_range
    damaged = blob[:begin] + struct.pack("<f", number) + blob[begin + 4 :]
    manifest = with_blob(sample, damaged)
    digest = put_artifact(store, manifest, damaged)
    with pool_over(store, engine=engine_of(manifest)) as pool:
        refusal = failure(pool, digest)
        assert refusal.reason is FailureReason.CORRUPT_ARTIFACT
        assert "layers.1.v_scale" in refusal.detail


def test_an_error_nobody_foresaw_fails_the_load_only(tmp_path: Path) -> None:
    """An exception of the store becomes an internal refusal, and the loader lives on."""
    store = ObservedStore(tmp_path)
    store.error = RuntimeError("the disk is on fire")
    digest, _ = put_sample(store)
    with pool_over(store, num_loaders=1) as pool:
        for _ in range(2):
            refusal = failure(pool, digest)
            assert refusal.reason is FailureReason.INTERNAL
            assert "the disk is on fire" in refusal.detail
        assert pool.used_bytes == 0


# --- trying again --------------------------------------------------------------------------------
def test_a_failed_load_is_tried_again_by_the_next_acquire(tmp_path: Path) -> None:
    """After a repair the next acquire loads, and users of the failed load still count."""
    store = ObservedStore(tmp_path)
    digest, manifest = put_sample(store)
    file = blob_path(store, manifest)
    flip_bit(file)
    with pool_over(store) as pool:
        for _ in range(2):
            pool.acquire(digest, long_deadline())
            with pytest.raises(Refusal):
                pool.wait(digest, WAIT_S)
        flip_bit(file)
        assert pool.acquire(digest, long_deadline()) is False
        pool.wait(digest, WAIT_S)
        assert store.reads.total() == 3
        for num_left in (2, 1):
            pool.release(digest)
            assert pool.evict(digest) == f"in use by {num_left} requests"
        pool.release(digest)
        assert pool.evict(digest) is None


def test_a_failure_is_forgotten_with_its_last_user(tmp_path: Path) -> None:
    """A failed load leaves nothing behind once everybody has released it."""
    with pool_over(LocalStore(tmp_path)) as pool:
        failure(pool, ABSENT)
        with pytest.raises(Refusal, match="was not acquired"):
            pool.poll(ABSENT)


def test_a_load_that_fails_with_nobody_waiting_leaves_nothing(tmp_path: Path) -> None:
    """An artifact that was given up while it loaded, and then failed, is not remembered."""
    store = ObservedStore(tmp_path)
    digest, manifest = put_sample(store)
    store.gate.clear()
    with pool_over(store) as pool:
        pool.acquire(digest, long_deadline())
        assert store.reading.acquire(timeout=WAIT_S)
        entry = pool._entries[digest]
        pool.release(digest)
        flip_bit(blob_path(store, manifest))
        store.gate.set()
        assert entry.done.wait(WAIT_S)
        assert not pool._entries


# --- room ----------------------------------------------------------------------------------------
def test_an_artifact_larger_than_the_tier_is_refused_at_once(tmp_path: Path) -> None:
    """No waiting, and nothing is evicted for what can never fit."""
    store = LocalStore(tmp_path)
    small, _ = put_sample(store, num_tokens=1)
    large, manifest = put_sample(store, num_tokens=40)
    with pool_over(store, capacity_bytes=manifest.payload_bytes - 1) as pool:
        use(pool, small)
        refusal = failure(pool, large)
        assert refusal.reason is FailureReason.CAPACITY
        assert str(manifest.payload_bytes) in refusal.detail
        assert resident_digests(pool) == [small]


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    """Room is made by dropping what was not used for longest, and no more than needed."""
    store = LocalStore(tmp_path)
    one, two, three = (put_sample(store, seed=seed)[0] for seed in (1, 2, 3))
    gone: list[Digest] = []
    with pool_over(store, capacity_bytes=2 * SIZE, on_evict=gone.append) as pool:
        for digest in (one, two, one, three):
            use(pool, digest)
        assert gone == [two]
        assert resident_digests(pool) == [one, three]


def test_what_a_request_uses_is_never_evicted(tmp_path: Path) -> None:
    """With everything in use a load past its deadline is refused, and the used bytes stay."""
    store = LocalStore(tmp_path)
    one, two = (put_sample(store, seed=seed)[0] for seed in (1, 2))
    with pool_over(store, capacity_bytes=SIZE) as pool:
        pool.acquire(one, long_deadline())
        pool.wait(one, WAIT_S)
        refusal = failure(pool, two, deadline_s=time.monotonic())
        assert refusal.reason is FailureReason.CAPACITY
        assert "in use" in refusal.detail
        assert pool.poll(one) is not None
        assert pool.used_bytes == SIZE


def test_a_load_waits_for_room_until_its_deadline(tmp_path: Path) -> None:
    """A release makes the room that a waiting load needs."""
    store = ObservedStore(tmp_path)
    one, two = (put_sample(store, seed=seed)[0] for seed in (1, 2))
    with pool_over(store, capacity_bytes=SIZE) as pool:
        pool.acquire(one, long_deadline())
        pool.wait(one, WAIT_S)
        pool.acquire(two, long_deadline())
        assert pool.poll(two) is None
        pool.release(one)
        assert pool.wait(two, WAIT_S)[0].digest == two
        assert resident_digests(pool) == [two]


def test_a_withdrawal_comes_before_the_memory_is_freed(tmp_path: Path) -> None:
    """`on_evict` still finds the bytes; after the eviction nobody can map them."""
    store = LocalStore(tmp_path)
    digest, manifest = put_sample(store)
    blob_digest = manifest.payload[0].sha256
    seen: list[bytes] = []

    def on_evict(evicted: Digest) -> None:
        with map_memory(reference) as mapping:
            seen.append(mapping[:])
        assert evicted == digest

    with pool_over(store, on_evict=on_evict) as pool:
        reference = use(pool, digest).memories[blob_digest].reference
        assert pool.evict(digest) is None
        assert seen == [BLOB]
        with pytest.raises(OSError, match=r"is not the memory|No such file"):
            map_memory(reference)
        assert (pool.used_bytes, pool.evict(digest)) == (0, "not resident")


def test_an_artifact_is_not_evicted_before_it_was_announced(tmp_path: Path) -> None:
    """A withdrawal that overtook its announcement would leave a row for bytes that are gone."""
    store = LocalStore(tmp_path)
    digest, _ = put_sample(store)
    answers: list[str | None] = []
    log: list[str] = []

    def on_ready(digest: Digest, size_bytes: int) -> None:
        pool.release(digest)
        answers.append(pool.evict(digest))
        log.append("ready")

    with pool_over(store, on_ready=on_ready, on_evict=lambda _: log.append("evicted")) as pool:
        pool.acquire(digest, long_deadline())
        pool.wait(digest, WAIT_S)
        assert answers == ["loading"]
        assert pool.evict(digest) is None
        assert log == ["ready", "evicted"]


# --- adopting and closing ------------------------------------------------------------------------
def test_an_adopted_artifact_is_ready_and_can_be_dropped(tmp_path: Path) -> None:
    """What did not come from the store is used like the rest and evicted like the rest."""

    def fill(buffer: memoryview) -> None:
        buffer[:] = BLOB

    memories: dict[str, SealedMemory] = {sha256_digest(BLOB): SealedMemory(SIZE, fill)}
    artifact = Artifact(ABSENT, MANIFEST, memories)
    with pool_over(LocalStore(tmp_path)) as pool:
        pool.adopt(artifact)
        assert pool.acquire(ABSENT, long_deadline()) is True
        assert pool.wait(ABSENT, 0.0)[0] is artifact
        pool.release(ABSENT)
        assert pool.evict(ABSENT) is None


def test_closing_gives_all_memory_back(tmp_path: Path) -> None:
    """After `close` the bytes of ready artifacts, used ones too, cannot be mapped."""
    store = LocalStore(tmp_path)
    digest, manifest = put_sample(store)
    with pool_over(store) as pool:
        pool.acquire(digest, long_deadline())
        memory = pool.wait(digest, WAIT_S)[0].memories[manifest.payload[0].sha256]
        reference = memory.reference
        pool.close()
        assert pool.residents() == []
        with pytest.raises(OSError, match=r"is not the memory|No such file"):
            map_memory(reference)


def test_closing_does_not_wait_for_room(tmp_path: Path) -> None:
    """A load that waits for room is given up when the pool closes, long before its deadline."""
    store = ObservedStore(tmp_path)
    one, two = (put_sample(store, seed=seed)[0] for seed in (1, 2))
    with pool_over(store, capacity_bytes=SIZE, num_loaders=1) as pool:
        pool.acquire(one, long_deadline())
        pool.wait(one, WAIT_S)
        pool.acquire(two, time.monotonic() + 3600)
        for _ in (one, two):
            assert store.started.acquire(timeout=WAIT_S)
        closing = threading.Thread(target=pool.close)
        closing.start()
        closing.join(WAIT_S)
        was_closed = not closing.is_alive()
        pool.release(one)  # lets a pool that does wait come to its end
        assert was_closed


def test_a_closed_pool_refuses_new_loads(tmp_path: Path) -> None:
    """An acquire after `close` fails like a load, instead of never being ready."""
    store = LocalStore(tmp_path)
    digest, _ = put_sample(store)
    with pool_over(store) as pool:
        pool.close()
        assert pool.acquire(digest, long_deadline()) is False
        with pytest.raises(Refusal, match="closed"):
            pool.wait(digest, 0.0)


def test_a_view_covers_the_bytes_it_is_told() -> None:
    """`tensor_view` reads dtype, shape and range from a buffer without a copy."""
    buffer = bytearray(struct.pack("<4f", 9.0, 1.0, 2.0, 9.0))
    view = tensor_view(buffer, "F32", (2, 1), 4, 12)
    assert view.tolist() == [[1.0], [2.0]]
    view[0, 0] = 5.0
    assert struct.unpack_from("<f", buffer, 4) == (5.0,)


# --- any order of operations ---------------------------------------------------------------------
class LeastRecentlyUsedMachine(PoolMachine):
    """With the order in which artifacts leave, and all that is announced."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[tuple[str, Digest]] = []

    @initialize(num_fitting=st.integers(1, 5))
    def open(self, num_fitting: int) -> None:
        """A pool of one loader, as an engine makes it."""
        self.choose_capacity(num_fitting)
        self.pool = ArtifactPool(
            store=self.store,
            engine=ENGINE,
            capacity_bytes=self.capacity,
            num_loaders=1,
            on_ready=self.on_ready,
            on_evict=self.on_evict,
        )

    def foresee_load(self, digest: Digest) -> bool:
        """What leaves for it, the least recently used first, and whether it comes."""
        is_loaded = super().foresee_load(digest)
        missing = sum(map(self.size, self.users)) + self.size(digest) - self.capacity
        for resident in self.users if self.can_fit(digest) else ():
            if missing > 0 and self.is_idle(resident):
                self.foresee_eviction(resident)
                missing -= self.size(resident)
        if is_loaded:
            self.expected.append(("ready", digest))
        return is_loaded

    def foresee_eviction(self, digest: Digest) -> None:
        """It is withdrawn."""
        self.expected.append(("evict", digest))

    @invariant()
    def keeps_the_order(self) -> None:
        """The order of residents and what was announced are the model's."""
        assert [artifact.digest for artifact, _ in self.pool.residents()] == list(self.users)
        assert self.announced == self.expected


def test_any_order_of_operations_keeps_the_invariants() -> None:
    """Acquire, release, evict, damage and repair in any order agree with a model of the tier."""
    run_state_machine_as_test(
        LeastRecentlyUsedMachine,
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None),
    )
