"""Sample artifacts in a real store, damaged on request, and a store that counts and can hold reads.

Owns how the tests of this folder fill and break a store. Refuses torch.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Blob, Manifest
from cartridge_proto.stores import LocalStore
from tests.proto.sample_artifact import sample_artifact

WAIT_S = 30.0
"""Bound of every wait for another thread; reached only when something is broken."""


class ObservedStore(LocalStore):
    """A real store that counts blob reads.

    `gate` holds reads while it is cleared; `error` is what they raise, if anything. `started` is
    released by each manifest that was read, `reading` by each blob read that begins.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[Digest] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.reading = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.error: Exception | None = None

    def _read_manifest_bytes(self, digest: Digest) -> bytes:
        data = super()._read_manifest_bytes(digest)
        self.started.release()
        return data

    def _read_pieces(
        self, digest: Digest, offset: int, buffer: memoryview, size_bytes: int
    ) -> Iterator[int]:
        self.reads[digest] += 1
        self.reading.release()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        yield from super()._read_pieces(digest, offset, buffer, size_bytes)


def put_artifact(store: LocalStore, manifest: Manifest, blob: bytes) -> Digest:
    """Store an artifact and return its digest."""
    store.put_blob(blob)
    return Digest(store.put_manifest(manifest))


def put_sample(store: LocalStore, **sample: Any) -> tuple[Digest, Manifest]:
    """Store a sample artifact; the arguments are those of `sample_artifact`."""
    manifest, blob = sample_artifact(**sample)
    return put_artifact(store, manifest, blob), manifest


def with_blob(manifest: Manifest, blob: bytes) -> Manifest:
    """The manifest of the same tensors in other bytes of the same layout; all digests are right."""
    digest = sha256_digest(blob)
    return msgspec.structs.replace(
        manifest,
        payload=[Blob(sha256=digest, size_bytes=len(blob))],
        tensors={
            name: msgspec.structs.replace(
                tensor, blob=digest, sha256=sha256_digest(blob[slice(*tensor.byte_range)])
            )
            for name, tensor in manifest.tensors.items()
        },
    )


def blob_path(store: LocalStore, manifest: Manifest) -> Path:
    """File of the only blob of a sample."""
    return store.blob_path(Digest(manifest.payload[0].sha256))


def flip_bit(file: Path) -> None:
    """Change one bit in the last byte."""
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
