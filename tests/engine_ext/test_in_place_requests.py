"""The scheduler half where prefixes are read in place: no slots, artifacts kept in use."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext.first_load_probe import ProbeVerdict
from cartridge_engine_ext.packed_layout import CacheGeometry
from cartridge_engine_ext.stored_segments import InPlacePrefix
from cartridge_proto.digest import Digest
from cartridge_proto.names import FIELD_CARTRIDGES, FIELD_SELF_TEST
from cartridge_proto.residency import FailureReason, Receipt, ReceiptStatus, Tier
from tests.engine_ext.fake_request import BLOCK_SIZE, LIVE, FakeRequest, message_of, request_with
from tests.engine_ext.stored_artifacts import blob_path, flip_bit
from tests.engine_ext.test_scheduler_side import (
    ENGINE,
    MAX_MODEL_LEN,
    TOKEN,
    Engine,
    running_engine,
)
from tests.engine_ext.waiting import until
from tests.proto.sample_artifact import HEAD_DIM

NUM_TOKENS = 40
CACHE = CacheGeometry(BLOCK_SIZE, HEAD_DIM, "F32")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine that reads in place."""
    with running_engine(tmp_path, packed_cache=CACHE, is_in_place=True) as running:
        yield running


def users(engine: Engine) -> dict[Digest, int]:
    """How many use each artifact in dram."""
    return {artifact.digest: num_users for artifact, num_users in engine.pool.residents()}


def failed(engine: Engine, request: FakeRequest) -> Receipt:
    """Let a request that was admitted fail, as vLLM does with one whose load failed."""
    assert engine.matched(request) == 1
    assert request.all_token_ids == request.prompt_token_ids == [0, 0]
    engine.side.after_allocation(request, [5], 1)
    plan = engine.side.take_plan()
    assert (plan.loads, plan.prefixes, plan.failures) == ([], {}, [request.request_id])
    engine.side.take_output(None, [request.request_id])
    request.finished_reason = "error"
    receipt = engine.end(request)
    assert receipt.status is ReceiptStatus.FAILED
    return receipt


def test_a_prefix_takes_no_slots(engine: Engine) -> None:
    """The prompt stays as it is, nothing is loaded, and workers are told where the bytes are."""
    one, two = (engine.put(num_tokens=NUM_TOKENS, seed=seed) for seed in (1, 2))
    request = request_with(message_of([one, two]))
    gateway_salt = request.cache_salt
    engine.side.on_new_request(request)
    assert request.all_token_ids == request.prompt_token_ids == LIVE
    assert request.num_prompt_tokens == len(LIVE)
    assert request.cache_salt != gateway_salt
    assert engine.matched(request) == 0
    engine.side.after_allocation(request, [3], 0)
    plan = engine.side.take_plan()
    assert (plan.loads, plan.failures) == ([], [])
    prefix = plan.prefixes[request.request_id]
    assert isinstance(prefix, InPlacePrefix)
    assert [segment.place for segment in prefix.segments] == [(one[0], 0), (two[0], NUM_TOKENS)]
    assert prefix.num_positions == 2 * NUM_TOKENS


def test_live_blocks_are_shared_within_a_composition_only(engine: Engine) -> None:
    """Keys of live tokens depend on what stands before them, though no slot says so."""
    one, two = (engine.put(num_tokens=NUM_TOKENS, seed=seed) for seed in (1, 2))
    prompt = list(range(BLOCK_SIZE))
    hashes = []
    for artifact in (one, two, one):
        request = request_with(message_of([artifact]), prompt_token_ids=list(prompt))
        engine.side.on_new_request(request)
        hashes.append(request.block_hashes)
    assert len(hashes[0]) == 1
    assert hashes[0] == hashes[2] != hashes[1]


def test_it_waits_until_its_artifacts_are_in_dram(engine: Engine) -> None:
    """While bytes are read the answer is "ask again", and nothing is planned."""
    engine.store.gate.clear()
    request = request_with(message_of([engine.put(num_tokens=NUM_TOKENS)]))
    engine.side.on_new_request(request)
    assert engine.side.num_matched_tokens(request, 0) == (None, False)
    assert engine.side.is_waiting
    assert engine.side.take_plan().prefixes == {}
    engine.store.gate.set()
    engine.schedule(request)
    assert not engine.side.is_waiting
    assert list(engine.side.take_plan().prefixes) == [request.request_id]


@pytest.mark.parametrize("reason", ["stop", "abort", "error"])
def test_artifacts_are_in_use_while_the_request_lives(engine: Engine, reason: str) -> None:
    """From its arrival to its end, however it ends; another request's use is its own."""
    artifact = engine.put(num_tokens=NUM_TOKENS)
    requests = [request_with(message_of([artifact])) for _ in range(2)]
    for request in requests:
        engine.run(request)
    assert users(engine) == {artifact[0]: 2}
    assert engine.pool.evict(artifact[0]) is not None
    requests[0].finished_reason = reason
    engine.end(requests[0])
    assert users(engine) == {artifact[0]: 1}
    engine.end(requests[1])
    assert users(engine) == {artifact[0]: 0}
    assert engine.pool.evict(artifact[0]) is None


def test_an_abort_while_waiting_gives_everything_back(engine: Engine) -> None:
    """Its load may end later; nobody uses it then."""
    engine.store.gate.clear()
    artifact = engine.put(num_tokens=NUM_TOKENS)
    request = request_with(message_of([artifact]))
    engine.side.on_new_request(request)
    assert engine.side.num_matched_tokens(request, 0) == (None, False)
    request.finished_reason = "abort"
    assert engine.end(request).status is ReceiptStatus.ABANDONED
    engine.side.drain()
    assert engine.side.is_drained()
    engine.store.gate.set()
    again = request_with(message_of([artifact]))
    engine.side.resume()
    engine.run(again)
    assert users(engine) == {artifact[0]: 1}


def test_a_preempted_request_is_told_again(engine: Engine) -> None:
    """It keeps its artifacts, waits for nothing and is still one use."""
    artifact = engine.put(num_tokens=NUM_TOKENS)
    request = request_with(message_of([artifact]))
    engine.run(request)
    request._all_token_ids.append(77)
    assert engine.side.num_matched_tokens(request, 0) == (0, False)
    engine.side.after_allocation(request, [9], 0)
    assert list(engine.side.take_plan().prefixes) == [request.request_id]
    assert request.all_token_ids == [*LIVE, 77]
    assert users(engine) == {artifact[0]: 1}
    assert engine.end(request).status is ReceiptStatus.SERVED


def test_the_receipt_says_dram_and_nothing_loaded(engine: Engine) -> None:
    """Positions are counted though they take no slot; the tier is dram, first from the store."""
    artifact = engine.put(num_tokens=NUM_TOKENS)
    receipts = []
    for _ in range(2):
        request = request_with(message_of([artifact]))
        engine.run(request)
        receipts.append(engine.end(request))
    assert [receipt.items[0].tier for receipt in receipts] == [Tier.REMOTE, Tier.DRAM]
    for receipt in receipts:
        assert receipt.status is ReceiptStatus.SERVED
        assert receipt.num_virtual_tokens == NUM_TOKENS
        assert (receipt.num_loads, receipt.loaded_bytes, receipt.num_reused_tokens) == (0, 0, 0)


def test_damaged_bytes_fail_their_request_with_a_whole_receipt(engine: Engine) -> None:
    """The receipt has the items, the scope and the wait, as that of a failed load has."""
    artifact = engine.put(num_tokens=NUM_TOKENS)
    flip_bit(blob_path(engine.store, artifact[1]))
    request = request_with(message_of([artifact], scope="public"))
    engine.side.on_new_request(request)
    receipt = failed(engine, request)
    assert receipt.reason is FailureReason.CORRUPT_ARTIFACT
    assert [item.digest for item in receipt.items] == [artifact[0]]
    assert (receipt.num_virtual_tokens, receipt.scope) == (NUM_TOKENS, "public")
    assert receipt.load_s > 0
    assert engine.ended[-1].message is not None
    assert users(engine) == {}


def test_bytes_that_do_not_come_in_time_fail_their_request(engine: Engine) -> None:
    """After `deadline_ms` it is asked no more; the load's use ends with the request."""
    engine.store.gate.clear()
    request = request_with(message_of([engine.put(num_tokens=NUM_TOKENS)], deadline_ms=1))
    engine.side.on_new_request(request)
    receipt = failed(engine, request)
    assert receipt.reason is FailureReason.DEADLINE
    assert "deadline_ms (1)" in receipt.detail


def test_vllm_is_asked_again_after_a_refusal(engine: Engine) -> None:
    """What its prefix cache had was for the prompt before: the failing one is looked up anew."""
    artifact = engine.put(num_tokens=NUM_TOKENS)
    engine.verdicts[artifact[0]] = ProbeVerdict("another answer")
    engine.use(artifact)
    request = request_with(message_of([artifact]), prompt_token_ids=[5] * (BLOCK_SIZE + 1))
    engine.side.on_new_request(request)
    assert engine.side.num_matched_tokens(request, BLOCK_SIZE) == (None, False)
    assert request.block_hashes == []
    assert failed(engine, request).reason is FailureReason.QUARANTINED
    assert users(engine) == {artifact[0]: 0}


def test_a_false_claim_fails_its_request(engine: Engine) -> None:
    """A length that the manifest does not have would put live tokens at wrong positions."""
    artifact = engine.put(num_tokens=NUM_TOKENS)
    request = request_with(message_of([artifact], lengths=[NUM_TOKENS - 1]))
    engine.side.on_new_request(request)
    assert failed(engine, request).reason is FailureReason.INVALID_MESSAGE


def test_an_answer_ends_before_its_positions_leave_the_context(engine: Engine) -> None:
    """VLLM counts live tokens only, so the extension bounds the answer."""
    request = request_with(message_of([engine.put(num_tokens=NUM_TOKENS)]))
    engine.side.on_new_request(request)
    assert request.max_tokens == MAX_MODEL_LEN - NUM_TOKENS - len(LIVE)


def test_positions_that_do_not_fit_are_refused_although_they_take_no_slot(tmp_path: Path) -> None:
    """The context limit is one of positions."""
    identity = msgspec.structs.replace(ENGINE, max_model_len=NUM_TOKENS + len(LIVE))
    with running_engine(tmp_path, identity, CACHE, is_in_place=True) as engine:
        request = request_with(message_of([engine.put(num_tokens=NUM_TOKENS)]))
        assert engine.refused(request).reason is FailureReason.CONTEXT_LENGTH


def test_hbm_is_said_to_hold_nothing(engine: Engine) -> None:
    """A prefix without blocks is none of the census, whatever live blocks are cached."""
    artifact = engine.put(num_tokens=NUM_TOKENS)
    for _ in range(2):
        request = request_with(message_of([artifact]), prompt_token_ids=[5] * BLOCK_SIZE)
        engine.run(request)
        engine.blocks.hold(request.block_hashes)
        engine.side.take_plan()
        assert engine.end(request).items[0].tier is not Tier.HBM
    composition = (request.kv_transfer_params or {})[FIELD_CARTRIDGES]["composition"]
    assert engine.ledger.tiers(Digest(composition)) == []


def test_workers_hear_of_a_prefix_that_a_proof_reads(engine: Engine) -> None:
    """Requests of the engine to itself read in place too, under a salt of their own."""
    artifact = engine.put(num_tokens=NUM_TOKENS)
    request, other = (request_with(message_of([artifact])) for _ in range(2))
    request.kv_transfer_params = {
        **(request.kv_transfer_params or {}),
        FIELD_SELF_TEST: {"token": TOKEN, "num_tokens": 0},
    }
    engine.side.on_new_request(request)
    engine.side.on_new_request(other)
    assert request.cache_salt != other.cache_salt
    engine.schedule(request)
    assert list(engine.side.take_plan().prefixes) == [request.request_id]
    until(lambda: engine.side.num_matched_tokens(other, 0)[0] == 0)
