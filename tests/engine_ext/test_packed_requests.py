"""The scheduler half and packed prefixes: slots in vLLM's hands, positions in the client's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext.load_plan import LoadResult
from cartridge_engine_ext.packed_layout import CacheGeometry
from cartridge_proto.manifest import ValueScale
from cartridge_proto.residency import FailureReason, Tier
from tests.engine_ext.fake_request import BLOCK_SIZE, LIVE, FakeRequest, message_of, request_with
from tests.engine_ext.test_scheduler_side import (
    ENGINE,
    MAX_MODEL_LEN,
    PLACEHOLDER,
    Engine,
    running_engine,
)
from tests.proto.sample_artifact import HEAD_DIM

CACHE = CacheGeometry(BLOCK_SIZE, HEAD_DIM, "F32")
SMALL = ValueScale(granularity="head_channel", dtype="F32")
NUM_TOKENS, NUM_SLOTS = 40, 2 * BLOCK_SIZE
"""40 positions of 5 bytes a number pair lie in two blocks, plain ones in three."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine that can read packed prefixes."""
    with running_engine(tmp_path, packed_cache=CACHE) as running:
        yield running


def a_request(engine: Engine, **sample: Any) -> FakeRequest:
    """One for a Cartridge of small values."""
    artifact = engine.put(**{"num_tokens": NUM_TOKENS, "v_scale": SMALL, **sample})
    return request_with(message_of([artifact]))


def test_a_packed_prefix_takes_fewer_slots_than_positions(engine: Engine) -> None:
    """Once its manifest is known a request is laid out anew, and loads whole blocks."""
    request = a_request(engine)
    engine.side.on_new_request(request)
    assert request.prompt_token_ids == [PLACEHOLDER] * NUM_TOKENS + LIVE
    plain_salt = request.cache_salt
    blocks = engine.schedule(request)
    assert request.prompt_token_ids == [PLACEHOLDER] * NUM_SLOTS + LIVE
    assert request.all_token_ids == request.prompt_token_ids
    assert request.num_prompt_tokens == NUM_SLOTS + len(LIVE)
    assert request.cache_salt != plain_salt
    fresh = FakeRequest(
        None, prompt_token_ids=request.prompt_token_ids, cache_salt=request.cache_salt
    )
    assert request.block_hashes == fresh.block_hashes
    plan = engine.side.take_plan()
    [load] = plan.loads
    assert (load.start, load.stop, load.block_ids) == (0, NUM_SLOTS, blocks)
    assert load.packed is not None
    assert load.packed.num_positions == NUM_TOKENS
    assert plan.prefixes == {request.request_id: load.packed}


def test_vllm_is_asked_again_when_the_layout_is_another(engine: Engine) -> None:
    """What it looked up in its prefix cache before was for other blocks."""
    artifact = engine.put(num_tokens=NUM_TOKENS, v_scale=SMALL)
    engine.use(artifact)
    request = request_with(message_of([artifact]))
    engine.side.on_new_request(request)
    assert engine.side.num_matched_tokens(request, BLOCK_SIZE) == (None, False)
    assert engine.side.num_matched_tokens(request, BLOCK_SIZE) == (NUM_SLOTS - BLOCK_SIZE, True)


def test_a_known_layout_is_used_at_once(engine: Engine) -> None:
    """The second request of a composition has its slots before its artifacts are looked at."""
    artifact = engine.put(num_tokens=NUM_TOKENS, v_scale=SMALL)
    engine.run(request_with(message_of([artifact])))
    second = request_with(message_of([artifact]))
    engine.side.on_new_request(second)
    assert second.num_prompt_tokens == NUM_SLOTS + len(LIVE)
    assert engine.side.num_matched_tokens(second, NUM_SLOTS) == (0, False)
    engine.side.after_allocation(second, [1, 2, 3], 0)
    plan = engine.side.take_plan()
    assert plan.loads == []
    assert list(plan.prefixes) == [second.request_id]


def test_a_prefix_that_packing_does_not_shorten_is_plain(engine: Engine) -> None:
    """Full values, or few of them, stand in plain slots, and that is remembered too."""
    samples: list[dict[str, Any]] = [{"v_scale": None}, {"num_tokens": 5}]
    for index, sample in enumerate(samples):
        request = a_request(engine, name=f"plain-{index}", **sample)
        engine.side.on_new_request(request)
        before = (request.prompt_token_ids, request.cache_salt)
        engine.schedule(request)
        plan = engine.side.take_plan()
        assert (request.prompt_token_ids, request.cache_salt) == before
        assert (plan.loads[0].packed, plan.prefixes) == (None, {})


def test_without_the_worker_nothing_is_packed(tmp_path: Path) -> None:
    """An engine that was started with another worker dequantises into plain slots."""
    with running_engine(tmp_path) as engine:
        request = a_request(engine)
        engine.side.on_new_request(request)
        engine.schedule(request)
        assert engine.side.take_plan().loads[0].packed is None
        assert request.num_prompt_tokens == NUM_TOKENS + len(LIVE)


def test_the_receipt_counts_positions(engine: Engine) -> None:
    """Virtual and reused tokens are positions, whatever slots they take; no tail is left over."""
    artifact = engine.put(num_tokens=NUM_TOKENS, v_scale=SMALL)
    first = request_with(message_of([artifact]))
    engine.run(first)
    receipt = engine.end(first)
    assert (receipt.num_virtual_tokens, receipt.num_reused_tokens) == (NUM_TOKENS, 0)
    second = request_with(message_of([artifact]))
    engine.side.on_new_request(second)
    engine.blocks.hold(second.block_hashes[:2])
    engine.side.take_plan()
    engine.schedule(second, NUM_SLOTS)
    engine.side.take_plan()
    assert engine.end(second).num_reused_tokens == NUM_TOKENS
    third = request_with(message_of([artifact]))
    engine.run(third, NUM_SLOTS)
    receipt = engine.end(third)
    assert [item.tier for item in receipt.items] == [Tier.HBM]
    assert receipt.num_loads == 0


def test_a_forgotten_layout_costs_no_tier(engine: Engine) -> None:
    """A prefix that is whole in HBM is told so, also when its layout is found out anew."""
    artifact = engine.put(num_tokens=NUM_TOKENS, v_scale=SMALL)
    engine.run(request_with(message_of([artifact])))
    second = request_with(message_of([artifact]))
    engine.side.on_new_request(second)
    engine.blocks.hold(second.block_hashes[:2])
    engine.side.take_plan()
    engine.side._layouts.clear()
    third = request_with(message_of([artifact]))
    engine.side.on_new_request(third)
    assert third.num_prompt_tokens == NUM_TOKENS + len(LIVE)
    assert engine.side.num_matched_tokens(third, 0) == (None, False)
    engine.schedule(third, NUM_SLOTS)
    receipt = engine.end(third)
    assert [item.tier for item in receipt.items] == [Tier.HBM]


def test_half_of_the_blocks_reused_is_half_of_the_positions(engine: Engine) -> None:
    """When the prefix cache has lost the last block, only that is loaded."""
    request = a_request(engine)
    engine.side.on_new_request(request)
    engine.schedule(request, BLOCK_SIZE)
    [load] = engine.side.take_plan().loads
    assert (load.start, load.stop) == (BLOCK_SIZE, NUM_SLOTS)
    engine.side.take_output(None, [request.request_id])
    assert engine.end(request).num_reused_tokens == NUM_TOKENS // 2


def test_an_answer_ends_before_its_positions_leave_the_context(engine: Engine) -> None:
    """VLLM counts slots, so the extension bounds the answer by positions."""
    request = a_request(engine)
    engine.side.on_new_request(request)
    engine.schedule(request)
    assert request.max_tokens == MAX_MODEL_LEN - NUM_TOKENS - len(LIVE)
    shorter = a_request(engine, name="shorter")
    shorter.max_tokens = 3
    engine.side.on_new_request(shorter)
    engine.schedule(shorter)
    assert shorter.max_tokens == 3


def test_positions_that_do_not_fit_are_refused_although_slots_would(tmp_path: Path) -> None:
    """The context limit is one of positions."""
    identity = msgspec.structs.replace(ENGINE, max_model_len=NUM_TOKENS + len(LIVE))
    with running_engine(tmp_path, identity, CACHE) as engine:
        receipt = engine.refused(a_request(engine))
        assert receipt.reason is FailureReason.CONTEXT_LENGTH


def test_a_preempted_request_keeps_its_layout(engine: Engine) -> None:
    """It is loaded again into the blocks that it gets then."""
    request = a_request(engine)
    engine.run(request)
    engine.side.after_allocation(request, [3, 4, 5], 0)
    engine.side.take_plan()
    assert engine.matched(request) == NUM_SLOTS
    engine.side.after_allocation(request, [7, 8, 9], NUM_SLOTS)
    [load] = engine.side.take_plan().loads
    assert load.packed is not None
    assert load.block_ids == (7, 8, 9)
    engine.side.take_output(None, [request.request_id])
    engine.write(LoadResult(1, 0.1, None))
    assert engine.end(request).num_loads == 2
