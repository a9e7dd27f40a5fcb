"""How a gateway ends without losing a request.

Owns the stages and their order: unready at once, a time in which whoever routes to this gateway
notices, no new connections, and a time for what still runs. Refuses to know signals and sockets.
"""

import asyncio
import contextlib
import logging

from cartridge_router.settings import DrainSettings

logger = logging.getLogger(__name__)


class Drain:
    """The end of one gateway. For use from one event loop.

    Args:
        settings: how long requests are accepted after `begin`, and may run after that.
    """

    def __init__(self, settings: DrainSettings) -> None:
        self.settings = settings
        self._has_begun = asyncio.Event()
        self._is_settled = asyncio.Event()
        self._is_cut = asyncio.Event()

    @property
    def is_begun(self) -> bool:
        """Whether this gateway is about to end, and must not be sent more."""
        return self._has_begun.is_set()

    def begin(self, *, must_settle: bool = True) -> None:
        """Begin to end; asked a second time, end at once."""
        if self.is_begun:
            logger.warning("ending at once: requests that run are cut off")
            self._is_cut.set()
        if self.is_begun or not must_settle:
            self._is_settled.set()
        self._has_begun.set()

    async def settle(self) -> None:
        """Wait for `begin`, and then for as long as requests are to be accepted."""
        await self._has_begun.wait()
        if self._is_settled.is_set():
            return
        logger.info("draining: requests are accepted for %g s more", self.settings.settle_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.settle_s):
                await self._is_settled.wait()

    async def finish(self, has_ended: asyncio.Event) -> None:
        """Wait until everything has ended, or may take no longer."""
        if not self.is_begun:
            self.begin(must_settle=False)
        if has_ended.is_set():
            return
        logger.info("draining: what runs may take %g s more", self.settings.grace_s)
        waiting = [asyncio.create_task(event.wait()) for event in (has_ended, self._is_cut)]
        try:
            await asyncio.wait(
                waiting, timeout=self.settings.grace_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
