"""Faults that a test switches on in a simulated replica, and the answers they give.

Owns what can go wrong before an answer begins. Refuses to break a stream: that needs the transport
(see `simulated_replica`).
"""

import asyncio
import math

import msgspec
from aiohttp import web

from cartridge_loadtest.openai_bodies import error_body


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong with every generating request from now on; the default is nothing."""

    status: int | None = None
    """Answer this HTTP status and an error body."""
    retry_after_s: float | None = None
    """`Retry-After` beside `status`, rounded up to whole seconds."""
    hang: bool = False
    """Accept the request and never answer."""
    die_after_chunks: int | None = None
    """Abort the connection after this many content chunks; at once if not streamed."""
    delay_s: float = 0.0
    """Wait this long before anything else."""
    unhealthy: bool = False
    """Answer 503 on `/health`, as vLLM does when its engine process is dead."""


async def answer_with_fault(faults: Faults) -> web.Response | None:
    """Wait or answer as the faults say; `None` when the request goes on as usual."""
    await asyncio.sleep(faults.delay_s)
    if faults.hang:
        await asyncio.Event().wait()
    if faults.status is None:
        return None
    headers = {}
    if faults.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(faults.retry_after_s))
    kind = "ServiceUnavailableError" if faults.status == 503 else "InternalServerError"
    body = error_body(faults.status, kind, "simulated fault")
    return json_response(body, status=faults.status, headers=headers)


def json_response(
    body: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """A JSON response; structs are encoded by their fields."""
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )
