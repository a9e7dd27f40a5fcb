"""A strict reader of safetensors headers, for bytes that are not trusted yet.

Owns the check that a blob holds exactly the tensors its manifest names, where it names them.
Refuses duplicates, holes, overlaps, headers over 1 MiB and anything beside the expected names.

Source: safetensors format, https://github.com/huggingface/safetensors#format
"""

from typing import Any

from cartridge_proto.canonical_json import decode_strict
from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import ITEM_BYTES, MAX_HEADER_BYTES, Manifest


class InvalidPayload(ValueError):
    """A blob that does not hold what its manifest says; the text names the tensor."""


def check_blob(manifest: Manifest, digest: str, data: bytes | memoryview) -> None:
    """Check that blob `digest` of a manifest holds exactly the described tensors.

    `data` is the whole safetensors file: the decoded bytes, if the blob is stored encoded.
    Tensors are hashed; the digest of `data` itself is the caller's to check.

    Raises:
        InvalidPayload: naming the first tensor, or the part of the header, that is wrong.
    """
    header_end, entries = _read_header(data)
    expected = {name: tensor for name, tensor in manifest.tensors.items() if tensor.blob == digest}
    if set(entries) != set(expected):
        wrong = sorted(set(entries) ^ set(expected))
        raise InvalidPayload(f"tensor {wrong[0][:80]}: in the blob or in the manifest, not in both")
    position = header_end
    for name, (dtype, shape, begin, end) in sorted(entries.items(), key=lambda item: item[1][2]):
        tensor = expected[name]
        if (dtype, shape) != (tensor.dtype, tensor.shape):
            raise InvalidPayload(
                f"tensor {name}: blob has {dtype} {shape}, manifest {tensor.dtype} {tensor.shape}"
            )
        if (begin + header_end, end + header_end) != tensor.byte_range:
            raise InvalidPayload(f"tensor {name}: byte range differs from the manifest's")
        if begin + header_end != position:
            raise InvalidPayload(f"tensor {name}: a hole or an overlap before byte {begin}")
        position = end + header_end
    if position != len(data):
        raise InvalidPayload(f"{len(data)} bytes; the tensors end at {position}")
    view = memoryview(data)
    for name, tensor in expected.items():
        if sha256_digest(view[slice(*tensor.byte_range)]) != tensor.sha256:
            raise InvalidPayload(f"tensor {name}: its bytes do not hash to tensors.{name}.sha256")


def tensor_ranges(data: bytes | memoryview) -> dict[str, tuple[int, int]]:
    """Name -> [begin, end) within the file, of a blob this process has just written."""
    header_end, entries = _read_header(data)
    return {
        name: (begin + header_end, end + header_end) for name, (_, _, begin, end) in entries.items()
    }


def _read_header(
    data: bytes | memoryview,
) -> tuple[int, dict[str, tuple[str, list[int], int, int]]]:
    if len(data) < 8:
        raise InvalidPayload(f"{len(data)} bytes; a safetensors file starts with 8 bytes of length")
    size = int.from_bytes(data[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise InvalidPayload(f"header of {size} bytes; the limit is {MAX_HEADER_BYTES}")
    if size > len(data) - 8:
        raise InvalidPayload(f"header of {size} bytes in a file of {len(data)}")
    if bytes(data[8:9]) != b"{":
        raise InvalidPayload("header: does not start with {")
    try:
        header = decode_strict(bytes(data[8 : 8 + size]), max_bytes=MAX_HEADER_BYTES)
    except ValueError as error:
        raise InvalidPayload(f"header: {error}") from error
    if not isinstance(header, dict):
        raise InvalidPayload("header: not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise InvalidPayload("header: __metadata__ is not a map of text to text")
    return 8 + size, {name: _read_entry(name, entry) for name, entry in header.items()}


def _read_entry(name: str, entry: Any) -> tuple[str, list[int], int, int]:
    match entry:
        case {
            "dtype": str(dtype),
            "shape": list(shape),
            "data_offsets": [int(begin), int(end)],
            **others,
        } if not others and not isinstance(begin, bool) and not isinstance(end, bool):
            pass
        case _:
            raise InvalidPayload(f"tensor {name[:80]}: not a dtype, a shape and two offsets")
    size = ITEM_BYTES.get(dtype)
    if size is None:
        raise InvalidPayload(f"tensor {name[:80]}: dtype {dtype[:16]} is not one of a Cartridge's")
    for extent in shape:
        if not isinstance(extent, int) or isinstance(extent, bool) or extent < 0:
            raise InvalidPayload(f"tensor {name[:80]}: shape {str(shape)[:80]}")
        size *= extent
    if begin < 0 or end - begin != size:
        raise InvalidPayload(f"tensor {name[:80]}: {end - begin} bytes; its shape needs {size}")
    return dtype, shape, begin, end
