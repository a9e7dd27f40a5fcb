"""Texts of Cartridges: read once, kept within bounds, never waited for long."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.stores import LocalStore, StoreUnavailable
from cartridge_router.catalog import Cartridge, Catalog
from cartridge_router.settings import CartridgeSettings
from cartridge_router.texts import Texts
from tests.proto.sample_artifact import sample_artifact


class CountingCatalog(Catalog):
    """Counts what is read; `gate` holds it up, `is_away` fails it."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store, refresh_s=60.0)
        self.num_reads = 0
        self.gate = threading.Event()
        self.gate.set()
        self.is_away = False

    def read_text(self, manifest: Manifest, max_bytes: int = 0) -> str | None:
        """As the catalog's own."""
        self.num_reads += 1
        self.gate.wait(10)
        if self.is_away:
            raise StoreUnavailable("away")
        return super().read_text(manifest, max_bytes)


def cartridge_of(store: LocalStore, text: str | None) -> Cartridge:
    """One that was made of a text; `None` = which is not kept."""
    manifest, _ = sample_artifact()
    digest = sha256_digest(b"kept nowhere") if text is None else store.put_blob(text.encode())
    provenance = msgspec.structs.replace(manifest.provenance, source_digest=digest)
    return Cartridge(Digest("sha256:0"), msgspec.structs.replace(manifest, provenance=provenance))


@pytest.fixture
def catalog(store: LocalStore) -> CountingCatalog:
    """Over the test's store."""
    return CountingCatalog(store)


@contextmanager
def texts_of(catalog: CountingCatalog, **settings: Any) -> Iterator[Texts]:
    """Closed at the end, whatever hangs."""
    texts = Texts(catalog, CartridgeSettings(text_deadline_ms=5_000, **settings))
    try:
        yield texts
    finally:
        catalog.gate.set()
        texts.close()


async def test_texts_come_in_order_and_are_read_once(
    store: LocalStore, catalog: CountingCatalog
) -> None:
    """Also when many ask at the same time."""
    first, second = cartridge_of(store, "first"), cartridge_of(store, "zweiter ü")
    with texts_of(catalog) as texts:
        catalog.gate.clear()
        asking = asyncio.gather(*(texts.read([second, first]) for _ in range(5)))
        await asyncio.sleep(0)
        catalog.gate.set()
        assert await asking == [("zweiter ü", "first")] * 5
        assert catalog.num_reads == 2


async def test_what_is_not_there_is_not_looked_for_again(
    store: LocalStore, catalog: CountingCatalog
) -> None:
    """One that is missing leaves all out: half a set is no stand-in."""
    absent, there = cartridge_of(store, None), cartridge_of(store, "there")
    with texts_of(catalog) as texts:
        assert [await texts.read([there, absent]) for _ in range(3)] == [None] * 3
        assert catalog.num_reads == 2


async def test_too_large_texts_are_left_out(store: LocalStore, catalog: CountingCatalog) -> None:
    """Each for itself, and all of one request together; the bound itself is not too large."""
    five, six = cartridge_of(store, "12345"), cartridge_of(store, "äöü")
    with texts_of(catalog, max_text_bytes=6) as texts:
        assert await texts.read([five]) == ("12345",)
        assert await texts.read([six]) == ("äöü",)
        assert await texts.read([five, six]) is None
        assert await texts.read([cartridge_of(store, "1234567")]) is None


async def test_memory_is_bounded(store: LocalStore, catalog: CountingCatalog) -> None:
    """The one that was used longest ago goes; one that is larger than all room is used once."""
    a, b, c = (cartridge_of(store, letter * 4) for letter in "abc")
    with texts_of(catalog, text_cache_bytes=8) as texts:
        for each in (a, b, a, c, a, b):
            assert await texts.read([each]) is not None
        # a, b, then c for b, then b again.
        assert catalog.num_reads == 4
        assert await texts.read([cartridge_of(store, "x" * 100)]) == ("x" * 100,)
        assert await texts.read([a]) == ("aaaa",)
        assert catalog.num_reads == 6


async def test_a_slow_store_is_not_waited_for(store: LocalStore, catalog: CountingCatalog) -> None:
    """After the deadline there is no text; later there is one."""
    one = cartridge_of(store, "one")
    with texts_of(catalog) as texts:
        catalog.gate.clear()
        texts.settings = CartridgeSettings(text_deadline_ms=10)
        assert await texts.read([one]) is None
        catalog.gate.set()
        texts.settings = CartridgeSettings(text_deadline_ms=5_000)
        assert await texts.read([one]) == ("one",)


async def test_what_comes_late_is_kept_and_not_read_again(
    store: LocalStore, catalog: CountingCatalog
) -> None:
    """A store that always takes longer than the deadline is asked once, whoever waits or not."""
    one, other = cartridge_of(store, "one"), cartridge_of(store, "other")
    with texts_of(catalog) as texts:
        catalog.gate.clear()
        texts.settings = CartridgeSettings(text_deadline_ms=10)
        for number, each in enumerate((one, other)):
            # A thread may take longer to begin than the deadline is.
            while catalog.num_reads <= number:
                assert await texts.read([each]) is None
        assert await texts.read([one]) is None
        assert await texts.read([other]) is None
        assert catalog.num_reads == 2
        catalog.gate.set()
        texts.settings = CartridgeSettings(text_deadline_ms=5_000)
        assert await texts.read([one, other, one]) == ("one", "other", "one")
        assert catalog.num_reads == 2


async def test_what_failed_late_is_read_again(store: LocalStore, catalog: CountingCatalog) -> None:
    """When the store is back, the failure of before is not told to whoever comes."""
    one, other = cartridge_of(store, "one"), cartridge_of(store, "other")
    with texts_of(catalog) as texts:
        catalog.gate.clear()
        catalog.is_away = True
        texts.settings = CartridgeSettings(text_deadline_ms=10)
        while not catalog.num_reads:
            assert await texts.read([one]) is None
        catalog.gate.set()
        texts.settings = CartridgeSettings(text_deadline_ms=5_000)
        assert await texts.read([other]) is None
        catalog.is_away = False
        assert await texts.read([other, one]) == ("other", "one")


async def test_a_store_that_is_away_is_no_error(
    store: LocalStore, catalog: CountingCatalog
) -> None:
    """There is no text then, and there is one as soon as it is back."""
    one = cartridge_of(store, "one")
    with texts_of(catalog) as texts:
        catalog.is_away = True
        assert await texts.read([one]) is None
        catalog.is_away = False
        assert await texts.read([one]) == ("one",)
