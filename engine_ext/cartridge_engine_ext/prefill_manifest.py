"""The manifest of an artifact that one prefill made: what the builder and the self-test share.

Owns the fields that are the same for every plain prefill. Refuses to prefill or to store.
"""

from cartridge_engine_ext.payload import Payload
from cartridge_proto.manifest import (
    Access,
    Card,
    Composition,
    CompositionClass,
    DensePositions,
    Frozen,
    Geometry,
    Kind,
    Manifest,
    ModelIdentity,
    PositionLayout,
    Probe,
    PromptConvention,
    Provenance,
    Rope,
)


def prefill_manifest(
    *,
    name: str,
    version: str,
    model: ModelIdentity,
    geometry: Geometry,
    rope: Rope,
    payload: Payload,
    source_digest: str,
    builder: str,
    access: Access,
    card: Card,
    prompt_convention: PromptConvention,
    probe: Probe,
    created_at: str,
) -> Manifest:
    """A manifest of dense positions, nothing frozen, nothing transformed, to be read alone.

    Joined with others it stands behind the one before (`sequential`), as a concatenated document
    would.
    """
    return Manifest(
        schema_version=1,
        name=name,
        version=version,
        kind=Kind.PREFILL,
        model=model,
        geometry=geometry,
        rope=rope,
        num_tokens=payload.tensors["layers.0.k"].shape[1],
        positions=DensePositions(),
        representation=payload.representation,
        tensors=payload.tensors,
        payload=[payload.blob],
        composition=Composition(
            composition_class=CompositionClass.ISOLATED,
            set_id=None,
            max_set_size=None,
            position_layout=PositionLayout.SEQUENTIAL,
        ),
        provenance=Provenance(
            source_digest=source_digest, builder=builder, transform=None, training=None
        ),
        access=access,
        card=card,
        prompt_convention=prompt_convention,
        frozen=Frozen(num_tokens=0, role=None),
        probe=probe,
        derived_from=None,
        created_at=created_at,
    )
