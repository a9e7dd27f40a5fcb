"""Limits: what a tenant's minute holds, what is said of it, and that counts come back."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from cartridge_router.errors import RateLimitExceeded, RequestTooLarge
from cartridge_router.limits import Limits, duration
from cartridge_router.settings import LimitSettings, TenantSettings
from cartridge_router.tenants import Tenant
from cartridge_router.testing import FakeClock
from tests.loadtest.cartridge_requests import chat_body, until
from tests.router.gateway_client import CHAT, TEXT, StartGateway, quick_gateway, until_true
from tests.router.keys_files import ACME_KEY, BETA_KEY, write_keys
from tests.router.stub_engine import StartStub, answer_ok

LIBRARY_CLOCK = "limits.aio.storage.memory.time"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of the library, at the beginning of a minute."""
    clock = FakeClock(6000.0)
    monkeypatch.setattr(LIBRARY_CLOCK, SimpleNamespace(time=clock))
    return clock


def tenant_of(
    requests: int | None = None,
    tokens: int | None = None,
    in_flight: int | None = None,
    name: str = "acme",
) -> Tenant:
    """A tenant with these limits."""
    limits = LimitSettings(
        requests_per_minute=requests, tokens_per_minute=tokens, requests_in_flight=in_flight
    )
    return Tenant(name, is_trusted=False, limits=limits)


# --- a minute ------------------------------------------------------------------------------------
async def test_a_tenant_without_limits_is_told_of_none(clock: FakeClock) -> None:
    """No header, and no end."""
    limits = Limits()
    for _ in range(100):
        assert await limits.spend(tenant_of(), 10**9) == {}


async def test_requests_are_counted_down_and_refused(clock: FakeClock) -> None:
    """Each answer says what is left; the first that is too many says when to come again."""
    limits, tenant = Limits(), tenant_of(requests=3)
    told = [await limits.spend(tenant, 5) for _ in range(3)]
    assert [headers["x-ratelimit-remaining-requests"] for headers in told] == ["2", "1", "0"]
    assert told[0]["x-ratelimit-limit-requests"] == "3"
    assert told[0]["x-ratelimit-reset-requests"] == "2m0s"
    with pytest.raises(RateLimitExceeded, match=r"no requests left .* limit 3") as refused:
        await limits.spend(tenant, 5)
    assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.value.retry_after_s == 80
    await limits.spend(tenant_of(requests=3, name="beta"), 5)


async def test_tokens_are_counted_by_their_number(clock: FakeClock) -> None:
    """A request that does not fit is refused and takes none; a smaller one still fits."""
    limits, tenant = Limits(), tenant_of(requests=100, tokens=1000)
    told = await limits.spend(tenant, 600)
    assert told["x-ratelimit-remaining-tokens"] == "400"
    with pytest.raises(RateLimitExceeded, match=r"no tokens left .* asked for 401") as refused:
        await limits.spend(tenant, 401)
    assert refused.value.headers["x-ratelimit-remaining-tokens"] == "400"
    assert refused.value.headers["x-ratelimit-remaining-requests"] == "98"
    told = await limits.spend(tenant, 400)
    assert told["x-ratelimit-remaining-tokens"] == "0"


async def test_more_tokens_than_a_minute_has_are_too_large(clock: FakeClock) -> None:
    """No wait would help, so the client is not told to wait, and nothing is counted."""
    limits, tenant = Limits(), tenant_of(requests=1, tokens=1000)
    with pytest.raises(RequestTooLarge, match=r"1001 tokens.* 1000 in a minute"):
        await limits.spend(tenant, 1001)
    assert (await limits.spend(tenant, 1000))["x-ratelimit-remaining-requests"] == "0"


async def test_a_changed_limit_counts_anew(clock: FakeClock) -> None:
    """A reload of the keys file is in force with the next request."""
    limits = Limits()
    await limits.spend(tenant_of(requests=1), 1)
    with pytest.raises(RateLimitExceeded):
        await limits.spend(tenant_of(requests=1), 1)
    assert (await limits.spend(tenant_of(requests=5), 1))["x-ratelimit-remaining-requests"] == "4"


@given(
    limit=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 70), st.integers(1, 1000)), min_size=1, max_size=20),
)
async def test_who_waits_as_told_is_let_in(limit: int, steps: list[tuple[float, int]]) -> None:
    """`Retry-After` is never too short, whatever came before; and never over two minutes."""
    with pytest.MonkeyPatch.context() as patch:
        clock = FakeClock(6000.0)
        patch.setattr(LIBRARY_CLOCK, SimpleNamespace(time=clock))
        limits, tenant = Limits(), tenant_of(tokens=limit)
        for pause_s, cost in steps:
            clock.advance(pause_s)
            wanted = min(cost, limit)
            wait_s = 0
            try:
                await limits.spend(tenant, wanted)
                continue
            except RateLimitExceeded as refused:
                wait_s = refused.retry_after_s or 0
            assert 1 <= wait_s <= 120
            clock.advance(wait_s)
            await limits.spend(tenant, wanted)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.12, "120ms"), (1, "1s"), (1.2, "2s"), (59.5, "1m0s"), (90, "1m30s")],
)
def test_durations_are_written_as_openai_s(seconds: float, text: str) -> None:
    """Rounded up, so that nobody comes too early."""
    assert duration(seconds) == text


# --- in flight -----------------------------------------------------------------------------------
def test_requests_in_flight_are_bounded_and_come_back() -> None:
    """Through an exception too; another tenant's do not count."""
    limits, tenant = Limits(), tenant_of(in_flight=1)
    for _ in range(2):
        with limits.in_flight(tenant), limits.in_flight(tenant_of(in_flight=1, name="beta")):
            refused = pytest.raises(RateLimitExceeded, match="1 requests in flight; the limit is 1")
            with refused, limits.in_flight(tenant):
                pass
        with pytest.raises(ZeroDivisionError), limits.in_flight(tenant):
            raise ZeroDivisionError
    assert limits._in_flight == {}


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    """Two tenants: `acme` with small limits, `beta` with none."""
    return write_keys(
        tmp_path / "keys.yaml",
        {
            "acme": {
                "limits": {
                    "requests_per_minute": 4,
                    "tokens_per_minute": 10_000,
                    "requests_in_flight": 1,
                }
            },
            "beta": {},
        },
    )


async def test_limits_are_said_in_every_answer(
    start_stub: StartStub, start_gateway: StartGateway, keys_file: str
) -> None:
    """In OpenAI's headers on 200 and on 429, which has OpenAI's code and `Retry-After`."""
    stub = await start_stub(answer_ok)
    anybody = await start_gateway(
        quick_gateway(stub.url, tenants=TenantSettings(keys_file=keys_file))
    )
    gateway = anybody.as_caller(ACME_KEY)
    reply = await gateway.ask(max_tokens=100)
    assert reply.status == 200
    assert reply.headers["x-ratelimit-limit-requests"] == "4"
    assert reply.headers["x-ratelimit-remaining-requests"] == "3"
    assert reply.headers["x-ratelimit-limit-tokens"] == "10000"
    assert 9800 < int(reply.headers["x-ratelimit-remaining-tokens"]) < 9900
    assert reply.headers["x-ratelimit-reset-tokens"]
    tokens = await gateway.ask(max_tokens=9950)
    assert (tokens.status, tokens.error["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(tokens.headers["retry-after"]) <= 120
    large = await gateway.ask(max_tokens=20_000)
    assert (large.status, large.error["code"]) == (413, "request_too_large")
    assert "retry-after" not in large.headers
    for _ in range(2):
        await gateway.ask()
    requests = await gateway.ask()
    assert (requests.status, requests.error["type"]) == (429, "rate_limit_error")
    assert requests.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-cartridge-request-id" in requests.headers
    other = await anybody.as_caller(BETA_KEY).ask()
    assert other.status == 200
    assert not [name for name in other.headers if name.lower().startswith("x-ratelimit")]
    assert len(stub.bodies) == 4


@pytest.mark.parametrize("how", ["gone", "answered"])
async def test_a_slot_comes_back_when_the_request_ends(
    start_stub: StartStub, start_gateway: StartGateway, keys_file: str, how: str
) -> None:
    """While one is in flight the next is a 429; after the client has gone, or is answered, not."""
    go_on = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return await answer_ok(request)

    stub = await start_stub(answer)
    settings = quick_gateway(stub.url, tenants=TenantSettings(keys_file=keys_file))
    gateway = (await start_gateway(settings)).as_caller(ACME_KEY)
    first = asyncio.create_task(gateway.ask())
    await until(lambda: stub.num_open == 1, "the first is at the engine")
    busy = await gateway.ask()
    assert (busy.status, busy.error["code"]) == (429, "rate_limit_exceeded")
    assert busy.headers["retry-after"] == "1"
    if how == "gone":
        first.cancel()
        await until(lambda: stub.num_open == 0, "the engine is left")
    else:
        go_on.set()
        assert (await first).status == 200
    await gateway.is_idle()
    unknown = await gateway.ask(model="absent")
    assert unknown.status == 404


async def test_a_slow_body_takes_a_slot(
    start_stub: StartStub, start_gateway: StartGateway, keys_file: str
) -> None:
    """So that a tenant cannot hold the gateway's memory with bodies that never end."""
    stub = await start_stub(answer_ok)
    settings = quick_gateway(stub.url, tenants=TenantSettings(keys_file=keys_file))
    gateway = (await start_gateway(settings)).as_caller(ACME_KEY)
    host, port = gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ACME_KEY}\r\n"
    writer.write(head.encode() + b"Content-Length: 1000\r\n\r\n{")
    await writer.drain()

    async def is_busy() -> bool:
        return "1 requests in flight" in (await gateway.ask(model="absent")).error["message"]

    async def is_free() -> bool:
        return not await is_busy()

    try:
        await until_true(is_busy, "the body takes the slot")
    finally:
        writer.close()
        await writer.wait_closed()
    await until_true(is_free, "the slot is given back with the connection")
    assert stub.bodies == []


# --- estimates -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {}, 0),
        (CHAT, {"max_tokens": 50}, 50),
        (CHAT, {"max_tokens": 50, "max_completion_tokens": 70}, 70),
        (CHAT, {"max_tokens": 50, "n": 3}, 150),
        (CHAT, {"max_tokens": 16.0}, 16),
        (CHAT, {"max_tokens": -5}, 0),
        (CHAT, {"max_tokens": None, "n": None}, 0),
        ("/v1/responses", {"max_output_tokens": 60}, 60),
        (TEXT, {"prompt": ["a", "b"], "max_tokens": 50, "n": 2}, 200),
        (TEXT, {"prompt": [[1, 2], [3]], "max_tokens": 50}, 100),
        (TEXT, {"prompt": [1, 2, 3], "max_tokens": 50}, 50),
        (TEXT, {"prompt": [], "max_tokens": 50}, 50),
    ],
)
async def test_the_estimate_is_prompt_and_longest_answer(
    start_stub: StartStub,
    start_gateway: StartGateway,
    tmp_path: Path,
    path: str,
    fields: dict[str, object],
    expected: int,
) -> None:
    """For all choices and prompts of a request; without a limit of its own the prompt alone."""
    file = write_keys(
        tmp_path / "keys.yaml",
        {"acme": {"limits": {"tokens_per_minute": 1_000_000}}},
        {ACME_KEY: "acme"},
    )
    stub = await start_stub(answer_ok)
    # Without the gateway's own field the engine gets what the client sent, which is what counts.
    tenants = TenantSettings(keys_file=file, has_own_prefix_caches=False)
    settings = quick_gateway(stub.url, tenants=tenants)
    gateway = (await start_gateway(settings)).as_caller(ACME_KEY)
    body = chat_body() if path == CHAT else {"model": "sample"}
    reply = await gateway.post(path, {**body, **fields})
    assert reply.status == 200
    left = int(reply.headers["x-ratelimit-remaining-tokens"])
    assert 1_000_000 - left - expected == pytest.approx(len(stub.bodies[0]) // 4, abs=1)


@pytest.mark.parametrize("value", ["50", True, [50], {}])
async def test_a_limit_that_an_engine_could_read_otherwise_is_refused(
    start_stub: StartStub, start_gateway: StartGateway, value: object
) -> None:
    """An engine takes `"50"` for 50; what it counts is what was counted."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    reply = await gateway.ask(max_tokens=value)
    assert (reply.status, stub.bodies) == (400, [])
    assert "max_tokens" in reply.error["message"]


async def test_a_number_beyond_all_limits_is_counted_as_very_many(
    start_stub: StartStub, start_gateway: StartGateway, keys_file: str
) -> None:
    """The bytes are the engine's to judge where there is no limit, and too large where there is."""
    stub = await start_stub(answer_ok)
    tenants = TenantSettings(keys_file=keys_file, has_own_prefix_caches=False)
    settings = quick_gateway(stub.url, tenants=tenants)
    gateway = await start_gateway(settings)
    for number in (b"1e300", b"123456789012345678901234567890"):
        body = b'{"model":"sample","max_tokens":' + number + b"}"
        reply = await gateway.as_caller(ACME_KEY).post_bytes(CHAT, body)
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert (await gateway.as_caller(BETA_KEY).post_bytes(CHAT, body)).status == 200
        assert stub.bodies[-1] == body
