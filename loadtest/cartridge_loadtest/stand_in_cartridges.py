"""Cartridges for fleets of simulated replicas: valid, small and meaningless.

Owns their sizes and their made-up numbers. Refuses models: the tensors of one layer with one head
stand for those of a document, a few bytes for each of its tokens.
"""

import json
from typing import Final

import numpy as np

from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import (
    Access,
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
)
from cartridge_proto.safetensors_header import tensor_ranges
from cartridge_proto.stores import LocalStore

HEAD_DIM: Final = 2
MIN_TOKENS: Final = 400
STEP_TOKENS: Final = 70
NUM_LENGTHS: Final = 40
"""Cartridges have 400, 470, … 3,130 tokens, then from the first again."""


def put_stand_ins(store: LocalStore, count: int, *, model: str) -> list[Manifest]:
    """Store `document-000@1`, `document-001@1`, …; returns their manifests in this order."""
    manifests = []
    for index in range(count):
        # Coprime to the number of lengths: popular ones are of all lengths.
        num_tokens = MIN_TOKENS + STEP_TOKENS * (17 * index % NUM_LENGTHS)
        manifest, blob = stand_in(f"document-{index:03}", num_tokens, model=model, seed=index)
        store.put_blob(blob)
        store.set_alias(manifest.alias, store.put_manifest(manifest))
        manifests.append(manifest)
    return manifests


def stand_in(name: str, num_tokens: int, *, model: str, seed: int) -> tuple[Manifest, bytes]:
    """A manifest and the one blob it describes; equal arguments give equal bytes."""
    shape = [1, num_tokens, HEAD_DIM]
    numbers = np.random.default_rng(seed).standard_normal((2, *shape), dtype=np.float32)
    size = numbers[0].nbytes
    names = ("layers.0.k", "layers.0.v")
    header = json.dumps(
        {
            tensor: {"dtype": "F32", "shape": shape, "data_offsets": [at * size, (at + 1) * size]}
            for at, tensor in enumerate(names)
        }
    ).encode()
    data = len(header).to_bytes(8, "little") + header + numbers.astype("<f4").tobytes()
    blob, ranges = sha256_digest(data), tensor_ranges(data)
    made_up = sha256_digest(b"simulated")
    manifest = Manifest(
        schema_version=1,
        name=name,
        version="1",
        kind=Kind.PREFILL,
        model=ModelIdentity(
            architecture="Simulated",
            name=model,
            config_digest=made_up,
            tokenizer_digest=made_up,
            weights_digest=None,
            adapter=None,
        ),
        geometry=Geometry(
            num_layers=1,
            num_kv_heads=1,
            head_dim_k=HEAD_DIM,
            head_dim_v=HEAD_DIM,
            layer_kinds=[LayerKind.FULL],
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
        representation=Representation(k_dtype="F32", v_dtype="F32", v_scale=None),
        tensors={
            tensor: Tensor(
                blob=blob,
                byte_range=ranges[tensor],
                shape=shape,
                dtype="F32",
                sha256=sha256_digest(data[slice(*ranges[tensor])]),
            )
            for tensor in names
        },
        payload=[Blob(sha256=blob, size_bytes=len(data))],
        composition=Composition(
            composition_class=CompositionClass.ISOLATED,
            set_id=None,
            max_set_size=None,
            position_layout=PositionLayout.SEQUENTIAL,
        ),
        provenance=Provenance(
            source_digest=sha256_digest(name.encode()),
            builder="cartridge-router loadtest",
            transform=None,
            training=None,
        ),
        access=Access(owner="public", readers=["*"]),
        card=Card(title=name, aliases=[], sentence="Made up.", language="en"),
        prompt_convention=PromptConvention(
            kind=ConventionKind.SYSTEM_TURN, has_bos=False, chat_template_digest=made_up
        ),
        frozen=Frozen(num_tokens=0, role=None),
        probe=Probe(prompt_token_ids=[0], steps=[ProbeStep(token_id=0, top=[])]),
        derived_from=None,
        created_at="2026-01-01T00:00:00Z",
    )
    return manifest, data
