"""`cartridge-router serve`: runs a gateway until it is told to stop.

Owns signals and the event loop. Refuses everything else.
"""

import asyncio
import functools
import logging
import signal

import uvloop

from cartridge_router.app import drain_of, running_gateway
from cartridge_router.live_settings import SettingsSource
from cartridge_router.settings import Settings

logger = logging.getLogger(__name__)


def serve(
    settings: Settings, key: bytes | None, operators_token: str | None, source: SettingsSource
) -> None:
    """Run until SIGTERM or SIGINT, then let requests finish; the second signal ends at once.

    SIGTERM comes from an orchestrator, whose clients need time to notice; SIGINT from a terminal.
    SIGHUP has the settings read again.
    """
    uvloop.run(_serve(settings, key, operators_token, source))


async def _serve(
    settings: Settings, key: bytes | None, operators_token: str | None, source: SettingsSource
) -> None:
    drain = drain_of(settings)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, drain.begin)
    loop.add_signal_handler(signal.SIGINT, functools.partial(drain.begin, must_settle=False))
    loop.add_signal_handler(signal.SIGHUP, source.asked.set)
    async with running_gateway(settings, key, drain, operators_token, source) as url:
        logger.info("ready %s", url)
        await drain.settle()
    logger.info("ended")
