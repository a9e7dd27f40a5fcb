"""What every client towards replicas keeps: framing, reuse, back-pressure, and how it fails.

Owns the behaviour suite of the interface `UpstreamClient` and the server it is tried on. Refuses to
know any client: a test module runs the suite over those it has.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from multidict import CIMultiDict

from cartridge_router.upstream import (
    BrokeOff,
    ConnectFailed,
    InvalidAnswer,
    Question,
    UpstreamClient,
    UpstreamError,
)

TIMEOUT_S = 20.0
TLS = ssl.create_default_context()
MakeClient = Callable[..., UpstreamClient]
HEAD = b"HTTP/1.1 200 Fine\r\nX-Twice: a\r\nX-Twice: b\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n"
GOOD = HEAD + b"Content-Length: 5\r\n\r\nhello"
ASK = Question("POST", "/v1/x?y=1", CIMultiDict({"X-One": "1"}), b"{}")


@dataclass
class ScriptedServer:
    """Answers each connection's requests with the next of these bytes, whatever is asked.

    `None` = closes the connection instead; `ends` = closes it behind the first.
    """

    answers: Sequence[bytes | None]
    piece_bytes: int | None = None
    ends: bool = False
    url: str = ""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    sent_bytes: int = 0
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)
    has_closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.writers.append(writer)
        self.num_connections += 1
        self.num_open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._serve(reader, writer)
        finally:
            self.num_open -= 1
            self.has_closed.set()
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in self.answers:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head + await reader.readexactly(length_of(head)))
            self.is_asked.set()
            if answer is None:
                return
            size = self.piece_bytes or len(answer)
            for begin in range(0, len(answer), size):
                writer.write(answer[begin : begin + size])
                await writer.drain()
                self.sent_bytes += size
                if self.piece_bytes is not None:
                    await asyncio.sleep(0)
            if self.ends:
                return
        # Nothing more comes, or the client has gone.
        await reader.read()


def length_of(head: bytes) -> int:
    """Of the body behind a request's head."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


@contextlib.asynccontextmanager
async def serving(*answers: bytes | None, **fields: Any) -> AsyncIterator[ScriptedServer]:
    """A scripted server on loopback."""
    script = ScriptedServer(answers, **fields)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0, limit=1 << 24)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()


async def body_of(answer: Any, read: list[bytes] | None = None) -> bytes:
    """All of a body, its pieces also in `read`; the answer is closed then."""
    read = [] if read is None else read
    with contextlib.closing(answer):
        while chunk := await answer.readany():
            read.append(chunk)
    return b"".join(read)


class UpstreamClientContract:
    """Subclasses have a fixture `make_client`, which closes what it made."""

    async def send(
        self, client: UpstreamClient, url: str, question: Question = ASK, timeout_s: float = 5.0
    ) -> Any:
        """One question."""
        async with asyncio.timeout(TIMEOUT_S):
            return await client.send(url, question, tls=TLS, connect_timeout_s=timeout_s)

    # --- what goes out ---------------------------------------------------------------------------
    async def test_it_sends_what_it_is_given(self, make_client: MakeClient) -> None:
        """Headers as they are, each as often as it is there; `Host` and the length beside them."""
        headers = CIMultiDict([("x-two", "a"), ("x-two", "b"), ("Accept", "*/*")])
        body = bytes(range(256)) * 8192
        async with serving(GOOD, GOOD, GOOD) as server:
            client = make_client()
            for method, sent in (("POST", body), ("POST", b""), ("GET", b"")):
                question = Question(method, "/v1/a%20b?c=%C3%A9&d", headers, sent)
                await body_of(await self.send(client, server.url, question))
        for request, method, sent in zip(
            server.requests, ("POST", "POST", "GET"), (body, b"", b""), strict=True
        ):
            head, _, received = request.partition(b"\r\n\r\n")
            first, *lines = head.split(b"\r\n")
            assert first == f"{method} /v1/a%20b?c=%C3%A9&d HTTP/1.1".encode()
            length = [b"Content-Length: %d" % len(sent)] if method == "POST" else []
            host = b"Host: " + server.url.removeprefix("http://").encode()
            expected = [b"x-two: a", b"x-two: b", b"Accept: */*", host, *length]
            assert sorted(lines) == sorted(expected)
            assert received == sent

    # --- what comes back -------------------------------------------------------------------------
    @pytest.mark.parametrize("piece_bytes", [None, 1, 7])
    @pytest.mark.parametrize(
        ("answer", "body"),
        [
            (GOOD, b"hello"),
            (HEAD + b"Content-Length: 0\r\n\r\n", b""),
            (
                HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n",
                b"hello",
            ),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b""),
            (
                b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" + GOOD,
                b"hello",
            ),
        ],
        ids=["length", "empty", "chunked", "no chunk", "interim"],
    )
    async def test_an_answer_is_read_to_its_end(
        self, answer: bytes, body: bytes, piece_bytes: int | None, make_client: MakeClient
    ) -> None:
        """However it is framed and cut; the connection is used again."""
        async with serving(answer, answer, piece_bytes=piece_bytes) as server:
            client = make_client()
            for _ in range(2):
                found = await self.send(client, server.url)
                assert (found.status, found.reason) == (200, "Fine")
                assert found.headers.getall("x-twice") == ["a", "b"]
                assert "link" not in found.headers
                assert await body_of(found) == body
            assert server.num_connections == 1

    @pytest.mark.parametrize(
        "answer", [b"HTTP/1.1 204 None\r\n\r\n", b"HTTP/1.1 304 Same\r\nContent-Length: 5\r\n\r\n"]
    )
    async def test_an_answer_without_a_body_has_none(
        self, answer: bytes, make_client: MakeClient
    ) -> None:
        """Whatever its head says of one."""
        async with serving(answer) as server:
            assert await body_of(await self.send(make_client(), server.url)) == b""

    async def test_the_answer_to_head_has_no_body(self, make_client: MakeClient) -> None:
        """Its length is that of another answer."""
        question = Question("HEAD", "/v1/x", CIMultiDict(), b"")
        head = HEAD + b"Content-Length: 5\r\n\r\n"
        async with serving(head, head) as server:
            client = make_client()
            for _ in range(2):
                found = await self.send(client, server.url, question)
                assert found.headers["content-length"] == "5"
                assert await body_of(found) == b""

    @pytest.mark.parametrize("version", [b"1.1", b"1.0"])
    async def test_without_a_length_the_end_of_the_connection_is_the_end(
        self, version: bytes, make_client: MakeClient
    ) -> None:
        """And the next question has a connection of its own."""
        answer = b"HTTP/" + version + b" 200 OK\r\n\r\nhello"
        async with serving(answer, ends=True) as server:
            client = make_client()
            for _ in range(2):
                assert await body_of(await self.send(client, server.url)) == b"hello"
            assert server.num_connections == 2

    async def test_what_has_come_can_be_had_without_waiting(self, make_client: MakeClient) -> None:
        """With the end, if that has come too; later bytes are read as ever."""
        half = HEAD + b"Content-Length: 10\r\n\r\nhello"
        async with serving(GOOD, half) as server:
            client = make_client()
            with contextlib.closing(await self.send(client, server.url)) as found:
                body, is_all = found.ready()
                while not is_all:
                    # It may come in a later turn than its head.
                    body += await found.readany()
                    more, is_all = found.ready()
                    body += more
                assert body == b"hello"
                assert await found.readany() == b""
            with contextlib.closing(await self.send(client, server.url)) as found:
                body = b""
                while body != b"hello":
                    body += await found.readany()
                assert found.ready() == (b"", False)

    async def test_a_silence_can_be_timed(self, make_client: MakeClient) -> None:
        """Nothing is lost by it: what comes later is read later."""
        half = HEAD + b"Content-Length: 10\r\n\r\nhello"
        async with serving(half) as server:
            found = await self.send(make_client(), server.url)
            body = b""
            while body != b"hello":
                body += await found.readany(TIMEOUT_S)
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await found.readany(0.01)
            server.writers[0].write(b"there")
            assert await body_of(found) == b"there"

    # --- what breaks -----------------------------------------------------------------------------
    @pytest.mark.parametrize(
        "answer",
        [
            HEAD + b"Content-Length: 6\r\n\r\nhello",
            CHUNKED + b"5\r\nhello\r\n",
            CHUNKED + b"6\r\nhello",
        ],
        ids=["length", "no last chunk", "in a chunk"],
    )
    async def test_half_an_answer_is_no_whole_one(
        self, answer: bytes, make_client: MakeClient
    ) -> None:
        """What came is read; then comes an error, never an end."""
        async with serving(answer, ends=True) as server:
            found, read = await self.send(make_client(), server.url), list[bytes]()
            with pytest.raises(BrokeOff):
                await body_of(found, read)
            assert all(read)
            assert b"hello".startswith(b"".join(read))

    @pytest.mark.parametrize("answer", [None, HEAD], ids=["nothing", "half a head"])
    async def test_no_answer_at_all_is_an_error(
        self, answer: bytes | None, make_client: MakeClient
    ) -> None:
        """On a fresh connection, which had no time to lie idle."""
        async with serving(answer, ends=True) as server:
            with pytest.raises(BrokeOff) as caught:
                await self.send(make_client(), server.url)
            assert not caught.value.is_reused

    async def test_a_connection_that_was_closed_while_idle_is_told(
        self, make_client: MakeClient
    ) -> None:
        """The caller may ask again: nothing of an answer had come."""
        async with serving(GOOD, None) as server:
            client = make_client()
            await body_of(await self.send(client, server.url))
            with pytest.raises(BrokeOff) as caught:
                await self.send(client, server.url)
            assert caught.value.is_reused

    @pytest.mark.parametrize(
        "answer",
        [
            b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
            b"HTTP/1.1 abc OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nBad Header: 1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
            b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
            b"HTTP/1.1 200 OK\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n",
        ],
        ids=["ssh", "status", "name", "two lengths", "negative", "endless head"],
    )
    async def test_what_is_no_http_is_an_error(
        self, answer: bytes, make_client: MakeClient
    ) -> None:
        """And its connection carries nothing else."""
        async with serving(answer, GOOD) as server:
            client = make_client()
            with pytest.raises(UpstreamError) as caught:
                await self.send(client, server.url)
            assert isinstance(caught.value, (InvalidAnswer, BrokeOff))
            async with asyncio.timeout(TIMEOUT_S):
                await server.has_closed.wait()

    @pytest.mark.parametrize("behind", [GOOD.replace(b"hello", b"wrong"), b"\0garbage"])
    async def test_what_comes_behind_an_answer_is_nobody_s(
        self, behind: bytes, make_client: MakeClient
    ) -> None:
        """The next question never gets it; it may get an error, once."""
        async with serving(GOOD + behind, GOOD) as server:
            client = make_client()
            for _ in range(2):
                with contextlib.suppress(UpstreamError):
                    assert await body_of(await self.send(client, server.url)) == b"hello"
            server.answers = [GOOD]
            assert await body_of(await self.send(client, server.url)) == b"hello"

    async def test_nobody_there_is_told_apart(self, make_client: MakeClient) -> None:
        """Nothing was sent."""
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            with pytest.raises(ConnectFailed):
                await self.send(make_client(), f"http://127.0.0.1:{port}")

    async def test_a_connection_has_its_time(self, make_client: MakeClient) -> None:
        """One that is not accepted is given up."""
        with contextlib.ExitStack() as stack:
            full = stack.enter_context(socket.socket())
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    waiting.connect(full.getsockname())
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            with pytest.raises(ConnectFailed):
                await self.send(make_client(), url, timeout_s=0.2)

    # --- connections -----------------------------------------------------------------------------
    async def test_a_connection_that_is_to_be_closed_is_not_used_again(
        self, make_client: MakeClient
    ) -> None:
        """As the answer says."""
        closing = GOOD.replace(b"Content-Length", b"Connection: close\r\nContent-Length")
        async with serving(closing, closing) as server:
            client = make_client()
            for _ in range(2):
                assert await body_of(await self.send(client, server.url)) == b"hello"
            assert server.num_connections == 2

    async def test_many_at_once_have_a_connection_each(self, make_client: MakeClient) -> None:
        """And those serve the next ones."""
        async with serving(GOOD, GOOD, GOOD) as server:
            client = make_client()
            for _ in range(2):
                answers = await asyncio.gather(*(self.send(client, server.url) for _ in range(20)))
                assert [await body_of(answer) for answer in answers] == [b"hello"] * 20
            assert server.num_connections == 20

    async def test_who_stops_waiting_ends_the_connection(self, make_client: MakeClient) -> None:
        """At once: the replica is to stop its work."""
        async with serving(b"") as server:
            asking = asyncio.create_task(self.send(make_client(), server.url))
            async with asyncio.timeout(TIMEOUT_S):
                await server.is_asked.wait()
                asking.cancel()
                await server.has_closed.wait()
            with pytest.raises(asyncio.CancelledError):
                await asking

    async def test_who_stops_reading_ends_the_connection(self, make_client: MakeClient) -> None:
        """An answer that is closed before its end."""
        half = HEAD + b"Content-Length: 100\r\n\r\nhello"
        async with serving(half) as server:
            found = await self.send(make_client(), server.url)
            async with asyncio.timeout(TIMEOUT_S):
                assert await found.readany() == b"hello"
                found.close()
                await server.has_closed.wait()

    async def test_an_answer_that_is_not_read_waits_at_the_replica(
        self, make_client: MakeClient
    ) -> None:
        """Some reads of the socket are in memory, not all of it; read later, it is whole."""
        size = 64 << 20
        answer = HEAD + b"Content-Length: %d\r\n\r\n" % size + bytes(size)
        async with serving(answer, piece_bytes=1 << 16) as server:
            found = await self.send(make_client(), server.url)
            before = -1
            while server.sent_bytes != before:
                before = server.sent_bytes
                await asyncio.sleep(0.2)
            assert server.sent_bytes < 16 << 20
            body_size = 0
            async with asyncio.timeout(TIMEOUT_S):
                with contextlib.closing(found):
                    while chunk := await found.readany():
                        body_size += len(chunk)
            assert body_size == size

    async def test_idle_connections_are_given_up(self, make_client: MakeClient) -> None:
        """After their time, also while nothing is asked."""
        async with serving(GOOD, GOOD) as server:
            client = make_client(idle_s=0.1)
            await body_of(await self.send(client, server.url))
            async with asyncio.timeout(TIMEOUT_S):
                await server.has_closed.wait()
            assert (server.num_connections, server.num_open) == (1, 0)

    async def test_closing_the_client_closes_all(self, make_client: MakeClient) -> None:
        """Idle or not; what is read then breaks off."""
        half = HEAD + b"Content-Length: 100\r\n\r\nhello"
        async with serving(GOOD, half) as server:
            client = make_client()
            await body_of(await self.send(client, server.url))
            found = await self.send(client, server.url)
            assert await found.readany() == b"hello"
            await client.aclose()
            with pytest.raises(UpstreamError):
                await found.readany()
            found.close()
            async with asyncio.timeout(TIMEOUT_S):
                await server.has_closed.wait()
            assert server.num_open == 0
