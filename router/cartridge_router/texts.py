"""The texts that Cartridges were made of, read from the store and kept for a while.

Owns a bounded memory of them and the thread that reads. Refuses to say who may read one: it is
asked for Cartridges that a selection has given to their reader.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from cartridge_proto.stores import StoreError, StoreUnavailable
from cartridge_router.catalog import Cartridge, Catalog
from cartridge_router.settings import CartridgeSettings

logger = logging.getLogger(__name__)

ABSENT_S: Final = 30.0
"""How long a text that is not there, or too long, is not looked for again."""
MAX_ABSENT: Final = 10_000
NUM_READERS: Final = 2


class _Text(NamedTuple):
    text: str
    size_bytes: int


def _measured(text: str | None) -> _Text | None:
    return None if text is None else _Text(text, len(text.encode()))


class Texts:
    """Reads texts in threads of its own. For use from one event loop."""

    def __init__(self, catalog: Catalog, settings: CartridgeSettings) -> None:
        self.settings = settings
        self._catalog = catalog
        self._texts: OrderedDict[str, _Text] = OrderedDict()
        self._num_bytes = 0
        self._absent: OrderedDict[str, float] = OrderedDict()
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._late: dict[str, Future[str | None]] = {}
        """What threads are reading for those who wait no longer, or have read since."""
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="text")

    async def read(self, cartridges: Sequence[Cartridge]) -> tuple[str, ...] | None:
        """The text of each Cartridge, in order; `None` if one is not there, or all are too long.

        Takes no longer than `text_deadline_ms`.
        """
        try:
            async with asyncio.timeout(self.settings.text_deadline_ms / 1000):
                found = [await self._one(cartridge) for cartridge in cartridges]
        except TimeoutError:
            logger.warning("the store was too slow for a text")
            return None
        texts = [each for each in found if each is not None]
        size_bytes = sum(each.size_bytes for each in texts)
        if len(texts) < len(found) or size_bytes > self.settings.max_text_bytes:
            return None
        return tuple(each.text for each in texts)

    async def _one(self, cartridge: Cartridge) -> _Text | None:
        digest = cartridge.manifest.provenance.source_digest
        lock = self._reading.get(digest)
        if lock is None:
            lock = self._reading[digest] = asyncio.Lock()
        async with lock:
            self._keep_late()
            # Whoever had to wait for the lock finds what was read meanwhile.
            if digest in self._texts:
                self._texts.move_to_end(digest)
                return self._texts[digest]
            if self._absent.get(digest, 0.0) > time.monotonic():
                return None
            try:
                text = await self._read(cartridge)
            except StoreUnavailable as error:
                logger.warning("no text of %s for now: %s", cartridge.manifest.alias, error)
                return None
            self._keep(digest, text)
            return text

    async def _read(self, cartridge: Cartridge) -> _Text | None:
        """One that is damaged or too large is as good as none.

        Raises:
            StoreUnavailable: the store is away, and may be back for the next request.
        """
        digest = cartridge.manifest.provenance.source_digest
        # A store that always takes too long would be asked for the same again and again.
        job = self._late.pop(digest, None) or self._readers.submit(
            self._catalog.read_text, cartridge.manifest, self.settings.max_text_bytes
        )
        try:
            return _measured(await asyncio.wrap_future(job))
        except StoreUnavailable:
            raise
        except (StoreError, OSError) as error:
            logger.warning("no text of %s: %s", cartridge.manifest.alias, error)
            return None
        finally:
            if not (job.cancel() or job.done()):
                self._late[digest] = job

    def _keep_late(self) -> None:
        """Take in what came when nobody waited for it any more: as many as there are readers."""
        for digest, job in list(self._late.items()):
            if job.done():
                del self._late[digest]
                if job.exception() is None:
                    self._keep(digest, _measured(job.result()))

    def _keep(self, digest: str, text: _Text | None) -> None:
        if text is None:
            self._absent[digest] = time.monotonic() + ABSENT_S
            while len(self._absent) > MAX_ABSENT:
                self._absent.popitem(last=False)
            return
        self._texts[digest] = text
        self._num_bytes += text.size_bytes
        # The newest stays, however small the memory is: it is about to be used.
        while self._num_bytes > self.settings.text_cache_bytes and len(self._texts) > 1:
            _, oldest = self._texts.popitem(last=False)
            self._num_bytes -= oldest.size_bytes

    def close(self) -> None:
        """End the threads, without waiting for what they read."""
        self._readers.shutdown(wait=False, cancel_futures=True)
