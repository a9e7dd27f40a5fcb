"""What operators ask of a running gateway: which replicas there are, and others."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cartridge_proto.names import ENV_ADMIN_TOKEN
from cartridge_router.admin import admin_token, running_admin
from cartridge_router.app import running_gateway
from cartridge_router.cli import run
from cartridge_router.demo.stack import free_port
from cartridge_router.errors import ConfigurationError
from cartridge_router.settings import AdminSettings, FleetSettings
from tests.router.gateway_client import Gateway, Reply, quick_gateway, until_true
from tests.router.stub_engine import Handler, StartStub, StubEngine, answer_ok
from tests.router.test_drain import LAST, begun_stream, stream_until
from tests.router.test_failover import answer_with

TOKEN = "the-token-of-the-tests"
PATH = "/admin/replicas"
Capture = pytest.CaptureFixture[str]


class Operator:
    """Talks to the listener for operators of one gateway."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.url = url
        self._session = session

    async def ask(
        self,
        method: str,
        path: str = PATH,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request."""
        async with self._session.request(
            method, self.url + path, data=data, headers=headers
        ) as response:
            return Reply(response.status, response.headers, await response.read())

    async def add(self, name: str, url: str) -> Reply:
        """Let a replica join."""
        data = json.dumps({"name": name, "url": url}).encode()
        return await self.ask("POST", data=data, headers={"Content-Type": "application/json"})

    async def remove(self, name: str) -> Reply:
        """Let a replica leave."""
        return await self.ask("DELETE", f"{PATH}/{name}")

    async def rows(self) -> dict[str, dict[str, Any]]:
        """What is listed, by name."""
        return {row["name"]: row for row in (await self.ask("GET")).json["data"]}

    async def shows(self, name: str, **expected: Any) -> None:
        """Wait until a replica is listed with these fields."""

        async def is_so() -> bool:
            row = (await self.rows()).get(name, {})
            return {field: row.get(field) for field in expected} == expected

        await until_true(is_so, f"{name} shows {expected}")


StartBoth = Callable[..., Awaitable[tuple[Gateway, Operator]]]


@pytest.fixture
async def start_both(session: aiohttp.ClientSession) -> AsyncIterator[StartBoth]:
    """Start a gateway with a listener for operators."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*replicas: str, **fields: Any) -> tuple[Gateway, Operator]:
            settings = quick_gateway(*replicas, admin=AdminSettings(port=free_port()), **fields)
            url = await stack.enter_async_context(running_gateway(settings, None))
            admin = f"http://127.0.0.1:{settings.admin.port}"
            return Gateway(session, url), Operator(session, admin)

        yield start


# --- replicas ------------------------------------------------------------------------------------
async def test_replicas_are_listed_with_how_they_are(
    start_stub: StartStub, start_both: StartBoth
) -> None:
    """Where from, whether healthy, why left alone, what is in flight, what they serve."""
    busy = await start_stub(answer_with(503, **{"Retry-After": "20"}))
    gateway, operator = await start_both(f"r0={busy.url}", "r1=http://127.0.0.1:1")
    await gateway.ask()
    assert await operator.rows() == {
        "r0": {
            "object": "replica",
            "name": "r0",
            "url": busy.url,
            "source": "settings",
            "status": "present",
            "is_healthy": True,
            "left_alone": "asked to be left alone (Retry-After)",
            "num_in_flight": 0,
            "models": ["sample"],
        },
        "r1": {
            "object": "replica",
            "name": "r1",
            "url": "http://127.0.0.1:1",
            "source": "settings",
            "status": "present",
            "is_healthy": False,
            "left_alone": None,
            "num_in_flight": 0,
            "models": [],
        },
    }


async def test_a_replica_that_is_added_serves(start_stub: StartStub, start_both: StartBoth) -> None:
    """Once it has answered a probe; asked twice, it is there once."""
    stub = await start_stub(answer_ok)
    gateway, operator = await start_both()
    assert (await gateway.ask()).status == 503
    reply = await operator.add("r0", stub.url)
    assert (reply.status, reply.json["source"]) == (201, "operator")
    await operator.shows("r0", is_healthy=True)
    assert (await gateway.ask()).headers["x-cartridge-replica"] == "r0"
    assert (await operator.add("r0", stub.url)).status == 200
    assert list(await operator.rows()) == ["r0"]


async def test_a_removed_replica_gets_nothing_new_and_finishes(
    start_stub: StartStub, start_both: StartBoth
) -> None:
    """Its streams go on and are seen to; with the last one it is gone, and its metrics too."""
    go_on = asyncio.Event()
    stubs = [await start_stub(stream_until(go_on)), await start_stub(answer_ok)]
    gateway, operator = await start_both(f"r0={stubs[0].url}")
    async with begun_stream(gateway) as stream:
        await operator.add("r1", stubs[1].url)
        await operator.shows("r1", is_healthy=True)
        reply = await operator.remove("r0")
        assert (reply.status, reply.json["status"]) == (200, "leaving")
        assert reply.json["num_in_flight"] == 1
        replies = [await gateway.ask() for _ in range(4)]
        assert {reply.headers["x-cartridge-replica"] for reply in replies} == {"r1"}
        assert await gateway.metric("cartridge_router_in_flight", replica="r0") == 1
        go_on.set()
        assert await stream.content.read() == LAST
    await operator.shows("r0", status="taken_out", num_in_flight=0)
    text = (await gateway.get("/metrics")).body
    assert b'replica="r0"' not in text
    assert b'replica="r1"' in text


async def test_what_is_taken_out_of_a_list_stays_out(
    start_stub: StartStub, start_both: StartBoth
) -> None:
    """And comes back when it is added, at its old address or another."""
    stubs = [await start_stub(answer_ok) for _ in range(2)]
    _, operator = await start_both(f"r0={stubs[0].url}")
    assert (await operator.remove("r0")).json["status"] == "gone"
    await operator.shows("r0", status="taken_out", source="settings")
    assert (await operator.remove("r0")).status == 404
    assert (await operator.add("r0", stubs[1].url)).status == 201
    await operator.shows("r0", status="present", source="operator", url=stubs[1].url)


async def test_an_attempt_does_not_go_to_one_that_was_removed_meanwhile(
    start_stub: StartStub, start_both: StartBoth
) -> None:
    """A request that fails at one replica passes over those that have left, to the next."""
    asked, may_fail = asyncio.Event(), asyncio.Event()

    async def fail_late(request: Any) -> Any:
        asked.set()
        await may_fail.wait()
        return await answer_with(500)(request)

    handlers: list[Handler] = [fail_late, answer_ok, answer_ok]
    stubs: list[StubEngine] = [await start_stub(handler) for handler in handlers]
    names = [f"r{index}={stub.url}" for index, stub in enumerate(stubs)]
    slow = FleetSettings(probe_interval_s=60.0)
    gateway, operator = await start_both(*names, fleet=slow)
    asking = [asyncio.create_task(gateway.ask()) for _ in range(3)]
    async with asyncio.timeout(10):
        await asked.wait()
        done, (waiting,) = await asyncio.wait(asking, return_when="ALL_COMPLETED", timeout=0.5)
    assert len(done) == 2
    await operator.remove("r1")
    num_asked = len(stubs[1].bodies)
    may_fail.set()
    reply = await waiting
    assert (reply.status, reply.headers["x-cartridge-replica"]) == (200, "r2")
    assert len(stubs[1].bodies) == num_asked


async def test_a_name_that_is_taken_is_not_moved(
    start_stub: StartStub, start_both: StartBoth
) -> None:
    """Whoever wants that removes it before."""
    stub = await start_stub(answer_ok)
    _, operator = await start_both(f"r0={stub.url}")
    reply = await operator.add("r0", "http://127.0.0.1:1")
    assert (reply.status, reply.error["code"]) == (409, "replica_exists")
    assert stub.url in reply.error["message"]


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"name":"a"}', "`url`"),
        (b'{"name":"a b","url":"http://a:1"}', "$.name"),
        (b'{"name":"a","url":"ftp://a"}', "$.url"),
        (b'{"name":"a","url":"http://user:secret@a:1"}', "$.url"),
        (b'{"name":"a","url":"http://a:1","weight":2}', "weight"),
    ],
)
async def test_what_is_no_replica_is_refused(start_both: StartBoth, data: bytes, part: str) -> None:
    """In the shape of OpenAI's errors, naming the field."""
    _, operator = await start_both()
    reply = await operator.ask("POST", data=data, headers={"Content-Type": "application/json"})
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")
    assert part.lower() in reply.error["message"].lower()
    assert await operator.rows() == {}


async def test_other_requests_have_the_answers_of_every_route(start_both: StartBoth) -> None:
    """404, 405 with Allow, 413; and the gateway's own listener knows nothing of this."""
    gateway, operator = await start_both()
    assert (await operator.remove("absent")).error["code"] == "replica_not_found"
    assert (await operator.ask("GET", "/")).error["code"] == "path_not_found"
    reply = await operator.ask("PUT")
    assert (reply.status, set(reply.headers["allow"].split(","))) == (405, {"GET", "HEAD", "POST"})
    large = b'{"name": "' + b"a" * 70_000
    reply = await operator.ask("POST", data=large, headers={"Content-Type": "application/json"})
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    for method in ("GET", "POST", "DELETE"):
        async with gateway.session.request(method, gateway.url + PATH) as response:
            assert response.status == 404


async def test_a_header_that_is_no_http_is_not_logged(
    start_both: StartBoth, caplog: pytest.LogCaptureFixture
) -> None:
    """The log tells that bytes came which are no request, and not which: a token may be in them."""
    _, operator = await start_both()
    port = int(operator.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {PATH} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\0\r\n\r\n".encode())
    assert (await reader.read()).startswith(b"HTTP/1.0 400 ")
    writer.close()
    assert "BadHttpMessage" in caplog.text
    assert TOKEN not in caplog.text


# --- who may ask ---------------------------------------------------------------------------------
async def test_it_is_off_by_default(session: aiohttp.ClientSession) -> None:
    """Nobody listens."""
    async with running_admin(AdminSettings(), None, None, print) as url:  # type: ignore[arg-type]
        assert url is None


async def test_beyond_loopback_it_needs_a_token() -> None:
    """The gateway does not start without one."""
    for host in ("0.0.0.0", "::", "10.0.0.1", "gateway"):
        settings = quick_gateway(admin=AdminSettings(host=host, port=0))
        with pytest.raises(ConfigurationError, match=ENV_ADMIN_TOKEN):
            async with running_gateway(settings, None):
                raise AssertionError("it started")


@pytest.mark.parametrize("sent", [None, "", "Bearer", f"bearer {TOKEN}", f"Bearer {TOKEN}x", "é"])
async def test_with_a_token_nobody_comes_without_it(
    session: aiohttp.ClientSession, sent: str | None
) -> None:
    """Also from this machine; the answer does not tell what was wrong with it."""
    settings = quick_gateway(admin=AdminSettings(port=free_port()))
    async with running_gateway(settings, None, operators_token=TOKEN):
        operator = Operator(session, f"http://127.0.0.1:{settings.admin.port}")
        headers = {} if sent is None else {"Authorization": sent}
        reply = await operator.ask("GET", headers=headers)
        assert (reply.status, reply.error["code"]) == (401, "invalid_admin_token")
        assert reply.headers["www-authenticate"] == "Bearer"
        reply = await operator.ask("GET", headers={"Authorization": f"Bearer {TOKEN}"})
        assert reply.status == 200


async def test_bytes_that_are_no_text_are_no_token() -> None:
    """They are answered as any other wrong token."""
    settings = quick_gateway(admin=AdminSettings(port=free_port()))
    async with running_gateway(settings, None, operators_token=TOKEN):
        reader, writer = await asyncio.open_connection("127.0.0.1", settings.admin.port)
        writer.write(b"GET /admin/replicas HTTP/1.0\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()


async def test_a_web_page_cannot_add_replicas(start_both: StartBoth) -> None:
    """Not by a form or a script's simple request, nor through a name that leads to loopback."""
    _, operator = await start_both()
    data = b'{"name":"evil","url":"http://198.51.100.1:1"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        reply = await operator.ask("POST", data=data, headers={"Content-Type": kind})
        assert reply.status == 400
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1"):
        reply = await operator.ask("GET", headers={"Host": host})
        assert (reply.status, "this machine" in reply.error["message"]) == (400, True)
    for host in ("localhost", "localhost:1", "127.0.0.1", "[::1]:1", "[::1]"):
        assert (await operator.ask("GET", headers={"Host": host})).status == 200
    assert await operator.rows() == {}


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    """The environment wins; what is no token is refused without being shown."""
    file = tmp_path / "token"
    settings = AdminSettings(token_file=str(file))
    assert admin_token(AdminSettings(), {}) is None
    assert admin_token(settings, {ENV_ADMIN_TOKEN: "x" * 16}) == "x" * 16
    with pytest.raises(ConfigurationError, match="No such file"):
        admin_token(settings, {})
    file.write_text(f"{'y' * 16}\n")
    assert admin_token(settings, {}) == "y" * 16
    for text in (b"short-secret", b"has a space in it", b"\xff" * 16):
        file.write_bytes(text)
        with pytest.raises(ConfigurationError) as caught:
            admin_token(settings, {})
        assert text.decode("latin-1") not in str(caught.value)


# --- the command ---------------------------------------------------------------------------------
async def test_the_command_lists_adds_and_removes(
    start_stub: StartStub, start_both: StartBoth, capsys: Capture
) -> None:
    """A table for people, JSON for programs."""
    stub = await start_stub(answer_ok)
    _, operator = await start_both("r0=http://127.0.0.1:1")

    async def command(*arguments: str) -> tuple[int, str]:
        verb, *rest = arguments
        status = await asyncio.to_thread(run, ["replicas", verb, "--admin", operator.url, *rest])
        said = capsys.readouterr()
        return status, said.out + said.err

    assert await command("add", "r1", stub.url) == (0, f"r1: {stub.url}\n")
    await operator.shows("r1", is_healthy=True)
    status, said = await command("list")
    assert status == 0
    for part in ("r0", "unhealthy", "settings", "r1", "healthy", "operator", stub.url, "sample"):
        assert part in said
    status, said = await command("list", "--json")
    assert {row["name"] for row in json.loads(said)} == {"r0", "r1"}
    assert await command("remove", "r1") == (0, "r1: removed\n")
    assert list(await operator.rows()) == ["r0"]
    status, said = await command("remove", "r1")
    assert (status, said) == (1, "error: there is no replica 'r1' (404)\n")


async def test_the_command_sends_the_token(
    session: aiohttp.ClientSession,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the file, or of the environment; without it the gateway's answer is the error."""
    settings = quick_gateway(admin=AdminSettings(port=free_port()))
    command = ["replicas", "list", "--admin", f"http://127.0.0.1:{settings.admin.port}"]
    file = tmp_path / "token"
    await asyncio.to_thread(file.write_text, TOKEN)
    async with running_gateway(settings, None, operators_token=TOKEN):
        assert await asyncio.to_thread(run, command) == 1
        assert "(401)" in capsys.readouterr().err
        assert await asyncio.to_thread(run, [*command, "--token-file", str(file)]) == 0
        monkeypatch.setenv(ENV_ADMIN_TOKEN, TOKEN)
        assert await asyncio.to_thread(run, command) == 0


@pytest.mark.parametrize("url", ["127.0.0.1:8005", "ftp://host", "http://host/admin", "http://"])
def test_the_command_wants_a_base_url(url: str, capsys: Capture) -> None:
    """Status 2 and what is wrong."""
    assert run(["replicas", "list", "--admin", url]) == 2
    assert "is not http(s)://host:port" in capsys.readouterr().err


def test_the_command_says_when_nobody_answers(capsys: Capture) -> None:
    """Status 1, with the address."""
    assert run(["replicas", "list", "--admin", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1: ConnectionRefused" in capsys.readouterr().err
