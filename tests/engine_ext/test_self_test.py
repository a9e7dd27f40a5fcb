"""The boot oracle: passes an engine that is right, and no engine that is wrong or cannot tell."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
import torch

from cartridge_engine_ext.artifact_pool import Artifact, tensor_view
from cartridge_engine_ext.errors import SelfTestFailed
from cartridge_engine_ext.layout_probe import Captured
from cartridge_engine_ext.sealed_memory import map_memory
from cartridge_engine_ext.self_test import (
    NUM_LIVE_TOKENS,
    NUM_NEW_TOKENS,
    SELF_TEST_SCOPE,
    TOLERANCES,
    Answer,
    Subject,
    Verdict,
    full_lengths,
    quick_lengths,
    run_packed_test,
    run_self_test,
    self_test_prompt,
)
from cartridge_kernels.rope import default_inverse_frequencies, relocate_keys
from cartridge_kernels.scaled_values import dequantise_values
from cartridge_proto.composition import decode_message
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import encode_manifest
from tests.proto.sample_artifact import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_LAYERS,
    engine_of,
    sample_artifact,
)

ENGINE = engine_of(sample_artifact()[0])
VOCAB_SIZE = 1000
FREQUENCIES = default_inverse_frequencies(10_000.0, HEAD_DIM)

Damage = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


Relocate = Callable[[int, torch.Tensor, int], torch.Tensor]


def moved(layer: int, keys: torch.Tensor, num_positions: int) -> torch.Tensor:
    """The engine's own rotation."""
    return relocate_keys(keys, num_positions, FREQUENCIES)


def undamaged(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inject what was adopted."""
    return key, value


@dataclass
class FakeEngine:
    """A tiny causal attention model: answers depend on every key, value and position before them.

    `damage` is done to what is injected, `misread` to scales of packed values. `is_deaf` ignores
    the prefix altogether. `relocate` is how the extension moves keys, `rotate` how the engine's
    layers do.
    """

    dtype: torch.dtype = torch.float32
    damage: Damage = undamaged
    misread: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    is_deaf: bool = False
    relocate: Relocate = moved
    rotate: Relocate = moved
    adopted: dict[Digest, Artifact] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def rows(self, tokens: list[int], start: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys (rotated) and values of tokens at positions from `start`, by layer."""
        found = []
        for layer in range(NUM_LAYERS):
            keys, values = [], []
            for place, token in enumerate(tokens):
                generator = torch.Generator().manual_seed(token * NUM_LAYERS + layer)
                raw, value = torch.randn(2, NUM_KV_HEADS, 1, HEAD_DIM, generator=generator)
                keys.append(self.rotate(layer, raw, start + place))
                values.append(value)
            found.append((torch.cat(keys, 1).to(self.dtype), torch.cat(values, 1).to(self.dtype)))
        return found

    def answer(self, prefix: Captured, live: list[int]) -> Answer:
        """Greedy tokens after a prefix of keys and values and some live tokens."""
        length = prefix[0][0].shape[1] if prefix else 0
        tokens, chosen, logprobs = list(live), [], []
        output = torch.randn(
            NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM, 50, generator=torch.Generator().manual_seed(3)
        )
        for _ in range(NUM_NEW_TOKENS):
            mixed = []
            for layer, own in enumerate(self.rows(tokens, length)):
                before = [] if self.is_deaf else prefix[layer : layer + 1]
                key, value = (torch.cat(rows, 1) for rows in zip(*before, own, strict=True))
                query = key[:, -1:].to(torch.float32)
                weights = torch.softmax(query @ key.to(torch.float32).transpose(1, 2), -1)
                mixed.append((weights @ value.to(torch.float32)).reshape(-1))
            scores = torch.log_softmax(torch.cat(mixed) @ output, -1)
            best = int(scores.argmax())
            chosen.append(best)
            logprobs.append(float(scores[best]))
            tokens.append(best)
        return Answer(tuple(chosen), tuple(logprobs))

    def capture(self, prompt: list[int], num_tokens: int) -> tuple[Answer, Captured]:
        """Answer an ordinary prompt and read its beginning back."""
        prefix = self.rows(prompt[:num_tokens], 0)
        return self.answer(prefix, prompt[num_tokens:]), prefix

    def complete(self, prompt: list[int], message: dict[str, Any] | None) -> Answer:
        """Answer a prompt after the injected artifact."""
        assert message is not None
        self.messages.append(message)
        artifact = self.adopted[Digest(message["items"][0]["digest"])]
        return self.answer([self.damage(*self.layer(artifact, i)) for i in range(2)], prompt)

    def layer(self, artifact: Artifact, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value of a layer, from the artifact's sealed memory."""
        tensors = [artifact.manifest.tensors[f"layers.{layer}.{part}"] for part in ("k", "v")]
        buffer = memoryview(map_memory(artifact.memories[tensors[0].blob].reference))
        key, value = (
            tensor_view(buffer, tensor.dtype, tensor.shape, *tensor.byte_range)
            for tensor in tensors
        )
        scaled = artifact.manifest.tensors.get(f"layers.{layer}.v_scale")
        if scaled is not None:
            scale = tensor_view(buffer, scaled.dtype, scaled.shape, *scaled.byte_range)
            value = dequantise_values(value, self.misread(scale))
        return key, value

    def adopt(self, artifact: Artifact) -> None:
        """Make an artifact usable."""
        self.adopted[artifact.digest] = artifact

    def discard(self, digest: Digest) -> None:
        """Take it away."""
        self.adopted.pop(digest).close()

    def run(self, num_tokens: int | None = None) -> Verdict:
        """The self-test of this engine; nothing may stay adopted."""
        num_tokens = num_tokens or quick_lengths(ENGINE.block_size)[0]
        try:
            return run_self_test(self.subject, num_tokens, self.relocate)
        finally:
            assert self.adopted == {}

    def run_packed(self) -> float:
        """The packed self-test of this engine; nothing may stay adopted."""
        try:
            return run_packed_test(self.subject)
        finally:
            assert self.adopted == {}

    @property
    def subject(self) -> Subject:
        """This engine."""
        return Subject(
            engine=ENGINE,
            vocab_size=VOCAB_SIZE,
            complete=self.complete,
            capture=self.capture,
            adopt=self.adopt,
            discard=self.discard,
        )


# --- verdicts ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_engine_passes(dtype: torch.dtype) -> None:
    """An engine that injects what it read back answers alike, in every KV dtype."""
    assert FakeEngine(dtype).run() == Verdict(0.0, None)


def test_an_untried_vllm_is_tested_at_every_block_edge() -> None:
    """All lengths of the full self-test can be run, and the quick one's kind is among them."""
    lengths = full_lengths(ENGINE.block_size)
    assert min(lengths) >= 2
    assert {length % ENGINE.block_size for length in lengths} >= {0, 1, ENGINE.block_size - 1}
    for num_tokens in lengths:
        assert FakeEngine().run(num_tokens) == Verdict(0.0, None)


def shifted(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys one position too far."""
    return relocate_keys(key, 1, FREQUENCIES), value


def shortened(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Without the last position."""
    return key[:, :-1], value[:, :-1]


def scaled(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values two percent too large."""
    return key, value * 1.02


def swapped(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values exchanged."""
    return value, key


@pytest.mark.parametrize("damage", [shifted, shortened, scaled, swapped])
def test_a_wrong_engine_fails(damage: Damage) -> None:
    """A wrong offset, a lost position, wrong values or exchanged tensors are each noticed."""
    with pytest.raises(SelfTestFailed, match="injected prefix: logprobs differ"):
        FakeEngine(damage=damage).run()


def no_number(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values that are no numbers."""
    return key, value * torch.nan


def test_what_is_no_number_passes_nothing() -> None:
    """A comparison with NaN is false both ways: neither is a pass."""
    with pytest.raises(SelfTestFailed, match="injected prefix"):
        FakeEngine(damage=no_number).run()

    def lost(layer: int, keys: torch.Tensor, num_positions: int) -> torch.Tensor:
        return keys * torch.nan

    assert FakeEngine(relocate=lost).run().immovable is not None


def test_an_oracle_that_cannot_notice_damage_fails() -> None:
    """An engine whose answers do not depend on the prefix proves nothing, and does not pass."""
    with pytest.raises(SelfTestFailed, match="without its last position gave the same answer"):
        FakeEngine(is_deaf=True).run()


def unmoved(layer: int, keys: torch.Tensor, num_positions: int) -> torch.Tensor:
    """No rotation at all."""
    return keys


def wrong_theta(layer: int, keys: torch.Tensor, num_positions: int) -> torch.Tensor:
    """The rotation of another base."""
    return relocate_keys(keys, num_positions, default_inverse_frequencies(20_000.0, HEAD_DIM))


def wrong_pairs(layer: int, keys: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Neighbouring channels paired, as some models do, where this one pairs the halves."""
    order = [*range(0, HEAD_DIM, 2), *range(1, HEAD_DIM, 2)]
    moved = relocate_keys(keys[..., order], num_positions, FREQUENCIES)
    return moved[..., torch.tensor(order).argsort()]


def one_too_far(layer: int, keys: torch.Tensor, num_positions: int) -> torch.Tensor:
    """The right rotation, by one position too many."""
    return relocate_keys(keys, num_positions + 1, FREQUENCIES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relocate", [unmoved, wrong_theta, wrong_pairs, one_too_far])
def test_keys_that_are_moved_wrongly_are_noticed(relocate: Relocate, dtype: torch.dtype) -> None:
    """An engine whose rotary embedding is another one passes, but serves no offsets."""
    verdict = FakeEngine(dtype, relocate=relocate).run()
    assert verdict.difference == 0.0
    assert verdict.immovable is not None
    assert "a key of layer 0, moved by" in verdict.immovable


def rotated_only_first(layer: int, keys: torch.Tensor, num_positions: int) -> torch.Tensor:
    """A model with layers that have no rotary embedding at all."""
    return moved(layer, keys, num_positions) if layer == 0 else keys


def other_theta_behind(layer: int, keys: torch.Tensor, num_positions: int) -> torch.Tensor:
    """A model whose kinds of layers have rotary embeddings of their own."""
    return (moved if layer == 0 else wrong_theta)(layer, keys, num_positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotate", [rotated_only_first, other_theta_behind])
def test_every_layer_is_moved_and_compared(rotate: Relocate, dtype: torch.dtype) -> None:
    """That the first layer's keys can be moved says nothing of the others."""
    verdict = FakeEngine(dtype, rotate=rotate).run()
    assert verdict.immovable is not None
    assert "a key of layer 1, moved by" in verdict.immovable
    assert FakeEngine(dtype, rotate=rotate, relocate=rotate).run() == Verdict(0.0, None)


def test_an_unknown_cache_dtype_fails() -> None:
    """KV that no Cartridge can hold is refused by name before anything is injected."""
    with pytest.raises(SelfTestFailed, match=r"torch\.float64"):
        FakeEngine(torch.float64).run()


# --- what is sent --------------------------------------------------------------------------------
def test_the_prompts_are_the_same_on_every_boot() -> None:
    """A prefix of one block and a little more, and a live prompt, of ids within the vocabulary."""
    prefix, live = self_test_prompt(VOCAB_SIZE, 21)
    assert (prefix, live) == self_test_prompt(VOCAB_SIZE, 21)
    assert (len(prefix), len(live)) == (21, NUM_LIVE_TOKENS)
    assert all(0 <= token < VOCAB_SIZE for token in prefix + live)


def test_its_messages_and_artifacts_are_valid() -> None:
    """The self-test uses the contract that gateways use, in a scope of its own."""
    engine = FakeEngine()
    seen: list[Artifact] = []
    adopt = engine.adopt

    def remember(artifact: Artifact) -> None:
        seen.append(artifact)
        adopt(artifact)

    subject = replace(engine.subject, adopt=remember)
    run_self_test(subject, quick_lengths(ENGINE.block_size)[0], moved)
    run_packed_test(subject)
    lengths = [decode_message(message).num_tokens for message in engine.messages]
    assert lengths == [21, 20, 37, 37, 37]
    for artifact, message in zip(seen, engine.messages, strict=True):
        assert encode_manifest(artifact.manifest)
        assert artifact.manifest.is_readable_by(SELF_TEST_SCOPE)
        assert not artifact.manifest.is_readable_by("public")
        assert message["items"][0]["digest"] == artifact.digest
        assert message["scope"] == SELF_TEST_SCOPE
    assert msgspec.json.encode(engine.messages)


def test_tolerances_are_below_what_damage_does() -> None:
    """Float32 must be exact to three digits; half precision may round, within a tenth."""
    assert 0 < TOLERANCES["F32"] < TOLERANCES["F16"] < TOLERANCES["BF16"] < 0.1


# --- packed prefixes -----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_that_reads_packed_bytes_right_passes(dtype: torch.dtype) -> None:
    """Dequantised and packed values answer alike; powers of two make them equal in bfloat16."""
    assert FakeEngine(dtype).run_packed() <= 1e-5


def neighbours(scale: torch.Tensor) -> torch.Tensor:
    """Each head's scales are the next one's."""
    return scale.roll(1, 0)


def one_for_all(scale: torch.Tensor) -> torch.Tensor:
    """The largest scale everywhere."""
    return scale.amax().expand_as(scale)


@pytest.mark.parametrize("misread", [neighbours, one_for_all, torch.ones_like])
def test_an_engine_that_misreads_scales_fails(
    misread: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Scales of another head, one for all, or none: each is noticed before anybody is served."""
    with pytest.raises(SelfTestFailed, match="packed prefix: logprobs differ"):
        FakeEngine(misread=misread).run_packed()


def test_a_packed_test_that_cannot_notice_damage_fails() -> None:
    """An engine that does not hear the prefix proves nothing."""
    with pytest.raises(SelfTestFailed, match="twice its values gave the same answer"):
        FakeEngine(is_deaf=True).run_packed()
