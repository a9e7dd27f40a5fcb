"""Engines as far as their control goes: the real service and dram tier, and residency in Redis.

Owns what they hold and which calls came. Refuses to answer requests: a stub does that.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc

from cartridge_engine_ext.control_access import OPEN_ACCESS, ControlAccess
from cartridge_engine_ext.control_service import ControlServer, ControlService
from cartridge_engine_ext.dram_pool import DramPool
from cartridge_engine_ext.residency_ledger import ResidencyLedger
from cartridge_engine_ext.residency_publisher import ResidencyPublisher, new_epoch
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.digest import Digest
from cartridge_proto.residency import Receipt, ReceiptItem, ReceiptStatus, ReplicaId, Tier
from cartridge_proto.stores import LocalStore
from cartridge_proto.v1 import control_pb2

WAIT_S = 30.0


@dataclass
class Calls:
    """What a service was asked, in order."""

    prefetches: list[control_pb2.PrefetchRequest] = field(default_factory=list)
    num_others: int = 0


class _Recording(ControlService):
    """The real service; it notes who comes as far as itself."""

    calls: Calls

    def Describe(  # noqa: N802
        self, request: control_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> control_pb2.DescribeResponse:
        """As the real one."""
        self.calls.num_others += 1
        return super().Describe(request, context)

    def Prefetch(  # noqa: N802
        self, request: control_pb2.PrefetchRequest, context: grpc.ServicerContext
    ) -> control_pb2.PrefetchResponse:
        """As the real one."""
        self.calls.prefetches.append(request)
        return super().Prefetch(request, context)


@dataclass
class ControlledEngine:
    """One engine. `drain` is what its operator does."""

    name: ReplicaId
    calls: Calls
    pool: DramPool
    publisher: ResidencyPublisher | None
    address: str

    def hold(self, *digests: Digest) -> None:
        """Have artifacts in dram; blocks until they are there."""
        for digest in digests:
            self.pool.acquire(digest, 1e18)
            self.pool.wait(digest, WAIT_S)
            self.pool.release(digest)

    def serve(self, digest: Digest, count: int) -> None:
        """Publish receipts of so many requests that used an artifact."""
        assert self.publisher is not None
        for number in range(count):
            self.publisher.publish_receipt(
                receipt_for(self.name, f"{self.name}-{digest[-8:]}-{number}", [digest])
            )

    def drain(self) -> None:
        """Take no more requests with Cartridges."""
        assert self.publisher is not None
        self.publisher.set_draining(is_draining=True)

    @property
    def prefetched(self) -> set[str]:
        """What it was asked to bring."""
        return {call.digest for call in self.calls.prefetches}


def receipt_for(replica: str, request_id: str, digests: Sequence[Digest]) -> Receipt:
    """A receipt of a request that was served from dram."""
    return Receipt(
        replica=replica,
        epoch=new_epoch(),
        request_id=request_id,
        scope="public",
        status=ReceiptStatus.SERVED,
        reason=None,
        detail="",
        items=[ReceiptItem(digest=digest, tier=Tier.DRAM) for digest in digests],
        num_virtual_tokens=5,
        num_reused_tokens=0,
        num_loads=1,
        loaded_bytes=0,
        load_s=0.0,
    )


StartEngine = Callable[..., ControlledEngine]


@asynccontextmanager
async def controlled_engines(
    store: LocalStore, identity: EngineIdentity
) -> AsyncIterator[StartEngine]:
    """Start engines, `r0` and so on; each may have a Redis to publish to, signed by a key."""
    stops: list[Callable[[], None]] = []

    def start(
        name: str,
        *,
        redis_url: str | None = None,
        key: bytes | None = None,
        access: ControlAccess = OPEN_ACCESS,
        capacity_bytes: int = 1 << 24,
        pinned_bytes: int | None = None,
    ) -> ControlledEngine:
        replica, epoch = ReplicaId(name), new_epoch()
        publisher = None
        if redis_url is not None:
            publisher = ResidencyPublisher(
                redis_url=redis_url,
                replica=replica,
                epoch=epoch,
                key=key,
                engine=identity,
                engine_version="0.32.0",
            )
        ledger = ResidencyLedger(publisher)
        pool = DramPool(
            source=store,
            capacity_bytes=capacity_bytes,
            num_loaders=2,
            pinned_bytes=pinned_bytes,
            on_ready=lambda digest, size: ledger.enter(digest, Tier.DRAM, size),
            on_evict=lambda digest: ledger.leave(digest, Tier.DRAM),
            on_pin=lambda digest, is_on: ledger.set_pinned(digest, Tier.DRAM, is_pinned=is_on),
        )
        service = _Recording(
            pool=pool,
            engine=identity,
            engine_version="0.32.0",
            replica=replica,
            epoch=epoch,
            not_ready_reason=lambda: None,
            ledger=ledger,
        )
        service.calls = Calls()
        server = ControlServer(service, "127.0.0.1:0", access)
        stops.append(server.stop)
        stops.append(pool.close)
        if publisher is not None:
            publisher.start(server.address)
            stops.append(publisher.stop)
        return ControlledEngine(replica, service.calls, pool, publisher, server.address)

    try:
        yield start
    finally:
        for stop in reversed(stops):
            stop()
