"""Prefill with a LoRA adapter: as peft computes it, and only what vLLM computes alike."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from vllm.config.lora import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper

from cartridge_engine_ext import identity
from cartridge_engine_ext.adapted_model import adapted_model, refuse_other_kinds
from cartridge_engine_ext.build import Builder, Source
from cartridge_engine_ext.commands import cartridge_build
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Adapter, ConventionKind
from cartridge_proto.stores import LocalStore
from tests.engine_ext.tiny_adapter import save_tiny_adapter
from tests.engine_ext.tiny_model import save_tiny_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
LIVE = [5, 3, 5]
TOLERANCE = 1e-5
"""Merged weights against two products in a row: float32, other roundings."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def adapter(model_dir: Path, tmp_path: Path) -> Path:
    """One adapter of it, which a test may damage."""
    return save_tiny_adapter(model_dir, tmp_path / "legal", seed=1)


def load(model_dir: Path) -> Any:
    """The model without an adapter."""
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def logits(model: Any) -> torch.Tensor:
    """Of all positions of a prompt."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return found


def change(adapter: Path, **changes: Any) -> None:
    """Write other values into adapter_config.json."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# --- what is computed ----------------------------------------------------------------------------
@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"alpha_pattern": {"k_proj": 32}}])
def test_it_computes_what_merged_weights_compute(
    config: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    """Scale and patterns are applied; the model without the adapter answers otherwise."""
    folder = save_tiny_adapter(model_dir, tmp_path / "a", seed=1, **config)
    merged = peft.PeftModel.from_pretrained(load(model_dir), str(folder)).merge_and_unload()
    found = logits(adapted_model(load(model_dir), folder))
    assert torch.allclose(found, logits(merged), atol=TOLERANCE)
    assert float((found - logits(load(model_dir))).abs().max()) > 1000 * TOLERANCE


def test_adapter_weights_take_the_models_dtype(model_dir: Path, adapter: Path) -> None:
    """As in an engine; peft alone would keep them in float32 beside a model in half precision."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    adapted = adapted_model(model, adapter)
    assert {parameter.dtype for parameter in adapted.parameters()} == {torch.bfloat16}


def builder_of(model_dir: Path, store: LocalStore, **options: Any) -> Builder:
    """A builder that says nothing."""
    return Builder(
        model_dir=model_dir,
        store=store,
        model_name="tiny",
        dtype=torch.float32,
        with_weights_digest=True,
        say=lambda line: None,
        **options,
    )


def test_the_artifact_is_the_adapters(model_dir: Path, adapter: Path, store: LocalStore) -> None:
    """Its keys, values and probe are computed with it, and the manifest says with which."""
    source = Source("", "ids", convention=ConventionKind.DOCUMENT)
    plain = builder_of(model_dir, store).prefill(source, IDS, LIVE).manifest
    built = builder_of(model_dir, store, adapter=adapter).prefill(source, IDS, LIVE).manifest
    assert built.model.adapter == Adapter(name="legal", digest=identity.adapter_digest(adapter))
    assert built.provenance == plain.provenance
    assert built.probe != plain.probe
    for part in ("k", "v"):
        # Also in the first layer: both projections have an adapter.
        assert built.tensors[f"layers.0.{part}"].sha256 != plain.tensors[f"layers.0.{part}"].sha256


def test_the_command_names_the_adapter(
    model_dir: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its folder, or as it is told."""
    (tmp_path / "text").write_text("Tides.")
    parser = argparse.ArgumentParser()
    cartridge_build.configure(parser)
    given = [f"--model={model_dir}", f"--text={tmp_path / 'text'}", "--name=tides", "--json"]
    given += [f"--store={tmp_path / 'store'}", f"--adapter={adapter}"]
    for options, name in (([], "legal"), (["--adapter-name=law"], "law")):
        assert cartridge_build.run(parser.parse_args([*given, *options])) == 0
        digest = json.loads(capsys.readouterr().out)["digest"]
        made_with = LocalStore(tmp_path / "store").verify(Digest(digest)).model.adapter
        assert made_with == Adapter(name=name, digest=identity.adapter_digest(adapter))
    change(adapter, use_dora=True)
    assert cartridge_build.run(parser.parse_args(given)) == 1
    assert "use_dora is True" in capsys.readouterr().err


# --- what is refused -----------------------------------------------------------------------------
OTHER_KINDS: list[dict[str, Any]] = [
    {"use_dora": True},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"lora_bias": True},
    {"modules_to_save": ["lm_head"]},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "pissa_niter_4"},
    {"init_lora_weights": "olora"},
    {"init_lora_weights": "corda"},
    {"init_lora_weights": "loftq"},
    {"alora_invocation_tokens": [1, 2]},
    {"layer_replication": [[0, 2]]},
    {"use_bdlora": {"nblocks": 2}},
    {"use_qalora": True},
]
"""Adapters that vLLM refuses when it loads them."""
UNTRIED: list[dict[str, Any]] = [
    {"peft_type": "ADALORA"},
    {"peft_type": None},
    {"modules_to_save": ["score"]},
    {"trainable_token_indices": [1]},
    {"target_parameters": ["experts.gate_up_proj"]},
    {"fan_in_fan_out": True},
    {"kasa_config": {"beta": 1}},
    {"of_a_later_peft": "on"},
]
"""Adapters that vLLM may load, and that nobody has shown to mean the same."""


@pytest.mark.parametrize("changes", [*OTHER_KINDS, *UNTRIED], ids=str)
def test_an_adapter_that_is_not_applied_alike_is_refused(
    changes: dict[str, Any], model_dir: Path, adapter: Path
) -> None:
    """The field is named with its value, and the file."""
    change(adapter, **changes)
    with pytest.raises(ConfigurationError) as refused:
        adapted_model(load(model_dir), adapter)
    ((name, value),) = changes.items()
    assert (
        f"adapter_config.json: engines do not apply this adapter as peft does: {name} is "
        in str(refused.value)
    )
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize("changes", OTHER_KINDS, ids=str)
def test_vllm_refuses_these_too(changes: dict[str, Any], adapter: Path) -> None:
    """The list is vLLM's: an adapter that it began to apply may be taken off."""
    change(adapter, **changes)
    helper = PEFTHelper.from_local_dir(str(adapter), None)
    with pytest.raises(ValueError, match=r"not (yet )?support|only supports"):
        helper.validate_legal(LoRAConfig(max_lora_rank=8, max_loras=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "EVA"},
        {"init_lora_weights": True},
        {"lora_dropout": 0.1},
        {"rank_pattern": {"k_proj": 4}},
        {"layers_to_transform": [0]},
        {"exclude_modules": ["lm_head"]},
        {"base_model_name_or_path": "elsewhere", "revision": "main"},
    ],
    ids=str,
)
def test_what_is_read_alike_is_not_refused(changes: dict[str, Any], adapter: Path) -> None:
    """VLLM would load these, and so may the builder."""
    change(adapter, **changes)
    refuse_other_kinds(adapter)
    PEFTHelper.from_local_dir(str(adapter), None).validate_legal(
        LoRAConfig(max_lora_rank=8, max_loras=1)
    )


def test_several_fields_are_all_named(adapter: Path) -> None:
    """The list does not stop at the first."""
    change(adapter, use_dora=True, bias="all")
    with pytest.raises(ConfigurationError, match="bias is 'all', use_dora is True"):
        refuse_other_kinds(adapter)


def test_tensors_without_a_layer_are_refused(model_dir: Path, adapter: Path) -> None:
    """An adapter of a deeper model would be applied in part."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    tensors[name.replace("layers.0", "layers.7")] = tensors[name].clone()
    save_file(tensors, file)
    with pytest.raises(ConfigurationError, match=r"1 tensors fit no layer .*layers\.7"):
        adapted_model(load(model_dir), adapter)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning")
def test_a_layer_without_its_tensors_is_refused(model_dir: Path, adapter: Path) -> None:
    """What is missing would be made up."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[next(iter(tensors))]
    save_file(tensors, file)
    with pytest.raises(
        ConfigurationError, match="0 tensors fit no layer of the model, 1 are missing"
    ):
        adapted_model(load(model_dir), adapter)


def test_tensors_of_another_shape_are_refused(adapter: Path, tmp_path: Path) -> None:
    """An adapter of a model with other heads."""
    other = save_tiny_model(tmp_path / "other", head_dim=16)
    with pytest.raises(ConfigurationError, match="size mismatch"):
        adapted_model(load(other), adapter)


def test_an_adapter_without_weights_is_refused(model_dir: Path, adapter: Path) -> None:
    """A pickle is never read, and nothing is fetched from elsewhere."""
    file = adapter / "adapter_model.safetensors"
    file.rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigurationError, match=r"adapter_model\.safetensors"):
        adapted_model(load(model_dir), adapter)


def test_without_peft_the_extra_is_named(
    model_dir: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builders without an adapter never need it."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'cartridge-router\[adapters\]'"):
        adapted_model(load(model_dir), adapter)
