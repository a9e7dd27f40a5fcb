"""Two tensor-parallel workers: each writes its own heads, and the answer is the ordinary one.

A tiny random model, whose heads can be halved. The engine runs without its prefix cache in one of
the two cases, so that every request loads everything.
"""

from collections.abc import Iterator

import pytest

from cartridge_engine_ext.packed_layout import PACKED_WORKER
from tests.engine_ext.tiny_model import MAX_POSITIONS, save_tiny_model
from tests.integration.fleet import (
    BLOCK_SIZE,
    TOLERANCE,
    DenseReference,
    Fleet,
    document_tokens,
)
from tests.integration.running_fleet import running_fleet
from tests.integration.tiny_fleet import IDS, LIVE, put_small

pytestmark = pytest.mark.engine

BYTES_OF_BOTH = 2 * 2 * 2 * 32 * 4
"""Bytes of one position that two workers write: layers, workers, K and V, head_dim, float32."""
NAMED = {"one": 7, "other": 8}

CASES = {
    "two heads": (2, ["--enable-prefix-caching"]),
    "one head for both": (1, ["--no-enable-prefix-caching"]),
}


@pytest.fixture(scope="module", params=list(CASES.values()), ids=list(CASES))
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, bool]]:
    """An engine of two workers, and whether it has a prefix cache."""
    num_kv_heads, arguments = request.param
    work = tmp_path_factory.mktemp("tensor-parallel")
    model = save_tiny_model(work / "model", num_kv_heads=num_kv_heads, head_dim=32)
    arguments = [*arguments, "--tensor-parallel-size", "2", "--block-size", str(BLOCK_SIZE)]
    arguments += ["--worker-cls", PACKED_WORKER]
    # Without probes, which would write the blocks before the first request does.
    with running_fleet(
        work, model, max_model_len=MAX_POSITIONS, arguments=arguments, with_probe=False
    ) as fleet:
        yield fleet, "--enable-prefix-caching" in arguments


def test_two_workers_answer_as_the_ordinary_prompt(pair: tuple[Fleet, bool]) -> None:
    """At lengths around a block's edge, cold and again; the bytes are those of all heads."""
    fleet, has_prefix_cache = pair
    for num_tokens in (1, BLOCK_SIZE, 2 * BLOCK_SIZE + 5):
        document = document_tokens(num_tokens, seed=num_tokens, ids=IDS)
        fleet.put(f"tp-{num_tokens}", document, LIVE)
        ordinary = fleet.complete(document + LIVE)
        for is_again in (False, True):
            injected = fleet.complete(LIVE, [f"tp-{num_tokens}@1"])
            assert ordinary.difference(injected) <= TOLERANCE
            assert injected.receipt is not None
            num_reused = num_tokens // BLOCK_SIZE * BLOCK_SIZE
            expected = num_reused if is_again and has_prefix_cache else 0
            assert injected.receipt["num_reused_tokens"] == expected
            written = BYTES_OF_BOTH * (num_tokens - expected)
            assert injected.receipt["loaded_bytes"] == written


def test_an_ordered_pair_moves_the_heads_of_each_worker(pair: tuple[Fleet, bool]) -> None:
    """A second Cartridge at an offset equals the dense reference, in both orders."""
    fleet, _ = pair
    dense = DenseReference(fleet.model_dir)
    documents = {name: document_tokens(41, seed=seed, ids=IDS) for name, seed in NAMED.items()}
    for name, document in documents.items():
        fleet.put(f"tp-{name}", document, LIVE)
    answers = []
    for order in (["one", "other"], ["other", "one"]):
        answer = fleet.complete(LIVE, [f"tp-{name}@1" for name in order])
        segments = [documents[name] for name in order]
        choices, logprobs = dense.logprobs(segments, LIVE, answer.token_ids)
        assert tuple(choices) == answer.token_ids
        differences = [abs(a - b) for a, b in zip(logprobs, answer.logprobs, strict=True)]
        assert max(differences) <= TOLERANCE
        answers.append(answer)
    assert answers[0].logprobs != answers[1].logprobs


def test_each_worker_packs_its_own_heads(pair: tuple[Fleet, bool]) -> None:
    """Packed bytes and their scales, alone and behind another Cartridge, equal plain slots."""
    fleet, has_prefix_cache = pair
    put_small(fleet, "tp-small", document_tokens(3 * BLOCK_SIZE + 7, seed=9, ids=IDS))
    for is_again in (False, True):
        packed = fleet.complete(LIVE, ["tp-small@1"])
        assert packed.difference(fleet.complete(LIVE, ["tp-small-full@1"])) <= TOLERANCE
        assert packed.receipt is not None
        # Two heads of two layers; with one head, both workers write it.
        rows, scales = (3 * BLOCK_SIZE + 7) * 32 * 3, 4 * 32
        written = 0 if is_again and has_prefix_cache else 2 * 2 * (rows + scales)
        assert packed.receipt["loaded_bytes"] == written
    assert packed.logprobs != fleet.complete(LIVE, ["tp-small-source@1"]).logprobs
