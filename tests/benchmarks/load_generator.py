"""Asks one server from a number of connections, each answer checked: the load of `bench-gateway`.

Owns requests, clocks and the verdict on answers. Refuses to know what stands at the other end.
"""

import asyncio
import functools
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import cast

import httptools
import msgspec
import uvloop

from tests.benchmarks.gateway_answers import MODEL, problem_with

NUM_TOPICS = 50
QUESTION_PART = 0.2
"""Of a body, what no other request of its topic has."""
CORPUS_BYTES = 16 << 20
STUCK_S = 60.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One sample: it ends after `num_requests` and `min_s`, or after `max_s`."""

    port: int
    concurrency: int
    size_bytes: int
    is_stream: bool
    num_requests: int
    min_s: float
    max_s: float
    cartridges: tuple[str, ...] = ()
    """Each request names the next one."""
    key: str | None = None
    seed: int = 0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it; times of right answers in seconds, without the first of a connection."""

    num_requests: int
    num_wrong: int
    problems: list[str]
    num_body_bytes: int
    """Sent, without heads."""
    elapsed_s: float
    total_p50_s: float
    total_p99_s: float
    first_p50_s: float
    """To the first byte of the body."""
    first_p99_s: float
    num_reads: float
    """Mean reads that brought a piece of the body."""


def requests_of(plan: Plan) -> list[tuple[bytes, int]]:
    """Requests, and the size of their bodies: the topics' beginnings are shared, questions not."""
    count = max(NUM_TOPICS, min(1000, CORPUS_BYTES // plan.size_bytes))
    return [_request(plan, index) for index in range(count)]


def _request(plan: Plan, index: int) -> tuple[bytes, int]:
    body: dict[str, object] = {"model": MODEL, "messages": "", "max_tokens": 32}
    if plan.is_stream:
        body["stream"] = True
    if plan.cartridges:
        body["cartridge_ids"] = [plan.cartridges[index % len(plan.cartridges)]]
    num_left = plan.size_bytes - len(json.dumps(body)) - len('[{"role": "user", "content": ""}]')
    # Radix trees of peers find no question twice.
    question = f" Question {plan.seed}.{index}: {_words('question', plan.size_bytes)}"
    question = question[: int(num_left * QUESTION_PART)]
    content = _words(f"topic {index % NUM_TOPICS}", num_left - len(question)) + question
    body["messages"] = [{"role": "user", "content": content}]
    data = json.dumps(body).encode()
    login = f"authorization: Bearer {plan.key}\r\n" if plan.key else ""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{plan.port}\r\n{login}"
        "accept: application/json\r\nuser-agent: OpenAI/Python 3.51.0\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data, len(data)


@functools.lru_cache(maxsize=1000)
def _words(seed: str, size: int) -> str:
    """Text of this many characters, always the same for a seed."""
    chosen = random.Random(seed)
    made = "".join(
        f"{chosen.choice(_SYLLABLES)}{chosen.choice(_SYLLABLES)} "
        for _ in range(min(size // 4 + 1, 600))
    )
    return (f"{seed}: " + made * (size // len(made) + 1))[:size]


_SYLLABLES = ["ba", "der", "kin", "lo", "mar", "net", "os", "pru", "quay", "ri", "sel", "tor"]


class _Times:
    """Of right answers; `firsts` to the first byte of a body."""

    def __init__(self) -> None:
        self.totals, self.firsts, self.reads = list[float](), list[float](), list[int]()


class _Run:
    """What the connections of one sample share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.fresh, self.settled = _Times(), _Times()
        self.problems = Counter[str]()
        self.num_body_bytes = 0
        self.done = asyncio.Event()
        self._requests = itertools.cycle(requests_of(plan))
        self._num_sent = 0
        self.num_open = plan.concurrency
        """Connections that have something to do."""
        self.started_s = time.perf_counter()

    def next_request(self) -> bytes | None:
        """What to send, or `None` when it is enough."""
        elapsed_s = time.perf_counter() - self.started_s
        is_enough = self._num_sent >= self.plan.num_requests and elapsed_s >= self.plan.min_s
        if is_enough or elapsed_s >= self.plan.max_s:
            return None
        self._num_sent += 1
        request, size_bytes = next(self._requests)
        self.num_body_bytes += size_bytes
        return request

    def leave(self) -> None:
        """A connection has nothing more to do."""
        self.num_open -= 1
        if not self.num_open:
            self.done.set()


class _Connection(asyncio.Protocol):
    def __init__(self, run: _Run) -> None:
        self._run = run
        self._times = run.fresh
        self._is_waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send_next()

    def _send_next(self) -> None:
        request = self._run.next_request()
        if request is None:
            self._transport.close()
            self._run.leave()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._pieces, self._num_reads, self._first_s = list[bytes](), 0, 0.0
        self._is_waiting = True
        self._sent_s = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        num_pieces = len(self._pieces)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"no HTTP: {error!r}")
            return
        # The last byte of an answer has had the next request sent.
        if len(self._pieces) > num_pieces:
            self._num_reads += 1

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_waiting:
            self._end(f"connection lost: {exc!r}")

    def _end(self, problem: str) -> None:
        """Give this connection up."""
        self._is_waiting = False
        self._run.problems[problem] += 1
        self._transport.abort()
        self._run.leave()

    # --- what the parser finds -------------------------------------------------------------------
    def on_body(self, body: bytes) -> None:
        if not self._pieces:
            self._first_s = time.perf_counter()
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        ended_s = time.perf_counter()
        self._is_waiting = False
        run, status = self._run, self._parser.get_status_code()
        problem = problem_with(status, b"".join(self._pieces), is_stream=run.plan.is_stream)
        if problem is not None:
            run.problems[problem] += 1
        else:
            self._times.totals.append(ended_s - self._sent_s)
            self._times.firsts.append(self._first_s - self._sent_s)
            self._times.reads.append(self._num_reads + 1)
            # The first answer on a connection has waited for the connection to be accepted.
            self._times = run.settled
        if not self._parser.should_keep_alive():
            self._end("the connection is closed after an answer")
            return
        # Not from within the parser, which a new one replaces.
        asyncio.get_running_loop().call_soon(self._send_next)


async def sample(plan: Plan, stuck_s: float = STUCK_S) -> Sample:
    """Ask until the plan is fulfilled, or an answer is `stuck_s` late."""
    run = _Run(plan)
    loop = asyncio.get_running_loop()
    run.started_s = time.perf_counter()
    for _ in range(plan.concurrency):
        try:
            await loop.create_connection(lambda: _Connection(run), "127.0.0.1", plan.port)
        except OSError as error:
            run.problems[f"no connection: {error!r}"] += 1
            run.leave()
    try:
        async with asyncio.timeout(plan.max_s + stuck_s):
            await run.done.wait()
    except TimeoutError:
        run.problems["an answer does not come"] += run.num_open
    num_wrong = run.problems.total()
    times = run.settled if run.settled.totals else run.fresh
    return Sample(
        num_requests=len(run.fresh.totals) + len(run.settled.totals) + num_wrong,
        num_wrong=num_wrong,
        problems=[f"{count} times: {text}" for text, count in run.problems.most_common(3)],
        num_body_bytes=run.num_body_bytes,
        elapsed_s=time.perf_counter() - run.started_s,
        total_p50_s=_percentile(times.totals, 50),
        total_p99_s=_percentile(times.totals, 99),
        first_p50_s=_percentile(times.firsts, 50),
        first_p99_s=_percentile(times.firsts, 99),
        num_reads=statistics.fmean(times.reads) if times.reads else 0.0,
    )


def _percentile(values: Sequence[float], percent: int) -> float:
    if not values:
        return 0.0
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def main() -> None:
    """A process of its own: a plan a line on stdin, a sample a line on stdout."""
    for line in sys.stdin:
        found = uvloop.run(sample(msgspec.json.decode(line, type=Plan)))
        print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
