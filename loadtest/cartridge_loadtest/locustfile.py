"""A Locust user that streams chat answers and reports TTFT, ITL and total time as rows.

Owns the request it sends and what counts as a failure. Refuses non-streamed answers, and counts the
`ttft` and `itl` of complete streams only: a failed one is a failure of `total`. It sends the next
request when the last one ended; `open_loop_locustfile` sends when requests are due.

`python -m locust -f locustfile.py --headless -u 8 -t 60s --host http://127.0.0.1:8000
--cartridges handbook@3,rules@1+prices@1`
"""

import itertools
import time
from typing import Any

from locust import User, constant, events, task

from cartridge_loadtest.streamed_chat import ask_streamed, new_session, report


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
        self._session = new_session()

    def on_stop(self) -> None:
        """Close its connections."""
        self._session.close()

    @task  # type: ignore[untyped-decorator]
    def ask(self) -> None:
        """Send one streamed chat request and report its times."""
        body = request_body(self.environment.parsed_options, next(_turns))
        answer = ask_streamed(self._session, self.host, body, since_s=time.perf_counter())
        timing = answer.timing
        if timing is None:
            report(self.environment, "total", answer.total_s, answer.num_bytes, answer.error)
            return
        if timing.ttft_s is not None:
            report(self.environment, "ttft", timing.ttft_s)
        for gap_s in timing.itl_s:
            report(self.environment, "itl", gap_s)
        report(self.environment, "total", timing.total_s, answer.num_bytes)


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
