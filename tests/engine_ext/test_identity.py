"""What model this is: digests that change with meaning only, geometry, and both rope spellings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cartridge_engine_ext import identity
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto.compatibility import immovable_types
from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import LayerKind, ModelIdentity, Rotation

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}


def folder(root: Path, config: Any = CONFIG, **changes: Any) -> Path:
    """A model folder with this config, a tokenizer and two shards of weights."""
    root.mkdir(parents=True, exist_ok=True)
    if isinstance(config, dict):
        config = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    (root / "config.json").write_text(json.dumps(config))
    (root / "tokenizer.json").write_text('{"model": 1}')
    (root / "model-1.safetensors").write_bytes(b"one")
    (root / "model-2.safetensors").write_bytes(b"two")
    return root


def described(model_dir: Path, *, with_weights: bool = True) -> ModelIdentity:
    """The identity of a folder."""
    return identity.model_identity(model_dir, name="m", with_weights=with_weights)


# --- digests -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 10_000.0},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"sliding_window": 128},
        {"model_type": "mistral"},
        {"vocab_size": ...},
    ],
    ids=str,
)
def test_what_changes_the_computation_changes_the_digest(
    change: dict[str, Any], tmp_path: Path
) -> None:
    """Any key that is not known to be about saving is part of the identity."""
    before = described(folder(tmp_path / "a"))
    after = described(folder(tmp_path / "b", **change))
    assert after.config_digest != before.config_digest
    assert msgspec.structs.replace(after, config_digest=before.config_digest) == before


@pytest.mark.parametrize(
    "change",
    [
        {"_name_or_path": "/somewhere"},
        {"_model_name_or_path": "/somewhere"},
        {"transformers_version": "5.0.0"},
        {"dtype": "bfloat16"},
        {"torch_dtype": "bfloat16"},
        {"use_cache": False},
    ],
    ids=str,
)
def test_how_a_model_was_saved_is_not_its_identity(change: dict[str, Any], tmp_path: Path) -> None:
    """Keys that say how and by what a folder was written leave every digest as it is."""
    assert described(folder(tmp_path / "a", **change)) == described(folder(tmp_path / "b"))


def test_the_order_of_keys_is_not_identity(tmp_path: Path) -> None:
    """The same config written in another order is the same model."""
    reordered = dict(sorted(CONFIG.items(), reverse=True))
    assert described(folder(tmp_path / "a", reordered)) == described(folder(tmp_path / "b"))


def test_the_architecture_is_a_field_of_its_own(tmp_path: Path) -> None:
    """Another architecture is named as such, not as another config."""
    one = described(folder(tmp_path / "a"))
    other = described(folder(tmp_path / "b", architectures=["MistralForCausalLM"]))
    assert (one.architecture, other.architecture) == ("LlamaForCausalLM", "MistralForCausalLM")
    assert one.config_digest == other.config_digest
    assert described(folder(tmp_path / "c", architectures=...)).architecture == "unknown"


def test_tokenizer_and_weights_have_their_digests(tmp_path: Path) -> None:
    """Each file changes its own digest; a renamed or added shard counts too."""
    model_dir = folder(tmp_path)
    first = described(model_dir)
    assert first.tokenizer_digest == sha256_digest(b'{"model": 1}')
    (model_dir / "tokenizer.json").write_text('{"model": 2}')
    second = described(model_dir)
    assert second.tokenizer_digest != first.tokenizer_digest
    assert second.weights_digest == first.weights_digest
    (model_dir / "model-2.safetensors").write_bytes(b"TWO")
    third = described(model_dir)
    assert third.weights_digest != second.weights_digest
    (model_dir / "model-2.safetensors").rename(model_dir / "model-3.safetensors")
    assert described(model_dir).weights_digest != third.weights_digest


def test_weights_are_read_on_demand_only(tmp_path: Path) -> None:
    """Without hashing the digest is unknown, which is `None`, and no weights are needed."""
    model_dir = folder(tmp_path)
    for file in model_dir.glob("*.safetensors"):
        file.unlink()
    assert described(model_dir, with_weights=False).weights_digest is None
    with pytest.raises(ConfigurationError, match=r"no \*\.safetensors"):
        described(model_dir)


def test_a_sentencepiece_tokenizer_is_hashed(tmp_path: Path) -> None:
    """Without tokenizer.json the older file counts."""
    model_dir = folder(tmp_path)
    (model_dir / "tokenizer.json").rename(model_dir / "tokenizer.model")
    assert described(model_dir).tokenizer_digest == sha256_digest(b'{"model": 1}')


# --- geometry ------------------------------------------------------------------------------------
def test_the_shape_of_the_kv_cache(tmp_path: Path) -> None:
    """Heads and dimensions come from config.json, with the defaults that transformers has."""
    shape = identity.geometry(folder(tmp_path / "a"))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim_k, shape.head_dim_v) == (
        3,
        2,
        8,
        8,
    )
    assert shape.layer_kinds == [LayerKind.FULL] * 3
    own = identity.geometry(folder(tmp_path / "b", head_dim=16, num_key_value_heads=...))
    assert (own.num_kv_heads, own.head_dim_k) == (8, 16)


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"sliding_window": 128, "model_type": "mistral"}, [LayerKind.SLIDING] * 3),
        (
            {"sliding_window": 128, "use_sliding_window": False, "model_type": "qwen2"},
            [LayerKind.FULL] * 3,
        ),
        (
            {
                "sliding_window": 128,
                "use_sliding_window": True,
                "max_window_layers": 1,
                "model_type": "qwen2",
            },
            [LayerKind.FULL, LayerKind.SLIDING, LayerKind.SLIDING],
        ),
        (
            {"sliding_window": 128, "model_type": "gemma2"},
            [LayerKind.SLIDING, LayerKind.FULL, LayerKind.SLIDING],
        ),
        ({"sliding_window": None}, [LayerKind.FULL] * 3),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            [LayerKind.FULL, LayerKind.SLIDING, LayerKind.FULL],
        ),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, [LayerKind.LATENT] * 3),
    ],
    ids=str,
)
def test_the_kind_of_each_layer(
    change: dict[str, Any], kinds: list[LayerKind], tmp_path: Path
) -> None:
    """Sliding and latent attention are recognised in every spelling; older ones by their class."""
    assert identity.geometry(folder(tmp_path, **change)).layer_kinds == kinds


def test_latents_are_the_keys_of_one_head(tmp_path: Path) -> None:
    """The key is the compressed vector and the rotated part, the value the vector alone."""
    model_dir = folder(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64)
    shape = identity.geometry(model_dir)
    assert (shape.num_kv_heads, shape.head_dim_k, shape.head_dim_v) == (1, 576, 512)
    assert identity.rope(model_dir).rotary_dim == 64


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layer_types": ["full_attention", "linear_attention", "conv"]}, "conv, linear_attention"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types: chunked_attention"),
        ({"global_head_dim": 16}, "global_head_dim"),
        ({"num_global_key_value_heads": 1}, "num_global_key_value_heads"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is None"),
        ({"sliding_window": 128, "model_type": "unheard-of"}, "transformers does not know"),
    ],
    ids=str,
)
def test_layers_without_keys_and_values_of_one_shape_are_refused(
    change: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """State-space, chunked and unequal layers, and windows that nobody can place, by name."""
    with pytest.raises(ConfigurationError, match=text):
        identity.geometry(folder(tmp_path, **change))


# --- rope ----------------------------------------------------------------------------------------
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 500.0}, {"rope_parameters": {"rope_theta": 500.0}}),
        (
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_theta": 500.0, "rope_type": "llama3", **LLAMA3}},
        ),
        (
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
            {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        ),
    ],
    ids=["default", "llama3", "linear", "partial"],
)
def test_both_spellings_of_rope_are_one(
    old: dict[str, Any], new: dict[str, Any], tmp_path: Path
) -> None:
    """`rope_theta` with `rope_scaling` and `rope_parameters` describe the same embedding."""
    one = identity.rope(folder(tmp_path / "a", **old))
    other = identity.rope(folder(tmp_path / "b", **{"rope_theta": ..., **new}))
    assert one == other
    assert one.theta == 500.0
    assert (one.stored_keys, one.first_position) == (Rotation.POST, 0)


def test_rope_is_read_whole(tmp_path: Path) -> None:
    """Type, scaling and rotated channels are what the folder says; absent means the default."""
    plain = identity.rope(folder(tmp_path / "a", rope_theta=...))
    assert (plain.type, plain.theta, plain.scaling, plain.rotary_dim) == (
        "default",
        10_000.0,
        None,
        8,
    )
    scaled = identity.rope(
        folder(tmp_path / "b", rope_scaling={"rope_type": "llama3", **LLAMA3}, head_dim=16)
    )
    assert (scaled.type, scaled.scaling, scaled.rotary_dim) == ("llama3", LLAMA3, 16)
    half = identity.rope(folder(tmp_path / "c", partial_rotary_factor=0.5))
    assert half.rotary_dim == 4


KINDS_OF_ROPE: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def test_kinds_of_layers_may_have_ropes_of_their_own(tmp_path: Path) -> None:
    """Each kind's parameters are kept apart; those of full attention stand for the model."""
    rope = identity.rope(folder(tmp_path, **KINDS_OF_ROPE))
    assert (rope.type, rope.theta) == ("per_layer_kind", 1e6)
    assert rope.scaling == {
        "full": {"type": "linear", "theta": 1e6, "scaling": {"factor": 8.0}},
        "sliding": {"type": "default", "theta": 1e4, "scaling": None},
    }
    assert immovable_types(rope) == []


def test_the_older_spelling_of_two_ropes_is_the_same(tmp_path: Path) -> None:
    """Gemma 3 was first written with `rope_local_base_freq` and a pattern of layers."""
    model_dir = folder(
        tmp_path,
        model_type="gemma3_text",
        sliding_window=128,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert identity.geometry(model_dir).layer_kinds == [
        LayerKind.SLIDING,
        LayerKind.SLIDING,
        LayerKind.FULL,
    ]
    rope = identity.rope(model_dir)
    assert rope.scaling == {
        "full": {"type": "linear", "theta": 1e6, "scaling": {"factor": 8.0}},
        "sliding": {"type": "default", "theta": 1e4, "scaling": None},
    }


def test_layer_types_do_not_hide_the_older_spelling(tmp_path: Path) -> None:
    """Files of a time between have `layer_types`, and the ropes as before."""
    model_dir = folder(
        tmp_path,
        model_type="gemma3_text",
        sliding_window=128,
        layer_types=KINDS_OF_ROPE["layer_types"],
        rope_theta=1e6,
        rope_local_base_freq=1e4,
    )
    rope = identity.rope(model_dir)
    assert (rope.type, rope.theta) == ("per_layer_kind", 1e6)
    assert rope.scaling is not None
    assert rope.scaling["sliding"]["theta"] == 1e4


def test_kinds_that_rotate_different_parts_are_refused(tmp_path: Path) -> None:
    """The manifest has one number of rotated channels."""
    parameters = {
        "full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_theta": 1e4},
    }
    model_dir = folder(tmp_path, **{**KINDS_OF_ROPE, "rope_parameters": parameters})
    with pytest.raises(ConfigurationError, match="rotate different parts"):
        identity.rope(model_dir)


def test_one_kind_that_cannot_be_moved_makes_the_model_immovable(tmp_path: Path) -> None:
    """The types are named; a scaling without kinds names the type itself."""
    parameters = {
        **KINDS_OF_ROPE["rope_parameters"],
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
    }
    rope = identity.rope(folder(tmp_path, **{**KINDS_OF_ROPE, "rope_parameters": parameters}))
    assert immovable_types(rope) == ["dynamic"]
    assert immovable_types(msgspec.structs.replace(rope, scaling=None)) == ["per_layer_kind"]


def test_length_dependent_rope_is_not_called_relocatable(tmp_path: Path) -> None:
    """A dynamic embedding keeps its name, so that moving its keys is refused."""
    rope = identity.rope(folder(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert rope.type == "dynamic"
    assert immovable_types(rope) == ["dynamic"]


# --- chat template -------------------------------------------------------------------------------
def test_the_chat_template_is_found_where_transformers_keeps_it(tmp_path: Path) -> None:
    """A file of its own wins over the tokenizer's config; a model may have none."""
    model_dir = folder(tmp_path)
    assert identity.chat_template(model_dir) is None
    assert identity.chat_template_digest(model_dir) is None
    tokenizer_config = model_dir / "tokenizer_config.json"
    tokenizer_config.write_text("{}")
    assert identity.chat_template(model_dir) is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for value, expected in (("inline", "inline"), (named, "d")):
        tokenizer_config.write_text(json.dumps({"chat_template": value}))
        assert identity.chat_template(model_dir) == expected
    (model_dir / "chat_template.jinja").write_text("own file\n")
    assert identity.chat_template(model_dir) == "own file\n"
    assert identity.chat_template_digest(model_dir) == sha256_digest(b"own file\n")


# --- folders that do not say ---------------------------------------------------------------------
def drop(name: str) -> Callable[[Path], None]:
    """Remove a file."""
    return lambda model_dir: (model_dir / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    """Replace a file."""

    def replace(model_dir: Path) -> None:
        (model_dir / name).write_text(text)

    return replace


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (drop("config.json"), "config.json: .*No such file"),
        (write("config.json", "{"), "config.json: "),
        (write("config.json", "[]"), "config.json: .*not an object"),
        (write("config.json", '{"big": 9007199254740993}'), "config.json: .*canonical"),
        (drop("tokenizer.json"), r"neither tokenizer\.json nor tokenizer\.model"),
    ],
    ids=["absent", "cut", "list", "number", "tokenizer"],
)
def test_an_unusable_folder_is_a_configuration_error(
    damage: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    """What is missing or unreadable is named with its file."""
    model_dir = folder(tmp_path)
    damage(model_dir)
    with pytest.raises(ConfigurationError, match=text):
        described(model_dir)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
@pytest.mark.parametrize("value", [..., None, "8"], ids=["absent", "null", "text"])
def test_a_missing_number_is_named(key: str, value: Any, tmp_path: Path) -> None:
    """Geometry is never guessed."""
    with pytest.raises(ConfigurationError, match=f"{key} is "):
        identity.geometry(folder(tmp_path, **{key: value}))


@pytest.mark.parametrize(
    "text",
    ["{", json.dumps({"chat_template": [{"name": "tool_use", "template": "t"}]})],
    ids=["cut", "no_default"],
)
def test_an_unusable_tokenizer_config_is_a_configuration_error(text: str, tmp_path: Path) -> None:
    """A cut file, or named templates without a default, are named with their file."""
    model_dir = folder(tmp_path)
    (model_dir / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"tokenizer_config\.json"):
        identity.chat_template(model_dir)


# --- LoRA adapters -------------------------------------------------------------------------------
ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "k_proj"],
    "base_model_name_or_path": "somewhere/model",
    "peft_version": "0.21.2",
}


def adapter_folder(root: Path, weights: bytes = b"weights", **changes: Any) -> Path:
    """An adapter as peft saves it."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "adapter_config.json").write_text(json.dumps({**ADAPTER, **changes}))
    (root / "adapter_model.safetensors").write_bytes(weights)
    return root


def test_two_adapters_of_one_name_have_different_digests(tmp_path: Path) -> None:
    """The weights count to the last bit, under the same configuration and folder name."""
    one = identity.adapter_digest(adapter_folder(tmp_path / "one" / "legal", b"weights"))
    other = identity.adapter_digest(adapter_folder(tmp_path / "other" / "legal", b"weightt"))
    again = identity.adapter_digest(adapter_folder(tmp_path / "again", b"weights"))
    assert one != other
    assert one == again


@pytest.mark.parametrize(
    "change",
    [
        {"lora_alpha": 16},
        {"r": 8},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 4}},
        {"target_modules": ["q_proj"]},
        {"task_type": "CAUSAL_LM"},
        {"unknown_to_us": 1},
    ],
    ids=str,
)
def test_what_changes_an_adapter_changes_its_digest(change: dict[str, Any], tmp_path: Path) -> None:
    """The scale is in the configuration: any key not known to be about saving is identity."""
    before = identity.adapter_digest(adapter_folder(tmp_path / "a"))
    assert identity.adapter_digest(adapter_folder(tmp_path / "b", **change)) != before


@pytest.mark.parametrize(
    "change",
    [
        {"auto_mapping": {"parent_library": "transformers"}},
        {"base_model_name_or_path": "/elsewhere"},
        {"inference_mode": True},
        {"peft_version": "0.30"},
        {"revision": "main"},
    ],
    ids=str,
)
def test_how_an_adapter_was_saved_is_not_its_identity(
    change: dict[str, Any], tmp_path: Path
) -> None:
    """Where its base model lay, and by which peft it was written."""
    before = identity.adapter_digest(adapter_folder(tmp_path / "a"))
    assert identity.adapter_digest(adapter_folder(tmp_path / "b", **change)) == before


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (drop("adapter_config.json"), r"adapter_config\.json: .*No such file"),
        (write("adapter_config.json", "[]"), r"adapter_config\.json: .*not an object"),
        (write("adapter_config.json", '{"r": 1e400}'), r"adapter_config\.json: "),
        (drop("adapter_model.safetensors"), r"adapter_model\.safetensors: .*No such file"),
    ],
    ids=["absent", "list", "number", "weights"],
)
def test_an_unusable_adapter_is_a_configuration_error(
    damage: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    """What is missing or unreadable is named with its file."""
    folder = adapter_folder(tmp_path)
    damage(folder)
    with pytest.raises(ConfigurationError, match=text):
        identity.adapter_digest(folder)
