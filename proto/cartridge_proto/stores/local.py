"""A Cartridge store in a local folder: content-addressed blobs, manifests and aliases.

Owns the layout `blobs/sha256/<hex>`, `manifests/sha256/<hex>.json`, `aliases/<name>@<version>`,
atomic writes and the check of every digest on read. Refuses paths made of anything but a digest or
a checked alias, and never returns a byte that does not hash to its name.
"""

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cartridge_proto.digest import Digest, parse_digest, sha256_digest
from cartridge_proto.manifest import (
    MAX_MANIFEST_BYTES,
    InvalidManifest,
    Manifest,
    ManifestDigest,
    decode_manifest,
    encode_manifest,
)
from cartridge_proto.safetensors_header import InvalidPayload, check_blob
from cartridge_proto.stores.interface import CorruptStore, NotInStore, StoreError

_ALIAS = re.compile(r"[a-z0-9][a-z0-9._-]{0,126}@[a-z0-9][a-z0-9._-]{0,126}")
_CHUNK_BYTES = 1 << 20
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Never through a symlink, and never waiting for the other end of a pipe."""
_MAX_ALIAS_BYTES = 128


class LocalStore:
    """A store folder. Readers and writers of several processes may share it.

    Every write goes to a temporary file, is flushed to disk and renamed, so that a name is either
    absent or whole. Blobs and manifests are never rewritten; aliases move atomically.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    # --- writing -----------------------------------------------------------------------------
    def put_blob(self, data: bytes | memoryview) -> Digest:
        """Store a blob and return its digest; storing it again mends it if it was damaged."""
        digest = sha256_digest(data)
        self._write_once(self.blob_path(digest), data)
        return digest

    def put_manifest(self, manifest: Manifest) -> ManifestDigest:
        """Store a manifest whose blobs are all present, and return the artifact digest.

        Raises:
            InvalidManifest: the manifest breaks the contract.
            NotInStore: a blob of the payload is missing.
        """
        data = encode_manifest(manifest)
        for blob in manifest.payload:
            if not self.blob_path(parse_digest(blob.sha256)).exists():
                raise NotInStore(f"payload: blob {blob.sha256} is not in the store")
        digest = sha256_digest(data)
        self._write_once(self.manifest_path(digest), data)
        return ManifestDigest(digest)

    def set_alias(self, alias: str, digest: Digest) -> None:
        """Let `name@version` stand for a digest from now on.

        Raises:
            NotInStore: not an alias, or no such manifest.
        """
        path = self._alias_path(alias)
        if not self.manifest_path(digest).exists():
            raise NotInStore(f"alias {alias}: manifest {digest} is not in the store")
        self._write(path, digest.encode())

    # --- reading -----------------------------------------------------------------------------
    def resolve(self, alias_or_digest: str) -> Digest:
        """The digest that an alias stands for; a digest stands for itself.

        Raises:
            NotInStore: there is no such alias.
            CorruptStore: the alias file does not hold a digest.
        """
        if alias_or_digest.startswith("sha256:"):
            try:
                return parse_digest(alias_or_digest)
            except ValueError as error:
                raise NotInStore(str(error)) from error
        data = self._read(self._alias_path(alias_or_digest), _MAX_ALIAS_BYTES)
        try:
            return parse_digest(data.decode("ascii", "replace"))
        except ValueError as error:
            raise CorruptStore(f"alias {alias_or_digest}: {error}") from error

    def aliases(self) -> dict[str, Digest]:
        """All aliases that hold a digest, sorted by name; a damaged one does not hide the rest."""
        folder = self.root / "aliases"
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        found = {}
        for name in names:
            if _ALIAS.fullmatch(name):
                with contextlib.suppress(StoreError):
                    found[name] = self.resolve(name)
        return found

    def manifest_digests(self) -> list[Digest]:
        """Digests of all manifests, sorted."""
        folder = self.root / "manifests" / "sha256"
        stems = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
        return [Digest(f"sha256:{stem}") for stem in stems if re.fullmatch("[0-9a-f]{64}", stem)]

    def read_manifest(self, digest: Digest) -> Manifest:
        """Read and verify a manifest.

        Raises:
            NotInStore: no such manifest.
            CorruptStore: the bytes do not hash to the digest, or are no valid manifest.
        """
        data = self._read(self.manifest_path(digest), MAX_MANIFEST_BYTES)
        if sha256_digest(data) != digest:
            raise CorruptStore(f"manifest {digest}: the stored bytes hash to {sha256_digest(data)}")
        try:
            return decode_manifest(data)
        except InvalidManifest as error:
            raise CorruptStore(f"manifest {digest}: {error}") from error

    def read_blob_into(self, digest: Digest, buffer: memoryview) -> None:
        """Read a blob into private memory of exactly its size, and verify that memory.

        Raises:
            NotInStore: no such blob.
            CorruptStore: wrong size, or the bytes read do not hash to the digest.
        """
        with self._open(self.blob_path(digest)) as descriptor:
            size = len(buffer)
            _check_size(descriptor, digest, size)
            hasher = hashlib.sha256()
            position = 0
            while position < size:
                count = os.readv(descriptor, [buffer[position : position + _CHUNK_BYTES]])
                if count == 0:
                    raise CorruptStore(f"blob {digest}: ended after {position} of {size} bytes")
                hasher.update(buffer[position : position + count])
                position += count
        found = "sha256:" + hasher.hexdigest()
        if found != digest:
            raise CorruptStore(f"blob {digest}: the stored bytes hash to {found}")

    def verify(self, digest: Digest) -> Manifest:
        """Read an artifact whole and check every digest, shape and range in it.

        Raises:
            NotInStore: the manifest or a blob is missing.
            CorruptStore: naming the first thing that does not match.
        """
        manifest = self.read_manifest(digest)
        for blob in manifest.payload:
            blob_digest = parse_digest(blob.sha256)
            with self._open(self.blob_path(blob_digest)) as descriptor:
                _check_size(descriptor, blob_digest, blob.size_bytes)
            buffer = memoryview(bytearray(blob.size_bytes))
            self.read_blob_into(blob_digest, buffer)
            try:
                check_blob(manifest, blob.sha256, buffer)
            except InvalidPayload as error:
                raise CorruptStore(f"blob {blob.sha256}: {error}") from error
        return manifest

    # --- paths and files -----------------------------------------------------------------------
    def blob_path(self, digest: Digest) -> Path:
        """Where a blob lies."""
        return self.root / "blobs" / "sha256" / parse_digest(digest).removeprefix("sha256:")

    def manifest_path(self, digest: Digest) -> Path:
        """Where a manifest lies."""
        stem = parse_digest(digest).removeprefix("sha256:")
        return self.root / "manifests" / "sha256" / f"{stem}.json"

    def _alias_path(self, alias: str) -> Path:
        if _ALIAS.fullmatch(alias) is None:
            raise NotInStore(f"not an alias (name@version): {alias[:80]!r}")
        return self.root / "aliases" / alias

    @contextlib.contextmanager
    def _open(self, path: Path) -> Iterator[int]:
        try:
            descriptor = os.open(path, _OPEN_FLAGS)
        except FileNotFoundError as error:
            raise NotInStore(f"not in the store: {path.name}") from error
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StoreError(f"{path}: not a regular file")
            yield descriptor
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _read(self, path: Path, max_bytes: int) -> bytes:
        with self._open(path) as descriptor:
            data = os.read(descriptor, max_bytes + 1)
        if len(data) > max_bytes:
            raise CorruptStore(f"{path.name}: more than {max_bytes} bytes")
        return data

    def _write_once(self, path: Path, data: bytes | memoryview) -> None:
        """Write a content-addressed file, unless the same bytes are there already."""
        try:
            with self._open(path) as descriptor:
                is_there = os.fstat(descriptor).st_size == len(data) and (
                    os.pread(descriptor, len(data), 0) == data
                )
        except StoreError:
            is_there = False
        if not is_there:
            self._write(path, data)

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _check_size(descriptor: int, digest: Digest, size_bytes: int) -> None:
    """Compare sizes first, so that no memory is taken for a blob that is not there."""
    found = os.fstat(descriptor).st_size
    if found != size_bytes:
        raise CorruptStore(f"blob {digest}: {found} bytes; the manifest says {size_bytes}")
