"""`cartridge-router serve`: runs a gateway until it is told to stop.

Owns signals and the event loop. Refuses everything else.
"""

import asyncio
import functools
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping

import uvloop

from cartridge_router.app import drain_of, running_gateway
from cartridge_router.live_settings import SettingsSource
from cartridge_router.settings import Settings
from cartridge_router.siblings import ORDERS, Worker

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
    acts: dict[signal.Signals, Callable[[], None]] = {
        signal.SIGTERM: drain.begin,
        signal.SIGINT: functools.partial(drain.begin, must_settle=False),
        signal.SIGHUP: source.asked.set,
    }
    for number, act in acts.items():
        # A worker gets them from the process that started it, each once.
        loop.add_signal_handler(number, act if worker is None else _ignore)
    if worker is not None:
        loop.add_reader(sys.stdin, _obey, loop, {ORDERS[n]: act for n, act in acts.items()})
    async with running_gateway(settings, key, drain, operators_token, source, worker) as url:
        logger.info("ready %s" if worker is None else "serves %s", url)
        await drain.settle()
    logger.info("ended")


def _ignore() -> None:
    """What a signal does that comes another way too."""


def _obey(loop: asyncio.AbstractEventLoop, acts: Mapping[bytes, Callable[[], None]]) -> None:
    """Do what the process that started this worker says; without it, end."""
    orders = os.read(sys.stdin.fileno(), 64)
    for order in orders:
        acts[bytes([order])]()
    if not orders:
        loop.remove_reader(sys.stdin)
        logger.error("the process that started this worker is gone; it ends")
        acts[ORDERS[signal.SIGINT]]()
