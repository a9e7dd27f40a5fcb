"""The manifests this gateway knows, and what each alias stands for.

Owns an in-memory copy of the store's aliases and manifests, refreshed in the background. Refuses to
serve an entry that does not verify, and never touches the disk on the request path.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.manifest import MAX_SOURCE_BYTES, Manifest
from cartridge_proto.stores import CorruptStore, NotInStore, Store, StoreError, StoreUnavailable

logger = logging.getLogger(__name__)

REFUSED_PAUSE_S = 30.0
"""How long a manifest that was refused is left alone: to say why costs what its maker chose."""


@dataclass(frozen=True)
class Cartridge:
    """A manifest with its digest."""

    digest: Digest
    manifest: Manifest


@dataclass(frozen=True)
class _Snapshot:
    aliases: dict[str, Digest] = field(default_factory=dict)
    manifests: dict[Digest, Manifest] = field(default_factory=dict)
    refused: dict[Digest, float] = field(default_factory=dict)
    """Manifests that cannot be used, and when each is looked at again, `time.monotonic()`."""


class Catalog:
    """Looks Cartridges up by alias or digest. Without a store it is empty."""

    def __init__(self, store: Store | None, refresh_s: float) -> None:
        self._store = store
        self.refresh_s = refresh_s
        self._snapshot = _Snapshot()

    @property
    def edition(self) -> object:
        """Equal for two moments between which nothing was read: what was found then holds now."""
        return self._snapshot

    def find(self, alias_or_digest: str, tenant: str) -> Cartridge | None:
        """The Cartridge that a tenant may use under this name; `None` if there is none for it."""
        snapshot = self._snapshot
        digest = snapshot.aliases.get(alias_or_digest, Digest(alias_or_digest))
        manifest = snapshot.manifests.get(digest)
        if manifest is None or not manifest.is_readable_by(tenant):
            return None
        return Cartridge(digest, manifest)

    def visible_to(self, tenant: str) -> list[tuple[str, Cartridge]]:
        """Aliases and Cartridges a tenant may use, by alias."""
        snapshot = self._snapshot
        return [
            (alias, Cartridge(digest, snapshot.manifests[digest]))
            for alias, digest in snapshot.aliases.items()
            if digest in snapshot.manifests and snapshot.manifests[digest].is_readable_by(tenant)
        ]

    @property
    def aliases(self) -> Mapping[str, Digest]:
        """Every alias, whoever may use it: for operators."""
        return self._snapshot.aliases

    def manifest(self, digest: Digest) -> Manifest | None:
        """A manifest, whoever may use it: for operators; `None` if there is none."""
        return self._snapshot.manifests.get(digest)

    def newest_for(self, tenant: str, is_wanted: Callable[[Manifest], bool]) -> list[Cartridge]:
        """Of what a tenant may use and that is wanted, the version made last of each name.

        A name is an owner's: what another owner calls the same is another one.
        """
        newest: dict[tuple[str, str], Cartridge] = {}
        for _, cartridge in self.visible_to(tenant):
            manifest = cartridge.manifest
            if not is_wanted(manifest):
                continue
            key = (manifest.access.owner, manifest.name)
            known = newest.get(key)
            if known is None or known.manifest.created_at < manifest.created_at:
                newest[key] = cartridge
        return [newest[key] for key in sorted(newest)]

    def read_text(self, manifest: Manifest, max_bytes: int = MAX_SOURCE_BYTES) -> str | None:
        """The document that a Cartridge was made of, if the store has it. Blocks.

        Raises:
            StoreError: the store cannot be asked, or has something else under that name.
        """
        if self._store is None:
            return None
        try:
            data = self._store.read_small_blob(
                parse_digest(manifest.provenance.source_digest), max_bytes
            )
        except NotInStore:
            return None
        return data.decode("utf-8", "replace")

    async def refresh(self) -> None:
        """Read what is new in the store."""
        if self._store is not None:
            self._snapshot = await asyncio.to_thread(self._read, self._store, self._snapshot)

    async def read_first(self) -> None:
        """Read the store at the start; a store that is away now is read by `run` later."""
        try:
            await self.refresh()
        except StoreUnavailable as error:
            logger.warning("the catalog is empty until the store answers: %s", error)

    def close(self) -> None:
        """Give the store's connections back."""
        if self._store is not None:
            self._store.close()

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await asyncio.sleep(self.refresh_s)
            try:
                await self.refresh()
            except StoreUnavailable as error:
                logger.warning("the catalog stays as it is: %s", error)
            except (StoreError, OSError):
                logger.exception("the store cannot be read; the catalog stays as it is")

    @staticmethod
    def _read(store: Store, known: _Snapshot) -> _Snapshot:
        aliases, now_s = store.aliases(), time.monotonic()
        manifests, refused = {}, {}
        for digest in {*store.manifest_digests(), *aliases.values()}:
            # A manifest never changes: what was verified once is not read again.
            if digest in known.manifests:
                manifests[digest] = known.manifests[digest]
                continue
            if known.refused.get(digest, now_s) > now_s:
                refused[digest] = known.refused[digest]
                continue
            try:
                manifests[digest] = store.read_manifest(digest)
            except CorruptStore as error:
                logger.warning("left out of the catalog: %s", error)
                refused[digest] = now_s + REFUSED_PAUSE_S
            except StoreError as error:
                logger.warning("left out of the catalog: %s", error)
        return _Snapshot(aliases, manifests, refused)
