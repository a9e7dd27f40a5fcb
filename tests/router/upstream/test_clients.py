"""Both clients keep the contract; what only the native one must say for itself."""

import asyncio
import contextlib
import itertools
import os
import resource
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from cartridge_router.upstream import (
    BrokeOff,
    ConnectFailed,
    InvalidAnswer,
    OutOfFiles,
    Question,
    UpstreamClient,
    UpstreamError,
    content_type,
)
from cartridge_router.upstream.native import NativeClient
from cartridge_router.upstream.over_aiohttp import AiohttpClient
from tests.contracts.upstream_client import (
    ASK,
    GOOD,
    HEAD,
    TLS,
    MakeClient,
    UpstreamClientContract,
    body_of,
    serving,
)

READ_BUFFER_BYTES = 8192


@contextlib.asynccontextmanager
async def making(kind: type[NativeClient] | type[AiohttpClient]) -> AsyncIterator[MakeClient]:
    """Makes clients of a kind, and closes them."""
    async with contextlib.AsyncExitStack() as stack:

        def make(idle_s: float = 3.0) -> UpstreamClient:
            client = kind(idle_s=idle_s, read_buffer_bytes=READ_BUFFER_BYTES)
            stack.push_async_callback(client.aclose)
            return client

        yield make


class TestNativeClient(UpstreamClientContract):
    """The client over a C parser."""

    @pytest.fixture
    async def make_client(self) -> AsyncIterator[MakeClient]:
        """Makes native clients."""
        async with making(NativeClient) as make:
            yield make

    async def test_a_header_that_is_spelled_twice_is_sent_twice(
        self, make_client: MakeClient
    ) -> None:
        """As it was. (aiohttp's client drops the first where the cases differ.)"""
        question = Question("GET", "/x", CIMultiDict([("X-A", "1"), ("x-a", "2")]), b"")
        async with serving(GOOD) as server:
            await body_of(await self.send(make_client(), server.url, question))
            assert b"X-A: 1\r\nx-a: 2\r\n" in server.requests[0]

    async def test_a_switch_of_protocols_is_refused(self, make_client: MakeClient) -> None:
        """Nobody asked for one."""
        answer = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
        async with serving(answer) as server:
            with pytest.raises(InvalidAnswer):
                await self.send(make_client(), server.url)

    async def test_half_a_head_behind_an_answer_keeps_nobody_waiting(
        self, make_client: MakeClient
    ) -> None:
        """The connection is not used again. (aiohttp's client waits for the other half.)"""
        async with serving(GOOD + GOOD[:30], GOOD) as server:
            client = make_client()
            for _ in range(2):
                assert await body_of(await self.send(client, server.url)) == b"hello"
            assert server.num_connections == 2

    @pytest.mark.parametrize(
        ("path", "headers"),
        [
            ("/x y", {}),
            ("/x\r\nX: 1", {}),
            ("", {}),
            ("/x", {"X": "1\r\nY: 2"}),
            ("/x", {"X": "1\n"}),
            ("/x", {"X\r": "1"}),
        ],
    )
    async def test_what_would_be_another_request_is_not_sent(
        self, path: str, headers: dict[str, str], make_client: MakeClient
    ) -> None:
        """A line break in a header, a space in a path."""
        async with serving(GOOD) as server:
            question = Question("GET", path, CIMultiDict(headers), b"")
            with pytest.raises(UpstreamError):
                await self.send(make_client(), server.url, question)
            async with asyncio.timeout(10):
                await server.has_closed.wait()
            assert server.requests == []

    async def test_a_connection_that_ends_before_it_is_used_is_an_error(
        self, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its end is told once, to nobody yet: the question must not wait for it."""
        connect = NativeClient._connect

        async def connect_and_lose(self: NativeClient, *arguments: Any) -> Any:
            connection = await connect(self, *arguments)
            connection.end()
            await asyncio.sleep(0.01)
            return connection

        monkeypatch.setattr(NativeClient, "_connect", connect_and_lose)
        async with serving(GOOD) as server:
            with pytest.raises(BrokeOff) as caught:
                await self.send(make_client(), server.url)
            assert not caught.value.is_reused

    async def test_a_name_that_is_none_is_not_reached(self, make_client: MakeClient) -> None:
        """As one that nobody knows."""
        with pytest.raises(ConnectFailed):
            await self.send(make_client(), "http://a..b:80")

    async def test_a_process_without_files_blames_nobody(self, make_client: MakeClient) -> None:
        """It is told apart from a replica that cannot be reached."""
        async with serving(GOOD) as server:
            client = make_client()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            num_open = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_open, hard))
            held = [os.open("/dev/null", os.O_RDONLY) for _ in range(num_free(num_open))]
            try:
                with pytest.raises(OutOfFiles):
                    await self.send(client, server.url)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for number in held:
                    os.close(number)
            assert await body_of(await self.send(client, server.url)) == b"hello"


def num_free(limit: int) -> int:
    """Numbers below a limit that no open file has."""
    # Listing them takes one itself.
    return limit - (len(os.listdir("/proc/self/fd")) - 1)


class TestAiohttpClient(UpstreamClientContract):
    """aiohttp's."""

    @pytest.fixture
    async def make_client(self) -> AsyncIterator[MakeClient]:
        """Makes clients over aiohttp."""
        async with making(AiohttpClient) as make:
            yield make


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_however_an_answer_is_cut_it_is_the_same(chunks: list[bytes], cuts: list[int]) -> None:
    """Pieces of any size, of a body in chunks of any size."""
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    answer = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        bounds = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
        for begin, end in itertools.pairwise(bounds):
            writer.write(answer[begin:end])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, contextlib.aclosing(NativeClient(idle_s=1.0, read_buffer_bytes=8)) as it:
            found = await it.send(url, ASK, tls=TLS, connect_timeout_s=5.0)
            assert (found.status, found.headers.getall("x-twice")) == (200, ["a", "b"])
            assert await body_of(found) == b"".join(chunks)

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ("text/event-stream; charset=utf-8", "text/event-stream"),
        ("TEXT/Event-Stream", "text/event-stream"),
        (" application/json ;x", "application/json"),
        ("", ""),
    ],
)
def test_the_media_type_is_told_without_parameters(sent: str, found: str) -> None:
    """In lower case."""
    assert content_type(CIMultiDict({"Content-Type": sent})) == found
    assert content_type(CIMultiDict()) == ""
