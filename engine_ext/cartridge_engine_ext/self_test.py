"""The boot oracle: an injected prefix must answer like the ordinary prompt, on this very engine.

Owns the test's prompts, tolerances and verdict. Refuses to pass an engine whose test could not tell
right from wrong: a prefix without its last position, or with other scales, must be noticed.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from cartridge_engine_ext.artifact_pool import Artifact
from cartridge_engine_ext.errors import SelfTestFailed
from cartridge_engine_ext.layout_probe import Captured
from cartridge_engine_ext.payload import DTYPE_NAMES, pack_payload, quantised_values
from cartridge_engine_ext.prefill_manifest import prefill_manifest
from cartridge_engine_ext.sealed_memory import SealedMemory
from cartridge_kernels.scaled_values import dequantise_values
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.composition import (
    CompositionItem,
    CompositionMessage,
    OnMiss,
    composition_digest,
    model_fingerprint,
)
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import (
    Access,
    Card,
    ConventionKind,
    Manifest,
    PositionLayout,
    Probe,
    ProbeStep,
    PromptConvention,
    manifest_digest,
)

SELF_TEST_SCOPE = "self-test"
NUM_LIVE_TOKENS = 6
NUM_NEW_TOKENS = 4
_SEED = 20261129

TOLERANCES = {"F32": 1e-3, "BF16": 0.08, "F16": 0.02}
"""Largest allowed difference of a chosen token's logprob, by KV dtype.

The same KV is read both times, so only the order of float32 sums differs (seen: 3e-5). For half
precision the live tokens' rounding can differ with the batch shape: a few units in the last place.
"""

RELATIVE_KEY_TOLERANCES = {"F32": 1e-4, "BF16": 2**-7, "F16": 2**-10}
"""Largest allowed difference of a moved key, as a part of the largest key, by KV dtype.

Half precision: the moved key and the engine's own are each rounded once, half a unit in the last
place each.
"""

DEEP_KEY_TOLERANCES = {"F32": 1e-3, "BF16": 2**-4, "F16": 2**-6}
"""The same behind the first layer, where equal tokens have gone through sums over different numbers
of positions. A wrong frequency or pairing is off by a good part of the key itself.
"""


@dataclass(frozen=True)
class Verdict:
    """What the self-test found.

    `difference` is the largest difference of a logprob. `immovable` says why keys cannot be moved
    along the sequence on this engine; `None` when they can.
    """

    difference: float
    immovable: str | None


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and their natural-log probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def quick_lengths(block_size: int) -> list[int]:
    """One prefix: a block and a few tokens more. For versions of vLLM that were proven."""
    return [block_size + 5]


def full_lengths(block_size: int) -> list[int]:
    """Prefixes around the edges of blocks. For versions of vLLM that nobody has tried yet."""
    return [2, block_size - 1, block_size, block_size + 1, 2 * block_size + 5]


def self_test_prompt(vocab_size: int, num_tokens: int) -> tuple[list[int], list[int]]:
    """A prefix of `num_tokens` and a live prompt; the same on every boot."""
    generator = random.Random(_SEED)  # noqa: S311 - reproducible on purpose
    ids = [
        generator.randrange(vocab_size // 10, vocab_size)
        for _ in range(num_tokens + NUM_LIVE_TOKENS)
    ]
    return ids[:-NUM_LIVE_TOKENS], ids[-NUM_LIVE_TOKENS:]


@dataclass(frozen=True)
class Subject:
    """The engine that is tested, and how it is reached.

    Attributes:
        engine: what it serves.
        vocab_size: token ids are drawn below it.
        complete: answers a prompt behind the prefix of a `kv_transfer_params.cartridges`.
        capture: answers a prompt and reads its first positions back from the KV cache.
        adopt: makes an artifact usable on this engine.
        discard: takes it away again.
    """

    engine: EngineIdentity
    vocab_size: int
    complete: Callable[[list[int], dict[str, Any]], Answer]
    capture: Callable[[list[int], int], tuple[Answer, Captured]]
    adopt: Callable[[Artifact], None]
    discard: Callable[[Digest], object]

    def answer_with(self, named: dict[str, torch.Tensor], live: list[int]) -> Answer:
        """The answer to a live prompt behind an artifact of these tensors."""
        artifact = captured_artifact(named, self.engine)
        self.adopt(artifact)
        try:
            return self.complete(live, composition_of(artifact.digest, artifact.manifest))
        finally:
            self.discard(artifact.digest)


def run_self_test(
    subject: Subject, num_tokens: int, relocate: Callable[[int, torch.Tensor, int], torch.Tensor]
) -> Verdict:
    """Prefill, read back, inject, compare; then move keys and compare.

    Args:
        subject: what is tested.
        num_tokens: length of the prefix, at least 2.
        relocate: moves keys [num_kv_heads, num_tokens, head_dim] of a layer, from 0, by a number
            of positions.

    Raises:
        SelfTestFailed: the answers differ, or a damaged prefix was not noticed.
    """
    engine, capture = subject.engine, subject.capture
    prefix, live = self_test_prompt(subject.vocab_size, num_tokens)
    ordinary, captured = capture(prefix + live, len(prefix))
    dtype = DTYPE_NAMES.get(captured[0][0].dtype)
    if dtype is None:
        raise SelfTestFailed(f"KV cache dtype {captured[0][0].dtype} is not one of a Cartridge's")
    tolerance = TOLERANCES[dtype]

    def answer_with(tensors: Captured) -> Answer:
        return subject.answer_with(named_tensors(tensors, engine), live)

    injected = answer_with(captured)
    difference = _difference(ordinary, injected)
    if difference > tolerance:
        raise SelfTestFailed(
            f"injected prefix: logprobs differ by {difference:.2e}, tolerance {tolerance:.0e}; "
            f"tokens {ordinary.token_ids} and {injected.token_ids}"
        )
    damaged = answer_with([(key[:, :-1], value[:, :-1]) for key, value in captured])
    if _difference(ordinary, damaged) <= tolerance:
        raise SelfTestFailed("a prefix without its last position gave the same answer")
    num_equal = engine.block_size + engine.block_size // 2 + 3
    _, equal = capture(prefix[:1] * num_equal + live, num_equal)
    return Verdict(difference, _find_immovable([key for key, _ in equal], relocate, dtype))


def run_packed_test(subject: Subject) -> float:
    """Prefill, read back, quantise, inject packed and plain, compare.

    Scales are powers of two, so the dequantised values are numbers of the cache's type, and the
    platform's own kernel over plain slots reads what attention over packed bytes does.

    Returns:
        The largest difference of a logprob.

    Raises:
        SelfTestFailed: the answers differ, or damaged scales were not noticed.
    """
    num_tokens = packed_length(subject.engine.block_size)
    prefix, live = self_test_prompt(subject.vocab_size, num_tokens)
    _, captured = subject.capture(prefix + live, len(prefix))
    exact = named_tensors(captured, subject.engine)
    tolerance = TOLERANCES[DTYPE_NAMES[captured[0][0].dtype]]
    small = _with_uneven_scales(quantised_values(exact, power_of_two=True))
    full = dict(exact)
    for name, tensor in exact.items():
        if name.endswith(".v"):
            full[name] = dequantise_values(small[name], small[f"{name}_scale"]).to(tensor.dtype)
    plain, packed = subject.answer_with(full, live), subject.answer_with(small, live)
    difference = _difference(plain, packed)
    if difference > tolerance:
        raise SelfTestFailed(
            f"packed prefix: logprobs differ by {difference:.2e}, tolerance {tolerance:.0e}; "
            f"tokens {plain.token_ids} and {packed.token_ids}"
        )
    damaged = {
        name: tensor * 2 if name.endswith("_scale") else tensor for name, tensor in small.items()
    }
    if _difference(plain, subject.answer_with(damaged, live)) <= tolerance:
        raise SelfTestFailed("a packed prefix with twice its values gave the same answer")
    return difference


def _with_uneven_scales(small: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scales half, once or twice as large: a scale that is read at a wrong place shows.

    What the values mean need not be what was read back: both answers are given with it.
    """
    generator = torch.Generator().manual_seed(_SEED)
    return {
        name: tensor * 2.0 ** torch.randint(-1, 2, tensor.shape, generator=generator)
        if name.endswith("_scale")
        else tensor
        for name, tensor in small.items()
    }


def packed_length(block_size: int) -> int:
    """A length whose K16/V8 bytes take a block less than its plain slots."""
    return 2 * block_size + 5


def _find_immovable(
    keys: Sequence[torch.Tensor],
    relocate: Callable[[int, torch.Tensor, int], torch.Tensor],
    dtype: str,
) -> str | None:
    """Why moved keys are not the engine's own at the new positions; `None` when they are.

    `keys` are of one token again and again. Attention over equal values gives that value, however
    it weighs them, so in every layer all positions hold the same but for the rotation: the first
    key, moved, must be each of the others. This proves which channels of each layer are paired,
    that it is rotated at all, and all frequencies that turn within so many positions; those that
    hardly do are taken from the model's files.
    """
    tolerances = RELATIVE_KEY_TOLERANCES[dtype], DEEP_KEY_TOLERANCES[dtype]
    for layer, engines in enumerate(keys):
        largest = float(engines.abs().max())
        for position in range(1, engines.shape[1]):
            ours = relocate(layer, engines[:, :1], position)
            theirs = engines[:, position : position + 1].to(torch.float32)
            difference = float((ours.to(torch.float32) - theirs).abs().max())
            if not difference <= tolerances[layer > 0] * largest:  # also where it is no number
                return (
                    f"a key of layer {layer}, moved by {position} positions, differs by "
                    f"{difference:.2e} from the engine's own (largest {largest:.2e})"
                )
    return None


def _difference(one: Answer, other: Answer) -> float:
    numbers = one.logprobs + other.logprobs
    if one.token_ids != other.token_ids or not all(map(math.isfinite, numbers)):
        return float("inf")
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def composition_of(digest: Digest, manifest: Manifest) -> dict[str, Any]:
    """`kv_transfer_params.cartridges` for one artifact at position 0, for its owner."""
    item = CompositionItem(digest=digest, num_tokens=manifest.num_tokens, offset=0)
    layout = PositionLayout.SEQUENTIAL
    scope = manifest.access.owner
    composition = composition_digest(
        scope=scope,
        layout=layout,
        items=[item],
        visibility=[True],
        fingerprint=model_fingerprint(manifest.model),
    )
    message = CompositionMessage(
        v=1,
        request_id="self-test",
        composition=composition,
        scope=scope,
        layout=layout,
        items=[item],
        visibility=[True],
        deadline_ms=60_000,
        on_miss=OnMiss.FAIL,
    )
    builtins: dict[str, Any] = msgspec.to_builtins(message)
    return builtins


def named_tensors(captured: Captured, engine: EngineIdentity) -> dict[str, torch.Tensor]:
    """Keys and values that were read back, by their names in an artifact."""
    named = {}
    for index, (key, value) in enumerate(captured):
        named[f"layers.{index}.k"] = key
        if not engine.geometry.has_latents:
            named[f"layers.{index}.v"] = value
    return named


def captured_artifact(named: dict[str, torch.Tensor], engine: EngineIdentity) -> Artifact:
    """An artifact of these tensors, readable in the self-test's scope."""
    payload = pack_payload(named)
    manifest = prefill_manifest(
        name="self-test",
        version="1",
        model=engine.model,
        geometry=engine.geometry,
        rope=engine.rope,
        payload=payload,
        source_digest=payload.blob.sha256,
        builder="self-test",
        access=Access(owner=SELF_TEST_SCOPE, readers=[]),
        card=Card(title="self-test", aliases=[], sentence="Random tokens.", language="en"),
        prompt_convention=PromptConvention(
            kind=ConventionKind.DOCUMENT, has_bos=False, chat_template_digest=None
        ),
        probe=Probe(prompt_token_ids=[0], steps=[ProbeStep(token_id=0, top=[])]),
        created_at="2026-01-01T00:00:00Z",
    )

    def fill(buffer: memoryview) -> None:
        buffer[:] = payload.data

    return Artifact(
        digest=manifest_digest(manifest),
        manifest=manifest,
        memories={payload.blob.sha256: SealedMemory(len(payload.data), fill)},
    )
