"""Packed prefixes on a real engine: K16/V8 and BF16 bytes in vLLM's blocks, fewer than positions.

The oracle is the same numbers in plain slots, where the platform's own kernel reads them, and
transformers beside that.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import torch

from cartridge_engine_ext.quantise import Keys, Quantiser, Recipe, Values
from cartridge_engine_ext.reference_probe import full_layers
from cartridge_kernels.rope import default_inverse_frequencies
from cartridge_proto.composition import (
    CompositionItem,
    CompositionMessage,
    OnMiss,
    composition_digest,
    layout_offsets,
    model_fingerprint,
)
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest, PositionLayout, manifest_digest
from cartridge_proto.names import FIELD_CARTRIDGE_IDS
from cartridge_router.demo.stack import MODEL_NAME
from tests.integration.fleet import (
    CHUNK_TOKENS,
    LIVE_PROMPT,
    MAX_MODEL_LEN,
    NUM_NEW_TOKENS,
    TOLERANCE,
    Answer,
    Fleet,
    PrefixReference,
    at_once,
    document_tokens,
)

pytestmark = pytest.mark.engine

HEADS, DIM, LAYERS = 3, 64, 30
THETA = 100_000.0
K16V8 = Recipe(Keys.BFLOAT16, Values.E4M3)
BF16 = Recipe(Keys.BFLOAT16, Values.BFLOAT16)
NUM_TOKENS = 200


@pytest.fixture(scope="module")
def quantiser(fleet: Fleet) -> Quantiser:
    """The one of `cartridge quantize`."""
    return Quantiser(model_dir=fleet.model_dir, store=fleet.store, say=lambda line: None)


@pytest.fixture(scope="module")
def reference(fleet: Fleet) -> PrefixReference:
    """Transformers on given keys and values."""
    return PrefixReference(fleet.builder._model, default_inverse_frequencies(THETA, DIM))


def put(
    fleet: Fleet, quantiser: Quantiser, name: str, recipe: Recipe, tokens: Sequence[int]
) -> Manifest:
    """A Cartridge `name@1` of 16-bit keys, and `name-plain@1` with the same numbers in float32."""
    source = fleet.put(f"{name}-exact", tokens)
    built = quantiser.quantise(Digest(source.digest), recipe, name=name, version="1")
    fleet.wait_for_catalog(f"{name}@1", built.digest)
    fleet.put_plain(f"{name}-plain", source.manifest, fleet.tensors(built.manifest))
    return built.manifest


def loaded_bytes(answer: Answer) -> int:
    """Bytes that a request's load wrote."""
    assert answer.receipt is not None
    size: int = answer.receipt["loaded_bytes"]
    return size


@pytest.mark.parametrize("recipe", [K16V8, BF16], ids=["k16v8", "bf16"])
def test_packed_equals_the_same_numbers_in_plain_slots(
    fleet: Fleet, quantiser: Quantiser, recipe: Recipe
) -> None:
    """Attention over packed bytes answers as the platform's kernel over plain slots."""
    name = f"packed-{recipe.values.value}"
    put(fleet, quantiser, name, recipe, document_tokens(NUM_TOKENS, seed=600))
    packed = fleet.complete(LIVE_PROMPT, [f"{name}@1"])
    plain = fleet.complete(LIVE_PROMPT, [f"{name}-plain@1"])
    assert packed.difference(plain) <= TOLERANCE
    # The exact numbers are another answer: the comparison above can tell.
    assert fleet.complete(LIVE_PROMPT, [f"{name}-exact@1"]).logprobs != packed.logprobs
    value_bytes, scale_bytes = (1, 4 * DIM) if recipe is K16V8 else (2, 0)
    per_head = NUM_TOKENS * DIM * (2 + value_bytes) + scale_bytes
    assert loaded_bytes(packed) == LAYERS * HEADS * per_head
    assert loaded_bytes(plain) == LAYERS * HEADS * NUM_TOKENS * DIM * 8


def test_a_composition_of_two_k16v8_and_one_bf16(
    fleet: Fleet, quantiser: Quantiser, reference: PrefixReference
) -> None:
    """Three Cartridges of two representations in one request equal the dense model on them.

    Each is moved to its place by the rotation of its keys. HBM bytes: K16/V8 is 75 % of BF16, but
    for its scales.
    """
    lengths = [200, 133, 301]
    names = [f"triple-{index}" for index in range(3)]
    manifests = [
        put(fleet, quantiser, name, recipe, document_tokens(length, seed=610 + length))
        for name, recipe, length in zip(names, [K16V8, BF16, K16V8], lengths, strict=True)
    ]
    answer = fleet.complete(LIVE_PROMPT, [f"{name}@1" for name in names])
    parts = [full_layers(fleet.tensors(manifest), LAYERS) for manifest in manifests]
    choices, logprobs = reference.logprobs(parts, LIVE_PROMPT, answer.token_ids)
    assert tuple(choices) == answer.token_ids
    differences = [abs(a - b) for a, b in zip(logprobs, answer.logprobs, strict=True)]
    assert max(differences) <= TOLERANCE
    per_token = HEADS * DIM * LAYERS
    k16v8 = (lengths[0] + lengths[2]) * 3 * per_token + 2 * 4 * DIM * HEADS * LAYERS
    assert loaded_bytes(answer) == k16v8 + lengths[1] * 4 * per_token
    # The same in another order is another answer: the comparison can tell.
    other = fleet.complete(LIVE_PROMPT, [f"{name}@1" for name in reversed(names)])
    assert answer.difference(other) > TOLERANCE


def test_packed_blocks_are_shared_through_the_prefix_cache(
    fleet: Fleet, quantiser: Quantiser
) -> None:
    """A second request loads nothing, not even a tail, and its tier is hbm."""
    put(fleet, quantiser, "packed-twice", K16V8, document_tokens(NUM_TOKENS, seed=620))
    first = fleet.complete(LIVE_PROMPT, ["packed-twice@1"])
    second = fleet.complete(LIVE_PROMPT, ["packed-twice@1"])
    assert second.receipt is not None
    assert second.receipt["items"][0]["tier"] == "hbm"
    assert second.receipt["num_loads"] == 0
    assert second.receipt["num_reused_tokens"] == NUM_TOKENS
    assert second.receipt["num_virtual_tokens"] == NUM_TOKENS
    assert first.difference(second) <= TOLERANCE


def test_packed_and_ordinary_requests_in_one_batch(fleet: Fleet, quantiser: Quantiser) -> None:
    """Readers of one prefix, of another, of plain slots and a plain prompt answer as alone."""
    put(fleet, quantiser, "batch-a", K16V8, document_tokens(NUM_TOKENS, seed=630))
    put(fleet, quantiser, "batch-b", BF16, document_tokens(NUM_TOKENS + 31, seed=631))
    longer = document_tokens(50, seed=632)
    calls = [
        partial(fleet.complete, LIVE_PROMPT, ["batch-a@1"], num_new_tokens=24),
        partial(fleet.complete, longer, ["batch-a@1"], num_new_tokens=24),
        partial(fleet.complete, LIVE_PROMPT, ["batch-b@1"], num_new_tokens=24),
        partial(fleet.complete, LIVE_PROMPT, ["batch-a-plain@1"], num_new_tokens=24),
        partial(fleet.complete, longer, num_new_tokens=24),
    ]
    alone = [call() for call in calls]
    together = at_once(calls)
    for one, other in zip(alone, together, strict=True):
        assert one.difference(other) <= TOLERANCE
    assert len({answer.token_ids for answer in together}) >= 4, "they must differ at all"


def test_a_long_live_prompt_comes_in_chunks(fleet: Fleet, quantiser: Quantiser) -> None:
    """A prompt of several steps behind a packed prefix answers as behind plain slots."""
    put(fleet, quantiser, "chunks", K16V8, document_tokens(NUM_TOKENS, seed=640))
    prompt = document_tokens(2 * CHUNK_TOKENS + 77, seed=641)
    packed = fleet.complete(prompt, ["chunks@1"])
    plain = fleet.complete(prompt, ["chunks-plain@1"])
    assert packed.difference(plain) <= TOLERANCE


def test_several_answers_to_one_prompt(fleet: Fleet, quantiser: Quantiser) -> None:
    """With `n` every choice reads the packed prefix."""
    put(fleet, quantiser, "choices", K16V8, document_tokens(NUM_TOKENS, seed=650))
    greedy = fleet.complete(LIVE_PROMPT, ["choices@1"])
    request = {
        "model": MODEL_NAME,
        "prompt": LIVE_PROMPT,
        "max_tokens": NUM_NEW_TOKENS,
        "temperature": 1,
        "top_k": 1,
        "ignore_eos": True,
        "n": 3,
        "return_token_ids": True,
        FIELD_CARTRIDGE_IDS: ["choices@1"],
    }
    choices = fleet.post("/v1/completions", request).json()["choices"]
    assert [tuple(choice["token_ids"]) for choice in choices] == [greedy.token_ids] * 3


def test_preempted_packed_requests_load_again(fleet: Fleet, quantiser: Quantiser) -> None:
    """When preemption loses the blocks, the packed prefix is written a second time."""
    put(fleet, quantiser, "packed-lost", K16V8, document_tokens(NUM_TOKENS, seed=660))
    ordinary = fleet.complete(LIVE_PROMPT, ["packed-lost-plain@1"], num_new_tokens=40)

    def lose_all_blocks() -> None:
        url = f"{fleet.engine_url}/reset_prefix_cache?reset_running_requests=true"
        assert fleet.client.post(url).status_code == 200

    before = fleet.metric("vllm:num_preemptions_total")
    answer = fleet.stream(
        LIVE_PROMPT, ["packed-lost@1"], num_new_tokens=40, after_five=lose_all_blocks
    )
    assert fleet.metric("vllm:num_preemptions_total") > before, "nothing was preempted"
    assert answer.receipt is not None
    assert answer.receipt["num_loads"] == 2
    assert ordinary.difference(answer) <= TOLERANCE


def test_an_answer_ends_where_positions_end(fleet: Fleet, quantiser: Quantiser) -> None:
    """The context limit counts positions, of which a packed prefix has more than slots."""
    put(fleet, quantiser, "packed-limit", K16V8, document_tokens(1000, seed=670))
    prompt = document_tokens(MAX_MODEL_LEN - 1000 - 5, seed=671)
    answer = fleet.complete(prompt, ["packed-limit@1"], num_new_tokens=40)
    assert len(answer.token_ids) == 5
    request = {"model": MODEL_NAME, "prompt": [*prompt, *LIVE_PROMPT]}
    refused = fleet.post("/v1/completions", {**request, FIELD_CARTRIDGE_IDS: ["packed-limit@1"]})
    assert refused.status_code == 422


Mutation = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def _dropped_scales(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.ones_like(tensor) if name.endswith("_scale") else tensor
        for name, tensor in tensors.items()
    }


def _neighbours_scales(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.roll(1, 0) if name.endswith("_scale") else tensor
        for name, tensor in tensors.items()
    }


def _one_layers_scales(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The scales of one layer a quarter too large."""
    return {**tensors, "layers.7.v_scale": tensors["layers.7.v_scale"] * 1.25}


def _transposed_keys(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keys of one layer and head in another order than their values."""
    keys = tensors["layers.3.k"].clone()
    keys[0] = keys[0].flip(0)
    return {**tensors, "layers.3.k": keys}


@pytest.mark.parametrize(
    "mutation", [_dropped_scales, _neighbours_scales, _one_layers_scales, _transposed_keys]
)
def test_the_oracle_catches_damaged_packed_bytes(
    fleet: Fleet, quantiser: Quantiser, mutation: Mutation
) -> None:
    """Canary: faults of quantised artifacts differ from plain slots by more than the tolerance."""
    name = "packed-mutant" + mutation.__name__.replace("_", "-")
    manifest = put(fleet, quantiser, name, K16V8, document_tokens(NUM_TOKENS, seed=680))
    plain = fleet.complete(LIVE_PROMPT, [f"{name}-plain@1"])
    mutated = mutation(fleet.tensors(manifest))
    probe = fleet.probe_behind(mutated, manifest)
    fleet.put_tensors(f"{name}-damaged", manifest, mutated, probe)
    assert fleet.complete(LIVE_PROMPT, [f"{name}-damaged@1"]).difference(plain) > TOLERANCE


@pytest.mark.parametrize("suffix", ["", "-plain"], ids=["packed", "plain"])
def test_a_hidden_cartridge_is_as_if_it_were_not_loaded(
    fleet: Fleet, quantiser: Quantiser, suffix: str
) -> None:
    """A request that hides the second of three answers as one that names the others only."""
    names = [f"seen{suffix}-{index}" for index in range(3)]
    built = [
        put(fleet, quantiser, name, K16V8, document_tokens(120 + index, seed=690 + index))
        for index, name in enumerate(names)
    ]
    if suffix:
        built = [fleet.store.read_manifest(fleet.store.resolve(f"{n}-plain@1")) for n in names]
    hidden = fleet.complete_with(LIVE_PROMPT, message_of(built, [True, False, True]))
    named = fleet.complete_with(LIVE_PROMPT, message_of([built[0], built[2]], [True, True]))
    whole = fleet.complete_with(LIVE_PROMPT, message_of(built, [True, True, True]))
    assert hidden.difference(named) <= TOLERANCE
    assert hidden.difference(whole) > TOLERANCE


def message_of(manifests: Sequence[Manifest], visibility: Sequence[bool]) -> dict[str, Any]:
    """What a gateway that hides artifacts would send: one behind the other."""
    lengths = [m.num_tokens if seen else 0 for m, seen in zip(manifests, visibility, strict=True)]
    items = [
        CompositionItem(
            digest=manifest_digest(manifest), num_tokens=manifest.num_tokens, offset=offset
        )
        for manifest, offset in zip(
            manifests, layout_offsets(PositionLayout.SEQUENTIAL, lengths), strict=True
        )
    ]
    composition = composition_digest(
        scope="public",
        layout=PositionLayout.SEQUENTIAL,
        items=items,
        visibility=visibility,
        fingerprint=model_fingerprint(manifests[0].model),
    )
    message = CompositionMessage(
        v=1,
        request_id="hidden",
        composition=composition,
        scope="public",
        layout=PositionLayout.SEQUENTIAL,
        items=items,
        visibility=list(visibility),
        deadline_ms=60_000,
        on_miss=OnMiss.FAIL,
    )
    found: dict[str, Any] = msgspec.to_builtins(message)
    return found
