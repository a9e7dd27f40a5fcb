"""The manifest: what an artifact is, for which model, and how its bytes are laid out.

Owns the types, their JSON Schema, validation that lists every problem, and the digest. Refuses
I/O, defaults (a manifest says everything) and any spelling but the canonical one.
"""

import functools
import itertools
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal, NewType

import jsonschema
import msgspec

from cartridge_proto.canonical_json import decode_strict, encode_canonical
from cartridge_proto.digest import END, Digest, DigestText, sha256_digest

MAX_MANIFEST_BYTES = 1 << 20
MAX_TOKENS = 1 << 22
MAX_HEADER_BYTES = 1 << 20
"""Largest header of a safetensors file."""
MAX_EXPANSION = 64
"""Decoded bytes of a blob for each stored byte; keys and values give less than 4."""

ManifestDigest = NewType("ManifestDigest", Digest)

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,126}" + END)]
"""At most 127 characters, so that `name@version` fits a file name of 255 bytes."""
ShortText = Annotated[str, msgspec.Meta(max_length=1024)]
Timestamp = Annotated[
    str,
    msgspec.Meta(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z" + END),
]
PositiveInt = Annotated[int, msgspec.Meta(gt=0, le=MAX_TOKENS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all manifest structs: frozen, named arguments only, closed."""


class Kind(StrEnum):
    """How the artifact came to be."""

    TRAINED = "trained"
    PREFILL = "prefill"
    TRANSFORMED = "transformed"


class LayerKind(StrEnum):
    """Attention kind of one layer."""

    FULL = "full"
    SLIDING = "sliding"
    """Reads a window of positions; the artifact has all of them, as the others have."""
    LATENT = "latent"
    """Multi-head latent attention: one compressed vector for a position, no values beside it."""


class Rotation(StrEnum):
    """Whether stored keys already carry the rotary embedding."""

    PRE = "pre"
    POST = "post"


class PositionLayout(StrEnum):
    """Where the artifacts of a composition stand (docs/spec/virtual-prefix-v1.md)."""

    SHARED_LOCAL = "shared_local"
    SEQUENTIAL = "sequential"
    END_ALIGNED = "end_aligned"


class CompositionClass(StrEnum):
    """Whether the artifact was trained to be read beside others."""

    ISOLATED = "isolated"
    JOINT = "joint"


class ConventionKind(StrEnum):
    """What the prefix stands for in the prompt."""

    DOCUMENT = "document"
    """Raw text that precedes the prompt of `/v1/completions`."""
    SYSTEM_TURN = "system_turn"
    """The whole system turn of a chat, special tokens and BOS included."""


class FrozenRole(StrEnum):
    """What the frozen head of a trained artifact is for."""

    ATTENTION_SINK = "attention_sink"
    DISTRACTORS = "distractors"


class Adapter(_Part, frozen=True, kw_only=True):
    """LoRA adapter whose weights shaped the KV."""

    name: ShortText
    digest: DigestText


class ModelIdentity(_Part, frozen=True, kw_only=True):
    """Which model computes KV that means the same."""

    architecture: ShortText
    name: ShortText
    config_digest: DigestText
    tokenizer_digest: DigestText
    weights_digest: DigestText | None
    adapter: Adapter | None


class Geometry(_Part, frozen=True, kw_only=True):
    """Shape of one position's KV; `head_dim_*` in elements.

    Of latent layers the one key is the compressed vector and the rotated part behind it. Values are
    the first `head_dim_v` elements of it, and not stored.
    """

    num_layers: Annotated[int, msgspec.Meta(gt=0, le=1024)]
    num_kv_heads: Annotated[int, msgspec.Meta(gt=0, le=1024)]
    head_dim_k: Annotated[int, msgspec.Meta(gt=0, le=4096)]
    head_dim_v: Annotated[int, msgspec.Meta(gt=0, le=4096)]
    layer_kinds: list[LayerKind]

    @property
    def has_latents(self) -> bool:
        """Whether its layers keep latents; all of them do, or none."""
        return LayerKind.LATENT in self.layer_kinds


class Rope(_Part, frozen=True, kw_only=True):
    """Rotary embedding of the stored keys; keys stand at `first_position`, +1, +2, …"""

    type: ShortText
    theta: Annotated[float, msgspec.Meta(gt=0)]
    scaling: dict[str, Any] | None
    rotary_dim: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    stored_keys: Rotation
    first_position: Count


class DensePositions(_Part, frozen=True, kw_only=True, tag="dense", tag_field="kind"):
    """Every position of the source is there."""


class RetainedPositions(_Part, frozen=True, kw_only=True, tag="retained", tag_field="kind"):
    """Only these source positions were kept, ascending."""

    retained: list[Count]


class ValueScale(_Part, frozen=True, kw_only=True):
    """Scale of quantised values; layout in docs/spec/manifest-v1.md."""

    granularity: Literal["head", "head_channel"]
    dtype: Literal["F32"]


class Representation(_Part, frozen=True, kw_only=True):
    """Element types as safetensors spells them."""

    k_dtype: Literal["F32", "BF16", "F16"]
    v_dtype: Literal["F32", "BF16", "F16", "F8_E4M3"]
    v_scale: ValueScale | None


class Tensor(_Part, frozen=True, kw_only=True):
    """One tensor: `byte_range` is [begin, end) within the blob file."""

    blob: DigestText
    byte_range: tuple[Bytes, Bytes]
    shape: list[Count]
    dtype: Literal["F32", "BF16", "F16", "F8_E4M3"]
    sha256: DigestText


class Encoding(_Part, frozen=True, kw_only=True):
    """How the stored bytes of a blob are decoded, and what comes out of it.

    `size_bytes` and `sha256` are of the decoded bytes: those are the safetensors file, and what
    the byte ranges of tensors count in. Codecs: docs/spec/manifest-v1.md.
    """

    codec: Literal["shuffle-zstd"]
    size_bytes: Bytes
    sha256: DigestText


class Blob(_Part, frozen=True, kw_only=True):
    """One content-addressed file of the payload, as it is stored.

    Without `encoding` (codec `identity`) the stored bytes are the safetensors file. There is one
    spelling of that: the field is left out, never null.
    """

    sha256: DigestText
    size_bytes: Bytes
    encoding: Encoding | msgspec.UnsetType = msgspec.UNSET

    @property
    def decoded_bytes(self) -> int:
        """Size of the safetensors file: what a reader of tensors keeps in memory."""
        return self.encoding.size_bytes if self.encoding else self.size_bytes

    @property
    def decoded_sha256(self) -> str:
        """Digest of the safetensors file."""
        return self.encoding.sha256 if self.encoding else self.sha256


class Composition(_Part, frozen=True, kw_only=True):
    """How the artifact may be joined with others."""

    composition_class: CompositionClass = msgspec.field(name="class")
    set_id: ShortText | None
    max_set_size: PositiveInt | None
    position_layout: PositionLayout


class Transform(_Part, frozen=True, kw_only=True):
    """The transformation that made a `transformed` artifact."""

    name: ShortText
    version: ShortText
    parameters: dict[str, Any]
    query_digest: DigestText | None
    """Digest of the query the result depends on; `None` = query independent."""
    retained_positions_digest: DigestText | None


class Training(_Part, frozen=True, kw_only=True):
    """Recipe and outcome of a `trained` artifact."""

    recipe: ShortText
    final_loss: float


MAX_SOURCE_BYTES = 64 << 20
"""Of a document's text in a store, where it is a blob under its `source_digest`."""


class Provenance(_Part, frozen=True, kw_only=True):
    """Where the bytes come from."""

    source_digest: DigestText
    builder: ShortText
    transform: Transform | None
    training: Training | None


class Access(_Part, frozen=True, kw_only=True):
    """Who may use the artifact; the reader `*` means everybody."""

    owner: ShortText
    readers: list[ShortText]


class Card(_Part, frozen=True, kw_only=True):
    """What people and selection read."""

    title: ShortText
    aliases: list[ShortText]
    sentence: ShortText
    language: Annotated[str, msgspec.Meta(pattern=r"^[a-z]{2,3}(-[A-Za-z0-9]{1,8})*" + END)]


DEFAULT_INSTRUCTION = "Answer the question from this document.\n\n{document}"
"""What `cartridge build` makes a system turn of, unless it is told otherwise.

A manifest does not say: whoever puts the text into a chat must know it from elsewhere.
"""


class PromptConvention(_Part, frozen=True, kw_only=True):
    """What the prefix stands for, so that the live prompt can be rendered without it."""

    kind: ConventionKind
    has_bos: bool
    chat_template_digest: DigestText | None
    """sha256 of the chat template text that rendered the turn; `None` for `document`."""


class Frozen(_Part, frozen=True, kw_only=True):
    """Leading positions that training left untouched."""

    num_tokens: Count
    role: FrozenRole | None


class ProbeStep(_Part, frozen=True, kw_only=True):
    """One greedy step: the chosen token and the best alternatives, natural-log probabilities."""

    token_id: Count
    top: list[tuple[Count, float]]


class Probe(_Part, frozen=True, kw_only=True):
    """A short live prompt and what the reference computed after it."""

    prompt_token_ids: list[Count]
    steps: list[ProbeStep]


class Manifest(_Part, frozen=True, kw_only=True):
    """All that is known of an artifact. Field by field: docs/spec/manifest-v1.md."""

    schema_version: Literal[1]
    name: Name
    version: Name
    kind: Kind
    model: ModelIdentity
    geometry: Geometry
    rope: Rope
    num_tokens: PositiveInt
    positions: DensePositions | RetainedPositions
    representation: Representation
    tensors: dict[str, Tensor]
    payload: list[Blob]
    composition: Composition
    provenance: Provenance
    access: Access
    card: Card
    prompt_convention: PromptConvention
    frozen: Frozen
    probe: Probe
    derived_from: DigestText | None
    created_at: Timestamp

    @property
    def alias(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"

    def is_readable_by(self, tenant: str) -> bool:
        """Whether a tenant may use the artifact."""
        return tenant == self.access.owner or bool({"*", tenant} & set(self.access.readers))

    @property
    def payload_bytes(self) -> int:
        """Size of all blobs as they are stored and moved."""
        return sum(blob.size_bytes for blob in self.payload)

    @property
    def decoded_bytes(self) -> int:
        """Size of all blobs as they are kept in memory."""
        return sum(blob.decoded_bytes for blob in self.payload)

    @property
    def loading_bytes(self) -> int:
        """Most memory that loading takes, blob after blob in order.

        The stored bytes of an encoded one are beside its decoded ones and those before it.
        """
        most = taken = 0
        for blob in self.payload:
            taken += blob.decoded_bytes
            most = max(most, taken + (blob.size_bytes if blob.encoding else 0))
        return most


class InvalidManifest(ValueError):
    """A manifest that breaks the contract; `problems` has one line for each breach."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("invalid manifest: " + "; ".join(problems))
        self.problems = problems


@functools.cache
def manifest_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a manifest, generated from the types."""
    schema = msgspec.json.schema(Manifest)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Cartridge manifest v1",
        **schema,
    }


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(manifest_schema())


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical bytes of a manifest.

    Raises:
        InvalidManifest: the manifest breaks the contract.
    """
    try:
        data = encode_canonical(msgspec.to_builtins(manifest))
    except ValueError as error:
        raise InvalidManifest([str(error)]) from error
    decode_manifest(data)
    return data


def manifest_digest(manifest: Manifest) -> ManifestDigest:
    """The artifact digest: sha256 of the canonical bytes."""
    return ManifestDigest(sha256_digest(encode_manifest(manifest)))


def decode_manifest(data: bytes) -> Manifest:
    """Parse and validate a manifest from its canonical bytes.

    Raises:
        InvalidManifest: with every problem found, each naming its field.
    """
    try:
        value = decode_strict(data, max_bytes=MAX_MANIFEST_BYTES)
    except ValueError as error:
        raise InvalidManifest([str(error)]) from error
    try:
        # The schema says the same as the types: it is asked only to list everything that is wrong.
        manifest = msgspec.convert(value, Manifest)
    except msgspec.ValidationError as error:
        problems = sorted(
            f"{found.json_path.removeprefix('$.')}: {_explain(found)}"
            for found in _validator().iter_errors(value)
        )
        if not problems:
            _check_canonical(value, data)
        raise InvalidManifest(problems or [str(error)]) from error
    _check_canonical(value, data)
    problems = _cross_field_problems(manifest)
    if problems:
        raise InvalidManifest(problems)
    return manifest


def _check_canonical(value: object, data: bytes) -> None:
    try:
        is_canonical = encode_canonical(value) == data
    except ValueError as error:
        raise InvalidManifest([str(error)]) from error
    if not is_canonical:
        raise InvalidManifest(["the bytes are not in canonical form (RFC 8785)"])


def _explain(error: jsonschema.ValidationError) -> str:
    if error.validator == "anyOf" and error.context:
        return "; or ".join(sorted({cause.message[:160] for cause in error.context}))
    return error.message[:200]


def tensor_names(manifest: Manifest) -> list[str]:
    """Exact tensor names that the geometry and representation ask for."""
    names = []
    for layer in range(manifest.geometry.num_layers):
        names.append(f"layers.{layer}.k")
        if not manifest.geometry.has_latents:
            names.append(f"layers.{layer}.v")
        if manifest.representation.v_scale is not None:
            names.append(f"layers.{layer}.v_scale")
    return names


def expected_tensor(manifest: Manifest, name: str) -> tuple[list[int], str]:
    """Shape and dtype that the geometry and representation ask for.

    Keys and values are [num_kv_heads, num_tokens, head_dim]; scales are [num_kv_heads] or
    [num_kv_heads, head_dim_v].
    """
    geometry, representation = manifest.geometry, manifest.representation
    heads, tokens = geometry.num_kv_heads, manifest.num_tokens
    part = name.rsplit(".", 1)[1]
    if part == "k":
        return [heads, tokens, geometry.head_dim_k], representation.k_dtype
    if part == "v":
        return [heads, tokens, geometry.head_dim_v], representation.v_dtype
    scale = representation.v_scale
    if scale is not None and scale.granularity == "head_channel":
        return [heads, geometry.head_dim_v], "F32"
    return [heads], "F32"


def _cross_field_problems(manifest: Manifest) -> list[str]:
    return [
        *_geometry_problems(manifest),
        *_tensor_problems(manifest),
        *_payload_problems(manifest),
        *_meaning_problems(manifest),
    ]


def _geometry_problems(manifest: Manifest) -> list[str]:
    problems = []
    geometry, rope, representation = manifest.geometry, manifest.rope, manifest.representation
    if len(geometry.layer_kinds) != geometry.num_layers:
        problems.append(
            f"geometry.layer_kinds: {len(geometry.layer_kinds)} kinds for "
            f"{geometry.num_layers} layers"
        )
    if geometry.has_latents:
        problems += _latent_problems(geometry, rope, representation)
    if rope.rotary_dim > geometry.head_dim_k or rope.rotary_dim % 2:
        problems.append(
            f"rope.rotary_dim: {rope.rotary_dim} must be even and at most "
            f"geometry.head_dim_k ({geometry.head_dim_k})"
        )
    if (representation.v_dtype == "F8_E4M3") != (representation.v_scale is not None):
        problems.append("representation.v_scale: required with v_dtype F8_E4M3, and only then")
    if isinstance(manifest.positions, RetainedPositions):
        retained = manifest.positions.retained
        if len(retained) != manifest.num_tokens:
            problems.append(
                f"positions.retained: {len(retained)} positions for {manifest.num_tokens} tokens"
            )
        if any(a >= b for a, b in itertools.pairwise(retained)):
            problems.append("positions.retained: must be strictly ascending")
    if manifest.frozen.num_tokens > manifest.num_tokens:
        problems.append(
            f"frozen.num_tokens: {manifest.frozen.num_tokens} of {manifest.num_tokens} tokens"
        )
    if (manifest.frozen.num_tokens > 0) != (manifest.frozen.role is not None):
        problems.append("frozen.role: required with frozen.num_tokens above 0, and only then")
    return problems


def _latent_problems(
    geometry: Geometry, rope: Rope, representation: Representation
) -> Iterator[str]:
    """Rules of latents (docs/spec/manifest-v1.md, geometry)."""
    if set(geometry.layer_kinds) != {LayerKind.LATENT}:
        yield "geometry.layer_kinds: latent beside other kinds"
    if geometry.num_kv_heads != 1:
        yield f"geometry.num_kv_heads: {geometry.num_kv_heads}; latent layers have 1"
    if geometry.head_dim_v + rope.rotary_dim != geometry.head_dim_k:
        yield (
            f"geometry.head_dim_k: {geometry.head_dim_k}; latent layers have head_dim_v "
            f"({geometry.head_dim_v}) and rope.rotary_dim ({rope.rotary_dim})"
        )
    if representation.v_dtype != representation.k_dtype:
        yield (
            f"representation.v_dtype: {representation.v_dtype}; values of latent layers are part "
            f"of their keys ({representation.k_dtype})"
        )


def _tensor_problems(manifest: Manifest) -> list[str]:
    names = set(tensor_names(manifest))
    present = set(manifest.tensors)
    problems = [f"tensors: {name} is missing" for name in sorted(names - present)]
    problems += [f"tensors: {name} is not expected" for name in sorted(present - names)]
    blobs = {blob.sha256: blob.decoded_bytes for blob in manifest.payload}
    for name in sorted(names & present):
        tensor = manifest.tensors[name]
        shape, dtype = expected_tensor(manifest, name)
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            problems.append(
                f"tensors.{name}: {tensor.dtype} {tensor.shape}; the geometry asks for "
                f"{dtype} {shape}"
            )
        begin, end = tensor.byte_range
        size = _num_elements(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if end - begin != size:
            problems.append(f"tensors.{name}.byte_range: {end - begin} bytes; shape needs {size}")
        if tensor.blob not in blobs:
            problems.append(f"tensors.{name}.blob: {tensor.blob} is not in payload")
        elif end > blobs[tensor.blob]:
            problems.append(f"tensors.{name}.byte_range: ends at {end}, beyond its blob")
    return problems


ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
"""Bytes of one element, by safetensors dtype name."""


def _num_elements(shape: list[int]) -> int:
    product = 1
    for extent in shape:
        product *= extent
    return product


def _payload_problems(manifest: Manifest) -> list[str]:
    digests = [blob.sha256 for blob in manifest.payload]
    problems = []
    if not digests:
        problems.append("payload: at least one blob")
    if len(set(digests)) != len(digests):
        problems.append("payload: the same blob twice")
    used = {tensor.blob for tensor in manifest.tensors.values()}
    problems += [f"payload: {digest} holds no tensor" for digest in digests if digest not in used]
    for index, blob in enumerate(manifest.payload):
        if blob.encoding:
            problems += _encoding_problems(manifest, f"payload[{index}]", blob, blob.encoding)
    return problems


def _encoding_problems(
    manifest: Manifest, path: str, blob: Blob, encoding: Encoding
) -> Iterator[str]:
    """What is wrong with the size that an encoded blob is said to decode to.

    A reader takes that much memory, so it is bounded twice: by what the geometry needs, and by
    what is really stored.
    """
    known = set(tensor_names(manifest))
    names = [name for name, tensor in manifest.tensors.items() if tensor.blob == blob.sha256]
    expected = [expected_tensor(manifest, name) for name in names if name in known]
    tensor_bytes = sum(_num_elements(shape) * ITEM_BYTES[dtype] for shape, dtype in expected)
    limit = tensor_bytes + MAX_HEADER_BYTES + 8
    size = encoding.size_bytes
    if not tensor_bytes <= size <= limit:
        yield (
            f"{path}.encoding.size_bytes: {size}; its tensors take {tensor_bytes} and a header at "
            f"most {MAX_HEADER_BYTES + 8} more"
        )
    if size > MAX_EXPANSION * blob.size_bytes:
        yield (
            f"{path}.encoding.size_bytes: {size} is more than {MAX_EXPANSION} times size_bytes "
            f"({blob.size_bytes})"
        )
    if encoding.sha256 == blob.sha256:
        yield f"{path}.encoding.sha256: the digest of the stored bytes; leave encoding out"


def _meaning_problems(manifest: Manifest) -> list[str]:
    problems = []
    provenance, composition = manifest.provenance, manifest.composition
    if (manifest.kind is Kind.TRANSFORMED) != (provenance.transform is not None):
        problems.append("provenance.transform: required for kind transformed, and only there")
    if (manifest.kind is Kind.TRAINED) != (provenance.training is not None):
        problems.append("provenance.training: required for kind trained, and only there")
    is_joint = composition.composition_class is CompositionClass.JOINT
    if is_joint != (composition.set_id is not None):
        problems.append("composition.set_id: required for class joint, and only there")
    if is_joint != (composition.max_set_size is not None):
        problems.append("composition.max_set_size: required for class joint, and only there")
    convention = manifest.prompt_convention
    is_turn = convention.kind is ConventionKind.SYSTEM_TURN
    if is_turn != (convention.chat_template_digest is not None):
        problems.append(
            "prompt_convention.chat_template_digest: required for system_turn, and only there"
        )
    if not manifest.probe.prompt_token_ids or not manifest.probe.steps:
        problems.append("probe: at least one prompt token and one step")
    return problems
