"""Whether an artifact's KV means the same on an engine.

Owns the comparison, field by field, that gateway and engine both make. Refuses to guess: a field
that is not equal is a mismatch, and an unknown weights digest lowers the match level.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from cartridge_proto.digest import Digest, DigestText
from cartridge_proto.manifest import (
    Geometry,
    Manifest,
    ModelIdentity,
    Rope,
    Rotation,
)

RELOCATABLE_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Types whose angle is linear in the position, so that a key can be moved by one more rotation.

Source: RoFormer (arXiv 2104.09864), section 3.2.2; length-dependent types (dynamic, longrope)
change their frequencies with the sequence and are left out.
"""
ROPE_PER_LAYER_KIND = "per_layer_kind"
"""Type of a model whose kinds of layers have rotary embeddings of their own: `scaling` has one
object for each kind, `type`, `theta` and `scaling` again."""


class MatchLevel(StrEnum):
    """How much of the model identity was compared."""

    WEIGHTS = "weights"
    CONFIG = "config"


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine serves, as it publishes it at start."""

    model: ModelIdentity
    geometry: Geometry
    rope: Rope
    chat_template_digest: DigestText | None
    max_model_len: Annotated[int, msgspec.Meta(gt=0)]
    """Context limit in tokens, Cartridge positions included."""
    block_size: Annotated[int, msgspec.Meta(gt=0)]
    """KV block size in tokens."""


class Mismatch(msgspec.Struct, frozen=True):
    """One manifest field that the engine does not share."""

    field: str
    artifact: str
    engine: str

    def __str__(self) -> str:
        return f"{self.field}: artifact has {self.artifact}, engine has {self.engine}"


_MODEL_FIELDS = ("architecture", "config_digest", "tokenizer_digest")
_GEOMETRY_FIELDS = ("num_layers", "num_kv_heads", "head_dim_k", "head_dim_v", "layer_kinds")
_ROPE_FIELDS = ("type", "theta", "scaling", "rotary_dim")


def incompatibilities(manifest: Manifest, engine: EngineIdentity) -> list[Mismatch]:
    """Every field of the manifest that keeps its KV from meaning the same on this engine.

    But the adapter: it is a request that names one, see `adapter_mismatch`.
    """
    found = [
        *_unequal("model", _MODEL_FIELDS, manifest.model, engine.model),
        *_unequal("geometry", _GEOMETRY_FIELDS, manifest.geometry, engine.geometry),
        *_unequal("rope", _ROPE_FIELDS, manifest.rope, engine.rope),
    ]
    weights = manifest.model.weights_digest, engine.model.weights_digest
    if None not in weights and weights[0] != weights[1]:
        found.append(Mismatch("model.weights_digest", str(weights[0]), str(weights[1])))
    template = manifest.prompt_convention.chat_template_digest
    if template is not None and template != engine.chat_template_digest:
        found.append(
            Mismatch(
                "prompt_convention.chat_template_digest",
                template,
                str(engine.chat_template_digest),
            )
        )
    return found


def adapter_mismatch(manifest: Manifest, digest: Digest | None) -> Mismatch | None:
    """Whether the KV belongs to another adapter than the one that a request is computed with.

    `digest` is that of the request's adapter, `None` for the model without one. Names are labels.
    """
    adapter = manifest.model.adapter
    made_with = None if adapter is None else adapter.digest
    if made_with == digest:
        return None
    return Mismatch("model.adapter", _shown(made_with), _shown(digest))


def unsupported(manifest: Manifest) -> list[Mismatch]:
    """Every field that asks for something the virtual prefix v1 does not do.

    The second column of each row is what is supported.
    """
    found = []
    if manifest.rope.stored_keys is not Rotation.POST:
        found.append(Mismatch("rope.stored_keys", manifest.rope.stored_keys, "post"))
    if manifest.rope.first_position != 0:
        found.append(Mismatch("rope.first_position", str(manifest.rope.first_position), "0"))
    return found


def immovable_types(rope: Rope) -> list[str]:
    """Types of this rotary embedding whose keys cannot be moved to another position."""
    types = [rope.type]
    if rope.type == ROPE_PER_LAYER_KIND:
        parts = (rope.scaling or {}).values()
        types = [str(part.get("type")) for part in parts if isinstance(part, dict)] or types
    return sorted(set(types) - RELOCATABLE_ROPE_TYPES)


def match_level(manifest: Manifest, engine: EngineIdentity) -> MatchLevel:
    """Whether weights were compared, or only what the configuration says."""
    known = None not in (manifest.model.weights_digest, engine.model.weights_digest)
    return MatchLevel.WEIGHTS if known else MatchLevel.CONFIG


def _unequal(
    prefix: str, fields: tuple[str, ...], artifact: object, engine: object
) -> list[Mismatch]:
    return [
        Mismatch(f"{prefix}.{name}", _shown(ours), _shown(theirs))
        for name in fields
        if (ours := getattr(artifact, name)) != (theirs := getattr(engine, name))
    ]


def _shown(value: object) -> str:
    return msgspec.json.encode(value).decode()[:120]
