"""Sample artifacts in a store, under an alias, with one field changed where a test wants that.

Owns how a sample becomes a Cartridge that a gateway can find. Refuses to know gateways.
"""

from typing import Any

import msgspec

from cartridge_proto.digest import Digest
from cartridge_proto.manifest import ConventionKind, Manifest, PositionLayout, manifest_digest
from cartridge_proto.stores import LocalStore
from tests.proto.encoded_artifact import encoded
from tests.proto.sample_artifact import sample_artifact


def put_cartridge(
    store: LocalStore,
    name: str = "harbour-rules",
    *,
    num_tokens: int = 5,
    seed: int = 0,
    convention: ConventionKind = ConventionKind.SYSTEM_TURN,
    layout: PositionLayout = PositionLayout.SEQUENTIAL,
    readers: tuple[str, ...] = ("*",),
    is_encoded: bool = False,
    **changes: Any,
) -> Manifest:
    """Store a sample as `name@1`; `changes` replace top-level fields of its manifest."""
    manifest, blob = sample_artifact(
        name=name,
        num_tokens=num_tokens,
        seed=seed,
        convention=convention,
        layout=layout,
        readers=readers,
    )
    manifest = msgspec.structs.replace(manifest, **changes)
    if is_encoded:
        manifest, blob = encoded(manifest, blob)
    store.put_blob(blob)
    store.set_alias(manifest.alias, store.put_manifest(manifest))
    return manifest


def digest_of(manifest: Manifest) -> Digest:
    """The artifact's identity."""
    return Digest(manifest_digest(manifest))


def flip_a_bit(store: LocalStore, manifest: Manifest) -> None:
    """Damage the last byte of the artifact's only blob."""
    path = store.blob_path(Digest(manifest.payload[0].sha256))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
