"""Sample artifacts whose blob is stored encoded.

Owns the step from a plain sample to an encoded one. Refuses torch.
"""

from typing import Any

import msgspec

from cartridge_proto.codecs import encode_blob, item_spans
from cartridge_proto.manifest import Blob, Encoding, Manifest
from tests.proto.sample_artifact import sample_artifact


def encoding_of(blob: Blob) -> Encoding:
    """The encoding of a blob that has one."""
    assert isinstance(blob.encoding, Encoding)
    return blob.encoding


def encoded(manifest: Manifest, data: bytes) -> tuple[Manifest, bytes]:
    """The same artifact with its one blob stored as `shuffle-zstd`."""
    stored, blob = encode_blob(data, "shuffle-zstd", item_spans(manifest.tensors))
    return with_stored_blob(manifest, blob), stored


def with_stored_blob(manifest: Manifest, blob: Blob) -> Manifest:
    """The manifest with this blob in place of its only one."""
    return msgspec.structs.replace(
        manifest,
        payload=[blob],
        tensors={
            name: msgspec.structs.replace(tensor, blob=blob.sha256)
            for name, tensor in manifest.tensors.items()
        },
    )


def encoded_sample(**sample: Any) -> tuple[Manifest, bytes]:
    """Manifest and stored bytes; the arguments are those of `sample_artifact`."""
    return encoded(*sample_artifact(**sample))
