"""What the control service does to a running engine beside its tiers: pins in HBM, draining.

Owns the two adapters that the control service is given. Refuses decisions: the census says whether
a pin fits, the scheduler half what is still running.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from cartridge_engine_ext.hbm_census import HbmCensus
from cartridge_engine_ext.residency_publisher import ResidencyPublisher
from cartridge_proto.digest import Digest

if TYPE_CHECKING:
    from cartridge_engine_ext.scheduler_side import SchedulerSide

logger = logging.getLogger(__name__)


class EnginePins:
    """Pins in HBM, which the scheduler's thread makes with its next step; `wake` brings one on."""

    def __init__(self, census: HbmCensus, wake: Callable[[], None]) -> None:
        self._census = census
        self._wake = wake
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="cartridge-wake")

    def pin(self, composition: Digest, owner: str) -> "Future[str | None]":
        """See `HbmCensus.pin`."""
        future = self._census.pin(composition, owner)
        self._executor.submit(self._bring_on, future)
        return future

    def unpin(self, composition: Digest, owner: str) -> "Future[str | None]":
        """See `HbmCensus.unpin`."""
        future = self._census.unpin(composition, owner)
        self._executor.submit(self._bring_on, future)
        return future

    def pinned_by(self, composition: Digest) -> tuple[str, ...]:
        """See `HbmCensus.pinned_by`."""
        return self._census.pinned_by(composition)

    def stop(self) -> None:
        """Wake nobody any more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _bring_on(self, future: "Future[str | None]") -> None:
        if future.done():
            return
        try:
            self._wake()
        except Exception as error:
            # The caller's deadline answers for it.
            logger.warning("idle engine not woken: %r", error)


class FleetDrain:
    """Draining of the scheduler half, told to the fleet."""

    def __init__(self, side: "SchedulerSide", publisher: ResidencyPublisher | None) -> None:
        self._side = side
        self._publisher = publisher

    def drain(self) -> None:
        """Take no more requests with Cartridges."""
        self._side.drain()
        if self._publisher is not None:
            self._publisher.set_draining(is_draining=True)

    def resume(self) -> None:
        """Take them again."""
        self._side.resume()
        if self._publisher is not None:
            self._publisher.set_draining(is_draining=False)

    @property
    def is_draining(self) -> bool:
        """Whether none is taken."""
        return self._side.is_draining

    def is_drained(self) -> bool:
        """Whether none is taken and none is left."""
        return self._side.is_drained()
