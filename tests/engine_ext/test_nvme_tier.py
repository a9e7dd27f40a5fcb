"""The nvme tier: fetched once, whole or not at all, bounded, and true over crashes."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from cartridge_engine_ext.folder_locks import DeadlinePassed, Stopped, try_lock
from cartridge_engine_ext.nvme_tier import DiskFailed, NvmeTier, TierFull
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Blob, Manifest, encode_manifest, manifest_digest
from cartridge_proto.names import ENV_FAILPOINT
from cartridge_proto.stores import (
    CorruptStore,
    NotInStore,
    Store,
    StoreError,
    StoreUnavailable,
    open_store,
)
from tests.proto.misbehaving_http import Fault, MisbehavingHttp, misbehaving_http
from tests.proto.sample_artifact import sample_artifact

RANGE = 1 << 20
NUM_RANGES = 5
NUM_TOKENS = 36_000
"""So many that a blob has five ranges of 1 MiB."""
WAIT_S = 60.0
MOUNT, UMOUNT = "/bin/mount", "/bin/umount"


@functools.cache
def artifact(seed: int = 0) -> tuple[Manifest, bytes]:
    """A manifest and its blob of just under 5 MiB."""
    return sample_artifact(num_tokens=NUM_TOKENS, seed=seed, name=f"sample-{seed}")


def digest_of(manifest: Manifest) -> Digest:
    """The artifact digest."""
    return Digest(manifest_digest(manifest))


SIZE = len(artifact()[1])
ROOM = 3 * SIZE


@pytest.fixture
def server() -> Iterator[MisbehavingHttp]:
    """A registry of three artifacts' blobs."""
    with misbehaving_http(*(artifact(seed)[1] for seed in range(3))) as state:
        yield state


def store_of(server: MisbehavingHttp) -> Store:
    """A store whose server it is."""
    return open_store(f"oci://{server.url.removeprefix('http://')}/store", {})


@contextmanager
def tier_over(
    store: Store,
    root: Path,
    capacity_bytes: int = ROOM,
    *,
    on_ready: Callable[[Digest, int], None] = lambda digest, size_bytes: None,
    on_evict: Callable[[Digest], None] = lambda digest: None,
) -> Iterator[NvmeTier]:
    """A tier that is closed at the end, and true to its invariants then."""
    tier = NvmeTier(
        store=store,
        root=root,
        capacity_bytes=capacity_bytes,
        range_bytes=RANGE,
        on_ready=on_ready,
        on_evict=on_evict,
    )
    try:
        yield tier
        tier.check_invariants()
    finally:
        tier.close()


def soon() -> float:
    """A deadline that is far away."""
    return time.monotonic() + WAIT_S


def read(tier: NvmeTier, digest: Digest, size: int = SIZE) -> bytes:
    """A blob of a known size."""
    buffer = bytearray(size)
    tier.read_blob_into(digest, memoryview(buffer))
    return bytes(buffer)


def blob_digest(manifest: Manifest) -> Digest:
    """Of the only blob."""
    return Digest(manifest.payload[0].sha256)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread or process does."""
    give_up_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


# --- fetching ------------------------------------------------------------------------------------
def test_an_artifact_is_fetched_in_ranges_and_read(server: MisbehavingHttp, tmp_path: Path) -> None:
    """All bytes are asked for once; the whole is named, and its reads are verified."""
    manifest, blob = artifact()
    ready: list[Digest] = []
    with tier_over(
        store_of(server), tmp_path, on_ready=lambda digest, size_bytes: ready.append(digest)
    ) as tier:
        assert not tier.contains(digest_of(manifest))
        tier.fetch(manifest, soon())
        assert tier.contains(digest_of(manifest))
        assert tier.read_manifest(digest_of(manifest)) == manifest
        assert read(tier, blob_digest(manifest)) == blob
        assert ready == [digest_of(manifest)]
        assert [resident.digest for resident in tier.residents()] == ready
        assert tier.used_bytes == SIZE
        tier.fetch(manifest, soon())
        assert ready == [digest_of(manifest)]
    begins = sorted(begin for _, begin, _ in server.asked)
    assert begins == [RANGE * index for index in range(NUM_RANGES)]
    assert server.sent_bytes == SIZE
    assert list((tmp_path / "partial").iterdir()) == []


def test_progress_is_told(server: MisbehavingHttp, tmp_path: Path) -> None:
    """From nothing to everything, never backwards."""
    steps: list[tuple[int, int]] = []
    with tier_over(store_of(server), tmp_path) as tier:
        tier.fetch(artifact()[0], soon(), lambda done, total: steps.append((done, total)))
    assert {total for _, total in steps} == {SIZE}
    done = [done for done, _ in steps]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, SIZE)
    # The fifth range is asked for when one of the first four has come.
    assert len(set(done)) >= 3


def test_a_new_engine_knows_what_is_whole(server: MisbehavingHttp, tmp_path: Path) -> None:
    """It announces what an earlier one fetched, and asks the store for nothing."""
    manifest, blob = artifact()
    with tier_over(store_of(server), tmp_path) as tier:
        tier.fetch(manifest, soon())
    asked = server.sent_bytes
    ready: list[Digest] = []
    with tier_over(
        store_of(server), tmp_path, on_ready=lambda digest, size_bytes: ready.append(digest)
    ) as tier:
        assert ready == [digest_of(manifest)]
        tier.fetch(manifest, soon())
        assert read(tier, blob_digest(manifest)) == blob
    assert server.sent_bytes == asked


def test_threads_fetch_an_artifact_once(server: MisbehavingHttp, tmp_path: Path) -> None:
    """Those who come second wait, and see its progress."""
    manifest, _ = artifact()
    with tier_over(store_of(server), tmp_path) as tier, ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(tier.fetch, manifest, soon()) for _ in range(4)]:
            done.result(WAIT_S)
    assert server.sent_bytes == SIZE


def test_artifacts_share_blobs(server: MisbehavingHttp, tmp_path: Path) -> None:
    """The second is whole without a byte; eviction of one keeps what the other needs."""
    manifest, blob = artifact()
    twin = msgspec.structs.replace(manifest, version="2")
    with tier_over(store_of(server), tmp_path) as tier:
        tier.fetch(manifest, soon())
        tier.fetch(twin, soon())
        assert server.sent_bytes == SIZE
        assert tier.used_bytes == SIZE
        assert tier.evict(digest_of(manifest)) is None
        assert not tier.contains(digest_of(manifest))
        assert tier.contains(digest_of(twin))
        assert read(tier, blob_digest(twin)) == blob
        assert tier.evict(digest_of(twin)) is None
        assert tier.used_bytes == 0


# --- faults of the store -------------------------------------------------------------------------
def test_a_store_that_is_away_for_a_moment_is_asked_again(
    server: MisbehavingHttp, tmp_path: Path
) -> None:
    """Ranges that failed are fetched again, the others are not."""
    server.fault, server.num_faults = Fault.RESET, 2
    with tier_over(store_of(server), tmp_path) as tier:
        tier.fetch(artifact()[0], soon())
    assert SIZE < server.sent_bytes <= SIZE + 2 * RANGE


def test_a_flipped_bit_costs_the_ranges_of_its_tensor(
    server: MisbehavingHttp, tmp_path: Path
) -> None:
    """The digests of the tensors say what to fetch again; the rest stays."""
    manifest, blob = artifact()
    server.fault, server.num_faults = Fault.FLIPPED_BIT, 1
    with tier_over(store_of(server), tmp_path) as tier:
        tier.fetch(manifest, soon())
        assert read(tier, blob_digest(manifest)) == blob
    assert SIZE < server.sent_bytes < 2 * SIZE


def test_a_store_with_other_bytes_is_corrupt(server: MisbehavingHttp, tmp_path: Path) -> None:
    """It is given up after a few rounds, and nothing is left of it."""
    server.fault = Fault.HTML_PADDED
    with tier_over(store_of(server), tmp_path) as tier:
        with pytest.raises(CorruptStore, match="hashes otherwise"):
            tier.fetch(artifact()[0], soon())
        assert tier.used_bytes == 0
        assert tier.residents() == []
    assert leftovers(tmp_path) == []


def test_a_blob_of_another_size_is_corrupt(server: MisbehavingHttp, tmp_path: Path) -> None:
    """By the server's own word."""
    server.fault = Fault.WRONG_LENGTH
    with (
        tier_over(store_of(server), tmp_path) as tier,
        pytest.raises(CorruptStore, match="the manifest says"),
    ):
        tier.fetch(artifact()[0], soon())
    assert leftovers(tmp_path) == []


def test_an_absent_blob_is_not_in_the_store(server: MisbehavingHttp, tmp_path: Path) -> None:
    """And nothing is left of the try."""
    server.blobs.clear()
    with tier_over(store_of(server), tmp_path) as tier, pytest.raises(NotInStore):
        tier.fetch(artifact()[0], soon())
    assert leftovers(tmp_path) == []


def test_a_store_that_stays_away_is_unavailable(server: MisbehavingHttp, tmp_path: Path) -> None:
    """After some tries; what was fetched before is used by the next fetch."""
    manifest, blob = artifact()
    with tier_over(store_of(server), tmp_path) as tier:
        half_fetched(tier, server, manifest)
        asked = server.sent_bytes
        server.fault, server.num_faults = Fault.NONE, None
        tier.fetch(manifest, soon())
        assert read(tier, blob_digest(manifest)) == blob
    assert server.sent_bytes - asked < SIZE


def half_fetched(tier: NvmeTier, server: MisbehavingHttp, manifest: Manifest) -> None:
    """Let a fetch fail after some ranges."""

    def break_off(done_bytes: int, total_bytes: int) -> None:
        if done_bytes:
            server.fault, server.num_faults = Fault.SERVER_ERROR, None

    with pytest.raises(StoreUnavailable, match="status 503"):
        tier.fetch(manifest, soon(), break_off)


def test_a_deadline_ends_a_slow_fetch(server: MisbehavingHttp, tmp_path: Path) -> None:
    """With the bytes it had until then; a later fetch goes on with them."""
    manifest, _ = artifact()
    server.fault = Fault.BYTE_BY_BYTE
    with tier_over(store_of(server), tmp_path) as tier:
        with pytest.raises(DeadlinePassed, match="bytes were fetched until the deadline"):
            tier.fetch(manifest, time.monotonic() + 0.2)
        assert not tier.contains(digest_of(manifest))
        server.fault = Fault.NONE
        tier.fetch(manifest, soon())


def test_closing_ends_a_fetch(server: MisbehavingHttp, tmp_path: Path) -> None:
    """At the next byte that comes."""
    server.fault = Fault.BYTE_BY_BYTE
    with tier_over(store_of(server), tmp_path) as tier, ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(tier.fetch, artifact()[0], soon())
        wait_until(lambda: server.asked)
        tier.close()
        with pytest.raises(Stopped):
            fetching.result(WAIT_S)
        with pytest.raises(StoreUnavailable):
            tier.fetch(artifact(1)[0], soon())


# --- room ----------------------------------------------------------------------------------------
def test_the_least_recently_used_goes_first(server: MisbehavingHttp, tmp_path: Path) -> None:
    """It is withdrawn before its bytes are removed."""
    manifests = [artifact(seed)[0] for seed in range(3)]
    evicted: list[tuple[Digest, bool]] = []

    def note(digest: Digest) -> None:
        path = tmp_path / "blobs" / "sha256" / blob_digest(manifests[1]).removeprefix("sha256:")
        evicted.append((digest, path.exists()))

    with tier_over(store_of(server), tmp_path, 2 * SIZE, on_evict=note) as tier:
        tier.fetch(manifests[0], soon())
        tier.fetch(manifests[1], soon())
        tier.fetch(manifests[0], soon())
        tier.fetch(manifests[2], soon())
        kept = {resident.digest for resident in tier.residents()}
        assert kept == {digest_of(manifests[0]), digest_of(manifests[2])}
        assert tier.used_bytes == 2 * SIZE
    assert evicted == [(digest_of(manifests[1]), True)]


def test_what_is_held_is_not_evicted(server: MisbehavingHttp, tmp_path: Path) -> None:
    """By nobody: a fetch that needs its room fails at its deadline, and removes nothing else."""
    manifests = [artifact(seed)[0] for seed in range(3)]
    store = store_of(server)
    with (
        tier_over(store, tmp_path, 2 * SIZE) as tier,
        tier_over(store, tmp_path, 2 * SIZE) as other,
    ):
        with tier.held(manifests[0], soon()), tier.held(manifests[1], soon()):
            assert other.evict(digest_of(manifests[0])) == "in use"
            with pytest.raises(TierFull, match="are in use"):
                other.fetch(manifests[2], time.monotonic() + 0.1)
            assert len(other.residents()) == 2
        other.fetch(manifests[2], soon())
        assert len(other.residents()) == 2


def test_a_fetch_waits_for_room(server: MisbehavingHttp, tmp_path: Path) -> None:
    """It goes on when a holder lets go."""
    manifests = [artifact(seed)[0] for seed in range(2)]
    with tier_over(store_of(server), tmp_path, SIZE) as tier, ThreadPoolExecutor(1) as pool:
        with tier.held(manifests[0], soon()):
            fetching = pool.submit(tier.fetch, manifests[1], soon())
            lock = tmp_path / "locks" / blob_digest(manifests[1]).removeprefix("sha256:")
            wait_until(lock.exists)
            assert not fetching.done()
        fetching.result(WAIT_S)
        assert tier.contains(digest_of(manifests[1]))


def test_an_artifact_above_the_bound_is_refused(server: MisbehavingHttp, tmp_path: Path) -> None:
    """At once, with both sizes."""
    with (
        tier_over(store_of(server), tmp_path, SIZE - 1) as tier,
        pytest.raises(TierFull, match=f"{SIZE} bytes; the nvme tier holds {SIZE - 1}"),
    ):
        tier.fetch(artifact()[0], soon())
    assert server.asked == []


def test_an_unfinished_blob_gives_way(server: MisbehavingHttp, tmp_path: Path) -> None:
    """Once nobody fetches it; it counts as long as it is there."""
    manifests = [artifact(seed)[0] for seed in range(2)]
    with tier_over(store_of(server), tmp_path, SIZE) as tier:
        half_fetched(tier, server, manifests[0])
        assert tier.used_bytes == SIZE
        server.fault = Fault.NONE
        tier.fetch(manifests[1], soon())
        assert tier.used_bytes == SIZE
    assert list((tmp_path / "partial").iterdir()) == []


def test_evicting_what_is_not_there_says_so(server: MisbehavingHttp, tmp_path: Path) -> None:
    """As the dram tier does."""
    with tier_over(store_of(server), tmp_path) as tier:
        assert tier.evict(digest_of(artifact()[0])) == "not resident"
        with pytest.raises(NotInStore):
            read(tier, blob_digest(artifact()[0]))


def test_other_processes_changes_are_told_by_refresh(
    server: MisbehavingHttp, tmp_path: Path
) -> None:
    """Both what they fetched and what they evicted."""
    manifest, _ = artifact()
    told: list[tuple[str, Digest]] = []
    with (
        tier_over(store_of(server), tmp_path) as tier,
        tier_over(
            store_of(server),
            tmp_path,
            on_ready=lambda digest, size_bytes: told.append(("ready", digest)),
            on_evict=lambda digest: told.append(("evict", digest)),
        ) as other,
    ):
        tier.fetch(manifest, soon())
        assert told == []
        other.refresh()
        assert told == [("ready", digest_of(manifest))]
        tier.evict(digest_of(manifest))
        other.refresh()
        other.refresh()
        assert told == [("ready", digest_of(manifest)), ("evict", digest_of(manifest))]


# --- damage --------------------------------------------------------------------------------------
def test_a_blob_that_was_damaged_here_is_fetched_again(
    server: MisbehavingHttp, tmp_path: Path
) -> None:
    """The read fails, the artifact is withdrawn and removed."""
    manifest, blob = artifact()
    evicted: list[Digest] = []
    with tier_over(store_of(server), tmp_path, on_evict=evicted.append) as tier:
        tier.fetch(manifest, soon())
        path = tmp_path / "blobs" / "sha256" / blob_digest(manifest).removeprefix("sha256:")
        with path.open("r+b") as file:
            file.seek(SIZE // 2)
            file.write(b"!")
        with pytest.raises(CorruptStore, match="hash to"):
            read(tier, blob_digest(manifest))
        assert evicted == [digest_of(manifest)]
        assert not tier.contains(digest_of(manifest))
        tier.fetch(manifest, soon())
        assert read(tier, blob_digest(manifest)) == blob


def test_a_damaged_journal_or_partial_costs_time_only(
    server: MisbehavingHttp, tmp_path: Path
) -> None:
    """A journal that lies is found out by the digest of the whole."""
    manifest, blob = artifact()
    stem = blob_digest(manifest).removeprefix("sha256:")
    folder = tmp_path / "partial"
    head = f'{{"size_bytes":{SIZE},"range_bytes":{RANGE}}}\n'
    for journal in (head + "0\n1\n2\n3\n4\n", head + "7\n-1\nx\n\n2", "junk", ""):
        with tier_over(store_of(server), tmp_path) as tier:
            (folder / f"{stem}.journal").write_text(journal)
            (folder / stem).write_bytes(bytes(SIZE))
            tier.fetch(manifest, soon())
            assert read(tier, blob_digest(manifest)) == blob
            assert tier.evict(digest_of(manifest)) is None


def test_a_manifest_that_was_damaged_here_is_no_artifact(
    server: MisbehavingHttp, tmp_path: Path
) -> None:
    """It is removed when an engine starts; the blob is still good for a fetch."""
    manifest, _ = artifact()
    with tier_over(store_of(server), tmp_path) as tier:
        tier.fetch(manifest, soon())
    asked = server.sent_bytes
    (path,) = (tmp_path / "manifests" / "sha256").iterdir()
    path.write_bytes(encode_manifest(manifest)[:-1])
    with tier_over(store_of(server), tmp_path) as tier:
        assert tier.residents() == []
        tier.fetch(manifest, soon())
        assert len(tier.residents()) == 1
    assert server.sent_bytes == asked


def test_two_blobs_are_whole_together(tmp_path: Path) -> None:
    """An artifact of two blobs is not here while one of them is missing."""
    manifest, blobs = two_blob_artifact()
    with misbehaving_http(blobs[0]) as server, tier_over(store_of(server), tmp_path) as tier:
        with pytest.raises(NotInStore):
            tier.fetch(manifest, soon())
        assert not tier.contains(digest_of(manifest))
        server.blobs[sha256_digest(blobs[1])] = blobs[1]
        tier.fetch(manifest, soon())
        assert tier.contains(digest_of(manifest))
        for blob in blobs:
            assert read(tier, sha256_digest(blob), len(blob)) == blob


def two_blob_artifact() -> tuple[Manifest, list[bytes]]:
    """The same tensors named in two blobs, of which the tier knows sizes and digests only."""
    manifest, blob = sample_artifact()
    other = blob + b"\0"
    tensors = dict(manifest.tensors)
    moved = sorted(tensors)[0]
    tensors[moved] = msgspec.structs.replace(tensors[moved], blob=sha256_digest(other))
    payload = [
        Blob(sha256=sha256_digest(blob), size_bytes=len(blob)),
        Blob(sha256=sha256_digest(other), size_bytes=len(other)),
    ]
    return msgspec.structs.replace(manifest, tensors=tensors, payload=payload), [blob, other]


# --- crashes and processes -----------------------------------------------------------------------
PROGRAM = """
import sys, time
from pathlib import Path
from cartridge_engine_ext.nvme_tier import NvmeTier
from cartridge_proto.manifest import decode_manifest
from cartridge_proto.stores import StoreError, open_store
url, root, manifest, limit = sys.argv[1:]
try:
    tier = NvmeTier(store=open_store(url), root=Path(root), capacity_bytes=int(limit),
                    range_bytes=1 << 20)
    tier.fetch(decode_manifest(Path(manifest).read_bytes()), time.monotonic() + 60)
    tier.close()
except StoreError as error:
    print(type(error).__name__, error)
    sys.exit(3)
"""


def start_fetcher(
    server: MisbehavingHttp, root: Path, manifest: Manifest, failpoint: str = ""
) -> subprocess.Popen[str]:
    """A process of its own that fetches one artifact."""
    file = root.parent / "manifest.json"
    file.write_bytes(encode_manifest(manifest))
    url = f"oci://{server.url.removeprefix('http://')}/store"
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, url, str(root), str(file), str(ROOM)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, ENV_FAILPOINT: failpoint},
    )


def leftovers(root: Path) -> list[str]:
    """What a fetch has left but for the lock of the folder."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return sorted(path.name for path in files if path.name != "folder")


def check_names(root: Path) -> None:
    """Every file under a digest name hashes to it."""
    for path in (root / "blobs" / "sha256").iterdir():
        assert sha256_digest(path.read_bytes()) == f"sha256:{path.name}"


STEPS = [
    "nvme_before_range",
    "nvme_after_range",
    "nvme_after_journal",
    "nvme_before_verify",
    "nvme_after_verify",
    "nvme_after_fsync",
    "nvme_before_rename",
    "nvme_after_rename",
    "nvme_after_manifest",
    "before_write",
    "after_write",
    "after_fsync",
    "before_rename",
    "after_rename",
]


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_fetch_is_gone_on_with(server: MisbehavingHttp, tmp_path: Path, step: str) -> None:
    """After SIGKILL at any step no name has other bytes, and a new process finishes the work."""
    manifest, blob = artifact()
    root = tmp_path / "tier"
    with start_fetcher(server, root, manifest, step) as process:
        process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    check_names(root)
    with tier_over(store_of(server), root) as tier:
        tier.fetch(manifest, soon())
        assert read(tier, blob_digest(manifest)) == blob
        assert tier.used_bytes == SIZE
    if step not in {"nvme_before_range", "nvme_after_range", "nvme_after_journal"}:
        assert server.sent_bytes == SIZE
    assert leftovers(root / "partial") == []
    assert [name for name in leftovers(root) if name.startswith(".")] == []


@pytest.mark.parametrize("step", STEPS)
def test_a_disk_error_is_said_and_names_nothing(
    server: MisbehavingHttp, tmp_path: Path, step: str
) -> None:
    """EIO at any step fails the fetch; the next one works."""
    manifest, _ = artifact()
    root = tmp_path / "tier"
    with start_fetcher(server, root, manifest, f"{step}:error") as process:
        output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3, output
    assert "Input/output error" in output
    check_names(root)
    with tier_over(store_of(server), root) as tier:
        tier.fetch(manifest, soon())
        assert tier.contains(digest_of(manifest))


def test_a_killed_eviction_is_finished_by_the_next_engine(
    server: MisbehavingHttp, tmp_path: Path
) -> None:
    """Its manifest went first, so nobody takes it for whole."""
    root = tmp_path / "tier"
    manifests = [artifact(seed)[0] for seed in range(3)]
    with tier_over(store_of(server), root) as tier:
        for manifest in manifests:
            tier.fetch(manifest, soon())
    server.blobs.update({sha256_digest(artifact(3)[1]): artifact(3)[1]})
    with start_fetcher(server, root, artifact(3)[0], "nvme_evicting") as process:
        process.communicate(timeout=WAIT_S)
    assert process.returncode == -signal.SIGKILL
    with tier_over(store_of(server), root) as tier:
        assert len(tier.residents()) == 2
        tier.fetch(artifact(3)[0], soon())
        assert len(tier.residents()) == 3


def test_processes_fetch_an_artifact_once(server: MisbehavingHttp, tmp_path: Path) -> None:
    """Several engines of one machine share the folder and the one fetch."""
    manifest, _ = artifact()
    root = tmp_path / "tier"
    processes = [start_fetcher(server, root, manifest) for _ in range(3)]
    for process in processes:
        with process:
            output, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, output
    assert server.sent_bytes == SIZE
    with tier_over(store_of(server), root) as tier:
        assert tier.contains(digest_of(manifest))


def test_a_waiting_process_goes_on_when_the_first_is_killed(
    server: MisbehavingHttp, tmp_path: Path
) -> None:
    """The crash of a holder releases its locks."""
    manifest, blob = artifact()
    root = tmp_path / "tier"
    server.fault = Fault.SILENT
    with start_fetcher(server, root, manifest) as process:
        wait_until(lambda: server.asked)
        with tier_over(store_of(server), root) as tier, ThreadPoolExecutor(1) as pool:
            fetching = pool.submit(tier.fetch, manifest, soon())
            server.fault = Fault.NONE
            assert not fetching.done()
            process.kill()
            fetching.result(WAIT_S)
            assert read(tier, blob_digest(manifest)) == blob


def test_a_full_disk_is_said_and_leaves_nothing(server: MisbehavingHttp, tmp_path: Path) -> None:
    """A file system without room is not a corrupt store."""
    with small_disk(tmp_path / "disk", 2 << 20) as root, tier_over(store_of(server), root) as tier:
        with pytest.raises(TierFull, match="No space left on device"):
            tier.fetch(artifact()[0], soon())
        assert leftovers(root) == []


@contextmanager
def small_disk(root: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of this size."""
    root.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    command = [MOUNT, "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    try:
        yield root
    finally:
        subprocess.run([UMOUNT, str(root)], check=True)


def test_a_folder_that_cannot_be_used_is_said(server: MisbehavingHttp, tmp_path: Path) -> None:
    """At the start, as an error of the disk."""
    (tmp_path / "blobs").write_text("a file where a folder must be")
    with pytest.raises(DiskFailed, match=r"exists|Not a directory"):
        NvmeTier(store=store_of(server), root=tmp_path, capacity_bytes=ROOM)


# --- locks ---------------------------------------------------------------------------------------
def test_shared_locks_exclude_exclusive_ones(tmp_path: Path) -> None:
    """Also within a process, and a removed file is nobody's lock."""
    path = tmp_path / "lock"
    first = try_lock(path, is_shared=True)
    second = try_lock(path, is_shared=True)
    assert first is not None
    assert second is not None
    assert try_lock(path, is_shared=False) is None
    first.release()
    first.release()
    second.release()
    exclusive = try_lock(path, is_shared=False)
    assert exclusive is not None
    assert try_lock(path, is_shared=True) is None
    exclusive.remove()
    fresh = try_lock(path, is_shared=False)
    assert fresh is not None
    assert not exclusive.try_share()
    exclusive.release()
    assert fresh.try_share()
    again = try_lock(path, is_shared=True)
    assert again is not None
    again.release()
    fresh.release()


def test_random_work_of_threads_keeps_the_bound(server: MisbehavingHttp, tmp_path: Path) -> None:
    """Fetches, reads and evictions over two tiers of one folder, with room for two of three."""
    manifests = [artifact(seed)[0] for seed in range(3)]
    blobs = [artifact(seed)[1] for seed in range(3)]
    store = store_of(server)
    failures: list[BaseException] = []

    def work(tier: NvmeTier, start: int) -> None:
        try:
            for step in range(start, start + 6):
                index = step % 3
                with tier.held(manifests[index], soon()):
                    assert read(tier, blob_digest(manifests[index])) == blobs[index]
                tier.evict(digest_of(manifests[(index + 1) % 3]))
                tier.refresh()
        except BaseException as error:
            failures.append(error)

    with (
        tier_over(store, tmp_path, 2 * SIZE) as tier,
        tier_over(store, tmp_path, 2 * SIZE) as other,
    ):
        threads = [
            threading.Thread(target=work, args=(one, start))
            for start, one in enumerate([tier, other, tier, other])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert failures == []


def test_every_error_of_the_tier_is_one_of_stores() -> None:
    """Callers of stores need no further clause."""
    assert issubclass(TierFull, StoreUnavailable)
    assert issubclass(DiskFailed, StoreError)
