"""The scheduler half: prefix put in front or refused, loads planned, receipts true, uses released.

The request is a plain stand-in; pool, store and artifacts are real.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext.adapter_identity import AdapterIdentities
from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_engine_ext.first_load_probe import PASSED, ProbeVerdict
from cartridge_engine_ext.hbm_census import HbmCensus
from cartridge_engine_ext.identity import ADAPTER_FILES
from cartridge_engine_ext.load_plan import Capture, Load, LoadReport, LoadResult
from cartridge_engine_ext.packed_layout import CacheGeometry
from cartridge_engine_ext.residency_ledger import ResidencyLedger
from cartridge_engine_ext.scheduler_side import (
    EndedPrefix,
    SchedulerSide,
    SelfTestGate,
    _VirtualRequest,
)
from cartridge_engine_ext.virtual_prefix import num_blocks
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.composition import OnMiss, cache_salt
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Adapter, Manifest, PositionLayout, ValueScale
from cartridge_proto.names import (
    FIELD_CARTRIDGES,
    FIELD_KV_HINTS,
    FIELD_RECEIPT,
    FIELD_SELF_TEST,
)
from cartridge_proto.residency import (
    Epoch,
    FailureReason,
    Receipt,
    ReceiptStatus,
    ReplicaId,
    Tier,
)
from tests.engine_ext.fake_blocks import FakeBlockPool
from tests.engine_ext.fake_request import (
    BLOCK_SIZE,
    LIVE,
    FakeLora,
    FakeRequest,
    FakeSampling,
    message_of,
    request_with,
)
from tests.engine_ext.stored_artifacts import (
    WAIT_S,
    ObservedStore,
    blob_path,
    flip_bit,
    put_artifact,
    put_sample,
)
from tests.engine_ext.waiting import until
from tests.proto.sample_artifact import engine_of, sample_artifact

PLACEHOLDER = 49_152
MAX_MODEL_LEN = 100
ENGINE = msgspec.structs.replace(
    engine_of(sample_artifact()[0]), max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE
)
TOKEN = "0123456789abcdef"


@dataclass
class Engine:
    """The half under test, with what stands around it."""

    store: ObservedStore
    pool: ArtifactPool
    gate: SelfTestGate
    side: SchedulerSide
    ended: list[EndedPrefix]
    ledger: ResidencyLedger
    blocks: FakeBlockPool
    verdicts: dict[Digest, ProbeVerdict | None]
    hints: list[object]
    adapters: "FakeAdapterFiles"
    probed_by: list[str | None]
    captured: list[Any] = field(default_factory=list)

    @property
    def receipts(self) -> list[Receipt]:
        """Of all requests that are over."""
        return [ended.receipt for ended in self.ended]

    def put(self, **sample: Any) -> tuple[Digest, Manifest]:
        """Store a sample artifact."""
        return put_sample(self.store, **sample)

    def use(self, artifact: tuple[Digest, Manifest]) -> None:
        """Bring an artifact to the dram tier and leave it there unused."""
        self.pool.acquire(artifact[0], time.monotonic() + WAIT_S)
        self.pool.wait(artifact[0], WAIT_S)
        self.pool.release(artifact[0])

    def matched(self, request: FakeRequest, num_computed_tokens: int = 0) -> int:
        """Ask until the bytes are there or refused."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            count, is_async = self.side.num_matched_tokens(request, num_computed_tokens)
            if count is not None:
                assert is_async == (count > 0)
                return count
        raise AssertionError("still loading")

    def schedule(self, request: FakeRequest, num_computed_tokens: int = 0) -> tuple[int, ...]:
        """One turn of vLLM's scheduler for a request; returns its blocks."""
        count = self.matched(request, num_computed_tokens)
        blocks = tuple(range(3, 3 + num_blocks(len(request.all_token_ids), BLOCK_SIZE)))
        self.side.after_allocation(request, blocks, count)
        return blocks

    def run(self, request: FakeRequest, num_computed_tokens: int = 0) -> None:
        """Admit and schedule, and let a worker write every load without error."""
        self.side.on_new_request(request)
        self.schedule(request, num_computed_tokens)
        self.write(LoadResult(1000, 0.5, None))

    def write(self, result: LoadResult) -> None:
        """Let a worker end every planned load with this result."""
        results = {load.request_id: result for load in self.side.take_plan().loads}
        self.side.take_output(LoadReport(results), list(results))

    def end(self, request: FakeRequest) -> Receipt:
        """Finish a request; its receipt must be published and part of the answer."""
        answer = self.side.finish(request)
        receipt = self.receipts[-1]
        assert answer == {FIELD_RECEIPT: msgspec.to_builtins(receipt)}
        return receipt

    def refused(self, request: FakeRequest) -> Receipt:
        """Admit a request that must be doomed at once, and let it fail as vLLM would."""
        self.side.on_new_request(request)
        assert request.all_token_ids == request.prompt_token_ids == [0, 0]
        assert request.num_prompt_tokens == 2
        assert self.matched(request) == 1
        self.side.after_allocation(request, [5], 1)
        plan = self.side.take_plan()
        assert (plan.loads, plan.failures) == ([], [request.request_id])
        request.finished_reason = "error"
        receipt = self.end(request)
        assert (receipt.status, receipt.items) == (ReceiptStatus.FAILED, [])
        assert self.pool.residents() == []
        assert self.store.reads.total() == 0
        return receipt

    def failed_to_load(self, request: FakeRequest) -> Receipt:
        """Admit a request whose load must be refused after it was asked for."""
        self.side.on_new_request(request)
        self.schedule(request)
        plan = self.side.take_plan()
        assert (plan.loads, plan.failures) == ([], [request.request_id])
        request.finished_reason = "error"
        receipt = self.end(request)
        assert receipt.status is ReceiptStatus.FAILED
        assert all(num_users == 0 for _, num_users in self.pool.residents())
        return receipt


class FakeAdapterFiles:
    """Reads an adapter's folder when it may: the digest is that of the weights' bytes."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_read = 0

    def digest(self, folder: Path) -> Digest:
        """Stands for `identity.adapter_digest`."""
        assert self.gate.wait(WAIT_S)
        self.num_read += 1
        return sha256_digest((folder / ADAPTER_FILES[1]).read_bytes())


@contextmanager
def running_engine(
    store_dir: Path,
    identity: EngineIdentity = ENGINE,
    packed_cache: CacheGeometry | None = None,
    *,
    is_in_place: bool = False,
) -> Iterator[Engine]:
    """An engine whose self-test has passed."""
    store = ObservedStore(store_dir)
    pool = ArtifactPool(store=store, engine=identity, capacity_bytes=1 << 20, num_loaders=2)
    gate = SelfTestGate(token=TOKEN, is_open=True, immovable=None)
    ended: list[EndedPrefix] = []
    hints: list[object] = []
    captured: list[Any] = []
    ledger = ResidencyLedger()
    blocks = FakeBlockPool()
    verdicts: dict[Digest, ProbeVerdict | None] = {}
    files = FakeAdapterFiles()
    adapters = AdapterIdentities(files.digest)
    probed_by: list[str | None] = []

    def verdict_of(digest: Digest, manifest: Manifest, adapter: str | None) -> ProbeVerdict | None:
        probed_by.append(adapter)
        return verdicts.get(digest, PASSED)

    census = HbmCensus(
        ledger, group_ids=[0], block_bytes=100, pinned_fraction=0.5, longest_request_blocks=2
    )
    census.bind(blocks)
    side = SchedulerSide(
        pool=pool,
        engine=identity,
        replica=ReplicaId("replica-0"),
        epoch=Epoch("0" * 32),
        placeholder_token_id=PLACEHOLDER,
        gate=gate,
        census=census,
        adapters=adapters,
        verdict_of=verdict_of,
        packed_cache=packed_cache,
        is_in_place=is_in_place,
        hints=hints.append,
        on_ended=ended.append,
        on_captured=captured.append,
    )
    yield Engine(
        store, pool, gate, side, ended, ledger, blocks, verdicts, hints, files, probed_by, captured
    )
    store.gate.set()
    files.gate.set()
    adapters.stop()
    pool.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine of the sample's model."""
    with running_engine(tmp_path) as running:
        yield running


# --- the prefix ----------------------------------------------------------------------------------
def test_a_prefix_stands_before_the_prompt(engine: Engine) -> None:
    """Placeholders precede the live tokens everywhere, and the block hashes are computed anew."""
    artifact = engine.put(num_tokens=20)
    request = request_with(message_of([artifact]))
    live_ids, gateway_salt = request.prompt_token_ids, request.cache_salt
    engine.side.on_new_request(request)
    expected = [PLACEHOLDER] * 20 + LIVE
    assert request.prompt_token_ids == request.all_token_ids == expected
    assert request.num_prompt_tokens == 23
    assert live_ids == LIVE  # what the API server holds is not changed
    assert request.cache_salt != gateway_salt
    fresh = FakeRequest(None, prompt_token_ids=expected, cache_salt=request.cache_salt)
    assert request.block_hashes == fresh.block_hashes
    assert len(request.block_hashes) == 1


def test_two_requests_share_blocks_if_and_only_if_their_composition_is_equal(
    engine: Engine,
) -> None:
    """The same message gives the same hashes; order, layout or scope give others."""
    one, two = (engine.put(num_tokens=16, seed=seed) for seed in (1, 2))
    messages = [
        message_of([one, two]),
        message_of([two, one]),
        message_of([one, two], layout=PositionLayout.SHARED_LOCAL),
        message_of([one, two], scope="tenant-a"),
    ]
    hashes = []
    for message in (*messages, message_of([one, two], request_id="another", deadline_ms=5)):
        request = request_with(message)
        engine.side.on_new_request(request)
        hashes.append(tuple(request.block_hashes))
    assert len(set(hashes[:4])) == 4
    assert hashes[4] == hashes[0]


@pytest.mark.parametrize(
    "claim",
    [
        {"scope": "stranger"},
        {"items": [{"digest": sha256_digest(b"other"), "num_tokens": 16, "offset": 0}]},
    ],
    ids=["scope", "digest"],
)
def test_a_borrowed_composition_identity_finds_no_blocks(
    claim: dict[str, Any], engine: Engine
) -> None:
    """A prefix that is whole in HBM is not checked again, so a false message must miss it."""
    artifact = engine.put(num_tokens=BLOCK_SIZE, readers=["tenant-a"])
    message = message_of([artifact], scope="tenant-a")
    honest, forged = request_with(message), request_with({**message, **claim})
    engine.side.on_new_request(honest)
    engine.side.on_new_request(forged)
    assert len(honest.block_hashes) == len(forged.block_hashes) == 1
    assert honest.block_hashes != forged.block_hashes


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True}, "text"])
def test_other_requests_are_left_alone(params: Any, engine: Engine) -> None:
    """Without Cartridges nothing is changed, matched, planned or told."""
    request = FakeRequest(params, cache_salt="mine", prompt_token_ids=[1] * 20)
    before = (request.all_token_ids, list(request.block_hashes))
    engine.side.on_new_request(request)
    assert (request.all_token_ids, request.block_hashes) == before
    assert request.cache_salt == "mine"
    assert engine.side.num_matched_tokens(request, 0) == (0, False)
    engine.side.after_allocation(request, [1, 2], 0)
    plan = engine.side.take_plan()
    assert (plan.loads, plan.failures, plan.captures) == ([], [], [])
    assert engine.side.finish(request) is None
    assert engine.receipts == []


def test_a_hidden_artifact_is_as_if_it_were_not_there(engine: Engine) -> None:
    """It is not loaded, takes no positions and moves nobody; its identity is another still."""
    one, hidden, other = (engine.put(num_tokens=20, seed=seed) for seed in (1, 2, 3))
    request = request_with(message_of([one, hidden, other], visibility=[True, False, True]))
    without = request_with(message_of([one, other]))
    for each in (request, without):
        engine.side.on_new_request(each)
        engine.schedule(each)
    loads = engine.side.take_plan().loads
    assert [segment.num_positions for segment in loads[0].segments] == [0, 20]
    assert loads[0].segments == loads[1].segments
    assert request.num_prompt_tokens == without.num_prompt_tokens == 40 + len(LIVE)
    assert request.block_hashes != without.block_hashes
    assert engine.store.reads[Digest(hidden[1].payload[0].sha256)] == 0
    engine.side.take_output(None, [request.request_id])
    receipt = engine.end(request)
    assert [item.digest for item in receipt.items] == [one[0], other[0]]
    assert receipt.num_virtual_tokens == 40


def test_a_message_that_hides_everything_is_refused(engine: Engine) -> None:
    """Who wants no artifact sends no message."""
    receipt = engine.refused(request_with(message_of([engine.put()], visibility=[False])))
    assert receipt.reason is FailureReason.INVALID_MESSAGE
    assert "visibility" in receipt.detail


# --- refused at once -----------------------------------------------------------------------------
UNSUPPORTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "pooling": ({"sampling_params": None}, {}, "pooling requests"),
    "prompt_logprobs": ({"sampling_params": FakeSampling(0)}, {}, "prompt_logprobs"),
    "skip_reading": ({"skip_reading_prefix_cache": True}, {}, "skip_reading_prefix_cache"),
    "images": ({"mm_features": [object()]}, {}, "multimodal inputs"),
    "embeddings": ({"prompt_embeds": object()}, {}, "prompt embeddings"),
    "resumable": ({"resumable": True}, {}, "resumable"),
    "no_prompt": ({"prompt_token_ids": None}, {}, "prompts without a token"),
    "on_miss": ({}, {"on_miss": OnMiss.PREFILL}, "on_miss prefill"),
}


@pytest.mark.parametrize(("attributes", "claims", "text"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_is_not_exact_is_refused(
    attributes: dict[str, Any], claims: dict[str, Any], text: str, engine: Engine
) -> None:
    """Each request that would read or skip virtual positions in another way fails, named."""
    message = message_of([engine.put()], **claims)
    receipt = engine.refused(request_with(message, **dict(attributes)))
    assert receipt.reason is FailureReason.UNSUPPORTED
    assert text in receipt.detail
    assert receipt.request_id == "req-1"


def test_a_refused_request_can_fail_in_vllm(engine: Engine) -> None:
    """Inputs that vLLM would still process, and the flag that skips external tokens, are reset."""
    request = request_with(
        message_of([engine.put()]),
        mm_features=[object()],
        prompt_embeds=object(),
        skip_reading_prefix_cache=True,
    )
    engine.refused(request)
    assert (request.mm_features, request.prompt_embeds) == ([], None)
    assert request.skip_reading_prefix_cache is False


def test_every_reason_is_listed(engine: Engine) -> None:
    """A request with two unsupported wishes hears of both."""
    request = request_with(message_of([engine.put()]), resumable=True, prompt_embeds=object())
    detail = engine.refused(request).detail
    assert "resumable" in detail
    assert "prompt embeddings" in detail


def test_a_salt_that_is_not_the_composition_is_refused(engine: Engine) -> None:
    """A missing, a foreign and a client's own salt never reach the cache."""
    message = message_of([engine.put()])
    for salt in (None, "mine", cache_salt(sha256_digest(b"other"))):
        receipt = engine.refused(request_with(message, cache_salt=salt))
        assert receipt.reason is FailureReason.INVALID_MESSAGE
        assert "cache_salt" in receipt.detail


@pytest.mark.parametrize("message", [None, [], "text", {}, {"v": 2}, {"request_id": "line\nbreak"}])
def test_a_malformed_message_is_refused(message: Any, engine: Engine) -> None:
    """Whatever stands where the message belongs: an invalid message of an unknown request."""
    receipt = engine.refused(FakeRequest({FIELD_CARTRIDGES: message}))
    assert (receipt.reason, receipt.request_id) == (FailureReason.INVALID_MESSAGE, "unknown")


def test_a_malformed_message_keeps_its_request_id(engine: Engine) -> None:
    """The receipt of a message that is wrong elsewhere still names the gateway's request."""
    message = {**message_of([engine.put()]), "layout": "diagonal"}
    receipt = engine.refused(request_with(message))
    assert (receipt.reason, receipt.request_id) == (FailureReason.INVALID_MESSAGE, "req-1")
    assert "layout" in receipt.detail


def test_a_request_beyond_the_context_is_refused_with_the_numbers(engine: Engine) -> None:
    """Virtual and live tokens must leave one position; one less live token fits."""
    message = message_of([engine.put(num_tokens=90)])
    receipt = engine.refused(request_with(message, prompt_token_ids=[1] * 10))
    assert receipt.reason is FailureReason.CONTEXT_LENGTH
    assert [int(word) for word in receipt.detail.split() if word.isdigit()] == [90, 10, 100]
    fits = request_with(message, prompt_token_ids=[1] * 9)
    engine.side.on_new_request(fits)
    assert len(fits.all_token_ids) == 99


def test_refused_requests_share_no_blocks(engine: Engine) -> None:
    """Each refused request has a salt of its own, so that vLLM asks for its external token."""
    requests = [FakeRequest({FIELD_CARTRIDGES: None}) for _ in range(2)]
    for request in requests:
        engine.refused(request)
    assert requests[0].cache_salt != requests[1].cache_salt


# --- refused after the load ----------------------------------------------------------------------
def test_a_false_composition_is_refused(engine: Engine) -> None:
    """The engine computes the identity itself from the verified manifest."""
    false = sha256_digest(b"false")
    message = {**message_of([engine.put()]), "composition": false}
    receipt = engine.failed_to_load(request_with(message))
    assert receipt.reason is FailureReason.INVALID_MESSAGE
    assert false in receipt.detail


def test_a_false_length_is_refused(engine: Engine) -> None:
    """`num_tokens` of an item must be the manifest's, whatever the identity was made from."""
    message = message_of([engine.put(num_tokens=5)], lengths=[6])
    receipt = engine.failed_to_load(request_with(message))
    assert receipt.reason is FailureReason.INVALID_MESSAGE
    assert "items[0].num_tokens: 6; manifest has 5" in receipt.detail


def test_a_foreign_scope_hears_what_an_unknown_artifact_gives(engine: Engine) -> None:
    """An artifact that the scope may not read is refused in the words for one that is absent."""
    digest, manifest = engine.put(readers=["tenant-a"])
    foreign = request_with(message_of([(digest, manifest)], scope="other"))
    receipt = engine.failed_to_load(foreign)
    assert receipt.reason is FailureReason.UNKNOWN_ARTIFACT
    absent = sha256_digest(b"absent")
    unknown = engine.failed_to_load(request_with(message_of([(absent, manifest)])))
    assert unknown.reason is receipt.reason
    assert unknown.detail.replace(absent, digest) == receipt.detail
    served = request_with(message_of([(digest, manifest)], scope="tenant-a"))
    engine.run(served)
    assert engine.end(served).status is ReceiptStatus.SERVED


def test_an_engine_that_cannot_move_keys_serves_in_place_only(engine: Engine) -> None:
    """When the self-test's moved keys were wrong, an offset is refused with that reason."""
    one, two = (engine.put(num_tokens=8, seed=seed) for seed in (1, 2))
    engine.gate.immovable = "moved keys differ"
    receipt = engine.refused(request_with(message_of([one, two])))
    assert receipt.reason is FailureReason.UNSUPPORTED
    assert "moved keys differ" in receipt.detail
    in_place = request_with(message_of([one, two], layout=PositionLayout.SHARED_LOCAL))
    engine.run(in_place)
    assert engine.end(in_place).status is ReceiptStatus.SERVED


def test_keys_that_cannot_be_moved_are_refused(tmp_path: Path) -> None:
    """A length-dependent rotary embedding is served in place and refused at an offset."""
    manifest, blob = sample_artifact()
    dynamic = msgspec.structs.replace(manifest.rope, type="dynamic", scaling={"factor": 2.0})
    manifest = msgspec.structs.replace(manifest, rope=dynamic)
    with running_engine(tmp_path, msgspec.structs.replace(ENGINE, rope=dynamic)) as engine:
        artifact = (put_artifact(engine.store, manifest, blob), manifest)
        receipt = engine.failed_to_load(request_with(message_of([artifact, artifact])))
        assert receipt.reason is FailureReason.UNSUPPORTED
        assert "items[1].offset: rope type dynamic" in receipt.detail
        in_place = message_of([artifact, artifact], layout=PositionLayout.SHARED_LOCAL)
        request = request_with(in_place)
        engine.run(request)
        assert engine.end(request).status is ReceiptStatus.SERVED


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(flip_bit, FailureReason.CORRUPT_ARTIFACT), (Path.unlink, FailureReason.UNKNOWN_ARTIFACT)],
    ids=["flipped", "missing"],
)
def test_a_failed_load_fails_its_request(
    damage: Callable[[Path], None], reason: FailureReason, engine: Engine
) -> None:
    """A flipped bit or a missing blob: no load is planned and the receipt says why."""
    digest, manifest = engine.put()
    damage(blob_path(engine.store, manifest))
    receipt = engine.failed_to_load(request_with(message_of([(digest, manifest)])))
    assert receipt.reason is reason
    assert [item.tier for item in receipt.items] == [Tier.REMOTE]
    assert (receipt.num_loads, receipt.loaded_bytes) == (0, 0)


def test_a_load_past_its_deadline_fails_its_request(engine: Engine) -> None:
    """A request whose bytes are still read when `deadline_ms` has passed is refused."""
    engine.store.gate.clear()
    request = request_with(message_of([engine.put()], deadline_ms=1))
    engine.side.on_new_request(request)
    engine.schedule(request)
    assert engine.side.take_plan().failures == [request.request_id]
    request.finished_reason = "error"
    receipt = engine.end(request)
    assert receipt.reason is FailureReason.DEADLINE
    assert "deadline_ms (1)" in receipt.detail


def test_a_refused_request_whose_prefix_came_meanwhile_is_served(engine: Engine) -> None:
    """VLLM had no blocks for it to fail by; when it asks again another has loaded the prefix."""
    engine.store.gate.clear()
    request = request_with(message_of([engine.put(num_tokens=BLOCK_SIZE)], deadline_ms=1))
    engine.side.on_new_request(request)
    assert engine.matched(request) == BLOCK_SIZE
    assert engine.side.num_matched_tokens(request, BLOCK_SIZE) == (0, False)
    engine.side.after_allocation(request, [3, 4], 0)
    plan = engine.side.take_plan()
    assert (plan.loads, plan.failures) == ([], [])
    receipt = engine.end(request)
    assert (receipt.status, receipt.reason) == (ReceiptStatus.SERVED, None)


def test_a_quarantined_artifact_serves_nobody(engine: Engine) -> None:
    """What answered its probe otherwise is refused with that reason."""
    artifact = engine.put()
    engine.verdicts[artifact[0]] = ProbeVerdict("probe step 0: token 3, expected 4")
    receipt = engine.failed_to_load(request_with(message_of([artifact])))
    assert receipt.reason is FailureReason.QUARANTINED
    assert receipt.detail == f"{artifact[0]}: probe step 0: token 3, expected 4"


def test_requests_wait_for_the_probe(engine: Engine) -> None:
    """While the probe runs the answer is "ask again", until the deadline; the probe itself goes."""
    artifact = engine.put(num_tokens=20)
    engine.verdicts[artifact[0]] = None
    engine.use(artifact)
    request = request_with(message_of([artifact]))
    engine.side.on_new_request(request)
    assert engine.side.num_matched_tokens(request, 0) == (None, False)
    probe = request_with(message_of([artifact]))
    assert probe.kv_transfer_params is not None
    probe.kv_transfer_params[FIELD_SELF_TEST] = {"token": TOKEN, "num_tokens": 0}
    engine.side.on_new_request(probe)
    assert engine.side.num_matched_tokens(probe, 0) == (20, True)
    engine.verdicts[artifact[0]] = PASSED
    assert engine.side.num_matched_tokens(request, 0) == (20, True)


def test_the_probes_blocks_are_for_nobody_else(engine: Engine) -> None:
    """A proof has a salt of its own: a client cannot be served from what an unjudged one wrote."""
    artifact = engine.put(num_tokens=2 * BLOCK_SIZE)
    client, probe = (request_with(message_of([artifact])) for _ in range(2))
    assert probe.kv_transfer_params is not None
    probe.kv_transfer_params[FIELD_SELF_TEST] = {"token": TOKEN, "num_tokens": 0}
    for request in (client, probe):
        engine.side.on_new_request(request)
    assert len(client.block_hashes) == len(probe.block_hashes) == 2
    assert not set(client.block_hashes) & set(probe.block_hashes)
    engine.schedule(probe)
    engine.write(LoadResult(1, 0.1, None))
    engine.blocks.hold(probe.block_hashes)
    engine.side.take_plan()
    assert [row for row in engine.ledger.rows() if row.tier is Tier.HBM] == []


def test_a_probe_past_the_deadline_fails_its_request(engine: Engine) -> None:
    """Who cannot wait that long is refused; nothing is said against the artifact."""
    artifact = engine.put()
    engine.verdicts[artifact[0]] = None
    receipt = engine.failed_to_load(request_with(message_of([artifact], deadline_ms=1)))
    assert receipt.reason is FailureReason.DEADLINE


# --- loading -------------------------------------------------------------------------------------
def test_matching_waits_for_the_bytes_and_changes_nothing(engine: Engine) -> None:
    """While the load runs the answer is "ask again"; asking often reads and plans nothing more."""
    engine.store.gate.clear()
    digest, manifest = engine.put(num_tokens=20)
    request = request_with(message_of([(digest, manifest)]))
    engine.side.on_new_request(request)
    assert engine.store.reading.acquire(timeout=WAIT_S)
    assert [engine.side.num_matched_tokens(request, 0) for _ in range(5)] == [(None, False)] * 5
    engine.store.gate.set()
    engine.pool.wait(digest, WAIT_S)
    assert [engine.side.num_matched_tokens(request, 0) for _ in range(5)] == [(20, True)] * 5
    assert [engine.side.num_matched_tokens(request, n) for n in (16, 20, 22)] == [
        (4, True),
        (0, False),
        (0, False),
    ]
    assert engine.store.reads.total() == 1
    assert engine.side.take_plan().loads == []
    assert [num_users for _, num_users in engine.pool.residents()] == [1]


def test_a_load_names_the_rows_of_every_layer(engine: Engine) -> None:
    """The plan points at each layer's bytes in sealed memory, in order, once per artifact."""
    one, two = engine.put(num_tokens=20, seed=1), engine.put(num_tokens=5, seed=2)
    request = request_with(message_of([one, two]))
    engine.side.on_new_request(request)
    blocks = engine.schedule(request, num_computed_tokens=16)
    (load,) = engine.side.take_plan().loads
    assert isinstance(load, Load)
    assert (load.request_id, load.start, load.stop) == (request.request_id, 16, 25)
    assert load.block_ids == blocks
    assert [segment.num_tokens for segment in load.segments] == [20, 5]
    for segment, (_, manifest) in zip(load.segments, (one, two), strict=True):
        for part, references in (("k", segment.keys), ("v", segment.values)):
            for layer, reference in enumerate(references):
                tensor = manifest.tensors[f"layers.{layer}.{part}"]
                assert (reference.begin, reference.end) == tensor.byte_range
                assert (reference.dtype, list(reference.shape)) == (tensor.dtype, tensor.shape)
        assert len({reference.memory for reference in segment.keys + segment.values}) == 1
    assert load.segments[0].keys[0].memory != load.segments[1].keys[0].memory
    assert engine.side.take_plan().loads == []


def test_a_load_names_the_scales_of_quantised_values(engine: Engine) -> None:
    """Plain values have none; those of each layer are named beside its values."""
    scale = ValueScale(granularity="head_channel", dtype="F32")
    plain, scaled = engine.put(num_tokens=5), engine.put(num_tokens=5, v_scale=scale)
    request = request_with(message_of([plain, scaled]))
    engine.side.on_new_request(request)
    engine.schedule(request)
    (load,) = engine.side.take_plan().loads
    assert load.segments[0].value_scales == ()
    _, manifest = scaled
    references = load.segments[1].value_scales
    assert len(references) == manifest.geometry.num_layers
    for layer, reference in enumerate(references):
        tensor = manifest.tensors[f"layers.{layer}.v_scale"]
        assert (reference.begin, reference.end) == tensor.byte_range
        assert (reference.dtype, list(reference.shape)) == ("F32", tensor.shape)
        assert reference.memory == load.segments[1].values[layer].memory


@pytest.mark.parametrize(
    ("layout", "moves"),
    [
        (PositionLayout.SEQUENTIAL, [0, 20]),
        (PositionLayout.SHARED_LOCAL, [0, 0]),
        (PositionLayout.END_ALIGNED, [5, 20]),
    ],
)
def test_keys_move_to_the_offsets_of_the_layout(
    layout: PositionLayout, moves: list[int], engine: Engine
) -> None:
    """Each artifact's keys, stored from position 0, move by its offset."""
    pair = [engine.put(num_tokens=20, seed=1), engine.put(num_tokens=5, seed=2)]
    request = request_with(message_of(pair, layout=layout))
    engine.side.on_new_request(request)
    engine.schedule(request)
    (load,) = engine.side.take_plan().loads
    assert [segment.num_positions for segment in load.segments] == moves


@pytest.mark.parametrize(("num_skipped", "start"), [(0, 0), (1, 16), (2, 32)])
def test_what_no_window_reaches_is_not_written(
    num_skipped: int, start: int, engine: Engine
) -> None:
    """Blocks that vLLM left out in front of a window get nothing; the rest comes as always."""
    request = request_with(message_of([engine.put(num_tokens=40)]))
    engine.side.on_new_request(request)
    blocks = [*[0] * num_skipped, *range(3, 6 - num_skipped)]
    engine.side.after_allocation(request, blocks, engine.matched(request), num_skipped)
    (load,) = engine.side.take_plan().loads
    assert (load.start, load.stop, load.block_ids) == (start, 40, tuple(blocks))


def test_a_preempted_request_is_loaded_again(engine: Engine) -> None:
    """Blocks that were taken away are filled anew, and the receipt counts both loads."""
    request = request_with(message_of([engine.put(num_tokens=20)]))
    engine.run(request)
    engine.side.after_allocation(request, [8, 9], engine.matched(request, 16))
    (load,) = engine.side.take_plan().loads
    assert (load.start, load.stop, load.block_ids) == (16, 20, (8, 9))
    report = LoadReport({request.request_id: LoadResult(500, 0.25, None)})
    engine.side.take_output(report, [request.request_id])
    receipt = engine.end(request)
    assert (receipt.num_loads, receipt.loaded_bytes, receipt.num_reused_tokens) == (2, 1500, 0)
    assert receipt.status is ReceiptStatus.SERVED


def test_a_load_ends_when_all_workers_have_ended_it(engine: Engine) -> None:
    """Bytes of all workers add up; until the last one has ended, the artifact is in use."""
    request = request_with(message_of([engine.put(num_tokens=20)]), finished_reason="abort")
    engine.side.on_new_request(request)
    engine.schedule(request)
    (load,) = engine.side.take_plan().loads
    first, second = (LoadResult(300, seconds, None) for seconds in (0.5, 0.25))
    engine.side.take_output(LoadReport({load.request_id: first}), [])
    assert engine.side.finish(request) is None  # the client has left
    assert [num_users for _, num_users in engine.pool.residents()] == [1]
    engine.side.take_output(LoadReport({load.request_id: second}), [load.request_id])
    assert [num_users for _, num_users in engine.pool.residents()] == [0]
    (receipt,) = engine.receipts
    assert (receipt.status, receipt.reason) == (ReceiptStatus.ABANDONED, None)
    assert (receipt.loaded_bytes, receipt.num_loads) == (600, 1)
    assert 0.5 <= receipt.load_s < 0.75 + WAIT_S


def test_what_waits_for_bytes_is_known(engine: Engine) -> None:
    """From its arrival until its load has ended, and not while it only decodes."""
    assert not engine.side.is_waiting
    request = request_with(message_of([engine.put(num_tokens=20)]))
    engine.side.on_new_request(request)
    assert engine.side.is_waiting
    engine.schedule(request)
    assert engine.side.is_waiting
    engine.write(LoadResult(1, 0.1, None))
    assert not engine.side.is_waiting
    engine.end(request)
    assert not engine.side.is_waiting


def test_equal_prefixes_are_loaded_once(engine: Engine) -> None:
    """A second request waits for the blocks of the first; another prefix does not wait."""
    artifact, other = (engine.put(num_tokens=20, seed=seed) for seed in (1, 2))
    first, second = (request_with(message_of([artifact])) for _ in range(2))
    different = request_with(message_of([other]))
    for request in (first, second, different):
        engine.side.on_new_request(request)
    engine.schedule(first)
    engine.schedule(different)
    engine.pool.wait(artifact[0], WAIT_S)
    assert engine.side.num_matched_tokens(second, 0) == (None, False)
    # What lies behind the last full block is never shared.
    assert engine.side.num_matched_tokens(second, 16) == (4, True)
    engine.write(LoadResult(1, 0.1, None))
    assert engine.side.num_matched_tokens(second, 16) == (4, True)
    assert engine.side.num_matched_tokens(second, 0) == (20, True)


def test_a_failed_loader_does_not_hold_others_back(engine: Engine) -> None:
    """When the first request's load failed, the second loads by itself."""
    artifact = engine.put(num_tokens=20)
    first = request_with(message_of([artifact]), finished_reason="error")
    second = request_with(message_of([artifact]))
    for request in (first, second):
        engine.side.on_new_request(request)
    engine.schedule(first)
    engine.pool.wait(artifact[0], WAIT_S)
    assert engine.side.num_matched_tokens(second, 0) == (None, False)
    engine.side.finish(first)
    engine.write(LoadResult(0, 0.1, "broken"))
    engine.schedule(second)
    engine.write(LoadResult(1, 0.1, None))
    assert engine.end(second).status is ReceiptStatus.SERVED


def test_without_a_prefix_cache_equal_prefixes_do_not_wait(engine: Engine) -> None:
    """VLLM with its prefix cache off hashes no blocks and shares none."""
    artifact = engine.put(num_tokens=20)
    first, second = (request_with(message_of([artifact])) for _ in range(2))
    for request in (first, second):
        engine.side.on_new_request(request)
        request.block_hashes = []
    engine.schedule(first)
    assert engine.matched(second) == 20


def test_a_prefix_in_hbm_needs_no_artifact(engine: Engine) -> None:
    """While all of its blocks are in HBM, nothing is fetched; once they are gone, it is."""
    artifact = engine.put(num_tokens=32)
    first = request_with(message_of([artifact]))
    engine.run(first)
    engine.blocks.hold(first.block_hashes[:2])
    engine.end(first)
    engine.side.take_plan()
    assert engine.pool.evict(artifact[0]) is None
    reads = engine.store.reads.total()
    second = request_with(message_of([artifact]))
    engine.run(second, num_computed_tokens=32)
    assert engine.end(second).items[0].tier is Tier.HBM
    assert engine.store.reads.total() == reads
    third = request_with(message_of([artifact]))
    engine.side.on_new_request(third)
    engine.blocks.drop(first.block_hashes[:2])
    engine.schedule(third)
    assert engine.store.reads.total() == reads + 1
    engine.write(LoadResult(1, 0.1, None))
    assert [item.tier for item in engine.end(third).items] == [Tier.REMOTE]


# --- receipts ------------------------------------------------------------------------------------
def test_a_receipt_tells_where_the_bytes_were(engine: Engine) -> None:
    """First from the store, then from memory, then, once its blocks are shared, from HBM."""
    artifact = engine.put(num_tokens=20)
    found = []
    for num_computed_tokens in (0, 0, 16):
        request = request_with(message_of([artifact]))
        engine.run(request, num_computed_tokens)
        receipt = engine.end(request)
        assert receipt.status is ReceiptStatus.SERVED
        assert (receipt.reason, receipt.detail, receipt.request_id) == (None, "", "req-1")
        assert (receipt.num_virtual_tokens, receipt.num_loads) == (20, 1)
        assert receipt.loaded_bytes == 1000
        assert receipt.load_s >= 0.5
        assert [item.digest for item in receipt.items] == [artifact[0]]
        found.append((receipt.items[0].tier, receipt.num_reused_tokens))
        if len(found) == 2:
            engine.blocks.hold(request.block_hashes[:1])
            engine.ledger.enter(artifact[0], Tier.DRAM, 1)  # the tail, as the pool would tell
            engine.side.take_plan()
    assert found == [(Tier.REMOTE, 0), (Tier.DRAM, 0), (Tier.HBM, 16)]


def test_blocks_that_came_while_a_request_waited(engine: Engine) -> None:
    """What another request, or the probe, loaded meanwhile was not there when this one came."""
    request = request_with(message_of([engine.put(num_tokens=32)]))
    engine.run(request, num_computed_tokens=32)
    receipt = engine.end(request)
    assert (receipt.num_loads, receipt.loaded_bytes, receipt.load_s) == (0, 0, 0.0)
    assert (receipt.num_reused_tokens, receipt.items[0].tier) == (32, Tier.REMOTE)


def waited_s(engine: Engine, request: FakeRequest) -> float:
    """Let time pass while a request waits; returns for how long it did at least."""
    assert engine.side.num_matched_tokens(request, 0) == (None, False)
    started_s = time.monotonic()
    until(lambda: time.monotonic() > started_s + 0.1)
    return time.monotonic() - started_s


def test_the_wait_for_anothers_load_is_in_the_receipt(engine: Engine) -> None:
    """Whether the blocks that came then are shared, or the loader failed and it loads itself."""
    artifact = engine.put(num_tokens=32)
    first, shares, loads = (request_with(message_of([artifact])) for _ in range(3))
    engine.use(artifact)
    for request in (first, shares, loads):
        engine.side.on_new_request(request)
    engine.schedule(first)
    waits_s = [waited_s(engine, request) for request in (shares, loads)]
    engine.write(LoadResult(1, 0.0, None))
    engine.schedule(shares, num_computed_tokens=32)
    engine.schedule(loads)
    engine.write(LoadResult(1, 0.5, None))
    for request, wait_s, write_s in zip((shares, loads), waits_s, (0.0, 0.5), strict=True):
        assert engine.end(request).load_s >= wait_s + write_s
    assert engine.end(first).load_s == 0.0


def test_the_wait_after_blocks_were_lost_is_in_the_receipt(engine: Engine) -> None:
    """A request that ran from HBM, lost its blocks, and has to fetch the artifact anew."""
    artifact = engine.put(num_tokens=32)
    engine.run(first := request_with(message_of([artifact])))
    engine.blocks.hold(first.block_hashes[:2])
    engine.end(first)
    engine.side.take_plan()
    assert engine.pool.evict(artifact[0]) is None
    long = request_with(message_of([artifact]))
    engine.run(long, num_computed_tokens=32)
    engine.blocks.drop(first.block_hashes[:2])
    engine.store.gate.clear()
    wait_s = waited_s(engine, long)
    engine.store.gate.set()
    engine.schedule(long)
    engine.write(LoadResult(1, 0.0, None))
    assert engine.end(long).load_s >= wait_s


def test_a_queue_without_a_wait_is_no_load(engine: Engine) -> None:
    """A request whose bytes are there when its turn comes has waited for the scheduler only."""
    artifact = engine.put(num_tokens=20)
    engine.use(artifact)
    request = request_with(message_of([artifact]))
    engine.side.on_new_request(request)
    engine.schedule(request)
    engine.write(LoadResult(1, 0.5, None))
    assert engine.end(request).load_s == 0.5


def test_each_artifact_has_its_own_tier(engine: Engine) -> None:
    """One of a pair in memory and one not: the receipt keeps them apart and in order."""
    warm, cold = (engine.put(num_tokens=5, seed=seed) for seed in (1, 2))
    engine.use(warm)
    request = request_with(message_of([cold, warm]))
    engine.run(request)
    assert [item.tier for item in engine.end(request).items] == [Tier.REMOTE, Tier.DRAM]


def test_a_write_that_failed_is_in_the_receipt(engine: Engine) -> None:
    """The worker's error becomes the reason."""
    request = request_with(message_of([engine.put()]), finished_reason="error")
    engine.side.on_new_request(request)
    engine.schedule(request)
    # vLLM finishes the request first, then tells what workers reported.
    assert engine.side.finish(request) is None
    engine.write(LoadResult(0, 0.1, "OSError: gone"))
    (receipt,) = engine.receipts
    assert [num_users for _, num_users in engine.pool.residents()] == [0]
    assert (receipt.status, receipt.reason) == (ReceiptStatus.FAILED, FailureReason.INTERNAL)
    assert receipt.detail == "OSError: gone"


def test_an_engine_error_is_in_the_receipt(engine: Engine) -> None:
    """A request that vLLM failed for its own reasons was not served."""
    request = request_with(message_of([engine.put()]), finished_reason="error")
    engine.run(request)
    receipt = engine.end(request)
    assert (receipt.status, receipt.reason) == (ReceiptStatus.FAILED, FailureReason.INTERNAL)


def test_a_request_given_up_while_it_waited_was_not_served(engine: Engine) -> None:
    """A client that leaves before its request was scheduled frees the artifact."""
    digest, manifest = engine.put()
    request = request_with(message_of([(digest, manifest)]), finished_reason="abort")
    engine.side.on_new_request(request)
    engine.pool.wait(digest, WAIT_S)
    receipt = engine.end(request)
    assert (receipt.status, receipt.reason) == (ReceiptStatus.ABANDONED, None)
    assert (receipt.num_loads, receipt.num_reused_tokens) == (0, 0)
    assert [num_users for _, num_users in engine.pool.residents()] == [0]


def test_a_request_given_up_while_it_decoded_was_served(engine: Engine) -> None:
    """Its prefix was whole: vLLM calls so also what ended with a stop string."""
    request = request_with(message_of([engine.put()]), finished_reason="abort")
    engine.run(request)
    assert engine.end(request).status is ReceiptStatus.SERVED


def test_a_use_ends_exactly_once(engine: Engine) -> None:
    """An artifact that a composition names twice is one use, and a second finish ends no other."""
    artifact = engine.put(num_tokens=5)
    one, two = (request_with(message_of([artifact, artifact])) for _ in range(2))
    engine.run(one)
    engine.run(two)
    assert [num_users for _, num_users in engine.pool.residents()] == [2]
    engine.end(one)
    assert engine.side.finish(one) is None
    assert [num_users for _, num_users in engine.pool.residents()] == [1]
    engine.end(two)
    assert [num_users for _, num_users in engine.pool.residents()] == [0]
    assert len(engine.receipts) == 2


# --- the self-test's gate ------------------------------------------------------------------------
def test_before_the_self_test_everybody_else_is_refused(engine: Engine) -> None:
    """Only the token lets a virtual prefix in while the gate is closed."""
    engine.gate.is_open = False
    artifact = engine.put()
    receipt = engine.refused(request_with(message_of([artifact])))
    assert receipt.reason is FailureReason.NOT_READY
    request = request_with(message_of([artifact]))
    assert request.kv_transfer_params is not None
    request.kv_transfer_params[FIELD_SELF_TEST] = {"token": TOKEN, "num_tokens": 0}
    engine.run(request)
    answer = engine.side.finish(request)
    assert answer is not None
    assert answer[FIELD_RECEIPT]["status"] == ReceiptStatus.SERVED
    assert engine.receipts == [receipt]  # the engine's own requests are told to nobody


@pytest.mark.parametrize("token", ["guess", TOKEN[:-1], "", "é", "\ud800", 7, None])
def test_a_forged_token_opens_nothing(token: Any, engine: Engine) -> None:
    """Any other token, of any type and in any script, neither passes the gate nor reads KV back."""
    engine.gate.is_open = False
    request = request_with(message_of([engine.put()]))
    assert request.kv_transfer_params is not None
    request.kv_transfer_params[FIELD_SELF_TEST] = {"token": token, "num_tokens": 4}
    receipt = engine.refused(request)
    assert receipt.reason is FailureReason.NOT_READY
    spy = FakeRequest({FIELD_SELF_TEST: {"token": token, "num_tokens": 2}})
    engine.side.on_new_request(spy)
    engine.side.after_allocation(spy, [1], 0)
    assert engine.side.take_plan().captures == []


def test_the_self_test_reads_positions_back_once(engine: Engine) -> None:
    """A capture is planned with the first allocation only, and handed over when it arrives."""
    request = FakeRequest({FIELD_SELF_TEST: {"token": TOKEN, "num_tokens": 2}})
    engine.side.on_new_request(request)
    assert request.all_token_ids == LIVE
    assert engine.side.num_matched_tokens(request, 0) == (0, False)
    for _ in range(2):
        engine.side.after_allocation(request, [4, 6], 0)
    assert engine.side.take_plan().captures == [Capture(request.request_id, 2, (4, 6))]
    engine.side.take_output(LoadReport(captured={request.request_id: {0: []}}), [])
    assert engine.captured == [{0: []}]
    assert engine.side.finish(request) is None


# --- hints, draining, traces ---------------------------------------------------------------------
def test_hints_of_any_request_are_taken(engine: Engine) -> None:
    """With Cartridges or without; they change nothing else of the request."""
    request = FakeRequest({FIELD_KV_HINTS: {"message_id": "m"}})
    engine.side.on_new_request(request)
    assert engine.hints == [{"message_id": "m"}]
    assert request.all_token_ids == LIVE


def test_draining(engine: Engine) -> None:
    """What runs is served, what comes is refused, until it is resumed."""
    artifact = engine.put()
    running = request_with(message_of([artifact]))
    engine.run(running)
    engine.side.drain()
    assert (engine.side.is_draining, engine.side.is_drained()) == (True, False)
    late = request_with(message_of([artifact]))
    engine.side.on_new_request(late)
    late.finished_reason = "error"
    receipt = engine.end(late)
    assert (receipt.reason, receipt.detail) == (
        FailureReason.NOT_READY,
        "this replica is being drained",
    )
    assert engine.end(running).status is ReceiptStatus.SERVED
    assert engine.side.is_drained()
    engine.side.resume()
    assert (engine.side.is_draining, engine.side.is_drained()) == (False, False)
    again = request_with(message_of([artifact]))
    engine.run(again)
    assert engine.end(again).status is ReceiptStatus.SERVED


def test_a_draining_engine_still_proves_artifacts(engine: Engine) -> None:
    """A request that was taken before waits for its probe, so the probe is let in."""
    engine.side.drain()
    probe = request_with(message_of([engine.put(num_tokens=20)]))
    assert probe.kv_transfer_params is not None
    probe.kv_transfer_params[FIELD_SELF_TEST] = {"token": TOKEN, "num_tokens": 0}
    engine.side.on_new_request(probe)
    assert engine.matched(probe) == 20


def test_a_refused_proof_is_told_to_nobody(engine: Engine) -> None:
    """The engine asks itself: no receipt, no count."""
    probe = FakeRequest(
        {FIELD_CARTRIDGES: {}, FIELD_SELF_TEST: {"token": TOKEN, "num_tokens": 0}},
        finished_reason="error",
    )
    engine.side.on_new_request(probe)
    assert engine.side.finish(probe) is not None
    assert engine.ended == []


def test_a_prefix_that_is_lost_has_a_deadline_of_its_own(engine: Engine) -> None:
    """A request that ran long from HBM and lost its blocks may load as long as a new one."""
    artifact = engine.put(num_tokens=32)
    first = request_with(message_of([artifact]))
    engine.run(first)
    engine.blocks.hold(first.block_hashes[:2])
    engine.end(first)
    engine.side.take_plan()
    assert engine.pool.evict(artifact[0]) is None
    long = request_with(message_of([artifact], deadline_ms=1))
    engine.run(long, num_computed_tokens=32)
    tracked = engine.side._tracked[long.request_id]
    assert isinstance(tracked, _VirtualRequest)
    before_s = tracked.deadline_s
    engine.blocks.drop(first.block_hashes[:2])
    engine.side.num_matched_tokens(long, 0)
    assert tracked.deadline_s > before_s


def test_what_is_told_of_a_prefix_that_is_over(engine: Engine) -> None:
    """Message, trace and times: from arrival to the end of the load, before the answer's end."""
    headers = {"traceparent": "00-1-2-01"}
    request = request_with(message_of([engine.put(num_tokens=20)]), trace_headers=headers)
    before_ns = time.time_ns()
    engine.run(request)
    ready_ns = time.time_ns()
    engine.end(request)
    (ended,) = engine.ended
    assert ended.message is not None
    assert ended.message.request_id == "req-1"
    assert ended.trace_headers == headers
    assert before_ns <= ended.start_ns <= ended.ready_ns <= ready_ns


def test_a_refused_request_is_told_with_its_trace(engine: Engine) -> None:
    """Also one whose message could not be read."""
    headers = {"traceparent": "00-1-2-01"}
    engine.refused(FakeRequest({FIELD_CARTRIDGES: {}}, trace_headers=headers))
    (ended,) = engine.ended
    assert (ended.message, ended.trace_headers) == (None, headers)


# --- LoRA adapters -------------------------------------------------------------------------------
def put_lora(folder: Path, weights: bytes, name: str = "a", number: int = 1) -> FakeLora:
    """An adapter as vLLM loaded it from a folder, whose weights are these bytes."""
    folder.mkdir(exist_ok=True)
    for file, data in zip(ADAPTER_FILES, (b"{}", weights), strict=True):
        (folder / file).write_bytes(data)
    return FakeLora(name, str(folder), number)


def made_with(weights: bytes | None) -> Adapter | None:
    """What the manifest of an artifact says that was made with the adapter of these weights."""
    return None if weights is None else Adapter(name="any", digest=sha256_digest(weights))


def test_an_artifact_of_the_adapter_is_served(engine: Engine, tmp_path: Path) -> None:
    """By the digest of the adapter's files, read once; the probe names the adapter."""
    artifact = engine.put(num_tokens=20, adapter=made_with(b"A"))
    lora = put_lora(tmp_path / "a", b"A", "legal")
    for _ in range(3):
        request = request_with(message_of([artifact]), lora_request=lora)
        engine.run(request)
        assert engine.end(request).status is ReceiptStatus.SERVED
    assert engine.adapters.num_read == 1
    assert set(engine.probed_by) == {"legal"}


@pytest.mark.parametrize(("artifact", "asked"), [(b"A", b"B"), (b"A", None), (None, b"B")])
def test_an_artifact_of_another_adapter_is_refused(
    artifact: bytes | None, asked: bytes | None, engine: Engine, tmp_path: Path
) -> None:
    """Also without one on either side; both digests are named, and no probe is asked."""
    message = message_of([engine.put(adapter=made_with(artifact))])
    lora = None if asked is None else put_lora(tmp_path / "a", asked)
    request = request_with(message, lora_request=lora)
    receipt = engine.failed_to_load(request)
    assert receipt.reason is FailureReason.INCOMPATIBLE
    assert receipt.detail.startswith("model.adapter: artifact has ")
    for weights in (artifact, asked):
        assert ("null" if weights is None else sha256_digest(weights)) in receipt.detail
    assert engine.probed_by == []


def test_every_artifact_of_a_set_must_be_of_the_adapter(engine: Engine, tmp_path: Path) -> None:
    """A second artifact without it is refused as the first would be."""
    pair = [engine.put(adapter=made_with(b"A")), engine.put(seed=1)]
    request = request_with(message_of(pair), lora_request=put_lora(tmp_path / "a", b"A"))
    assert engine.failed_to_load(request).reason is FailureReason.INCOMPATIBLE


def test_a_proof_must_be_of_the_adapter_too(engine: Engine, tmp_path: Path) -> None:
    """A probe that came to another adapter is refused, not answered: it would say nothing."""
    request = request_with(message_of([engine.put(adapter=made_with(b"A"))]))
    assert request.kv_transfer_params is not None
    request.kv_transfer_params[FIELD_SELF_TEST] = {"token": TOKEN, "num_tokens": 0}
    request.lora_request = put_lora(tmp_path / "b", b"B")
    engine.side.on_new_request(request)
    engine.schedule(request)
    assert engine.side.take_plan().failures == [request.request_id]


def test_an_adapter_that_cannot_be_identified_is_refused_at_once(engine: Engine) -> None:
    """Before a byte is asked for."""
    message = message_of([engine.put(adapter=made_with(b"A"))])
    receipt = engine.refused(request_with(message, lora_request=FakeLora("a", "hub/name")))
    assert receipt.reason is FailureReason.UNSUPPORTED
    assert "hub/name is no local folder" in receipt.detail


def test_the_adapter_of_another_tenants_artifact_is_not_told(
    engine: Engine, tmp_path: Path
) -> None:
    """It does not exist for who may not read it, whatever it was made with."""
    artifact = engine.put(adapter=made_with(b"A"), readers=["tenant-a"])
    lora = put_lora(tmp_path / "b", b"B")
    receipt = engine.failed_to_load(request_with(message_of([artifact]), lora_request=lora))
    assert receipt.reason is FailureReason.UNKNOWN_ARTIFACT


def test_a_request_waits_while_its_adapter_is_read(engine: Engine, tmp_path: Path) -> None:
    """As for bytes: asked again, and no longer than its deadline; others go on."""
    artifact = engine.put(num_tokens=20, adapter=made_with(b"A"))
    plain = engine.put(num_tokens=20, seed=1)
    lora = put_lora(tmp_path / "a", b"A")
    engine.adapters.gate.clear()
    waiting, late = (
        request_with(message_of([artifact], deadline_ms=deadline_ms), lora_request=lora)
        for deadline_ms in (60_000, 1)
    )
    for request in (waiting, late):
        engine.side.on_new_request(request)
    engine.pool.wait(artifact[0], WAIT_S)
    assert engine.side.num_matched_tokens(waiting, 0) == (None, False)
    assert engine.side.is_waiting
    engine.run(request_with(message_of([plain])))
    engine.schedule(late)
    assert engine.side.take_plan().failures == [late.request_id]
    late.finished_reason = "error"
    receipt = engine.end(late)
    assert receipt.reason is FailureReason.DEADLINE
    assert "adapter not read" in receipt.detail
    engine.adapters.gate.set()
    assert engine.matched(waiting) == 20


def test_blocks_of_one_adapter_are_never_anothers(engine: Engine, tmp_path: Path) -> None:
    """Same message: name, number, folder or written files make other blocks; nothing else does."""
    message = message_of([engine.put(num_tokens=16, adapter=made_with(b"A"))])

    def salt(lora: FakeLora | None) -> str:
        request = request_with(message, lora_request=lora)
        engine.side.on_new_request(request)
        return request.cache_salt or ""

    lora = put_lora(tmp_path / "a", b"A")
    salts = [
        salt(lora),
        salt(None),
        salt(FakeLora("other", lora.lora_path)),
        salt(FakeLora("a", lora.lora_path, 2)),
        salt(put_lora(tmp_path / "b", b"A")),
    ]
    again = salt(FakeLora("a", lora.lora_path))
    salts.append(salt(put_lora(tmp_path / "a", b"B")))
    assert again == salts[0]
    assert len(set(salts)) == len(salts)


def test_one_composition_under_two_names_of_an_adapter(engine: Engine, tmp_path: Path) -> None:
    """Blocks of one name are not those of the other: neither receipt nor row claims it."""
    artifact = engine.put(num_tokens=32, adapter=made_with(b"A"))
    message = message_of([artifact])
    one = put_lora(tmp_path / "a", b"A", "one")
    tiers = []
    for name, num_computed_tokens in (("one", 0), ("one", 32), ("two", 0), ("two", 32)):
        lora = FakeLora(name, one.lora_path, 1 if name == "one" else 2)
        request = request_with(message, lora_request=lora)
        engine.run(request, num_computed_tokens)
        engine.blocks.hold(request.block_hashes[:2])
        engine.side.take_plan()
        tiers.append(engine.end(request).items[0].tier)
    assert tiers == [Tier.REMOTE, Tier.HBM, Tier.DRAM, Tier.HBM]
    assert [row.digest for row in engine.ledger.rows() if row.tier is Tier.HBM] == [
        message["composition"]
    ]
    engine.blocks.drop(request.block_hashes[:2])
    engine.side.take_plan()
    assert [row for row in engine.ledger.rows() if row.tier is Tier.HBM] == []
