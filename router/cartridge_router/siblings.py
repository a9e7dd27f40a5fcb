"""The other worker processes of one gateway, as one of them sees it.

Owns the socket by which they hear of one another: metrics of all in one text, what operators
changed, where responses are kept. Refuses requests of clients, and to share counts: limits are of
each process.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from aiohttp import web

from cartridge_proto.residency import ReplicaId
from cartridge_router.roster import OperatorChanges

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 2.0
"""For what another worker is asked; it may be busy, and goes unheard then."""
ORDERS: Final = {signal.SIGTERM: b"T", signal.SIGINT: b"I", signal.SIGHUP: b"H"}
"""What the process that starts workers writes to each for a signal that it gets."""
_METRICS: Final = "/metrics"
_CHANGES: Final = "/changes"
_RESPONSES: Final = "/responses"


class Worker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker is told by the process that starts it.

    `folder` is open to this user only; the sockets of all are in it. `port`: where all listen.
    """

    index: int
    count: int
    port: int
    folder: str

    def socket(self, index: int) -> Path:
        """Where a worker answers the others; it is there once that one serves clients."""
        return Path(self.folder) / f"{index}.sock"

    @property
    def serves_operators(self) -> bool:
        """Whether this is the one that operators talk to; it tells the others."""
        return self.index == 0


class _Sought(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stored response that another worker may know of."""

    response_id: str
    tenant: str


class Siblings:
    """Talks to the other workers, which may be away, and answers them.

    Args:
        worker: this one.
        render: the metrics of this one.
        changes: what operators have changed here.
        follow: has the same changed here.
        find_response: which replica keeps a response of a tenant, as far as is known here.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        render: Callable[[], bytes],
        changes: Callable[[], OperatorChanges],
        follow: Callable[[OperatorChanges], None],
        find_response: Callable[[str, str], ReplicaId | None],
    ) -> None:
        self._worker = worker
        self._render = render
        self._changes = changes
        self._follow = follow
        self._find_response = find_response

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Answer the others for as long as the block runs."""
        app = web.Application()
        app.router.add_get(_METRICS, self._answer_metrics)
        app.router.add_get(_CHANGES, self._answer_changes)
        app.router.add_put(_CHANGES, self._take_changes)
        app.router.add_post(_RESPONSES, self._answer_response)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.UnixSite(runner, self._worker.socket(self._worker.index)).start()
            yield
        finally:
            await runner.cleanup()

    async def metrics(self) -> list[bytes]:
        """The metrics of all that answer, this one first."""
        return [self._render(), *await self._ask_all("GET", _METRICS)]

    async def catch_up(self) -> None:
        """Change what operators had changed before this one was started again."""
        for answer in await self._ask_all("GET", _CHANGES):
            self._follow(msgspec.json.decode(answer, type=OperatorChanges))
            return

    async def tell_changes(self) -> None:
        """Have the others change what operators have changed here."""
        await self._ask_all("PUT", _CHANGES, msgspec.json.encode(self._changes()))

    async def find_response(self, response_id: str, tenant: str) -> tuple[ReplicaId | None, bool]:
        """The replica that keeps a response of a tenant, and whether all others could be asked."""
        sought = msgspec.json.encode(_Sought(response_id=response_id, tenant=tenant))
        answers = await self._ask_all("POST", _RESPONSES, sought)
        found = (msgspec.json.decode(answer, type=ReplicaId | None) for answer in answers)
        replica = next((replica for replica in found if replica is not None), None)
        return replica, len(answers) == self._worker.count - 1

    async def _ask_all(self, method: str, path: str, data: bytes | None = None) -> list[bytes]:
        others = [index for index in range(self._worker.count) if index != self._worker.index]
        answers = await asyncio.gather(*(self._ask(each, method, path, data) for each in others))
        return [answer for answer in answers if answer is not None]

    async def _ask(self, index: int, method: str, path: str, data: bytes | None) -> bytes | None:
        connector = aiohttp.UnixConnector(str(self._worker.socket(index)))
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(method, f"http://worker{path}", data=data) as answer,
            ):
                answer.raise_for_status()
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            # One that has not begun to listen, or is started again, asks by itself later.
            is_away = isinstance(error, aiohttp.ClientConnectorError)
            logger.log(
                logging.DEBUG if is_away else logging.WARNING,
                "worker %d did not answer %s %s: %r",
                *(index, method, path, error),
            )
            return None

    async def _answer_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._render())

    async def _answer_changes(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._changes()))

    async def _answer_response(self, request: web.Request) -> web.Response:
        sought = msgspec.json.decode(await request.read(), type=_Sought)
        replica = self._find_response(sought.response_id, sought.tenant)
        return web.Response(body=msgspec.json.encode(replica))

    async def _take_changes(self, request: web.Request) -> web.Response:
        self._follow(msgspec.json.decode(await request.read(), type=OperatorChanges))
        return web.Response()
