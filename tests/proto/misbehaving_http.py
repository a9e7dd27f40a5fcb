"""A small HTTP server that serves blobs by any URL that ends in their name, and can go wrong.

Owns the faults that a store must survive, and a record of what was asked. Refuses any address but
loopback.
"""

import contextlib
import json
import re
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from cartridge_proto.digest import Digest, sha256_digest

_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")


class Fault(StrEnum):
    """How the server goes wrong."""

    NONE = "none"
    SHORT_BODY = "short body"
    """The connection closes before all announced bytes came."""
    WRONG_LENGTH = "wrong length"
    """One byte less is announced and sent."""
    LONGER_UNANNOUNCED = "longer, without a length"
    FLIPPED_BIT = "flipped bit"
    BYTE_BY_BYTE = "byte by byte"
    """Never silent for long, never done."""
    SILENT = "silent"
    """Headers, half of the body, and then nothing."""
    RESET = "reset"
    """A TCP reset in the middle of the body."""
    HTML = "html"
    """Status 200 and a page, whatever was asked."""
    HTML_PADDED = "html of the right length"
    REDIRECT_LINK_LOCAL = "redirect to link-local"
    REDIRECT_ENDLESS = "redirect to itself"
    REDIRECT_NOWHERE = "redirect to another protocol"
    REDIRECT = "redirect to `location`"
    OTHER_RANGE = "other range"
    IGNORED_RANGE = "ignored range"
    SERVER_ERROR = "server error"
    FORBIDDEN = "forbidden"
    CLOSED = "closed"
    """The connection closes without an answer."""


@dataclass
class MisbehavingHttp:
    """The server's state, changed by tests as they like."""

    url: str
    blobs: dict[Digest, bytes]
    fault: Fault = Fault.NONE
    asked: list[tuple[Digest, int, int]] = field(default_factory=list)
    """Blob, first byte and count of each GET that was answered with bytes."""
    num_faults: int | None = None
    """Faults that are still to be made; `None` = without end."""
    location: str = ""
    challenge: str | None = None
    """`WWW-Authenticate` of those who come without `token`."""
    token: str = ""
    script: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    """`METHOD /path` (without query) -> status, headers, body; before anything else."""
    token_queries: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_fault(self) -> Fault:
        """The fault of one answer."""
        with self.lock:
            if self.num_faults is None:
                return self.fault
            if self.num_faults == 0:
                return Fault.NONE
            self.num_faults -= 1
            return self.fault

    @property
    def sent_bytes(self) -> int:
        """Bytes of blobs that were asked for."""
        with self.lock:
            return sum(count for _, _, count in self.asked)


@contextlib.contextmanager
def misbehaving_http(*blobs: bytes, tls: ssl.SSLContext | None = None) -> Iterator[MisbehavingHttp]:
    """A server of these blobs, at first without a fault; https with a TLS context."""
    server = _Server(("127.0.0.1", 0), _Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    scheme = "https" if tls is not None else "http"
    state = MisbehavingHttp(
        f"{scheme}://127.0.0.1:{server.server_address[1]}",
        {sha256_digest(blob): blob for blob in blobs},
    )
    server.state = state
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        state.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    state: MisbehavingHttp

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        """Answer as the script says."""
        self.rfile.read(int(self.headers.get("content-length", "0")))
        self._answer(with_body=False)

    def do_PUT(self) -> None:
        """The same."""
        self.do_POST()

    def do_HEAD(self) -> None:
        """Answer with the size."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Answer with bytes, or with the fault of the day."""
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is logged."""

    def _answer(self, *, with_body: bool) -> None:
        state = self.server.state
        with state.lock:
            state.headers.append({name.lower(): value for name, value in self.headers.items()})
        scripted = state.script.get(f"{self.command} {self.path.partition('?')[0]}")
        if scripted is not None:
            status, headers, body = scripted
            self._send(status, body, {"content-length": str(len(body)), **headers})
            return
        if self.path.startswith(("/token?", "/no-token?")):
            self._give_token()
            return
        is_here = not self.path.startswith("/nothing?")
        if is_here and state.challenge is not None and not self._is_allowed():
            self._send(401, b"", {"www-authenticate": state.challenge})
            return
        name = self.path.partition("?")[0].rpartition("/")[2].removeprefix("sha256:")
        digest = Digest(f"sha256:{name}")
        blob = state.blobs.get(digest)
        if blob is None:
            self._send(404, b"", {})
            return
        if not with_body:
            self._send(200, b"", {"content-length": str(len(blob))})
            return
        asked = _RANGE.fullmatch(self.headers.get("range", ""))
        begin, end = (int(asked[1]), int(asked[2]) + 1) if asked else (0, len(blob))
        fault = state.take_fault()
        with state.lock:
            state.asked.append((digest, begin, end - begin))
        headers = {"content-length": str(end - begin)}
        if asked:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{len(blob)}"
        self._send_with(fault, 206 if asked else 200, blob, begin, end, headers)

    def _is_allowed(self) -> bool:
        return self.headers.get("authorization", "").partition(" ")[2] == self.server.state.token

    def _give_token(self) -> None:
        place, _, query = self.path.partition("?")
        self.server.state.token_queries.append(query)
        answer = {"token": self.server.state.token} if place == "/token" else {"error": "none"}
        body = json.dumps(answer).encode()
        self._send(200, body, {"content-length": str(len(body))})

    def _send_with(  # noqa: C901 - one branch a fault
        self, fault: Fault, status: int, blob: bytes, begin: int, end: int, headers: dict[str, str]
    ) -> None:
        body = blob[begin:end]
        half = body[: len(body) // 2]
        self.close_connection = fault is not Fault.NONE
        match fault:
            case Fault.NONE:
                self._send(status, body, headers)
            case Fault.SHORT_BODY:
                self._send(status, body[:-1], headers)
            case Fault.WRONG_LENGTH:
                if "content-range" in headers:
                    headers["content-range"] = f"bytes {begin}-{end - 1}/{len(blob) - 1}"
                else:
                    headers["content-length"] = str(len(body) - 1)
                self._send(status, body[:-1], headers)
            case Fault.LONGER_UNANNOUNCED:
                del headers["content-length"]
                self._send(status, body + b"!", headers)
            case Fault.FLIPPED_BIT:
                self._send(status, body[:-1] + bytes([body[-1] ^ 1]), headers)
            case Fault.BYTE_BY_BYTE:
                self._send(status, b"", headers)
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    if self.server.state.ended.wait(0.01):
                        return
            case Fault.SILENT:
                self._send(status, half, headers)
                self.server.state.ended.wait(60)
            case Fault.RESET:
                self._send(status, half, headers)
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
            case Fault.HTML:
                self._send(200, b"<html>Please log in", {"content-length": "19"})
            case Fault.HTML_PADDED:
                self._send(status, b"<html>Please log in".ljust(len(body)), headers)
            case Fault.REDIRECT_LINK_LOCAL:
                self._redirect("http://169.254.169.254/latest/meta-data/")
            case Fault.REDIRECT_ENDLESS:
                self._redirect(self.path)
            case Fault.REDIRECT_NOWHERE:
                self._redirect("ftp://127.0.0.1/x")
            case Fault.REDIRECT:
                self._redirect(self.server.state.location)
            case Fault.OTHER_RANGE:
                headers["content-range"] = f"bytes {begin + 1}-{end}/{len(blob)}"
                self._send(206, body, headers)
            case Fault.IGNORED_RANGE:
                self._send(200, blob, {"content-length": str(len(blob))})
            case Fault.SERVER_ERROR:
                self._send(503, b"", {})
            case Fault.FORBIDDEN:
                self._send(403, b"", {})
            case Fault.CLOSED:
                self.connection.close()

    def _redirect(self, location: str) -> None:
        self._send(307, b"", {"location": location})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "content-length" not in headers and not body:
            self.send_header("content-length", "0")
        elif "content-length" not in headers:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)
