"""Tenants: who is let in by which key or token, what each sees, and what never leaves."""

import asyncio
import contextlib
import hmac
import json
import logging
import statistics
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.digest import sha256_digest
from cartridge_proto.stores import LocalStore
from cartridge_router.app import running_gateway
from cartridge_router.catalog import Catalog
from cartridge_router.errors import ConfigurationError, InvalidApiKey, RouterError
from cartridge_router.request import Route, parse_request
from cartridge_router.selection import Selector
from cartridge_router.settings import (
    LimitSettings,
    ListedTenant,
    ResidencySettings,
    Settings,
    TenantSettings,
)
from cartridge_router.signing_keys import SigningKeys
from cartridge_router.tenants import Tenants, key_hash, new_key, read_keys_file
from tests.loadtest.cartridge_requests import chat_body, until
from tests.loadtest.replica_client import StartReplica
from tests.router.fleets import start_fleet, start_replicas
from tests.router.gateway_client import (
    CHAT,
    TEXT,
    Gateway,
    StartGateway,
    quick_gateway,
    until_true,
)
from tests.router.keys_files import ACME_KEY, BETA_KEY, replace_file, write_keys
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import StartStub, answer_ok
from tests.router.token_issuer import (
    AUDIENCE,
    EC_KEY,
    ISSUER,
    PRIVATE_KEYS,
    JwksServer,
    public_jwk,
    token,
)

EXPLAIN, RECEIPT = "/v1/cartridges/explain", "/v1/cartridges/receipts/some-id"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """A file with a key for `acme` and one for `beta`."""
    return Path(write_keys(tmp_path / "keys.yaml"))


@pytest.fixture
async def gateway(start_stub: StartStub, start_gateway: StartGateway, keys_file: Path) -> Gateway:
    """A gateway that asks for keys, in front of an engine that answers anything."""
    stub = await start_stub(answer_ok)
    tenants = TenantSettings(keys_file=str(keys_file))
    return await start_gateway(quick_gateway(stub.url, tenants=tenants))


def tenants_of(**fields: Any) -> Tenants:
    """Tenants by settings alone."""
    return Tenants(Settings(tenants=TenantSettings(**fields)), None)


# --- keys ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", TEXT),
        ("POST", "/v1/embeddings"),
        ("POST", EXPLAIN),
        ("GET", "/v1/models"),
        ("GET", "/v1/cartridges"),
        ("GET", RECEIPT),
    ],
)
@pytest.mark.parametrize("key", [None, "cr-wrong"])
async def test_without_a_good_key_nothing_is_told(
    gateway: Gateway, method: str, path: str, key: str | None
) -> None:
    """401 as OpenAI says it, before the body is looked at; the key is not repeated."""
    caller = gateway if key is None else gateway.as_caller(key)
    reply = await (caller.get(path) if method == "GET" else caller.post_bytes(path, b"{"))
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.error["type"] == "invalid_request_error"
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "wrong" not in reply.body.decode()


async def test_probes_need_no_key(gateway: Gateway) -> None:
    """Health, readiness and metrics are for the cluster, which has no key."""
    for path in ("/health", "/ready", "/metrics"):
        assert (await gateway.get(path)).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {ACME_KEY}"},
        {"authorization": f"bearer  {ACME_KEY} "},
        {"X-Api-Key": ACME_KEY},
        {"Api-Key": ACME_KEY},
        {"Authorization": "Basic dXNlcjpwYXNz", "x-api-key": ACME_KEY},
        {"Authorization": f"Bearer {ACME_KEY}", "x-api-key": "other", "api-key": "another"},
    ],
)
async def test_a_key_may_come_in_three_headers_and_reaches_no_engine(
    start_stub: StartStub, start_gateway: StartGateway, keys_file: Path, headers: dict[str, str]
) -> None:
    """As OpenAI's, Anthropic's and Azure's clients send it; none of the three goes on."""
    stub = await start_stub(answer_ok)
    tenants = TenantSettings(keys_file=str(keys_file))
    gateway = await start_gateway(quick_gateway(stub.url, tenants=tenants))
    assert (await gateway.post(CHAT, chat_body(), headers)).status == 200
    got = stub.requests[0].headers
    assert not {"authorization", "x-api-key", "api-key"} & {name.lower() for name in got}
    assert ACME_KEY not in str(list(got.items()))


async def test_without_tenants_no_key_is_asked_for_and_none_goes_on(
    start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Clients that always send one work as they do against vLLM."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url))
    headers = {"Authorization": "Bearer x", "X-Api-Key": "x", "Api-Key": "x"}
    assert (await gateway.post(CHAT, chat_body(), headers)).status == 200
    got = {name.lower() for name in stub.requests[0].headers}
    assert not {"authorization", "x-api-key", "api-key"} & got


async def test_what_is_stored_is_no_key(keys_file: Path) -> None:
    """Neither the hash of a key nor a part of one lets anybody in."""
    tenants = tenants_of(keys_file=str(keys_file))
    await tenants.read_first()
    assert tenants.authorise({"x-api-key": ACME_KEY}).name == "acme"
    for wrong in (key_hash(ACME_KEY), ACME_KEY[:-1], ACME_KEY + "x", ACME_KEY.upper()):
        with pytest.raises(InvalidApiKey):
            tenants.authorise({"x-api-key": wrong})
    assert ACME_KEY not in await asyncio.to_thread(keys_file.read_text)


async def test_a_hash_that_only_begins_alike_lets_nobody_in(tmp_path: Path) -> None:
    """Keys are found by a part of their hash, and compared as a whole."""
    digest = key_hash(ACME_KEY)
    alike = digest[:32] + key_hash("other")[32:]
    entry = {"sha256": alike, "tenant": "acme"}
    file = replace_file(
        tmp_path / "keys.yaml", json.dumps({"tenants": {"acme": {}}, "keys": [entry]})
    )
    tenants = tenants_of(keys_file=file)
    await tenants.read_first()
    with pytest.raises(InvalidApiKey):
        tenants.authorise({"x-api-key": ACME_KEY})


@given(st.text(), st.text())
async def test_whatever_is_sent_is_answered(authorization: str, key: str) -> None:
    """No header of a client is more than a 401."""
    session: Any = None
    keys = SigningKeys("http://127.0.0.1:9/", session)
    settings = Settings(tenants=TenantSettings(keys_file="unread", jwks_url="unread"))
    tenants = Tenants(settings, keys)
    for headers in (
        {"authorization": authorization},
        {"authorization": f"Bearer {authorization}"},
        {"x-api-key": key},
        {"api-key": f"{key}.{key}.{key}"},
    ):
        with pytest.raises(RouterError):
            tenants.authorise(headers)


def test_new_keys_are_long_and_never_the_same() -> None:
    """256 bits after a prefix that scanners know."""
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("cr-") and len(key) == 3 + 43 for key in keys)


# --- the file ------------------------------------------------------------------------------------
async def test_a_changed_file_is_in_force_without_a_restart(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new key is let in and a removed one is not; a file that is gone changes nothing."""
    tenants = tenants_of(keys_file=str(keys_file), refresh_s=0.01)
    await tenants.read_first()
    task = asyncio.create_task(tenants.run())

    def lets_in(key: str) -> bool:
        with contextlib.suppress(InvalidApiKey):
            return bool(tenants.authorise({"x-api-key": key}))
        return False

    async def holds(*keys: str) -> bool:
        return [key for key in (ACME_KEY, BETA_KEY, "cr-new") if lets_in(key)] == list(keys)

    try:
        assert await holds(ACME_KEY, BETA_KEY)
        write_keys(keys_file, {"acme": {}}, {ACME_KEY: "acme", "cr-new": "acme"})
        await until_true(lambda: holds(ACME_KEY, "cr-new"), "the new file is in force")
        await asyncio.to_thread(keys_file.unlink)
        await until(lambda: "No such file" in caplog.text, "the loss is told")
        assert await holds(ACME_KEY, "cr-new")
        write_keys(keys_file, {"beta": {}}, {BETA_KEY: "beta"})
        await until_true(lambda: holds(BETA_KEY), "the file that came back is in force")
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_bad_new_file_is_refused_and_the_old_stays(
    start_stub: StartStub,
    start_gateway: StartGateway,
    keys_file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every problem is in the log, no value of the file is, and keys go on working."""
    stub = await start_stub(answer_ok)
    tenants = TenantSettings(keys_file=str(keys_file), refresh_s=0.01)
    gateway = await start_gateway(quick_gateway(stub.url, tenants=tenants))
    bad = {"tenants": {"acme": {}}, "keys": [{"sha256": ACME_KEY, "tenant": "acme"}, {"x": 1}]}
    replace_file(keys_file, json.dumps(bad))

    async def is_told() -> bool:
        return caplog.text.count("the keys stay as they are") >= 3

    await until_true(is_told, "all problems are told")
    for part in ("keys[0].sha256", "keys[1]: takes only sha256, tenant, label", "keys[1]"):
        assert part in caplog.text
    assert ACME_KEY not in caplog.text
    for key in (ACME_KEY, BETA_KEY):
        assert (await gateway.as_caller(key).get("/v1/models")).status == 200


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("keys: [", ["no YAML at line 1"]),
        ("[1]", ["rule type"]),
        ("tenants: {1: {}}", ["a name is not a text"]),
        ("tenants: {'a b': {}}", ["tenants"]),
        ("tenants: {acme: {limits: {requests_per_minute: 0}}}", ["requests_per_minute"]),
        ("tenants: {acme: {limit: 1}}", ["takes only is_trusted, limits"]),
        ("tenants: {listed: {}}", ["tenants.listed: the settings list it too"]),
        ("keys: [{sha256: SECRET, tenant: listed}]", ["keys[0].sha256"]),
        ("keys: {SECRET: acme}", ["keys: breaks the rule type"]),
        (
            "tenants: {acme: {}}\nkeys: [{sha256: A, tenant: acme}, {sha256: A, tenant: absent}]",
            ["keys[1].tenant: absent is listed nowhere", "keys[1].sha256: the same as keys[0]"],
        ),
        ("\xff", ["not UTF-8"]),
        (None, ["No such file"]),
    ],
)
async def test_a_bad_keys_file_stops_the_start(
    tmp_path: Path, text: str | None, parts: list[str]
) -> None:
    """With every problem and no value of the file."""
    file = tmp_path / "keys.yaml"
    if text is not None:
        file.write_text(text.replace("A,", "a" * 64 + ","), "latin-1")
    settings = quick_gateway(
        tenants=TenantSettings(keys_file=str(file), listed={"listed": ListedTenant()})
    )
    with pytest.raises(ConfigurationError) as refused:
        async with running_gateway(settings, None):
            raise AssertionError("it started")
    told = "\n".join(refused.value.problems)
    assert len(refused.value.problems) == len(parts)
    assert all(part in told for part in [*parts, str(file)])
    assert "SECRET" not in told


def test_keys_may_be_for_tenants_of_the_settings(tmp_path: Path) -> None:
    """And an empty file is a file without keys."""
    settings = TenantSettings(listed={"listed": ListedTenant()})
    file = Path(write_keys(tmp_path / "keys.yaml", {}, {ACME_KEY: "listed"}))
    assert [key.tenant for key in read_keys_file(file, settings).keys] == ["listed"]
    file.write_text("# nothing yet\n")
    assert read_keys_file(file, settings).keys == []


async def test_limits_are_a_tenant_s_own_or_the_default(tmp_path: Path) -> None:
    """Own limits replace the default ones as a whole."""
    default, own = LimitSettings(requests_per_minute=1), {"tokens_per_minute": 5}
    keys = {"cr-a": "own", "cr-b": "none", "cr-c": "trusted"}
    entries: dict[str, dict[str, Any]] = {
        "own": {"limits": own},
        "none": {},
        "trusted": {"is_trusted": True},
    }
    file = write_keys(tmp_path / "keys.yaml", entries, keys)
    tenants = tenants_of(keys_file=file, default_limits=default)
    await tenants.read_first()
    found = {key: tenants.authorise({"api-key": key}) for key in keys}
    assert found["cr-a"].limits == LimitSettings(tokens_per_minute=5)
    assert found["cr-b"].limits == found["cr-c"].limits == default
    assert [tenant.is_trusted for tenant in found.values()] == [False, False, True]


# --- tokens --------------------------------------------------------------------------------------
@pytest.fixture
async def issuer() -> AsyncIterator[JwksServer]:
    """A server of public keys."""
    server = JwksServer()
    await server.start()
    yield server
    await server.stop()


StartTokens = Callable[..., Any]


@pytest.fixture
async def start_tokens(issuer: JwksServer, session: aiohttp.ClientSession) -> StartTokens:
    """Tenants that know the issuer's keys; `acme` is listed."""

    async def start(**fields: Any) -> Tenants:
        settings = TenantSettings(
            jwks_url=issuer.url,
            issuer=ISSUER,
            audience=AUDIENCE,
            listed=fields.pop("listed", {"acme": ListedTenant(is_trusted=True)}),
            **fields,
        )
        tenants = Tenants(Settings(tenants=settings), SigningKeys(issuer.url, session))
        await tenants.read_first()
        return tenants

    return start


def bearer(text: str) -> dict[str, str]:
    """A token as it is sent."""
    return {"authorization": f"Bearer {text}"}


@pytest.mark.parametrize("algorithm", PRIVATE_KEYS)
async def test_a_good_token_names_its_tenant(start_tokens: StartTokens, algorithm: str) -> None:
    """With each kind of asymmetric key; what the settings list of the tenant holds."""
    tenants = await start_tokens()
    tenant = tenants.authorise(bearer(token(algorithm)))
    assert (tenant.name, tenant.is_trusted) == ("acme", True)
    listed = tenants.authorise(bearer(token(algorithm, aud=["other", AUDIENCE])))
    assert listed == tenant


def forged(**header: Any) -> str:
    """A token whose header is exchanged after it was signed."""
    _, payload, signature = token().split(".")
    encoded = jwt.utils.base64url_encode(json.dumps(header).encode()).decode()
    return f"{encoded}.{payload}.{signature}"


def signed_with_the_public_key() -> str:
    """HS256 with what everybody knows: the oldest forgery of all."""
    signed = forged(alg="HS256", kid="ES256").rpartition(".")[0]
    pem = EC_KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = hmac.digest(pem, signed.encode(), "sha256")
    return f"{signed}.{jwt.utils.base64url_encode(signature).decode()}"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: token(exp=time.time() - 60), "ExpiredSignature"),
        (lambda: token(exp=None), "MissingRequiredClaim"),
        (lambda: token(exp="soon"), "Decode"),
        (lambda: token(nbf=time.time() + 60), "ImmatureSignature"),
        (lambda: token(iat=time.time() + 60), "ImmatureSignature"),
        (lambda: token(aud="other"), "InvalidAudience"),
        (lambda: token(aud=None), "MissingRequiredClaim"),
        (lambda: token(iss="https://other.test"), "InvalidIssuer"),
        (lambda: token(iss=None), "MissingRequiredClaim"),
        (lambda: token(tenant=None), "MissingRequiredClaim"),
        (lambda: token(tenant=["acme"]), "no name that a tenant can have"),
        (lambda: token(tenant="a b"), "no name that a tenant can have"),
        (lambda: token(tenant="x" * 129), "no name that a tenant can have"),
        (lambda: token(tenant="absent"), "absent is not listed"),
        (lambda: token(headers={}), "does not have"),
        (lambda: token(headers={"kid": "other"}), "does not have"),
        (lambda: token(headers={"kid": "RS256"}), "InvalidAlgorithm"),
        (lambda: token(key=ec.generate_private_key(ec.SECP256R1())), "InvalidSignature"),
        (lambda: token("RS256", headers={"kid": "RS256", "alg": "PS256"}), "InvalidAlgorithm"),
        (signed_with_the_public_key, "InvalidAlgorithm"),
        (lambda: forged(alg="none", kid="ES256"), "InvalidAlgorithm"),
        (lambda: forged(alg="ES256", kid="ES256", typ="x"), "InvalidSignature"),
        (lambda: forged(alg="ES256", kid=["ES256"]), "InvalidToken"),
        (lambda: forged(alg="ES256", kid="ES256", crit=["unknown"]), "InvalidToken"),
        (lambda: token()[:-4], "Error"),
        (lambda: "a.b.c", "Decode"),
        (lambda: "..", "Decode"),
        (lambda: f"{'W' * 6000}.{'W' * 900}.x", "Decode"),
    ],
)
async def test_a_bad_token_is_refused_with_its_fault(
    start_tokens: StartTokens, make: Callable[[], str], said: str
) -> None:
    """By claims, key, algorithm or shape; the token is not repeated."""
    tenants = await start_tokens()
    text = make()
    with pytest.raises(InvalidApiKey) as refused:
        tenants.authorise(bearer(text))
    assert said in refused.value.message
    assert text not in refused.value.message


async def test_a_short_key_of_the_issuer_verifies_nothing(
    issuer: JwksServer, start_tokens: StartTokens
) -> None:
    """RSA below 2048 bits is not believed, whoever publishes it."""
    short = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # noqa: S505 - that is the point
    issuer.publish(public_jwk("RS256", short))
    tenants = await start_tokens()
    with pytest.warns(jwt.InsecureKeyLengthWarning):
        text = token("RS256", key=short)
    with pytest.raises(InvalidApiKey, match="InvalidKey"):
        tenants.authorise(bearer(text))


async def test_unlisted_tenants_get_the_default_limits_where_that_is_allowed(
    start_tokens: StartTokens,
) -> None:
    """They are never trusted; another claim may name the tenant."""
    limits = LimitSettings(requests_per_minute=7)
    tenants = await start_tokens(
        allow_unlisted=True, default_limits=limits, tenant_claim="sub", listed={}
    )
    tenant = tenants.authorise(bearer(token(sub="new-one", tenant=None)))
    assert (tenant.name, tenant.is_trusted, tenant.limits) == ("new-one", False, limits)


async def test_keys_and_tokens_go_together(
    issuer: JwksServer, start_stub: StartStub, start_gateway: StartGateway, keys_file: Path
) -> None:
    """A gateway takes both; tenants of the file have tokens too, and a wrong key is no token."""
    stub = await start_stub(answer_ok)
    tenants = TenantSettings(
        keys_file=str(keys_file), jwks_url=issuer.url, issuer=ISSUER, audience=AUDIENCE
    )
    gateway = await start_gateway(quick_gateway(stub.url, tenants=tenants))
    for key in (ACME_KEY, token(), token("RS256", tenant="beta")):
        assert (await gateway.as_caller(key).ask()).status == 200
    assert (await gateway.as_caller("cr-wrong").ask()).status == 401
    assert (await gateway.as_caller(token(key=EC_KEY, tenant="absent")).ask()).status == 401
    assert issuer.num_asked == 1


async def test_tokens_wait_for_an_issuer_that_is_away(
    issuer: JwksServer, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """The gateway starts, and says 503 and when to come again."""
    issuer.status = 500
    stub = await start_stub(answer_ok)
    tenants = TenantSettings(
        jwks_url=issuer.url, issuer=ISSUER, audience=AUDIENCE, allow_unlisted=True
    )
    gateway = (await start_gateway(quick_gateway(stub.url, tenants=tenants))).as_caller(token())
    away = await gateway.ask()
    assert (away.status, away.error["code"]) == (503, "authentication_unavailable")
    assert int(away.headers["retry-after"]) >= 1


# --- what each sees ------------------------------------------------------------------------------
@pytest.fixture
async def fleet(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    keys_file: Path,
) -> Gateway:
    """A gateway with keys over one replica; a Cartridge for all, and one for each tenant."""
    put_cartridge(store, "open")
    put_cartridge(store, "of-acme", seed=1, readers=("acme",))
    put_cartridge(store, "of-beta", seed=2, readers=("beta",))
    replicas = await start_replicas(start_replica, 1, store, redis_url)
    tenants = TenantSettings(keys_file=str(keys_file))
    return await start_fleet(
        start_gateway,
        replicas,
        store,
        redis_url,
        tenants=tenants,
        residency=ResidencySettings(),
    )


async def test_each_tenant_sees_and_uses_its_own(fleet: Gateway) -> None:
    """In the list, in requests and in the dry run."""
    for key, name, other in ((ACME_KEY, "acme", "beta"), (BETA_KEY, "beta", "acme")):
        caller = fleet.as_caller(key)
        listed = (await caller.get("/v1/cartridges")).json["data"]
        assert [entry["id"] for entry in listed] == [f"of-{name}@1", "open@1"]
        assert (await caller.ask(f"of-{name}@1")).status == 200
        assert (await caller.ask("open@1")).status == 200
        for path in (CHAT, EXPLAIN):
            body = chat_body(cartridge_ids=[f"of-{other}@1"])
            assert (await caller.post(path, body)).error["code"] == "cartridge_not_found"


async def test_one_document_has_a_prefix_for_each_tenant(fleet: Gateway) -> None:
    """KV of a Cartridge that both may read is not shared between them."""
    digests = [
        (await fleet.as_caller(key).ask("open@1")).headers["x-cartridge-digest"]
        for key in (ACME_KEY, BETA_KEY, ACME_KEY)
    ]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("path", [CHAT, EXPLAIN])
async def test_a_hidden_cartridge_is_answered_as_an_absent_one(
    fleet: Gateway, store: LocalStore, path: str
) -> None:
    """The same status, headers and body, but for the name that was asked for.

    By alias and by digest; alone, or beside one that the tenant may use.
    """
    caller = fleet.as_caller(ACME_KEY)
    hidden_digest, absent_digest = store.resolve("of-beta@1"), sha256_digest(b"absent")
    for hidden, absent in (("of-beta@1", "of-gama@1"), (hidden_digest, absent_digest)):
        for others in ([], ["open@1"]):
            told = []
            for name in (hidden, absent):
                reply = await caller.post(path, chat_body(cartridge_ids=[*others, name]))
                assert reply.status == 404
                headers = {
                    header: "" if "request-id" in header.lower() else value
                    for header, value in reply.headers.items()
                    if header != "Date"
                }
                told.append((headers, reply.body.replace(name.encode(), b"NAME")))
            assert told[0] == told[1]


async def test_a_hidden_cartridge_takes_as_long_as_an_absent_one(store: LocalStore) -> None:
    """Medians of CPU time over many look-ups differ by less than half.

    The noise of a shared machine is that large; a look into the store or the map is ten times.
    """
    put_cartridge(store, "of-beta", readers=("beta",))
    for index in range(20):
        put_cartridge(store, f"other-{index}", seed=index + 1)
    catalog = Catalog(store, 60.0)
    await catalog.refresh()
    selector = Selector(catalog, allow_uncertified_composition=False)
    requests = [
        parse_request(Route.CHAT, json.dumps(chat_body(cartridge_ids=[name])).encode(), {})
        for name in ("of-beta@1", "of-gama@1", store.resolve("of-beta@1"), sha256_digest(b"no"))
    ]
    taken: list[list[int]] = [[] for _ in requests]
    for _ in range(60):
        for request, times in zip(requests, taken, strict=True):
            started_ns = time.process_time_ns()
            for _ in range(100):
                with contextlib.suppress(RouterError):
                    selector.select(request, "acme")
            times.append(time.process_time_ns() - started_ns)
    medians = [statistics.median(times) for times in taken]
    assert max(medians[:2]) / min(medians[:2]) < 1.5
    assert max(medians[2:]) / min(medians[2:]) < 1.5


async def test_over_http_a_hidden_cartridge_takes_as_long_as_an_absent_one(fleet: Gateway) -> None:
    """Medians of wall time over many requests, taken in turn, differ by less than half."""
    caller = fleet.as_caller(ACME_KEY)
    taken: dict[str, list[float]] = {"of-beta@1": [], "of-gama@1": []}
    for _ in range(150):
        for name, times in taken.items():
            started_s = time.perf_counter()
            assert (await caller.ask(name)).status == 404
            times.append(time.perf_counter() - started_s)
    hidden_s, absent_s = (statistics.median(times) for times in taken.values())
    assert max(hidden_s, absent_s) / min(hidden_s, absent_s) < 1.5


async def test_a_receipt_of_another_tenant_is_an_unknown_one(fleet: Gateway) -> None:
    """Who served is told to whoever asked, and nobody else learns that there was a request."""
    acme, beta = fleet.as_caller(ACME_KEY), fleet.as_caller(BETA_KEY)
    request_id = (await acme.ask("of-acme@1")).headers["x-cartridge-request-id"]
    path = f"/v1/cartridges/receipts/{request_id}"

    async def is_there() -> bool:
        return (await acme.get(path)).status == 200

    await until_true(is_there, "the receipt came")
    assert (await acme.get(path)).json["scope"] == "acme"
    foreign = await beta.get(path)
    unknown = await beta.get("/v1/cartridges/receipts/" + "0" * 32)
    assert (foreign.status, foreign.body) == (404, unknown.body)
    assert foreign.headers.keys() == unknown.headers.keys()
    assert (await fleet.get(path)).status == 401


# --- what leaves ---------------------------------------------------------------------------------
SECRET_PROMPT = "a prompt that nobody else may read"


async def raw(gateway: Gateway, data: bytes) -> bytes:
    """What the gateway answers to these bytes."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_neither_keys_nor_prompts_reach_a_log_or_a_metric(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    keys_file: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever becomes of the request: served, refused, malformed, cut off, or no HTTP at all."""
    caplog.set_level(logging.DEBUG)
    put_cartridge(store)
    replicas = await start_replicas(start_replica, 1, store)
    tenants = TenantSettings(keys_file=str(keys_file))
    gateway = await start_gateway(quick_gateway(replicas[0].url, tenants=tenants))
    message: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET_PROMPT}]}
    caller = gateway.as_caller(ACME_KEY)
    caplog.clear()
    assert (await caller.ask(**message)).status == 200
    assert (await caller.ask(SECRET_PROMPT, **message)).status == 404
    assert (await caller.ask(model=SECRET_PROMPT)).status == 404
    assert (await caller.ask(max_tokens=SECRET_PROMPT)).status == 400
    assert (await caller.ask(prompt_embeds=SECRET_PROMPT)).status == 400
    assert (await caller.post_bytes(CHAT, f'{{"{SECRET_PROMPT}'.encode())).status == 400
    assert (await caller.post(f"/v1/{ACME_KEY}", {})).status == 400
    assert (await gateway.as_caller(ACME_KEY + "x").ask(**message)).status == 401
    await replicas[0].replica.stop()
    assert (await caller.ask(**message)).status in {502, 503}
    for head in (
        f"Authorization: Bearer {ACME_KEY}\x01",
        f"X-Api-Key : {ACME_KEY}",
        f"Authorization: {ACME_KEY * 1000}",
        f"{ACME_KEY}",
    ):
        answer = await raw(gateway, f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
        assert b" 400 " in answer.partition(b"\r\n")[0]
    await raw(gateway, f"{ACME_KEY} {SECRET_PROMPT} HTTP/1.1\r\n\r\n".encode())
    assert len(caplog.records) >= 5
    logged = "\n".join(
        f"{record.getMessage()} {record.__dict__} {caplog.handler.format(record)}"
        for record in caplog.records
        if record.name.startswith("cartridge_router")
    )
    assert "BadHttpMessage" in logged
    text = logged + (await gateway.get("/metrics")).body.decode()
    for secret in (ACME_KEY, SECRET_PROMPT):
        assert secret not in text
        assert secret not in "\n".join(caplog.handler.format(record) for record in caplog.records)
