"""Cartridges that attention reads from the dram tier in every step, on a real engine.

The engine's own boot self-test has passed on this path before any test here.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from cartridge_engine_ext.packed_layout import PACKED_WORKER
from tests.integration.fleet import BLOCK_SIZE, TOLERANCE, Fleet, at_once, document_tokens
from tests.integration.tiny_fleet import (
    IDS,
    LIVE,
    drop_prefix_cache,
    put_small,
    running_tiny_fleet,
)

pytestmark = pytest.mark.engine

NUM_TOKENS = 3 * BLOCK_SIZE + 7


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A tiny model's engine with `attend_in_place`, and memory for all documents."""
    with running_tiny_fleet(
        tmp_path_factory.mktemp("in-place"),
        ["--worker-cls", PACKED_WORKER],
        attend_in_place=True,
        dram_bytes=64 << 20,
        nvme_bytes=64 << 20,
    ) as running:
        yield running


def tokens(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """A document of the tiny model."""
    return document_tokens(num_tokens, seed=800 + seed, ids=IDS)


def test_in_place_equals_the_ordinary_prompt(engine: Fleet) -> None:
    """The same answer, from the dram tier, with nothing written to a block."""
    engine.put("plain", tokens(0), LIVE)
    ordinary = engine.complete(tokens(0) + LIVE)
    answers = [engine.complete(LIVE, ["plain@1"]) for _ in range(2)]
    for answer in answers:
        assert ordinary.difference(answer) <= TOLERANCE
        assert answer.receipt is not None
        assert answer.receipt["num_virtual_tokens"] == NUM_TOKENS
        assert (answer.receipt["num_loads"], answer.receipt["loaded_bytes"]) == (0, 0)
        assert answer.num_prompt_tokens == len(LIVE)
    assert answers[1].receipt is not None
    assert answers[1].receipt["items"][0]["tier"] == "dram"


def test_quantised_values_are_read_in_place(engine: Fleet) -> None:
    """K16/V8 answers as the same numbers in float32."""
    put_small(engine, "small", tokens(1))
    small = engine.complete(LIVE, ["small@1"])
    assert small.difference(engine.complete(LIVE, ["small-full@1"])) <= TOLERANCE
    assert small.logprobs != engine.complete(LIVE, ["small-source@1"]).logprobs


def test_compositions_share_segments(engine: Fleet) -> None:
    """Requests at the same time, over pairs in both orders, answer as each does alone."""
    for index in range(2):
        engine.put(f"shared-{index}", tokens(10 + index, 60), LIVE)
    orders: list[Sequence[int]] = [(0, 1), (1, 0), (0,), (1,), ()]
    calls = [
        partial(engine.complete, LIVE, [f"shared-{index}@1" for index in order], num_new_tokens=20)
        for order in orders
    ]
    alone = [call() for call in calls]
    for one, other in zip(alone, at_once(calls), strict=True):
        assert one.difference(other) <= TOLERANCE
    assert len({answer.logprobs for answer in alone}) == len(orders)


def test_preemption_loses_nothing(engine: Fleet) -> None:
    """A request whose live tokens are computed anew reads its Cartridge where it was."""
    engine.put("kept", tokens(20), LIVE)
    ordinary = engine.complete(tokens(20) + LIVE, num_new_tokens=40)

    def lose_all_blocks() -> None:
        url = f"{engine.engine_url}/reset_prefix_cache?reset_running_requests=true"
        assert engine.client.post(url).status_code == 200

    before = engine.metric("vllm:num_preemptions_total")
    answer = engine.stream(LIVE, ["kept@1"], num_new_tokens=40, after_five=lose_all_blocks)
    assert engine.metric("vllm:num_preemptions_total") > before, "nothing was preempted"
    assert ordinary.difference(answer) <= TOLERANCE


def test_a_live_prompt_is_shared_behind_the_same_cartridge_only(engine: Fleet) -> None:
    """Live blocks come from the prefix cache for one composition, and not for another."""
    prompt = tokens(30, 2 * BLOCK_SIZE + 3)
    for index in range(2):
        engine.put(f"behind-{index}", tokens(31 + index), LIVE)
    first = engine.complete(prompt, ["behind-0@1"])
    again = engine.complete(prompt, ["behind-0@1"])
    other = engine.complete(prompt, ["behind-1@1"])
    assert first.difference(again) <= TOLERANCE
    assert other.logprobs != first.logprobs
    drop_prefix_cache(engine)
    assert other.difference(engine.complete(prompt, ["behind-1@1"])) <= TOLERANCE
