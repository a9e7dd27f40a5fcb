"""Packing keys and values: the bytes are what the safetensors library reads and we accept."""

from collections.abc import Mapping

import msgspec
import pytest
import torch
from safetensors.torch import load

from cartridge_engine_ext.artifact_pool import TORCH_DTYPES, tensor_view
from cartridge_engine_ext.payload import DTYPE_NAMES, Payload, pack_payload, quantised_values
from cartridge_proto.codecs import decode_blob
from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import ValueScale, decode_manifest, encode_manifest
from cartridge_proto.safetensors_header import check_blob
from tests.proto.sample_artifact import sample_artifact


def tensors(key: torch.dtype, value: torch.dtype) -> dict[str, torch.Tensor]:
    """Two layers of random keys and values, 2 heads, 5 tokens, dimension 4."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{layer}.{part}": torch.randn(2, 5, 4, generator=generator).to(dtype)
        for layer in range(2)
        for part, dtype in (("k", key), ("v", value))
    }


def unpacked(payload: Payload) -> dict[str, torch.Tensor]:
    """Tensors read back by the table alone."""
    buffer = bytearray(payload.data)
    return {
        name: tensor_view(buffer, tensor.dtype, tensor.shape, *tensor.byte_range)
        for name, tensor in payload.tensors.items()
    }


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Same names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype is other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("key", DTYPE_NAMES)
@pytest.mark.parametrize("value", DTYPE_NAMES)
def test_what_is_packed_is_read_back(key: torch.dtype, value: torch.dtype) -> None:
    """The table finds every tensor, and so does the safetensors library; dtypes may differ."""
    named = tensors(key, value)
    payload = pack_payload(named)
    assert equal(unpacked(payload), named)
    assert equal(load(payload.data), named)
    assert payload.representation.k_dtype == DTYPE_NAMES[key]
    assert payload.representation.v_dtype == DTYPE_NAMES[value]
    assert payload.representation.v_scale is None


def test_every_digest_is_that_of_its_bytes() -> None:
    """Blob and tensors are named by what they hash to."""
    payload = pack_payload(tensors(torch.float32, torch.float32))
    assert payload.blob.sha256 == sha256_digest(payload.data)
    assert payload.blob.size_bytes == len(payload.data)
    for tensor in payload.tensors.values():
        begin, end = tensor.byte_range
        assert tensor.blob == payload.blob.sha256
        assert tensor.sha256 == sha256_digest(payload.data[begin:end])


def test_a_packed_blob_passes_the_strict_reader() -> None:
    """What the builder writes the pool accepts."""
    manifest, _ = sample_artifact(num_tokens=5)
    payload = pack_payload(tensors(torch.float32, torch.float32))
    described = msgspec.structs.replace(manifest, tensors=payload.tensors, payload=[payload.blob])
    check_blob(described, payload.blob.sha256, payload.data)
    assert encode_manifest(described)


def test_views_are_packed_as_they_look() -> None:
    """A transposed view is stored in its own order, not in that of the memory below it."""
    named = tensors(torch.float32, torch.float32)
    views = {
        name: tensor.transpose(1, 2).contiguous().transpose(1, 2) for name, tensor in named.items()
    }
    assert not views["layers.0.k"].is_contiguous()
    assert pack_payload(views) == pack_payload(named)


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("key", DTYPE_NAMES)
def test_quantised_values_are_packed_with_their_scales(key: torch.dtype, by_channel: bool) -> None:
    """Keys stay as they are, bit for bit; codes and scales are read back by their table."""
    named = tensors(key, torch.float32)
    small = quantised_values(named, by_channel=by_channel)
    payload = pack_payload(small)
    assert equal(unpacked(payload), small)
    for layer in range(2):
        assert torch.equal(small[f"layers.{layer}.k"], named[f"layers.{layer}.k"])
        assert small[f"layers.{layer}.v"].dtype is torch.float8_e4m3fn
    representation = payload.representation
    assert (representation.k_dtype, representation.v_dtype) == (DTYPE_NAMES[key], "F8_E4M3")
    assert representation.v_scale == ValueScale(
        granularity="head_channel" if by_channel else "head", dtype="F32"
    )
    manifest, _ = sample_artifact(num_tokens=5)
    described = msgspec.structs.replace(
        manifest, tensors=payload.tensors, payload=[payload.blob], representation=representation
    )
    check_blob(described, payload.blob.sha256, payload.data)
    assert decode_manifest(encode_manifest(described)) == described


def test_a_value_that_is_no_number_is_named() -> None:
    """The text says which tensor."""
    named = tensors(torch.float32, torch.float32)
    named["layers.1.v"][0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layers.1.v: a value is NaN or infinite"):
        quantised_values(named)


@pytest.mark.parametrize("is_small", [False, True])
def test_an_encoded_payload_holds_the_same_tensors(is_small: bool) -> None:
    """Its table counts in the decoded bytes, and its blob is named by the stored ones."""
    named = tensors(torch.bfloat16, torch.float32)
    if is_small:
        named = quantised_values(named)
    plain, payload = pack_payload(named), pack_payload(named, "shuffle-zstd")
    assert payload.blob.sha256 == sha256_digest(payload.data)
    assert payload.blob.decoded_sha256 == plain.blob.sha256
    buffer = memoryview(bytearray(payload.blob.decoded_bytes))
    decode_blob(payload.blob, payload.data, buffer)
    assert buffer == plain.data
    for name, tensor in payload.tensors.items():
        assert tensor == msgspec.structs.replace(plain.tensors[name], blob=payload.blob.sha256)


def test_keys_cannot_be_packed_in_8_bits() -> None:
    """A Cartridge has no such keys, and no scales of another dtype."""
    named = tensors(torch.float32, torch.float32)
    named["layers.0.k"] = named["layers.0.k"].to(torch.float8_e4m3fn)
    with pytest.raises(KeyError, match="float8_e4m3fn"):
        pack_payload(named)


def test_other_dtypes_are_refused() -> None:
    """A dtype that no Cartridge has is an error by name."""
    with pytest.raises(KeyError, match="float64"):
        pack_payload(tensors(torch.float64, torch.float32))


def test_the_two_tables_of_dtypes_agree() -> None:
    """Reading a written name gives the dtype again."""
    assert {TORCH_DTYPES[name]: name for name in DTYPE_NAMES.values()} == DTYPE_NAMES
