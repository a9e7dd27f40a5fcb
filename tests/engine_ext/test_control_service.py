"""The control service over real gRPC on loopback: what it says, does, and how it refuses."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_engine_ext.control_service import (
    MAX_DEADLINE_MS,
    MAX_WAITING,
    ControlServer,
    ControlService,
)
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Manifest, ValueScale
from cartridge_proto.residency import Epoch, ReplicaId
from cartridge_proto.v1 import control_pb2, control_pb2_grpc
from tests.engine_ext.stored_artifacts import WAIT_S, ObservedStore, blob_path, flip_bit, put_sample
from tests.engine_ext.waiting import until
from tests.proto.sample_artifact import engine_of, sample_artifact

MANIFEST, BLOB = sample_artifact()
ENGINE = engine_of(MANIFEST)
DEADLINE_MS = int(WAIT_S * 1000)
CAPACITY = 3 * len(BLOB)
NOT_READY = "the boot self-test has not run yet"


@dataclass
class Control:
    """A running server, its stub, and what it answers for."""

    store: ObservedStore
    pool: ArtifactPool
    server: ControlServer
    stub: control_pb2_grpc.CartridgeControlStub
    health: health_pb2_grpc.HealthStub
    not_ready: list[str]

    def put(self, **sample: object) -> tuple[Digest, Manifest]:
        """Store a sample artifact."""
        return put_sample(self.store, **sample)

    def prefetch(self, digest: str, deadline_ms: int = DEADLINE_MS) -> control_pb2.PrefetchResponse:
        """Bring an artifact to memory."""
        request = control_pb2.PrefetchRequest(digest=digest, deadline_ms=deadline_ms)
        return self.stub.Prefetch(request, timeout=WAIT_S)

    def refusal(self, digest: str, deadline_ms: int = DEADLINE_MS) -> tuple[grpc.StatusCode, str]:
        """Status and text of a prefetch that must fail."""
        with pytest.raises(grpc.RpcError) as caught:
            self.prefetch(digest, deadline_ms)
        assert isinstance(caught.value, grpc.Call)
        return caught.value.code(), caught.value.details()

    def evict(self, digest: str) -> control_pb2.EvictResponse:
        """Drop an artifact."""
        return self.stub.Evict(control_pb2.EvictRequest(digest=digest), timeout=WAIT_S)

    def describe(self) -> control_pb2.DescribeResponse:
        """What the engine says of itself."""
        return self.stub.Describe(control_pb2.DescribeRequest(), timeout=WAIT_S)

    def health_status(self) -> int:
        """What a health check is told."""
        response = self.health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        status: int = response.status
        return status


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    """A control server on a free loopback port, its engine not ready yet."""
    store = ObservedStore(tmp_path)
    pool = ArtifactPool(store=store, engine=ENGINE, capacity_bytes=CAPACITY, num_loaders=2)
    not_ready = [NOT_READY]
    service = ControlService(
        pool=pool,
        engine=ENGINE,
        engine_version="0.32.0",
        replica=ReplicaId("replica-0"),
        epoch=Epoch("0" * 32),
        not_ready_reason=lambda: not_ready[0] if not_ready else None,
    )
    server = ControlServer(service, "127.0.0.1:0")
    with grpc.insecure_channel(server.address) as channel:
        yield Control(
            store,
            pool,
            server,
            control_pb2_grpc.CartridgeControlStub(channel),
            health_pb2_grpc.HealthStub(channel),
            not_ready,
        )
    store.gate.set()
    server.stop()
    pool.close()


# --- describe and health -------------------------------------------------------------------------
def test_an_engine_describes_itself(control: Control) -> None:
    """Replica, epoch, identity and bounds; not ready with its reason until the self-test passed."""
    answer = control.describe()
    assert (answer.replica, answer.epoch, answer.engine_version) == (
        "replica-0",
        "0" * 32,
        "0.32.0",
    )
    assert (answer.ready, answer.reason) == (False, NOT_READY)
    assert msgspec.json.decode(answer.engine_json, type=EngineIdentity) == ENGINE
    assert (answer.dram_capacity_bytes, answer.dram_used_bytes) == (CAPACITY, 0)
    assert list(answer.residents) == []
    control.not_ready.clear()
    answer = control.describe()
    assert (answer.ready, answer.reason) == (True, "")


def test_health_follows_the_self_test(control: Control) -> None:
    """The standard health service says NOT_SERVING until it is told otherwise."""
    status = health_pb2.HealthCheckResponse
    assert control.health_status() == status.NOT_SERVING
    control.server.set_serving(is_serving=True)
    assert control.health_status() == status.SERVING


def test_residents_and_their_users_are_listed(control: Control) -> None:
    """Each ready artifact with size, tier and how many requests use it, oldest use first."""
    (one, _), (two, _) = control.put(seed=1), control.put(seed=2)
    control.prefetch(one)
    control.prefetch(two)
    control.pool.acquire(two, 0.0)
    answer = control.describe()
    rows = [(row.digest, row.tier, row.size_bytes, row.num_users) for row in answer.residents]
    tier = control_pb2.TIER_DRAM
    assert rows == [(one, tier, len(BLOB), 0), (two, tier, len(BLOB), 1)]
    assert answer.dram_used_bytes == 2 * len(BLOB)


# --- prefetch and evict --------------------------------------------------------------------------
def test_a_prefetched_artifact_is_ready_and_unused(control: Control) -> None:
    """The answer comes when the bytes are verified in memory; a second one reads nothing."""
    digest, _ = control.put()
    answer = control.prefetch(digest)
    assert (answer.resident.digest, answer.resident.size_bytes) == (digest, len(BLOB))
    assert answer.load_s > 0
    assert control.prefetch(digest, deadline_ms=0).resident == answer.resident
    assert control.store.reads.total() == 1
    assert [num_users for _, num_users in control.pool.residents()] == [0]


def test_an_artifact_in_use_stays(control: Control) -> None:
    """Evict says why not, and drops the artifact once nobody uses it."""
    digest, _ = control.put()
    answer = control.evict(digest)
    assert (answer.evicted, answer.reason) == (False, "not resident")
    control.prefetch(digest)
    control.pool.acquire(digest, 0.0)
    answer = control.evict(digest)
    assert (answer.evicted, answer.reason) == (False, "in use by 1 requests")
    control.pool.release(digest)
    answer = control.evict(digest)
    assert (answer.evicted, answer.reason) == (True, "")
    assert control.describe().dram_used_bytes == 0


# --- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize("digest", ["", "sha256:", "handbook@3", "sha256:" + "A" * 64])
def test_what_is_no_digest_is_an_invalid_argument(digest: str, control: Control) -> None:
    """Prefetch and Evict take digests only."""
    code, details = control.refusal(digest)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("digest: ")
    with pytest.raises(grpc.RpcError) as caught:
        control.evict(digest)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unknown_artifact_is_not_found(control: Control) -> None:
    """NOT_FOUND, and nothing of it stays in the pool."""
    digest = sha256_digest(b"absent")
    code, details = control.refusal(digest)
    assert code is grpc.StatusCode.NOT_FOUND
    assert digest.removeprefix("sha256:") in details
    assert not control.pool._entries


def test_a_damaged_artifact_is_data_loss(control: Control) -> None:
    """DATA_LOSS for bytes that do not hash to their name."""
    digest, manifest = control.put()
    flip_bit(blob_path(control.store, manifest))
    assert control.refusal(digest)[0] is grpc.StatusCode.DATA_LOSS


def test_an_artifact_of_another_model_is_a_failed_precondition(control: Control) -> None:
    """FAILED_PRECONDITION, naming the field."""
    manifest, blob = sample_artifact()
    other = msgspec.structs.replace(manifest.model, architecture="OtherForCausalLM")
    control.store.put_blob(blob)
    digest = control.store.put_manifest(msgspec.structs.replace(manifest, model=other))
    code, details = control.refusal(digest)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "model.architecture" in details


def test_an_unsupported_representation_is_unimplemented(control: Control) -> None:
    """UNIMPLEMENTED for what this version does not serve."""
    digest, _ = control.put(v_scale=ValueScale(granularity="head", dtype="F32"))
    assert control.refusal(digest)[0] is grpc.StatusCode.UNIMPLEMENTED


def test_an_artifact_that_does_not_fit_exhausts_resources(control: Control) -> None:
    """RESOURCE_EXHAUSTED, with the numbers."""
    digest, manifest = control.put(num_tokens=100)
    code, details = control.refusal(digest)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{manifest.payload_bytes} bytes" in details


def test_a_slow_load_exceeds_its_deadline(control: Control) -> None:
    """DEADLINE_EXCEEDED from the service itself; the load goes on and is there the next time."""
    digest, _ = control.put()
    control.store.gate.clear()
    code, details = control.refusal(digest, deadline_ms=1)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "was not loaded in" in details
    control.store.gate.set()
    control.prefetch(digest)
    assert control.store.reads.total() == 1


def test_a_deadline_has_a_limit(control: Control) -> None:
    """INVALID_ARGUMENT naming the field and the limit."""
    code, details = control.refusal(sha256_digest(b"any"), deadline_ms=MAX_DEADLINE_MS + 1)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"deadline_ms: {MAX_DEADLINE_MS + 1}; the limit is {MAX_DEADLINE_MS}" in details


def test_waiting_prefetches_leave_room_for_health(control: Control) -> None:
    """So many may wait; one more is RESOURCE_EXHAUSTED, and health and Describe still answer."""
    digest, _ = control.put()
    control.store.gate.clear()
    request = control_pb2.PrefetchRequest(digest=digest, deadline_ms=DEADLINE_MS)
    waiting = [control.stub.Prefetch.future(request) for _ in range(MAX_WAITING)]

    def are_all_waiting() -> bool:
        entry = control.pool._entries.get(digest)
        return entry is not None and entry.num_users == MAX_WAITING

    until(are_all_waiting)
    code, details = control.refusal(digest, deadline_ms=1)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_WAITING) in details
    assert control.describe().replica == "replica-0"
    assert control.health_status() == health_pb2.HealthCheckResponse.NOT_SERVING
    control.store.gate.set()
    assert {call.result(WAIT_S).resident.digest for call in waiting} == {digest}


def test_an_unforeseen_error_is_internal(control: Control) -> None:
    """A reason without a status of its own is INTERNAL, with the text."""
    digest, _ = control.put()
    control.store.error = RuntimeError("the disk is on fire")
    code, details = control.refusal(digest)
    assert code is grpc.StatusCode.INTERNAL
    assert "the disk is on fire" in details


def test_an_engine_that_stops_is_unavailable(control: Control) -> None:
    """A prefetch into a pool that was closed is refused like a server that is going away."""
    digest, _ = control.put()
    control.pool.close()
    assert control.refusal(digest) == (grpc.StatusCode.UNAVAILABLE, "the dram tier was closed")


# --- start and stop ------------------------------------------------------------------------------
def test_a_taken_address_is_a_configuration_error(control: Control) -> None:
    """A second server on the same port says which address it could not have."""
    service = ControlService(
        pool=control.pool,
        engine=ENGINE,
        engine_version="",
        replica=ReplicaId("replica-1"),
        epoch=Epoch("1" * 32),
        not_ready_reason=lambda: None,
    )
    with pytest.raises(ConfigurationError, match=control.server.address):
        ControlServer(service, control.server.address)


def test_stopping_ends_the_listener(control: Control) -> None:
    """After `stop` the port no longer answers."""
    assert control.describe().replica == "replica-0"
    control.server.stop()
    with pytest.raises(grpc.RpcError) as caught:
        control.describe()
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
