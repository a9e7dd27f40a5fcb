"""A store behind the nvme tier: near bytes first, and the disk never fails a load."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cartridge_engine_ext.nvme_source import NvmeSource
from cartridge_engine_ext.nvme_tier import NvmeTier
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.names import ENV_FAILPOINT
from cartridge_proto.residency import Tier
from cartridge_proto.stores import NotInStore
from tests.engine_ext.stored_artifacts import ObservedStore, put_artifact
from tests.proto.sample_artifact import sample_artifact

MANIFEST, BLOB = sample_artifact()
BLOB_DIGEST = sha256_digest(BLOB)


@pytest.fixture
def store(tmp_path: Path) -> ObservedStore:
    """A store that holds the sample artifact."""
    return ObservedStore(tmp_path / "store")


@pytest.fixture
def digest(store: ObservedStore) -> Digest:
    """The artifact's."""
    return put_artifact(store, MANIFEST, BLOB)


@pytest.fixture
def tier(store: ObservedStore, tmp_path: Path) -> Iterator[NvmeTier]:
    """A tier with room."""
    tier = NvmeTier(store=store, root=tmp_path / "nvme", capacity_bytes=1 << 20)
    yield tier
    tier.close()


def soon() -> float:
    """A deadline that is far away."""
    return time.monotonic() + 60


def read(source: NvmeSource) -> bytes:
    """The blob."""
    buffer = bytearray(len(BLOB))
    source.read_blob_into(BLOB_DIGEST, memoryview(buffer))
    return bytes(buffer)


def test_bytes_are_remote_once_and_then_near(
    store: ObservedStore, tier: NvmeTier, digest: Digest
) -> None:
    """The second load asks the store for nothing, not even the manifest."""
    steps: list[tuple[Digest, int, int]] = []
    source = NvmeSource(store, tier, lambda *step: steps.append(step))
    assert source.fetch(digest, soon()) is Tier.REMOTE
    assert read(source) == BLOB
    assert steps[-1] == (digest, len(BLOB), len(BLOB))
    store.error = AssertionError("the store was asked")
    store.manifest_path(digest).unlink()
    assert source.fetch(digest, soon()) is Tier.NVME
    assert source.read_manifest(digest) == MANIFEST
    assert read(source) == BLOB


def test_without_room_the_store_is_read(
    store: ObservedStore, digest: Digest, tmp_path: Path
) -> None:
    """An artifact that the disk cannot take is loaded all the same."""
    tier = NvmeTier(store=store, root=tmp_path / "small", capacity_bytes=len(BLOB) - 1)
    source = NvmeSource(store, tier)
    assert source.fetch(digest, soon()) is Tier.REMOTE
    assert read(source) == BLOB
    tier.close()


@pytest.mark.parametrize(
    "step",
    [
        *("nvme_before_range", "nvme_after_journal", "nvme_after_verify", "nvme_before_rename"),
        *("nvme_after_manifest", "before_write", "after_fsync", "after_rename"),
    ],
)
def test_a_failing_disk_is_read_past(
    store: ObservedStore,
    tier: NvmeTier,
    digest: Digest,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    """EIO at any step, also while the manifest is written, fails no load that the store serves."""
    source = NvmeSource(store, tier)
    monkeypatch.setenv(ENV_FAILPOINT, f"{step}:error")
    assert source.fetch(digest, soon()) is Tier.REMOTE
    assert read(source) == BLOB
    monkeypatch.delenv(ENV_FAILPOINT)
    source.fetch(digest, soon())
    assert tier.contains(digest)


def test_damage_on_the_disk_is_read_around(
    store: ObservedStore, tier: NvmeTier, digest: Digest
) -> None:
    """And the next fetch mends it."""
    source = NvmeSource(store, tier)
    source.fetch(digest, soon())
    path = tier.root / "blobs" / "sha256" / BLOB_DIGEST.removeprefix("sha256:")
    path.write_bytes(bytes(len(BLOB)))
    assert read(source) == BLOB
    assert not tier.contains(digest)
    assert source.fetch(digest, soon()) is Tier.REMOTE
    assert tier.contains(digest)


def test_what_no_place_has_is_not_in_the_store(store: ObservedStore, tier: NvmeTier) -> None:
    """The store has the last word."""
    source = NvmeSource(store, tier)
    with pytest.raises(NotInStore):
        source.fetch(sha256_digest(b"absent"), soon())
    with pytest.raises(NotInStore):
        read(source)
