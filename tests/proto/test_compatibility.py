"""Compatibility: each field that differs is reported by its name, and nothing else is."""

from typing import Any, Literal

import msgspec
import pytest

from cartridge_proto.compatibility import (
    EngineIdentity,
    MatchLevel,
    Mismatch,
    adapter_mismatch,
    incompatibilities,
    match_level,
    unsupported,
)
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import (
    Adapter,
    ConventionKind,
    Geometry,
    LayerKind,
    Manifest,
    ModelIdentity,
    Rope,
    Rotation,
    ValueScale,
)
from tests.proto.sample_artifact import engine_of, sample_artifact

OTHER = sha256_digest(b"other")
MANIFEST, _ = sample_artifact()
ENGINE = engine_of(MANIFEST)

CHANGES: dict[str, object] = {
    "model.architecture": "OtherForCausalLM",
    "model.config_digest": OTHER,
    "model.tokenizer_digest": OTHER,
    "model.weights_digest": OTHER,
    "geometry.num_layers": 3,
    "geometry.num_kv_heads": 1,
    "geometry.head_dim_k": 8,
    "geometry.head_dim_v": 8,
    "geometry.layer_kinds": [LayerKind.FULL, LayerKind.SLIDING],
    "rope.type": "llama3",
    "rope.theta": 10000.5,
    "rope.scaling": {"factor": 8.0},
    "rope.rotary_dim": 2,
}
NOT_COMPARED = {
    "model.name": "a label, not an identity",
    "model.adapter": "the request names it, see `adapter_mismatch`",
    "rope.stored_keys": "a fact of the artifact, see `unsupported`",
    "rope.first_position": "a fact of the artifact, see `unsupported`",
}


def with_field(target: Any, path: str, value: object) -> Any:
    """A copy of a struct with the field at a dotted path replaced."""
    name, _, rest = path.partition(".")
    inner = with_field(getattr(target, name), rest, value) if rest else value
    return msgspec.structs.replace(target, **{name: inner})


def fields_of(found: list[Mismatch]) -> list[str]:
    """Names of the reported fields."""
    return [mismatch.field for mismatch in found]


def test_an_engine_with_the_same_identity_is_compatible() -> None:
    """Equal fields give no mismatch, and weights were compared."""
    assert incompatibilities(MANIFEST, ENGINE) == []
    assert match_level(MANIFEST, ENGINE) is MatchLevel.WEIGHTS


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_changed_in_the_artifact_is_reported_by_name(field: str) -> None:
    """Exactly the changed field is reported."""
    changed: Manifest = with_field(MANIFEST, field, CHANGES[field])
    assert fields_of(incompatibilities(changed, ENGINE)) == [field]


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_changed_in_the_engine_is_reported_by_name(field: str) -> None:
    """The comparison is symmetric, and the text shows both sides."""
    changed: EngineIdentity = with_field(ENGINE, field, CHANGES[field])
    found = incompatibilities(MANIFEST, changed)
    assert fields_of(found) == [field]
    assert str(found[0]).startswith(f"{field}: artifact has ")
    assert ", engine has " in str(found[0])


def test_every_field_of_model_geometry_and_rope_is_compared_or_excused() -> None:
    """A field added to one of the three structs must be decided on here."""
    structs: dict[str, Any] = {"model": ModelIdentity, "geometry": Geometry, "rope": Rope}
    known = {
        f"{prefix}.{field.name}"
        for prefix, kind in structs.items()
        for field in msgspec.structs.fields(kind)
    }
    assert known == set(CHANGES) | set(NOT_COMPARED)


def test_several_differences_are_all_reported() -> None:
    """The list does not stop at the first mismatch."""
    changed = MANIFEST
    for field, value in CHANGES.items():
        changed = with_field(changed, field, value)
    assert set(fields_of(incompatibilities(changed, ENGINE))) == set(CHANGES)


@pytest.mark.parametrize("engine_template", [OTHER, None])
def test_another_chat_template_is_reported(engine_template: str | None) -> None:
    """A system turn needs the template that rendered it; an engine without one does not match."""
    engine = msgspec.structs.replace(ENGINE, chat_template_digest=engine_template)
    found = incompatibilities(MANIFEST, engine)
    assert fields_of(found) == ["prompt_convention.chat_template_digest"]


@pytest.mark.parametrize("engine_template", [OTHER, None])
def test_a_document_does_not_depend_on_the_chat_template(engine_template: str | None) -> None:
    """Raw text is the same under every template."""
    manifest, _ = sample_artifact(convention=ConventionKind.DOCUMENT)
    engine = msgspec.structs.replace(ENGINE, chat_template_digest=engine_template)
    assert incompatibilities(manifest, engine) == []


@pytest.mark.parametrize("side", ["artifact", "engine", "both"])
def test_an_unknown_weights_digest_lowers_the_match_level(side: str) -> None:
    """Unknown weights are no mismatch, but the level says that only the config was compared."""
    manifest: Manifest = MANIFEST
    engine: EngineIdentity = ENGINE
    if side in ("artifact", "both"):
        manifest = with_field(manifest, "model.weights_digest", None)
    if side in ("engine", "both"):
        engine = with_field(engine, "model.weights_digest", None)
    assert incompatibilities(manifest, engine) == []
    assert match_level(manifest, engine) is MatchLevel.CONFIG


@pytest.mark.parametrize(
    ("made_with", "served"), [(OTHER, None), (None, OTHER), (OTHER, sha256_digest(b"another"))]
)
def test_kv_of_another_adapter_is_a_mismatch(
    made_with: Digest | None, served: Digest | None
) -> None:
    """KV computed with an adapter is neither KV of the bare model nor of another adapter."""
    adapter = None if made_with is None else Adapter(name="lora", digest=made_with)
    manifest = with_field(MANIFEST, "model.adapter", adapter)
    found = adapter_mismatch(manifest, served)
    assert found is not None
    assert found.field == "model.adapter"
    assert (made_with or "null") in found.artifact
    assert (served or "null") in found.engine


def test_the_adapters_name_is_a_label() -> None:
    """Equal digests are the same adapter; without one on either side there is nothing to differ."""
    manifest = with_field(MANIFEST, "model.adapter", Adapter(name="any", digest=OTHER))
    assert adapter_mismatch(manifest, OTHER) is None
    assert adapter_mismatch(MANIFEST, None) is None
    assert incompatibilities(manifest, ENGINE) == []


def test_long_values_are_shown_shortened() -> None:
    """A hostile value cannot flood a message."""
    manifest = with_field(MANIFEST, "rope.scaling", {"x": "y" * 5000})
    assert len(str(incompatibilities(manifest, ENGINE)[0])) < 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope.stored_keys", Rotation.PRE),
        ("rope.first_position", 1),
    ],
)
def test_what_the_virtual_prefix_v1_cannot_do_is_reported(field: str, value: object) -> None:
    """An unsupported field is named with what the artifact has and what is supported."""
    found = unsupported(with_field(MANIFEST, field, value))
    assert fields_of(found) == [field]


@pytest.mark.parametrize("granularity", ["head", "head_channel"])
def test_quantised_values_are_supported(granularity: Literal["head", "head_channel"]) -> None:
    """K16/V8 is served: values are dequantised on their way to the engine's cache."""
    manifest, _ = sample_artifact(v_scale=ValueScale(granularity=granularity, dtype="F32"))
    assert unsupported(manifest) == []


@pytest.mark.parametrize("kind", LayerKind)
def test_every_kind_of_layer_is_supported(kind: LayerKind) -> None:
    """Windows and latents are served; whether an engine has the same is another comparison."""
    assert unsupported(with_field(MANIFEST, "geometry.layer_kinds", [kind] * 2)) == []


def test_a_plain_artifact_is_supported() -> None:
    """Post-rotation keys from position 0, full attention, unscaled values."""
    assert unsupported(MANIFEST) == []
