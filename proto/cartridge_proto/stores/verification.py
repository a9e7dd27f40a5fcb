"""The one place where what a store hands out is verified.

Owns `VerifiedStore`: every public read of every store passes here and is hashed in the caller's own
memory. Refuses to be overridden in that: an implementation gives bytes, this says whether they are
the right ones.
"""

import abc
import contextlib
import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, final

from cartridge_proto.codecs import CodecUnavailable, read_decoded_blob
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
from cartridge_proto.stores.interface import (
    CorruptStore,
    NotInStore,
    StoreError,
)

MAX_ALIAS_BYTES = 128
MAX_LISTED = 100_000
"""Names that one listing may hold."""
PIECE_BYTES = 1 << 20
"""Bytes that are read at a time, so that they are hashed while the processor still has them."""

MIN_BESIDE_BYTES = 4 << 20
"""From this size on a blob is hashed on a thread of its own while it is read."""

T = TypeVar("T")

_ALIAS = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]{0,126})@(?P<version>[a-z0-9][a-z0-9._-]{0,126})")


class VerifiedStore(abc.ABC):
    """A store made of the few verbs that an implementation gives; thread-safe as they are.

    Digests and aliases are checked before they reach a verb, so that a path, a key or a URL is
    never made of anything else.
    """

    # --- what an implementation gives ----------------------------------------------------------
    @property
    @abc.abstractmethod
    def location(self) -> str:
        """Where it is, for people: never with a credential in it."""

    @abc.abstractmethod
    def _read_alias(self, alias: str) -> bytes:
        """Bytes of an alias; at most one more than `MAX_ALIAS_BYTES` of them. Or NotInStore."""

    @abc.abstractmethod
    def _read_aliases(self) -> Iterable[tuple[str, bytes]]:
        """Names and bytes of all aliases, in any order; what is no alias is passed over.

        One that is damaged or just gone is left out; one that cannot be asked is StoreUnavailable,
        because a list with holes would take Cartridges away.
        """

    @abc.abstractmethod
    def _manifest_stems(self) -> Iterable[str]:
        """The 64 hex characters of each manifest, in any order; other texts are passed over."""

    @abc.abstractmethod
    def _read_manifest_bytes(self, digest: Digest) -> bytes:
        """Bytes of a manifest; at most one more than `MAX_MANIFEST_BYTES`. Or NotInStore."""

    @abc.abstractmethod
    def _has_manifest(self, digest: Digest) -> bool:
        """Whether there is a manifest under this name."""

    @abc.abstractmethod
    def _blob_size(self, digest: Digest) -> int:
        """Bytes of a stored blob, or NotInStore."""

    @abc.abstractmethod
    def _read_pieces(
        self, digest: Digest, offset: int, buffer: memoryview, size_bytes: int
    ) -> Iterator[int]:
        """Fill `buffer` from its start, and yield the count of bytes after each piece.

        CorruptStore if the blob is known to have another size than `size_bytes`.
        """

    @abc.abstractmethod
    def _write_blob(self, digest: Digest, data: bytes | memoryview) -> None:
        """Store a blob, whole or not at all."""

    @abc.abstractmethod
    def _write_manifest(self, digest: Digest, data: bytes, manifest: Manifest) -> None:
        """Store a manifest, whole or not at all; its blobs are there."""

    @abc.abstractmethod
    def _write_alias(self, alias: str, digest: Digest) -> None:
        """Store an alias, at once; its manifest is there."""

    def close(self) -> None:  # noqa: B027 - a store that holds nothing has nothing to give back
        """Give connections back; the store is not used afterwards."""

    # --- reading -------------------------------------------------------------------------------
    @final
    def resolve(self, alias_or_digest: str) -> Digest:
        """The digest that an alias stands for; a digest stands for itself."""
        if alias_or_digest.startswith("sha256:"):
            try:
                return parse_digest(alias_or_digest)
            except ValueError as error:
                raise NotInStore(str(error)) from error
        check_alias(alias_or_digest)
        return _decode_alias(alias_or_digest, self._read_alias(alias_or_digest))

    @final
    def aliases(self) -> dict[str, Digest]:
        """All aliases that hold a digest, sorted by name; a damaged one does not hide the rest."""
        found = {}
        for name, data in sorted(self._capped(self._read_aliases())):
            if is_alias(name):
                with contextlib.suppress(CorruptStore):
                    found[name] = _decode_alias(name, data)
        return found

    @final
    def manifest_digests(self) -> list[Digest]:
        """Digests of all manifests, sorted."""
        stems = sorted(self._capped(self._manifest_stems()))
        return [Digest(f"sha256:{stem}") for stem in stems if re.fullmatch("[0-9a-f]{64}", stem)]

    @final
    def read_manifest(self, digest: Digest) -> Manifest:
        """Read and verify a manifest."""
        data = self._read_manifest_bytes(parse_digest(digest))
        return decode_verified(digest, data)

    @final
    def has_blob(self, digest: Digest) -> bool:
        """Whether a blob is there; its bytes are not looked at."""
        try:
            self._blob_size(parse_digest(digest))
        except NotInStore:
            return False
        return True

    @final
    def read_small_blob(self, digest: Digest, max_bytes: int) -> bytes:
        """Read and verify a blob whose size no manifest tells."""
        size_bytes = self._blob_size(parse_digest(digest))
        if size_bytes > max_bytes:
            raise CorruptStore(f"blob {digest}: {size_bytes} bytes; the limit is {max_bytes}")
        buffer = bytearray(size_bytes)
        self.read_blob_into(digest, memoryview(buffer))
        return bytes(buffer)

    @final
    def read_blob_into(
        self,
        digest: Digest,
        buffer: memoryview,
        *,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Read a blob into private memory of exactly its size, and verify that memory."""
        hasher = hashlib.sha256()
        size_bytes = len(buffer)
        position = 0
        with _hashing_beside(hasher, size_bytes) as update:
            for count in self._read_pieces(parse_digest(digest), 0, buffer, size_bytes):
                update(buffer[position : position + count])
                position += count
                on_bytes(count)
        _check_end(digest, position, size_bytes)
        found = "sha256:" + hasher.hexdigest()
        if found != digest:
            raise CorruptStore(f"blob {digest}: the stored bytes hash to {found}")

    @final
    def read_unverified_range(
        self,
        digest: Digest,
        offset: int,
        buffer: memoryview,
        *,
        size_bytes: int,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Read a range of a blob; who puts a blob together verifies it whole before use."""
        if not 0 <= offset <= offset + len(buffer) <= size_bytes:
            raise ValueError(f"bytes {offset}+{len(buffer)} of a blob of {size_bytes}")
        position = 0
        for count in self._read_pieces(parse_digest(digest), offset, buffer, size_bytes):
            position += count
            on_bytes(count)
        _check_end(digest, position, len(buffer))

    @final
    def verify(self, digest: Digest) -> Manifest:
        """Read an artifact whole and check every digest, shape and range in it."""
        manifest = self.read_manifest(digest)
        for blob in manifest.payload:
            blob_digest = parse_digest(blob.sha256)
            # Sizes first, so that no memory is taken for a blob that is not there.
            check_size(blob_digest, self._blob_size(blob_digest), blob.size_bytes)
            buffer = memoryview(bytearray(blob.decoded_bytes))
            try:
                read_decoded_blob(self, blob, buffer)
                check_blob(manifest, blob.sha256, buffer)
            except InvalidPayload as error:
                raise CorruptStore(f"blob {blob.sha256}: {error}") from error
            except CodecUnavailable as error:
                raise StoreError(f"blob {blob.sha256}: {error}") from error
        return manifest

    # --- writing -------------------------------------------------------------------------------
    @final
    def put_blob(self, data: bytes | memoryview) -> Digest:
        """Store a blob and return its digest; storing it again changes nothing that is whole."""
        digest = sha256_digest(data)
        self._write_blob(digest, data)
        return digest

    @final
    def put_manifest(self, manifest: Manifest) -> ManifestDigest:
        """Store a manifest whose blobs are all present, and return the artifact digest."""
        data = encode_manifest(manifest)
        for blob in manifest.payload:
            if not self.has_blob(parse_digest(blob.sha256)):
                raise NotInStore(f"payload: blob {blob.sha256} is not in the store")
        digest = sha256_digest(data)
        self._write_manifest(digest, data, manifest)
        return ManifestDigest(digest)

    @final
    def set_alias(self, alias: str, digest: Digest) -> None:
        """Let `name@version` stand for a digest from now on."""
        check_alias(alias)
        if not self._has_manifest(parse_digest(digest)):
            raise NotInStore(f"alias {alias}: manifest {digest} is not in the store")
        self._write_alias(alias, digest)

    def _capped(self, names: Iterable[T]) -> list[T]:
        found = list(itertools.islice(names, MAX_LISTED + 1))
        if len(found) > MAX_LISTED:
            raise StoreError(f"{self.location}: more than {MAX_LISTED} names")
        return found


def check_alias(alias: str) -> tuple[str, str]:
    """Name and version of an alias.

    Raises:
        NotInStore: not an alias, so no store has it.
    """
    match = _ALIAS.fullmatch(alias)
    if match is None:
        raise NotInStore(f"not an alias (name@version): {alias[:80]!r}")
    return match["name"], match["version"]


def is_alias(name: str) -> bool:
    """Whether a name is spelled `name@version`."""
    return _ALIAS.fullmatch(name) is not None


def check_size(digest: Digest, found_bytes: int, size_bytes: int) -> None:
    """Compare the size of a stored blob with the one that its manifest gives.

    Raises:
        CorruptStore: with both.
    """
    if found_bytes != size_bytes:
        raise CorruptStore(f"blob {digest}: {found_bytes} bytes; the manifest says {size_bytes}")


def decode_verified(digest: Digest, data: bytes) -> Manifest:
    """The manifest in `data`, which must hash to `digest`.

    Raises:
        CorruptStore: too large, other bytes, or no valid manifest.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise CorruptStore(f"manifest {digest}: more than {MAX_MANIFEST_BYTES} bytes")
    if sha256_digest(data) != digest:
        raise CorruptStore(f"manifest {digest}: the stored bytes hash to {sha256_digest(data)}")
    try:
        return decode_manifest(data)
    except InvalidManifest as error:
        raise CorruptStore(f"manifest {digest}: {error}") from error


def _decode_alias(alias: str, data: bytes) -> Digest:
    if len(data) > MAX_ALIAS_BYTES:
        raise CorruptStore(f"alias {alias}: more than {MAX_ALIAS_BYTES} bytes")
    try:
        return parse_digest(data.decode("ascii", "replace"))
    except ValueError as error:
        raise CorruptStore(f"alias {alias}: {error}") from error


@contextlib.contextmanager
def _hashing_beside(
    hasher: "hashlib._Hash", size_bytes: int
) -> Iterator[Callable[[memoryview], None]]:
    """Hash pieces in order on a thread of its own, one piece behind the reading.

    Small blobs are hashed at once. When the block ends, all pieces are hashed.
    """
    if size_bytes < MIN_BESIDE_BYTES:
        yield hasher.update
        return
    with ThreadPoolExecutor(1, thread_name_prefix="store-hashing") as executor:
        running: list[Future[None]] = []

        def update(piece: memoryview) -> None:
            running.append(executor.submit(hasher.update, piece))
            if len(running) > 1:
                running.pop(0).result()

        yield update
        for last in running:
            last.result()


def _check_end(digest: Digest, position: int, size_bytes: int) -> None:
    if position != size_bytes:
        raise CorruptStore(f"blob {digest}: ended after {position} of {size_bytes} bytes")
