"""Building a Cartridge: the stored keys and values are those of one ordinary forward pass."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config

from cartridge_engine_ext import identity
from cartridge_engine_ext.artifact_pool import tensor_view
from cartridge_engine_ext.build import Builder, Source
from cartridge_engine_ext.commands import cartridge_build
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.latents import stored_latents
from cartridge_engine_ext.reference_probe import NUM_PROBE_STEPS, NUM_PROBE_TOP
from cartridge_proto.codecs import read_decoded_blob
from cartridge_proto.compatibility import EngineIdentity, incompatibilities, unsupported
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import ConventionKind, LayerKind, Manifest, ValueScale
from cartridge_proto.stores import LocalStore
from tests.engine_ext.tiny_kinds import WINDOW, save_tiny_kind
from tests.engine_ext.tiny_model import (
    BOS,
    FOLDING_TEMPLATE,
    MAX_POSITIONS,
    save_tiny_model,
)

TEXT = "The harbour opened in 1902; {tides} are posted daily."
HEAD = f"{BOS}[system]Answer the question from this document.\n\n{TEXT}[end]"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def builder_of(
    model_dir: Path, store: LocalStore, dtype: torch.dtype = torch.float32, **options: Any
) -> Builder:
    """A builder that says nothing."""
    options.setdefault("with_weights_digest", True)
    options.setdefault("say", lambda line: None)
    return Builder(model_dir=model_dir, store=store, model_name="tiny", dtype=dtype, **options)


def tokens(model_dir: Path, text: str) -> list[int]:
    """Ids of a text that already holds its special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def stored(store: LocalStore, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors of an artifact, from its verified and decoded blob."""
    buffer = bytearray(manifest.payload[0].decoded_bytes)
    read_decoded_blob(store, manifest.payload[0], memoryview(buffer))
    return {
        name: tensor_view(buffer, tensor.dtype, tensor.shape, *tensor.byte_range)
        for name, tensor in manifest.tensors.items()
    }


def expect_prefill(
    store: LocalStore, manifest: Manifest, model_dir: Path, prefix: list[int], dtype: torch.dtype
) -> None:
    """The artifact holds exactly the cache of a plain forward pass over these tokens."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    with torch.inference_mode():
        cache = model(torch.tensor([prefix]), use_cache=True).past_key_values
    found = stored(store, manifest)
    assert manifest.num_tokens == len(prefix)
    assert len(found) == 2 * len(cache.layers)
    for index, layer in enumerate(cache.layers):
        assert found[f"layers.{index}.k"].dtype is dtype
        assert torch.equal(found[f"layers.{index}.k"], layer.keys[0])
        assert torch.equal(found[f"layers.{index}.v"], layer.values[0])


# --- what is stored ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_system_turn_is_stored_exactly(
    dtype: torch.dtype, model_dir: Path, store: LocalStore
) -> None:
    """For chats the artifact is the system turn, BOS and its end included, bit for bit."""
    built = builder_of(model_dir, store, dtype).build(Source(text=TEXT, name="harbour"))
    expect_prefill(store, built.manifest, model_dir, tokens(model_dir, HEAD), dtype)
    convention = built.manifest.prompt_convention
    assert (convention.kind, convention.has_bos) == (ConventionKind.SYSTEM_TURN, True)
    assert convention.chat_template_digest == identity.chat_template_digest(model_dir)


@pytest.mark.parametrize("kind", ["windows_and_full", "windows_only"])
def test_layers_with_a_window_are_stored_whole(
    kind: str, tmp_path: Path, store: LocalStore
) -> None:
    """Positions that the window has left behind are kept as well: engines place them by length."""
    model_dir = save_tiny_kind(tmp_path, kind)
    prefix = [1 + index % 90 for index in range(3 * WINDOW)]
    source = Source(text=TEXT, name="harbour", convention=ConventionKind.DOCUMENT)
    built = builder_of(model_dir, store).prefill(source, prefix, [5])
    found = stored(store, built.manifest)
    assert {tensor.shape[1] for tensor in found.values()} == {len(prefix)}
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        cache = model(torch.tensor([prefix]), use_cache=True).past_key_values
    for index, layer in enumerate(cache.layers):
        kept = layer.keys.shape[2]
        assert torch.equal(found[f"layers.{index}.k"][:, -kept:], layer.keys[0])
    assert min(layer.keys.shape[2] for layer in cache.layers) < WINDOW


def test_latents_are_stored_in_the_engines_order(tmp_path: Path, store: LocalStore) -> None:
    """Both generations of DeepSeek compute the same latents from the same weights.

    transformers keeps the rotated channels of one in pairs, of the other in halves.
    """
    prefix = [1 + index % 90 for index in range(40)]
    found = []
    for kind in ("latents_v2", "latents_v3"):
        source = Source(text=TEXT, name=kind.replace("_", "-"), convention=ConventionKind.DOCUMENT)
        builder = builder_of(save_tiny_kind(tmp_path / kind, kind), store)
        manifest = builder.prefill(source, prefix, [5]).manifest
        assert manifest.geometry.layer_kinds == [LayerKind.LATENT] * 2
        found.append(stored(store, manifest))
    for one, other in zip(found[0].values(), found[1].values(), strict=True):
        assert one.shape == (1, 40, 576)
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    rotated = found[0]["layers.0.k"][0, :, 512:]
    assert not torch.allclose(rotated, torch.cat([rotated[:, 0::2], rotated[:, 1::2]], -1))


@pytest.mark.parametrize(
    ("model_type", "widths", "text"),
    [
        ("unheard-of", (512, 64), "model_type: unheard-of"),
        ("deepseek_v3", (576, 512), "caches"),
    ],
)
def test_latents_of_an_unknown_order_are_refused(
    model_type: str, widths: tuple[int, int], text: str
) -> None:
    """Channels in a wrong order would be silent corruption."""
    config = DeepseekV3Config(kv_lora_rank=512, qk_rope_head_dim=64)
    config.model_type = model_type
    compressed, rotated = (torch.zeros(1, 3, width) for width in widths)
    with pytest.raises(ConfigurationError, match=text):
        stored_latents(config, compressed, rotated)


def test_latents_that_are_not_interleaved_are_refused() -> None:
    """Such weights pair other channels than vLLM does."""
    config = DeepseekV3Config(kv_lora_rank=512, qk_rope_head_dim=64, rope_interleave=False)
    with pytest.raises(ConfigurationError, match="rope_interleave"):
        stored_latents(config, torch.zeros(1, 3, 512), torch.zeros(1, 3, 64))


def test_latents_have_no_values_to_quantise(tmp_path: Path, store: LocalStore) -> None:
    """Asked for at once, not after a prefill."""
    model_dir = save_tiny_kind(tmp_path, "latents_v3")
    with pytest.raises(ConfigurationError, match="values: e4m3: a latent model stores no values"):
        builder_of(model_dir, store, values="e4m3")


def test_a_document_is_stored_exactly(model_dir: Path, store: LocalStore) -> None:
    """For completions the artifact is the text as the tokenizer takes it, and no chat template."""
    source = Source(text=TEXT, name="harbour", convention=ConventionKind.DOCUMENT)
    built = builder_of(model_dir, store).build(source)
    expect_prefill(store, built.manifest, model_dir, tokens(model_dir, BOS + TEXT), torch.float32)
    convention = built.manifest.prompt_convention
    assert (convention.kind, convention.has_bos) == (ConventionKind.DOCUMENT, True)
    assert convention.chat_template_digest is None


def test_an_artifact_is_valid_and_fits_its_model(model_dir: Path, store: LocalStore) -> None:
    """What is stored verifies, resolves by its alias, and is compatible with the same folder."""
    source = Source(
        text=TEXT,
        name="harbour",
        version="2",
        title="Harbour",
        sentence="About a harbour.",
        owner="tenant-a",
        readers=("tenant-b",),
    )
    built = builder_of(model_dir, store).build(source)
    assert store.verify(Digest(built.digest)) == built.manifest
    assert store.resolve("harbour@2") == built.digest
    card, access = built.manifest.card, built.manifest.access
    assert (card.title, card.sentence) == ("Harbour", "About a harbour.")
    assert (access.owner, access.readers) == ("tenant-a", ["tenant-b"])
    engine = EngineIdentity(
        model=identity.model_identity(model_dir, name="other name", with_weights=True),
        geometry=identity.geometry(model_dir),
        rope=identity.rope(model_dir),
        chat_template_digest=identity.chat_template_digest(model_dir),
        max_model_len=MAX_POSITIONS,
        block_size=16,
    )
    assert incompatibilities(built.manifest, engine) == []
    assert unsupported(built.manifest) == []
    retrained = msgspec.structs.replace(engine.model, weights_digest=Digest("sha256:" + "0" * 64))
    other = msgspec.structs.replace(engine, model=retrained)
    assert [one.field for one in incompatibilities(built.manifest, other)] == [
        "model.weights_digest"
    ]


def test_weights_are_hashed_on_demand(model_dir: Path, store: LocalStore) -> None:
    """Without the digest of the weights the manifest says unknown."""
    built = builder_of(model_dir, store, with_weights_digest=False).build(Source(TEXT, "harbour"))
    assert built.manifest.model.weights_digest is None


def test_the_probe_is_what_the_model_answers(model_dir: Path, store: LocalStore) -> None:
    """Its steps are the greedy tokens of the ordinary prompt, with the model's own logprobs."""
    probe = builder_of(model_dir, store).build(Source(TEXT, "harbour")).manifest.probe
    live = tokens(model_dir, "[user]What is this about?[end][assistant]")
    assert probe.prompt_token_ids == live
    assert len(probe.steps) == NUM_PROBE_STEPS
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    sequence = tokens(model_dir, HEAD) + live
    for step in probe.steps:
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([sequence])).logits[0, -1], -1)
        top = logprobs.topk(NUM_PROBE_TOP)
        assert [token for token, _ in step.top] == top.indices.tolist()
        assert step.token_id == step.top[0][0]
        # One pass over the whole instead of one with a cache: float32 sums in another order.
        assert [value for _, value in step.top] == pytest.approx(top.values.tolist(), abs=1e-5)
        sequence.append(step.token_id)


# --- codecs and values in 8 bits -----------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoded_artifact_holds_the_same_tensors(
    dtype: torch.dtype, model_dir: Path, tmp_path: Path
) -> None:
    """Fewer bytes, another digest, and the same prefill bit for bit, also by the store's word."""
    source = Source(text=TEXT, name="harbour")
    plain = builder_of(model_dir, LocalStore(tmp_path / "plain"), dtype).build(source)
    store = LocalStore(tmp_path / "encoded")
    built = builder_of(model_dir, store, dtype, codec="shuffle-zstd").build(source)
    assert store.verify(Digest(built.digest)) == built.manifest
    assert built.manifest.payload_bytes < built.manifest.decoded_bytes
    assert built.manifest.decoded_bytes == plain.manifest.payload_bytes
    assert built.digest != plain.digest
    expect_prefill(store, built.manifest, model_dir, tokens(model_dir, HEAD), dtype)


@pytest.mark.parametrize("codec", ["identity", "shuffle-zstd"])
def test_values_in_8_bits_are_near_and_keys_exact(
    codec: str, model_dir: Path, tmp_path: Path
) -> None:
    """Each value is off by half a unit of e4m3 at most, by the float64 product of its code."""
    source = Source(text=TEXT, name="harbour")
    full, small = LocalStore(tmp_path / "full"), LocalStore(tmp_path / "small")
    exact = stored(full, builder_of(model_dir, full).build(source).manifest)
    built = builder_of(model_dir, small, codec=codec, values="e4m3").build(source)
    assert small.verify(Digest(built.digest)) == built.manifest
    assert built.manifest.representation.v_scale == ValueScale(
        granularity="head_channel", dtype="F32"
    )
    found = stored(small, built.manifest)
    for layer in range(2):
        assert torch.equal(found[f"layers.{layer}.k"], exact[f"layers.{layer}.k"])
        scale = found[f"layers.{layer}.v_scale"].double()[:, None, :]
        values = found[f"layers.{layer}.v"].double() * scale
        wanted = exact[f"layers.{layer}.v"].double()
        # 2^-4 of the number, and 2^-10 of the scale below the smallest normal code; and roundings.
        bound = torch.maximum(wanted.abs() * 2**-4, scale * 2**-10) * (1 + 2**-20)
        assert bool(((values - wanted).abs() <= bound).all())
        assert float(found[f"layers.{layer}.v"].to(torch.float32).abs().max()) == 448.0


def test_the_probe_answers_from_values_in_8_bits(model_dir: Path, tmp_path: Path) -> None:
    """It is what an engine computes from what is stored, not from what was there before."""
    source = Source(TEXT, "harbour")
    full = builder_of(model_dir, LocalStore(tmp_path / "full")).build(source).manifest
    store = LocalStore(tmp_path / "small")
    small = builder_of(model_dir, store, values="e4m3").build(source).manifest
    assert small.probe != full.probe
    found = stored(store, small)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        prefix = tokens(model_dir, HEAD)
        cache = model(torch.tensor([prefix]), use_cache=True).past_key_values
        for index, layer in enumerate(cache.layers):
            scale = found[f"layers.{index}.v_scale"][:, None, :]
            layer.values = (found[f"layers.{index}.v"].to(torch.float32) * scale)[None]
        live = torch.tensor([small.probe.prompt_token_ids])
        logits = model(live, past_key_values=cache).logits[0, -1]
    top = torch.log_softmax(logits, -1).topk(NUM_PROBE_TOP)
    step = small.probe.steps[0]
    assert [token for token, _ in step.top] == top.indices.tolist()
    assert [value for _, value in step.top] == pytest.approx(top.values.tolist(), abs=1e-6)


@pytest.mark.parametrize("option", ["codec", "values"])
def test_an_unknown_codec_or_format_is_refused(
    option: str, model_dir: Path, store: LocalStore
) -> None:
    """Before the model is loaded, with what there is."""
    options: dict[str, Any] = {option: "other"}
    with pytest.raises(ConfigurationError, match=f"{option}: 'other' is none of (identity|full)"):
        builder_of(model_dir, store, **options)


def run_build(*arguments: str) -> int:
    """`cartridge-router cartridge build` with these arguments."""
    parser = argparse.ArgumentParser()
    cartridge_build.configure(parser)
    return cartridge_build.run(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("options", "is_encoded", "v_dtype"),
    [
        ([], False, "F32"),
        (["--codec", "shuffle-zstd"], True, "F32"),
        (["--values", "e4m3"], False, "F8_E4M3"),
        (["--codec", "shuffle-zstd", "--values", "e4m3"], True, "F8_E4M3"),
    ],
)
def test_the_command_builds_either_or_both(
    options: list[str],
    is_encoded: bool,
    v_dtype: str,
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its JSON line has the digest and the stored size; without options nothing changes."""
    text, target = tmp_path / "harbour.txt", tmp_path / "store"
    text.write_text(TEXT)
    given = [f"--model={model_dir}", f"--text={text}", "--name=harbour", f"--store={target}"]
    assert run_build(*given, "--json", *options) == 0
    row = json.loads(capsys.readouterr().out)
    manifest = LocalStore(target).verify(Digest(row["digest"]))
    (blob,) = manifest.payload
    assert row["size_bytes"] == blob.size_bytes
    assert (blob.size_bytes < blob.decoded_bytes) is is_encoded
    assert manifest.representation.v_dtype == v_dtype


def test_the_command_says_what_to_install(
    model_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the codec's package nothing is stored, and the status says so."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    text, target = tmp_path / "harbour.txt", tmp_path / "store"
    text.write_text(TEXT)
    given = [f"--model={model_dir}", f"--text={text}", "--name=harbour", f"--store={target}"]
    assert run_build(*given, "--codec", "shuffle-zstd") == 1
    assert "pip install 'cartridge-router[codecs]'" in capsys.readouterr().err
    assert LocalStore(target).aliases() == {}


# --- repeating -----------------------------------------------------------------------------------
def test_a_build_can_be_repeated(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SOURCE_DATE_EPOCH the same text gives the same digest, in another store and process."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    source = Source(TEXT, "harbour")
    digests = {
        builder_of(model_dir, LocalStore(tmp_path / name)).build(source).digest for name in "ab"
    }
    assert len(digests) == 1
    builder = builder_of(model_dir, LocalStore(tmp_path / "c"))
    assert builder.build(source).manifest.created_at == "2023-11-14T22:13:20Z"
    assert builder.build(Source(TEXT + ".", "harbour")).digest not in digests


def test_every_step_is_said(model_dir: Path, store: LocalStore) -> None:
    """Progress lines name the model and the text with its length."""
    lines: list[str] = []
    builder_of(model_dir, store, say=lines.append).build(Source(TEXT, "harbour"))
    length = len(tokens(model_dir, HEAD))
    assert lines == [f"model: {model_dir}", f"prefill harbour: {length} tokens"]


# --- refusals ------------------------------------------------------------------------------------
def test_a_text_beyond_the_context_is_refused(model_dir: Path, store: LocalStore) -> None:
    """One position must stay for an answer; one token less is built. Nothing else is stored."""
    builder = builder_of(model_dir, store)
    document = ConventionKind.DOCUMENT
    with pytest.raises(ConfigurationError, match=f"{MAX_POSITIONS} tokens.*{MAX_POSITIONS}"):
        builder.build(Source("x" * (MAX_POSITIONS - 1), "long", convention=document))
    assert store.aliases() == {}
    built = builder.build(Source("x" * (MAX_POSITIONS - 2), "fits", convention=document))
    assert built.manifest.num_tokens == MAX_POSITIONS - 1


def test_a_template_without_a_system_turn_is_refused(tmp_path: Path) -> None:
    """A model that folds the system message away builds documents only."""
    model_dir = save_tiny_model(tmp_path / "model", template=FOLDING_TEMPLATE)
    builder = builder_of(model_dir, LocalStore(tmp_path / "store"))
    with pytest.raises(ConfigurationError, match="no system turn that stands on its own"):
        builder.build(Source(TEXT, "harbour"))
    assert builder.build(Source(TEXT, "harbour", convention=ConventionKind.DOCUMENT)).digest


def test_an_instruction_may_hold_braces(model_dir: Path, store: LocalStore) -> None:
    """Only {document} is replaced; other braces of an instruction are text."""
    source = Source(TEXT, "harbour", instruction='Answer as {"a": {}}: {document}')
    built = builder_of(model_dir, store).build(source)
    head = f'{BOS}[system]Answer as {{"a": {{}}}}: {TEXT}[end]'
    assert built.manifest.num_tokens == len(tokens(model_dir, head))


def test_token_ids_are_stored_as_they_are(model_dir: Path, store: LocalStore) -> None:
    """Given ids are prefilled without a template; no ids at all are refused."""
    builder = builder_of(model_dir, store)
    source = Source("", "ids", convention=ConventionKind.DOCUMENT)
    built = builder.prefill(source, [5, 6, 7], [8])
    expect_prefill(store, built.manifest, model_dir, [5, 6, 7], torch.float32)
    assert built.manifest.probe.prompt_token_ids == [8]
    with pytest.raises(ConfigurationError, match="ids: the text has no tokens"):
        builder.prefill(source, [], [8])
