"""Models whose layers have windows or latents: a Cartridge answers as the ordinary prompt.

Tiny random models, one engine for each kind in turn.
"""

import json
from collections.abc import Iterator

import pytest

from tests.engine_ext.tiny_kinds import WINDOW, save_tiny_kind
from tests.engine_ext.tiny_model import MAX_POSITIONS
from tests.integration.fleet import (
    BLOCK_SIZE,
    TOLERANCE,
    DenseReference,
    Fleet,
    document_tokens,
)
from tests.integration.running_fleet import running_fleet
from tests.integration.tiny_fleet import IDS, LIVE, drop_prefix_cache, tier_of

pytestmark = pytest.mark.engine

LENGTHS = (1, 2 * BLOCK_SIZE, 7 * BLOCK_SIZE, 3 * WINDOW + 5)
"""One position; whole blocks, within a window and not; windows that begin and end within blocks."""
BYTES_PER_TOKEN = {
    "windows_and_full": 4 * 2 * 2 * 32 * 4,
    "windows_only": 2 * 2 * 2 * 32 * 4,
    "latents_v3": 2 * (512 + 64) * 4,
}
"""Layers, K and V, KV heads and head_dim, or the latent, float32."""


@pytest.fixture(scope="module", params=list(BYTES_PER_TOKEN))
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of layers of the module's engine."""
    return str(request.param)


@pytest.fixture(scope="module")
def engine(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """An engine of that kind."""
    work = tmp_path_factory.mktemp(kind)
    model = save_tiny_kind(work / "model", kind)
    arguments = ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "48"]
    if kind == "latents_v3":
        # vLLM's own kernel for this takes a wrong stride on CPUs (docs/compatibility.md).
        arguments += ["--compilation-config", json.dumps({"custom_ops": ["-rotary_embedding"]})]
    # Without probes, which would write the blocks before the first request does.
    with running_fleet(
        work, model, max_model_len=MAX_POSITIONS, arguments=arguments, with_probe=False
    ) as fleet:
        yield fleet


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_it_answers_as_the_ordinary_prompt(engine: Fleet, kind: str, num_tokens: int) -> None:
    """Cold, again (from HBM where there is a prefix cache), and when that was dropped.

    Where every layer has a window, only what the windows of live tokens reach is written. Behind
    the last full block vLLM then keeps too little to find the prefix again.
    """
    has_prefix_cache = not kind.startswith("latents")  # which vLLM switches off on CPUs for them
    document = document_tokens(num_tokens, seed=num_tokens, ids=IDS)
    engine.put(f"kind-{num_tokens}", document, LIVE)
    ordinary = engine.complete(document + LIVE)
    for state in ("cold", "again", "dropped"):
        if state == "dropped":
            drop_prefix_cache(engine)
        injected = engine.complete(LIVE, [f"kind-{num_tokens}@1"])
        assert ordinary.difference(injected) <= TOLERANCE, state
        receipt = injected.receipt
        assert receipt is not None
        is_found = has_prefix_cache and not (kind == "windows_only" and num_tokens % BLOCK_SIZE)
        is_warm = state == "again" and is_found
        num_reused = num_tokens // BLOCK_SIZE * BLOCK_SIZE if is_warm else 0
        num_skipped = 0
        if kind == "windows_only":
            num_skipped = max(0, num_tokens - WINDOW + 1) // BLOCK_SIZE * BLOCK_SIZE
        assert receipt["num_reused_tokens"] == num_reused
        num_written = num_tokens - max(num_reused, num_skipped)
        assert receipt["loaded_bytes"] == num_written * BYTES_PER_TOKEN[kind]
        if num_tokens % BLOCK_SIZE == 0:
            expected = {"cold": "remote", "again": "hbm", "dropped": "dram"}[state]
            assert tier_of(receipt) == (expected if has_prefix_cache or state == "cold" else "dram")


def test_a_pair_equals_the_dense_reference(engine: Fleet) -> None:
    """A second Cartridge at an offset: keys of every layer move by their own rotary embedding."""
    dense = DenseReference(engine.model_dir)
    documents = {
        name: document_tokens(WINDOW + 41, seed=seed, ids=IDS)
        for name, seed in (("one", 7), ("other", 8))
    }
    for name, document in documents.items():
        engine.put(f"kind-{name}", document, LIVE)
    for order in (["one", "other"], ["other", "one"]):
        answer = engine.complete(LIVE, [f"kind-{name}@1" for name in order])
        segments = [documents[name] for name in order]
        choices, logprobs = dense.logprobs(segments, LIVE, answer.token_ids)
        assert tuple(choices) == answer.token_ids
        differences = [abs(a - b) for a, b in zip(logprobs, answer.logprobs, strict=True)]
        assert max(differences) <= TOLERANCE


@pytest.mark.parametrize("layer", [0, 1])
def test_oracle_catches_a_damaged_layer(engine: Fleet, layer: int) -> None:
    """Canary: keys of a single layer that are off by 2 % are seen, whatever kind it is of."""
    document = document_tokens(WINDOW + 9, seed=500 + layer, ids=IDS)
    built = engine.put(f"whole-{layer}", document, LIVE).manifest
    tensors = engine.tensors(built)
    ordinary = engine.complete(document + LIVE)
    for name, factor in ((f"copied-{layer}", 1.0), (f"damaged-{layer}", 1.02)):
        changed = {f"layers.{layer}.k": tensors[f"layers.{layer}.k"] * factor}
        engine.put_tensors(name, built, {**tensors, **changed}, built.probe)
        difference = ordinary.difference(engine.complete(LIVE, [f"{name}@1"]))
        assert (difference <= TOLERANCE) == (factor == 1.0)
