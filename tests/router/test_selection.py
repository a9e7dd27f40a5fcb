"""Selection through a whole gateway: which sets are found, and which field stands in the way."""

import msgspec
import pytest

from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import (
    Adapter,
    Composition,
    CompositionClass,
    ConventionKind,
    PositionLayout,
)
from cartridge_proto.stores import LocalStore
from cartridge_router.settings import CartridgeSettings
from tests.loadtest.replica_client import StartReplica
from tests.router.fleets import named, start_replicas
from tests.router.gateway_client import CHAT, TEXT, Gateway, StartGateway, quick_gateway
from tests.router.stored_cartridges import digest_of, put_cartridge


@pytest.fixture
async def clients_url(start_replica: StartReplica, store: LocalStore) -> list[str]:
    """One replica that serves the store."""
    put_cartridge(store)
    return named(await start_replicas(start_replica, 1, store))


def joint(set_id: str | None = "set-1", max_set_size: int = 2) -> Composition:
    """Trained to be read together."""
    return Composition(
        composition_class=CompositionClass.JOINT,
        set_id=set_id,
        max_set_size=max_set_size,
        position_layout=PositionLayout.SEQUENTIAL,
    )


async def gateway_of(
    start_gateway: StartGateway,
    urls: list[str],
    store: LocalStore,
    *,
    allow: bool = False,
    tenant: str = "public",
) -> Gateway:
    """A gateway over the store."""
    cartridges = CartridgeSettings(refresh_s=60.0, allow_uncertified_composition=allow)
    return await start_gateway(
        quick_gateway(*urls, store=store, cartridges=cartridges, tenant=tenant)
    )


async def test_an_unknown_and_a_hidden_cartridge_get_the_same_answer(
    start_gateway: StartGateway, clients_url: list[str], store: LocalStore
) -> None:
    """Who may not read an artifact cannot learn that it exists, by alias or by digest."""
    hidden = put_cartridge(store, "hidden", seed=1, readers=("other",))
    gateway = await gateway_of(start_gateway, clients_url, store)
    unknown_digest = sha256_digest(b"unknown")
    for known, unknown in (("hidden@1", "absent@1"), (digest_of(hidden), unknown_digest)):
        seen, absent = await gateway.ask(known), await gateway.ask(unknown)
        assert (seen.status, seen.error["code"]) == (404, "cartridge_not_found")
        assert seen.error["param"] == "cartridge_ids"
        assert seen.body == absent.body.replace(unknown.encode(), known.encode())
        told = [{name.lower() for name in reply.headers} for reply in (seen, absent)]
        assert told[0] == told[1]
    listed = (await gateway.get("/v1/cartridges")).json["data"]
    assert [entry["id"] for entry in listed] == ["harbour-rules@1"]
    other = await gateway_of(start_gateway, clients_url, store, tenant="other")
    assert (await other.ask("hidden@1")).status == 200


@pytest.mark.parametrize("name", ["", "harbour-rules", "HARBOUR-RULES@1", "../harbour-rules@1"])
async def test_a_name_is_taken_as_it_is(
    start_gateway: StartGateway, clients_url: list[str], store: LocalStore, name: str
) -> None:
    """No version is guessed, no case is folded, no path is followed."""
    gateway = await gateway_of(start_gateway, clients_url, store)
    assert (await gateway.ask(name)).status == 404


async def test_an_empty_list_asks_for_none(
    start_gateway: StartGateway, clients_url: list[str], store: LocalStore
) -> None:
    """`[]` is an ordinary request, and says that nothing was selected."""
    gateway = await gateway_of(start_gateway, clients_url, store)
    reply = await gateway.ask(cartridge_ids=[])
    assert (reply.status, reply.headers["x-cartridge-selection"]) == (200, "none")


async def test_the_same_cartridge_twice_is_a_400(
    start_gateway: StartGateway, clients_url: list[str], store: LocalStore
) -> None:
    """Also when it is named once by alias and once by digest."""
    gateway = await gateway_of(start_gateway, clients_url, store, allow=True)
    reply = await gateway.ask("harbour-rules@1", store.resolve("harbour-rules@1"))
    assert (reply.status, reply.error["param"]) == (400, "cartridge_ids")
    assert "twice" in reply.error["message"]


@pytest.mark.parametrize(
    ("convention", "path"), [(ConventionKind.SYSTEM_TURN, TEXT), (ConventionKind.DOCUMENT, CHAT)]
)
async def test_a_cartridge_of_the_other_route_is_a_409(
    start_gateway: StartGateway,
    clients_url: list[str],
    store: LocalStore,
    convention: ConventionKind,
    path: str,
) -> None:
    """A system turn does not begin a text, and raw text does not begin a chat."""
    put_cartridge(store, "wrong", seed=1, convention=convention)
    gateway = await gateway_of(start_gateway, clients_url, store)
    reply = await gateway.ask("wrong@1", path=path)
    assert (reply.status, reply.error["code"]) == (409, "cartridge_incompatible")
    assert "prompt_convention.kind" in reply.error["message"]


async def test_other_routes_take_no_cartridges(
    start_gateway: StartGateway, clients_url: list[str], store: LocalStore
) -> None:
    """Embeddings of a text behind a virtual prefix have no meaning here: a 400, not silence."""
    gateway = await gateway_of(start_gateway, clients_url, store)
    reply = await gateway.ask("harbour-rules@1", path="/v1/embeddings")
    assert (reply.status, reply.error["param"]) == (400, "cartridge_ids")


@pytest.mark.parametrize(
    ("field", "first", "second"),
    [
        ("composition.class", {}, {}),
        ("composition.set_id", {"composition": joint()}, {"composition": joint("set-2")}),
        ("composition.set_id", {"composition": joint()}, {}),
        (
            "composition.position_layout",
            {},
            {"layout": PositionLayout.SHARED_LOCAL},
        ),
    ],
)
async def test_sets_that_do_not_go_together_are_a_409_that_names_the_field(
    start_gateway: StartGateway,
    clients_url: list[str],
    store: LocalStore,
    field: str,
    first: dict[str, object],
    second: dict[str, object],
) -> None:
    """Isolated ones, those of different sets and those of different layouts are not joined."""
    put_cartridge(store, "first", seed=1, **first)  # type: ignore[arg-type]
    put_cartridge(store, "second", seed=2, **second)  # type: ignore[arg-type]
    gateway = await gateway_of(start_gateway, clients_url, store)
    reply = await gateway.ask("first@1", "second@1")
    assert (reply.status, reply.error["code"]) == (409, "cartridge_incompatible")
    assert field in reply.error["message"]
    assert (await gateway.ask("first@1")).status == 200


@pytest.mark.parametrize(
    "field", ["architecture", "config_digest", "tokenizer_digest", "weights_digest", "adapter"]
)
async def test_cartridges_of_different_models_are_a_409_that_names_the_field(
    start_gateway: StartGateway, clients_url: list[str], store: LocalStore, field: str
) -> None:
    """Every part of the model's identity counts, whatever the operator allows."""
    first = put_cartridge(store, "first", seed=1)
    value: object = "Other" if field == "architecture" else sha256_digest(b"other")
    if field == "adapter":
        value = Adapter(name="lora", digest=sha256_digest(b"other"))
    other = msgspec.structs.replace(first.model, **{field: value})
    put_cartridge(store, "second", seed=2, model=other)
    gateway = await gateway_of(start_gateway, clients_url, store, allow=True)
    reply = await gateway.ask("first@1", "second@1")
    assert (reply.status, reply.error["code"]) == (409, "cartridge_incompatible")
    assert f"model.{field}" in reply.error["message"]


async def test_the_name_of_an_adapter_is_a_label(
    start_gateway: StartGateway, clients_url: list[str], store: LocalStore
) -> None:
    """Two Cartridges of one adapter go together, whatever its builders called it."""
    for seed, name in enumerate(["first", "second"], start=1):
        manifest = put_cartridge(store, name, seed=seed)
        adapter = Adapter(name=f"lora-{name}", digest=sha256_digest(b"adapter"))
        model = msgspec.structs.replace(manifest.model, adapter=adapter)
        put_cartridge(store, name, seed=seed, model=model)
    gateway = await gateway_of(start_gateway, clients_url, store, allow=True)
    reply = await gateway.ask("first@1", "second@1")
    # They go together; that the simulated replica serves no adapter is another matter.
    assert "do not go together" not in reply.error["message"]
    assert "model.adapter: artifact has lora-first" in reply.error["message"]


async def test_the_operator_may_allow_isolated_sets(
    start_gateway: StartGateway, clients_url: list[str], store: LocalStore
) -> None:
    """Then they are served, and marked as uncertified."""
    put_cartridge(store, "second", seed=2)
    gateway = await gateway_of(start_gateway, clients_url, store, allow=True)
    reply = await gateway.ask("harbour-rules@1", "second@1")
    assert reply.status == 200
    assert reply.headers["x-cartridge-decision"].endswith("uncertified")


async def test_a_joint_set_is_certified_up_to_its_size(
    start_gateway: StartGateway, clients_url: list[str], store: LocalStore
) -> None:
    """Two of a set trained for two are joined without permission; three are a 409."""
    for index in range(3):
        put_cartridge(store, f"part-{index}", seed=index + 1, composition=joint())
    gateway = await gateway_of(start_gateway, clients_url, store)
    pair = await gateway.ask("part-0@1", "part-2@1")
    assert (pair.status, "uncertified" in pair.headers["x-cartridge-decision"]) == (200, False)
    three = await gateway.ask("part-0@1", "part-1@1", "part-2@1")
    assert (three.status, three.error["code"]) == (409, "cartridge_incompatible")
    assert "composition.max_set_size" in three.error["message"]
    assert "2" in three.error["message"]
