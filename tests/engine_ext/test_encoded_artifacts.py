"""Encoded artifacts on the way to an engine: stored bytes below, decoded ones in memory."""

import gc
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy
import pytest

from cartridge_engine_ext.dram_pool import DramPool
from cartridge_engine_ext.dram_tier import ArtifactReader
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.nvme_source import NvmeSource
from cartridge_engine_ext.nvme_tier import NvmeTier
from cartridge_engine_ext.sealed_memory import map_memory
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Blob, Manifest, manifest_digest
from cartridge_proto.residency import FailureReason, Tier
from cartridge_proto.stores import LocalStore, open_store
from tests.engine_ext.stored_artifacts import WAIT_S, put_artifact, with_blob
from tests.engine_ext.waiting import until
from tests.proto.encoded_artifact import (
    encoded,
    encoded_sample,
    encoding_of,
    with_stored_blob,
)
from tests.proto.misbehaving_http import Fault, misbehaving_http
from tests.proto.sample_artifact import sample_artifact

RANGE = 1 << 20
CAPACITY = 16 << 20


def soon() -> float:
    """A deadline that is far away."""
    return time.monotonic() + WAIT_S


def large(seed: int = 0) -> tuple[Manifest, bytes]:
    """An artifact of random floats whose decoded blob has five frames, and its blob."""
    manifest, blob = sample_artifact(num_tokens=36_000)
    begin = min(tensor.byte_range[0] for tensor in manifest.tensors.values())
    numbers = numpy.random.default_rng(seed).standard_normal((len(blob) - begin) // 4)
    other = blob[:begin] + numbers.astype(numpy.float32).tobytes()
    return with_blob(manifest, other), other


@contextmanager
def pool_over(source: ArtifactReader, capacity_bytes: int = CAPACITY) -> Iterator[DramPool]:
    """A pool that is checked and closed at the end."""
    pool = DramPool(source=source, capacity_bytes=capacity_bytes, num_loaders=1)
    try:
        yield pool
        pool.check_invariants()
    finally:
        pool.close()


@contextmanager
def nvme_over(store: LocalStore, root: Path, capacity_bytes: int = CAPACITY) -> Iterator[NvmeTier]:
    """An nvme tier that is checked and closed at the end."""
    tier = NvmeTier(store=store, root=root, capacity_bytes=capacity_bytes, range_bytes=RANGE)
    try:
        yield tier
        tier.check_invariants()
    finally:
        tier.close()


def load(pool: DramPool, digest: Digest) -> tuple[bytes, Tier]:
    """Load an artifact of one blob: the bytes in memory, and where they came from."""
    pool.acquire(digest, soon())
    artifact, _ = pool.wait(digest, WAIT_S)
    pool.release(digest)
    (memory,) = artifact.memories.values()
    with map_memory(memory.reference) as mapping:
        return mapping[:], artifact.loaded_from


def refusal_of(pool: DramPool, digest: Digest) -> Refusal:
    """Why a load failed."""
    pool.acquire(digest, soon())
    with pytest.raises(Refusal) as caught:
        pool.wait(digest, WAIT_S)
    pool.release(digest)
    return caught.value


def test_each_tier_counts_the_bytes_that_it_holds(tmp_path: Path) -> None:
    """The disk holds what is stored, memory what it decodes to and, while it does, both."""
    manifest, blob = large()
    manifest, stored = encoded(manifest, blob)
    assert len(stored) < 0.95 * len(blob)
    store = LocalStore(tmp_path / "store")
    digest = put_artifact(store, manifest, stored)
    with (
        nvme_over(store, tmp_path / "nvme", len(stored)) as nvme,
        pool_over(NvmeSource(store, nvme), len(blob) + len(stored)) as pool,
    ):
        assert load(pool, digest) == (blob, Tier.REMOTE)
        assert (nvme.used_bytes, pool.used_bytes) == (len(stored), len(blob))
        assert pool.evict(digest) is None
        assert load(pool, digest) == (blob, Tier.NVME)
    with pool_over(store, len(blob) + len(stored) - 1) as pool:
        assert refusal_of(pool, digest).reason is FailureReason.CAPACITY


class MeasuredStore(LocalStore):
    """A store that notes what a pool counts while a blob is read, and how many are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.pool: DramPool | None = None
        self.reading_bytes = 0
        self.counted: list[tuple[int, int]] = []
        """Bytes that the pool counts, and stored bytes that are in memory."""
        self._lock = threading.Lock()

    def _read_pieces(
        self, digest: Digest, offset: int, buffer: memoryview, size_bytes: int
    ) -> Iterator[int]:
        assert self.pool is not None
        with self._lock:
            self.reading_bytes += size_bytes
        for count in super()._read_pieces(digest, offset, buffer, size_bytes):
            with self._lock:
                self.counted.append((self.pool.used_bytes, self.reading_bytes))
            yield count
        with self._lock:
            self.reading_bytes -= size_bytes


def test_stored_bytes_count_while_they_are_decoded(tmp_path: Path) -> None:
    """Two loads with room for what they decode to and the larger stored blob: never more."""
    store = MeasuredStore(tmp_path)
    samples = [encoded(*large(seed)) for seed in (1, 2)]
    digests = [put_artifact(store, *sample) for sample in samples]
    decoded_bytes = [manifest.decoded_bytes for manifest, _ in samples]
    capacity_bytes = sum(decoded_bytes) + max(len(stored) for _, stored in samples)
    pool = DramPool(source=store, capacity_bytes=capacity_bytes, num_loaders=2)
    store.pool = pool
    try:
        for digest in digests:
            pool.acquire(digest, soon())
        for digest in digests:
            pool.wait(digest, WAIT_S)
        pool.check_invariants()
        assert pool.used_bytes == sum(decoded_bytes)
        for counted_bytes, stored_bytes in store.counted:
            assert min(decoded_bytes) + stored_bytes <= counted_bytes <= capacity_bytes
    finally:
        pool.close()


def test_a_failed_load_keeps_no_stored_bytes(tmp_path: Path) -> None:
    """While somebody still uses the failure, the bytes that did not decode are gone."""
    store = LocalStore(tmp_path)
    manifest, stored = encoded(*large())
    damaged = stored[:-1] + bytes([stored[-1] ^ 0xFF])
    encoding = encoding_of(manifest.payload[0])
    blob = Blob(sha256=sha256_digest(damaged), size_bytes=len(damaged), encoding=encoding)
    digest = put_artifact(store, with_stored_blob(manifest, blob), damaged)
    del stored
    with pool_over(store) as pool:
        gc.collect()
        tracemalloc.start()
        try:
            pool.acquire(digest, soon())
            with pytest.raises(Refusal):
                pool.wait(digest, WAIT_S)
            assert tracemalloc.get_traced_memory()[1] > len(damaged)
            # The loader may be a step behind.
            until(lambda: tracemalloc.get_traced_memory()[0] < len(damaged))
        finally:
            tracemalloc.stop()
        pool.release(digest)


def test_a_flipped_bit_on_the_way_costs_the_whole_encoded_blob(tmp_path: Path) -> None:
    """No tensor has a digest of stored bytes, so everything is fetched again, and is right then."""
    manifest, stored = encoded(*large())
    digest = Digest(manifest_digest(manifest))
    with misbehaving_http(stored) as server:
        server.fault, server.num_faults = Fault.FLIPPED_BIT, 1
        store = open_store(f"oci://{server.url.removeprefix('http://')}/store", {})
        tier = NvmeTier(store=store, root=tmp_path, capacity_bytes=CAPACITY, range_bytes=RANGE)
        tier.fetch(manifest, soon())
        buffer = bytearray(len(stored))
        tier.read_blob_into(Digest(manifest.payload[0].sha256), memoryview(buffer))
        assert buffer == stored
        assert tier.contains(digest)
        assert server.sent_bytes == 2 * len(stored)
        tier.close()


@pytest.mark.parametrize(
    ("position", "text"), [(0, "elements of"), (4, "bytes are too many"), (9, "zstd"), (40, "")]
)
def test_bytes_that_do_not_decode_fail_the_load_only(
    tmp_path: Path, position: int, text: str
) -> None:
    """Right by the digest of what is stored, wrong inside: corrupt, and the pool goes on."""
    store = LocalStore(tmp_path)
    manifest, stored = encoded_sample()
    damaged = bytearray(stored)
    damaged[position] ^= 0xFF
    blob = Blob(
        sha256=sha256_digest(bytes(damaged)),
        size_bytes=len(damaged),
        encoding=encoding_of(manifest.payload[0]),
    )
    wrong = put_artifact(store, with_stored_blob(manifest, blob), bytes(damaged))
    right = put_artifact(store, manifest, stored)
    with pool_over(store) as pool:
        refusal = refusal_of(pool, wrong)
        assert refusal.reason is FailureReason.CORRUPT_ARTIFACT
        assert text in refusal.detail
        assert pool.used_bytes == 0
        assert load(pool, right)[0] == sample_artifact()[1]


def test_tensors_of_decoded_bytes_are_checked(tmp_path: Path) -> None:
    """A blob that decodes to what its digest says, with another tensor than the manifest's."""
    store = LocalStore(tmp_path)
    manifest, stored = encoded_sample()
    name = "layers.0.k"
    tensor = msgspec.structs.replace(manifest.tensors[name], sha256=sha256_digest(b"other"))
    wrong = msgspec.structs.replace(manifest, tensors={**manifest.tensors, name: tensor})
    digest = put_artifact(store, wrong, stored)
    with pool_over(store) as pool:
        refusal = refusal_of(pool, digest)
    assert refusal.reason is FailureReason.CORRUPT_ARTIFACT
    assert "layers.0.k" in refusal.detail


def test_without_the_package_an_encoded_artifact_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal says what to install; plain artifacts load."""
    store = LocalStore(tmp_path)
    digest = put_artifact(store, *encoded_sample())
    plain = put_artifact(store, *sample_artifact())
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pool_over(store) as pool:
        refusal = refusal_of(pool, digest)
        assert refusal.reason is FailureReason.UNSUPPORTED
        assert "pip install" in refusal.detail
        assert load(pool, plain)[0] == sample_artifact()[1]
