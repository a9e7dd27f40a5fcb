"""HTTP for stores: bounded in size and time, and never led to where it must not go.

Owns redirects, timeouts, the least speed of a body, the check of lengths, and the mapping of
urllib3's errors. Refuses to follow a redirect to a more inner network, to send credentials to
another host, and to show a query (which may be a signature) in any message.
"""

import contextlib
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import urljoin, urlsplit

import urllib3

from cartridge_proto.stores.guarded_addresses import Resolve, check_redirect, resolve_host
from cartridge_proto.stores.interface import (
    CorruptStore,
    NotInStore,
    StoreError,
    StoreUnavailable,
)
from cartridge_proto.stores.patience import Patience
from cartridge_proto.stores.verification import PIECE_BYTES

MAX_REDIRECTS = 5
_DRAINED_BYTES = 4096
_REDIRECTS = {301, 302, 303, 307, 308}


class _WithoutQueries(logging.Filter):
    """urllib3 logs whole URLs; a query may be a signature that opens a private bucket."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Cut every query out."""
        record.msg, record.args = re.sub(r"\?[^\s\"']*", "?…", record.getMessage()), ()
        return True


for _name in ("urllib3.connectionpool", "urllib3.util.retry"):
    logging.getLogger(_name).addFilter(_WithoutQueries())


class Answer:
    """One answer, whose body is still to be read; made by `GuardedHttp.ask`."""

    def __init__(self, response: urllib3.BaseHTTPResponse, place: str, patience: Patience) -> None:
        self._response = response
        self._patience = patience
        self._place = place
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    @property
    def length(self) -> int | None:
        """The announced size of the body."""
        text = self.headers.get("content-length", "")
        return int(text) if text.isascii() and text.isdigit() else None

    def total_of_range(self, offset: int, count: int) -> int | None:
        """Size of the whole object, if this answer is bytes [offset, offset + count) of it."""
        unit, _, rest = self.headers.get("content-range", "").partition(" ")
        span, _, total = rest.partition("/")
        is_asked = unit == "bytes" and span == f"{offset}-{offset + count - 1}"
        return int(total) if is_asked and total.isascii() and total.isdigit() else None

    def read_into(self, buffer: memoryview) -> Iterator[int]:
        """Fill the buffer, and yield the count of bytes after each piece.

        Raises:
            CorruptStore: the body is longer than the buffer.
            StoreUnavailable: it is shorter, too slow, or breaks off.
        """
        limit_s = self._patience.limit_s(len(buffer))
        give_up_s = time.monotonic() + limit_s
        position = 0
        with _mapped(self._place):
            while position < len(buffer):
                piece = self._response.read1(min(PIECE_BYTES, len(buffer) - position))
                if not piece:
                    raise StoreUnavailable(
                        f"{self._place}: ended after {position} of {len(buffer)} bytes"
                    )
                buffer[position : position + len(piece)] = piece
                position += len(piece)
                if position < len(buffer) and time.monotonic() > give_up_s:
                    raise StoreUnavailable(
                        f"{self._place}: too slow: {position} of {len(buffer)} bytes in "
                        f"{limit_s:.1f} s"
                    )
                yield len(piece)
            if self._response.read1(1):
                raise CorruptStore(f"{self._place}: more than {len(buffer)} bytes")

    def read(self, max_bytes: int) -> bytes:
        """The whole body, at most `max_bytes + 1` of it: a longer one is the caller's to refuse."""
        give_up_s = time.monotonic() + self._patience.limit_s(max_bytes)
        data = bytearray()
        with _mapped(self._place):
            while len(data) <= max_bytes:
                piece = self._response.read1(max_bytes + 1 - len(data))
                if not piece:
                    break
                data += piece
                if time.monotonic() > give_up_s:
                    raise StoreUnavailable(f"{self._place}: too slow: {len(data)} bytes")
        return bytes(data)


class GuardedHttp:
    """A client for one store; all methods may be called from any thread."""

    def __init__(
        self,
        *,
        patience: Patience | None = None,
        resolve: Resolve | None = None,
        num_connections: int = 8,
    ) -> None:
        self._patience = patience or Patience()
        self._resolve = resolve or resolve_host
        self._timeout = urllib3.Timeout(
            connect=self._patience.connect_s, read=self._patience.silence_s
        )
        self._pools = urllib3.PoolManager(
            maxsize=num_connections, timeout=self._timeout, retries=False
        )

    @contextlib.contextmanager
    def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview | None = None,
        expected: Iterable[int] = (200,),
    ) -> Iterator[Answer]:
        """Ask, follow harmless redirects of reads, and give the connection back at the end.

        Raises:
            NotInStore: 404, where it is not expected.
            StoreUnavailable: no answer, or another status than the expected ones.
            StoreError: a redirect that is not followed.
        """
        sent = {"accept-encoding": "identity", **(headers or {})}
        place = printable(url)
        with contextlib.ExitStack() as stack:
            response = stack.enter_context(self._send(self._pools, method, url, sent, body, place))
            for _ in range(MAX_REDIRECTS):
                location = response.headers.get("location", "")
                is_read = method in {"GET", "HEAD"}
                if response.status not in _REDIRECTS or not location or not is_read:
                    break
                target = urljoin(url, location)
                response = stack.enter_context(self._follow(method, url, target, sent))
                url, place = target, printable(target)
            if response.status not in set(expected):
                raise _refused(response, place)
            yield Answer(response, place, self._patience)

    def close(self) -> None:
        """Close all idle connections."""
        self._pools.clear()

    @contextlib.contextmanager
    def _follow(
        self, method: str, origin: str, target: str, headers: Mapping[str, str]
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        """Ask the target of a redirect, at an address that was checked and is not looked up again.

        A connection of its own: redirects go to many hosts, each a few times.
        """
        place = printable(target)
        parts, origin_parts = urlsplit(target), urlsplit(origin)
        if parts.scheme not in {"http", "https"} or parts.hostname is None:
            raise StoreError(f"a redirect to {place} is not followed: no http(s) URL")
        if origin_parts.scheme == "https" and parts.scheme != "https":
            raise StoreError(f"a redirect to {place} is not followed: it leaves https")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        origin_port = origin_parts.port or (443 if origin_parts.scheme == "https" else 80)
        addresses = self._resolve(parts.hostname, port)
        check_redirect(self._resolve(origin_parts.hostname or "", origin_port), addresses, place)
        sent = {name: value for name, value in headers.items() if name != "host"}
        if (parts.hostname, port) != (origin_parts.hostname, origin_port):
            sent.pop("authorization", None)
        sent["host"] = parts.netloc.rpartition("@")[2]
        path = parts.path or "/"
        if parts.query:
            path += f"?{parts.query}"
        pool = _pool_at(addresses[0], port, parts.scheme, parts.hostname, self._timeout)
        try:
            with self._send(pool, method, path, sent, None, place) as response:
                yield response
        finally:
            pool.close()

    @contextlib.contextmanager
    def _send(
        self,
        pool: urllib3.PoolManager | urllib3.HTTPConnectionPool,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | memoryview | None,
        place: str,
    ) -> Iterator[urllib3.BaseHTTPResponse]:
        if body is not None:
            headers = {**headers, "content-length": str(len(body))}
        with _mapped(place):
            response = pool.urlopen(
                method,
                url,
                body=_pieces(body) if body is not None else None,
                headers=headers,
                redirect=False,
                # An idle connection may have been closed by the other side meanwhile.
                retries=urllib3.Retry(total=1, status=0, backoff_factor=0)
                if body is None
                else False,
                preload_content=False,
                decode_content=False,
            )
        try:
            yield response
        finally:
            _give_back(response)


def printable(url: str) -> str:
    """A URL without user, password, query and fragment."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:300]


def _pool_at(
    address: str, port: int, scheme: str, host: str, timeout: urllib3.Timeout
) -> urllib3.HTTPConnectionPool:
    """Connections to an address, whose certificate must be the host's."""
    if scheme == "http":
        return urllib3.HTTPConnectionPool(address, port, timeout=timeout)
    return urllib3.HTTPSConnectionPool(
        address, port, timeout=timeout, server_hostname=host, assert_hostname=host
    )


def _give_back(response: urllib3.BaseHTTPResponse) -> None:
    """Keep the connection if little of the body is left, else close it."""
    left_bytes = response.length_remaining
    if left_bytes is not None and left_bytes <= _DRAINED_BYTES:
        response.drain_conn()
    response.close()
    response.release_conn()


def _pieces(body: bytes | memoryview) -> Iterator[bytes]:
    """A body in pieces: the timeout of a socket is for each of them."""
    view = memoryview(body)
    for begin in range(0, len(view), PIECE_BYTES):
        yield bytes(view[begin : begin + PIECE_BYTES])


def _refused(response: urllib3.BaseHTTPResponse, place: str) -> StoreError:
    if response.status == 404:
        return NotInStore(f"not in the store: {place}")
    if response.status in _REDIRECTS:
        return StoreError(f"{place}: a redirect that is not followed (status {response.status})")
    hint = "; are the store's credentials set?" if response.status in {401, 403} else ""
    return StoreUnavailable(f"{place}: status {response.status}{hint}")


@contextlib.contextmanager
def _mapped(place: str) -> Iterator[None]:
    """Map urllib3's errors; their own texts hold URLs with signatures, so they are not chained."""
    try:
        yield
    except urllib3.exceptions.HTTPError as error:
        cause: object = error
        while isinstance(cause, urllib3.exceptions.MaxRetryError) and cause.reason is not None:
            cause = cause.reason
        if isinstance(cause, urllib3.exceptions.ProtocolError) and len(cause.args) > 1:
            # Its second argument is what happened.
            cause = cause.args[1] if type(cause.args[1]).__name__ in _SPOKEN else cause
        spoken = _SPOKEN.get(type(cause).__name__, "no answer")
        raise StoreUnavailable(f"{place}: {spoken}") from None
    except OSError as error:
        raise StoreUnavailable(f"{place}: {error.strerror or type(error).__name__}") from None


_SPOKEN = {
    "ConnectTimeoutError": "no connection in time",
    "NewConnectionError": "no connection",
    "NameResolutionError": "no such host",
    "ReadTimeoutError": "silent for too long",
    "IncompleteRead": "the body ended early",
    "ProtocolError": "the connection broke off",
    "SSLError": "no trusted TLS connection",
    "InvalidChunkLength": "the connection broke off",
}
