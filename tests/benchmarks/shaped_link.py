"""A link of a set speed: what comes through it is late by a latency, and no faster than a rate.

Owns the forwarding of bytes between loopback ports. Refuses to look into them.
"""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

PIECE_BYTES: Final = 65_536


@dataclass(frozen=True)
class Shape:
    """Of a link, towards whoever connects: seconds before each answer, and bytes a second."""

    latency_s: float
    bytes_per_s: float


class _Link:
    def __init__(self, target_port: int, shape: Shape) -> None:
        self._port, self._shape = target_port, shape
        self._free_s = 0.0
        """When the link has sent what it was given."""
        self._is_asked = False
        """A question has gone, and nothing of its answer has come."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        opened = [writer]
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._port)
            opened.append(forth)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, forth))
                group.create_task(self._pass(back, writer, is_shaped=True))
        except* OSError:
            pass
        finally:
            for each in opened:
                each.close()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        is_shaped: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(PIECE_BYTES):
            if is_shaped:
                latency_s = self._shape.latency_s if self._is_asked else 0.0
                self._free_s = max(self._free_s, loop.time() + latency_s)
                self._free_s += len(data) / self._shape.bytes_per_s
                await asyncio.sleep(self._free_s - loop.time())
            self._is_asked = not is_shaped
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


@contextlib.contextmanager
def shaped_links(target_port: int, shapes: list[Shape]) -> Iterator[list[int]]:
    """Ports on loopback, each of which leads to one server by a link of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="shaped links")
    thread.start()

    async def start() -> list[asyncio.Server]:
        links = [_Link(target_port, shape) for shape in shapes]
        return [await asyncio.start_server(link.serve, "127.0.0.1", 0) for link in links]

    async def stop() -> None:
        for server in servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    servers = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield [server.sockets[0].getsockname()[1] for server in servers]
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
