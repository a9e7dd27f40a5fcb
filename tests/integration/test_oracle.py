"""The oracle: a Cartridge answers like the ordinary prompt that holds its document.

Every comparison is of logprobs, on one real engine; the canaries show that it would notice.
"""

from collections.abc import Callable
from functools import partial

import msgspec
import pytest
import torch

from cartridge_kernels.rope import default_inverse_frequencies, relocate_keys
from cartridge_proto.manifest import PositionLayout
from cartridge_proto.names import FIELD_CARTRIDGE_IDS, HEADER_DIGEST
from cartridge_router.demo.stack import MODEL_NAME
from tests.integration.fleet import (
    BLOCK_SIZE,
    LIVE_PROMPT,
    TOLERANCE,
    DenseReference,
    Fleet,
    at_once,
    document_tokens,
)

pytestmark = pytest.mark.engine

BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Layers, K and V, KV heads, head_dim, float32."""
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 5]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_cartridge_equals_ordinary_prompt_at_block_edges(fleet: Fleet, num_tokens: int) -> None:
    """At every length around a block's edge the answer is that of the ordinary prompt."""
    document = document_tokens(num_tokens, seed=num_tokens)
    fleet.put(f"edge-{num_tokens}", document)
    ordinary = fleet.complete(document + LIVE_PROMPT)
    injected = fleet.complete(LIVE_PROMPT, [f"edge-{num_tokens}@1"])
    assert ordinary.difference(injected) <= TOLERANCE
    assert injected.receipt is not None
    assert injected.receipt["num_virtual_tokens"] == num_tokens
    assert injected.num_prompt_tokens == len(LIVE_PROMPT), "usage counts the client's tokens only"


def test_concurrent_requests_do_not_see_each_other(fleet: Fleet) -> None:
    """Two Cartridges and a plain prompt at the same time answer as each does alone."""
    documents = [document_tokens(70, seed=100), document_tokens(45, seed=101)]
    for index, document in enumerate(documents):
        fleet.put(f"concurrent-{index}", document)
    ordinary = [fleet.complete(document + LIVE_PROMPT) for document in documents]
    ordinary.append(fleet.complete(LIVE_PROMPT))
    names = [["concurrent-0@1"], ["concurrent-1@1"], []]
    answers = at_once([partial(fleet.complete, LIVE_PROMPT, ids) for ids in names])
    for alone, together in zip(ordinary, answers, strict=True):
        assert alone.difference(together) <= TOLERANCE
    assert len({answer.logprobs for answer in answers}) == 3, "the three must differ at all"


def test_second_use_reuses_the_prefix_cache(fleet: Fleet) -> None:
    """Full blocks of a Cartridge stay in HBM: the second request loads only the partial tail.

    The probe of the new artifact came first, and shared nothing.
    """
    num_tokens = 2 * BLOCK_SIZE + 5
    document = document_tokens(num_tokens, seed=200)
    fleet.put("twice", document)
    first = fleet.complete(LIVE_PROMPT, ["twice@1"])
    second = fleet.complete(LIVE_PROMPT, ["twice@1"])
    assert first.receipt is not None
    assert second.receipt is not None
    assert first.receipt["items"][0]["tier"] == "remote"
    assert second.receipt["items"][0]["tier"] == "hbm"
    assert first.receipt["num_reused_tokens"] == 0
    assert first.receipt["loaded_bytes"] == num_tokens * BYTES_PER_TOKEN
    assert second.receipt["num_reused_tokens"] == 2 * BLOCK_SIZE
    assert second.receipt["loaded_bytes"] == 5 * BYTES_PER_TOKEN
    assert fleet.complete(document + LIVE_PROMPT).difference(second) <= TOLERANCE


def test_preempted_request_answers_the_same(fleet: Fleet) -> None:
    """Two requests that do not fit together: one is preempted, and both answer as alone."""
    num_new_tokens = 150
    documents = [document_tokens(1000, seed=300), document_tokens(1000, seed=301)]
    for index, document in enumerate(documents):
        fleet.put(f"long-{index}", document)
    ordinary = [
        fleet.complete(document + LIVE_PROMPT, num_new_tokens=num_new_tokens)
        for document in documents
    ]
    before = fleet.metric("vllm:num_preemptions_total")
    answers = at_once(
        [
            partial(fleet.complete, LIVE_PROMPT, ids, num_new_tokens=num_new_tokens)
            for ids in (["long-0@1"], ["long-1@1"])
        ]
    )
    assert fleet.metric("vllm:num_preemptions_total") > before, "nothing was preempted"
    for alone, together in zip(ordinary, answers, strict=True):
        assert alone.difference(together) <= TOLERANCE


def test_preempted_request_without_its_blocks_loads_again(fleet: Fleet) -> None:
    """When preemption also loses the cached blocks, the Cartridge is written a second time."""
    document = document_tokens(2 * BLOCK_SIZE + 5, seed=310)
    fleet.put("lost", document)
    ordinary = fleet.complete(document + LIVE_PROMPT, num_new_tokens=40)

    def lose_all_blocks() -> None:
        url = f"{fleet.engine_url}/reset_prefix_cache?reset_running_requests=true"
        assert fleet.client.post(url).status_code == 200

    before = fleet.metric("vllm:num_preemptions_total")
    answer = fleet.stream(LIVE_PROMPT, ["lost@1"], num_new_tokens=40, after_five=lose_all_blocks)
    assert fleet.metric("vllm:num_preemptions_total") > before, "nothing was preempted"
    assert answer.receipt is not None
    assert answer.receipt["num_loads"] == 2
    assert ordinary.difference(answer) <= TOLERANCE


@pytest.mark.parametrize("layout", list(PositionLayout))
def test_ordered_pair_equals_the_dense_reference(
    fleet: Fleet, dense_reference: DenseReference, layout: PositionLayout
) -> None:
    """In every layout a pair equals block-diagonal attention computed densely.

    Order changes the identity always, and the answer where it changes positions.
    """
    documents = {"one": document_tokens(41, seed=400), "other": document_tokens(77, seed=401)}
    names = {key: f"pair-{layout.replace('_', '-')}-{key}" for key in documents}
    for key, document in documents.items():
        built = fleet.put(f"{names[key]}-source", document).manifest
        composition = msgspec.structs.replace(built.composition, position_layout=layout)
        fleet.put_manifest(msgspec.structs.replace(built, name=names[key], composition=composition))
    answers = []
    for order in (["one", "other"], ["other", "one"]):
        answer = fleet.complete(LIVE_PROMPT, [f"{names[key]}@1" for key in order])
        segments = [documents[key] for key in order]
        choices, logprobs = dense_reference.logprobs(
            segments, LIVE_PROMPT, answer.token_ids, layout
        )
        assert tuple(choices) == answer.token_ids
        differences = [abs(a - b) for a, b in zip(logprobs, answer.logprobs, strict=True)]
        assert max(differences) <= TOLERANCE
        answers.append(answer)
    assert answers[0].headers[HEADER_DIGEST] != answers[1].headers[HEADER_DIGEST]
    is_order_free = answers[0].difference(answers[1]) <= TOLERANCE
    assert is_order_free == (layout is not PositionLayout.SEQUENTIAL)


Mutation = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _wrong_offset(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return relocate_keys(key, 1, default_inverse_frequencies(100_000.0, 64)), value


def _dropped_last(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key[:, :-1], value[:, :-1]


def _scaled_values(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return key, value * 1.02


@pytest.mark.parametrize("mutation", [_wrong_offset, _dropped_last, _scaled_values])
def test_oracle_catches_a_damaged_cartridge(fleet: Fleet, mutation: Mutation) -> None:
    """Canary: the comparison fails for a small damage that leaves a valid artifact."""
    document = document_tokens(BLOCK_SIZE + 9, seed=500)
    name = f"mutant{mutation.__name__.replace('_', '-')}"
    _put_mutant(fleet, name, document, mutation)
    ordinary = fleet.complete(document + LIVE_PROMPT)
    damaged = fleet.complete(LIVE_PROMPT, [f"{name}@1"])
    assert ordinary.difference(damaged) > TOLERANCE


@pytest.mark.parametrize("mutation", [_wrong_offset, _dropped_last, _scaled_values])
def test_a_damaged_cartridge_is_quarantined(fleet: Fleet, mutation: Mutation) -> None:
    """With the probe of the undamaged one it does not serve a single request on this engine."""
    # Full blocks only, so that a prefix in HBM would be served without a look at anything.
    document = document_tokens(2 * BLOCK_SIZE, seed=502)
    name = f"quarantined{mutation.__name__.replace('_', '-')}"
    _put_mutant(fleet, name, document, mutation, has_own_probe=False)
    for _ in range(2):
        request = {"model": MODEL_NAME, "prompt": LIVE_PROMPT, FIELD_CARTRIDGE_IDS: [f"{name}@1"]}
        response = fleet.post("/v1/completions", request)
        assert response.status_code == 409, response.text
        assert "probe step" in response.json()["error"]["message"]


def test_unmutated_copy_passes_the_oracle(fleet: Fleet) -> None:
    """Canary's control: the same rewriting without a damage is not noticed."""
    document = document_tokens(BLOCK_SIZE + 9, seed=501)
    _put_mutant(fleet, "mutant-none", document, lambda key, value: (key, value))
    ordinary = fleet.complete(document + LIVE_PROMPT)
    assert ordinary.difference(fleet.complete(LIVE_PROMPT, ["mutant-none@1"])) <= TOLERANCE


def _put_mutant(
    fleet: Fleet,
    name: str,
    document: list[int],
    mutation: Mutation,
    *,
    has_own_probe: bool = True,
) -> None:
    """A valid artifact whose tensors went through a mutation.

    With a probe of its own what it answers is right for it; else the probe is the source's.
    """
    built = fleet.put(f"{name}-source", document).manifest
    tensors = fleet.tensors(built)
    mutated = {}
    for layer in range(built.geometry.num_layers):
        key, value = mutation(tensors[f"layers.{layer}.k"], tensors[f"layers.{layer}.v"])
        mutated[f"layers.{layer}.k"], mutated[f"layers.{layer}.v"] = key, value
    probe = fleet.probe_behind(mutated, built) if has_own_probe else built.probe
    fleet.put_tensors(name, built, mutated, probe)
