"""`cartridge-router serve --workers N`: processes that listen on one port, and who starts them.

Owns their start, their restart when one dies, and the signals that all get. Refuses to serve: the
kernel spreads connections over the workers (SO_REUSEPORT).
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cartridge_proto.names import ENV_WORKER
from cartridge_router.errors import ConfigurationError
from cartridge_router.settings import Settings
from cartridge_router.siblings import ORDERS, Worker

logger = logging.getLogger(__name__)

REFUSED_STATUS: Final = 2
"""Of a command whose settings cannot work."""
READY_POLL_S: Final = 0.05
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
"""Between the end of a worker that died and its next start; twice as long each time."""
STABLE_S: Final = 60.0
"""One that lived so long begins with the first pause again."""


def run_workers(settings: Settings, arguments: Sequence[str]) -> int:
    """Start workers with these arguments of the command line, and stay until they have ended.

    Returns 0 when all ended as they were told to; the status of one that could not start before
    all were ready.

    Raises:
        ConfigurationError: the address cannot be listened on.
    """
    with (
        tempfile.TemporaryDirectory(prefix="cartridge-router-") as folder,
        _reserved(settings.host, settings.port) as port,
    ):
        return asyncio.run(_Supervisor(settings, arguments, port, folder).run())


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """The port that all listen on, kept from others; a free one for 0."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            # Bound and not listening: it gets no connections.
            reserved.bind(address)
            yield reserved.getsockname()[1]
    except OSError as error:
        raise ConfigurationError([f"host, port: {host}:{port}: {error}"]) from error


class _Supervisor:
    """The process that starts the others."""

    def __init__(
        self, settings: Settings, arguments: Sequence[str], port: int, folder: str
    ) -> None:
        self._settings = settings
        self._arguments = arguments
        self._port = port
        self._folder = folder
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._is_ending = asyncio.Event()
        self._is_ready = False
        """All have served once: what one finds wrong later is no reason to end the others."""

    async def run(self) -> int:
        """Until all have ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._pass_on, number)
        keeping = [
            asyncio.create_task(self._keep(index)) for index in range(self._settings.workers)
        ]
        announcing = asyncio.create_task(self._announce())
        try:
            return max(await asyncio.gather(*keeping))
        finally:
            announcing.cancel()
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*keeping, announcing, return_exceptions=True)

    def _pass_on(self, number: signal.Signals) -> None:
        if number is not signal.SIGHUP:
            self._is_ending.set()
        for process in self._processes.values():
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.write(ORDERS[number])

    async def _keep(self, index: int) -> int:
        """Start one worker, and again whenever it dies; returns its last status."""
        pause_s = FIRST_PAUSE_S
        while True:
            begun_s = time.monotonic()
            status = await self._run_one(index)
            if self._is_ending.is_set():
                return max(0, status)
            if status == REFUSED_STATUS and not self._is_ready:
                # It said why, and would say so again.
                self._pass_on(signal.SIGTERM)
                return status
            pause_s = FIRST_PAUSE_S if time.monotonic() - begun_s > STABLE_S else pause_s
            logger.error("worker %d ended with %d; again in %g s", index, status, pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._is_ending.wait()
            if self._is_ending.is_set():
                return 0
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _run_one(self, index: int) -> int:
        worker = Worker(
            index=index, count=self._settings.workers, port=self._port, folder=self._folder
        )
        worker.socket(index).unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cartridge_router",
            *self._arguments,
            # Orders go this way, and its end is ours: a worker whose pipe closes has nobody who
            # would start it again. Signals of a terminal or of systemd reach the whole group, and
            # a worker that got each twice would take the second for "at once".
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, ENV_WORKER: msgspec.json.encode(worker).decode()},
        )
        self._processes[index] = process
        if self._is_ending.is_set() and process.stdin is not None:
            process.stdin.write(ORDERS[signal.SIGINT])
        return await process.wait()

    async def _announce(self) -> None:
        """Say that all are ready, once."""
        sockets = [Path(self._folder) / f"{index}.sock" for index in range(self._settings.workers)]
        while not all(path.exists() for path in sockets):  # noqa: ASYNC110
            await asyncio.sleep(READY_POLL_S)
        self._is_ready = True
        scheme = "http" if self._settings.tls.cert_file is None else "https"
        logger.info("ready %s://%s:%d", scheme, self._settings.host, self._port)
