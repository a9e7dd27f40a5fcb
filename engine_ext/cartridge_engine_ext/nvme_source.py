"""A store behind the nvme tier, as the dram tier's source.

Owns the order of places: the folder of this machine first, then the store. Refuses to fail a load
that the store itself could serve: a full or failing disk costs speed only.
"""

import logging
from collections.abc import Callable

from cartridge_engine_ext.nvme_tier import DiskFailed, NvmeTier, TierFull
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.residency import Tier
from cartridge_proto.stores import CorruptStore, NotInStore, Store

logger = logging.getLogger(__name__)


class NvmeSource:
    """Reads from the tier what is there, and everything else from the store; thread-safe.

    `on_progress(digest, done_bytes, total_bytes)` is called while an artifact is fetched, on the
    thread that asked for it.
    """

    def __init__(
        self,
        store: Store,
        tier: NvmeTier,
        on_progress: Callable[[Digest, int, int], None] = lambda digest, done, total: None,
    ) -> None:
        self._store = store
        self._tier = tier
        self._on_progress = on_progress

    def read_manifest(self, digest: Digest) -> Manifest:
        """The manifest, also while the store is away; raises a `StoreError`."""
        try:
            return self._tier.read_manifest(digest)
        except NotInStore:
            return self._store.read_manifest(digest)

    def fetch(self, digest: Digest, deadline_s: float) -> Tier:
        """Bring an artifact to the tier; returns where its bytes were found.

        Raises:
            StoreError: of the store, by its kinds; `DeadlinePassed` at `deadline_s` (monotonic).
        """
        found = Tier.NVME if self._tier.contains(digest) else Tier.REMOTE
        manifest = self.read_manifest(digest)

        def progressed(done_bytes: int, total_bytes: int) -> None:
            self._on_progress(digest, done_bytes, total_bytes)

        try:
            self._tier.fetch(manifest, deadline_s, progressed)
        except (TierFull, DiskFailed) as error:
            logger.warning("artifact %s is read past the nvme tier: %s", digest, error)
            return Tier.REMOTE
        return found

    def read_blob_into(self, digest: Digest, buffer: memoryview) -> None:
        """Fill memory of exactly the blob's size, verified; raises a `StoreError` of the store."""
        try:
            self._tier.read_blob_into(digest, buffer)
        except NotInStore:
            # Evicted meanwhile by another process, or never brought.
            self._store.read_blob_into(digest, buffer)
        except (CorruptStore, DiskFailed) as error:
            logger.warning("blob %s is read past the nvme tier: %s", digest, error)
            self._store.read_blob_into(digest, buffer)
