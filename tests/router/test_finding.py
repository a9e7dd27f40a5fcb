"""Cartridges found for requests that name none, through whole gateways, with the real embedder.

Engines are simulated; the index, the int8 model and every step of the gateway are real.
"""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Card, ConventionKind, Manifest
from cartridge_proto.stores import LocalStore
from cartridge_router.errors import InvalidRequest
from cartridge_router.forwarding import Forwarder
from cartridge_router.settings import SelectionSettings, TenantSettings
from cartridge_router.shelves import Shelves
from tests.loadtest.cartridge_requests import chat_body
from tests.loadtest.replica_client import StartReplica
from tests.router.fleets import start_fleet, start_replicas
from tests.router.gateway_client import CHAT, Gateway, Reply, StartGateway, until_true
from tests.router.keys_files import ACME_KEY, BETA_KEY, write_keys
from tests.router.retrieval.town import DIRECTOR, FILM, LIBRARY, POOL
from tests.router.stored_cartridges import put_cartridge

TEXTS = {document.id: document for document in (LIBRARY, POOL, FILM, DIRECTOR)}
ASKS_LIBRARY = "How many books may a member borrow from the town library, and for how long?"
ASKS_POOL = "How many lanes does the swimming pool have?"
ASKS_NOTHING = "Translate into French: I would like two tickets to Lisbon, please."


def put_document(
    store: LocalStore, name: str, *, is_text_kept: bool = True, **fields: Any
) -> Manifest:
    """A town's paper as a Cartridge, with its card and its text."""
    document = TEXTS[name]
    manifest = put_cartridge(store, name, seed=sorted(TEXTS).index(name))
    provenance = manifest.provenance
    if is_text_kept and document.text is not None:
        digest = store.put_blob(document.text.encode())
        provenance = msgspec.structs.replace(provenance, source_digest=digest)
    card = Card(
        title=document.title,
        aliases=list(document.aliases),
        sentence=document.sentence,
        language="en",
    )
    return put_cartridge(
        store,
        name,
        seed=sorted(TEXTS).index(name),
        card=card,
        provenance=provenance,
        **fields,
    )


@pytest.fixture
def town(store: LocalStore) -> LocalStore:
    """A store with four papers."""
    for name in TEXTS:
        put_document(store, name)
    return store


async def start_town(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    **fields: Any,
) -> Gateway:
    """A gateway that selects; `selection` gives settings of that."""
    selection = {"enabled": True, "deadline_ms": 10_000, **fields.pop("selection", {})}
    clients = await start_replicas(start_replica, 2, store, redis_url)
    return await start_fleet(
        start_gateway,
        clients,
        store,
        redis_url,
        selection=SelectionSettings(**selection),
        **fields,
    )


async def ask(gateway: Gateway, text: str, headers: dict[str, str] | None = None) -> Reply:
    """One question in a chat."""
    body = chat_body(messages=[{"role": "user", "content": text}])
    return await gateway.post(CHAT, body, headers)


async def has_index(gateway: Gateway) -> None:
    """Wait until the gateway has looked its documents through."""

    async def is_ready() -> bool:
        said = (await ask(gateway, ASKS_NOTHING)).headers["x-cartridge-selection"]
        return "index=" in said

    await until_true(is_ready, "the index is made")


def found_in(reply: Reply) -> str | None:
    """Aliases that a request got."""
    assert reply.status == 200, reply.body
    return reply.headers.get("x-cartridge-ids")


async def test_a_question_gets_the_cartridge_that_answers_it(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """Found, none for what no document answers, explicit ids first, and `[]` switches it off."""
    gateway = await start_town(start_replica, start_gateway, town, redis_url)
    await has_index(gateway)
    reply = await ask(gateway, ASKS_LIBRARY)
    assert found_in(reply) == "library@1"
    how, chance, index = reply.headers["x-cartridge-selection"].split("; ")
    assert how == "semantic"
    assert float(chance.removeprefix("chance=")) > 0.5
    assert len(index.removeprefix("index=")) == 12
    assert found_in(await ask(gateway, ASKS_POOL)) == "pool@1"
    nothing = await ask(gateway, ASKS_NOTHING)
    assert found_in(nothing) is None
    assert nothing.headers["x-cartridge-selection"].startswith("none; out_of_scope; ")
    messages = [{"role": "user", "content": ASKS_LIBRARY}]
    explicit = await gateway.ask("film@1", messages=messages)
    assert (found_in(explicit), explicit.headers["x-cartridge-selection"]) == ("film@1", "explicit")
    off = await gateway.post(CHAT, chat_body(messages=messages, cartridge_ids=[]))
    assert (found_in(off), off.headers["x-cartridge-selection"]) == (None, "none")
    assert await gateway.metric("cartridge_router_searches_total", outcome="found") == 2


async def test_a_tenant_may_be_left_out(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    town: LocalStore,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """Nothing is found for it that it does not name; the others are served as before."""
    keys = write_keys(tmp_path / "keys.yaml", {"acme": {}, "beta": {"has_selection": False}})
    gateway = await start_town(
        start_replica, start_gateway, town, redis_url, tenants=TenantSettings(keys_file=keys)
    )
    acme, beta = gateway.as_caller(ACME_KEY), gateway.as_caller(BETA_KEY)
    await has_index(acme)
    assert found_in(await ask(acme, ASKS_LIBRARY)) == "library@1"
    asked = await ask(beta, ASKS_LIBRARY)
    assert (found_in(asked), asked.headers["x-cartridge-selection"]) == (None, "none")
    body = chat_body(messages=[{"role": "user", "content": ASKS_LIBRARY}])
    explained = await beta.post("/v1/cartridges/explain", body)
    assert explained.json["selection"]["how"] == "none"


async def test_the_dry_run_finds_the_same(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """`explain` says what was found and how sure that is."""
    gateway = await start_town(start_replica, start_gateway, town, redis_url)
    await has_index(gateway)
    body = chat_body(messages=[{"role": "user", "content": ASKS_POOL}])
    selection = (await gateway.post("/v1/cartridges/explain", body)).json["selection"]
    assert (selection["how"], selection["basis"][:7]) == ("semantic", "chance=")
    assert [each["alias"] for each in selection["cartridges"]] == ["pool@1"]


async def test_what_cannot_have_a_prefix_gets_none(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """A request for prompt_logprobs is not refused for a Cartridge that it never named."""
    gateway = await start_town(start_replica, start_gateway, town, redis_url)
    await has_index(gateway)
    messages = [{"role": "user", "content": ASKS_LIBRARY}]
    reply = await gateway.post(CHAT, chat_body(messages=messages, prompt_logprobs=1))
    assert found_in(reply) is None


async def test_a_short_turn_is_read_with_the_one_before(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """What only the assistant said does not count."""
    gateway = await start_town(start_replica, start_gateway, town, redis_url)
    await has_index(gateway)
    turns = [
        {"role": "user", "content": ASKS_LIBRARY},
        {"role": "assistant", "content": ASKS_POOL},
        {"role": "user", "content": [{"type": "text", "text": "And late ones?"}]},
    ]
    assert found_in(await gateway.post(CHAT, chat_body(messages=turns))) == "library@1"


async def test_a_session_keeps_its_cartridges(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """A turn that finds nothing goes on with the last ones; another session has none."""
    gateway = await start_town(start_replica, start_gateway, town, redis_url)
    await has_index(gateway)
    mine, other = {"x-session-id": "s-1"}, {"x-session-id": "s-2"}
    assert found_in(await ask(gateway, ASKS_LIBRARY, mine)) == "library@1"
    assert found_in(await ask(gateway, ASKS_NOTHING, mine)) == "library@1"
    assert found_in(await ask(gateway, ASKS_POOL, mine)) == "pool@1"
    assert found_in(await ask(gateway, ASKS_NOTHING, other)) is None
    assert await gateway.metric("cartridge_router_searches_total", outcome="kept") == 1


async def test_the_index_follows_the_catalog(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """A new Cartridge is found without a restart; of one name the last version made."""
    put_document(store, "pool")
    gateway = await start_town(start_replica, start_gateway, store, redis_url)
    await has_index(gateway)
    assert found_in(await ask(gateway, ASKS_LIBRARY)) is None
    put_document(store, "library")

    async def finds(alias: str) -> bool:
        return found_in(await ask(gateway, ASKS_LIBRARY)) == alias

    await until_true(lambda: finds("library@1"), "the new one is found")
    put_document(store, "library", version="2", created_at="2099-01-01T00:00:00Z")
    await until_true(lambda: finds("library@2"), "its new version takes its place")


async def test_without_its_text_a_cartridge_is_found_by_its_card(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """Title, aliases and sentence are enough for a question that names them."""
    put_document(store, "pool", is_text_kept=False)
    put_document(store, "library", is_text_kept=False)
    gateway = await start_town(start_replica, start_gateway, store, redis_url)
    await has_index(gateway)
    reply = await ask(gateway, "What are the prices of the swimming pool?")
    assert found_in(reply) == "pool@1"


async def test_what_one_tenant_adds_changes_nothing_for_another(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """A planted text is not found by others, and moves neither their scores nor their index."""
    put_document(store, "library")
    keys = write_keys(
        tmp_path / "keys.yaml", {"acme": {}, "beta": {}}, {ACME_KEY: "acme", BETA_KEY: "beta"}
    )
    gateway = await start_town(
        start_replica, start_gateway, store, redis_url, tenants=TenantSettings(keys_file=keys)
    )
    acme, beta = gateway.as_caller(ACME_KEY), gateway.as_caller(BETA_KEY)
    for caller in (acme, beta):
        await has_index(caller)
    before = await ask(acme, ASKS_LIBRARY)
    put_document(
        store, "pool", access=msgspec.structs.replace(
            put_document(store, "library").access, owner="beta", readers=["beta"]
        ),
    )  # fmt: skip

    async def has_pool() -> bool:
        return found_in(await ask(beta, ASKS_POOL)) == "pool@1"

    await until_true(has_pool, "its owner finds it")
    after = await ask(acme, ASKS_LIBRARY)
    for name in ("x-cartridge-selection", "x-cartridge-ids"):
        assert after.headers[name] == before.headers[name]
    assert found_in(await ask(acme, ASKS_POOL)) is None


async def test_two_that_may_not_be_joined_are_cut_to_the_first(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """Isolated artifacts are joined where the operator allows it only; the request goes on."""
    gateway = await start_town(start_replica, start_gateway, town, redis_url)
    await has_index(gateway)
    reply = await ask(gateway, "Where was the director of The Glass Orchard born?")
    assert found_in(reply) in ("film@1", "director@1")


async def test_a_found_cartridge_that_no_engine_serves_costs_nothing_but_time(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """The blob is damaged: a request that names it fails, one that did not is answered without."""
    gateway = await start_town(start_replica, start_gateway, town, redis_url)
    await has_index(gateway)
    manifest = put_document(town, "library")
    path = town.blob_path(Digest(manifest.payload[0].sha256))
    await asyncio.to_thread(path.unlink)
    named = await gateway.ask("library@1")
    assert named.status >= 400
    reply = await ask(gateway, ASKS_LIBRARY)
    assert found_in(reply) is None
    assert reply.headers["x-cartridge-selection"] == "none; unusable"
    assert "x-cartridge-digest" not in reply.headers


async def test_a_search_that_is_late_finds_nothing(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """Selection helps or is left out; it never fails a request."""
    gateway = await start_town(
        start_replica, start_gateway, town, redis_url, selection={"deadline_ms": 1}
    )

    async def is_late() -> bool:
        reply = await ask(gateway, ASKS_LIBRARY + " " * len(late))
        late.append(reply.headers["x-cartridge-selection"])
        return late[-1] == "none; late"

    late: list[str] = []
    await until_true(is_late, "a search came too late")
    assert await gateway.metric("cartridge_router_searches_total", outcome="late") == 1


async def test_the_budget_of_tokens_bounds_a_set(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """What is too long for it is left out."""
    gateway = await start_town(
        start_replica, start_gateway, town, redis_url, selection={"max_tokens": 4}
    )
    await has_index(gateway)
    reply = await ask(gateway, ASKS_LIBRARY)
    assert (found_in(reply), reply.headers["x-cartridge-selection"]) == (None, "none; unusable")


async def test_other_kinds_of_prompts_have_other_documents(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """A Cartridge that stands for raw text is not found for a chat."""
    put_cartridge(town, "library", convention=ConventionKind.DOCUMENT, seed=9)
    gateway = await start_town(start_replica, start_gateway, town, redis_url)
    await has_index(gateway)
    assert found_in(await ask(gateway, ASKS_LIBRARY)) is None


async def test_one_owner_s_version_does_not_hide_another_s(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """Nor one for another model or kind of prompt: what does not fit is left out before."""
    manifest = put_document(store, "library")
    # Simulated engines are of the model that the store has then.
    gateway = await start_town(start_replica, start_gateway, store, redis_url)
    later: dict[str, Any] = {"created_at": "2099-01-01T00:00:00Z"}
    other = msgspec.structs.replace(manifest.model, config_digest=sha256_digest(b"other"))
    put_document(store, "library", version="2", model=other, **later)
    convention = msgspec.structs.replace(
        manifest.prompt_convention, kind=ConventionKind.DOCUMENT, chat_template_digest=None
    )
    put_document(store, "library", version="3", prompt_convention=convention, **later)
    foreign = msgspec.structs.replace(manifest.access, owner="beta")
    put_document(store, "library", version="4", access=foreign, is_text_kept=False, **later)

    async def knows_all() -> bool:
        listed = (await gateway.get("/v1/cartridges")).json["data"]
        return {each["id"] for each in listed} >= {f"library@{number}" for number in range(1, 5)}

    await until_true(knows_all, "the catalog has all")
    await has_index(gateway)
    body = chat_body(messages=[{"role": "user", "content": ASKS_LIBRARY}])
    explained = await gateway.post("/v1/cartridges/explain", body)
    (first, *_) = explained.json["selection"]["cartridges"]
    assert first["alias"] in ("library@1", "library@4")


async def test_what_an_engine_cannot_do_with_a_found_cartridge_is_done_without(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    town: LocalStore,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An image, say: a 400 for who names a Cartridge, an answer for who does not."""
    gateway = await start_town(start_replica, start_gateway, town, redis_url)
    await has_index(gateway)
    relay = Forwarder.forward

    async def forward(self: Forwarder, request: Any, outgoing: Any, exchange: Any) -> Any:
        if outgoing.composition is not None:
            raise InvalidRequest("not with a Cartridge")
        return await relay(self, request, outgoing, exchange)

    monkeypatch.setattr(Forwarder, "forward", forward)
    assert (await gateway.ask("library@1")).status == 400
    reply = await ask(gateway, ASKS_LIBRARY)
    assert (found_in(reply), reply.headers["x-cartridge-selection"]) == (None, "none; unusable")


async def test_one_audience_s_trouble_is_not_the_others(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    town: LocalStore,
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An index that cannot be made, and a search that fails, cost no request and no index."""
    keys = write_keys(tmp_path / "keys.yaml")
    gateway = await start_town(
        start_replica, start_gateway, town, redis_url, tenants=TenantSettings(keys_file=keys)
    )
    make = Shelves.make

    def failing(self: Shelves, tenant: str, *others: Any) -> Any:
        if tenant == "acme":
            raise OSError("no room")
        return make(self, tenant, *others)

    monkeypatch.setattr(Shelves, "make", failing)
    assert (await ask(gateway.as_caller(ACME_KEY), ASKS_POOL)).status == 200
    await has_index(gateway.as_caller(BETA_KEY))
    assert found_in(await ask(gateway.as_caller(BETA_KEY), ASKS_POOL)) == "pool@1"
    monkeypatch.setattr("cartridge_router.retrieval.search.search", lambda *_, **__: 1 / 0)
    reply = await ask(gateway.as_caller(BETA_KEY), ASKS_POOL)
    assert (reply.status, reply.headers["x-cartridge-selection"]) == (200, "none; failed")


async def test_the_dry_run_is_not_remembered(
    start_replica: StartReplica, start_gateway: StartGateway, town: LocalStore, redis_url: str
) -> None:
    """A session goes on with what its own turns were given."""
    gateway = await start_town(start_replica, start_gateway, town, redis_url)
    await has_index(gateway)
    session = {"x-session-id": "s-9"}
    body = chat_body(messages=[{"role": "user", "content": ASKS_LIBRARY}])
    await gateway.post("/v1/cartridges/explain", body, session)
    assert found_in(await ask(gateway, ASKS_NOTHING, session)) is None
