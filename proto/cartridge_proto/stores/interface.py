"""What every Cartridge store promises, and how it says that it could not.

StoreError                 the store does not do that, or its folder cannot be read
├── NotInStore             no such alias, manifest or blob: asking again changes nothing
├── CorruptStore           what is stored is not what its name says
└── StoreUnavailable       the store could not be asked now: a later try may succeed

Owns the interface and the error tree. Refuses any transport: implementations are its neighbours.
"""

from collections.abc import Callable
from typing import Protocol

from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest, ManifestDigest


class StoreError(Exception):
    """Base of what can go wrong with a store."""


class NotInStore(StoreError):
    """No such alias, manifest or blob."""


class CorruptStore(StoreError):
    """Stored bytes do not hash to their name, or break the manifest contract."""


class StoreUnavailable(StoreError):
    """The store could not be asked, or gave up in the middle; a later try may succeed."""


class Store(Protocol):
    """Content-addressed blobs and manifests, and aliases that move.

    All methods block, may be called from any thread, end in bounded time, and raise `StoreError`
    or one of its kinds. Nothing they return is unverified, except by `read_unverified_range`.
    """

    @property
    def location(self) -> str:
        """Where it is, for people: never with a credential in it."""
        ...

    def resolve(self, alias_or_digest: str) -> Digest:
        """The digest that an alias stands for; a digest stands for itself.

        Raises:
            NotInStore: there is no such alias.
            CorruptStore: the alias does not hold a digest.
        """
        ...

    def aliases(self) -> dict[str, Digest]:
        """All aliases that hold a digest, sorted by name; a damaged one does not hide the rest."""
        ...

    def manifest_digests(self) -> list[Digest]:
        """Digests of all manifests, sorted."""
        ...

    def read_manifest(self, digest: Digest) -> Manifest:
        """Read and verify a manifest.

        Raises:
            NotInStore: no such manifest.
            CorruptStore: the bytes do not hash to the digest, or are no valid manifest.
        """
        ...

    def has_blob(self, digest: Digest) -> bool:
        """Whether a blob is there; its bytes are not looked at."""
        ...

    def read_small_blob(self, digest: Digest, max_bytes: int) -> bytes:
        """Read and verify a blob whose size no manifest tells, such as a document's text.

        Raises:
            NotInStore: no such blob.
            CorruptStore: it is larger, or the bytes do not hash to the digest.
        """
        ...

    def read_blob_into(
        self, digest: Digest, buffer: memoryview, *, on_bytes: Callable[[int], None] = ...
    ) -> None:
        """Read a blob into private memory of exactly its size, and verify that memory.

        `on_bytes(count)` is called as bytes arrive, before they are verified; it may raise.

        Raises:
            NotInStore: no such blob.
            CorruptStore: wrong size, or the bytes read do not hash to the digest.
        """
        ...

    def read_unverified_range(
        self,
        digest: Digest,
        offset: int,
        buffer: memoryview,
        *,
        size_bytes: int,
        on_bytes: Callable[[int], None] = ...,
    ) -> None:
        """Read bytes [offset, offset + len(buffer)) of a blob of `size_bytes` into `buffer`.

        The range has no digest of its own: who puts a blob together from ranges verifies it whole
        before anything reads it. `on_bytes(count)` is called as bytes arrive, in order, and ends
        the read by raising.

        Raises:
            NotInStore: no such blob.
            CorruptStore: the blob has another size.
        """
        ...

    def put_blob(self, data: bytes | memoryview) -> Digest:
        """Store a blob and return its digest; storing it again changes nothing that is whole."""
        ...

    def put_manifest(self, manifest: Manifest) -> ManifestDigest:
        """Store a manifest whose blobs are all present, and return the artifact digest.

        Raises:
            InvalidManifest: the manifest breaks the contract.
            NotInStore: a blob of the payload is missing.
        """
        ...

    def set_alias(self, alias: str, digest: Digest) -> None:
        """Let `name@version` stand for a digest from now on.

        Raises:
            NotInStore: not an alias, or no such manifest.
        """
        ...

    def verify(self, digest: Digest) -> Manifest:
        """Read an artifact whole, decode it, and check every digest, shape and range in it.

        Raises:
            NotInStore: the manifest or a blob is missing.
            CorruptStore: naming the first thing that does not match.
            StoreError: the package for a blob's codec is not installed.
        """
        ...

    def close(self) -> None:
        """Give connections back; the store is not used afterwards."""
        ...
