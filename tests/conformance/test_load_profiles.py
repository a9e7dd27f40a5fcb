"""The profiles of guidellm and `vllm bench serve`, run for a moment over a simulated replica."""

import asyncio
import json
from pathlib import Path

import pytest

from cartridge_loadtest.stand_in_cartridges import put_stand_ins
from cartridge_proto.stores import LocalStore
from tests.conformance.conftest import CLIENTS, ROOT, RunProgram, StartUrl
from tests.engine_ext.tiny_model import save_tiny_tokenizer
from tests.loadtest.replica_client import MODEL, Client, StartReplica
from tests.router.fleets import start_replicas
from tests.router.gateway_client import quick_gateway

PROFILES = ROOT / "loadtest" / "profiles"


@pytest.fixture
async def replica(start_replica: StartReplica, store: LocalStore, redis_url: str) -> Client:
    """One with a Cartridge in its store."""
    await asyncio.to_thread(put_stand_ins, store, 1, model=MODEL)
    (client,) = await start_replicas(start_replica, 1, store, redis_url)
    return client


@pytest.fixture
async def gateway(replica: Client, start_url: StartUrl, store: LocalStore, redis_url: str) -> str:
    """A gateway over it."""
    return await start_url(quick_gateway(f"sim-0={replica.url}", store=store, redis_url=redis_url))


def used_cartridges(replica: Client) -> int:
    """Requests that came with a Cartridge."""
    bodies = [json.loads(each.body) for each in replica.replica.requests]
    return sum("kv_transfer_params" in body for body in bodies)


async def test_guidellm(
    run_program: RunProgram, gateway: str, replica: Client, tmp_path: Path
) -> None:
    """It sends chats that use the Cartridge, and none ends in error."""
    await run_program(
        *(PROFILES / "guidellm", gateway, MODEL, "document-000@1"),
        *("--constraint", "kind=max_requests,count=8"),
        OUT=str(tmp_path / "out"),
        RATE="8",
        GUIDELLM=str(CLIENTS / "guidellm"),
    )
    report = json.loads((tmp_path / "out" / "guidellm.json").read_text())
    made = report["benchmarks"][0]["scheduler_metrics"]["requests_made"]
    assert made["successful"] > 0
    assert made["errored"] == 0
    assert used_cartridges(replica) >= made["successful"]
    assert (tmp_path / "out" / "guidellm.html").stat().st_size > 0


async def test_vllm_bench_serve(
    run_program: RunProgram, gateway: str, replica: Client, tmp_path: Path
) -> None:
    """Every request is completed, with the Cartridge, and goodput is counted."""
    tokenizer = tmp_path / "tokenizer"
    await asyncio.to_thread(save_tiny_tokenizer, tokenizer)
    await run_program(
        *(PROFILES / "vllm-bench-serve", gateway, MODEL, "document-000@1"),
        OUT=str(tmp_path / "out"),
        NUM_PROMPTS="8",
        RATE="20",
        TOKENIZER=str(tokenizer),
    )
    result = json.loads((tmp_path / "out" / "vllm-bench.json").read_text())
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["request_goodput"] is not None
    assert used_cartridges(replica) >= 8
