"""The least that an aiohttp server with the gateway's own client costs: bytes in, bytes out.

Owns a proxy without routes, checks, choice, retries or metrics: what remains for each request is
the price of the parts that the gateway is made of. Refuses to be used for anything else.
"""

import argparse
import asyncio
import contextlib
import itertools
import signal
import ssl
import sys
from collections.abc import Sequence

import uvloop
from aiohttp import web
from multidict import CIMultiDict

from cartridge_router.upstream import Question
from cartridge_router.upstream.native import NativeClient


class LeastProxy:
    """Sends each request to the next engine and its answer back."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = itertools.cycle(urls)
        self._tls = ssl.create_default_context()
        self._client = NativeClient(idle_s=3.0, read_buffer_bytes=16_384)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request."""
        headers = CIMultiDict({"Content-Type": "application/json"})
        question = Question(request.method, request.path_qs, headers, await request.read())
        answer = await self._client.send(
            next(self._urls), question, tls=self._tls, connect_timeout_s=5.0
        )
        with contextlib.closing(answer):
            content_type = answer.headers["content-type"]
            data, is_all = answer.ready()
            if is_all:
                return web.Response(
                    body=data, status=answer.status, headers={"Content-Type": content_type}
                )
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": content_type}
            )
            await response.prepare(request)
            while data or (data := await answer.readany()):
                await response.write(data)
                data = b""
            await response.write_eof()
            return response


async def serve(port: int, urls: Sequence[str]) -> None:
    """Listen until SIGTERM."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    server = web.Server(LeastProxy(urls).handle, access_log=None)
    async with await loop.create_server(server, "127.0.0.1", port):
        await ended.wait()
        await server.shutdown()


def main(arguments: Sequence[str]) -> None:
    """A process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("urls", nargs="+")
    given = parser.parse_args(arguments)
    uvloop.run(serve(given.port, given.urls))


if __name__ == "__main__":
    main(sys.argv[1:])
