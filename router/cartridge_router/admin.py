"""What operators ask of a running gateway, on a listener of its own: which replicas there are.

Owns `/admin/replicas` and who may ask. Refuses what clients send, and addresses that others can
reach without a token.

Source: RFC 6750 (bearer tokens).
"""

import asyncio
import contextlib
import hmac
import ipaddress
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from cartridge_proto.names import ENV_ADMIN_TOKEN, HEADER_AUTHORIZATION
from cartridge_proto.residency import ReplicaId
from cartridge_router.api import around_handlers, error_response, json_response
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
from cartridge_router.fleet import Fleet, Replica
from cartridge_router.roster import Listed, NamedReplica
from cartridge_router.settings import AdminSettings
from cartridge_router.siblings import Siblings

MIN_TOKEN_CHARS: Final = 16
MAX_BODY_BYTES: Final = 65_536
BODY_TIMEOUT_S: Final = 10.0
HEAD_TIMEOUT_S: Final = 10.0
MAX_CONNECTIONS: Final = 64
WRITE_BUFFER_BYTES: Final = 65_536

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
    fleet: Fleet,
    on_refused: Callable[[str], None],
    siblings: Siblings | None = None,
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
    app.add_routes(Admin(fleet, siblings).routes())
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
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

    def __init__(self, fleet: Fleet, siblings: Siblings | None) -> None:
        self._fleet = fleet
        self._siblings = siblings

    def routes(self) -> list[web.RouteDef]:
        """Every path that is served."""
        return [
            web.get("/admin/replicas", self.replicas),
            web.post("/admin/replicas", self.add),
            web.delete("/admin/replicas/{name}", self.remove),
        ]

    async def replicas(self, request: web.Request) -> web.Response:
        """All replicas: those that get requests, those that leave, those that were taken out."""
        data = [self._shown(replica) for replica in self._fleet.replicas]
        data += [self._shown(replica) for replica in self._fleet.leaving]
        data += [_taken_out(name, listed) for name, listed in self._fleet.taken_out.items()]
        return json_response({"object": "list", "data": data})

    async def add(self, request: web.Request) -> web.Response:
        """Let a replica join; 200 for one that is there already, at the same address."""
        entry = await _read_entry(request)
        name = ReplicaId(entry.name)
        present = self._fleet.find(name)
        if present is not None and present.url != entry.url:
            raise ReplicaExists(
                f"{name} is there, at {present.url}; remove it before", param="name"
            )
        self._fleet.add(name, entry.url)
        await self._tell_siblings()
        replica = self._fleet.find(name)
        if replica is None:
            raise UnknownReplica(f"{name} was removed at once", param="name")
        return json_response(self._shown(replica), status=201 if present is None else 200)

    async def remove(self, request: web.Request) -> web.Response:
        """Send no more requests to a replica; those that run go on."""
        name = ReplicaId(request.match_info["name"])
        replica = self._fleet.find(name)
        if replica is None:
            raise UnknownReplica(f"there is no replica {name!r}", param="name")
        self._fleet.remove(name)
        await self._tell_siblings()
        return json_response(self._shown(replica))

    async def _tell_siblings(self) -> None:
        if self._siblings is not None:
            await self._siblings.tell_changes()

    def _shown(self, replica: Replica) -> dict[str, Any]:
        is_present = self._fleet.find(replica.replica) is replica
        is_leaving = replica in self._fleet.leaving
        return {
            "object": "replica",
            "name": replica.replica,
            "url": replica.url,
            "source": replica.source.value,
            "status": "present" if is_present else "leaving" if is_leaving else "gone",
            "is_healthy": replica.is_healthy,
            "left_alone": (
                self._fleet.outliers.reason_against(replica.replica) if is_present else None
            ),
            "num_in_flight": replica.num_in_flight,
            "models": sorted(replica.models),
        }


def _taken_out(name: ReplicaId, listed: Listed) -> dict[str, Any]:
    return {
        "object": "replica",
        "name": name,
        "url": listed.url,
        "source": listed.source.value,
        "status": "taken_out",
        "is_healthy": None,
        "left_alone": None,
        "num_in_flight": 0,
        "models": [],
    }


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

    A name that leads here from elsewhere is how a web page gets at what listens on loopback.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if token is None:
                if not _is_loopback(_host_of(request)):
                    raise InvalidRequest(f"host: {request.host!r} is not this machine's own name")
            elif not hmac.compare_digest(_sent_by(request), f"Bearer {token}".encode()):
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
