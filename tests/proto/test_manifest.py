"""Manifests: what is valid, what each rule says, and that every field is part of the identity."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.canonical_json import encode_canonical
from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import (
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_TOKENS,
    ConventionKind,
    InvalidManifest,
    LayerKind,
    PositionLayout,
    RetainedPositions,
    ValueScale,
    decode_manifest,
    encode_manifest,
    expected_tensor,
    manifest_digest,
    manifest_schema,
    tensor_names,
)
from tests.proto.encoded_artifact import encoded_sample
from tests.proto.sample_artifact import sample_artifact

MANIFEST, BLOB = sample_artifact()
FIELDS: dict[str, Any] = json.loads(encode_manifest(MANIFEST))
SCALED, _ = sample_artifact(v_scale=ValueScale(granularity="head", dtype="F32"))
OTHER = sha256_digest(b"other")

Path = tuple[str | int, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all values that are neither an object nor a list, and of empty ones."""
    children: Any = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    if not children:
        yield path
    for key, child in children:
        yield from leaves(child, (*path, key))


def replaced(value: dict[str, Any], path: Path, new: object) -> dict[str, Any]:
    """A copy of a JSON object with the value at a path replaced, or added."""
    result = copy.deepcopy(value)
    target: Any = result
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = new
    return result


def at(value: Any, path: Path) -> Any:
    """The value at a path."""
    for key in path:
        value = value[key]
    return value


def dotted(text: str) -> Path:
    """A path from `a.b.0`; tensor names keep their dots when written `tensors/layers.0.k/blob`."""
    parts = text.split("/") if "/" in text else text.split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def changed_leaf(old: object) -> object:
    """Another value, of the same type where there is one."""
    match old:
        case bool():
            return not old
        case int() | float():
            return old + 1
        case None:
            return OTHER
        case str():
            return OTHER if old.startswith("sha256:") else old + "x"
        case _:
            return ["x"]


def problems_of(fields: dict[str, Any]) -> list[str]:
    """What is wrong with a manifest given as JSON fields; empty if nothing is."""
    try:
        decode_manifest(encode_canonical(fields))
    except InvalidManifest as error:
        return error.problems
    return []


# --- the valid ones ------------------------------------------------------------------------------
@given(
    st.integers(1, 40),
    st.sampled_from(ConventionKind),
    st.sampled_from(PositionLayout),
    st.none()
    | st.sampled_from(
        [
            ValueScale(granularity="head", dtype="F32"),
            ValueScale(granularity="head_channel", dtype="F32"),
        ]
    ),
)
def test_a_manifest_survives_its_canonical_bytes(
    num_tokens: int,
    convention: ConventionKind,
    layout: PositionLayout,
    v_scale: ValueScale | None,
) -> None:
    """Encoding and decoding give the manifest back, and its digest is that of the bytes."""
    manifest, blob = sample_artifact(
        num_tokens=num_tokens, convention=convention, layout=layout, v_scale=v_scale
    )
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    assert manifest_digest(manifest) == sha256_digest(data)
    assert manifest.payload_bytes == len(blob)


def test_alias_is_name_at_version() -> None:
    """The alias that a store keeps is made of name and version."""
    manifest, _ = sample_artifact(name="handbook", version="3.1")
    assert manifest.alias == "handbook@3.1"


def test_longest_name_and_version_form_a_file_name() -> None:
    """An alias of the longest name and version fits the 255 bytes of a file name."""
    manifest, _ = sample_artifact(name="n" * 127, version="v" * 127)
    encode_manifest(manifest)
    assert len(manifest.alias.encode()) == 255


def test_the_schema_is_a_valid_draft_2020_12_schema_and_accepts_the_sample() -> None:
    """A third party can use the schema as it is."""
    jsonschema.Draft202012Validator.check_schema(manifest_schema())
    jsonschema.Draft202012Validator(manifest_schema()).validate(FIELDS)


@pytest.mark.parametrize(
    ("readers", "tenant", "may_read"),
    [
        ([], "tests", True),
        ([], "blue", False),
        (["blue"], "blue", True),
        (["blue"], "green", False),
        (["*"], "green", True),
        (["blue"], "*", False),
    ],
)
def test_owner_and_readers_may_read(readers: list[str], tenant: str, may_read: bool) -> None:
    """The owner may always read, a reader by name, and everybody where `*` is a reader."""
    manifest, _ = sample_artifact(readers=readers)
    assert manifest.is_readable_by(tenant) is may_read


VALID_CHANGES: list[dict[str, object]] = [
    {"positions": {"kind": "retained", "retained": [0, 2, 3, 9, 11]}},
    {"frozen": {"num_tokens": 1, "role": "attention_sink"}},
    {"frozen": {"num_tokens": 5, "role": "distractors"}},
    {"kind": "trained", "provenance.training": {"recipe": "self-study", "final_loss": 0.5}},
    {
        "kind": "transformed",
        "provenance.transform": {
            "name": "drop",
            "version": "1",
            "parameters": {"keep": 0.5, "nested": [1, {"a": None}]},
            "query_digest": OTHER,
            "retained_positions_digest": OTHER,
        },
    },
    {"composition.class": "joint", "composition.set_id": "s", "composition.max_set_size": 4},
    {"rope.scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope.stored_keys": "pre"},
    {"rope.rotary_dim": 0},
    {"geometry.layer_kinds": ["full", "sliding"]},
    {"model.weights_digest": None},
    {"model.adapter": {"name": "lora", "digest": OTHER}},
    {"access.readers": []},
    {"card.language": "pt-BR"},
    {"derived_from": OTHER},
]


@pytest.mark.parametrize("changes", VALID_CHANGES)
def test_each_optional_meaning_can_be_expressed(changes: dict[str, object]) -> None:
    """Retained, frozen, trained, transformed, joint, scaled and adapted artifacts are valid."""
    fields = FIELDS
    for path, value in changes.items():
        fields = replaced(fields, dotted(path), value)
    assert problems_of(fields) == []
    assert sha256_digest(encode_canonical(fields)) != manifest_digest(MANIFEST)


# --- identity ------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", list(leaves(FIELDS)), ids=lambda path: ".".join(map(str, path)))
def test_every_field_is_part_of_the_identity(path: Path) -> None:
    """A field changed alone is refused, or gives another digest and another manifest."""
    changed = replaced(FIELDS, path, changed_leaf(at(FIELDS, path)))
    data = encode_canonical(changed)
    assert sha256_digest(data) != manifest_digest(MANIFEST)
    try:
        manifest = decode_manifest(data)
    except InvalidManifest:
        return
    assert manifest != MANIFEST
    assert manifest_digest(manifest) == sha256_digest(data)


@pytest.mark.parametrize("name", FIELDS)
def test_every_top_level_field_is_required(name: str) -> None:
    """A manifest says everything: a missing field is refused by its name."""
    fields = {key: value for key, value in FIELDS.items() if key != name}
    assert any(f"'{name}' is a required property" in line for line in problems_of(fields))


@pytest.mark.parametrize(
    "path",
    [
        (),
        *(
            (name,)
            for name, value in FIELDS.items()
            if isinstance(value, dict) and name != "tensors"
        ),
        ("tensors", "layers.0.k"),
        ("payload", 0),
        ("probe", "steps", 0),
    ],
)
def test_every_object_is_closed(path: Path) -> None:
    """A field that the contract does not know is refused, at every depth."""
    problems = problems_of(replaced(FIELDS, (*path, "unheard_of"), 1))
    assert any("unheard_of" in line for line in problems)


# --- refusals ------------------------------------------------------------------------------------
REFUSED: list[tuple[str, object, str]] = [
    ("schema_version", 2, "schema_version: "),
    ("name", "Harbour", "name: "),
    ("name", "", "name: "),
    ("name", "a" * 128, "name: .*0,126"),
    ("name", "a\n", "name: "),
    ("name", "../x", "name: "),
    ("version", "1@2", "version: "),
    ("kind", "guessed", "kind: "),
    ("model.config_digest", "sha256:0", r"model.config_digest: "),
    ("model.architecture", "a" * 1025, "model.architecture: "),
    ("geometry.num_layers", 1025, r"geometry.num_layers: .*1024"),
    ("geometry.num_kv_heads", 0, r"geometry.num_kv_heads: "),
    ("geometry.head_dim_k", 4097, r"geometry.head_dim_k: .*4096"),
    ("geometry.layer_kinds", ["full"], "geometry.layer_kinds: 1 kinds for 2 layers"),
    ("geometry.layer_kinds.0", "half", r"geometry.layer_kinds\[0\]: "),
    ("rope.theta", 0, "rope.theta: "),
    ("rope.rotary_dim", 3, "rope.rotary_dim: 3 must be even"),
    ("rope.rotary_dim", 6, r"rope.rotary_dim: 6 .* at most geometry.head_dim_k \(4\)"),
    ("num_tokens", 0, "num_tokens: "),
    ("num_tokens", MAX_TOKENS + 1, f"num_tokens: .*{MAX_TOKENS}"),
    (
        "num_tokens",
        6,
        r"tensors.layers.0.k: F32 \[2, 5, 4\]; the geometry asks for F32 \[2, 6, 4\]",
    ),
    ("positions", {"kind": "sparse"}, "positions: "),
    ("positions", {"kind": "retained", "retained": [1]}, "positions.retained: 1 positions for 5"),
    (
        "positions",
        {"kind": "retained", "retained": [0, 1, 2, 2, 3]},
        "positions.retained: must be strictly ascending",
    ),
    ("representation.k_dtype", "F8_E4M3", "representation.k_dtype: "),
    ("representation.v_dtype", "F8_E4M3", "representation.v_scale: required with v_dtype F8_E4M3"),
    (
        "representation.v_scale",
        {"granularity": "head", "dtype": "F32"},
        "representation.v_scale: required with v_dtype F8_E4M3, and only then",
    ),
    ("tensors", {}, "tensors: layers.0.k is missing"),
    ("tensors/layers.2.k", FIELDS["tensors"]["layers.0.k"], "tensors: layers.2.k is not expected"),
    ("tensors/layers.0.k/dtype", "BF16", "tensors.layers.0.k: BF16"),
    ("tensors/layers.0.k/shape", [2, 4, 5], "tensors.layers.0.k: F32"),
    ("tensors/layers.0.k/blob", OTHER, "tensors.layers.0.k.blob: .* is not in payload"),
    ("tensors/layers.0.k/byte_range/1", 9, r"tensors.layers.0.k.byte_range: .* shape needs 160"),
    ("tensors/layers.0.k/byte_range", [5000, 5160], "byte_range: ends at 5160, beyond its blob"),
    ("tensors/layers.0.k/byte_range", [0], "byte_range"),
    ("payload", [], "payload: at least one blob"),
    ("payload", FIELDS["payload"] * 2, "payload: the same blob twice"),
    (
        "payload",
        [*FIELDS["payload"], {"sha256": OTHER, "size_bytes": 1}],
        f"payload: {OTHER} holds no tensor",
    ),
    ("payload.0.size_bytes", 1 << 51, r"payload\[0\].size_bytes: "),
    ("composition.class", "joint", "composition.set_id: required for class joint"),
    ("composition.set_id", "s", "composition.set_id: required for class joint, and only there"),
    ("composition.max_set_size", 2, "composition.max_set_size: required for class joint"),
    ("composition.position_layout", "random", "composition.position_layout: "),
    ("kind", "trained", "provenance.training: required for kind trained"),
    ("kind", "transformed", "provenance.transform: required for kind transformed"),
    ("provenance.training", {"recipe": "r", "final_loss": 1}, "provenance.training: .*only there"),
    ("card.language", "english", "card.language: "),
    ("prompt_convention.kind", "document", "prompt_convention.chat_template_digest: .*only there"),
    ("prompt_convention.chat_template_digest", None, "required for system_turn"),
    ("frozen", {"num_tokens": 6, "role": "distractors"}, "frozen.num_tokens: 6 of 5 tokens"),
    ("frozen", {"num_tokens": 1, "role": None}, "frozen.role: required"),
    ("frozen", {"num_tokens": 0, "role": "distractors"}, "frozen.role: .*only then"),
    ("probe.prompt_token_ids", [], "probe: at least one prompt token and one step"),
    ("probe.steps", [], "probe: at least one prompt token and one step"),
    ("probe.steps.0.top.0", [1], r"probe.steps\[0\].top\[0\]"),
    ("created_at", "2026-01-02", "created_at: "),
    ("created_at", "2026-01-02T03:04:05Z\n", "created_at: "),
    ("created_at", "\u0662026-01-02T03:04:05Z", "created_at: "),
    ("derived_from", "sha256:" + "0" * 64 + "\n", "derived_from: "),
]


@pytest.mark.parametrize(
    ("path", "value", "reason"), REFUSED, ids=[f"{row[0]}-{n}" for n, row in enumerate(REFUSED)]
)
def test_a_broken_rule_is_named_with_its_field(path: str, value: object, reason: str) -> None:
    """The problem names the field and, for limits, the limit."""
    problems = problems_of(replaced(FIELDS, dotted(path), value))
    assert [line for line in problems if re.search(reason, line)], problems


def test_every_problem_is_listed_at_once() -> None:
    """Two broken fields of the schema, or two broken rules, are reported together."""
    by_schema = replaced(replaced(FIELDS, ("name",), "X"), ("rope", "theta"), 0)
    by_rule = replaced(replaced(FIELDS, ("rope", "rotary_dim"), 3), ("probe", "steps"), [])
    assert {line.split(":")[0] for line in problems_of(by_schema)} == {"name", "rope.theta"}
    assert {line.split(":")[0] for line in problems_of(by_rule)} == {"rope.rotary_dim", "probe"}


@pytest.mark.parametrize(
    "respelled",
    [
        lambda text: text + "\n",
        lambda text: text.replace('"name":', '"name": ', 1),
        lambda text: text.replace('"schema_version":1', '"schema_version":1.0'),
        lambda text: text.replace('"theta":10000', '"theta":1e4'),
        lambda text: text.replace("Harbour rules", "Harbour\\u0020rules", 1),
    ],
)
def test_only_the_canonical_spelling_is_a_manifest(respelled: Any) -> None:
    """The same value in other bytes would be another digest, so it is refused."""
    text = encode_manifest(MANIFEST).decode()
    assert respelled(text) != text
    with pytest.raises(InvalidManifest, match="canonical form"):
        decode_manifest(respelled(text).encode())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"[]", "not of type 'object'"),
        (b'{"name":1,"name":2}', "duplicate keys"),
    ],
)
def test_bytes_that_are_no_manifest_are_refused(data: bytes, reason: str) -> None:
    """Whatever is wrong with the bytes, the error is the same type."""
    with pytest.raises(InvalidManifest, match=reason):
        decode_manifest(data)


def test_an_oversized_manifest_is_refused_before_it_is_parsed() -> None:
    """The text names the size and the limit."""
    data = b" " * (MAX_MANIFEST_BYTES + 1)
    with pytest.raises(InvalidManifest, match=f"{MAX_MANIFEST_BYTES + 1} bytes.*limit is 1048576"):
        decode_manifest(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 2**60},
        {"rope": msgspec.structs.replace(MANIFEST.rope, theta=float("nan"))},
        {"card": msgspec.structs.replace(MANIFEST.card, title="\ud800")},
        {"name": "Not A Name"},
    ],
)
def test_a_manifest_object_without_valid_bytes_is_not_encoded(changes: dict[str, Any]) -> None:
    """Structs are not validated when made, so encoding does it, with the same error type."""
    with pytest.raises(InvalidManifest):
        encode_manifest(msgspec.structs.replace(MANIFEST, **changes))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_manifest_or_invalid(data: bytes) -> None:
    """No bytes raise anything but InvalidManifest."""
    with pytest.raises(InvalidManifest):
        decode_manifest(data)


# --- tensors -------------------------------------------------------------------------------------
def test_tensor_names_follow_the_geometry() -> None:
    """Two tensors for each layer, three with scaled values."""
    assert tensor_names(MANIFEST) == ["layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"]
    assert tensor_names(SCALED)[:3] == ["layers.0.k", "layers.0.v", "layers.0.v_scale"]


def test_expected_shapes_follow_geometry_and_representation() -> None:
    """Keys and values are [heads, tokens, dim]; scales are per head or per head and channel."""
    by_channel, _ = sample_artifact(v_scale=ValueScale(granularity="head_channel", dtype="F32"))
    assert expected_tensor(MANIFEST, "layers.1.k") == ([2, 5, 4], "F32")
    assert expected_tensor(SCALED, "layers.0.v") == ([2, 5, 4], "F8_E4M3")
    assert expected_tensor(SCALED, "layers.0.v_scale") == ([2], "F32")
    assert expected_tensor(by_channel, "layers.0.v_scale") == ([2, 4], "F32")


def test_keys_and_values_may_have_different_head_dimensions() -> None:
    """The head dimension of values is its own field."""
    geometry = msgspec.structs.replace(MANIFEST.geometry, head_dim_v=2)
    manifest = msgspec.structs.replace(MANIFEST, geometry=geometry)
    assert expected_tensor(manifest, "layers.0.k") == ([2, 5, 4], "F32")
    assert expected_tensor(manifest, "layers.0.v") == ([2, 5, 2], "F32")


def test_latents_are_keys_alone() -> None:
    """A layer with latents has one tensor."""
    geometry = msgspec.structs.replace(
        MANIFEST.geometry, num_kv_heads=1, head_dim_k=6, layer_kinds=[LayerKind.LATENT] * 2
    )
    manifest = msgspec.structs.replace(MANIFEST, geometry=geometry)
    assert tensor_names(manifest) == ["layers.0.k", "layers.1.k"]
    assert expected_tensor(manifest, "layers.0.k") == ([1, 5, 6], "F32")


def test_retained_positions_keep_the_order_of_the_source() -> None:
    """Retained positions are read back as they were written."""
    positions = RetainedPositions(retained=[0, 2, 3, 9, 11])
    manifest = msgspec.structs.replace(MANIFEST, positions=positions)
    assert decode_manifest(encode_manifest(manifest)).positions == positions


# --- encoded blobs -------------------------------------------------------------------------------
ENCODED, _ = encoded_sample()
ENCODED_FIELDS: dict[str, Any] = json.loads(encode_manifest(ENCODED))
DECODED_BYTES = len(BLOB)
STORED_BYTES = ENCODED.payload[0].size_bytes
TENSOR_BYTES = sum(end - begin for begin, end in (t.byte_range for t in MANIFEST.tensors.values()))


def test_a_blob_that_is_stored_as_it_is_has_no_encoding() -> None:
    """The default is left out, so that artifacts from before codecs keep their digests."""
    assert FIELDS["payload"] == [{"sha256": sha256_digest(BLOB), "size_bytes": DECODED_BYTES}]
    assert MANIFEST.decoded_bytes == MANIFEST.payload_bytes == DECODED_BYTES
    assert MANIFEST.payload[0].decoded_sha256 == sha256_digest(BLOB)


def test_an_encoded_blob_has_two_sizes_and_two_digests() -> None:
    """What is stored and moved has one, the safetensors file that is kept in memory the other."""
    [blob] = ENCODED.payload
    assert (ENCODED.payload_bytes, ENCODED.decoded_bytes) == (STORED_BYTES, DECODED_BYTES)
    assert STORED_BYTES < DECODED_BYTES
    assert blob.decoded_sha256 == sha256_digest(BLOB) != blob.sha256
    assert decode_manifest(encode_manifest(ENCODED)) == ENCODED


def test_loading_takes_what_is_stored_beside_what_it_decodes_to() -> None:
    """One blob after another: the last one that is encoded need not be where most is taken."""
    (blob,), (plain,) = ENCODED.payload, MANIFEST.payload
    for payload, loading_bytes in (
        ([plain], DECODED_BYTES),
        ([blob], DECODED_BYTES + STORED_BYTES),
        ([blob, plain], 2 * DECODED_BYTES),
        ([plain, blob], 2 * DECODED_BYTES + STORED_BYTES),
    ):
        manifest = msgspec.structs.replace(ENCODED, payload=payload)
        assert manifest.loading_bytes == loading_bytes


@pytest.mark.parametrize("field", ["codec", "size_bytes", "sha256"])
def test_every_field_of_an_encoding_is_required_and_part_of_the_identity(field: str) -> None:
    """A missing one is refused; another value is refused or gives another digest."""
    path: Path = ("payload", 0, "encoding", field)
    other = replaced(ENCODED_FIELDS, path, changed_leaf(at(ENCODED_FIELDS, path)))
    assert sha256_digest(encode_canonical(other)) != manifest_digest(ENCODED)
    del other["payload"][0]["encoding"][field]
    assert any(f"'{field}' is a required property" in line for line in problems_of(other))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("encoding", None, r"payload\[0\].encoding: "),
        ("encoding.codec", "identity", r"payload\[0\].encoding.codec: 'identity'"),
        ("encoding.codec", "lz4", r"payload\[0\].encoding.codec: 'lz4'"),
        ("encoding.level", 3, r"payload\[0\].encoding: .*'level'"),
        ("encoding.size_bytes", -1, r"payload\[0\].encoding.size_bytes: "),
        ("encoding.size_bytes", 1 << 51, r"payload\[0\].encoding.size_bytes: "),
        ("encoding.size_bytes", TENSOR_BYTES - 1, rf"its tensors take {TENSOR_BYTES}"),
        ("encoding.size_bytes", DECODED_BYTES - 1, "byte_range: ends at .*, beyond its blob"),
        (
            "encoding.size_bytes",
            TENSOR_BYTES + MAX_HEADER_BYTES + 9,
            r"payload\[0\].encoding.size_bytes: .*a header at most 1048584 more",
        ),
        ("size_bytes", DECODED_BYTES // 65, "more than 64 times size_bytes"),
        ("encoding.sha256", "sha256:0", r"payload\[0\].encoding.sha256: "),
        ("encoding.sha256", ENCODED.payload[0].sha256, "the digest of the stored bytes"),
    ],
)
def test_a_wrong_encoding_is_named_with_its_field(field: str, value: object, reason: str) -> None:
    """Codec, sizes and digests; the memory that a reader takes is bounded by the geometry."""
    problems = problems_of(replaced(ENCODED_FIELDS, dotted(f"payload.0.{field}"), value))
    assert [line for line in problems if re.search(reason, line)], problems
