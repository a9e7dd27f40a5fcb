"""`make bench-engine`: what a Cartridge costs on a real engine, beside a plain prompt.

Owns the measurements and their targets. Refuses absolute claims: times are of one run on a machine
that others use too, so each is shown as a ratio to something real measured in the same run.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import torch

from cartridge_engine_ext.demo_model import default_model_dir, prepare_demo_model
from cartridge_engine_ext.nvme_tier import NvmeTier
from cartridge_proto import names
from cartridge_proto.digest import parse_digest
from cartridge_proto.v1 import control_pb2, control_pb2_grpc
from cartridge_router.demo.stack import MODEL_NAME
from tests.benchmarks.rows import Row, report, say
from tests.integration.fleet import LIVE_PROMPT, Fleet, document_tokens
from tests.integration.running_fleet import running_fleet

LENGTHS = (256, 512, 1024, 2048, 4096)
MAX_MODEL_LEN = 4608
BLOCK_SIZE = 128
DRAM_ARTIFACTS = 2
"""Artifacts of the longest document that fit into dram; more are served."""
NUM_REPEATS = 3
NUM_ITL_TOKENS = 2000
NUM_COLD = 20
ITL_LENGTH = 2048
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Layers, K and V, KV heads, head_dim, float32."""


def main(arguments: Sequence[str]) -> int:
    """Measure everything; 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="make bench-engine", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/engine.json"))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows: list[Row] = []
    work = Path(tempfile.mkdtemp(prefix="cartridge-bench-"))
    longest_bytes = max(given.lengths) * BYTES_PER_TOKEN + (1 << 16)
    with running_fleet(
        work,
        prepare_demo_model(default_model_dir()),
        max_model_len=MAX_MODEL_LEN,
        arguments=["--block-size", str(BLOCK_SIZE)],
        nvme_dir=str(work / "nvme"),
        nvme_bytes=len(given.lengths) * NUM_REPEATS * longest_bytes,
        dram_bytes=DRAM_ARTIFACTS * longest_bytes,
        with_probe=False,
    ) as fleet:
        for length in given.lengths:
            rows += time_to_first_token(fleet, length)
            say(rows[-1])
        rows += dram_against_memcpy(fleet, max(given.lengths))
        rows += nvme_against_read(fleet, max(given.lengths), work)
        rows += inter_token_latency(fleet)
        rows += memory(fleet, DRAM_ARTIFACTS * longest_bytes, longest_bytes)
    return report(rows, given.out)


# --- time to first token -------------------------------------------------------------------------
def time_to_first_token(fleet: Fleet, length: int) -> list[Row]:
    """Plain prompt, then the Cartridge from each place, as parts of the plain prompt's time."""
    document = document_tokens(length, seed=length)
    built = fleet.put(f"ttft-{length}", document)
    alias = f"ttft-{length}@1"
    plain_s = min(first_token_s(fleet, document + LIVE_PROMPT, [], drop=True) for _ in range(2))
    alone_s = min(first_token_s(fleet, LIVE_PROMPT, [], drop=True) for _ in range(NUM_REPEATS))
    found = {"remote": first_token_s(fleet, LIVE_PROMPT, [alias], drop=True)}
    found["nvme"] = float("inf")
    for _ in range(NUM_REPEATS):
        evict(fleet, built.digest)
        seconds = first_token_s(fleet, LIVE_PROMPT, [alias], drop=True)
        found["nvme"] = min(found["nvme"], seconds)
    found["dram"] = min(
        first_token_s(fleet, LIVE_PROMPT, [alias], drop=True) for _ in range(NUM_REPEATS)
    )
    found["hbm"] = min(
        first_token_s(fleet, LIVE_PROMPT, [alias], drop=False) for _ in range(NUM_REPEATS)
    )
    against = f"plain prompt of {length} + {len(LIVE_PROMPT)} tokens: {plain_s:.3f} s"
    rows = [
        Row(f"ttft/{length}/{tier}", seconds / plain_s, "of 1", None, None, against)
        for tier, seconds in found.items()
    ]
    return [
        *rows,
        Row(f"ttft/{length}/no-document", alone_s / plain_s, "of 1", None, None, against),
    ]


def first_token_s(
    fleet: Fleet, prompt: list[int], cartridge_ids: list[str], *, drop: bool
) -> float:
    """Seconds from the request to the first streamed token, through the gateway."""
    if drop:
        response = fleet.client.post(f"{fleet.engine_url}/reset_prefix_cache")
        response.raise_for_status()
    started_s = time.perf_counter()
    with fleet.client.stream(**completion(fleet, prompt, cartridge_ids, 2)) as stream:
        stamps = [time.perf_counter() for line in stream.iter_lines() if line.startswith("data: {")]
    return stamps[0] - started_s


def completion(
    fleet: Fleet, prompt: Sequence[int], cartridge_ids: Sequence[str], num_new_tokens: int
) -> dict[str, Any]:
    """Arguments of a streamed, greedy completion."""
    return {
        "method": "POST",
        "url": f"{fleet.gateway_url}/v1/completions",
        "json": {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": num_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            names.FIELD_CARTRIDGE_IDS: list(cartridge_ids),
        },
    }


@contextmanager
def control(fleet: Fleet) -> Iterator[control_pb2_grpc.CartridgeControlStub]:
    """The engine's control service."""
    with grpc.insecure_channel(fleet.control_address()) as channel:
        yield control_pb2_grpc.CartridgeControlStub(channel)


def evict(fleet: Fleet, digest: str) -> None:
    """Drop an artifact from dram; the nvme folder keeps it."""
    with control(fleet) as stub:
        answer = stub.Evict(control_pb2.EvictRequest(digest=digest))
    if not answer.evicted:
        raise RuntimeError(f"not evicted: {answer.reason}")


# --- bytes per second ----------------------------------------------------------------------------
def dram_against_memcpy(fleet: Fleet, length: int) -> list[Row]:
    """Writing keys and values into vLLM's blocks, beside copying the same bytes."""
    size_bytes = length * BYTES_PER_TOKEN
    source = torch.ones(size_bytes // 4)
    target = torch.empty_like(source)
    copy_s = min(seconds_of(lambda: target.copy_(source)) for _ in range(5))
    load_s = float("inf")
    for _ in range(5):
        fleet.client.post(f"{fleet.engine_url}/reset_prefix_cache").raise_for_status()
        receipt = fleet.complete(LIVE_PROMPT, [f"ttft-{length}@1"], num_new_tokens=1).receipt
        assert receipt is not None
        assert receipt["items"][0]["tier"] == "dram"
        load_s = min(load_s, receipt["load_s"])
    ratio = copy_s / load_s
    against = f"memcpy of {size_bytes >> 20} MiB: {size_bytes / copy_s / 1e9:.1f} GB/s"
    return [Row("dram-load/memcpy", ratio, "of 1", ">= 0.7", ratio >= 0.7, against)]


def nvme_against_read(fleet: Fleet, length: int, work: Path) -> list[Row]:
    """Reading and verifying an artifact from the folder, beside reading the same file."""
    manifest = fleet.store.read_manifest(fleet.store.resolve(f"ttft-{length}@1"))
    tier = NvmeTier(store=fleet.store, root=work / "nvme", capacity_bytes=1 << 40)
    path = work / "nvme" / "blobs" / "sha256"
    blob = parse_digest(manifest.payload[0].sha256)
    path /= blob.removeprefix("sha256:")
    buffer = memoryview(bytearray(manifest.payload[0].size_bytes))

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            position = 0
            while position < len(buffer):
                position += file.readinto(buffer[position : position + (1 << 20)]) or 0

    def load() -> None:
        tier.read_blob_into(blob, buffer)

    rows = []
    for name, prepare in (("cached", lambda: None), ("uncached", lambda: forget(path))):
        read_s = min(seconds_of(read, prepare) for _ in range(3))
        load_s = min(seconds_of(load, prepare) for _ in range(3))
        ratio = read_s / load_s
        against = f"plain read, {name}: {len(buffer) / read_s / 1e9:.2f} GB/s"
        rows.append(Row(f"nvme-load/read/{name}", ratio, "of 1", ">= 0.7", ratio >= 0.7, against))
    tier.close()
    return rows


def forget(path: Path) -> None:
    """Let the kernel drop its pages of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of(run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """How long something takes."""
    prepare()
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


# --- what others notice --------------------------------------------------------------------------
def inter_token_latency(fleet: Fleet) -> list[Row]:
    """Gaps of a running answer while others come: with Cartridges never seen before, and without.

    The Cartridges are one artifact under many names, so that each is fetched, verified and written.
    """
    manifest = fleet.store.read_manifest(fleet.store.resolve(f"ttft-{ITL_LENGTH}@1"))
    for index in range(NUM_COLD):
        fleet.put_manifest(msgspec.structs.replace(manifest, name=f"itl-{index}"))
    cold = [[f"itl-{index}@1"] for index in range(NUM_COLD)]
    gaps = {
        name: decode_gaps(fleet, requests)
        for name, requests in (("plain", [[]] * NUM_COLD), ("cold", cold))
    }
    rows = []
    for name, of in (("mean", statistics.mean), ("p95", p95)):
        ratio = of(gaps["cold"]) / of(gaps["plain"])
        against = f"requests without a Cartridge: {of(gaps['plain']) * 1000:.1f} ms"
        is_target = name == "mean"
        target, ok = ("<= 1.1", ratio <= 1.1) if is_target else (None, None)
        rows.append(Row(f"itl-during-loads/{name}", ratio, "of 1", target, ok, against))
    return rows


def p95(values: Sequence[float]) -> float:
    """95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def decode_gaps(fleet: Fleet, requests: Sequence[Sequence[str]]) -> list[float]:
    """Seconds between the tokens of a running answer while these requests come one by one."""
    stamps: list[float] = []
    is_over = threading.Event()

    def others() -> None:
        for cartridge_ids in requests:
            if is_over.is_set():
                break
            fleet.complete(LIVE_PROMPT, cartridge_ids, num_new_tokens=1)
        is_over.set()

    worker = threading.Thread(target=others)
    with httpx.Client(timeout=600) as client:
        arguments = completion(fleet, LIVE_PROMPT, [], NUM_ITL_TOKENS)
        with client.stream(**arguments) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                stamps.append(time.perf_counter())
                if len(stamps) == 1:
                    worker.start()
                if is_over.is_set():
                    break
    is_over.set()
    worker.join()
    return [after - before for before, after in itertools.pairwise(stamps)]


# --- memory --------------------------------------------------------------------------------------
def memory(fleet: Fleet, dram_bytes: int, artifact_bytes: int) -> list[Row]:
    """Memory that holds artifacts, after many more were served than fit."""
    held_bytes = 0
    for pid in processes_of(fleet.engine.popen.pid):
        held_bytes += sum(
            link.stat().st_size
            for link in Path(f"/proc/{pid}/fd").iterdir()
            if "memfd:cartridge" in os.readlink(link)
        )
    limit_bytes = dram_bytes + artifact_bytes
    against = f"dram_bytes {dram_bytes >> 20} MiB + one artifact of {artifact_bytes >> 20} MiB"
    ratio = held_bytes / limit_bytes
    return [Row("memory/artifacts", ratio, "of 1", "<= 1", ratio <= 1, against)]


def processes_of(leader: int) -> list[int]:
    """Ids of the processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            if os.getsid(int(entry.name)) == leader:
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
