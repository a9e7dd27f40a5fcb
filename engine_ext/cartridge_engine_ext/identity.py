"""What model this is: digests, geometry and rotary embedding, read from a model folder.

Owns the one way both the builder and the engine describe a model, so that equal means equal.
Refuses folders that do not say what is needed, and models the virtual prefix cannot serve.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto.canonical_json import encode_canonical
from cartridge_proto.compatibility import ROPE_PER_LAYER_KIND
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Geometry, LayerKind, ModelIdentity, Rope, Rotation

_NOT_IDENTITY = frozenset(
    {"_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"}
    | {"use_cache", "architectures"}
)
"""config.json keys that say how a model was saved, not what it computes (the architecture has its
own field)."""

_LAYER_TYPES = {"full_attention": LayerKind.FULL, "sliding_attention": LayerKind.SLIDING}
"""Names in config.json of the kinds of layers that a virtual prefix can serve."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""A LoRA adapter as peft saves it and vLLM reads it: what it is, and its weights."""

_NOT_ADAPTER_IDENTITY = frozenset(
    {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"}
)
"""adapter_config.json keys that say how and from what an adapter was saved."""

_CHUNK_BYTES = 1 << 22


def model_identity(model_dir: Path, *, name: str, with_weights: bool) -> ModelIdentity:
    """Digests of a Hugging Face folder.

    Args:
        model_dir: holds config.json, a tokenizer and safetensors.
        name: the name people use; not compared.
        with_weights: hash the weights too (reads every byte of them once).

    Raises:
        ConfigurationError: a file is missing or cannot be read.
    """
    config = _read_config(model_dir)
    kept = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    try:
        config_digest = sha256_digest(encode_canonical(kept))
    except ValueError as error:
        raise ConfigurationError(f"{model_dir / 'config.json'}: {error}") from error
    return ModelIdentity(
        architecture=str((config.get("architectures") or ["unknown"])[0]),
        name=name,
        config_digest=config_digest,
        tokenizer_digest=_tokenizer_digest(model_dir),
        weights_digest=_weights_digest(model_dir) if with_weights else None,
        adapter=None,
    )


def adapter_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter.

    Raises:
        ConfigurationError: it cannot be read.
    """
    return _read_object(folder / ADAPTER_FILES[0])


def adapter_digest(folder: Path) -> Digest:
    """Digest of a LoRA adapter as it is served: configuration and weights. Reads every byte.

    Raises:
        ConfigurationError: naming the file that is missing or cannot be read.
    """
    config_file, weights_file = (folder / name for name in ADAPTER_FILES)
    config = adapter_config(folder)
    kept = {key: value for key, value in config.items() if key not in _NOT_ADAPTER_IDENTITY}
    try:
        config_digest = sha256_digest(encode_canonical(kept))
    except ValueError as error:
        raise ConfigurationError(f"{config_file}: {error}") from error
    try:
        weights_digest = _file_digest(weights_file)
    except OSError as error:
        raise ConfigurationError(f"{weights_file}: {error}") from error
    listing = f"{config_digest} {config_file.name}\n{weights_digest} {weights_file.name}\n"
    return sha256_digest(listing.encode())


def geometry(model_dir: Path) -> Geometry:
    """KV shape of the model.

    Raises:
        ConfigurationError: config.json lacks a needed number, or has layers that keep something
            else than keys and values of one shape.
    """
    config = _read_layers(model_dir)
    num_layers, num_heads = (
        _number(config, key) for key in ("num_hidden_layers", "num_attention_heads")
    )
    if config.get("kv_lora_rank"):
        rank = _number(config, "kv_lora_rank")
        return Geometry(
            num_layers=num_layers,
            num_kv_heads=1,
            head_dim_k=rank + _number(config, "qk_rope_head_dim"),
            head_dim_v=rank,
            layer_kinds=[LayerKind.LATENT] * num_layers,
        )
    head_dim = int(config.get("head_dim") or _number(config, "hidden_size") // num_heads)
    for key in ("global_head_dim", "num_global_key_value_heads"):
        if config.get(key):
            raise ConfigurationError(
                f"config.json: {key}: layers whose keys differ in shape cannot have a virtual "
                "prefix"
            )
    return Geometry(
        num_layers=num_layers,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim_k=head_dim,
        head_dim_v=head_dim,
        layer_kinds=_layer_kinds(config, num_layers),
    )


def rope(model_dir: Path) -> Rope:
    """Rotary embedding of the model, for keys stored post rotation from position 0.

    Reads both spellings of config.json: `rope_parameters`, and `rope_theta` with `rope_scaling`.

    Raises:
        ConfigurationError: kinds of layers rotate different parts of a key.
    """
    config, shape = _read_layers(model_dir), geometry(model_dir)
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parts = {
        kind: _OneRope.read(config, parameters[name])
        for kind in dict.fromkeys(shape.layer_kinds)
        if (name := layer_type(kind)) in parameters
    }
    one = (
        parts.get(LayerKind.FULL)
        or next(iter(parts.values()), None)
        or _OneRope.read(config, parameters)
    )
    if any(part.partial_factor != one.partial_factor for part in parts.values()):
        raise ConfigurationError(
            "config.json: rope_parameters: kinds of layers that rotate different parts of a key "
            "cannot have a virtual prefix"
        )
    return Rope(
        type=ROPE_PER_LAYER_KIND if parts else one.type,
        theta=one.theta,
        scaling={
            kind.value: {"type": part.type, "theta": part.theta, "scaling": part.scaling}
            for kind, part in parts.items()
        }
        or one.scaling,
        rotary_dim=(
            shape.head_dim_k - shape.head_dim_v
            if shape.has_latents
            else int(shape.head_dim_k * one.partial_factor)
        ),
        stored_keys=Rotation.POST,
        first_position=0,
    )


def layer_type(kind: LayerKind) -> str | None:
    """Name in config.json of a kind of layers; `None` where none is needed."""
    return next((name for name, named in _LAYER_TYPES.items() if named is kind), None)


def chat_template(model_dir: Path) -> str | None:
    """The model's own chat template, or `None`.

    Raises:
        ConfigurationError: tokenizer_config.json cannot be read, or has several named templates
            and none is the default.
    """
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    config_file = model_dir / "tokenizer_config.json"
    if not config_file.is_file():
        return None
    template = _read_object(config_file).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        if "default" not in named:
            raise ConfigurationError(f"{config_file}: no chat template is named default")
        template = named["default"]
    return None if template is None else str(template)


def chat_template_digest(model_dir: Path) -> Digest | None:
    """sha256 of the chat template's text."""
    template = chat_template(model_dir)
    return None if template is None else sha256_digest(template.encode())


def _read_config(model_dir: Path) -> dict[str, Any]:
    return _read_object(model_dir / "config.json")


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{file}: not an object")
    return value


def _number(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise ConfigurationError(f"config.json: {key} is {value!r}, a number is needed")
    return value


def _read_layers(model_dir: Path) -> dict[str, Any]:
    """config.json; with what it leaves to the model's class, where layers may have a window.

    Older files name no `layer_types`, or two rotary embeddings in a spelling of their own: what
    that means is a rule of the class, and transformers has those rules. vLLM takes them from there.
    """
    config = _read_config(model_dir)
    has_unnamed_windows = config.get("sliding_window") and not config.get("layer_types")
    has_unnamed_ropes = "rope_local_base_freq" in config and "rope_parameters" not in config
    if not (has_unnamed_windows or has_unnamed_ropes):
        return config
    try:
        known = transformers.AutoConfig.from_pretrained(model_dir).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"{model_dir / 'config.json'}: a sliding_window, no layer_types, and transformers "
            f"does not know the model: {error}"
        ) from error
    if names := getattr(known, "layer_types", None):
        config["layer_types"] = list(names)
        config["rope_parameters"] = known.rope_parameters
    return config


def _layer_kinds(config: dict[str, Any], num_layers: int) -> list[LayerKind]:
    names = config.get("layer_types")
    if isinstance(names, list):
        others = sorted({str(name) for name in names} - set(_LAYER_TYPES))
        if others:
            raise ConfigurationError(
                f"config.json: layer_types: {', '.join(others)}: only layers with keys and values "
                f"can have a virtual prefix ({', '.join(_LAYER_TYPES)})"
            )
        return [_LAYER_TYPES[name] for name in names]
    has_window = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    return [LayerKind.SLIDING if has_window else LayerKind.FULL] * num_layers


@dataclass(frozen=True)
class _OneRope:
    """A rotary embedding as config.json has it."""

    type: str
    theta: float
    scaling: dict[str, Any] | None
    partial_factor: float

    @classmethod
    def read(cls, config: dict[str, Any], parameters: dict[str, Any]) -> "_OneRope":
        rest = dict(parameters)
        theta = rest.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
        rope_type = str(rest.pop("rope_type", None) or rest.pop("type", None) or "default")
        factor = rest.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
        return cls(rope_type, float(theta), rest or None, float(factor or 1.0))


def _tokenizer_digest(model_dir: Path) -> Digest:
    for name in ("tokenizer.json", "tokenizer.model"):
        file = model_dir / name
        if file.is_file():
            return _file_digest(file)
    raise ConfigurationError(f"{model_dir}: neither tokenizer.json nor tokenizer.model")


def _weights_digest(model_dir: Path) -> Digest:
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigurationError(f"{model_dir}: no *.safetensors to hash")
    listing = "".join(f"{_file_digest(file)} {file.name}\n" for file in files)
    return sha256_digest(listing.encode())


def _file_digest(file: Path) -> Digest:
    hasher = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return Digest("sha256:" + hasher.hexdigest())
