"""What model this is: digests, geometry and rotary embedding, read from a model folder.

Owns the one way both the builder and the engine describe a model, so that equal means equal.
Refuses folders that do not say what is needed, and models the virtual prefix cannot serve.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto.canonical_json import encode_canonical
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Geometry, LayerKind, ModelIdentity, Rope, Rotation

_NOT_IDENTITY = frozenset(
    {"_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"}
    | {"use_cache", "architectures"}
)
"""config.json keys that say how a model was saved, not what it computes (the architecture has its
own field)."""

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


def geometry(model_dir: Path) -> Geometry:
    """KV shape of the model.

    Raises:
        ConfigurationError: config.json lacks a needed number.
    """
    config = _read_config(model_dir)
    num_layers, num_heads = (
        _number(config, key) for key in ("num_hidden_layers", "num_attention_heads")
    )
    head_dim = int(config.get("head_dim") or _number(config, "hidden_size") // num_heads)
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
    """
    config = _read_config(model_dir)
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    rope_type = str(parameters.pop("rope_type", None) or parameters.pop("type", None) or "default")
    factor = float(parameters.pop("partial_rotary_factor", None) or _partial_factor(config))
    head_dim = geometry(model_dir).head_dim_k
    return Rope(
        type=rope_type,
        theta=float(theta),
        scaling=parameters or None,
        rotary_dim=int(head_dim * factor),
        stored_keys=Rotation.POST,
        first_position=0,
    )


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


def _layer_kinds(config: dict[str, Any], num_layers: int) -> list[LayerKind]:
    if config.get("kv_lora_rank"):
        return [LayerKind.LATENT] * num_layers
    names = config.get("layer_types")
    if isinstance(names, list):
        return [LayerKind.FULL if name == "full_attention" else LayerKind.SLIDING for name in names]
    has_window = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    return [LayerKind.SLIDING if has_window else LayerKind.FULL] * num_layers


def _partial_factor(config: dict[str, Any]) -> float:
    return float(config.get("partial_rotary_factor") or 1.0)


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
