"""A Cartridge store in Redis or Valkey, for small artifacts.

Owns the keys (spelled in `names.py`), the cap on a blob, and the mapping of redis-py's errors.
Refuses blobs above the cap: a Redis is memory, and answers nobody while it sends a large value.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cartridge_proto.digest import Digest
from cartridge_proto.manifest import MAX_MANIFEST_BYTES, Manifest
from cartridge_proto.names import (
    store_aliases_key,
    store_blob_key,
    store_manifest_key,
    store_manifests_key,
)
from cartridge_proto.stores.interface import (
    CorruptStore,
    NotInStore,
    StoreError,
    StoreUnavailable,
)
from cartridge_proto.stores.patience import Patience
from cartridge_proto.stores.verification import (
    PIECE_BYTES,
    VerifiedStore,
    check_size,
)

MAX_BLOB_BYTES = 64 << 20


class RedisStore(VerifiedStore):
    """The keys below a prefix of one database.

    Args:
        url: redis://, rediss:// or unix:// as redis-py reads it, without account and prefix.
        prefix: what all keys start with.
        account: user and password, or `None`.
        location: how it is called in messages.
        max_blob_bytes: the cap.
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        *,
        account: tuple[str, str] | None = None,
        location: str | None = None,
        patience: Patience | None = None,
        max_blob_bytes: int = MAX_BLOB_BYTES,
    ) -> None:
        patience = patience or Patience()
        user, password = account or (None, None)
        self._prefix = prefix
        self._location = location or f"{url}/{prefix}"
        self._max_blob_bytes = max_blob_bytes
        self._client = redis.Redis.from_url(
            url,
            username=user or None,
            password=password,
            socket_connect_timeout=patience.connect_s,
            socket_timeout=patience.silence_s,
            # An idle connection may have been closed by the other side meanwhile.
            retry=Retry(NoBackoff(), 1),
        )

    @property
    def location(self) -> str:
        """`redis://host:port/database/prefix`."""
        return self._location

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    # --- reading -------------------------------------------------------------------------------
    def _read_alias(self, alias: str) -> bytes:
        with self._mapped():
            found = cast("bytes | None", self._client.hget(store_aliases_key(self._prefix), alias))
        if found is None:
            raise NotInStore(f"not in the store: {alias}")
        return found

    def _read_aliases(self) -> Iterable[tuple[str, bytes]]:
        with self._mapped():
            for name, data in self._client.hscan_iter(store_aliases_key(self._prefix)):
                yield name.decode("utf-8", "replace"), data

    def _manifest_stems(self) -> Iterable[str]:
        with self._mapped():
            for name in self._client.sscan_iter(store_manifests_key(self._prefix)):
                yield name.decode("utf-8", "replace").removeprefix("sha256:")

    def _read_manifest_bytes(self, digest: Digest) -> bytes:
        key = store_manifest_key(self._prefix, digest)
        with self._mapped():
            data = cast("bytes", self._client.getrange(key, 0, MAX_MANIFEST_BYTES))
            # Redis gives nothing for an absent key, and for an empty value.
            if not data and not self._client.exists(key):
                raise NotInStore(f"not in the store: {digest}")
        return data

    def _has_manifest(self, digest: Digest) -> bool:
        with self._mapped():
            return bool(self._client.exists(store_manifest_key(self._prefix, digest)))

    def _blob_size(self, digest: Digest) -> int:
        key = store_blob_key(self._prefix, digest)
        with self._mapped():
            size_bytes = self._client.strlen(key)
            if size_bytes == 0 and not self._client.exists(key):
                raise NotInStore(f"not in the store: {digest}")
        return size_bytes

    def _read_pieces(
        self, digest: Digest, offset: int, buffer: memoryview, size_bytes: int
    ) -> Iterator[int]:
        check_size(digest, self._blob_size(digest), size_bytes)
        key = store_blob_key(self._prefix, digest)
        position = 0
        while position < len(buffer):
            count = min(PIECE_BYTES, len(buffer) - position)
            begin = offset + position
            with self._mapped():
                piece = cast("bytes", self._client.getrange(key, begin, begin + count - 1))
            if len(piece) != count:
                # Removed or replaced meanwhile.
                raise StoreUnavailable(f"blob {digest}: ended after {begin} of {size_bytes} bytes")
            buffer[position : position + count] = piece
            yield count
            position += count

    # --- writing -------------------------------------------------------------------------------
    def _write_blob(self, digest: Digest, data: bytes | memoryview) -> None:
        if len(data) > self._max_blob_bytes:
            raise StoreError(
                f"{self._location}: a blob of {len(data)} bytes; a Redis store takes up to "
                f"{self._max_blob_bytes}, larger artifacts belong in another kind of store"
            )
        with self._mapped():
            self._client.set(store_blob_key(self._prefix, digest), data)

    def _write_manifest(self, digest: Digest, data: bytes, manifest: Manifest) -> None:
        with self._mapped(), self._client.pipeline(transaction=True) as pipeline:
            pipeline.set(store_manifest_key(self._prefix, digest), data)
            pipeline.sadd(store_manifests_key(self._prefix), digest)
            pipeline.execute()

    def _write_alias(self, alias: str, digest: Digest) -> None:
        with self._mapped():
            self._client.hset(store_aliases_key(self._prefix), alias, digest)

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        """Map redis-py's errors: a key of another type is corruption, the rest is absence."""
        try:
            yield
        except redis.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                raise CorruptStore(f"{self._location}: a key holds another type") from error
            raise StoreUnavailable(f"{self._location}: {error}") from error
        except redis.RedisError as error:
            raise StoreUnavailable(f"{self._location}: {type(error).__name__}") from error
