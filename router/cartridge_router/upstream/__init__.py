"""How requests are sent to replicas and answers come back: one interface, two clients.

Owns what the gateway needs of an HTTP client and the errors that it tells apart. Refuses retries,
replicas and headers of its own: what is sent is what it was given.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from multidict import MultiMapping

METHODS_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
"""Whose questions say how long their body is, also where it is empty."""


class UpstreamError(Exception):
    """A replica did not answer, or not to the end."""


class ConnectFailed(UpstreamError):
    """No connection came about: nothing was sent."""


class OutOfFiles(UpstreamError):
    """This process has no file descriptor left: it says nothing about the replica."""


class BrokeOff(UpstreamError):
    """The connection ended before the answer did.

    `is_reused`: it had carried an answer before, and none of this one had come: it may have been
    closed while it lay idle.
    """

    def __init__(self, text: str, *, is_reused: bool) -> None:
        super().__init__(text)
        self.is_reused = is_reused


class InvalidAnswer(UpstreamError):
    """What came is no HTTP answer."""


@dataclass(frozen=True)
class Question:
    """One HTTP request. `path` with its query, ASCII; `headers` as they go out, each once or more.

    `Host` and the length of the body are the client's to add.
    """

    method: str
    path: str
    headers: MultiMapping[str]
    body: bytes


class Answer(Protocol):
    """One HTTP answer whose head has come; `close` it whatever happens."""

    @property
    def status(self) -> int:
        """Three digits, not below 200."""
        ...

    @property
    def reason(self) -> str:
        """Text behind the status."""
        ...

    @property
    def headers(self) -> MultiMapping[str]:
        """As they came, repeated ones repeatedly."""
        ...

    async def readany(self, wait_s: float | None = None) -> bytes:
        """What has come of the body, at least a byte; empty at its end.

        Raises:
            BrokeOff, InvalidAnswer: before its end.
            TimeoutError: nothing came in so many seconds; later bytes can be read all the same.
        """
        ...

    def ready(self) -> tuple[bytes, bool]:
        """What has come of the body and was not read, without waiting, and whether it ends there.

        It then counts as read.
        """
        ...

    def close(self) -> None:
        """Let go: the connection is used again after a whole answer, and ended otherwise."""
        ...


class UpstreamClient(Protocol):
    """Sends questions over pooled connections. For use from one event loop."""

    async def send(
        self, url: str, question: Question, *, tls: ssl.SSLContext, connect_timeout_s: float
    ) -> Answer:
        """Send to `http(s)://host:port` and wait for the head of the answer.

        Cancelling it ends the connection at once.

        Raises:
            UpstreamError: nothing came.
        """
        ...

    async def aclose(self) -> None:
        """End all connections."""
        ...


def content_type(headers: Mapping[str, str]) -> str:
    """The media type in lower case, without parameters; empty without one."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()
