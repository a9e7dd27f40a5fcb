"""A small valid artifact, built by hand: manifest and safetensors bytes without any model.

Owns the geometry of the sample and its byte layout. Refuses torch and the safetensors package, so
that the reader under test is not checked against the writer that it imitates.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Literal

from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import (
    Access,
    Adapter,
    Blob,
    Card,
    Composition,
    CompositionClass,
    ConventionKind,
    DensePositions,
    Frozen,
    Geometry,
    Kind,
    LayerKind,
    Manifest,
    ModelIdentity,
    PositionLayout,
    Probe,
    ProbeStep,
    PromptConvention,
    Provenance,
    Representation,
    Rope,
    Rotation,
    Tensor,
    ValueScale,
)

NUM_LAYERS = 2
NUM_KV_HEADS = 2
HEAD_DIM = 4

RawTensor = tuple[str, list[int], bytes]
"""safetensors dtype name, shape, little-endian bytes in row-major order."""


def sample_artifact(
    *,
    name: str = "harbour-rules",
    version: str = "1",
    num_tokens: int = 5,
    convention: ConventionKind = ConventionKind.SYSTEM_TURN,
    readers: Iterable[str] = ("*",),
    layout: PositionLayout = PositionLayout.SEQUENTIAL,
    v_scale: ValueScale | None = None,
    adapter: Adapter | None = None,
    seed: int = 0,
) -> tuple[Manifest, bytes]:
    """A valid manifest and the one blob it describes.

    Two layers, two KV heads, head dimension 4, F32 keys and values. With `v_scale` the values are
    F8_E4M3 and each layer has a scale tensor. `seed` changes the numbers in the blob, hence every
    digest; equal arguments give equal bytes.
    """
    tensors = _layer_tensors(num_tokens, v_scale, seed)
    blob = safetensors_bytes(tensors)
    digest = sha256_digest(blob)
    ranges = _file_ranges(tensors, blob)
    is_turn = convention is ConventionKind.SYSTEM_TURN
    manifest = Manifest(
        schema_version=1,
        name=name,
        version=version,
        kind=Kind.PREFILL,
        model=ModelIdentity(
            architecture="SampleForCausalLM",
            name="sample-2x2x4",
            config_digest=sha256_digest(b"sample config"),
            tokenizer_digest=sha256_digest(b"sample tokenizer"),
            weights_digest=sha256_digest(b"sample weights"),
            adapter=adapter,
        ),
        geometry=Geometry(
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim_k=HEAD_DIM,
            head_dim_v=HEAD_DIM,
            layer_kinds=[LayerKind.FULL] * NUM_LAYERS,
        ),
        rope=Rope(
            type="default",
            theta=10000.0,
            scaling=None,
            rotary_dim=HEAD_DIM,
            stored_keys=Rotation.POST,
            first_position=0,
        ),
        num_tokens=num_tokens,
        positions=DensePositions(),
        representation=Representation(
            k_dtype="F32", v_dtype="F8_E4M3" if v_scale else "F32", v_scale=v_scale
        ),
        tensors={
            tensor_name: Tensor(
                blob=digest,
                byte_range=ranges[tensor_name],
                shape=shape,
                dtype=_stored_dtype(tensor_name, v_scale),
                sha256=sha256_digest(data),
            )
            for tensor_name, (_, shape, data) in tensors.items()
        },
        payload=[Blob(sha256=digest, size_bytes=len(blob))],
        composition=Composition(
            composition_class=CompositionClass.ISOLATED,
            set_id=None,
            max_set_size=None,
            position_layout=layout,
        ),
        provenance=Provenance(
            source_digest=sha256_digest(b"sample document"),
            builder="tests/proto/sample_artifact.py",
            transform=None,
            training=None,
        ),
        access=Access(owner="tests", readers=list(readers)),
        card=Card(
            title="Harbour rules",
            aliases=["port rules"],
            sentence="Rules of an invented harbour.",
            language="en",
        ),
        prompt_convention=PromptConvention(
            kind=convention,
            has_bos=is_turn,
            chat_template_digest=sha256_digest(b"sample chat template") if is_turn else None,
        ),
        frozen=Frozen(num_tokens=0, role=None),
        probe=Probe(
            prompt_token_ids=[1, 2], steps=[ProbeStep(token_id=3, top=[(3, -0.25), (4, -1.5)])]
        ),
        derived_from=None,
        created_at="2026-01-02T03:04:05Z",
    )
    return manifest, blob


def engine_of(manifest: Manifest) -> EngineIdentity:
    """An engine that shares every field of the manifest; context 4096 tokens, blocks of 16."""
    return EngineIdentity(
        model=manifest.model,
        geometry=manifest.geometry,
        rope=manifest.rope,
        chat_template_digest=manifest.prompt_convention.chat_template_digest,
        max_model_len=4096,
        block_size=16,
    )


def safetensors_bytes(tensors: Mapping[str, RawTensor]) -> bytes:
    """A safetensors file with the tensors in the given order and no hole between them."""
    header: dict[str, object] = {}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        end = position + len(data)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    return with_header(header, b"".join(data for _, _, data in tensors.values()))


def with_header(header: object, data: bytes) -> bytes:
    """Length, header padded with spaces to a multiple of 8, data: a file with any header."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _layer_tensors(num_tokens: int, v_scale: ValueScale | None, seed: int) -> dict[str, RawTensor]:
    shape = [NUM_KV_HEADS, num_tokens, HEAD_DIM]
    count = NUM_KV_HEADS * num_tokens * HEAD_DIM
    tensors: dict[str, RawTensor] = {}
    for layer in range(NUM_LAYERS):
        start = seed * 1000 + layer * 2 * count
        tensors[f"layers.{layer}.k"] = ("F32", shape, _floats(start, count))
        if v_scale is None:
            tensors[f"layers.{layer}.v"] = ("F32", shape, _floats(start + count, count))
            continue
        tensors[f"layers.{layer}.v"] = (
            "F8_E4M3",
            shape,
            bytes((start + index) % 127 for index in range(count)),
        )
        by_head = v_scale.granularity == "head"
        scale_shape = [NUM_KV_HEADS] if by_head else [NUM_KV_HEADS, HEAD_DIM]
        num_scales = NUM_KV_HEADS * (1 if by_head else HEAD_DIM)
        tensors[f"layers.{layer}.v_scale"] = ("F32", scale_shape, _floats(start + 1, num_scales))
    return tensors


def _stored_dtype(name: str, v_scale: ValueScale | None) -> Literal["F32", "F8_E4M3"]:
    return "F8_E4M3" if v_scale is not None and name.endswith(".v") else "F32"


def _floats(start: int, count: int) -> bytes:
    return struct.pack(f"<{count}f", *((start + index) / 64 for index in range(count)))


def _file_ranges(tensors: Mapping[str, RawTensor], blob: bytes) -> dict[str, tuple[int, int]]:
    position = len(blob) - sum(len(data) for _, _, data in tensors.values())
    ranges = {}
    for name, (_, _, data) in tensors.items():
        ranges[name] = (position, position + len(data))
        position += len(data)
    return ranges
