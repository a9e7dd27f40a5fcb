"""What operators ask of a running gateway, on a listener of its own: how it is, and which replicas.

Owns `/admin/replicas`, `/admin/state`, the page at `/ui` and who may ask. Refuses what clients
send, and addresses that others can reach without a token.

Source: RFC 6750 (bearer tokens).
"""

import asyncio
import contextlib
import hmac
import ipaddress
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from cartridge_proto.names import ENV_ADMIN_TOKEN, HEADER_AUTHORIZATION
from cartridge_proto.residency import ReplicaId
from cartridge_router.api import Services, around_handlers, error_response, json_response
from cartridge_router.doors import Doors
from cartridge_router.errors import (
    ConfigurationError,
    InvalidAdminToken,
    InvalidRequest,
    ReplicaExists,
    RequestTimeout,
    RequestTooLarge,
    RouterError,
    UnknownReplica,
)
from cartridge_router.logs import server_logger
from cartridge_router.overview import Overview, all_replicas, replica_row
from cartridge_router.page import GUARDED, PATHS, read_page
from cartridge_router.roster import NamedReplica
from cartridge_router.settings import AdminSettings

MIN_TOKEN_CHARS: Final = 16
MAX_BODY_BYTES: Final = 65_536
BODY_TIMEOUT_S: Final = 10.0
HEAD_TIMEOUT_S: Final = 10.0
MAX_CONNECTIONS: Final = 64
WRITE_BUFFER_BYTES: Final = 65_536
STATE_FOR_S: Final = 0.5

_TOKEN: Final = re.compile(r"[!-~]+")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def admin_token(settings: AdminSettings, environment: Mapping[str, str]) -> str | None:
    """The token that operators need: the environment's, or the file's; `None` without either.

    Raises:
        ConfigurationError: the file cannot be read, or what is there is too short for a token.
    """
    name, token = ENV_ADMIN_TOKEN, environment.get(ENV_ADMIN_TOKEN) or None
    if token is None and settings.token_file is not None:
        name = f"admin.token_file: {settings.token_file}"
        try:
            token = Path(settings.token_file).read_text("utf-8").strip()
        except OSError as error:
            raise ConfigurationError([f"{name}: {error.strerror}"]) from error
        except UnicodeDecodeError as error:
            raise ConfigurationError([f"{name}: not UTF-8"]) from error
    if token is not None and (len(token) < MIN_TOKEN_CHARS or not _TOKEN.fullmatch(token)):
        raise ConfigurationError([f"{name}: at least {MIN_TOKEN_CHARS} visible ASCII characters"])
    return token


@contextlib.asynccontextmanager
async def running_admin(
    settings: AdminSettings,
    token: str | None,
    services: Services,
    on_refused: Callable[[str], None],
) -> AsyncIterator[str | None]:
    """A listener for operators, for as long as the block does; yields its base URL, if it is on.

    Raises:
        ConfigurationError: others could reach it without a token.
    """
    if settings.port is None:
        yield None
        return
    if token is None and not _is_loopback(settings.host):
        raise ConfigurationError(
            [
                f"admin.host: {settings.host} can be reached by others; set {ENV_ADMIN_TOKEN} or "
                "admin.token_file, or listen on loopback"
            ]
        )
    doors = Doors(
        max_connections=MAX_CONNECTIONS,
        head_timeout_s=HEAD_TIMEOUT_S,
        write_buffer_bytes=WRITE_BUFFER_BYTES,
        on_refused=on_refused,
    )
    app = web.Application(
        middlewares=[around_handlers(doors), _for_operators(token)], client_max_size=MAX_BODY_BYTES
    )
    page = await asyncio.to_thread(read_page, needs_token=token is not None)
    app.add_routes([*Admin(services).routes(), *page.routes()])
    runner = web.AppRunner(app, access_log=None, logger=server_logger, shutdown_timeout=1)
    await runner.setup()
    assert runner.server is not None  # noqa: S101 - there after `setup`
    try:
        listener = await asyncio.get_running_loop().create_server(
            doors.before(runner.server), settings.host, settings.port
        )
        try:
            yield f"http://{settings.host}:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
    finally:
        await runner.cleanup()


class Admin:
    """Handlers of one fleet's operators; other workers, if any, are told what they change."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._overview = Overview(services)
        self._state, self._state_until_s = b"", float("-inf")

    def routes(self) -> list[web.RouteDef]:
        """Every path that is served."""
        return [
            web.get("/admin/state", self.state),
            web.get("/admin/replicas", self.replicas),
            web.post("/admin/replicas", self.add),
            web.delete("/admin/replicas/{name}", self.remove),
        ]

    async def state(self, request: web.Request) -> web.Response:
        """What the page at `/ui` shows, as of now or half a second ago."""
        # However many look on, it is made so often at most.
        if (now_s := time.monotonic()) >= self._state_until_s:
            self._state = msgspec.json.encode(self._overview.state())
            self._state_until_s = now_s + STATE_FOR_S
        return web.Response(body=self._state, content_type="application/json", headers=GUARDED)

    async def replicas(self, request: web.Request) -> web.Response:
        """All replicas: those that get requests, those that leave, those that were taken out."""
        return json_response({"object": "list", "data": all_replicas(self._services.fleet)})

    async def add(self, request: web.Request) -> web.Response:
        """Let a replica join; 200 for one that is there already, at the same address."""
        entry = await _read_entry(request)
        name = ReplicaId(entry.name)
        present = self._services.fleet.find(name)
        if present is not None and present.url != entry.url:
            raise ReplicaExists(
                f"{name} is there, at {present.url}; remove it before", param="name"
            )
        self._services.fleet.add(name, entry.url)
        await self._tell_siblings()
        replica = self._services.fleet.find(name)
        if replica is None:
            raise UnknownReplica(f"{name} was removed at once", param="name")
        return json_response(
            replica_row(self._services.fleet, replica), status=201 if present is None else 200
        )

    async def remove(self, request: web.Request) -> web.Response:
        """Send no more requests to a replica; those that run go on."""
        name = ReplicaId(request.match_info["name"])
        replica = self._services.fleet.find(name)
        if replica is None:
            raise UnknownReplica(f"there is no replica {name!r}", param="name")
        self._services.fleet.remove(name)
        await self._tell_siblings()
        return json_response(replica_row(self._services.fleet, replica))

    async def _tell_siblings(self) -> None:
        if self._services.siblings is not None:
            await self._services.siblings.tell_changes()


async def _read_entry(request: web.Request) -> NamedReplica:
    # Which a page in a browser cannot send here unasked.
    if request.content_type != "application/json":
        raise InvalidRequest("the body must be application/json")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestTooLarge(f"a body over {MAX_BODY_BYTES} bytes") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from error
    except TimeoutError as error:
        raise RequestTimeout(f"the body did not come in {BODY_TIMEOUT_S:g} s") from error
    try:
        return msgspec.json.decode(data, type=NamedReplica)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"not a replica, {{name, url}}: {error}") from error


def _for_operators(token: str | None) -> Middleware:
    """Lets in who has the token; without one, who speaks to this machine under its own name.

    The page is for everybody: it holds nothing, and asks for the token itself. A name that leads
    here from elsewhere is how a web page gets at what listens on loopback.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if token is None:
                if not _is_loopback(_host_of(request)):
                    raise InvalidRequest(f"host: {request.host!r} is not this machine's own name")
            elif request.path not in PATHS and not hmac.compare_digest(
                _sent_by(request), f"Bearer {token}".encode()
            ):
                raise InvalidAdminToken("the token is not the one of this gateway's operators")
            return await handler(request)
        except RouterError as error:
            return error_response(error, {})

    return check


def _sent_by(request: web.Request) -> bytes:
    """The login of a request, as its bytes came."""
    return request.headers.get(HEADER_AUTHORIZATION, "").encode("utf-8", "surrogateescape")


def _host_of(request: web.Request) -> str:
    """The host that a request names, without its port."""
    return re.sub(r":[0-9]*$", "", request.host)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
