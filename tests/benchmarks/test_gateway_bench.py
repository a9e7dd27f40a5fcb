"""The harness of `make bench-gateway` counts what happens, and nothing else.

Owns its mock, load generator, clocks and verdicts. Refuses to run a proxy or to time anything.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.benchmarks import bench_gateway as bench
from tests.benchmarks.contenders import (
    LOAD_CORE,
    PROXY_CORE,
    NotStarted,
    on_core,
    running,
    running_engines,
    started,
)
from tests.benchmarks.gateway_answers import (
    DONE,
    EVENTS,
    JSON_BODY,
    NUM_CHUNKS,
    STREAM,
    TEXT,
    problem_with,
)
from tests.benchmarks.load_generator import Plan, Sample, requests_of, sample
from tests.benchmarks.mock_upstream import Mock, listen
from tests.benchmarks.process_costs import cpu_s, peak_bytes, tree_of
from tests.benchmarks.stand_in_publishers import NUM_CARTRIDGES, tiers_of
from tests.loadtest.cartridge_requests import until

BURN = """
import time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
"""


@contextlib.asynccontextmanager
async def running_mock(num_engines: int = 2) -> AsyncIterator[tuple[Mock, list[int]]]:
    """Mock engines in this process, and their ports."""
    mock = Mock(num_engines, None)
    servers = await listen(mock)
    try:
        yield mock, [server.sockets[0].getsockname()[1] for server in servers]
    finally:
        for server in servers:
            server.close()


@contextlib.asynccontextmanager
async def running_server(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[int]:
    """A server that answers as a test says; its port."""
    app = web.Application(client_max_size=1 << 20)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def plan_for(port: int, **fields: Any) -> Plan:
    """A short sample."""
    given: dict[str, Any] = {
        "port": port,
        "concurrency": 3,
        "size_bytes": 2_000,
        "is_stream": False,
        "num_requests": 30,
        "min_s": 0.0,
        "max_s": 10.0,
    }
    return Plan(**(given | fields))


# --- the mock ------------------------------------------------------------------------------------
async def test_the_mock_speaks_http() -> None:
    """Another client reads health, models, an answer and a stream from it on one connection."""
    async with running_mock() as (_, ports), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{ports[0]}"
        async with session.get(f"{url}/health") as response:
            assert response.status == 200
        async with session.get(f"{url}/v1/models") as response:
            assert [entry["id"] for entry in (await response.json())["data"]] == ["sample"]
        async with session.get(f"{url}/other") as response:
            assert response.status == 404
        for is_stream in (False, True):
            body = {"model": "sample", "stream": is_stream}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                kind = response.content_type
                found = problem_with(response.status, await response.read(), is_stream=is_stream)
            assert (found, kind == "text/event-stream") == (None, is_stream)


async def test_a_paced_stream_comes_in_pieces() -> None:
    """With a pace the same bytes come event by event, and a cut stream is counted."""
    async with running_mock() as (mock, ports), aiohttp.ClientSession() as session:
        mock.pace_s = 0.001
        found = await sample(plan_for(ports[0], is_stream=True, num_requests=3))
        assert (found.num_wrong, found.num_requests) == (0, 3)
        assert found.num_reads > NUM_CHUNKS / 4
        url = f"http://127.0.0.1:{ports[0]}/v1/chat/completions"
        mock.pace_s = 60.0
        async with session.post(url, json={"stream": True}) as response:
            assert (await response.content.readany()).startswith(b"data: ")
        await until(lambda: mock.counts[0].num_cut_off == 1, "the cut is counted")


async def test_what_reaches_an_engine_is_counted_there() -> None:
    """Requests, bytes and composition messages are counted for the engine that was asked."""
    async with running_mock() as (mock, ports), aiohttp.ClientSession() as session:
        found = await sample(plan_for(ports[1]))
        assert found.num_requests == mock.counts[1].num_requests == 30
        assert found.num_body_bytes == mock.counts[1].num_body_bytes
        url = f"http://127.0.0.1:{ports[0]}/v1/chat/completions"
        async with session.post(url, json={"kv_transfer_params": {}}) as response:
            assert response.status == 200
        assert mock.counts[0].num_requests == mock.counts[0].num_compositions == 1
        assert mock.counts[1].num_compositions == 0


def test_the_mock_is_a_process_of_its_own(tmp_path: Path) -> None:
    """Started as in a run it has four engines, says its counts, and ends with the block."""
    with running_engines(tmp_path) as engines:
        assert len(set(engines.ports)) == 4
        engines.set_pace(0.0)
        assert [counts.num_requests for counts in engines.counts()] == [0] * 4
        url = engines.urls[0]
    with pytest.raises(OSError, match="refused"):
        engines.counts()
    assert url.startswith("http://127.0.0.1:")


# --- the load generator --------------------------------------------------------------------------
async def _refuse(_: web.Request) -> web.Response:
    return web.Response(status=503, body=JSON_BODY)


async def _say_less(_: web.Request) -> web.Response:
    return web.Response(body=JSON_BODY.replace(TEXT.encode(), TEXT[:-1].encode()))


async def _say_nothing(_: web.Request) -> web.Response:
    return web.Response(body=b"{}")


async def _hang_up(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize("answer", [_refuse, _say_less, _say_nothing, _hang_up])
async def test_a_wrong_answer_is_no_right_one(
    answer: Callable[[web.Request], Awaitable[web.Response]],
) -> None:
    """A status, another text, no text and a cut connection are all wrong, each counted and told."""
    async with running_server(answer) as port:
        found = await sample(plan_for(port, concurrency=1, num_requests=1))
    assert (found.num_requests, found.num_wrong) == (1, 1)
    assert found.problems


async def test_an_answer_that_does_not_come_is_wrong() -> None:
    """A sample ends although a proxy holds its requests for ever."""

    async def hold(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async with running_server(hold) as port:
        found = await sample(plan_for(port, max_s=0.0, concurrency=2), stuck_s=0.2)
        assert found.num_wrong == 0
        found = await sample(plan_for(port, max_s=0.1, concurrency=2), stuck_s=0.2)
        assert found.num_wrong == 2


async def test_a_body_written_anew_is_right() -> None:
    """A proxy may write the answer in its own way, as long as it says the same."""

    async def anew(_: web.Request) -> web.Response:
        return web.json_response(json.loads(JSON_BODY) | {"id": "other"})

    async with running_server(anew) as port:
        assert (await sample(plan_for(port))).num_wrong == 0


@pytest.mark.parametrize(
    "body",
    [
        b"".join(EVENTS),
        b"".join(EVENTS[:-1]) + DONE,
        b"".join(EVENTS[:3] + EVENTS[4:]) + DONE,
        b"",
        b"data: {\n\n" + DONE,
    ],
)
def test_an_incomplete_stream_is_wrong(body: bytes) -> None:
    """No end, no finish, a missing event, nothing, and half an event are found."""
    assert problem_with(200, STREAM, is_stream=True) is None
    assert problem_with(200, body, is_stream=True) is not None


def test_bodies_have_the_size_and_differ() -> None:
    """Every body is as long as planned; topics share beginnings; no two are equal."""
    for size_bytes in (2_000, 100_000):
        found = requests_of(plan_for(1, size_bytes=size_bytes, cartridges=("a@1", "b@1")))
        bodies = [raw[-length:] for raw, length in found]
        assert {abs(len(body) - size_bytes) <= 40 for body in bodies} == {True}
        assert len(set(bodies)) == len(bodies)
        assert {json.loads(body)["cartridge_ids"][0] for body in bodies} == {"a@1", "b@1"}
        texts = [json.loads(body)["messages"][0]["content"] for body in bodies]
        assert len({text[: size_bytes // 2] for text in texts}) == 50


# --- clocks --------------------------------------------------------------------------------------
def _run(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", BURN + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


@contextlib.contextmanager
def burning(code: str) -> Iterator[int]:
    """A process that has done its work and waits; its id."""
    process = _run(f"{code}\nprint('done', flush=True)\ninput()")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        yield process.pid
    finally:
        process.communicate(b"\n")


def test_cpu_time_is_that_of_all_threads() -> None:
    """A thread's time counts, also after its end."""
    code = "import threading\nt = threading.Thread(target=burn, args=(0.3,))\nt.start()\nt.join()"
    with burning(code) as pid:
        assert cpu_s(pid) >= 0.3
        assert tree_of(pid) == [pid]


CHILD = "import subprocess, sys\nsource = {burn!r} + {code!r}\n"


def test_cpu_time_includes_a_living_child() -> None:
    """What a child spends counts while it lives, and so does its memory."""
    code = "burn(0.4)\nprint('burnt', flush=True)\ninput()"
    parent = CHILD.format(burn=BURN, code=code) + (
        "p = subprocess.Popen([sys.executable, '-c', source], stdin=-1, stdout=-1)\n"
        "p.stdout.readline()"
    )
    with burning(parent) as pid:
        assert len(tree_of(pid)) == 2
        assert cpu_s(pid) >= 0.4
        assert peak_bytes(pid) > 10 << 20


def test_cpu_time_includes_a_child_that_has_ended() -> None:
    """What a child spent is not lost when it ends."""
    parent = CHILD.format(burn=BURN, code="burn(0.4)") + (
        "subprocess.run([sys.executable, '-c', source])"
    )
    with burning(parent) as pid:
        assert tree_of(pid) == [pid]
        assert cpu_s(pid) >= 0.4


def test_a_proxy_has_a_core_of_its_own(tmp_path: Path) -> None:
    """What is started on the proxies' core stays there although its starter is on the other."""
    code = "import os\nprint(os.sched_getaffinity(0))"
    for core in (LOAD_CORE, PROXY_CORE):
        with (
            on_core(LOAD_CORE),
            running(core, [sys.executable, "-c", code], tmp_path / "log", stdout=-1) as process,
        ):
            assert process.stdout is not None
            assert process.stdout.read() == f"{{{core}}}\n"


# --- verdicts ------------------------------------------------------------------------------------
def test_the_cartridges_are_spread_over_engines_and_tiers() -> None:
    """Each engine holds some at each tier; some Cartridges are on several, some nowhere."""
    held = [tiers_of(engine) for engine in range(4)]
    assert all(len(set(tiers.values())) == 3 for tiers in held)
    num_holders = [sum(index in tiers for tiers in held) for index in range(NUM_CARTRIDGES)]
    assert set(num_holders) == {0, 1, 2, 3}


def _results(**cpu_us: float) -> bench.Results:
    """Results of one cell, with CPU µs for each column."""
    one = Sample(
        num_requests=100,
        num_wrong=0,
        problems=[],
        num_body_bytes=1,
        elapsed_s=1.0,
        total_p50_s=0.002,
        total_p99_s=0.003,
        first_p50_s=0.001,
        first_p99_s=0.001,
        num_reads=1.0,
    )
    results = bench.Results()
    names = {"ours": bench.OURS, "aware": bench.CACHE_AWARE, "robin": bench.ROUND_ROBIN}
    for name, value in cpu_us.items():
        column = names.get(name, name)
        measured = bench.Measured(value, 1.0, one)
        results.samples[column, CELL.name].append(measured)
    return results


CELL = bench.CELLS[0]


@pytest.mark.parametrize(
    ("ours_us", "is_reached", "is_stretch_reached"),
    [(90.0, True, True), (150.0, True, None), (210.0, False, None)],
)
def test_the_target_is_cache_aware_of_the_same_run(
    ours_us: float, is_reached: bool, is_stretch_reached: bool | None
) -> None:
    """Above `vllm-router` cache_aware is a miss; above its round robin is none."""
    results = _results(ours=ours_us, aware=200.0, robin=100.0)
    rows = {row.name: row for row in bench.judged(results, bench.COLUMNS, [CELL])}
    stem = f"cpu-ratio/{CELL.name}/{bench.OURS}/of-"
    assert rows[stem + bench.CACHE_AWARE].ok is is_reached
    assert rows[stem + bench.CACHE_AWARE].value == pytest.approx(ours_us / 200)
    assert rows[stem + bench.ROUND_ROBIN].ok is is_stretch_reached


@pytest.mark.parametrize(("peer_us", "is_reached"), [(401.0, True), (399.0, False)])
def test_a_python_peer_must_cost_four_times_as_much(peer_us: float, is_reached: bool) -> None:
    """Below four times is a miss."""
    results = _results(ours=100.0, litellm=peer_us)
    rows = {row.name: row for row in bench.judged(results, bench.COLUMNS, [CELL])}
    assert rows[f"less-than/{CELL.name}/litellm"].ok is is_reached


def test_a_contender_that_cannot_start_says_why(tmp_path: Path) -> None:
    """A program that is not there, and one that ends at once, are told with the reason."""
    with (
        pytest.raises(NotStarted, match="not installed"),
        started("none", [str(tmp_path / "none")], 1, tmp_path),
    ):
        pass
    command = [sys.executable, "-c", "import sys; sys.exit('no such policy')"]
    with pytest.raises(NotStarted, match="no such policy"), started("bad", command, 1, tmp_path):
        pass


class _Bench(bench.Bench):
    """A bench that only has engines and a load generator."""

    def _starts(self, redis_url: str) -> dict[str, Any]:
        return {}


def test_a_sample_with_a_wrong_answer_fails_the_run(tmp_path: Path) -> None:
    """What goes wrong in a sample becomes a row that is a miss."""
    results = bench.Results()
    with _Bench(tmp_path, set(), results) as running:
        direct = bench.COLUMNS[0]
        port = running.port_of(direct)
        assert port is not None
        good = running.measure(direct, CELL, plan_for(port))
        assert (good.sample.num_requests, results.wrong) == (30, [])
        assert good.spread == pytest.approx(4.0)
        with_cartridges = bench.Column(bench.DIRECT, bench.DIRECT, has_cartridges=True)
        running.measure(with_cartridges, CELL, plan_for(port))
        assert [row.ok for row in results.wrong] == [False]
        assert "0 of 30 with Cartridges" in results.wrong[0].against
        running.measure(direct, CELL, plan_for(1, concurrency=1))
        assert "refused" in results.wrong[1].against


def test_tables_show_cells_by_columns() -> None:
    """Each figure stands below its column; what was not measured is a dash."""
    results = _results(ours=100.0, litellm=400.4)
    rows = bench.judged(results, bench.COLUMNS, [CELL])
    lines = bench.tables(rows, bench.COLUMNS, [CELL]).splitlines()
    names, _, values = lines[3:6]
    found = dict(zip(names.split(" | "), values.split(" | "), strict=True))
    assert (found[bench.OURS], found["litellm |"], found["smg"]) == ("100", "400 |", "–")


def test_a_profile_names_the_dearest_functions() -> None:
    """Self and cumulative shares come from stacks and how often each was seen."""
    stacks = "run (a.py:1);work (b.py:7) 3\nrun (a.py:2) 1\nThread.run (c.py:1) 9\n"
    found = bench.dearest(stacks).splitlines()
    assert found[1].split() == ["75.0%", "75.0%", "work", "(b.py)"]
    assert found[2].split() == ["25.0%", "100.0%", "run", "(a.py)"]
