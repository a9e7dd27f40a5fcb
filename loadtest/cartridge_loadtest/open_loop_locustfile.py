"""A Locust user that sends a plan's requests when they are due, finished or not those before.

Owns the clock of the run, the greenlet of each request and its line. Refuses to hide its own
lateness: times count from when a request was due, and each line says how late it was sent.

`python -m locust -f open_loop_locustfile.py --headless -u 1 --host http://127.0.0.1:8000
--plan plan.jsonl --rows rows.jsonl`; `cartridge-router loadtest` makes the plan and runs this.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import gevent
import msgspec
from gevent.pool import Group
from locust import User, constant, events, task
from locust.runners import LocalRunner

from cartridge_loadtest.open_loop_records import PlannedRequest, RequestRecord, read_lines
from cartridge_loadtest.streamed_chat import StreamedAnswer, ask_streamed, new_session, report
from cartridge_proto import names

LEAD_S = 0.5
"""Until the first request can be due: Locust has time to settle."""
PROGRESS_S = 5.0


class _Candidate(msgspec.Struct):
    replica: str
    terms: dict[str, float]


_explanations = msgspec.json.Decoder(list[_Candidate])


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_arguments(parser: Any) -> None:
    group = parser.add_argument_group("Open loop")
    group.add_argument("--plan", required=True, help="JSON lines: what to send, and when")
    group.add_argument("--rows", required=True, help="file for a JSON line of each request")
    group.add_argument("--model-name", default="smollm2-135m-instruct")
    group.add_argument(
        "--drain-s",
        type=float,
        default=30.0,
        help="how long the last ones may take; what has not ended then has failed",
    )


class OpenLoopUser(User):  # type: ignore[misc]
    """Sends one plan, once; then the run ends."""

    fixed_count = 1
    wait_time = constant(0)

    def on_start(self) -> None:
        """Open connections; refuse to share a plan with other Locust processes."""
        if not isinstance(self.environment.runner, LocalRunner):
            raise RuntimeError("a plan is sent by one Locust process: no --processes")  # noqa: TRY004
        self._options = self.environment.parsed_options
        self._session = new_session()
        if key := os.environ.get(names.ENV_LOADTEST_API_KEY):
            self._session.headers[names.HEADER_AUTHORIZATION] = f"Bearer {key}"
        self._open = dict[int, tuple[PlannedRequest, float]]()
        self._num_done = self._num_failed = 0

    def on_stop(self) -> None:
        """Close connections."""
        self._session.close()

    @task  # type: ignore[untyped-decorator]
    def send_plan(self) -> None:
        """Send everything, wait for what is open, and end the run."""
        plan = read_lines(Path(self._options.plan), PlannedRequest)
        greenlets = Group()
        with Path(self._options.rows).open("wb") as rows:
            start_s = time.perf_counter() + LEAD_S
            telling = gevent.spawn(self._tell, start_s, len(plan))
            for index, planned in enumerate(plan):
                wait_s = start_s + planned.due_s - time.perf_counter()
                if wait_s < -self._options.drain_s:
                    # Hopeless. What is not sent has no line, and that makes the run invalid.
                    break
                # Also when it is late: a greenlet that never waits lets no other one run.
                gevent.sleep(max(0.0, wait_s))
                greenlets.spawn(self._send, index, planned, start_s + planned.due_s, rows)
            greenlets.join(timeout=self._options.drain_s)
            for index, (planned, late_s) in list(self._open.items()):
                self._give_up(index, planned, late_s, start_s, rows)
            greenlets.kill(block=False)
            telling.kill()
        self.environment.runner.quit()

    def _send(self, index: int, planned: PlannedRequest, due_s: float, rows: IO[bytes]) -> None:
        body, headers = request_of(index, planned, self._options.model_name)
        late_s = time.perf_counter() - due_s
        self._open[index] = planned, late_s
        answer = ask_streamed(self._session, self.host, body, since_s=due_s, headers=headers)
        if self._open.pop(index, None) is not None:
            self._note(record_of(index, planned, late_s, answer), rows, answer.num_bytes)

    def _give_up(
        self, index: int, planned: PlannedRequest, late_s: float, start_s: float, rows: IO[bytes]
    ) -> None:
        del self._open[index]
        total_s = time.perf_counter() - start_s - planned.due_s
        error = f"no end {self._options.drain_s:g} s after the last request was due"
        self._note(
            RequestRecord(
                index=index,
                due_s=planned.due_s,
                late_s=late_s,
                cartridges=planned.cartridges,
                session=planned.session,
                error=error,
                total_s=total_s,
            ),
            rows,
        )

    def _note(self, record: RequestRecord, rows: IO[bytes], num_bytes: int = 0) -> None:
        rows.write(msgspec.json.encode(record) + b"\n")
        rows.flush()
        self._num_done += 1
        self._num_failed += record.error is not None
        error = None if record.error is None else RuntimeError(record.error)
        report(self.environment, "total", record.total_s, num_bytes, error)
        if error is None and record.ttft_s is not None:
            report(self.environment, "ttft", record.ttft_s)
            for gap_s in record.itl_s:
                report(self.environment, "itl", gap_s)

    def _tell(self, start_s: float, num_planned: int) -> None:
        """Say how far it is, every few seconds."""
        while True:
            gevent.sleep(PROGRESS_S)
            sys.stdout.write(
                f"{time.perf_counter() - start_s:5.0f} s  {self._num_done} of {num_planned} ended, "
                f"{self._num_failed} failed, {len(self._open)} open\n"
            )
            sys.stdout.flush()


def request_of(
    index: int, planned: PlannedRequest, model: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Body and headers of one request; no two have the same question."""
    words = [f"question-{index}", *["word"] * (planned.num_question_words - 1)]
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": planned.max_answer_tokens,
        "stream": True,
        # An empty list: none, and none is looked for.
        "cartridge_ids": planned.cartridges,
    }
    headers = {names.HEADER_EXPLAIN: "1"}
    if planned.session is not None:
        headers[names.HEADER_SESSION] = planned.session
    return body, headers


def record_of(
    index: int, planned: PlannedRequest, late_s: float, answer: StreamedAnswer
) -> RequestRecord:
    """The line of a request that has ended."""
    timing, headers = answer.timing, answer.headers
    replica = headers.get(names.HEADER_REPLICA)
    failure = answer.error
    return RequestRecord(
        index=index,
        due_s=planned.due_s,
        late_s=late_s,
        cartridges=planned.cartridges,
        session=planned.session,
        status=answer.status,
        error=None if failure is None else f"{type(failure).__name__}: {failure}"[:300],
        ttft_s=None if timing is None else timing.ttft_s,
        itl_s=[] if timing is None else timing.itl_s,
        tpot_s=None if timing is None else timing.tpot_s,
        total_s=answer.total_s,
        replica=replica,
        tier=headers.get(names.HEADER_TIER),
        decision=headers.get(names.HEADER_DECISION),
        terms_s=_terms(headers, replica),
    )


def _terms(headers: Mapping[str, str], replica: str | None) -> dict[str, float]:
    """Cost terms of the replica that was asked; none where the gateway did not tell them."""
    try:
        candidates = _explanations.decode(headers.get(names.HEADER_EXPLANATION, "[]"))
    except msgspec.DecodeError:
        return {}
    return next((each.terms for each in candidates if each.replica == replica), {})
