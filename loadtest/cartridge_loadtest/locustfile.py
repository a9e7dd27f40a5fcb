"""A Locust user that streams chat answers and reports TTFT, ITL and total time as rows.

Owns the request it sends and what counts as a failure. Refuses non-streamed answers, and counts the
`ttft` and `itl` of complete streams only: a failed one is a failure of `total`.

`python -m locust -f locustfile.py --headless -u 8 -t 60s --host http://127.0.0.1:8000
--cartridges handbook@3,rules@1+prices@1`
"""

import http.client
import itertools
import time
from typing import Any

import requests
import urllib3
from locust import User, constant, events, task

from cartridge_loadtest.stream_timing import StreamFailed, StreamTimer

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 120.0
READ_BYTES = 65_536
FAILURES = (
    StreamFailed,
    requests.exceptions.RequestException,
    urllib3.exceptions.HTTPError,  # from `raw`, which requests does not map
    http.client.HTTPException,
    OSError,
)


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_arguments(parser: Any) -> None:
    group = parser.add_argument_group("Cartridges")
    group.add_argument(
        "--cartridges",
        env_var="CARTRIDGE_LOADTEST_CARTRIDGES",
        default="",
        help="comma-separated; each request takes the next one; '+' joins an ordered set",
    )
    group.add_argument(
        "--model-name", env_var="CARTRIDGE_LOADTEST_MODEL", default="smollm2-135m-instruct"
    )
    group.add_argument(
        "--question", env_var="CARTRIDGE_LOADTEST_QUESTION", default="What is this about?"
    )
    group.add_argument(
        "--max-answer-tokens", env_var="CARTRIDGE_LOADTEST_MAX_TOKENS", type=int, default=32
    )


_turns = itertools.count()


class ChatUser(User):  # type: ignore[misc]
    """Asks again and again, one stream at a time."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Open a session of this user's own, so that connections are reused."""
        self._session = requests.Session()

    def on_stop(self) -> None:
        """Close its connections."""
        self._session.close()

    @task  # type: ignore[untyped-decorator]
    def ask(self) -> None:
        """Send one streamed chat request and report its times."""
        body = request_body(self.environment.parsed_options, next(_turns))
        sent_s = time.perf_counter()
        timer = StreamTimer(sent_s)
        num_bytes = 0
        try:
            with self._session.post(
                f"{self.host}/v1/chat/completions",
                json=body,
                stream=True,
                timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
            ) as response:
                if response.status_code != requests.codes.ok:
                    raise StreamFailed(f"HTTP {response.status_code}: {response.text[:200]}")
                # `read1` returns what has come; `iter_content` would wait for a whole buffer.
                while data := response.raw.read1(READ_BYTES):
                    num_bytes += len(data)
                    timer.feed(data, time.perf_counter())
            timing = timer.finish()
        except FAILURES as error:
            self._report("total", time.perf_counter() - sent_s, num_bytes, error)
            return
        if timing.ttft_s is not None:
            self._report("ttft", timing.ttft_s)
        for gap_s in timing.itl_s:
            self._report("itl", gap_s)
        self._report("total", timing.total_s, num_bytes)

    def _report(
        self, name: str, seconds: float, num_bytes: int = 0, error: Exception | None = None
    ) -> None:
        self.environment.events.request.fire(
            request_type="SSE",
            name=name,
            response_time=seconds * 1000,
            response_length=num_bytes,
            exception=error,
            context={},
        )


def request_body(options: Any, turn: int) -> dict[str, Any]:
    """The body of the request number `turn`; without `--cartridges` it names none."""
    body: dict[str, Any] = {
        "model": options.model_name,
        "messages": [{"role": "user", "content": options.question}],
        "max_tokens": options.max_answer_tokens,
        "stream": True,
    }
    choices = [text.strip() for text in options.cartridges.split(",") if text.strip()]
    if choices:
        body["cartridge_ids"] = choices[turn % len(choices)].split("+")
    return body
