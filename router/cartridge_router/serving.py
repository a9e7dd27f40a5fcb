"""`cartridge-router serve`: runs a gateway until it is told to stop.

Owns signals and the event loop. Refuses everything else.
"""

import asyncio
import functools
import logging
import signal
import sys

import uvloop

from cartridge_router.app import drain_of, running_gateway
from cartridge_router.drain import Drain
from cartridge_router.live_settings import SettingsSource
from cartridge_router.settings import Settings
from cartridge_router.siblings import Worker

logger = logging.getLogger(__name__)


def serve(
    settings: Settings,
    key: bytes | None,
    operators_token: str | None,
    source: SettingsSource,
    worker: Worker | None,
) -> None:
    """Run until SIGTERM or SIGINT, then let requests finish; the second signal ends at once.

    SIGTERM comes from an orchestrator, whose clients need time to notice; SIGINT from a terminal.
    SIGHUP has the settings read again.
    """
    uvloop.run(_serve(settings, key, operators_token, source, worker))


async def _serve(
    settings: Settings,
    key: bytes | None,
    operators_token: str | None,
    source: SettingsSource,
    worker: Worker | None,
) -> None:
    drain = drain_of(settings)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, drain.begin)
    loop.add_signal_handler(signal.SIGINT, functools.partial(drain.begin, must_settle=False))
    loop.add_signal_handler(signal.SIGHUP, source.asked.set)
    if worker is not None:
        loop.add_reader(sys.stdin, _begin_alone, loop, drain)
    async with running_gateway(settings, key, drain, operators_token, source, worker) as url:
        logger.info("ready %s" if worker is None else "serves %s", url)
        await drain.settle()
    logger.info("ended")


def _begin_alone(loop: asyncio.AbstractEventLoop, drain: Drain) -> None:
    """Nothing ever comes by this pipe but its end: whoever started this worker is gone."""
    loop.remove_reader(sys.stdin)
    logger.error("the process that started this worker is gone; it ends")
    drain.begin(must_settle=False)
