"""What the engines of `make bench-gateway` tell Redis: leases, residency, receipts.

Owns real publishers and where the Cartridges are said to be. Refuses to serve: the mock does, and
says by a pipe who was asked.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from cartridge_engine_ext.residency_publisher import ResidencyPublisher, new_epoch
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.residency import Receipt, ReceiptItem, ReceiptStatus, ReplicaId, Tier
from cartridge_proto.stores import LocalStore
from tests.proto.sample_artifact import engine_of
from tests.router.staged_fleet import put_titled
from tests.router.stored_cartridges import digest_of

NUM_CARTRIDGES = 50
REPLICAS = tuple(f"engine-{index}" for index in range(4))
_TIERS = (Tier.HBM, Tier.DRAM, Tier.NVME)


def fill_store(folder: Path) -> list[Manifest]:
    """Cartridges of 500 to 3440 tokens."""
    store = LocalStore(folder)
    return [
        put_titled(store, f"document-{index:02}", f"Document {index}", 500 + 60 * index)
        for index in range(NUM_CARTRIDGES)
    ]


def tiers_of(engine: int) -> dict[int, Tier]:
    """Where an engine has which Cartridge: a tenth is nowhere, the others on one to three."""
    held: dict[int, Tier] = {}
    for index in range(NUM_CARTRIDGES):
        if index % 10 == 9:
            continue
        for rank, tier in enumerate(_TIERS[: 1 + index % len(_TIERS)]):
            if (index + rank) % len(REPLICAS) == engine:
                held[index] = tier
    return held


def main(arguments: Sequence[str]) -> None:
    """Fill a store, and publish until stdin, whose lines are receipts to send, ends."""
    store_folder, redis_url, key = arguments
    manifests = fill_store(Path(store_folder))
    publishers = [_publisher(engine, manifests, redis_url, key) for engine in range(len(REPLICAS))]
    print("ready", flush=True)
    for line in sys.stdin:
        engine, request_id, digest = line.split()
        publisher = publishers[int(engine)]
        publisher.publish_receipt(_receipt(publisher, request_id, Digest(digest)))
    for publisher in publishers:
        publisher.stop()


def _publisher(
    engine: int, manifests: Sequence[Manifest], redis_url: str, key: str
) -> ResidencyPublisher:
    publisher = ResidencyPublisher(
        redis_url=redis_url,
        replica=ReplicaId(REPLICAS[engine]),
        epoch=new_epoch(),
        key=key.encode(),
        engine=engine_of(manifests[0]),
        engine_version="0.32.0",
    )
    for index, tier in tiers_of(engine).items():
        publisher.put(digest_of(manifests[index]), tier, manifests[index].payload_bytes)
    publisher.start()
    if not publisher.flush(10.0):
        raise TimeoutError("Redis took no residency")
    return publisher


def _receipt(publisher: ResidencyPublisher, request_id: str, digest: Digest) -> Receipt:
    return Receipt(
        replica=publisher.replica,
        epoch=publisher.epoch,
        request_id=request_id,
        status=ReceiptStatus.SERVED,
        reason=None,
        detail="",
        items=[ReceiptItem(digest=digest, tier=Tier.HBM)],
        num_virtual_tokens=1000,
        num_reused_tokens=1000,
        num_loads=0,
        loaded_bytes=0,
        load_s=0.0,
        scope="acme",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
