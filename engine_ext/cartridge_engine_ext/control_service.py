"""The gRPC control service of one engine: Describe, Prefetch, Evict, and standard health.

Owns the translation between protobuf and the pool. Refuses to touch tensors or scheduling.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import msgspec
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from cartridge_engine_ext.artifact_pool import Artifact, ArtifactPool
from cartridge_engine_ext.errors import ConfigurationError, Refusal
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.residency import Epoch, FailureReason, ReplicaId
from cartridge_proto.v1 import control_pb2, control_pb2_grpc

MAX_MESSAGE_BYTES = 1 << 20
DEFAULT_DEADLINE_MS = 30_000
MAX_DEADLINE_MS = 600_000
NUM_THREADS = 16
"""Each waiting Prefetch takes one; health and Describe need some left."""
MAX_WAITING = 12

_STATUS = {
    FailureReason.UNKNOWN_ARTIFACT: grpc.StatusCode.NOT_FOUND,
    FailureReason.CORRUPT_ARTIFACT: grpc.StatusCode.DATA_LOSS,
    FailureReason.INCOMPATIBLE: grpc.StatusCode.FAILED_PRECONDITION,
    FailureReason.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    FailureReason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    FailureReason.CAPACITY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    FailureReason.NOT_READY: grpc.StatusCode.UNAVAILABLE,
}


class ControlService(control_pb2_grpc.CartridgeControlServicer):
    """Answers for one pool. `not_ready_reason()` is `None` once the self-test has passed."""

    def __init__(
        self,
        *,
        pool: ArtifactPool,
        engine: EngineIdentity,
        engine_version: str,
        replica: ReplicaId,
        epoch: Epoch,
        not_ready_reason: Callable[[], str | None],
    ) -> None:
        self._pool = pool
        self._engine = engine
        self._engine_version = engine_version
        self._replica = replica
        self._epoch = epoch
        self._not_ready_reason = not_ready_reason
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)

    def Describe(  # noqa: N802
        self,
        request: control_pb2.DescribeRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.DescribeResponse:
        """What the replica serves and holds."""
        reason = self._not_ready_reason()
        return control_pb2.DescribeResponse(
            replica=self._replica,
            epoch=self._epoch,
            engine_version=self._engine_version,
            ready=reason is None,
            reason=reason or "",
            engine_json=msgspec.json.encode(self._engine),
            residents=[_resident(*row) for row in self._pool.residents()],
            dram_capacity_bytes=self._pool.capacity_bytes,
            dram_used_bytes=self._pool.used_bytes,
        )

    def Prefetch(  # noqa: N802
        self,
        request: control_pb2.PrefetchRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.PrefetchResponse:
        """Bring an artifact to the dram tier and wait for it."""
        try:
            digest = parse_digest(request.digest)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"digest: {error}")
        deadline_ms = request.deadline_ms or DEFAULT_DEADLINE_MS
        if deadline_ms > MAX_DEADLINE_MS:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"deadline_ms: {deadline_ms}; the limit is {MAX_DEADLINE_MS}",
            )
        if not self._waiting.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WAITING} prefetches are waiting already"
            )
        try:
            artifact, load_s = self._wait(digest, deadline_ms / 1000)
        except Refusal as refusal:
            context.abort(_STATUS.get(refusal.reason, grpc.StatusCode.INTERNAL), refusal.detail)
        finally:
            self._waiting.release()
        return control_pb2.PrefetchResponse(resident=_resident(artifact, 0), load_s=load_s)

    def _wait(self, digest: Digest, timeout_s: float) -> tuple[Artifact, float]:
        self._pool.acquire(digest, time.monotonic() + timeout_s)
        try:
            return self._pool.wait(digest, timeout_s)
        finally:
            self._pool.release(digest)

    def Evict(  # noqa: N802
        self,
        request: control_pb2.EvictRequest,
        context: grpc.ServicerContext,
    ) -> control_pb2.EvictResponse:
        """Drop an artifact from the dram tier."""
        try:
            digest = parse_digest(request.digest)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"digest: {error}")
        reason = self._pool.evict(digest)
        return control_pb2.EvictResponse(evicted=reason is None, reason=reason or "")


class ControlServer:
    """The listening gRPC server; `address` is where it really listens."""

    def __init__(self, service: ControlService, address: str) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="control"),
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        control_pb2_grpc.add_CartridgeControlServicer_to_server(service, self._server)
        self.set_serving(is_serving=False)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigurationError(f"control_address {address}: {error}") from error
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def set_serving(self, *, is_serving: bool) -> None:
        """What health checks are told."""
        status = health_pb2.HealthCheckResponse
        self._health.set("", status.SERVING if is_serving else status.NOT_SERVING)

    def stop(self) -> None:
        """End the server; running calls get a second."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace=1.0).wait()


def _resident(artifact: Artifact, num_users: int) -> control_pb2.Resident:
    return control_pb2.Resident(
        digest=artifact.digest,
        tier=control_pb2.TIER_DRAM,
        size_bytes=artifact.size_bytes,
        pinned=False,
        num_users=num_users,
    )
