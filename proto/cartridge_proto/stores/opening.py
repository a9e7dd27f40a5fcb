"""From the text that names a store to the store.

Owns the spelling of store URLs. Refuses accounts in them (they are printed and logged: accounts
come from the environment), plain http to other machines unless it is said, and unknown words.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from cartridge_proto.names import ENV_STORE_PASSWORD, ENV_STORE_USERNAME
from cartridge_proto.stores.guarded_addresses import is_loopback_host
from cartridge_proto.stores.interface import Store, StoreError
from cartridge_proto.stores.local import LocalStore

SPELLINGS = (
    "a folder, file:///folder, s3://bucket/prefix, oci://host:port/prefix, "
    "redis://host:port/database/prefix"
)
DEFAULT_REDIS_PREFIX = "cartridge-store"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,62}")
_REDIS_PATH = re.compile(
    r"/?(?P<database>[0-9]{1,4}(?=/|$))?/?(?P<prefix>[A-Za-z0-9._:-]{1,128})?/?"
)
_OPTIONS = {
    "file": set(),
    "s3": {"endpoint", "region", "insecure"},
    "oci": {"insecure"},
    "redis": set(),
    "rediss": set(),
}


class BadStoreUrl(StoreError):
    """The text names no store; the message says what would."""


@dataclass(frozen=True)
class StoreUrl:
    """A store URL that was understood. `path` has no slash at either end, but for `file`."""

    scheme: str
    host: str
    path: str
    options: Mapping[str, str]

    @property
    def is_insecure(self) -> bool:
        """Whether plain http to another machine was allowed."""
        return self.options.get("insecure") == "true"


def parse_store_url(text: str) -> StoreUrl:
    """Understand the name of a store, without asking anybody.

    Raises:
        BadStoreUrl: naming what is wrong, and what is allowed; without anything secret.
    """
    match = _SCHEME.match(text)
    if match is None:
        if not text:
            raise BadStoreUrl(f"an empty store; allowed are {SPELLINGS}")
        return StoreUrl("file", "", text, {})
    scheme = match[1].lower()
    if scheme not in _OPTIONS:
        raise BadStoreUrl(f"unknown kind of store {scheme}://; allowed are {SPELLINGS}")
    try:
        parts = urlsplit(text)
        has_account = parts.username is not None or parts.password is not None
    except ValueError as error:
        raise BadStoreUrl(f"{scheme}://: not a URL; allowed are {SPELLINGS}") from error
    if has_account:
        raise BadStoreUrl(
            f"{scheme}://: an account in a store URL would be printed; set "
            f"{ENV_STORE_USERNAME} and {ENV_STORE_PASSWORD} (s3: the variables of AWS)"
        )
    if parts.fragment:
        raise BadStoreUrl(f"{scheme}://{parts.netloc}: a # has no meaning in a store URL")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS[scheme]:
            allowed = ", ".join(sorted(_OPTIONS[scheme])) or "none"
            raise BadStoreUrl(f"{scheme}://{parts.netloc}: no option {name!r}; allowed: {allowed}")
    if options.get("insecure", "true") not in {"true", "false"}:
        raise BadStoreUrl(f"{scheme}://{parts.netloc}: insecure is true or false")
    url = StoreUrl(scheme, parts.netloc, unquote(parts.path), options)
    _check_host(url)
    return url


def store_problem(text: str) -> str | None:
    """Why a text cannot name a store in settings; `None` if it can. Asks no other machine."""
    try:
        url = parse_store_url(text)
    except BadStoreUrl as error:
        return str(error)
    if url.scheme == "file" and not Path(url.path).is_dir():
        return f"{text} is not a folder"
    return None


def open_store(text: str, environment: Mapping[str, str] = os.environ) -> Store:
    """Open the store that a text names; see `SPELLINGS`. Asks nobody yet.

    Args:
        text: folder or URL.
        environment: where the account of an OCI or Redis store is. `s3` reads AWS's variables of
            the process.

    Raises:
        BadStoreUrl: the text names no store.
        StoreError: the package for this kind of store is not installed.
    """
    url = parse_store_url(text)
    try:
        return _OPENERS[url.scheme](url, _account(environment))
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{url.scheme}:// stores need {error.name}: pip install 'cartridge-router[stores]'"
        ) from error


def _check_host(url: StoreUrl) -> None:
    if url.scheme == "file":
        if url.host not in {"", "localhost"} or not url.path.startswith("/"):
            raise BadStoreUrl(f"file://{url.host}: write file:///folder")
    elif url.scheme == "s3":
        if _BUCKET.fullmatch(url.host) is None:
            raise BadStoreUrl(f"s3://{url.host[:80]}: no bucket's name")
        parts = url.path.strip("/").split("/")
        has_odd_part = parts != [""] and bool({"", ".", ".."} & set(parts))
        if has_odd_part or not url.path.isprintable():
            raise BadStoreUrl(f"s3://{url.host}: the prefix has an empty part, a . or a ..")
    elif _HOST.fullmatch(url.host) is None:
        raise BadStoreUrl(f"{url.scheme}://{url.host[:80]}: not host or host:port")
    if url.scheme == "oci" and not url.path.strip("/"):
        raise BadStoreUrl(f"oci://{url.host}: the repository is missing: oci://{url.host}/prefix")
    if url.scheme in {"redis", "rediss"} and _REDIS_PATH.fullmatch(url.path) is None:
        raise BadStoreUrl(f"{url.scheme}://{url.host}: the path is /database/prefix or /prefix")


def _account(environment: Mapping[str, str]) -> tuple[str, str] | None:
    password = environment.get(ENV_STORE_PASSWORD)
    return (environment.get(ENV_STORE_USERNAME, ""), password) if password else None


def _open_folder(url: StoreUrl, account: tuple[str, str] | None) -> Store:
    return LocalStore(Path(url.path))


def _open_s3(url: StoreUrl, account: tuple[str, str] | None) -> Store:
    from cartridge_proto.stores.object_storage import ObjectStorage

    return ObjectStorage(
        url.host,
        url.path,
        endpoint=url.options.get("endpoint"),
        region=url.options.get("region"),
        may_be_plain=url.is_insecure,
    )


def _open_oci(url: StoreUrl, account: tuple[str, str] | None) -> Store:
    from cartridge_proto.stores.oci import OciRegistry

    host = urlsplit(f"//{url.host}").hostname or ""
    is_plain = url.is_insecure or is_loopback_host(host)
    return OciRegistry(url.host, url.path, is_plain=is_plain, account=account)


def _open_redis(url: StoreUrl, account: tuple[str, str] | None) -> Store:
    from cartridge_proto.stores.redis_store import RedisStore

    match = _REDIS_PATH.fullmatch(url.path)
    assert match is not None  # noqa: S101 - checked by `parse_store_url`
    database, prefix = match["database"] or "0", match["prefix"] or DEFAULT_REDIS_PREFIX
    server = f"{url.scheme}://{url.host}/{database}"
    return RedisStore(server, prefix, account=account, location=f"{server}/{prefix}")


_OPENERS = {
    "file": _open_folder,
    "s3": _open_s3,
    "oci": _open_oci,
    "redis": _open_redis,
    "rediss": _open_redis,
}
