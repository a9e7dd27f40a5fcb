"""Encoded blobs and quantised values on a real engine, from every tier."""

import msgspec
import pytest
from safetensors.torch import load as load_safetensors

from cartridge_engine_ext.payload import pack_payload
from cartridge_kernels.scaled_values import dequantise_values
from cartridge_proto.digest import parse_digest
from cartridge_proto.manifest import Representation
from tests.integration.fleet import TOLERANCE, Fleet, document_tokens
from tests.integration.tiny_fleet import (
    IDS,
    LIVE,
    NUM_TOKENS,
    drop_prefix_cache,
    put_as,
    tier_of,
)

pytestmark = pytest.mark.engine

DOCUMENT = document_tokens(NUM_TOKENS, seed=950, ids=IDS)


def test_an_encoded_blob_answers_as_the_ordinary_prompt(tiered: Fleet) -> None:
    """Lossless: the bytes that attention reads are those of the plain artifact."""
    built = put_as(tiered, "encoded", DOCUMENT, "shuffle-zstd", "full")
    assert built.manifest.payload[0].encoding is not None
    ordinary = tiered.complete(DOCUMENT + LIVE)
    for tier in ("remote", "dram"):
        injected = tiered.complete(LIVE, ["encoded@1"])
        assert ordinary.difference(injected) <= TOLERANCE
        assert injected.receipt is not None
        assert tier_of(injected.receipt) == tier
        drop_prefix_cache(tiered)


@pytest.mark.parametrize("codec", ["identity", "shuffle-zstd"])
def test_quantised_values_answer_as_their_dequantised_selves(tiered: Fleet, codec: str) -> None:
    """K16/V8 equals an artifact whose full values are the dequantised ones; canary: the exact ones.

    Its probe, made by another implementation from the quantised values, has passed before.
    """
    name = f"quantised-{codec}"
    manifest = put_as(tiered, name, DOCUMENT, codec, "e4m3").manifest
    plain = put_as(tiered, f"{name}-source", DOCUMENT, "identity", "full").manifest
    quantised = put_as(tiered, f"{name}-plain-codec", DOCUMENT, "identity", "e4m3").manifest
    tensors = load_safetensors(
        tiered.store.blob_path(parse_digest(quantised.payload[0].sha256)).read_bytes()
    )
    full = {}
    for layer in range(plain.geometry.num_layers):
        full[f"layers.{layer}.k"] = tensors[f"layers.{layer}.k"]
        full[f"layers.{layer}.v"] = dequantise_values(
            tensors[f"layers.{layer}.v"], tensors[f"layers.{layer}.v_scale"]
        )
    payload = pack_payload(full)
    tiered.store.put_blob(payload.data)
    tiered.put_manifest(
        msgspec.structs.replace(
            plain,
            name=f"{name}-dequantised",
            tensors=payload.tensors,
            payload=[payload.blob],
            probe=manifest.probe,
        )
    )
    served = tiered.complete(LIVE, [f"{name}@1"])
    assert served.receipt is not None
    assert tiered.complete(LIVE, [f"{name}-dequantised@1"]).difference(served) <= TOLERANCE
    assert manifest.representation != Representation(k_dtype="F32", v_dtype="F32", v_scale=None)
    # The exact values are another answer: the comparison above can tell.
    assert tiered.complete(LIVE, [f"{name}-source@1"]).logprobs != served.logprobs
