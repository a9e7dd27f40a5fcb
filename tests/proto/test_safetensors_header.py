"""Blobs: exactly the tensors of the manifest, where it says they are, and nothing else."""

import json
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.manifest import MAX_HEADER_BYTES, Manifest, ValueScale
from cartridge_proto.safetensors_header import InvalidPayload, check_blob, tensor_ranges
from tests.proto.sample_artifact import sample_artifact, with_header

MANIFEST, BLOB = sample_artifact()
DIGEST = MANIFEST.payload[0].sha256


def split(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """Header object and data of a well-formed blob."""
    (size,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + size]), blob[8 + size :]


def blob_with(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The sample blob with its header changed in place."""
    header, data = split(BLOB)
    change(header)
    return with_header(header, data)


@given(st.integers(1, 40), st.sampled_from([None, "head", "head_channel"]))
def test_a_blob_that_matches_its_manifest_passes(num_tokens: int, granularity: Any) -> None:
    """Plain and scaled values of any length are accepted, from bytes and from a view."""
    scale = ValueScale(granularity=granularity, dtype="F32") if granularity else None
    manifest, blob = sample_artifact(num_tokens=num_tokens, v_scale=scale)
    check_blob(manifest, manifest.payload[0].sha256, blob)
    check_blob(manifest, manifest.payload[0].sha256, memoryview(bytearray(blob)))


def test_tensor_ranges_are_those_within_the_file() -> None:
    """Ranges count from the start of the file, header included."""
    expected = {name: tensor.byte_range for name, tensor in MANIFEST.tensors.items()}
    assert tensor_ranges(BLOB) == expected


def test_metadata_is_allowed_and_ignored() -> None:
    """The format's own metadata entry is not a tensor."""
    header, data = split(BLOB)
    blob = with_header({"__metadata__": {"format": "pt"}, **header}, data)
    shift = len(blob) - len(BLOB)
    manifest = _shifted(MANIFEST, shift)
    check_blob(manifest, DIGEST, blob)


def test_each_tensor_hashes_to_its_digest() -> None:
    """A manifest whose tensor digest is another's names the tensor."""
    name = "layers.0.v"
    wrong = msgspec.structs.replace(MANIFEST.tensors[name], sha256=DIGEST)
    manifest = msgspec.structs.replace(MANIFEST, tensors={**MANIFEST.tensors, name: wrong})
    with pytest.raises(InvalidPayload, match=r"tensors\.layers\.0\.v\.sha256"):
        check_blob(manifest, DIGEST, BLOB)


def _shifted(manifest: Manifest, shift: int) -> Manifest:
    tensors = {
        name: msgspec.structs.replace(
            tensor, byte_range=(tensor.byte_range[0] + shift, tensor.byte_range[1] + shift)
        )
        for name, tensor in manifest.tensors.items()
    }
    return msgspec.structs.replace(manifest, tensors=tensors)


def _swap_offsets(header: dict[str, Any]) -> None:
    k, v = header["layers.0.k"], header["layers.0.v"]
    k["data_offsets"], v["data_offsets"] = v["data_offsets"], k["data_offsets"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda h: h.pop("layers.1.v"), "tensor layers.1.v: in the blob or in the manifest"),
        (lambda h: h.update({"extra": h["layers.0.k"]}), "tensor extra: "),
        (lambda h: h["layers.0.k"].update(dtype="I32"), "layers.0.k: dtype I32 is not one of"),
        (
            lambda h: h["layers.0.k"].update(shape=[2, 4, 5]),
            r"layers.0.k: blob has F32 \[2, 4, 5\]",
        ),
        (
            lambda h: h["layers.0.k"].update(dtype="F16", shape=[4, 5, 4]),
            "layers.0.k: blob has F16",
        ),
        (
            lambda h: h["layers.0.k"].update(shape=[2, 5]),
            "layers.0.k: 160 bytes; its shape needs 40",
        ),
        (lambda h: h["layers.0.k"].update(shape=[2, 5, -4]), r"layers.0.k: shape \[2, 5, -4\]"),
        (lambda h: h["layers.0.k"].update(shape=[2, 5, True]), "layers.0.k: shape"),
        (lambda h: h["layers.0.k"].update(shape=[2, 5, 4.0]), "layers.0.k: shape"),
        (lambda h: h["layers.0.k"].update(data_offsets=[0, 161]), "161 bytes; its shape needs 160"),
        (lambda h: h["layers.0.k"].update(data_offsets=[-160, 0]), "layers.0.k: 160 bytes"),
        (
            lambda h: h["layers.0.k"].update(data_offsets=[0]),
            "not a dtype, a shape and two offsets",
        ),
        (lambda h: h["layers.0.k"].update(data_offsets=[False, 160]), "not a dtype, a shape"),
        (lambda h: h["layers.0.k"].update(note="x"), "not a dtype, a shape and two offsets"),
        (lambda h: h["layers.0.k"].pop("dtype"), "not a dtype, a shape and two offsets"),
        (lambda h: h.update({"layers.0.k": 1}), "not a dtype, a shape and two offsets"),
        (lambda h: h.update({"__metadata__": 1}), "__metadata__ is not a map of text"),
        (lambda h: h.update({"__metadata__": {"a": 1}}), "__metadata__ is not a map of text"),
        (_swap_offsets, "byte range differs from the manifest's"),
    ],
)
def test_a_header_that_says_something_else_is_refused(
    change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    """The text names the tensor, or the part of the header."""
    with pytest.raises(InvalidPayload, match=reason):
        check_blob(MANIFEST, DIGEST, blob_with(change))


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"", "0 bytes; a safetensors file starts with 8 bytes"),
        (b"\0" * 7, "7 bytes"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "1048577 bytes; the limit is 1048576"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "the limit is 1048576"),
        (struct.pack("<Q", 100) + b"{}", "header of 100 bytes in a file of 10"),
        (struct.pack("<Q", 0), "does not start with {"),
        (struct.pack("<Q", 3) + b" {}", "does not start with {"),
        (struct.pack("<Q", 2) + b"[]", "does not start with {"),
        (struct.pack("<Q", 2) + b"{1", "header: not JSON"),
        (struct.pack("<Q", 13) + b'{"a":1,"a":1}', "header: duplicate keys"),
        (BLOB + b"\0", "the tensors end at"),
        (BLOB[:-1], "the tensors end at"),
    ],
)
def test_a_malformed_file_is_refused(blob: bytes, reason: str) -> None:
    """Length, limit, JSON and the end of the file are all checked."""
    with pytest.raises(InvalidPayload, match=reason):
        check_blob(MANIFEST, DIGEST, blob)


def test_a_hole_between_tensors_is_refused_even_if_the_manifest_agrees() -> None:
    """Bytes that no tensor claims cannot hide in a blob."""
    header, data = split(BLOB)
    for name in ("layers.1.k", "layers.1.v"):
        header[name]["data_offsets"] = [at + 16 for at in header[name]["data_offsets"]]
    begin = header["layers.0.v"]["data_offsets"][1]
    blob = with_header(header, data[:begin] + b"\0" * 16 + data[begin:])
    manifest = _with_ranges_of(blob)
    with pytest.raises(InvalidPayload, match=r"layers\.1\.k: a hole or an overlap before byte"):
        check_blob(manifest, DIGEST, blob)


def test_overlapping_tensors_are_refused_even_if_the_manifest_agrees() -> None:
    """Two tensors cannot share bytes."""
    header, data = split(BLOB)
    header["layers.1.v"]["data_offsets"] = header["layers.1.k"]["data_offsets"]
    blob = with_header(header, data[: header["layers.1.k"]["data_offsets"][1]])
    with pytest.raises(InvalidPayload, match="a hole or an overlap before byte"):
        check_blob(_with_ranges_of(blob), DIGEST, blob)


def _with_ranges_of(blob: bytes) -> Manifest:
    ranges = tensor_ranges(blob)
    tensors = {
        name: msgspec.structs.replace(tensor, byte_range=ranges[name])
        for name, tensor in MANIFEST.tensors.items()
    }
    return msgspec.structs.replace(MANIFEST, tensors=tensors)


def test_a_blob_holds_only_the_tensors_that_name_it() -> None:
    """A blob checked under another digest is expected to hold nothing."""
    with pytest.raises(InvalidPayload, match="in the blob or in the manifest, not in both"):
        check_blob(MANIFEST, "sha256:" + "0" * 64, BLOB)


def test_hostile_names_are_shown_shortened() -> None:
    """A long name in the header cannot flood a message."""
    blob = blob_with(lambda header: header.update({"x" * 10_000: {}}))
    with pytest.raises(InvalidPayload) as caught:
        check_blob(MANIFEST, DIGEST, blob)
    assert len(str(caught.value)) < 200


@given(st.data())
def test_a_changed_header_byte_never_raises_anything_else(data: st.DataObject) -> None:
    """A byte of length or header changed is refused, or read as the same tensors."""
    (size,) = struct.unpack("<Q", BLOB[:8])
    position = data.draw(st.integers(0, 8 + size - 1))
    changed = bytearray(BLOB)
    changed[position] ^= data.draw(st.integers(1, 255))
    try:
        check_blob(MANIFEST, DIGEST, bytes(changed))
    except InvalidPayload:
        return
    assert split(bytes(changed)) == split(BLOB)
