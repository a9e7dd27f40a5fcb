"""TLS on both sides, on real sockets: who is believed, and files that change meanwhile."""

import asyncio
import contextlib
import ssl
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import serialization

from cartridge_router import tls
from cartridge_router.errors import ConfigurationError
from cartridge_router.settings import EngineSettings, Settings, TlsSettings, load_settings
from cartridge_router.tls import EngineLogin, Renewed, ServerTls
from cartridge_router.watching import FileWatch
from tests.router.certificates import Authority, make_authority
from tests.router.gateway_client import CHAT, Gateway, StartGateway, quick_gateway, until_true
from tests.router.stub_engine import StartStub, StubEngine, answer_ok

ASKED = {"model": "sample", "messages": []}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Signs what both sides show."""
    return make_authority(tmp_path / "authority.pem")


@pytest.fixture(autouse=True)
def quick_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at often."""
    monkeypatch.setattr(tls, "REFRESH_S", 0.02)


def trusting(authority: Authority, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """A client's view: it believes one authority, and may show a certificate."""
    context = ssl.create_default_context(cafile=authority.file)
    if certificate is not None:
        context.load_cert_chain(*certificate)
    return context


def listening(settings: Settings, files: tuple[Path, Path], **more: str) -> Settings:
    """A gateway with TLS."""
    cert_file, key_file = map(str, files)
    shown = TlsSettings(cert_file=cert_file, key_file=key_file, **more)
    return msgspec.structs.replace(settings, tls=shown)


async def name_shown(url: str, context: ssl.SSLContext) -> str:
    """Common name of the certificate that a gateway shows to a new connection that it answers."""
    host, _, port = url.removeprefix("https://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        certificate: Any = writer.get_extra_info("peercert")
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10):
            answer = await reader.readline()
        if not answer:
            # With TLS 1.3 a client learns here that its certificate was refused.
            raise ConnectionResetError
        assert answer == b"HTTP/1.1 200 OK\r\n"
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()
    name: str = dict(pair for part in certificate["subject"] for pair in part)["commonName"]
    return name


# --- clients -------------------------------------------------------------------------------------
async def test_clients_are_served_over_tls(
    start_stub: StartStub, start_gateway: StartGateway, authority: Authority, tmp_path: Path
) -> None:
    """Requests and streams; who speaks plain HTTP, or believes another authority, is not."""
    stub = await start_stub(answer_ok)
    files = authority.issue(tmp_path / "gateway", "gateway")
    gateway = await start_gateway(listening(quick_gateway(stub.url), files))
    assert gateway.url.startswith("https://")
    async with gateway.session.post(
        gateway.url + CHAT, json=ASKED, ssl=trusting(authority)
    ) as response:
        assert (response.status, await response.read()) == (200, b"{}")
    other = make_authority(tmp_path / "other.pem")
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await gateway.session.get(f"{gateway.url}/health", ssl=trusting(other))
    with pytest.raises(aiohttp.ClientError):
        await gateway.session.get(gateway.url.replace("https", "http") + "/health")


async def test_a_new_certificate_is_shown_without_a_restart(
    start_gateway: StartGateway, authority: Authority, tmp_path: Path
) -> None:
    """New connections see it; a bad one is not taken, and counted."""
    files = authority.issue(tmp_path / "gateway", "first")
    gateway = await start_gateway(listening(quick_gateway(), files))
    context = trusting(authority)
    assert await name_shown(gateway.url, context) == "first"
    authority.issue(tmp_path / "gateway", "second")

    async def is_shown() -> bool:
        return await name_shown(gateway.url, context) == "second"

    await until_true(is_shown, "the second certificate is shown")
    files[0].write_text("no certificate")

    async def is_counted() -> bool:
        async with gateway.session.get(f"{gateway.url}/metrics", ssl=context) as response:
            text = await response.text()
        return 'cartridge_router_reload_failures_total{what="tls"} 1.0' in text

    await until_true(is_counted, "the failure is counted")
    assert await name_shown(gateway.url, context) == "second"


async def test_clients_may_have_to_show_a_certificate(
    start_gateway: StartGateway, authority: Authority, tmp_path: Path
) -> None:
    """Of the authority that the operator names; without one, or before TLS 1.2, no answer."""
    files = authority.issue(tmp_path / "gateway", "gateway")
    clients = make_authority(tmp_path / "clients.pem")
    gateway = await start_gateway(
        listening(quick_gateway(), files, client_ca_file=str(clients.file))
    )
    shown = trusting(authority, clients.issue(tmp_path / "client", "client"))
    assert await name_shown(gateway.url, shown) == "gateway"
    wrong = trusting(authority, authority.issue(tmp_path / "wrong", "wrong"))
    old_version = trusting(authority, clients.issue(tmp_path / "old", "old"))
    old_version.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old_version.maximum_version = ssl.TLSVersion.TLSv1_1
    for context in (trusting(authority), wrong, old_version):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await name_shown(gateway.url, context)


def test_no_session_outlives_its_authority(authority: Authority, tmp_path: Path) -> None:
    """A client whose authority is no longer believed comes in by no session of before."""
    cert_file, key_file = authority.issue(tmp_path / "gateway", "gateway")
    clients = tmp_path / "clients.pem"
    login = make_authority(clients).issue(tmp_path / "client", "client")
    served = ServerTls(
        TlsSettings(cert_file=str(cert_file), key_file=str(key_file), client_ca_file=str(clients))
    )
    context = trusting(authority, login)
    session = handshake(served, context, None)
    make_authority(clients)
    served.renew()
    for before in (None, session):
        with pytest.raises(ssl.SSLError):
            handshake(served, context, before)


def handshake(
    served: ServerTls, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> ssl.SSLSession | None:
    """A client and the listener's context greet each other in memory; the client's session."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname="127.0.0.1", session=session)
    server = served.context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    server.write(b"x")
    assert client.read(1) == b"x"
    return client.session


def test_an_encrypted_key_asks_nobody(authority: Authority, tmp_path: Path) -> None:
    """OpenSSL would wait at the terminal."""
    cert_file, key_file = authority.issue(tmp_path / "a", "a")
    key = serialization.load_pem_private_key(key_file.read_bytes(), None)
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigurationError, match="the key is encrypted"):
        ServerTls(TlsSettings(cert_file=str(cert_file), key_file=str(key_file)))


async def test_a_handshake_that_does_not_come_ends_its_connection(
    start_gateway: StartGateway, authority: Authority, tmp_path: Path
) -> None:
    """The time for a head is also the time for the handshake before it."""
    settings = listening(quick_gateway(), authority.issue(tmp_path / "gateway", "gateway"))
    clients = msgspec.structs.replace(settings.clients, head_timeout_s=0.3)
    gateway = await start_gateway(msgspec.structs.replace(settings, clients=clients))
    host, _, port = gateway.url.removeprefix("https://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01")
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


# --- engines -------------------------------------------------------------------------------------
@pytest.fixture
async def secure_engine(
    authority: Authority, tmp_path: Path
) -> AsyncIterator[tuple[StubEngine, list[str | None]]]:
    """An engine that asks for a certificate and a key, and the names it was shown."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
    context.load_cert_chain(*authority.issue(tmp_path / "engine", "engine"))
    context.verify_mode = ssl.CERT_REQUIRED
    shown: list[str | None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        certificate: Any = request.transport.get_extra_info("peercert")
        names = dict(pair for part in certificate["subject"] for pair in part)
        shown.append(names["commonName"])
        return web.Response(status=200 if "Authorization" in request.headers else 401, body=b"{}")

    stub = StubEngine(answer)
    await stub.start(context)
    yield stub, shown
    await stub.stop()


async def test_engines_are_shown_a_certificate_and_a_key(
    secure_engine: tuple[StubEngine, list[str | None]],
    start_gateway: StartGateway,
    authority: Authority,
    tmp_path: Path,
) -> None:
    """Probes and requests alike; the client's own key stays behind, and new files are taken."""
    stub, shown = secure_engine
    cert_file, key_file = authority.issue(tmp_path / "login", "first")
    api_key_file = tmp_path / "engine-key"
    api_key_file.write_text("engine-secret-1\n")
    engines = EngineSettings(
        ca_file=str(authority.file),
        cert_file=str(cert_file),
        key_file=str(key_file),
        api_key_file=str(api_key_file),
    )
    gateway = await start_gateway(quick_gateway(f"r0={stub.url}", engines=engines))
    await until_true(lambda: is_ready(gateway), "the engine is healthy")
    reply = await gateway.post(CHAT, ASKED, {"Authorization": "Bearer of-the-client"})
    assert reply.status == 200
    assert stub.requests[-1].headers.getall("Authorization") == ["Bearer engine-secret-1"]
    assert shown == ["first"]
    authority.issue(tmp_path / "login", "second")
    api_key_file.write_text("engine-secret-2")

    async def is_renewed() -> bool:
        await asyncio.sleep(0.05)
        await gateway.post(CHAT, ASKED)
        return stub.requests[-1].headers["Authorization"] == "Bearer engine-secret-2"

    await until_true(is_renewed, "the new key is sent")


async def test_an_engine_of_another_authority_is_not_believed(
    secure_engine: tuple[StubEngine, list[str | None]], start_gateway: StartGateway
) -> None:
    """It stays unhealthy, and gets no request."""
    stub, shown = secure_engine
    gateway = await start_gateway(quick_gateway(f"r0={stub.url}"))
    assert (await gateway.ask()).status == 503
    assert shown == []


async def is_ready(gateway: Gateway) -> bool:
    """Whether a replica is healthy."""
    return (await gateway.get("/ready")).status == 200


# --- settings ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("file", "text"),
    [
        ({"tls": {"key_file": "k"}}, "tls.key_file: goes with tls.cert_file"),
        ({"tls": {"client_ca_file": "c"}}, "tls.client_ca_file: goes with tls.cert_file"),
        ({"engines": {"key_file": "k"}}, "engines.key_file: goes with engines.cert_file"),
    ],
)
def test_settings_that_do_not_go_together(file: dict[str, Any], text: str, tmp_path: Path) -> None:
    """Each names what is missing."""
    path = tmp_path / "settings.json"
    path.write_bytes(msgspec.json.encode(file))
    with pytest.raises(ConfigurationError, match=text):
        load_settings(path, {}, {})


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    """By their setting, when the gateway starts; the key's content is not repeated."""
    cert_file, key_file = map(str, authority.issue(tmp_path / "a", "a"))
    _, other_key = map(str, authority.issue(tmp_path / "b", "b"))
    missing = str(tmp_path / "missing.pem")
    for settings, text in (
        (TlsSettings(cert_file=missing, key_file=key_file), "tls.cert_file, key_file"),
        (TlsSettings(cert_file=cert_file, key_file=other_key), "tls.cert_file, key_file"),
        (
            TlsSettings(cert_file=cert_file, key_file=key_file, client_ca_file=missing),
            "tls.client_ca_file",
        ),
    ):
        with pytest.raises(ConfigurationError, match=text):
            ServerTls(settings)
    bad_key = tmp_path / "bad-key"
    bad_key.write_text("two words")
    for engines, text in (
        (EngineSettings(ca_file=missing), "engines.ca_file"),
        (EngineSettings(cert_file=cert_file, key_file=other_key), "engines.cert_file, key_file"),
        (EngineSettings(api_key_file=missing), "engines.api_key_file"),
        (EngineSettings(api_key_file=str(bad_key)), "engines.api_key_file: no key"),
    ):
        with pytest.raises(ConfigurationError, match=text) as caught:
            EngineLogin(engines)
        assert "two words" not in str(caught.value)


async def test_what_changes_before_it_is_watched_is_seen(
    authority: Authority, tmp_path: Path
) -> None:
    """A certificate that is replaced while the gateway starts is not shown for ever."""
    certificate, key = authority.issue(tmp_path / "gateway", "first")
    settings = TlsSettings(cert_file=str(certificate), key_file=str(key))
    tls = await asyncio.to_thread(ServerTls, settings)
    authority.issue(tmp_path / "gateway", "second")
    renewed = asyncio.Event()

    def renew() -> None:
        tls.renew()
        loop.call_soon_threadsafe(renewed.set)

    loop = asyncio.get_running_loop()
    running = asyncio.create_task(Renewed("tls", tls.watch, renew, lambda: None).run())
    async with asyncio.timeout(20):
        await renewed.wait()
    running.cancel()
    await asyncio.wait([running])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls.context) as server:
        port = server.sockets[0].getsockname()[1]
        shown = await name_shown(f"https://127.0.0.1:{port}", trusting(authority))
    assert shown == "second"


async def test_what_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    """A failure is counted once for each change, not for each look; so is a file that is away."""
    file = tmp_path / "file"
    file.write_text("1")
    events: list[str] = []

    def renew() -> None:
        events.append(file.read_text() if file.exists() else "away")
        if events[-1] in ("bad", "away"):
            raise ConfigurationError(["bad"])

    watch = await asyncio.to_thread(FileWatch, [file])
    running = asyncio.create_task(
        Renewed("test", watch, renew, lambda: events.append("failed")).run()
    )
    for content, expected in (("bad", "failed"), (None, "failed"), ("22", "22")):
        await asyncio.sleep(0.2)
        num_events = len(events)
        if content is None:
            file.unlink()
        else:
            file.write_text(content)

        async def is_seen(before: int = num_events, last: str = expected) -> bool:
            return len(events) > before and events[-1] == last

        await until_true(is_seen, f"{content} is seen")
    await asyncio.sleep(0.2)
    running.cancel()
    await asyncio.wait([running])
    assert events == ["bad", "failed", "away", "failed", "22"]
