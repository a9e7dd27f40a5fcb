"""An engine of a tiny random model whose tiers are smaller than what it serves.

dram for two artifacts, nvme for four, HBM for a few; started in a third of the time of the other.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import torch

from cartridge_engine_ext.build import Builder, Built, Source
from cartridge_engine_ext.quantise import Keys, Quantiser, Recipe
from cartridge_proto import names
from cartridge_proto.codec import unseal
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import ConventionKind
from cartridge_proto.residency import ResidencyRecord
from cartridge_router.demo.stack import MODEL_NAME
from tests.engine_ext.tiny_model import MAX_POSITIONS, save_tiny_model
from tests.integration.fleet import (
    BLOCK_SIZE,
    RESIDENCY_KEY,
    TOLERANCE,
    Fleet,
    document_tokens,
)
from tests.integration.running_fleet import running_fleet

IDS = (1, 96)
"""Token ids of the tiny model."""
LIVE = [5, 17, 60, 33]
NUM_TOKENS = 2 * BLOCK_SIZE + 5
BYTES_PER_TOKEN = 2 * 2 * 2 * 32 * 4
"""Layers, K and V, KV heads, head_dim, float32."""
ARTIFACT_BYTES = NUM_TOKENS * BYTES_PER_TOKEN + 1024
CONTROL_TOKEN = "integration-control-token"
NUM_BLOCKS = 24


@contextmanager
def running_tiny_fleet(work: Path, arguments: Sequence[str] = (), **extra: Any) -> Iterator[Fleet]:
    """One engine behind a gateway; `extra` goes over the tiers' settings, `arguments` are flags."""
    model = save_tiny_model(work / "model", head_dim=32)
    settings = {
        "nvme_dir": str(work / "nvme"),
        "nvme_bytes": 4 * ARTIFACT_BYTES,
        "dram_bytes": 2 * ARTIFACT_BYTES,
        "state_dir": str(work / "state"),
        **extra,
    }
    with running_fleet(
        work,
        model,
        max_model_len=MAX_POSITIONS,
        arguments=[
            *("--block-size", str(BLOCK_SIZE)),
            *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
            *arguments,
        ],
        environment={names.ENV_CONTROL_TOKEN: CONTROL_TOKEN},
        **settings,
    ) as fleet:
        yield fleet


def document(index: int) -> list[int]:
    """Tokens of one of the documents."""
    return document_tokens(NUM_TOKENS, seed=700 + index, ids=IDS)


def put_documents(fleet: Fleet, name: str, count: int) -> None:
    """Build Cartridges `name-0`, `name-1`, … of the documents."""
    for index in range(count):
        fleet.put(f"{name}-{index}", document(index), LIVE)


def put_small(fleet: Fleet, name: str, tokens: Sequence[int]) -> None:
    """`name@1` with K16/V8, `name-full@1` with the same numbers in float32, `name-source@1`."""
    source = fleet.put(f"{name}-source", tokens, LIVE)
    quantiser = Quantiser(model_dir=fleet.model_dir, store=fleet.store, say=lambda line: None)
    built = quantiser.quantise(Digest(source.digest), Recipe(Keys.BFLOAT16), name=name, version="1")
    fleet.wait_for_catalog(f"{name}@1", built.digest)
    fleet.put_plain(f"{name}-full", source.manifest, fleet.tensors(built.manifest), LIVE)


def put_as(fleet: Fleet, name: str, tokens: Sequence[int], codec: str, values: str) -> Built:
    """A Cartridge of these tokens, stored by a codec and with full or quantised values."""
    builder = Builder(
        model_dir=fleet.model_dir,
        store=fleet.store,
        model_name=MODEL_NAME,
        dtype=torch.float32,
        with_weights_digest=True,
        say=lambda line: None,
        codec=codec,
        values=values,
    )
    text = json.dumps(list(tokens))
    source = Source(text=text, name=name, convention=ConventionKind.DOCUMENT)
    built = builder.prefill(source, list(tokens), LIVE)
    fleet.wait_for_catalog(f"{name}@1", built.digest)
    return built


def expect_ordinary(fleet: Fleet, name: str, index: int) -> dict[str, Any]:
    """A Cartridge answers as the ordinary prompt; returns its receipt."""
    ordinary = fleet.complete(document(index) + LIVE)
    injected = fleet.complete(LIVE, [f"{name}-{index}@1"])
    assert ordinary.difference(injected) <= TOLERANCE
    assert injected.receipt is not None
    return injected.receipt


def tier_of(receipt: dict[str, Any]) -> str:
    """Tier of the only artifact of a receipt."""
    (item,) = receipt["items"]
    return str(item["tier"])


def rows(fleet: Fleet) -> dict[str, ResidencyRecord]:
    """Residency as Redis has it, by digest."""
    with redis.Redis.from_url(fleet.redis_url) as client:
        found: Any = client.hgetall(names.residency_key("replica-0"))
    return {
        digest.decode(): unseal(data, ResidencyRecord, RESIDENCY_KEY.encode())
        for digest, data in found.items()
    }


def drop_prefix_cache(fleet: Fleet) -> None:
    """Let vLLM forget all of its blocks."""
    response = fleet.client.post(f"{fleet.engine_url}/reset_prefix_cache")
    assert response.status_code == 200
