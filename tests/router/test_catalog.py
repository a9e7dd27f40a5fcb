"""The catalog: what it knows, for whom, and how it follows the store."""

import asyncio
import time
from collections.abc import Iterable

import pytest

from cartridge_proto.manifest import Manifest, ManifestDigest
from cartridge_proto.stores import LocalStore, StoreUnavailable
from cartridge_router import catalog as catalog_module
from cartridge_router.catalog import Catalog
from tests.loadtest.cartridge_requests import until
from tests.router.stored_cartridges import digest_of, put_cartridge


async def test_it_finds_by_alias_and_by_digest(store: LocalStore) -> None:
    """Both names lead to the same Cartridge; nothing else does."""
    manifest = put_cartridge(store)
    catalog = Catalog(store, 60.0)
    assert catalog.find("harbour-rules@1", "public") is None
    await catalog.refresh()
    for name in ("harbour-rules@1", digest_of(manifest)):
        found = catalog.find(name, "public")
        assert found is not None
        assert (found.digest, found.manifest) == (digest_of(manifest), manifest)
    for name in ("harbour-rules", "harbour-rules@2", "sha256:", ""):
        assert catalog.find(name, "public") is None


async def test_without_a_store_it_is_empty() -> None:
    """A gateway without a store knows no Cartridge, and refreshing is no error."""
    catalog = Catalog(None, 60.0)
    await catalog.refresh()
    assert catalog.find("harbour-rules@1", "public") is None
    assert catalog.visible_to("public") == []


async def test_each_tenant_sees_its_own(store: LocalStore) -> None:
    """Owner and readers see an artifact, others do not, under no name."""
    manifest = put_cartridge(store, readers=("alice",))
    put_cartridge(store, "open", seed=1)
    catalog = Catalog(store, 60.0)
    await catalog.refresh()
    seen = {
        tenant: [alias for alias, _ in catalog.visible_to(tenant)]
        for tenant in ("alice", "bob", manifest.access.owner)
    }
    assert seen == {
        "alice": ["harbour-rules@1", "open@1"],
        "bob": ["open@1"],
        "tests": ["harbour-rules@1", "open@1"],
    }
    assert catalog.find(digest_of(manifest), "bob") is None
    assert catalog.find(digest_of(manifest), "alice") is not None


async def test_it_follows_the_store(store: LocalStore) -> None:
    """A new Cartridge, an alias that moves and one that is removed are seen while it runs."""
    put_cartridge(store)
    catalog = Catalog(store, 0.01)
    task = asyncio.create_task(catalog.run())
    try:
        await until(lambda: catalog.find("harbour-rules@1", "public") is not None, "found")
        moved = put_cartridge(store, seed=1)
        await until(
            lambda: (
                (found := catalog.find("harbour-rules@1", "public")) is not None
                and found.digest == digest_of(moved)
            ),
            "the alias moved",
        )
        (store.root / "aliases" / "harbour-rules@1").unlink()
        await until(lambda: catalog.find("harbour-rules@1", "public") is None, "removed")
        assert catalog.find(digest_of(moved), "public") is not None
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_one_damaged_manifest_does_not_hide_the_rest(store: LocalStore) -> None:
    """What does not hash to its name is left out, and what is good is served."""
    bad = put_cartridge(store, "bad", seed=1)
    put_cartridge(store)
    path = store.manifest_path(digest_of(bad))
    path.write_bytes(path.read_bytes() + b" ")
    catalog = Catalog(store, 60.0)
    await catalog.refresh()
    assert [alias for alias, _ in catalog.visible_to("public")] == ["harbour-rules@1"]
    assert catalog.find("bad@1", "public") is None


async def test_a_refused_manifest_is_left_alone_for_a_while(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To say why it is refused costs much; what was mended is seen after the pause."""
    bad = put_cartridge(store)
    path = store.manifest_path(digest_of(bad))
    whole = path.read_bytes()
    path.write_bytes(whole + b" ")
    reads: list[str] = []
    read = store.read_manifest

    def counted(digest: ManifestDigest) -> Manifest:
        reads.append(digest)
        return read(digest)

    monkeypatch.setattr(store, "read_manifest", counted)
    catalog = Catalog(store, 60.0)
    for _ in range(5):
        await catalog.refresh()
    assert len(reads) == 1
    path.write_bytes(whole)
    clock = time.monotonic() + catalog_module.REFUSED_PAUSE_S
    monkeypatch.setattr("time.monotonic", lambda: clock)
    await catalog.refresh()
    assert catalog.find("harbour-rules@1", "public") is not None


async def test_what_was_verified_is_not_read_again(store: LocalStore) -> None:
    """A manifest cannot change: damage on disk after the first read does not take it away."""
    manifest = put_cartridge(store)
    catalog = Catalog(store, 60.0)
    await catalog.refresh()
    store.manifest_path(digest_of(manifest)).write_bytes(b"rubbish")
    await catalog.refresh()
    assert catalog.find("harbour-rules@1", "public") is not None


class FlakyStore(LocalStore):
    """A store that can be away."""

    is_away = True

    def _read_aliases(self) -> Iterable[tuple[str, bytes]]:
        if self.is_away:
            raise StoreUnavailable("no connection")
        return super()._read_aliases()


async def test_a_store_that_is_away_at_the_start_is_read_later(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway starts, says so, and finds its Cartridges when the store answers."""
    put_cartridge(store)
    flaky = FlakyStore(store.root)
    catalog = Catalog(flaky, 0.01)
    await catalog.read_first()
    assert "until the store answers: no connection" in caplog.text
    task = asyncio.create_task(catalog.run())
    try:
        await until(lambda: "stays as it is: no connection" in caplog.text, "tried again")
        assert catalog.visible_to("public") == []
        flaky.is_away = False
        await until(lambda: catalog.visible_to("public") != [], "found")
        flaky.is_away = True
        caplog.clear()
        await until(lambda: "stays as it is" in caplog.text, "away again")
        assert catalog.find("harbour-rules@1", "public") is not None
    finally:
        task.cancel()
        await asyncio.wait([task])
