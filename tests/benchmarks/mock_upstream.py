"""Four engines in one process that cost next to nothing: what proxies are measured in front of.

Owns their HTTP, counts of what reached them, and the pace of streams. Refuses to compute anything:
who was asked with Cartridges is told to another process, which sends the receipts.
"""

import argparse
import asyncio
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

import httptools
import uvloop

from tests.benchmarks.gateway_answers import DONE, EVENTS, JSON_BODY, MAX_MODEL_LEN, MODEL

COUNTS_PATH, PACE_PATH = "/mock/counts", "/mock/pace/"
_DATE = b"date: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\n"
    + _DATE
    + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


# As uvicorn frames vLLM's stream: a chunk for each event.
_PIECES = [_chunk(event) for event in EVENTS]
_LAST_PIECE = _chunk(DONE) + b"0\r\n\r\n"
_BURST = _STREAM_HEAD + b"".join(_PIECES) + _LAST_PIECE


def _answer(status: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %s\r\n%scontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, _DATE, len(body)) + body


_OK = b"200 OK"
_JSON = _answer(_OK, JSON_BODY)
_HEALTH = _answer(_OK, b"")
_MODELS = _answer(
    _OK,
    json.dumps(
        {
            "object": "list",
            "data": [
                {
                    "id": MODEL,
                    "object": "model",
                    "created": 1_790_000_000,
                    "owned_by": "vllm",
                    "root": MODEL,
                    "parent": None,
                    "max_model_len": MAX_MODEL_LEN,
                }
            ],
        }
    ).encode(),
)
_UNKNOWN = _answer(b"404 Not Found", b'{"detail":"Not Found"}')


@dataclass
class Counts:
    """What one engine was asked."""

    num_requests: int = 0
    num_body_bytes: int = 0
    num_compositions: int = 0
    """Requests that carried a composition message."""
    num_lost_receipts: int = 0
    num_cut_off: int = 0
    """Streams whose reader went away."""


class Mock:
    """What all engines share; `pace_s` seconds lie between two events of a stream."""

    def __init__(self, num_engines: int, receipts_fd: int | None) -> None:
        self.counts = [Counts() for _ in range(num_engines)]
        self.pace_s = 0.0
        self._receipts_fd = receipts_fd
        if receipts_fd is not None:
            os.set_blocking(receipts_fd, False)

    def note(self, engine: int, body: bytes) -> None:
        """A request for tokens."""
        counts = self.counts[engine]
        counts.num_requests += 1
        counts.num_body_bytes += len(body)
        found = body.rfind(b'"kv_transfer_params"')
        if found < 0:
            return
        counts.num_compositions += 1
        if self._receipts_fd is not None:
            fields = (
                _text_after(body, b'"request_id":"', found),
                _text_after(body, b"sha256:", found),
            )
            try:
                os.write(self._receipts_fd, b"%d %s sha256:%s\n" % (engine, *fields))
            except BlockingIOError:
                counts.num_lost_receipts += 1


def _text_after(body: bytes, mark: bytes, start: int) -> bytes:
    begin = body.index(mark, start) + len(mark)
    return body[begin : body.index(b'"', begin)]


class _Connection(asyncio.Protocol):
    def __init__(self, mock: Mock, engine: int) -> None:
        self._mock, self._engine = mock, engine
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._url, self._body = b"", list[bytes]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._mock.counts[self._engine].num_cut_off += 1

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    # --- what the parser finds -------------------------------------------------------------------
    def on_message_begin(self) -> None:
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"POST":
            self._generate(b"".join(self._body))
        else:
            self._transport.write(self._tell(self._url.decode()))

    def _generate(self, body: bytes) -> None:
        if not self._url.endswith(b"/chat/completions"):
            self._transport.write(_UNKNOWN)
            return
        self._mock.note(self._engine, body)
        if b'"stream":true' not in body and b'"stream": true' not in body:
            self._transport.write(_JSON)
        elif not self._mock.pace_s:
            self._transport.write(_BURST)
        else:
            self._transport.write(_STREAM_HEAD + _PIECES[0])
            self._write_later(1)

    def _write_later(self, index: int) -> None:
        self._timer = self._loop.call_later(self._mock.pace_s, self._write_piece, index)

    def _write_piece(self, index: int) -> None:
        if index + 1 < len(_PIECES):
            self._transport.write(_PIECES[index])
            self._write_later(index + 1)
        else:
            self._timer = None
            self._transport.write(_PIECES[index] + _LAST_PIECE)

    def _tell(self, url: str) -> bytes:
        if url == "/health":
            return _HEALTH
        if url == "/v1/models":
            return _MODELS
        if url == COUNTS_PATH:
            counts = [asdict(engine) for engine in self._mock.counts]
            return _answer(_OK, json.dumps(counts).encode())
        if url.startswith(PACE_PATH):
            self._mock.pace_s = float(url.removeprefix(PACE_PATH))
            return _answer(_OK, b"{}")
        return _UNKNOWN


async def listen(mock: Mock) -> list[asyncio.Server]:
    """A server for each engine, on loopback ports of the kernel's choice."""
    loop = asyncio.get_running_loop()
    return [
        await loop.create_server(functools.partial(_Connection, mock, engine), "127.0.0.1", 0)
        for engine in range(len(mock.counts))
    ]


async def serve(num_engines: int, receipts_fd: int | None) -> None:
    """Say the ports on stdout, and serve until stdin ends."""
    servers = await listen(Mock(num_engines, receipts_fd))
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    await ended.wait()


def main(arguments: Sequence[str]) -> None:
    """A process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--receipts-fd", type=int)
    given = parser.parse_args(arguments)
    uvloop.run(serve(given.engines, given.receipts_fd))


if __name__ == "__main__":
    main(sys.argv[1:])
