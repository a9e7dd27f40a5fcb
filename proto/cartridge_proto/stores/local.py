"""A Cartridge store in a local folder.

Owns the layout `blobs/sha256/<hex>`, `manifests/sha256/<hex>.json`, `aliases/<name>@<version>` and
atomic writes. Refuses paths made of anything but a digest or a checked alias, symlinks, and
anything that is not a regular file.
"""

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.failpoints import failpoint
from cartridge_proto.manifest import MAX_MANIFEST_BYTES, Manifest
from cartridge_proto.stores.interface import (
    CorruptStore,
    NotInStore,
    StoreError,
    StoreUnavailable,
)
from cartridge_proto.stores.verification import (
    MAX_ALIAS_BYTES,
    PIECE_BYTES,
    VerifiedStore,
    check_size,
    is_alias,
)

_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Never through a symlink, and never waiting for the other end of a pipe."""


class LocalStore(VerifiedStore):
    """A store folder. Readers and writers of several processes may share it.

    Every write goes to a temporary file, is flushed to disk and renamed, so that a name is either
    absent or whole. Blobs and manifests are never rewritten unless they were damaged; aliases move
    atomically.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def location(self) -> str:
        """The folder."""
        return str(self.root)

    def blob_path(self, digest: Digest) -> Path:
        """Where a blob lies."""
        return self.root / "blobs" / "sha256" / parse_digest(digest).removeprefix("sha256:")

    def manifest_path(self, digest: Digest) -> Path:
        """Where a manifest lies."""
        stem = parse_digest(digest).removeprefix("sha256:")
        return self.root / "manifests" / "sha256" / f"{stem}.json"

    # --- reading -------------------------------------------------------------------------------
    def _read_alias(self, alias: str) -> bytes:
        return self._read(self.root / "aliases" / alias, MAX_ALIAS_BYTES + 1)

    def _read_aliases(self) -> Iterable[tuple[str, bytes]]:
        folder = self.root / "aliases"
        for path in folder.iterdir() if folder.is_dir() else ():
            if is_alias(path.name):
                with contextlib.suppress(StoreError):
                    yield path.name, self._read_alias(path.name)

    def _manifest_stems(self) -> Iterable[str]:
        folder = self.root / "manifests" / "sha256"
        return (path.stem for path in folder.glob("*.json")) if folder.is_dir() else ()

    def _read_manifest_bytes(self, digest: Digest) -> bytes:
        return self._read(self.manifest_path(digest), MAX_MANIFEST_BYTES + 1)

    def _has_manifest(self, digest: Digest) -> bool:
        return self.manifest_path(digest).exists()

    def _blob_size(self, digest: Digest) -> int:
        with open_regular(self.blob_path(digest)) as descriptor:
            return os.fstat(descriptor).st_size

    def _read_pieces(
        self, digest: Digest, offset: int, buffer: memoryview, size_bytes: int
    ) -> Iterator[int]:
        with open_regular(self.blob_path(digest)) as descriptor:
            check_size(digest, os.fstat(descriptor).st_size, size_bytes)
            # The kernel reads on while a piece is hashed.
            os.posix_fadvise(descriptor, offset, len(buffer), os.POSIX_FADV_SEQUENTIAL)
            os.posix_fadvise(descriptor, offset, len(buffer), os.POSIX_FADV_WILLNEED)
            position = 0
            while position < len(buffer):
                piece = buffer[position : position + PIECE_BYTES]
                count = os.preadv(descriptor, [piece], offset + position)
                if count == 0:
                    return
                yield count
                position += count

    def _read(self, path: Path, max_bytes: int) -> bytes:
        with open_regular(path) as descriptor:
            return os.read(descriptor, max_bytes)

    # --- writing -------------------------------------------------------------------------------
    def _write_blob(self, digest: Digest, data: bytes | memoryview) -> None:
        self._write_once(self.blob_path(digest), data)

    def _write_manifest(self, digest: Digest, data: bytes, manifest: Manifest) -> None:
        self._write_once(self.manifest_path(digest), data)

    def _write_alias(self, alias: str, digest: Digest) -> None:
        write_whole(self.root / "aliases" / alias, digest.encode())

    def _write_once(self, path: Path, data: bytes | memoryview) -> None:
        """Write a content-addressed file, unless the same bytes are there already."""
        try:
            with open_regular(path) as descriptor:
                is_there = os.fstat(descriptor).st_size == len(data) and (
                    os.pread(descriptor, len(data), 0) == data
                )
        except StoreError:
            is_there = False
        if not is_there:
            write_whole(path, data)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A descriptor of a regular file, for reading; errors of the body are mapped too.

    Raises:
        NotInStore: no such file.
        CorruptStore: a symlink, a folder, a pipe.
        StoreError: the file cannot be read.
    """
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError as error:
        raise NotInStore(f"not in the store: {path.name}") from error
    except OSError as error:
        kind = CorruptStore if error.errno == errno.ELOOP else StoreError
        raise kind(f"{path}: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CorruptStore(f"{path}: not a regular file")
        yield descriptor
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write a file so that its name is either absent (or the old one) or whole, also after a crash.

    Raises:
        StoreUnavailable: the disk is full or fails; no new file is left under the name.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        failpoint("before_write")
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                failpoint("after_write")
                os.fsync(file.fileno())
            failpoint("after_fsync")
            os.chmod(temporary, 0o644)
            failpoint("before_rename")
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        failpoint("after_rename")
        sync_folder(path.parent)
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Let the names in a folder outlive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
