"""A Cartridge store in an OCI registry, by the plain distribution HTTP API.

Owns the layout of docs/spec/store-v1.md: the repository of the prefix holds everything by digest,
`<prefix>/<name>:<version>` is an alias that any OCI client can pull. Refuses digests other than the
Cartridge's own: a blob has one name everywhere.

Source: https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import urlencode, urljoin, urlsplit

from cartridge_proto.canonical_json import encode_canonical
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import MAX_MANIFEST_BYTES, Blob, Manifest, encode_manifest
from cartridge_proto.names import (
    MEDIA_TYPE_ARTIFACT,
    MEDIA_TYPE_BLOB,
    MEDIA_TYPE_ENCODED_BLOB,
    MEDIA_TYPE_MANIFEST,
    MEDIA_TYPE_OCI_MANIFEST,
)
from cartridge_proto.stores.guarded_http import Answer, GuardedHttp, printable
from cartridge_proto.stores.interface import NotInStore, StoreError, StoreUnavailable
from cartridge_proto.stores.object_reading import read_blob_pieces
from cartridge_proto.stores.patience import Patience
from cartridge_proto.stores.registry_login import RegistryLogin
from cartridge_proto.stores.verification import MAX_LISTED, VerifiedStore, check_alias

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_NAME_TAG = "name."
_MAX_NAME = 128 - len(_NAME_TAG)
"""A tag has at most 128 characters."""
_MAX_OCI_MANIFEST_BYTES = 4 << 20
_MAX_TAGS_BYTES = 16 << 20
_NEXT = re.compile(r'<([^>]*)>\s*;\s*rel="?next"?')


class OciRegistry(VerifiedStore):
    """The part of a registry below a prefix.

    Args:
        host: host or host:port.
        prefix: repository path; at least one component.
        is_plain: speak http.
        account: user and password, or `None`.
        tags_per_page: how many names are asked for at a time.

    Raises:
        StoreError: the prefix is no repository name.
    """

    def __init__(
        self,
        host: str,
        prefix: str,
        *,
        is_plain: bool = False,
        account: tuple[str, str] | None = None,
        patience: Patience | None = None,
        tags_per_page: int = 1000,
    ) -> None:
        self._tags_per_page = tags_per_page
        self._prefix = prefix.strip("/")
        self._location = f"oci://{host}/{self._prefix}"
        if _REPOSITORY.fullmatch(self._prefix) is None or len(self._prefix) > 120:
            raise StoreError(
                f"{self._location}: the path must be a repository name: lower-case words, "
                "separated by / . _ or -"
            )
        self._base = f"{'http' if is_plain else 'https'}://{host}"
        self._http = GuardedHttp(patience=patience)
        self._login = RegistryLogin(self._http, self._base, account)
        self._artifacts: dict[str, bytes] = {}
        """Digest of an OCI manifest -> artifact digest in it; neither ever changes."""

    @property
    def location(self) -> str:
        """`oci://host:port/prefix`."""
        return self._location

    def close(self) -> None:
        """Close all idle connections."""
        self._http.close()

    # --- reading -------------------------------------------------------------------------------
    def _read_alias(self, alias: str) -> bytes:
        name, version = check_alias(alias)
        if _is_component(name):
            return self._artifact_of(f"{self._prefix}/{name}", version)
        raise NotInStore(f"not in the store: {alias}")

    def _read_aliases(self) -> Iterable[tuple[str, bytes]]:
        for tag in self._tags(self._prefix):
            name = tag.removeprefix(_NAME_TAG)
            if name == tag or not _is_component(name):
                continue
            repository = f"{self._prefix}/{name}"
            for version in self._tags(repository):
                with contextlib.suppress(NotInStore):
                    yield f"{name}@{version}", self._artifact_of(repository, version)

    def _manifest_stems(self) -> Iterable[str]:
        return (
            tag.removeprefix("sha256-")
            for tag in self._tags(self._prefix)
            if tag.startswith("sha256-")
        )

    def _read_manifest_bytes(self, digest: Digest) -> bytes:
        with self._ask("GET", self._prefix, f"blobs/{digest}") as answer:
            return answer.read(MAX_MANIFEST_BYTES)

    def _has_manifest(self, digest: Digest) -> bool:
        try:
            with self._ask("HEAD", self._prefix, f"manifests/{_digest_tag(digest)}", _ACCEPT):
                return True
        except NotInStore:
            return False

    def _blob_size(self, digest: Digest) -> int:
        with self._ask("HEAD", self._prefix, f"blobs/{digest}") as answer:
            if answer.length is None:
                raise StoreUnavailable(f"{self._location}: {digest}: an answer without a length")
            return answer.length

    def _read_pieces(
        self, digest: Digest, offset: int, buffer: memoryview, size_bytes: int
    ) -> Iterator[int]:
        def ask(headers: Mapping[str, str]) -> contextlib.AbstractContextManager[Answer]:
            path = f"blobs/{digest}"
            return self._ask("GET", self._prefix, path, headers, expected=(200, 206))

        yield from read_blob_pieces(ask, digest, offset, buffer, size_bytes)

    def _artifact_of(self, repository: str, tag: str) -> bytes:
        """The artifact digest that a tag stands for; empty if it is no Cartridge."""
        path = f"manifests/{tag}"
        with self._ask("HEAD", repository, path, _ACCEPT) as answer:
            known = self._artifacts.get(answer.headers.get("docker-content-digest", ""))
        if known is not None:
            return known
        with self._ask("GET", repository, path, _ACCEPT) as answer:
            name = answer.headers.get("docker-content-digest", "")
            data = answer.read(_MAX_OCI_MANIFEST_BYTES)
        try:
            config = json.loads(data)["config"]
            digest = config["digest"] if config["mediaType"] == MEDIA_TYPE_MANIFEST else ""
            artifact = str(digest).encode()
        except (ValueError, KeyError, TypeError, RecursionError):
            return b""
        if name and len(self._artifacts) < MAX_LISTED:
            self._artifacts[name] = artifact
        return artifact

    def _tags(self, repository: str) -> Iterator[str]:
        path = f"tags/list?n={self._tags_per_page}"
        seen = 0
        while True:
            try:
                with self._ask("GET", repository, path) as answer:
                    data = answer.read(_MAX_TAGS_BYTES)
                    link = _NEXT.match(answer.headers.get("link", ""))
            except NotInStore:
                return
            try:
                tags = [str(tag) for tag in json.loads(data)["tags"] or []]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise StoreUnavailable(f"{self._location}: gives no list of tags") from error
            yield from tags
            seen += len(tags)
            if seen > MAX_LISTED:
                raise StoreError(f"{self._location}: more than {MAX_LISTED} names")
            if link is None or not tags:
                return
            path = f"tags/list?{urlsplit(link[1]).query}"

    # --- writing -------------------------------------------------------------------------------
    def _write_blob(self, digest: Digest, data: bytes | memoryview) -> None:
        if not self.has_blob(digest):
            self._upload(self._prefix, digest, data)

    def _write_manifest(self, digest: Digest, data: bytes, manifest: Manifest) -> None:
        self._write_blob(digest, data)
        self._put_manifest(self._prefix, _digest_tag(digest), oci_manifest(digest, manifest))

    def _write_alias(self, alias: str, digest: Digest) -> None:
        name, version = check_alias(alias)
        if not _is_component(name):
            raise StoreError(
                f"{self._location}: {name[:80]!r} cannot be the name of an OCI repository: words "
                f"of a-z and 0-9, separated by . _ or -, at most {_MAX_NAME} characters"
            )
        manifest = self.read_manifest(digest)
        repository = f"{self._prefix}/{name}"
        for blob in [digest, *(Digest(blob.sha256) for blob in manifest.payload)]:
            self._mount(repository, blob, manifest)
        data = oci_manifest(digest, manifest)
        self._put_manifest(repository, version, data)
        self._put_manifest(self._prefix, f"{_NAME_TAG}{name}", data)

    def _put_manifest(self, repository: str, tag: str, data: bytes) -> None:
        headers = {"content-type": MEDIA_TYPE_OCI_MANIFEST}
        with self._ask("PUT", repository, f"manifests/{tag}", headers, body=data, expected=(201,)):
            pass

    def _mount(self, repository: str, digest: Digest, manifest: Manifest) -> None:
        """Let another repository of the registry have a blob, without its bytes if it can."""
        query = urlencode({"mount": digest, "from": self._prefix})
        with self._ask(
            "POST", repository, f"blobs/uploads/?{query}", body=b"", expected=(201, 202)
        ) as answer:
            if answer.status == 201:
                return
            location = answer.headers.get("location", "")
        sizes = {blob.sha256: blob.size_bytes for blob in manifest.payload}
        if digest in sizes:
            data = memoryview(bytearray(sizes[digest]))
            self.read_blob_into(digest, data)
        else:
            data = memoryview(encode_manifest(manifest))
        self._finish_upload(repository, location, digest, data)

    def _upload(self, repository: str, digest: Digest, data: bytes | memoryview) -> None:
        with self._ask("POST", repository, "blobs/uploads/", body=b"", expected=(202,)) as answer:
            location = answer.headers.get("location", "")
        self._finish_upload(repository, location, digest, data)

    def _finish_upload(
        self, repository: str, location: str, digest: Digest, data: bytes | memoryview
    ) -> None:
        """Send a blob to where the registry wants it, which must be the registry itself."""
        start = f"{self._base}/v2/{repository}/blobs/uploads/"
        parts = urlsplit(urljoin(start, location))
        if parts.netloc != urlsplit(self._base).netloc:
            raise StoreError(
                f"{self._location}: uploads to another host are not made: "
                f"{printable(parts.geturl())}"
            )
        query = "&".join(filter(None, [parts.query, urlencode({"digest": digest})]))
        url = f"{self._base}{parts.path}?{query}"
        headers = {"content-type": "application/octet-stream"}
        with self._ask_url("PUT", url, repository, headers, data, expected=(201,)):
            pass

    # --- asking --------------------------------------------------------------------------------
    def _ask(
        self,
        method: str,
        repository: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        *,
        body: bytes | memoryview | None = None,
        expected: tuple[int, ...] = (200,),
    ) -> contextlib.AbstractContextManager[Answer]:
        url = f"{self._base}/v2/{repository}/{path}"
        return self._ask_url(method, url, repository, headers or {}, body, expected=expected)

    @contextlib.contextmanager
    def _ask_url(
        self,
        method: str,
        url: str,
        repository: str,
        headers: Mapping[str, str],
        body: bytes | memoryview | None,
        *,
        expected: tuple[int, ...],
    ) -> Iterator[Answer]:
        """Ask; answers one challenge of the registry with an account or a token."""
        right = "pull" if method in {"GET", "HEAD"} else "pull,push"
        for may_ask_again in (True, False):
            sent = {**headers, **self._login.header(repository, right)}
            accepted = (*expected, 401) if may_ask_again else expected
            with self._http.ask(method, url, headers=sent, body=body, expected=accepted) as answer:
                if answer.status != 401:
                    yield answer
                    return
                challenge = answer.headers.get("www-authenticate", "")
            self._login.accept(challenge, repository, right)


def oci_manifest(digest: Digest, manifest: Manifest) -> bytes:
    """The OCI image manifest of an artifact: the same bytes from everybody.

    The Cartridge manifest is the config blob, so its digest is the artifact digest; the payload's
    blobs are layers, in order.
    """
    title = "org.opencontainers.image.title"
    return encode_canonical(
        {
            "schemaVersion": 2,
            "mediaType": MEDIA_TYPE_OCI_MANIFEST,
            "artifactType": MEDIA_TYPE_ARTIFACT,
            "config": {
                "mediaType": MEDIA_TYPE_MANIFEST,
                "digest": digest,
                "size": len(encode_manifest(manifest)),
            },
            "layers": [
                {
                    "mediaType": MEDIA_TYPE_ENCODED_BLOB if blob.encoding else MEDIA_TYPE_BLOB,
                    "digest": blob.sha256,
                    "size": blob.size_bytes,
                    "annotations": {title: _file_name(blob)},
                }
                for blob in manifest.payload
            ],
            "annotations": {
                title: manifest.alias,
                "org.opencontainers.image.created": manifest.created_at,
            },
        }
    )


def _file_name(blob: Blob) -> str:
    suffix = f".{blob.encoding.codec}" if blob.encoding else ""
    return f"{blob.sha256.removeprefix('sha256:')}.safetensors{suffix}"


_ACCEPT = {"accept": MEDIA_TYPE_OCI_MANIFEST}


def _is_component(name: str) -> bool:
    return len(name) <= _MAX_NAME and re.fullmatch(_COMPONENT, name) is not None


def _digest_tag(digest: Digest) -> str:
    return digest.replace(":", "-")
