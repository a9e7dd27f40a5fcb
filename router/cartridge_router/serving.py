"""`cartridge-router serve`: runs a gateway until it is told to stop.

Owns signals and the event loop. Refuses everything else.
"""

import asyncio
import logging
import signal

import uvloop

from cartridge_router.app import running_gateway
from cartridge_router.settings import Settings

logger = logging.getLogger(__name__)


def serve(settings: Settings, key: bytes | None) -> None:
    """Run until SIGTERM or SIGINT."""
    uvloop.run(_serve(settings, key))


async def _serve(settings: Settings, key: bytes | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running_gateway(settings, key) as url:
        logger.info("ready %s", url)
        await stop.wait()
        logger.info("stopping")
