"""The open-loop Locust user, run once by Locust itself against a stub that stalls and breaks."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cartridge_loadtest.load_run import LOCUSTFILE
from cartridge_loadtest.open_loop_records import (
    PlannedRequest,
    RequestRecord,
    read_lines,
    write_lines,
)
from cartridge_loadtest.run_summary import Run, faults_of_the_generator, measured
from cartridge_proto import names

pytestmark = pytest.mark.services

CONTENT = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
LATE, HALF, REFUSED, HANGING, TOLD = range(5)
"""Places in the plan of what does not simply wait for all others."""
PLAN = [
    # It was due before the run: nobody can send it in time.
    PlannedRequest(due_s=-4.0, cartridges=["rules@1"]),
    PlannedRequest(due_s=0.0, cartridges=["cut@1"], num_question_words=3),
    PlannedRequest(due_s=0.01, cartridges=["refused@1"]),
    PlannedRequest(due_s=0.02, cartridges=["hanging@1"]),
    PlannedRequest(due_s=0.03, cartridges=["rules@1", "prices@2"], session="talk-1"),
    *(PlannedRequest(due_s=0.05 * index) for index in range(1, 16)),
]
EXPLANATION = json.dumps(
    [
        {"replica": "b", "total_s": 1, "terms": {"load": 1.0}, "tiers": ["nvme"]},
        {"replica": "a", "total_s": 3, "terms": {"load": 0.5, "prefill": 2.5}, "tiers": ["hbm"]},
    ]
)


class StallingStub:
    """Answers nobody before everybody has asked; some it answers badly."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self._all_came = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Stream two chunks, once all requests of the plan are here."""
        body = await request.json()
        self.requests.append((dict(request.headers), body))
        if len(self.requests) == len(PLAN):
            self._all_came.set()
        if "refused@1" in body["cartridge_ids"]:
            return web.Response(status=429, text="too many")
        await self._all_came.wait()
        told = {
            names.HEADER_REPLICA: "a",
            names.HEADER_TIER: "hbm",
            names.HEADER_DECISION: "residency",
            names.HEADER_EXPLANATION: EXPLANATION,
        }
        response = web.StreamResponse(headers=told)
        await response.prepare(request)
        await response.write(CONTENT)
        if "cut@1" in body["cartridge_ids"]:
            assert request.transport is not None
            request.transport.abort()
            return response
        if "hanging@1" in body["cartridge_ids"]:
            await asyncio.Event().wait()
        await response.write(CONTENT + DONE)
        return response


@dataclass(frozen=True)
class Sent:
    """What came of the run."""

    records: dict[int, RequestRecord]
    requests: list[tuple[dict[str, str], dict[str, Any]]]
    printed: str


@contextlib.asynccontextmanager
async def listening(stub: StallingStub) -> AsyncIterator[str]:
    """URL of the stub."""
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", stub.answer)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def send_plan(folder: Path) -> Sent:
    """Run Locust to its end."""
    stub = StallingStub()
    write_lines(folder / "plan.jsonl", PLAN)
    async with listening(stub) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "-u", "1"),
            *("--host", url, "--plan", str(folder / "plan.jsonl")),
            *("--rows", str(folder / "rows.jsonl"), "--model-name", "sample", "--drain-s", "5"),
            cwd=folder,
            env={**os.environ, names.ENV_LOADTEST_API_KEY: "ours"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(60):
            printed, _ = await process.communicate()
    records = read_lines(folder / "rows.jsonl", RequestRecord)
    assert len({each.index for each in records}) == len(records)
    return Sent({each.index: each for each in records}, stub.requests, printed.decode())


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Sent:
    """One run of the plan, for all tests of this file."""
    return asyncio.run(send_plan(tmp_path_factory.mktemp("open-loop")))


def test_requests_are_sent_though_none_before_them_ended(sent: Sent) -> None:
    """The stub answers nobody before the last request is there, and all are answered."""
    assert len(sent.requests) == len(PLAN)
    assert sorted(sent.records) == list(range(len(PLAN)))
    plain = [sent.records[index] for index in range(TOLD + 1, len(PLAN))]
    assert [each.error for each in plain] == [None] * len(plain)
    assert all(len(each.itl_s) == 1 for each in plain)


def test_time_counts_from_when_a_request_was_due(sent: Sent) -> None:
    """Each waited for the last one at least, as it would for a fleet that hangs so long."""
    last_s = PLAN[-1].due_s
    for index in (TOLD, *range(TOLD + 1, len(PLAN))):
        record = sent.records[index]
        assert record.ttft_s is not None
        assert record.ttft_s >= last_s - PLAN[index].due_s
        assert record.ttft_s >= record.late_s >= 0


def test_what_is_sent_late_says_so_and_makes_the_run_invalid(sent: Sent) -> None:
    """A request that was due long before it could be sent has that in its lateness and its TTFT."""
    late = sent.records[LATE]
    assert late.late_s >= 3.0
    assert late.ttft_s is not None
    assert late.ttft_s >= late.late_s
    run = Run(records=list(sent.records.values()), num_planned=len(PLAN), duration_s=1.0)
    assert any("could not keep up" in fault for fault in faults_of_the_generator(run, 2.0))


@pytest.mark.parametrize(
    ("index", "status", "part"),
    [(HALF, 200, ""), (REFUSED, 429, "HTTP 429: too many"), (HANGING, None, "no end 5 s after")],
)
def test_what_is_no_complete_stream_is_a_failure(
    sent: Sent, index: int, status: int | None, part: str
) -> None:
    """A half answer, an error status and an answer without an end have no times of chunks."""
    record = sent.records[index]
    assert record.error is not None
    assert part in record.error
    assert record.status == status
    assert (record.ttft_s, record.itl_s, record.tpot_s) == (None, [], None)


def test_failures_count_against_the_run(sent: Sent) -> None:
    """Three of twenty failed."""
    run = Run(records=list(sent.records.values()), num_planned=len(PLAN), duration_s=1.0)
    values = measured(run)
    assert values["error_ratio"] == 3 / 20
    assert values["goodput_ratio"] == 17 / 20
    assert values["ttft_p99_s"] is None


def test_a_line_says_what_the_gateway_told(sent: Sent) -> None:
    """Replica, tier, reason, and the cost terms of the replica that was asked, not of the best."""
    record = sent.records[TOLD]
    assert (record.replica, record.tier, record.decision) == ("a", "hbm", "residency")
    assert record.terms_s == {"load": 0.5, "prefill": 2.5}
    assert record.cartridges == ["rules@1", "prices@2"]


def test_what_is_asked_is_what_was_planned(sent: Sent) -> None:
    """Cartridges, length, session, key; a plain request wants none; all questions differ."""
    bodies = {body["messages"][0]["content"].split()[0]: body for _, body in sent.requests}
    assert len(bodies) == len(PLAN)
    for index, planned in enumerate(PLAN):
        body = bodies[f"question-{index}"]
        assert body["cartridge_ids"] == planned.cartridges
        assert len(body["messages"][0]["content"].split()) == planned.num_question_words
        assert body["stream"] is True
    headers = [headers for headers, body in sent.requests if body is bodies[f"question-{TOLD}"]]
    lower = {name.lower(): value for name, value in headers[0].items()}
    assert lower[names.HEADER_SESSION] == "talk-1"
    assert lower[names.HEADER_EXPLAIN] == "1"
    assert lower[names.HEADER_AUTHORIZATION] == "Bearer ours"


def test_nothing_went_wrong_in_the_generator(sent: Sent) -> None:
    """No greenlet died of an exception."""
    assert "Traceback" not in sent.printed
