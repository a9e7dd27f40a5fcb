"""Several processes on one port: they start, serve, are counted and end together."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cartridge_proto.residency import ReplicaId
from cartridge_router.cli import run
from cartridge_router.demo.stack import free_port
from cartridge_router.roster import OperatorChanges
from cartridge_router.siblings import Siblings, Worker
from cartridge_router.telemetry import Metrics, merged
from tests.router.gateway_client import CHAT, Gateway, until_true
from tests.router.gateway_process import GatewayProcess, running_process
from tests.router.keys_files import replace_file
from tests.router.stub_engine import StartStub, answer_ok, never_answer

BODY = json.dumps({"model": "sample", "messages": []}).encode()
NUM_WORKERS = 3


def children_of(pid: int) -> list[int]:
    """Processes that a process has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@asynccontextmanager
async def running_workers(
    session: aiohttp.ClientSession, *replicas: str, **environment: str
) -> AsyncIterator[GatewayProcess]:
    """A gateway of three processes."""
    settings = {
        "CARTRIDGE_ROUTER_WORKERS": str(NUM_WORKERS),
        "CARTRIDGE_ROUTER_FLEET__PROBE_INTERVAL_S": "0.05",
        "CARTRIDGE_ROUTER_DRAIN__SETTLE_S": "0",
        **environment,
    }
    async with running_process(session, *replicas, environment=settings) as process:
        yield process


async def ask_afresh(url: str, path: str = CHAT) -> int:
    """A request by a connection of its own, which the kernel gives to any worker."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, data=BODY, headers={"Content-Type": "application/json"}) as reply,
    ):
        await reply.read()
        return reply.status


async def test_all_workers_serve_one_port_and_are_counted_together(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Whichever worker is asked, its metrics are those of all."""
    stub = await start_stub(answer_ok)
    async with running_workers(session, stub.url) as process:
        pids = await asyncio.to_thread(children_of, process.pid)
        assert len(pids) == NUM_WORKERS
        statuses = await asyncio.gather(*(ask_afresh(process.gateway.url) for _ in range(60)))
        assert set(statuses) == {200}
        for _ in range(2 * NUM_WORKERS):
            async with aiohttp.ClientSession() as fresh:
                gateway = Gateway(fresh, process.gateway.url)
                assert await gateway.metric("cartridge_router_requests_total") == 60
                assert await gateway.metric("cartridge_router_replica_healthy") == 1
        process.send(signal.SIGTERM)
        assert await process.ended() == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # noqa: ASYNC240


async def test_a_worker_that_dies_is_started_again(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """The others serve meanwhile; what operators had changed holds for the new one too."""
    stubs = [await start_stub(answer_ok) for _ in range(2)]
    port = free_port()
    async with running_workers(
        session, f"r0={stubs[0].url}", CARTRIDGE_ROUTER_ADMIN__PORT=str(port)
    ) as process:
        operators = Gateway(session, f"http://127.0.0.1:{port}")
        reply = await operators.post("/admin/replicas", {"name": "r1", "url": stubs[1].url})
        assert reply.status == 201
        async with session.delete(operators.url + "/admin/replicas/r0") as answer:
            assert answer.status == 200
        before = await asyncio.to_thread(children_of, process.pid)
        # Not the first, which operators talk to.
        os.kill(before[-1], signal.SIGKILL)

        async def is_whole_again() -> bool:
            now = await asyncio.to_thread(children_of, process.pid)
            return len(now) == NUM_WORKERS and now != before

        await until_true(is_whole_again, "a new worker is there")
        statuses = [await ask_afresh(process.gateway.url) for _ in range(30)]
        assert set(statuses) == {200}

        async def is_served_by_all() -> bool:
            # A worker that has just begun to listen may not have been heard.
            text = (await process.gateway.get("/metrics")).body.decode()
            return re.search(r'replica_healthy{replica="r1"} 1\.0', text) is not None

        await until_true(is_served_by_all, "all know the replica as healthy")
        num_before = len(stubs[1].requests)
        for _ in range(30):
            assert await ask_afresh(process.gateway.url) == 200
        assert len(stubs[1].requests) == num_before + 30
        assert stubs[0].requests == []
        process.send(signal.SIGTERM)
        assert await process.ended() == 0


async def test_workers_end_with_whoever_started_them(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """Killed without a word, it leaves no process behind that holds the port."""
    stub = await start_stub(answer_ok)
    async with running_workers(session, stub.url) as process:
        pids = await asyncio.to_thread(children_of, process.pid)
        process.send(signal.SIGKILL)
        assert await process.ended() == -signal.SIGKILL

        async def are_gone() -> bool:
            return not any(Path(f"/proc/{pid}").exists() for pid in pids)  # noqa: ASYNC240

        await until_true(are_gone, "the workers are gone")


async def test_requests_finish_before_the_workers_end(
    session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """SIGTERM drains all of them; the second one cuts what does not end."""
    stub = await start_stub(never_answer)
    async with running_workers(session, stub.url) as process:
        asking = asyncio.create_task(process.gateway.post_bytes(CHAT, BODY))
        await process.gateway.has_metric("cartridge_router_in_flight", 1)
        process.send(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(asking)
        process.send(signal.SIGTERM)
        assert (await asking).error["code"] == "gateway_ending"
        assert await process.ended() == 0


async def until_over(seconds: float) -> None:
    """Let a while pass in which nothing may happen."""
    await asyncio.sleep(seconds)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_to_the_whole_group_cuts_nobody_off(
    number: signal.Signals, session: aiohttp.ClientSession, start_stub: StartStub
) -> None:
    """A terminal and systemd tell the workers too: what runs is finished all the same."""
    go_on = asyncio.Event()

    async def wait_and_answer(_: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return web.json_response({})

    stub = await start_stub(wait_and_answer)
    async with running_workers(session, stub.url) as process:
        asking = asyncio.create_task(process.gateway.post_bytes(CHAT, BODY))
        await process.gateway.has_metric("cartridge_router_in_flight", 1)
        pids = await asyncio.to_thread(children_of, process.pid)
        for pid in (*pids, process.pid, *pids):
            os.kill(pid, number)
        # Long enough for a cut to be seen.
        await until_over(0.5)
        go_on.set()
        assert (await asking).status == 200
        assert await process.ended() == 0


async def test_a_bad_file_does_not_end_workers_that_serve(
    session: aiohttp.ClientSession, start_stub: StartStub, tmp_path: Path
) -> None:
    """One that is started again cannot read it; the others go on, and so does that one later."""
    stub = await start_stub(answer_ok)
    file = tmp_path / "router.yaml"
    good = yaml.safe_dump({"replicas": [stub.url], "fleet": {"probe_interval_s": 0.05}})
    replace_file(file, good)
    async with running_workers(session, CARTRIDGE_ROUTER_CONFIG=str(file)) as process:
        assert await ask_afresh(process.gateway.url) == 200
        pids = await asyncio.to_thread(children_of, process.pid)
        replace_file(file, "nonsense: 1")
        os.kill(pids[-1], signal.SIGKILL)

        async def has_been_started_again() -> bool:
            return len(await asyncio.to_thread(children_of, process.pid)) == NUM_WORKERS

        await until_true(has_been_started_again, "another is tried")
        process.send(signal.SIGHUP)

        async def is_gone_again() -> bool:
            return len(await asyncio.to_thread(children_of, process.pid)) < NUM_WORKERS

        await until_true(is_gone_again, "it cannot read the file")
        assert {await ask_afresh(process.gateway.url) for _ in range(10)} == {200}
        replace_file(file, good)

        async def is_whole_again() -> bool:
            text = (await process.gateway.get("/metrics")).body.decode()
            now = await asyncio.to_thread(children_of, process.pid)
            return len(now) == NUM_WORKERS and "replica_healthy" in text

        await until_true(is_whole_again, "all serve again")
        process.send(signal.SIGTERM)
        assert await process.ended() == 0


async def test_what_cannot_work_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    """The workers' own reason, and its status; no restart without end."""
    file = tmp_path / "none.pem"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cartridge_router", "serve", "--port", "0", "--workers", "2"),
        env={**os.environ, "CARTRIDGE_ROUTER_TLS__CERT_FILE": str(file)},
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, told = await process.communicate()
    assert process.returncode == 2
    assert b"error: tls.cert_file" in told


def test_a_port_that_is_taken_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Before any worker is started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["serve", "--port", str(port), "--workers", "2"]) == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def sample(text: bytes, name: str, **labels: str) -> list[float]:
    """Values of the samples with this name and these labels."""
    return [
        found.value
        for family in text_string_to_metric_families(text.decode())
        for found in family.samples
        if found.name == name and labels.items() <= found.labels.items()
    ]


def test_metrics_of_workers_are_joined_by_what_they_mean() -> None:
    """Requests add up, what all see alike does not, and health is the worst of all."""
    workers = [Metrics() for _ in range(3)]
    for index, metrics in enumerate(workers):
        metrics.requests.labels("other", "200", "none").inc(index + 1)
        metrics.overhead_seconds.observe(0.001)
        metrics.receipts.labels("served").inc(5 - index)
        metrics._in_flight.labels("r0").set(index)
        metrics._healthy.labels("r0").set(int(index != 1))
        metrics._age.set(index - 1)
        metrics._queued.labels("sample").set(2)
        for mode in ("exact", "fallback"):
            metrics._mode.labels(mode).set(int((mode == "exact") is (index != 0)))
    workers[2].ejections.labels("r7").inc()
    text = merged([generate_latest(metrics.registry) for metrics in workers])
    assert sample(text, "cartridge_router_requests_total", status="200") == [6]
    assert sample(text, "cartridge_router_overhead_seconds_count") == [3]
    assert sample(text, "cartridge_router_overhead_seconds_bucket", le="0.0025") == [3]
    assert sample(text, "cartridge_router_receipts_total", status="served") == [5]
    assert sample(text, "cartridge_router_in_flight", replica="r0") == [3]
    assert sample(text, "cartridge_router_queued", model="sample") == [6]
    assert sample(text, "cartridge_router_replica_healthy", replica="r0") == [0]
    # One has never read the map; two have, and are not of one mind.
    assert sample(text, "cartridge_router_residency_age_seconds") == [-1]
    assert sample(text, "cartridge_router_residency_mode", mode="exact") == [0]
    assert sample(text, "cartridge_router_residency_mode", mode="fallback") == [1]
    assert sample(text, "cartridge_router_ejections_total", replica="r7") == [1]
    one = generate_latest(workers[0].registry)
    assert sorted(merged([one]).splitlines()) == sorted(one.splitlines())


async def test_a_worker_that_is_away_is_left_out(tmp_path: Path) -> None:
    """What the others say is told; changes reach who is there, and who comes later asks."""

    class Side:
        """One worker's half."""

        def __init__(self, index: int) -> None:
            self.index = index
            self.changes = OperatorChanges(added={}, taken_out=[])
            self.siblings = Siblings(
                Worker(index=index, count=3, port=0, folder=str(tmp_path)),
                render=lambda: b"%d" % index,
                changes=lambda: self.changes,
                follow=self.follow,
                find_response=self.find_response,
            )

        def find_response(self, response_id: str, tenant: str) -> ReplicaId | None:
            is_its_own = (response_id, tenant, self.index) == ("resp_1", "acme", 1)
            return ReplicaId("r1") if is_its_own else None

        def follow(self, changes: OperatorChanges) -> None:
            self.changes = changes

    first, second, third = (Side(index) for index in range(3))
    async with first.siblings.listening(), second.siblings.listening():
        assert await first.siblings.metrics() == [b"0", b"1"]
        first.changes = OperatorChanges(
            added={ReplicaId("r1"): "http://127.0.0.1:9"}, taken_out=[ReplicaId("r0")]
        )
        await first.siblings.tell_changes()
        assert second.changes == first.changes
        await third.siblings.catch_up()
        assert third.changes == first.changes
        assert await first.siblings.find_response("resp_1", "acme") == (ReplicaId("r1"), False)
        assert await first.siblings.find_response("resp_1", "beta") == (None, False)
        async with third.siblings.listening():
            assert await first.siblings.find_response("resp_2", "acme") == (None, True)
    await second.siblings.catch_up()
    assert second.changes == first.changes
