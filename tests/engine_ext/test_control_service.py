"""The control service over real gRPC on loopback: what it says, does, and how it refuses."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_engine_ext.control_service import (
    MAX_DEADLINE_MS,
    MAX_DIGESTS,
    MAX_EXPECTED_IN_MS,
    MAX_WAITING,
    MAX_WATCHERS,
    ControlServer,
    ControlService,
)
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.residency_ledger import MAX_UNREAD, ResidencyLedger, ResidencyRow
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.residency import Epoch, ReplicaId, Tier
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
    ledger: ResidencyLedger
    requests: "Requests"
    service: ControlService

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


class Requests:
    """Requests with Cartridges that can be stopped; `num_running` is set by the test."""

    def __init__(self) -> None:
        self.num_running = 0
        self.is_draining = False

    def drain(self) -> None:
        """Take no more."""
        self.is_draining = True

    def is_drained(self) -> bool:
        """None is taken and none is left."""
        return self.is_draining and self.num_running == 0

    def resume(self) -> None:
        """Take them again."""
        self.is_draining = False


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    """A control server on a free loopback port, its engine not ready yet."""
    store = ObservedStore(tmp_path)
    ledger, requests = ResidencyLedger(), Requests()
    pool = ArtifactPool(
        store=store,
        engine=ENGINE,
        capacity_bytes=CAPACITY,
        num_loaders=2,
        on_ready=lambda digest, size_bytes: ledger.enter(digest, Tier.DRAM, size_bytes),
        on_evict=lambda digest: ledger.leave(digest, Tier.DRAM),
        on_pin=lambda digest, is_pinned: ledger.set_pinned(digest, Tier.DRAM, is_pinned=is_pinned),
    )
    not_ready = [NOT_READY]
    service = ControlService(
        pool=pool,
        engine=ENGINE,
        engine_version="0.32.0",
        replica=ReplicaId("replica-0"),
        epoch=Epoch("0" * 32),
        not_ready_reason=lambda: not_ready[0] if not_ready else None,
        ledger=ledger,
        drainable=requests,
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
            ledger,
            requests,
            service,
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
    _, manifest = control.put()
    rope = msgspec.structs.replace(manifest.rope, first_position=1)
    digest = control.store.put_manifest(msgspec.structs.replace(manifest, rope=rope))
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


# --- lookup --------------------------------------------------------------------------------------
ABSENT = sha256_digest(b"absent")
OTHER_TIERS = control_pb2.TIER_DRAM, control_pb2.TIER_NVME


def status_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """Status and text of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    assert isinstance(caught.value, grpc.Call)
    return caught.value.code(), caught.value.details()


def test_digests_are_looked_up_in_their_order(control: Control) -> None:
    """Tiers, size, users and pins of each; what is nowhere has no tier; a load says so."""
    (one, _), (two, _) = control.put(seed=1), control.put(seed=2)
    control.prefetch(one)
    control.pool.pin(one, "operator", WAIT_S)
    control.pool.acquire(one, 0.0)
    control.ledger.enter(one, Tier.NVME, len(BLOB))
    control.ledger.enter(ABSENT, Tier.HBM, 77)
    control.store.gate.clear()
    control.pool.acquire(two, 0.0)
    assert control.store.reading.acquire(timeout=WAIT_S)
    assert control.store.reading.acquire(timeout=WAIT_S)
    unknown = sha256_digest(b"unknown")
    request = control_pb2.LookupRequest(digests=[unknown, two, one, ABSENT])
    rows = list(control.stub.Lookup(request, timeout=WAIT_S).residents)
    resident = control_pb2.Resident
    assert rows == [
        resident(digest=unknown),
        resident(digest=two, loading=True, num_users=1, size_bytes=len(BLOB)),
        resident(
            digest=one,
            tier=control_pb2.TIER_DRAM,
            size_bytes=len(BLOB),
            pinned=True,
            num_users=1,
            tiers=OTHER_TIERS,
            pinned_by=["operator"],
        ),
        resident(
            digest=ABSENT,
            tier=control_pb2.TIER_HBM,
            size_bytes=77,
            tiers=[control_pb2.TIER_HBM],
        ),
    ]


def test_a_lookup_is_bounded_and_names_the_digest_that_is_none(control: Control) -> None:
    """INVALID_ARGUMENT for too many digests, and for one that is not a digest."""
    many = control_pb2.LookupRequest(digests=[ABSENT] * (MAX_DIGESTS + 1))
    code, details = status_of(lambda: control.stub.Lookup(many))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"digests: {MAX_DIGESTS + 1}; the limit is {MAX_DIGESTS}" in details
    bad = control_pb2.LookupRequest(digests=[ABSENT, "handbook@3"])
    code, details = status_of(lambda: control.stub.Lookup(bad))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("digests[1]: ")


# --- prefetch and move ---------------------------------------------------------------------------
def test_a_prefetch_need_not_be_waited_for(control: Control) -> None:
    """With `no_wait` the answer comes while the artifact loads."""
    digest, _ = control.put()
    control.store.gate.clear()
    request = control_pb2.PrefetchRequest(digest=digest, no_wait=True, deadline_ms=DEADLINE_MS)
    answer = control.stub.Prefetch(request, timeout=WAIT_S)
    assert answer.resident.loading
    control.store.gate.set()
    until(lambda: bool(control.describe().residents))


def test_a_priority_has_a_limit(control: Control) -> None:
    """INVALID_ARGUMENT naming the field and the limit, for Prefetch and Move."""
    prefetch = control_pb2.PrefetchRequest(digest=ABSENT, priority=101)
    move = control_pb2.MoveRequest(digest=ABSENT, to=control_pb2.TIER_DRAM, priority=101)
    refused = (grpc.StatusCode.INVALID_ARGUMENT, "priority: 101; the limit is 100")
    assert status_of(lambda: control.stub.Prefetch(prefetch)) == refused
    assert status_of(lambda: control.stub.Move(move)) == refused


def test_a_hint_reaches_the_tier_and_has_a_limit(control: Control) -> None:
    """`expected_in_ms` is passed on; more than a day is INVALID_ARGUMENT."""
    digest, _ = control.put()
    expected: list[Digest] = []
    control.pool.expect = lambda digest, at_s: expected.append(digest)  # type: ignore[method-assign]
    request = control_pb2.PrefetchRequest(digest=digest, expected_in_ms=0)
    control.stub.Prefetch(request, timeout=WAIT_S)
    assert expected == [digest]
    request.expected_in_ms = MAX_EXPECTED_IN_MS + 1
    code, details = status_of(lambda: control.stub.Prefetch(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("expected_in_ms: ")


def test_moving_is_fetching_or_dropping(control: Control) -> None:
    """To dram it is loaded, to nvme or remote it leaves dram; what is not there need not leave."""
    digest, _ = control.put()

    def move(to: "control_pb2.Tier.ValueType") -> control_pb2.Resident:
        request = control_pb2.MoveRequest(digest=digest, to=to, deadline_ms=DEADLINE_MS)
        return control.stub.Move(request, timeout=WAIT_S).resident

    assert move(control_pb2.TIER_DRAM).tier == control_pb2.TIER_DRAM
    assert move(control_pb2.TIER_REMOTE).tier == control_pb2.TIER_UNSPECIFIED
    assert move(control_pb2.TIER_NVME).tier == control_pb2.TIER_UNSPECIFIED
    control.prefetch(digest)
    control.pool.acquire(digest, 0.0)
    refused = (grpc.StatusCode.FAILED_PRECONDITION, "digest: in use by 1 requests")
    assert status_of(lambda: move(control_pb2.TIER_NVME)) == refused


@pytest.mark.parametrize(
    ("to", "code"),
    [
        (control_pb2.TIER_HBM, grpc.StatusCode.UNIMPLEMENTED),
        (control_pb2.TIER_UNSPECIFIED, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_other_moves_are_refused(
    to: "control_pb2.Tier.ValueType", code: grpc.StatusCode, control: Control
) -> None:
    """HBM is the engine's choice, and no tier is none; the field is named."""
    request = control_pb2.MoveRequest(digest=ABSENT, to=to)
    found, details = status_of(lambda: control.stub.Move(request))
    assert found is code
    assert details.startswith("to: ")


# --- pins ----------------------------------------------------------------------------------------
def pin_request(
    digest: str, owner: str = "operator", tier: "control_pb2.Tier.ValueType" = control_pb2.TIER_DRAM
) -> control_pb2.PinRequest:
    """A pin with a deadline that no passing test reaches."""
    return control_pb2.PinRequest(digest=digest, owner=owner, tier=tier, deadline_ms=DEADLINE_MS)


def test_a_pinned_artifact_stays_until_its_owner_unpins_it(control: Control) -> None:
    """Pin loads and keeps; Unpin by another owner says that there is no such pin."""
    digest, _ = control.put(num_tokens=1)
    resident = control.stub.Pin(pin_request(digest), timeout=WAIT_S).resident
    assert (resident.pinned, list(resident.pinned_by)) == (True, ["operator"])
    assert control.evict(digest).reason == "pinned by operator"

    def unpin(owner: str) -> control_pb2.UnpinResponse:
        request = control_pb2.UnpinRequest(digest=digest, owner=owner, tier=control_pb2.TIER_DRAM)
        return control.stub.Unpin(request, timeout=WAIT_S)

    assert unpin("another") == control_pb2.UnpinResponse(reason="not pinned by another")
    assert unpin("operator") == control_pb2.UnpinResponse(unpinned=True)
    assert control.evict(digest).evicted


def test_the_budget_of_pins_is_named(control: Control) -> None:
    """RESOURCE_EXHAUSTED with the limit, which Describe tells."""
    (one, _), (two, _) = control.put(seed=1), control.put(seed=2)
    control.stub.Pin(pin_request(one), timeout=WAIT_S)
    code, details = status_of(lambda: control.stub.Pin(pin_request(two)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details.startswith("pinned_bytes: ")
    assert str(control.describe().dram_pinned_limit_bytes) in details


@pytest.mark.parametrize("owner", ["", "a b", "a" * 129, "a\n"])
def test_an_owner_is_a_short_name(owner: str, control: Control) -> None:
    """INVALID_ARGUMENT naming the field, for Pin and Unpin."""
    unpin = control_pb2.UnpinRequest(digest=ABSENT, owner=owner, tier=control_pb2.TIER_DRAM)
    for call in (
        lambda: control.stub.Pin(pin_request(ABSENT, owner)),
        lambda: control.stub.Unpin(unpin),
    ):
        code, details = status_of(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("owner: ")


def test_pins_are_in_dram_or_hbm(control: Control) -> None:
    """INVALID_ARGUMENT for other tiers; hbm is UNIMPLEMENTED where nothing is pinned there."""
    for tier, code in (
        (control_pb2.TIER_NVME, grpc.StatusCode.INVALID_ARGUMENT),
        (control_pb2.TIER_HBM, grpc.StatusCode.UNIMPLEMENTED),
    ):
        unpin = control_pb2.UnpinRequest(digest=ABSENT, owner="operator", tier=tier)
        pin = pin_request(ABSENT, tier=tier)
        for call in (lambda pin=pin: control.stub.Pin(pin), lambda u=unpin: control.stub.Unpin(u)):
            found, details = status_of(call)
            assert found is code
            assert details.startswith("tier: ")


class Blocks:
    """Pins in HBM that are granted, refused, or never answered."""

    def __init__(self) -> None:
        self.answer: str | None = None
        self.is_silent = False
        self.asked: list[tuple[str, Digest, str]] = []

    def _done(self, what: str, composition: Digest, owner: str) -> "Future[str | None]":
        self.asked.append((what, composition, owner))
        future: Future[str | None] = Future()
        if not self.is_silent:
            future.set_result(self.answer)
        return future

    def pin(self, composition: Digest, owner: str) -> "Future[str | None]":
        """Keep."""
        return self._done("pin", composition, owner)

    def unpin(self, composition: Digest, owner: str) -> "Future[str | None]":
        """Let go."""
        return self._done("unpin", composition, owner)

    def pinned_by(self, composition: Digest) -> tuple[str, ...]:
        """One owner of everything."""
        return ("me",)


def test_compositions_are_pinned_in_hbm(control: Control) -> None:
    """For an owner: granted, refused with the reason, or past the deadline."""
    blocks = Blocks()
    control.service._hbm_pins = blocks
    hbm = control_pb2.TIER_HBM
    pin = control_pb2.PinRequest(digest=ABSENT, owner="me", tier=hbm, deadline_ms=1)
    unpin = control_pb2.UnpinRequest(digest=ABSENT, owner="me", tier=hbm)
    resident = control.stub.Pin(pin, timeout=WAIT_S).resident
    assert (resident.digest, list(resident.pinned_by)) == (ABSENT, ["me"])
    assert control.stub.Unpin(unpin, timeout=WAIT_S).unpinned
    assert blocks.asked == [("pin", ABSENT, "me"), ("unpin", ABSENT, "me")]
    for nobody in (
        lambda: control.stub.Pin(control_pb2.PinRequest(digest=ABSENT, tier=hbm)),
        lambda: control.stub.Unpin(control_pb2.UnpinRequest(digest=ABSENT, tier=hbm)),
    ):
        code, details = status_of(nobody)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("owner: ")
    blocks.answer = "not whole"
    refused = (grpc.StatusCode.FAILED_PRECONDITION, "digest: not whole")
    assert status_of(lambda: control.stub.Pin(pin)) == refused
    answer = control.stub.Unpin(unpin, timeout=WAIT_S)
    assert (answer.unpinned, answer.reason) == (False, "not whole")
    blocks.is_silent = True
    code, details = status_of(lambda: control.stub.Pin(pin))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert details.startswith("deadline_ms: ")


# --- draining ------------------------------------------------------------------------------------
def test_draining_waits_for_the_last_request(control: Control) -> None:
    """Drain answers when none is left, or says at its deadline that some are; Resume ends it."""
    control.requests.num_running = 1
    now = control_pb2.DrainRequest(deadline_ms=0)
    assert not control.stub.Drain(now, timeout=WAIT_S).drained
    assert not control.stub.Drain(control_pb2.DrainRequest(deadline_ms=1), timeout=WAIT_S).drained
    answer = control.describe()
    assert (answer.draining, answer.drained) == (True, False)
    call = control.stub.Drain.future(control_pb2.DrainRequest(deadline_ms=DEADLINE_MS))
    control.requests.num_running = 0
    assert call.result(WAIT_S).drained
    assert control.describe().drained
    control.stub.Resume(control_pb2.ResumeRequest(), timeout=WAIT_S)
    assert not control.describe().draining


def test_draining_has_a_longest_deadline(control: Control) -> None:
    """INVALID_ARGUMENT naming field and limit, and nothing is drained."""
    request = control_pb2.DrainRequest(deadline_ms=MAX_DEADLINE_MS + 1)
    code, details = status_of(lambda: control.stub.Drain(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("deadline_ms: ")
    assert not control.requests.is_draining


def test_what_is_not_there_is_unimplemented(control: Control) -> None:
    """A service without requests and without a ledger says so."""
    control.service._drainable = None
    control.service._ledger = None
    for call in (
        lambda: control.stub.Drain(control_pb2.DrainRequest()),
        lambda: control.stub.Resume(control_pb2.ResumeRequest()),
        lambda: next(control.stub.Watch(control_pb2.WatchRequest())),
    ):
        assert status_of(call)[0] is grpc.StatusCode.UNIMPLEMENTED


# --- watching ------------------------------------------------------------------------------------
def test_a_watcher_sees_what_is_there_and_then_each_change(control: Control) -> None:
    """Rows, the mark that all were told, loads, pins, and evictions in order."""
    one, _ = control.put(num_tokens=1)
    control.prefetch(one)
    events = control.stub.Watch(control_pb2.WatchRequest(), timeout=WAIT_S)
    first = next(events)
    assert (first.epoch, first.resident.digest, first.synced) == ("0" * 32, one, False)
    assert next(events).synced
    control.stub.Pin(pin_request(one), timeout=WAIT_S)
    assert next(events).resident.pinned
    control.pool.unpin(one, "operator")
    assert not next(events).resident.pinned
    control.evict(one)
    gone = next(events).resident
    assert (gone.digest, gone.tier, list(gone.tiers)) == (one, control_pb2.TIER_UNSPECIFIED, [])
    events.cancel()
    until(lambda: not control.ledger._watchers)


def test_watchers_are_bounded_and_give_their_place_back(control: Control) -> None:
    """One more is RESOURCE_EXHAUSTED; after one has left, another may watch."""
    watching = [control.stub.Watch(control_pb2.WatchRequest()) for _ in range(MAX_WATCHERS)]
    for events in watching:
        assert next(events).synced
    refused = status_of(lambda: next(control.stub.Watch(control_pb2.WatchRequest())))
    assert refused[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_WATCHERS) in refused[1]
    assert control.describe().replica == "replica-0"
    watching[0].cancel()

    def is_let_in() -> bool:
        try:
            return next(control.stub.Watch(control_pb2.WatchRequest())).synced
        except grpc.RpcError:
            return False

    until(is_let_in)
    for events in watching:
        events.cancel()


def test_a_watcher_that_is_too_slow_is_aborted(control: Control) -> None:
    """ABORTED once more changes are unread than are kept."""
    events = control.stub.Watch(control_pb2.WatchRequest(), timeout=WAIT_S)
    assert next(events).synced
    is_over = threading.Event()

    def read() -> None:
        assert status_of(lambda: list(events))[0] is grpc.StatusCode.ABORTED
        is_over.set()

    # As the ledger ends a watch: too many changes before the service took one.
    (watcher,) = control.ledger._watchers
    with watcher.mutex:
        watcher.queue.extend(
            ResidencyRow(ABSENT, None, 0, is_pinned=False) for _ in range(MAX_UNREAD)
        )
    control.ledger.enter(ABSENT, Tier.DRAM, 1)
    threading.Thread(target=read, daemon=True).start()
    assert is_over.wait(WAIT_S)


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
