"""Quantising an artifact: keys bit for bit, values as scaled codes, and a manifest that says so."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from cartridge_engine_ext.build import Built, Source
from cartridge_engine_ext.commands import cartridge_quantize
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.quantise import (
    Keys,
    Quantiser,
    Recipe,
    Values,
    smaller_tensors,
)
from cartridge_engine_ext.reference_probe import filled_cache, full_layers, reference_probe
from cartridge_kernels.scaled_values import dequantise_values, quantise_values
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import (
    Adapter,
    ConventionKind,
    Frozen,
    FrozenRole,
    Kind,
    Representation,
    RetainedPositions,
    Training,
    Transform,
    ValueScale,
)
from cartridge_proto.stores import LocalStore
from tests.engine_ext.test_build import TEXT, builder_of, stored
from tests.engine_ext.tiny_kinds import save_tiny_kind
from tests.engine_ext.tiny_model import save_tiny_model

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """An empty store."""
    return LocalStore(tmp_path / "store")


@pytest.fixture
def source(model_dir: Path, store: LocalStore) -> Built:
    """A float32 artifact."""
    return builder_of(model_dir, store).build(Source(text=TEXT, name="harbour", aliases=("port",)))


@pytest.fixture
def quantiser(model_dir: Path, store: LocalStore) -> Quantiser:
    """The one under test."""
    return Quantiser(model_dir=model_dir, store=store, say=lambda line: None)


def run(quantiser: Quantiser, source: Built, recipe: Recipe, **options: Any) -> Built:
    """Quantise it as `small@2`."""
    return quantiser.quantise(Digest(source.digest), recipe, name="small", version="2", **options)


def test_values_are_quantised_and_keys_are_exact(
    quantiser: Quantiser, source: Built, store: LocalStore
) -> None:
    """The stored artifact is whole, and holds what the quantiser makes of each layer's values."""
    built = run(quantiser, source, Recipe())
    assert store.verify(Digest(built.digest)) == built.manifest
    assert store.resolve("small@2") == built.digest
    exact, found = stored(store, source.manifest), stored(store, built.manifest)
    for layer in range(NUM_LAYERS):
        assert torch.equal(found[f"layers.{layer}.k"], exact[f"layers.{layer}.k"])
        codes, scale = quantise_values(exact[f"layers.{layer}.v"], by_channel=True)
        assert torch.equal(found[f"layers.{layer}.v"].float(), codes.float())
        assert torch.equal(found[f"layers.{layer}.v_scale"], scale)


def test_the_manifest_says_where_it_comes_from(quantiser: Quantiser, source: Built) -> None:
    """Source, transform and its parameters are new; what the document is stays."""
    manifest = run(quantiser, source, Recipe(by_channel=False, power_of_two=True)).manifest
    before = source.manifest
    assert (manifest.kind, manifest.derived_from) == (Kind.TRANSFORMED, source.digest)
    transform = manifest.provenance.transform
    assert transform is not None
    assert (transform.name, transform.query_digest) == ("quantise", None)
    assert transform.parameters == {
        "keys": "exact",
        "values": "e4m3",
        "scales": "head",
        "power_of_two": True,
    }
    assert manifest.representation == Representation(
        k_dtype="F32", v_dtype="F8_E4M3", v_scale=ValueScale(granularity="head", dtype="F32")
    )
    assert manifest.provenance.source_digest == before.provenance.source_digest
    for field in ("model", "geometry", "rope", "num_tokens", "card", "access", "composition"):
        assert getattr(manifest, field) == getattr(before, field)


def test_the_probe_is_answered_from_the_new_numbers(
    quantiser: Quantiser, source: Built, store: LocalStore, model_dir: Path
) -> None:
    """By the model, behind the dequantised tensors; the old probe is another."""
    built = run(quantiser, source, Recipe(Keys.BFLOAT16))
    layers = full_layers(stored(store, built.manifest), NUM_LAYERS)
    with torch.inference_mode():
        expected = reference_probe(
            quantiser._model, filled_cache(layers), source.manifest.probe.prompt_token_ids
        )
    assert built.manifest.probe == expected
    assert built.manifest.probe != source.manifest.probe


def test_bfloat16_rounds_both_once(quantiser: Quantiser, source: Built, store: LocalStore) -> None:
    """Keys and values of 16 bits, without scales."""
    built = run(quantiser, source, Recipe(Keys.BFLOAT16, Values.BFLOAT16), codec="shuffle-zstd")
    exact, found = stored(store, source.manifest), stored(store, built.manifest)
    assert built.manifest.representation == Representation(
        k_dtype="BF16", v_dtype="BF16", v_scale=None
    )
    assert built.manifest.payload[0].encoding is not None
    for name, tensor in found.items():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16))


def test_keys_that_are_bfloat16_already_stay_bit_for_bit(
    quantiser: Quantiser, model_dir: Path, store: LocalStore
) -> None:
    """Rounding to bfloat16 changes no number that it holds."""
    source = builder_of(model_dir, store, torch.bfloat16).build(Source(text=TEXT, name="half"))
    built = run(quantiser, source, Recipe(Keys.BFLOAT16))
    exact, found = stored(store, source.manifest), stored(store, built.manifest)
    for layer in range(NUM_LAYERS):
        name = f"layers.{layer}.k"
        assert torch.equal(found[name].view(torch.int16), exact[name].view(torch.int16))


def test_powers_of_two_dequantise_to_bfloat16_exactly(
    quantiser: Quantiser, source: Built, store: LocalStore
) -> None:
    """Any kernel for bfloat16 can read the values without a further error."""
    built = run(quantiser, source, Recipe(power_of_two=True))
    found = stored(store, built.manifest)
    for layer in range(NUM_LAYERS):
        values = dequantise_values(found[f"layers.{layer}.v"], found[f"layers.{layer}.v_scale"])
        assert torch.equal(values.to(torch.bfloat16).float(), values)


def test_the_same_recipe_gives_the_same_artifact(
    quantiser: Quantiser, source: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SOURCE_DATE_EPOCH, down to the digest."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert run(quantiser, source, Recipe()).digest == run(quantiser, source, Recipe()).digest


def again(store: LocalStore, source: Built, **changes: Any) -> Built:
    """The same artifact under a manifest that says otherwise of where it comes from."""
    manifest = msgspec.structs.replace(source.manifest, name="other", **changes)
    return Built(store.put_manifest(manifest), manifest)


def test_a_trained_artifact_is_quantised(
    quantiser: Quantiser, source: Built, store: LocalStore
) -> None:
    """The new one is no trained one any more; the recipe is told by the one it comes from."""
    provenance = msgspec.structs.replace(
        source.manifest.provenance, training=Training(recipe="self-study", final_loss=0.5)
    )
    frozen = Frozen(num_tokens=1, role=FrozenRole.ATTENTION_SINK)
    trained = again(store, source, kind=Kind.TRAINED, provenance=provenance, frozen=frozen)
    manifest = run(quantiser, trained, Recipe()).manifest
    assert (manifest.kind, manifest.derived_from) == (Kind.TRANSFORMED, trained.digest)
    assert (manifest.provenance.training, manifest.frozen) == (None, frozen)


def test_what_an_earlier_transform_depends_on_stays(
    quantiser: Quantiser, source: Built, store: LocalStore
) -> None:
    """KV that was reduced for one query is still for that query, and as many positions."""
    retained = RetainedPositions(retained=list(range(3, 3 + source.manifest.num_tokens)))
    before = Transform(
        name="drop",
        version="1",
        parameters={},
        query_digest=sha256_digest(b"query"),
        retained_positions_digest=sha256_digest(b"positions"),
    )
    provenance = msgspec.structs.replace(source.manifest.provenance, transform=before)
    dropped = again(store, source, kind=Kind.TRANSFORMED, provenance=provenance, positions=retained)
    manifest = run(quantiser, dropped, Recipe()).manifest
    transform = manifest.provenance.transform
    assert transform is not None
    assert (transform.name, manifest.positions) == ("quantise", retained)
    assert transform.query_digest == before.query_digest
    assert transform.retained_positions_digest == before.retained_positions_digest


# --- refused -------------------------------------------------------------------------------------
def test_what_is_quantised_already_is_refused(quantiser: Quantiser, source: Built) -> None:
    """Errors would add up."""
    small = run(quantiser, source, Recipe())
    with pytest.raises(ConfigurationError, match="small@2: its values are quantised already"):
        run(quantiser, small, Recipe())


def test_what_would_not_become_smaller_is_refused(
    quantiser: Quantiser, model_dir: Path, store: LocalStore
) -> None:
    """bfloat16 of bfloat16 is the same artifact under another name."""
    source = builder_of(model_dir, store, torch.bfloat16).build(Source(text=TEXT, name="half"))
    with pytest.raises(ConfigurationError, match="nothing in it would become smaller"):
        run(quantiser, source, Recipe(Keys.BFLOAT16, Values.BFLOAT16))


def test_another_models_artifact_is_refused(
    source: Built, store: LocalStore, tmp_path: Path
) -> None:
    """Its probe could not be answered."""
    other = save_tiny_model(tmp_path / "other", num_kv_heads=4)
    quantiser = Quantiser(model_dir=other, store=store, say=lambda line: None)
    with pytest.raises(ConfigurationError, match="config digest"):
        run(quantiser, source, Recipe())


def test_other_weights_are_refused(
    model_dir: Path, source: Built, store: LocalStore, tmp_path: Path
) -> None:
    """A fine-tuned model has the same configuration, and would answer another probe."""
    tuned = shutil.copytree(model_dir, tmp_path / "tuned")
    file = tuned / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor + 0.01 for name, tensor in tensors.items()}, file, {"format": "pt"})
    quantiser = Quantiser(model_dir=tuned, store=store, say=lambda line: None)
    with pytest.raises(ConfigurationError, match=r"harbour@1: .*weights digest"):
        run(quantiser, source, Recipe())


def test_an_artifact_without_a_weights_digest_is_taken_by_its_configuration(
    quantiser: Quantiser, model_dir: Path, store: LocalStore
) -> None:
    """As engines take it."""
    builder = builder_of(model_dir, store, with_weights_digest=False)
    source = builder.build(Source(text=TEXT, name="unhashed"))
    assert run(quantiser, source, Recipe()).manifest.model.weights_digest is None


def test_another_adapters_artifact_is_refused(
    quantiser: Quantiser, source: Built, store: LocalStore
) -> None:
    """The plain model would answer another probe; the message has both digests."""
    adapter = Adapter(name="tone", digest=sha256_digest(b"adapter"))
    model = msgspec.structs.replace(source.manifest.model, adapter=adapter)
    adapted = again(store, source, model=model)
    with pytest.raises(ConfigurationError, match=f"{adapter.digest}; --adapter has None"):
        run(quantiser, adapted, Recipe())


def test_latents_are_refused(tmp_path: Path, store: LocalStore) -> None:
    """They are keys and values in one."""
    model_dir = save_tiny_kind(tmp_path / "latents", "latents_v2")
    document = Source(text=TEXT, name="latent", convention=ConventionKind.DOCUMENT)
    source = builder_of(model_dir, store).prefill(document, [1, 2, 3], [5])
    quantiser = Quantiser(model_dir=model_dir, store=store, say=lambda line: None)
    with pytest.raises(ConfigurationError, match="latent@1: a latent model stores no values"):
        run(quantiser, source, Recipe())


BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("number", BAD)
@pytest.mark.parametrize("name", ["layers.0.k", "layers.0.v"])
@pytest.mark.parametrize("values", list(Values))
def test_numbers_that_are_none_are_refused(number: float, name: str, values: Values) -> None:
    """Named by their tensor."""
    tensors = {key: torch.ones(2, 3, 4) for key in ("layers.0.k", "layers.0.v")}
    tensors[name][1, 2, 3] = number
    with pytest.raises(ValueError, match=f"{name}: "):
        smaller_tensors(tensors, Recipe(values=values))


def test_numbers_that_bfloat16_cannot_hold_are_refused() -> None:
    """Rounding to infinity is not rounding."""
    tensors = {"layers.0.k": torch.full((1, 1, 1), 3.4e38), "layers.0.v": torch.ones(1, 1, 1)}
    with pytest.raises(ValueError, match=r"layers\.0\.k: "):
        smaller_tensors(tensors, Recipe(Keys.BFLOAT16))


# --- mutants -------------------------------------------------------------------------------------
def _e5m2(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantise_values(codes.float().to(torch.float8_e5m2).float(), scale)


def _neighbour(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantise_values(codes, scale.roll(1, 0))


def _per_tensor(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantise_values(codes, scale.amax().expand_as(scale))


def _dropped(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.float()


@pytest.mark.parametrize("mutant", [_e5m2, _neighbour, _per_tensor, _dropped])
def test_dequantised_tensors_show_what_outputs_might_hide(
    mutant: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Half a unit of e4m3 bounds the right reader's error; each wrong reader is outside."""
    exact = torch.randn(3, 50, 8, generator=torch.Generator().manual_seed(4))
    exact *= torch.tensor([0.1, 1.0, 7.0])[:, None, None]
    codes, scale = quantise_values(exact, by_channel=True)
    bound = torch.maximum(exact.abs() * 2**-4, scale[:, None] * 2**-10) * (1 + 2**-20)
    right = dequantise_values(codes, scale)
    assert bool(((right - exact).abs() <= bound).all())
    assert bool(((mutant(codes, scale) - exact).abs() > bound).any())


# --- the command ---------------------------------------------------------------------------------
def quantize(*arguments: str) -> int:
    """`cartridge-router cartridge quantize` with these arguments."""
    parser = argparse.ArgumentParser()
    cartridge_quantize.configure(parser)
    return cartridge_quantize.run(parser.parse_args(arguments))


def test_the_command_quantises_by_alias(
    model_dir: Path, store: LocalStore, source: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its JSON line has digest and size; its options go into the manifest."""
    given = ["harbour@1", f"--store={store.root}", f"--model={model_dir}", "--name=small"]
    options = ["--keys=bfloat16", "--scales=head", "--power-of-two", "--json"]
    assert quantize(*given, *options) == 0
    row = json.loads(capsys.readouterr().out)
    manifest = store.verify(Digest(row["digest"]))
    assert row["size_bytes"] == manifest.payload_bytes < source.manifest.payload_bytes
    transform = manifest.provenance.transform
    assert transform is not None
    assert transform.parameters == {
        "keys": "bfloat16",
        "values": "e4m3",
        "scales": "head",
        "power_of_two": True,
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"cartridge": "nobody@1"}, "nobody@1"),
        ({"--store": "/does/not/exist"}, "not in the store: harbour@1"),
        ({"--model": "/does/not/exist"}, "/does/not/exist"),
        ({"--adapter": "/does/not/exist"}, "/does/not/exist"),
        ({"--name": "Small"}, "name: 'Small' does not match"),
    ],
)
def test_the_command_says_what_is_wrong(
    changes: dict[str, str],
    text: str,
    model_dir: Path,
    store: LocalStore,
    source: Built,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, status 1, and no Cartridge has a name that it had not before."""
    given = {
        "cartridge": source.manifest.alias,
        "--store": str(store.root),
        "--model": str(model_dir),
        "--name": "small",
    } | changes
    cartridge = given.pop("cartridge")
    assert quantize(cartridge, *(f"{name}={value}" for name, value in given.items())) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert text in error
    assert store.aliases() == {source.manifest.alias: source.digest}


@pytest.mark.parametrize("option", ["--values=e5m2", "--keys=e4m3", "--scales=row", "--codec=zip"])
def test_the_command_knows_its_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Others end with argparse's status, naming the option."""
    with pytest.raises(SystemExit) as caught:
        quantize("a@1", "--store=s", "--model=m", "--name=small", option)
    assert caught.value.code == 2
    assert option.split("=")[0] in capsys.readouterr().err
