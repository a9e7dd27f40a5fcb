"""A gateway as a process of its own: for what signals do.

Owns its command line and its end. Refuses to judge answers.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping

import aiohttp

from tests.router.gateway_client import Gateway


class GatewayProcess:
    """One `cartridge-router serve` that has said where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, gateway: Gateway) -> None:
        self.gateway = gateway
        self._process = process

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end; returns the exit status."""
        async with asyncio.timeout(20):
            return await self._process.wait()


@contextlib.asynccontextmanager
async def running_process(
    session: aiohttp.ClientSession, *replicas: str, environment: Mapping[str, str]
) -> AsyncIterator[GatewayProcess]:
    """A gateway in front of these replicas, with settings from an environment."""
    command = ["-m", "cartridge_router", "serve", "--port", "0"]
    if replicas:
        command += ["--replicas", ",".join(replicas)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        env={**os.environ, **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if match := re.search(rb"ready (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise AssertionError("it ended before it listened")
        reading = asyncio.create_task(process.stderr.read())
        yield GatewayProcess(process, Gateway(session, match[1].decode()))
        assert b"Traceback" not in await reading
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
