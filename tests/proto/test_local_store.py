"""The store: what is put is read back, and bytes that changed are never returned."""

import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import (
    MAX_MANIFEST_BYTES,
    Blob,
    InvalidManifest,
    Manifest,
    ManifestDigest,
    encode_manifest,
    manifest_digest,
)
from cartridge_proto.names import ENV_FAILPOINT
from cartridge_proto.stores import (
    CorruptStore,
    LocalStore,
    NotInStore,
    StoreError,
    StoreUnavailable,
)
from tests.proto.sample_artifact import safetensors_bytes, sample_artifact

MANIFEST, BLOB = sample_artifact()
BLOB_DIGEST = sha256_digest(BLOB)
ABSENT = sha256_digest(b"not in any store")

names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,12}@[a-z0-9][a-z0-9._-]{0,12}", fullmatch=True)


@contextmanager
def new_store() -> Iterator[LocalStore]:
    """A store in a folder of its own; for property tests, which share a `tmp_path`."""
    with tempfile.TemporaryDirectory() as folder:
        yield LocalStore(Path(folder) / "store")


def filled(root: Path) -> tuple[LocalStore, ManifestDigest]:
    """A store that holds the sample artifact."""
    store = LocalStore(root)
    store.put_blob(BLOB)
    return store, store.put_manifest(MANIFEST)


def read(store: LocalStore, digest: Digest, size: int) -> bytes:
    """A blob of a known size."""
    buffer = bytearray(size)
    store.read_blob_into(digest, memoryview(buffer))
    return bytes(buffer)


def files(root: Path) -> list[str]:
    """Names of all files, relative to the store."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def put_versions(store: LocalStore, count: int) -> list[ManifestDigest]:
    """Store artifacts that differ in their version only."""
    digests = []
    for version in range(count):
        manifest, blob = sample_artifact(version=str(version))
        store.put_blob(blob)
        digests.append(store.put_manifest(manifest))
    return digests


# --- reading what was written --------------------------------------------------------------------
@given(
    st.lists(st.binary(max_size=300), max_size=5),
    st.dictionaries(names, st.integers(0, 2), max_size=4),
)
def test_blobs_and_aliases_are_read_back(blobs: list[bytes], aliases: dict[str, int]) -> None:
    """Any blobs, put twice, and any aliases are there for another reader of the folder."""
    with new_store() as store:
        digests = [store.put_blob(blob) for blob in blobs * 2]
        artifacts = put_versions(store, 3)
        for alias, index in aliases.items():
            store.set_alias(alias, artifacts[index])
        reader = LocalStore(store.root)
        assert [read(reader, *pair) for pair in zip(digests, map(len, blobs * 2), strict=True)] == (
            blobs * 2
        )
        expected = {alias: artifacts[index] for alias, index in aliases.items()}
        assert reader.aliases() == expected
        assert list(reader.aliases()) == sorted(aliases)
        assert {alias: reader.resolve(alias) for alias in aliases} == expected


def test_an_artifact_is_stored_under_its_digests(tmp_path: Path) -> None:
    """The folder layout is the one of docs/spec/manifest-v1.md."""
    store, digest = filled(tmp_path)
    store.set_alias(MANIFEST.alias, digest)
    assert digest == manifest_digest(MANIFEST)
    assert files(tmp_path) == [
        "aliases/harbour-rules@1",
        f"blobs/sha256/{BLOB_DIGEST[7:]}",
        f"manifests/sha256/{digest[7:]}.json",
    ]
    assert store.manifest_path(digest).read_bytes() == encode_manifest(MANIFEST)
    assert (tmp_path / "aliases/harbour-rules@1").read_text() == digest
    assert store.read_manifest(digest) == store.verify(digest) == MANIFEST
    assert store.manifest_digests() == [digest]


def test_stored_files_are_readable_by_others(tmp_path: Path) -> None:
    """Engines that run as another user can read what a builder wrote."""
    store, _ = filled(tmp_path)
    assert stat.S_IMODE(store.blob_path(BLOB_DIGEST).stat().st_mode) == 0o644


def test_an_alias_moves_to_a_new_digest(tmp_path: Path) -> None:
    """Setting an alias again replaces what it stands for."""
    store = LocalStore(tmp_path)
    for digest in put_versions(store, 2):
        store.set_alias("handbook@1", digest)
        assert store.resolve("handbook@1") == digest


def test_an_alias_needs_a_manifest(tmp_path: Path) -> None:
    """An alias for a digest that is not stored is refused, and none is written."""
    store = LocalStore(tmp_path)
    with pytest.raises(NotInStore, match=f"manifest {ABSENT} is not in the store"):
        store.set_alias("handbook@1", ABSENT)
    assert files(tmp_path) == []


def test_a_damaged_alias_does_not_hide_the_others(tmp_path: Path) -> None:
    """Listing leaves out an alias that holds no digest."""
    store, digest = filled(tmp_path)
    store.set_alias("damaged@1", digest)
    store.set_alias("good@1", digest)
    (tmp_path / "aliases" / "damaged@1").write_text("junk")
    assert store.aliases() == {"good@1": digest}


def test_a_digest_stands_for_itself(tmp_path: Path) -> None:
    """Resolving a digest asks no folder."""
    assert LocalStore(tmp_path).resolve(ABSENT) == ABSENT


def test_an_empty_folder_is_an_empty_store(tmp_path: Path) -> None:
    """Nothing is listed, and nothing is written by listing."""
    store = LocalStore(tmp_path / "nowhere")
    assert store.aliases() == {}
    assert store.manifest_digests() == []
    assert not store.root.exists()


def test_the_longest_alias_can_be_stored(tmp_path: Path) -> None:
    """127 characters on each side of the `@` fit a file name."""
    store, digest = filled(tmp_path)
    alias = "n" * 127 + "@" + "v" * 127
    store.set_alias(alias, digest)
    assert store.resolve(alias) == digest


# --- what is absent or misspelled ----------------------------------------------------------------
def test_what_is_absent_is_said_to_be_absent(tmp_path: Path) -> None:
    """A missing alias, manifest or blob is NotInStore, also on verification."""
    store, digest = filled(tmp_path)
    with pytest.raises(NotInStore):
        store.resolve("handbook@9")
    with pytest.raises(NotInStore):
        store.read_manifest(ABSENT)
    with pytest.raises(NotInStore):
        read(store, ABSENT, 1)
    store.blob_path(BLOB_DIGEST).unlink()
    with pytest.raises(NotInStore):
        store.verify(digest)


@pytest.mark.parametrize(
    "alias",
    [
        "",
        "handbook",
        "@1",
        "a@",
        "../a@1",
        "a@../../x",
        "a/b@1",
        "A@1",
        "a@1\n",
        "a@1\0",
        ".a@1",
        "a@1@2",
        "a" * 128 + "@1",
        "sha256:xyz",
        "sha256:" + "0" * 64 + "\n",
    ],
)
def test_a_name_that_is_no_alias_never_becomes_a_path(tmp_path: Path, alias: str) -> None:
    """Anything but a checked alias or digest is unknown, for reading and for writing."""
    store = LocalStore(tmp_path / "store")
    with pytest.raises(NotInStore):
        store.resolve(alias)
    with pytest.raises(NotInStore):
        store.set_alias(alias, ABSENT)
    assert files(tmp_path) == []


@pytest.mark.parametrize("text", ["sha256:../../x", "x", "sha256:" + "A" * 64])
def test_a_path_is_made_of_a_digest_only(tmp_path: Path, text: str) -> None:
    """A string that is no digest has no path, whatever its type says."""
    store = LocalStore(tmp_path)
    for path_of in (store.blob_path, store.manifest_path):
        with pytest.raises(ValueError, match="not a sha256 digest"):
            path_of(Digest(text))


def test_a_manifest_needs_its_blobs_first(tmp_path: Path) -> None:
    """A manifest whose blob is missing is refused, and nothing is written."""
    store = LocalStore(tmp_path / "store")
    with pytest.raises(NotInStore, match=f"payload: blob {BLOB_DIGEST} is not in the store"):
        store.put_manifest(MANIFEST)
    assert files(tmp_path) == []


def test_an_invalid_manifest_is_not_stored(tmp_path: Path) -> None:
    """The contract is checked on the way in."""
    store, digest = filled(tmp_path)
    with pytest.raises(InvalidManifest):
        store.put_manifest(msgspec.structs.replace(MANIFEST, num_tokens=6))
    assert store.manifest_digests() == [digest]


def test_files_beside_the_layout_are_not_listed(tmp_path: Path) -> None:
    """Strangers' files and unfinished writes are neither aliases nor manifests."""
    store, digest = filled(tmp_path)
    store.set_alias("handbook@1", digest)
    (tmp_path / "aliases" / ".partial-x").write_text("half")
    (tmp_path / "aliases" / "README").write_text("hello")
    (tmp_path / "manifests" / "sha256" / "notes.json").write_text("{}")
    assert store.aliases() == {"handbook@1": digest}
    assert store.manifest_digests() == [digest]


def test_storing_again_mends_a_damaged_blob(tmp_path: Path) -> None:
    """A rebuilt artifact replaces bytes that no longer hash to their name."""
    store, digest = filled(tmp_path)
    for path in (store.blob_path(BLOB_DIGEST), store.manifest_path(digest)):
        path.write_bytes(b"junk")
    with pytest.raises(CorruptStore):
        store.verify(digest)
    assert store.put_blob(BLOB) == BLOB_DIGEST
    assert store.put_manifest(MANIFEST) == digest
    assert store.verify(digest) == MANIFEST


# --- corruption ----------------------------------------------------------------------------------
@given(st.binary(min_size=1, max_size=4000), st.data())
def test_one_flipped_bit_of_a_blob_is_refused(blob: bytes, data: st.DataObject) -> None:
    """A blob with any one bit changed raises CorruptStore that shows the digest."""
    with new_store() as store:
        digest = store.put_blob(blob)
        changed = bytearray(blob)
        position = data.draw(st.integers(0, len(blob) - 1))
        changed[position] ^= 1 << data.draw(st.integers(0, 7))
        store.blob_path(digest).write_bytes(changed)
        with pytest.raises(CorruptStore, match=digest):
            read(store, digest, len(blob))


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_a_blob_is_returned_whole_and_right_or_not_at_all(blob: bytes, other: bytes) -> None:
    """Whatever bytes lie under a digest, a read gives the right ones or CorruptStore."""
    with new_store() as store:
        digest = store.put_blob(blob)
        store.blob_path(digest).write_bytes(other)
        try:
            found = read(store, digest, len(blob))
        except CorruptStore:
            assert other != blob
        else:
            assert found == other == blob


def test_a_cut_or_longer_blob_is_refused_with_both_sizes(tmp_path: Path) -> None:
    """The text names the size on disk and the size that was asked for."""
    store, digest = filled(tmp_path)
    for changed in (BLOB[:-1], BLOB + b"\0", b""):
        store.blob_path(BLOB_DIGEST).write_bytes(changed)
        message = f"{len(changed)} bytes; the manifest says {len(BLOB)}"
        with pytest.raises(CorruptStore, match=message):
            read(store, BLOB_DIGEST, len(BLOB))
        with pytest.raises(CorruptStore, match=message):
            store.verify(digest)


def test_a_blob_larger_than_one_read_is_verified_to_its_last_byte(tmp_path: Path) -> None:
    """Reading in pieces leaves no piece out."""
    store = LocalStore(tmp_path)
    blob = bytes(range(256)) * 4096 * 2 + b"tail"
    digest = store.put_blob(blob)
    assert read(store, digest, len(blob)) == blob
    store.blob_path(digest).write_bytes(blob[:-1] + b"L")
    with pytest.raises(CorruptStore, match="hash to"):
        read(store, digest, len(blob))


def _replace_by_symlink(path: Path) -> None:
    copy = path.with_name("copy")
    path.rename(copy)
    path.symlink_to(copy)


def _replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("replace", [_replace_by_symlink, _replace_by_folder, _replace_by_pipe])
def test_anything_but_a_regular_file_is_refused(
    tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    """A symlink, even to the right bytes, a folder or a pipe is an error and does not block."""
    store, digest = filled(tmp_path)
    store.set_alias("handbook@1", digest)
    replace(store.blob_path(BLOB_DIGEST))
    with pytest.raises(StoreError):
        read(store, BLOB_DIGEST, len(BLOB))
    with pytest.raises(StoreError):
        store.verify(digest)
    replace(store.manifest_path(digest))
    with pytest.raises(StoreError):
        store.read_manifest(digest)
    replace(tmp_path / "aliases" / "handbook@1")
    with pytest.raises(StoreError):
        store.resolve("handbook@1")


@given(st.data())
def test_one_flipped_bit_of_a_manifest_is_refused(data: st.DataObject) -> None:
    """A manifest with any one bit changed is never returned."""
    with new_store() as store:
        _, digest = filled(store.root)
        changed = bytearray(encode_manifest(MANIFEST))
        changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        store.manifest_path(digest).write_bytes(changed)
        with pytest.raises(CorruptStore, match=f"manifest {digest}: the stored bytes hash to"):
            store.read_manifest(digest)


def test_an_oversized_manifest_is_refused_with_the_limit(tmp_path: Path) -> None:
    """No more than the limit is read."""
    store, digest = filled(tmp_path)
    store.manifest_path(digest).write_bytes(b" " * (MAX_MANIFEST_BYTES + 1))
    with pytest.raises(CorruptStore, match=f"more than {MAX_MANIFEST_BYTES} bytes"):
        store.read_manifest(digest)


def test_bytes_with_the_right_hash_that_are_no_manifest_are_refused(tmp_path: Path) -> None:
    """A digest says which bytes, not that they are valid."""
    store = LocalStore(tmp_path)
    digest = sha256_digest(b"{}")
    store.manifest_path(digest).parent.mkdir(parents=True)
    store.manifest_path(digest).write_bytes(b"{}")
    with pytest.raises(CorruptStore, match="'name' is a required property"):
        store.read_manifest(digest)


@pytest.mark.parametrize("content", [b"", b"sha256:short", ABSENT.encode() + b"\n", b"\xff" * 71])
def test_an_alias_that_holds_no_digest_is_refused(tmp_path: Path, content: bytes) -> None:
    """The text names the alias."""
    store, digest = filled(tmp_path)
    store.set_alias("handbook@1", digest)
    (tmp_path / "aliases" / "handbook@1").write_bytes(content)
    with pytest.raises(CorruptStore, match="alias handbook@1"):
        store.resolve("handbook@1")


def test_an_oversized_alias_is_refused_with_the_limit(tmp_path: Path) -> None:
    """No more than the limit is read."""
    store, digest = filled(tmp_path)
    store.set_alias("handbook@1", digest)
    (tmp_path / "aliases" / "handbook@1").write_bytes(b"s" * 10_000)
    with pytest.raises(CorruptStore, match="more than 128 bytes"):
        store.resolve("handbook@1")


# --- verification --------------------------------------------------------------------------------
def _stored_with(store: LocalStore, manifest: Manifest, blob: bytes) -> Digest:
    """Store an artifact whose tensors point at another blob."""
    digest = store.put_blob(blob)
    tensors = {
        name: msgspec.structs.replace(tensor, blob=digest)
        for name, tensor in manifest.tensors.items()
    }
    payload = [Blob(sha256=digest, size_bytes=len(blob))]
    return store.put_manifest(msgspec.structs.replace(manifest, tensors=tensors, payload=payload))


def test_verify_refuses_a_blob_that_holds_other_tensors(tmp_path: Path) -> None:
    """A blob with the right hash whose header disagrees with the manifest is refused."""
    store = LocalStore(tmp_path)
    shape = [2, 5, 4]
    raw = dict.fromkeys(("layers.0.k", "layers.0.v"), ("F32", shape, b"\x00" * 160))
    blob = safetensors_bytes(raw | {"layers.1.k": ("F32", shape, b"\0" * 160)}) + b"\0" * 400
    digest = _stored_with(store, MANIFEST, blob)
    with pytest.raises(CorruptStore, match=r"tensor layers\.1\.v: in the blob or in the manifest"):
        store.verify(digest)


def test_verify_refuses_a_tensor_that_hashes_differently(tmp_path: Path) -> None:
    """The digest of each tensor is checked, and the text names the tensor."""
    store = LocalStore(tmp_path)
    digest = _stored_with(store, MANIFEST, BLOB[:-1] + bytes([BLOB[-1] ^ 1]))
    with pytest.raises(CorruptStore, match=re.escape("tensors.layers.1.v.sha256")):
        store.verify(digest)


def test_verify_takes_no_memory_for_a_blob_that_is_not_that_large(tmp_path: Path) -> None:
    """A manifest that claims a petabyte is refused by size, before any memory is taken."""
    store, _ = filled(tmp_path)
    payload = [Blob(sha256=BLOB_DIGEST, size_bytes=1 << 50)]
    digest = store.put_manifest(msgspec.structs.replace(MANIFEST, payload=payload))
    with pytest.raises(CorruptStore, match=f"{len(BLOB)} bytes; the manifest says {1 << 50}"):
        store.verify(digest)


# --- interrupted writes --------------------------------------------------------------------------
def _writer(code: str, root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    program = (
        "import itertools, resource, sys\n"
        "from pathlib import Path\n"
        "from cartridge_proto.stores import LocalStore, StoreUnavailable\n"
        "store = LocalStore(Path(sys.argv[1]))\n" + code
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, str(root), *arguments], stderr=subprocess.PIPE
    )


def _wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path) -> None:
    """A write that fails half way leaves neither a digest name nor an unfinished file."""
    code = (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    store.put_blob(bytes(5000))\n"
        "except StoreUnavailable as error:\n    sys.exit(3 if 'too large' in str(error) else 4)\n"
    )
    with _writer(code, tmp_path) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert files(tmp_path) == []


def test_a_killed_writer_leaves_no_wrong_bytes_under_a_digest(tmp_path: Path) -> None:
    """After SIGKILL in the middle of writing, every file with a digest name hashes to it."""
    code = "for n in itertools.count():\n    store.put_blob(n.to_bytes(8, 'big') * (1 << 18))\n"
    folder = tmp_path / "blobs" / "sha256"
    with _writer(code, tmp_path) as process:
        try:
            _wait_until(lambda: len(list(folder.glob("[0-9a-f]*"))) >= 3)
            _wait_until(lambda: list(folder.glob(".partial-*")))
        finally:
            process.kill()
    whole = [path for path in folder.iterdir() if not path.name.startswith(".partial-")]
    assert len(whole) >= 3
    for path in whole:
        assert sha256_digest(path.read_bytes()) == f"sha256:{path.name}"


STEPS = ["before_write", "after_write", "after_fsync", "before_rename", "after_rename"]
PUT = "store.put_blob(b'first')\n" + (
    "import os\nos.environ['CARTRIDGE_FAILPOINT'] = sys.argv[2]\nstore.put_blob(b'second')\n"
)


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_killed_at_any_step_leaves_whole_names_only(tmp_path: Path, step: str) -> None:
    """What was there stays, what was written is whole or absent, and writing again works."""
    with _writer(PUT, tmp_path, step) as process:
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    store = LocalStore(tmp_path)
    assert read(store, sha256_digest(b"first"), 5) == b"first"
    second = sha256_digest(b"second")
    assert store.has_blob(second) == (step == "after_rename")
    for path in (tmp_path / "blobs" / "sha256").glob("[0-9a-f]*"):
        assert sha256_digest(path.read_bytes()) == f"sha256:{path.name}"
    assert store.put_blob(b"second") == second
    assert read(store, second, 6) == b"second"


@pytest.mark.parametrize("step", STEPS)
def test_a_disk_error_at_any_step_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """With the path and the system's words; no unfinished file is left."""
    store = LocalStore(tmp_path)
    monkeypatch.setenv(ENV_FAILPOINT, f"other,{step}:error")
    with pytest.raises(StoreUnavailable, match=r"blobs/sha256/[0-9a-f]+: Input/output error"):
        store.put_blob(b"second")
    names = [Path(name).name for name in files(tmp_path)]
    assert [name for name in names if name.startswith(".")] == []
    assert names == ([sha256_digest(b"second")[7:]] if step == "after_rename" else [])


def test_a_failpoint_that_is_not_named_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does an empty variable, or a name that only begins alike."""
    for text in ("", "after", "after_rename_too", "after_rename:other"):
        monkeypatch.setenv(ENV_FAILPOINT, text)
        digest = LocalStore(tmp_path).put_blob(text.encode())
        assert LocalStore(tmp_path).blob_path(digest).read_bytes() == text.encode()
