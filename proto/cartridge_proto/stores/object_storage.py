"""A Cartridge store in an S3-compatible bucket.

Owns keys (those of the store folder, under a prefix), and the use of obstore for credentials,
signatures, writes and listings. Refuses to read bytes through obstore: reads go to presigned URLs
by `guarded_http`, because obstore follows any redirect (listings too; of an https store only to
https).
"""

import contextlib
import datetime
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from cartridge_proto.digest import Digest
from cartridge_proto.manifest import MAX_MANIFEST_BYTES, Manifest
from cartridge_proto.stores.guarded_addresses import is_loopback_host
from cartridge_proto.stores.guarded_http import Answer, GuardedHttp, printable
from cartridge_proto.stores.interface import NotInStore, StoreError, StoreUnavailable
from cartridge_proto.stores.object_reading import read_blob_pieces
from cartridge_proto.stores.patience import Patience
from cartridge_proto.stores.verification import (
    MAX_ALIAS_BYTES,
    VerifiedStore,
    is_alias,
)

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_SIGNED_FOR = datetime.timedelta(minutes=15)
_ANSWER = re.compile(r"(invalid list response|status code: \d{3}[^:]*)(:.*)?", re.DOTALL)
_QUERY = re.compile(r"\?\S*")


class ObjectStorage(VerifiedStore):
    """A prefix of a bucket. Credentials, region and endpoint come from the environment, as AWS's.

    Args:
        bucket: name of the bucket.
        prefix: what all keys start with; "" for none.
        endpoint: base URL of an S3-compatible server; `None` = the environment's, or AWS.
        region: `None` = the environment's.
        may_be_plain: allow http to another machine.

    Raises:
        StoreError: the endpoint is plain http to another machine, or is not understood.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        may_be_plain: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._location = f"s3://{bucket}/{self._prefix}".rstrip("/")
        patience = patience or Patience()
        seconds = datetime.timedelta(seconds=patience.grace_s)
        endpoint = endpoint or next(filter(None, map(os.environ.get, _ENDPOINT_VARIABLES)), None)
        parts = urlsplit(endpoint or "")
        is_plain = parts.scheme == "http"
        if is_plain and not may_be_plain and not is_loopback_host(parts.hostname or ""):
            raise StoreError(
                f"{self._location}: the endpoint {printable(parts.geturl())} is plain http; "
                "use https, or add ?insecure=true"
            )
        given = {"endpoint": endpoint, "region": region}
        with self._mapped():
            self._bucket = S3Store(
                bucket,
                config={name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
                client_options={
                    "allow_http": is_plain,
                    "connect_timeout": datetime.timedelta(seconds=patience.connect_s),
                    "timeout": seconds,
                },
                retry_config={"max_retries": 2, "retry_timeout": seconds},
            )
        self._http = GuardedHttp(patience=patience)
        self._aliases: dict[str, tuple[str, bytes]] = {}
        """Entity tag and bytes of each alias, from the last listing; replaced, never changed."""

    @property
    def location(self) -> str:
        """`s3://bucket/prefix`."""
        return self._location

    def close(self) -> None:
        """Close all idle connections."""
        self._http.close()

    # --- reading -------------------------------------------------------------------------------
    def _read_alias(self, alias: str) -> bytes:
        with self._get(f"aliases/{alias}") as answer:
            return answer.read(MAX_ALIAS_BYTES)

    def _read_aliases(self) -> Iterable[tuple[str, bytes]]:
        known, found = self._aliases, {}
        for name, tag in self._list("aliases"):
            if not is_alias(name):
                continue
            known_tag, data = known.get(name, (None, b""))
            if tag is None or tag != known_tag:
                try:
                    data = self._read_alias(name)
                except NotInStore:
                    continue
            yield name, data
            if tag is not None:
                found[name] = (tag, data)
        self._aliases = found

    def _manifest_stems(self) -> Iterable[str]:
        return (name.removesuffix(".json") for name, _ in self._list("manifests/sha256"))

    def _read_manifest_bytes(self, digest: Digest) -> bytes:
        with self._get(_manifest_key(digest)) as answer:
            return answer.read(MAX_MANIFEST_BYTES)

    def _has_manifest(self, digest: Digest) -> bool:
        try:
            self._size(_manifest_key(digest))
        except NotInStore:
            return False
        return True

    def _blob_size(self, digest: Digest) -> int:
        return self._size(_blob_key(digest))

    def _read_pieces(
        self, digest: Digest, offset: int, buffer: memoryview, size_bytes: int
    ) -> Iterator[int]:
        url = self._sign("GET", _blob_key(digest))

        def ask(headers: Mapping[str, str]) -> contextlib.AbstractContextManager[Answer]:
            return self._http.ask("GET", url, headers=headers, expected=(200, 206))

        yield from read_blob_pieces(ask, digest, offset, buffer, size_bytes)

    @contextlib.contextmanager
    def _get(self, key: str) -> Iterator[Answer]:
        with self._http.ask("GET", self._sign("GET", key)) as answer:
            yield answer

    def _size(self, key: str) -> int:
        with self._http.ask("HEAD", self._sign("HEAD", key)) as answer:
            if answer.length is None:
                raise StoreUnavailable(f"{self._location}/{key}: an answer without a length")
            return answer.length

    def _sign(self, method: Literal["GET", "HEAD"], key: str) -> str:
        with self._mapped():
            return str(obstore.sign(self._bucket, method, self._prefix + key, _SIGNED_FOR))

    def _list(self, folder: str) -> Iterator[tuple[str, str | None]]:
        """Names directly under a folder, each with its entity tag: the same tag, the same bytes."""
        start = f"{self._prefix}{folder}/"
        with self._mapped():
            for page in obstore.list(self._bucket, prefix=start):
                for entry in page:
                    yield entry["path"].removeprefix(start), entry["e_tag"]

    # --- writing -------------------------------------------------------------------------------
    def _write_blob(self, digest: Digest, data: bytes | memoryview) -> None:
        self._put(_blob_key(digest), data)

    def _write_manifest(self, digest: Digest, data: bytes, manifest: Manifest) -> None:
        self._put(_manifest_key(digest), data)

    def _write_alias(self, alias: str, digest: Digest) -> None:
        self._put(f"aliases/{alias}", digest.encode())

    def _put(self, key: str, data: bytes | memoryview) -> None:
        with self._mapped():
            obstore.put(self._bucket, self._prefix + key, bytes(data))

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        """Map obstore's errors.

        Their texts go on for pages, of which the first line says what happened. They also quote
        the answer, which may be an inner service's that a listing was redirected to.
        """
        try:
            yield
        except BaseError as error:
            text = _ANSWER.sub(r"\1", _QUERY.sub("", str(error).partition("\n")[0]))[:300]
            raise StoreUnavailable(f"{self._location}: {text}") from None


def _blob_key(digest: Digest) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _manifest_key(digest: Digest) -> str:
    return f"manifests/sha256/{digest.removeprefix('sha256:')}.json"
