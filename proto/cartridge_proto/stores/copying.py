"""Copies of artifacts from one store to another.

Owns the order (blobs, manifest, alias), so that the target never names what it does not hold.
Refuses to send what the target has, and anything that does not verify on the way.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.manifest import MAX_SOURCE_BYTES, Manifest
from cartridge_proto.stores.interface import CorruptStore, NotInStore, Store
from cartridge_proto.stores.verification import check_alias


@dataclass(frozen=True)
class Copied:
    """One artifact that the target holds now; `alias` if the copy was asked for by one."""

    digest: Digest
    alias: str | None
    copied_bytes: int
    present_bytes: int
    """Bytes of blobs that the target had before."""


def _copy_text(source: Store, target: Store, manifest: Manifest) -> int:
    """Copy the document that an artifact was made of, if it is there; returns its bytes."""
    digest = parse_digest(manifest.provenance.source_digest)
    if target.has_blob(digest):
        return 0
    try:
        text = source.read_small_blob(digest, MAX_SOURCE_BYTES)
    except NotInStore:
        return 0
    target.put_blob(text)
    return len(text)


def copy_artifact(
    source: Store,
    target: Store,
    alias_or_digest: str,
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Copied:
    """Copy an artifact; takes the memory of its largest blob.

    Args:
        source: where it is.
        target: where it goes; an alias is set there as it stands in the source.
        alias_or_digest: which.
        on_bytes: called with the bytes that were read or passed over further.

    Raises:
        StoreError: of either store, by its kinds.
    """
    digest = source.resolve(alias_or_digest)
    manifest = source.read_manifest(digest)
    copied_bytes = present_bytes = 0
    for blob in manifest.payload:
        if target.has_blob(parse_digest(blob.sha256)):
            present_bytes += blob.size_bytes
            on_bytes(blob.size_bytes)
        else:
            buffer = memoryview(bytearray(blob.size_bytes))
            source.read_blob_into(parse_digest(blob.sha256), buffer, on_bytes=on_bytes)
            target.put_blob(buffer)
            copied_bytes += blob.size_bytes
    copied_bytes += _copy_text(source, target, manifest)
    stored = target.put_manifest(manifest)
    if stored != digest:
        raise CorruptStore(f"{digest}: its copy has the digest {stored}")
    alias = None
    if alias_or_digest != digest:
        check_alias(alias_or_digest)
        alias = alias_or_digest
        target.set_alias(alias, digest)
    return Copied(digest, alias, copied_bytes, present_bytes)
