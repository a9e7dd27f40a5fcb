"""The same by aiohttp's client.

Owns the session and the mapping of its errors. Refuses what `upstream` does not ask for.
"""

import asyncio
import errno
import io
import ssl
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from multidict import CIMultiDict, MultiMapping

from cartridge_router.upstream import (
    METHODS_WITH_BODY,
    BrokeOff,
    ConnectFailed,
    InvalidAnswer,
    OutOfFiles,
    Question,
    UpstreamError,
)

_NOT_ADDED: Final = ("accept", "accept-encoding", "content-type", "user-agent")
"""Headers that the library would make up; an engine sees them only from the client."""
_LARGE_BYTES: Final = 1 << 20
_OUT_OF_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})


@dataclass
class _Leg:
    """One sending; `is_reused` once it went over a connection that others had used."""

    is_reused: bool = False


async def _note_reuse(
    _: aiohttp.ClientSession,
    context: Any,
    __: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.is_reused = True


class AiohttpClient:
    """A session of its own. Make it where an event loop runs.

    Args:
        idle_s: how long a connection may lie idle.
        read_buffer_bytes: of an answer, beyond which a replica waits for whoever reads it.
    """

    def __init__(self, *, idle_s: float, read_buffer_bytes: int) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=read_buffer_bytes,
            trace_configs=[trace],
        )

    async def send(
        self, url: str, question: Question, *, tls: ssl.SSLContext, connect_timeout_s: float
    ) -> "_Answer":
        """As `UpstreamClient.send` says."""
        leg = _Leg()
        try:
            response = await self._session.request(
                question.method,
                url + question.path,
                data=_sendable(question),
                headers=CIMultiDict(question.headers),
                skip_auto_headers=_NOT_ADDED,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=connect_timeout_s, sock_read=None
                ),
                allow_redirects=False,
                ssl=tls,
                trace_request_ctx=leg,
            )
        except aiohttp.ClientError as error:
            raise _mapped(error, leg) from error
        return _Answer(response, leg)

    async def aclose(self) -> None:
        """As `UpstreamClient.aclose` says."""
        await self._session.close()


class _Answer:
    """A response of aiohttp."""

    def __init__(self, response: aiohttp.ClientResponse, leg: _Leg) -> None:
        self._response = response
        self._leg = leg
        self.status = response.status
        self.reason = response.reason or ""
        self.headers: MultiMapping[str] = response.headers

    async def readany(self, wait_s: float | None = None) -> bytes:
        """As `Answer.readany` says."""
        try:
            async with asyncio.timeout(wait_s):
                return await self._response.content.readany()
        except aiohttp.ClientError as error:
            raise _mapped(error, self._leg) from error
        except RuntimeError as error:
            # What the library has no error of its own for: its session was closed.
            raise BrokeOff(repr(error), is_reused=False) from error

    def ready(self) -> tuple[bytes, bool]:
        """As `Answer.ready` says."""
        content = self._response.content
        if content.exception() is not None:
            return b"", False
        return content.read_nowait(), content.is_eof()

    def close(self) -> None:
        """As `Answer.close` says."""
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


def _sendable(question: Question) -> bytes | io.BytesIO | None:
    """A body as the library takes it: it wants large ones as files, to send them piece by piece."""
    body = question.body
    if not body and question.method not in METHODS_WITH_BODY:
        return None
    return io.BytesIO(body) if len(body) > _LARGE_BYTES else body


def _mapped(error: aiohttp.ClientError, leg: _Leg) -> UpstreamError:
    match error:
        case aiohttp.ClientConnectorError(os_error=OSError(errno=number)) if (
            number in _OUT_OF_FILES
        ):
            return OutOfFiles(repr(error))
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            return ConnectFailed(repr(error))
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError():
            return BrokeOff(repr(error), is_reused=leg.is_reused)
    return InvalidAnswer(repr(error))
