"""One streamed chat request over a blocking connection, timed chunk by chunk.

Owns what counts as a failure of a request. Refuses to decide what is asked, and when: Locust users
do (`locustfile`, `open_loop_locustfile`), which run this in greenlets.
"""

import http.client
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import requests
import urllib3
from requests.adapters import HTTPAdapter

from cartridge_loadtest.stream_timing import StreamFailed, StreamTimer, StreamTiming

CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 120.0
READ_BYTES: Final = 65_536
MAX_CONNECTIONS: Final = 4096
"""Kept open between requests."""
FAILURES: Final = (
    StreamFailed,
    requests.exceptions.RequestException,
    urllib3.exceptions.HTTPError,  # from `raw`, which requests does not map
    http.client.HTTPException,
    OSError,
)


@dataclass(frozen=True, kw_only=True)
class StreamedAnswer:
    """What came of one request; `error` is `None` exactly if `timing` is not."""

    status: int | None
    """`None`: no answer began."""
    headers: Mapping[str, str] = field(default_factory=dict)
    timing: StreamTiming | None = None
    total_s: float
    """Until the end, or until it failed."""
    num_bytes: int
    error: Exception | None = None


def new_session() -> requests.Session:
    """Connections that many greenlets share, to one host; proxies and netrc are not looked for."""
    session = requests.Session()
    session.trust_env = False
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=MAX_CONNECTIONS))
    return session


def report(
    environment: Any,
    name: str,
    seconds: float,
    num_bytes: int = 0,
    error: Exception | None = None,
) -> None:
    """Tell Locust's environment of one time; with an error it counts as a failure."""
    environment.events.request.fire(
        request_type="SSE",
        name=name,
        response_time=seconds * 1000,
        response_length=num_bytes,
        exception=error,
        context={},
    )


def ask_streamed(
    session: requests.Session,
    host: str,
    body: Mapping[str, Any],
    *,
    since_s: float,
    headers: Mapping[str, str] | None = None,
) -> StreamedAnswer:
    """Send a chat request and read its stream; a failure is an answer too.

    Args:
        session: connections to reuse.
        host: base URL.
        body: JSON, with `stream` set.
        since_s: the `time.perf_counter()` from which all times count.
        headers: beside those of the session.
    """
    timer = StreamTimer(since_s)
    status: int | None = None
    told: Mapping[str, str] = {}
    num_bytes = 0
    timing: StreamTiming | None = None
    failure: Exception | None = None
    try:
        with session.post(
            f"{host}/v1/chat/completions",
            json=body,
            headers=headers,
            stream=True,
            timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S),
        ) as response:
            status, told = response.status_code, response.headers
            if status != requests.codes.ok:
                raise StreamFailed(f"HTTP {status}: {response.text[:200]}")
            # `read1` returns what has come; `iter_content` would wait for a whole buffer.
            while data := response.raw.read1(READ_BYTES):
                num_bytes += len(data)
                timer.feed(data, time.perf_counter())
        timing = timer.finish()
    except FAILURES as error:
        failure = error
    return StreamedAnswer(
        status=status,
        headers=told,
        timing=timing,
        total_s=time.perf_counter() - since_s if timing is None else timing.total_s,
        num_bytes=num_bytes,
        error=failure,
    )
