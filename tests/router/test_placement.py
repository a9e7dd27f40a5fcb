"""Placement through a whole gateway: which replica, and which refusal when there is none."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import weakref

import aiohttp
import msgspec
import pytest

from cartridge_proto.codec import seal
from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import Adapter, ConventionKind, Manifest
from cartridge_proto.residency import (
    Epoch,
    Registration,
    ReplicaId,
    ResidencyRecord,
    ResidencyState,
    Tier,
)
from cartridge_proto.stores import LocalStore
from cartridge_router.catalog import Cartridge
from cartridge_router.errors import (
    ContextTooLong,
    IncompatibleCartridge,
    NoEligibleReplica,
    UnknownModel,
)
from cartridge_router.fleet import ServedModel
from cartridge_router.placement import Placer
from cartridge_router.request import Route, parse_request
from cartridge_router.residency_map import ResidencyMap
from cartridge_router.selection import NO_CARTRIDGES, SelectedBy, Selection
from cartridge_router.settings import AdmissionSettings, PlacementSettings, ResidencySettings
from tests.loadtest.cartridge_requests import chat_body
from tests.loadtest.replica_client import Client, StartReplica, quick_settings
from tests.proto.sample_artifact import engine_of
from tests.router.fleets import fleet_of, named, start_fleet, start_replicas
from tests.router.gateway_client import (
    CHAT,
    TEXT,
    StartGateway,
    quick_gateway,
    until_true,
)
from tests.router.killable_redis import KillableRedis
from tests.router.stored_cartridges import digest_of, put_cartridge
from tests.router.stub_engine import StartStub, answer_ok

ALIAS = "harbour-rules@1"
OTHER = sha256_digest(b"other")


async def test_a_cartridge_of_another_model_is_a_409_that_names_the_field(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """What no engine of the fleet shares is named, with both values."""
    manifest = put_cartridge(store)
    identity = engine_of(manifest)
    other = msgspec.structs.replace(
        identity,
        model=msgspec.structs.replace(identity.model, config_digest=sha256_digest(b"other")),
    )
    clients = await start_replicas(start_replica, 1, store, redis_url, identity=other)
    gateway = await start_fleet(start_gateway, clients, store, redis_url)
    reply = await gateway.ask(ALIAS)
    assert (reply.status, reply.error["code"]) == (409, "cartridge_incompatible")
    assert reply.error["param"] == "cartridge_ids"
    for part in ("model.config_digest", manifest.model.config_digest, sha256_digest(b"other")):
        assert part in reply.error["message"]
    assert CHAT not in [request.path for request in clients[0].replica.requests]


async def start_misfit_and_fit(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> list[Client]:
    """Two replicas under one model name; only the second fits the Cartridge."""
    identity = engine_of(put_cartridge(store))
    other = msgspec.structs.replace(
        identity, geometry=msgspec.structs.replace(identity.geometry, num_kv_heads=4)
    )
    return [
        await start_replica(
            dataclasses.replace(
                quick_settings(store, redis_url), replica=ReplicaId(f"sim-{index}"), identity=who
            )
        )
        for index, who in enumerate([other, identity])
    ]


async def test_a_compatible_replica_that_is_away_makes_it_a_503(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """A 409 says never; while the replica that fits is only unhealthy, the answer is: later."""
    clients = await start_misfit_and_fit(start_replica, store, redis_url)
    gateway = await start_fleet(start_gateway, clients, store, redis_url)
    assert (await gateway.ask(ALIAS)).status == 200
    await clients[1].replica.stop()

    async def is_away() -> bool:
        return (await gateway.ask(ALIAS)).status == 503

    await until_true(is_away, "the replica that fits is seen to be away")
    reply = await gateway.ask(ALIAS)
    assert (reply.status, reply.error["code"]) == (503, "no_eligible_replica")
    assert "geometry.num_kv_heads" in reply.error["message"]
    assert "Retry-After" in reply.headers


async def test_a_request_goes_to_the_replica_that_fits(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """Of two replicas under one model name only the compatible one gets the Cartridge."""
    clients = await start_misfit_and_fit(start_replica, store, redis_url)
    gateway = await start_fleet(start_gateway, clients, store, redis_url)
    replies = [await gateway.ask(ALIAS) for _ in range(4)]
    assert [reply.status for reply in replies] == [200] * 4
    assert {reply.headers["x-cartridge-replica"] for reply in replies} == {"sim-1"}


async def test_cartridges_that_fill_the_context_are_a_422_with_the_numbers(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """The length of the Cartridges and the context limit are both in the message."""
    put_cartridge(store, num_tokens=99)
    clients = await start_replicas(start_replica, 1, store, redis_url, max_model_len=100)
    gateway = await start_fleet(start_gateway, clients, store, redis_url)
    reply = await gateway.ask(ALIAS)
    assert (reply.status, reply.error["code"]) == (422, "context_length_exceeded")
    assert "99" in reply.error["message"]
    assert "100" in reply.error["message"]
    assert CHAT not in [request.path for request in clients[0].replica.requests]


def place_on_one(
    session: aiohttp.ClientSession, models: dict[str, ServedModel], model: str, manifest: Manifest
) -> ReplicaId:
    """Place a request with a Cartridge on a fleet of one replica with these models."""
    fleet = fleet_of(session, {ReplicaId("r0"): "http://127.0.0.1:9"})
    for entry in fleet.replicas:
        entry.is_healthy = entry.has_extension = True
        entry.models = models
    placer = Placer(
        fleet=fleet,
        residency=ResidencyMap(
            key=None, settings=ResidencySettings(stale_after_s=1.0, fallback_after_s=1.0)
        ),
        settings=PlacementSettings(),
    )
    selection = Selection(
        (Cartridge(digest_of(manifest), manifest),),
        manifest.composition.position_layout,
        SelectedBy.EXPLICIT,
        scope="public",
    )
    request = parse_request(Route.CHAT, json.dumps({"model": model}).encode(), {})
    return placer.place(request, selection).replica


async def test_a_replica_that_names_no_models_may_serve_any(
    session: aiohttp.ClientSession, store: LocalStore
) -> None:
    """An empty model list says nothing of models and limits; the engine decides."""
    assert place_on_one(session, {}, "any", put_cartridge(store)) == "r0"


@pytest.mark.parametrize(
    ("model", "adapter", "found"),
    [
        ("legal", False, "artifact has none, legal is an adapter of sample"),
        ("sample", True, f"artifact has lora ({OTHER}), sample is a base model"),
        ("legal", True, None),
        ("sample", False, None),
    ],
)
async def test_an_adapter_takes_cartridges_of_an_adapter_and_a_base_model_others(
    session: aiohttp.ClientSession,
    store: LocalStore,
    model: str,
    adapter: bool,
    found: str | None,
) -> None:
    """Of which adapter, only the engine can see: here any will do. A misfit names the field."""
    manifest = put_cartridge(store)
    if adapter:
        made_with = msgspec.structs.replace(
            manifest.model, adapter=Adapter(name="lora", digest=OTHER)
        )
        manifest = put_cartridge(store, model=made_with)
    models = {"sample": ServedModel(4096), "legal": ServedModel(4096, parent="sample")}
    if found is None:
        assert place_on_one(session, models, model, manifest) == "r0"
        return
    with pytest.raises(IncompatibleCartridge) as refused:
        place_on_one(session, models, model, manifest)
    assert f"model.adapter: {found}" in str(refused.value)


async def test_cartridges_that_fill_an_adapters_context_are_refused(
    session: aiohttp.ClientSession, store: LocalStore
) -> None:
    """Its limit is that of its base model, which the fleet has noted beside it."""
    made_with = msgspec.structs.replace(
        put_cartridge(store).model, adapter=Adapter(name="lora", digest=OTHER)
    )
    manifest = put_cartridge(store, num_tokens=99, model=made_with)
    with pytest.raises(ContextTooLong, match="99 tokens; the context of legal holds 100"):
        place_on_one(session, {"legal": ServedModel(100, parent="sample")}, "legal", manifest)


async def test_a_prompt_that_does_not_fit_behind_the_cartridge_is_a_422(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """What only the engine can count, it refuses; its receipt brings the numbers."""
    put_cartridge(store, num_tokens=90, convention=ConventionKind.DOCUMENT)
    clients = await start_replicas(start_replica, 1, store, redis_url, max_model_len=100)
    gateway = await start_fleet(start_gateway, clients, store, redis_url)
    reply = await gateway.ask(ALIAS, path=TEXT, prompt="word " * 20)
    assert (reply.status, reply.error["code"]) == (422, "context_length_exceeded")
    assert "context_length" in reply.error["message"]
    for number in ("90", "20", "100"):
        assert number in reply.error["message"]


async def test_a_full_fleet_is_a_429_that_may_be_retried(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """At `max_in_flight` on every replica, where none may wait, it is told to come again."""
    clients = await start_replicas(start_replica, 2, None, ttft_s=60.0)
    gateway = await start_gateway(
        quick_gateway(
            *named(clients),
            placement=PlacementSettings(max_in_flight=1),
            admission=AdmissionSettings(max_queued=0),
        )
    )
    asking = [asyncio.create_task(gateway.ask()) for _ in range(2)]
    await gateway.has_metric("cartridge_router_in_flight", 2)
    # Booked one each: the two went to different replicas.
    assert [client.replica.engine.num_running for client in clients] == [1, 1]
    reply = await gateway.ask()
    assert (reply.status, reply.error["code"]) == (429, "all_replicas_saturated")
    assert reply.error["type"] == "rate_limit_error"
    assert int(reply.headers["retry-after"]) > 0
    for task in asking:
        task.cancel()
    await gateway.is_idle()


async def test_no_replica_at_all_is_a_503(start_gateway: StartGateway) -> None:
    """Without replicas every request is told to come again."""
    gateway = await start_gateway(quick_gateway())
    reply = await gateway.ask()
    assert (reply.status, reply.error["code"]) == (503, "no_eligible_replica")
    assert int(reply.headers["retry-after"]) > 0


async def test_while_the_map_is_exact_an_unregistered_replica_gets_no_cartridge(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> None:
    """A healthy engine without a lease gets plain requests only, however often it is asked."""
    put_cartridge(store)
    clients = [
        *(await start_replicas(start_replica, 1, store, redis_url)),
        *(await start_replicas(start_replica, 1, store, None)),
    ]
    gateway = await start_gateway(quick_gateway(*named(clients), store=store, redis_url=redis_url))
    await gateway.has_registered("sim-0")
    assert sorted((await gateway.get("/ready")).json["replicas"]["healthy"]) == ["sim-0", "sim-1"]
    replies = [await gateway.ask(ALIAS) for _ in range(4)]
    assert {reply.headers["x-cartridge-replica"] for reply in replies} == {"sim-0"}
    plain = [await gateway.ask() for _ in range(2)]
    assert {reply.headers["x-cartridge-replica"] for reply in plain} == {"sim-0", "sim-1"}
    await clients[0].replica.stop()
    await gateway.has_metric("cartridge_router_replica_healthy", 0, replica="sim-0")
    gone = await gateway.ask(ALIAS)
    assert (gone.status, gone.error["code"]) == (503, "no_eligible_replica")
    assert "not registered" in gone.error["message"]


async def test_without_a_map_the_extension_is_found_by_asking(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore
) -> None:
    """Without Redis Cartridges go to engines that have shown the extension, never to stock ones."""
    put_cartridge(store)
    clients = [
        *(await start_replicas(start_replica, 1, None)),
        *(await start_replicas(start_replica, 1, store)),
    ]
    gateway = await start_gateway(quick_gateway(*named(clients), store=store))
    replies = [await gateway.ask(ALIAS) for _ in range(4)]
    assert {reply.headers["x-cartridge-replica"] for reply in replies} == {"sim-1"}
    assert {reply.headers["x-cartridge-decision"] for reply in replies} == {
        "fallback-load; map=fallback"
    }
    await clients[1].replica.stop()
    await gateway.has_metric("cartridge_router_replica_healthy", 0, replica="sim-1")
    reply = await gateway.ask(ALIAS)
    assert reply.status == 503
    assert "not known to have the Cartridge extension" in reply.error["message"]


@pytest.mark.parametrize("num_cartridges", [0, 1])
async def test_when_redis_dies_requests_go_on(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    store: LocalStore,
    killable_redis: KillableRedis,
    num_cartridges: int,
) -> None:
    """Exact, degraded and fallback all serve, and say which they are; Redis back is exact again."""
    put_cartridge(store)
    clients = await start_replicas(start_replica, 2, store, killable_redis.url, lease_s=1.0)
    gateway = await start_fleet(
        start_gateway,
        clients,
        store,
        killable_redis.url,
        residency=ResidencySettings(stale_after_s=0.8, fallback_after_s=1.6),
    )

    async def is_in(mode: str) -> bool:
        names = [ALIAS] * num_cartridges
        reply = await gateway.ask(*names)
        assert reply.status == 200
        told = reply.headers["x-cartridge-decision"]
        return told.endswith(f"map={mode}") if mode != "exact" else "map=" not in told

    assert await is_in("exact")
    await asyncio.to_thread(killable_redis.kill)
    await until_true(lambda: is_in("degraded"), "degraded")
    await until_true(lambda: is_in("fallback"), "fallback")
    assert await gateway.metric("cartridge_router_residency_mode", mode="fallback") == 1
    await asyncio.to_thread(killable_redis.start)
    await until_true(lambda: is_in("exact"), "exact again")


async def test_with_replicas_alone_it_is_an_ordinary_proxy(
    start_replica: StartReplica, start_gateway: StartGateway
) -> None:
    """No Redis, no store: plain requests are served in fallback, Cartridges are unknown."""
    clients = await start_replicas(start_replica, 1, None)
    gateway = await start_gateway(quick_gateway(*named(clients)))
    reply = await gateway.ask()
    assert (reply.status, reply.headers["x-cartridge-decision"]) == (
        200,
        "fallback-load; map=fallback",
    )
    assert "x-cartridge-map-age-ms" not in reply.headers
    assert (await gateway.ask(ALIAS)).status == 404
    assert (await gateway.get("/v1/cartridges")).json["data"] == []
    # Nothing but the client's own request was asked of the engine.
    assert len(clients[0].replica.requests) == 1


async def test_a_prefix_whole_in_hbm_is_known_by_its_composition(
    session: aiohttp.ClientSession, store: LocalStore
) -> None:
    """Of two replicas with the artifact in dram, the one that has the whole prefix wins."""
    manifest = put_cartridge(store)
    cold, warm = ReplicaId("cold"), ReplicaId("warm")
    fleet = fleet_of(session, {cold: "http://127.0.0.1:9", warm: "http://127.0.0.1:10"})
    residency = ResidencyMap(
        key=None, settings=ResidencySettings(stale_after_s=60.0, fallback_after_s=60.0)
    )
    selections = [
        Selection(
            (Cartridge(digest_of(manifest), manifest),),
            manifest.composition.position_layout,
            SelectedBy.EXPLICIT,
            scope=scope,
        )
        for scope in ("public", "other")
    ]
    composition = selections[0].composition
    assert composition is not None
    for entry in fleet.replicas:
        entry.is_healthy = True
        registration = Registration(
            replica=entry.replica,
            epoch=Epoch("0" * 32),
            seq=0,
            engine=engine_of(manifest),
            engine_version="test",
            control_address=None,
        )
        rows = {digest_of(manifest): Tier.DRAM}
        if entry.replica == warm:
            rows[composition] = Tier.HBM
        records = {
            digest.encode(): seal(
                ResidencyRecord(
                    replica=entry.replica,
                    epoch=Epoch("0" * 32),
                    digest=digest,
                    tier=tier,
                    state=ResidencyState.READY,
                    size_bytes=1,
                    is_pinned=False,
                    seq=0,
                ),
                None,
            )
            for digest, tier in rows.items()
        }
        residency.put_rows(registration, records)
    residency.mark_synced()
    placer = Placer(fleet=fleet, residency=residency, settings=PlacementSettings())
    request = parse_request(Route.CHAT, b'{"model":"any"}', {})
    placements = [placer.place(request, selection) for selection in selections for _ in range(2)]
    assert {placement.replica for placement in placements[:2]} == {warm}
    tiers = [
        {candidate.replica: candidate.slowest_tier for candidate in placement.decision.ranking}
        for placement in placements
    ]
    assert tiers[0] == {warm: Tier.HBM, cold: Tier.DRAM}
    # Another scope's prefix is another composition: it shares no block.
    assert tiers[2] == {warm: Tier.DRAM, cold: Tier.DRAM}


async def test_requests_of_a_session_stay_on_one_replica(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """With a policy that keeps them together, by the client's `x-session-id`, in a dry run too."""
    stubs = [await start_stub(answer_ok) for _ in range(4)]
    gateway = await start_gateway(quick_gateway(*(stub.url for stub in stubs)))
    homes = set()
    for number in range(8):
        # Also one that is no ASCII.
        name = f"gespräch-{number}".encode().decode("latin-1")
        headers = {"x-session-id": name, "x-cartridge-policy": "session_hash"}
        replies = [await gateway.post(CHAT, chat_body(), headers) for _ in range(3)]
        dry = await gateway.post("/v1/cartridges/explain", chat_body(), headers)
        places = {reply.headers["x-cartridge-replica"] for reply in replies}
        assert places == {dry.json["placement"]["replica"]}
        homes |= places
    assert len(homes) > 1


def test_who_is_able_is_asked_again_when_the_fleet_changes(
    session: aiohttp.ClientSession,
) -> None:
    """What is remembered of one kind of request ends with each change of health or models."""
    residency = ResidencyMap(key=None, settings=ResidencySettings())
    fleet = fleet_of(session, {ReplicaId(name): f"http://{name}" for name in "ab"})
    for replica in fleet.replicas:
        replica.is_healthy = True
    placer = Placer(fleet=fleet, residency=residency, settings=PlacementSettings())
    request = parse_request(Route.CHAT, b'{"model":"any"}', {})

    def able() -> set[str]:
        ranking = placer.place(request, NO_CARTRIDGES).decision.ranking
        return {str(candidate.replica) for candidate in ranking}

    assert able() == {"a", "b"}
    fleet.note_connect_failure(fleet.replicas[0])
    assert able() == {"b"}
    fleet.add(ReplicaId("c"), "http://c")
    assert able() == {"b"}
    fleet.remove(ReplicaId("b"))
    with pytest.raises(NoEligibleReplica):
        able()


def test_refused_requests_are_not_kept(session: aiohttp.ClientSession) -> None:
    """What is remembered of who can take a request holds no request, and no unknown model."""
    residency = ResidencyMap(key=None, settings=ResidencySettings())
    fleet = fleet_of(session, {ReplicaId(name): f"http://{name}" for name in "ab"})
    served, other = fleet.replicas
    served.is_healthy = other.is_healthy = True
    served.models, other.models = {"m": ServedModel(None)}, {"n": ServedModel(None)}
    placer = Placer(fleet=fleet, residency=residency, settings=PlacementSettings())
    bodies = []
    for model in ("m", "nobody"):
        request = parse_request(Route.CHAT, b'{"model":"%b"}' % model.encode(), {})
        bodies.append(weakref.ref(request))
        with contextlib.suppress(UnknownModel):
            placer.place(request, NO_CARTRIDGES)
        del request
    gc.collect()
    assert [body() for body in bodies] == [None, None]


def test_a_ranking_outlives_a_change_of_the_fleet(session: aiohttp.ClientSession) -> None:
    """A request that waited goes where it was placed, or nowhere; never to who came meanwhile."""
    residency = ResidencyMap(key=None, settings=ResidencySettings())
    fleet = fleet_of(session, {ReplicaId(name): f"http://{name}" for name in "abc"})
    for replica in fleet.replicas:
        replica.is_healthy = True
    placer = Placer(fleet=fleet, residency=residency, settings=PlacementSettings())
    ranking = placer.place(parse_request(Route.CHAT, b'{"model":"m"}', {}), NO_CARTRIDGES)
    for name in "abc":
        fleet.remove(ReplicaId(name))
    fleet.add(ReplicaId("d"), "http://d")
    assert sorted(each.replica for each in ranking.decision.ranking) == ["a", "b", "c"]
