"""The OpenAPI descriptions: every route, and no other, and answers as they are."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jsonschema
import pytest
from aiohttp import web

from cartridge_proto.stores import LocalStore
from cartridge_router.admin import Admin
from cartridge_router.api import Api
from cartridge_router.openapi import admin_description, gateway_description
from tests.loadtest.cartridge_requests import chat_body
from tests.loadtest.replica_client import StartReplica
from tests.router.fleets import start_fleet, start_replicas
from tests.router.gateway_client import (
    CHAT,
    Gateway,
    Reply,
    StartGateway,
    quick_gateway,
    until_true,
)
from tests.router.stored_cartridges import put_cartridge

_NOTHING: Any = None
"""For handlers that are never called."""
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
NOBODY = "http://127.0.0.1:9"
_PATTERN = re.compile(r"\{(\w+):[^}]*\}")
"""A variable of a path that takes only some texts: OpenAPI has no such thing."""


def served(routes: Iterable[web.AbstractRouteDef]) -> set[tuple[str, str]]:
    """Methods and paths as a description would name them."""
    found = [route for route in routes if isinstance(route, web.RouteDef)]
    return {(route.method.lower(), _PATTERN.sub(r"{\1}", route.path)) for route in found}


def described(description: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Methods and paths of a description."""
    return {(method, path) for path, item in description["paths"].items() for method in item}


def test_every_route_of_the_gateway_is_described() -> None:
    """What is served is described, and what is described is served."""
    assert served(Api(_NOTHING).routes()) == described(gateway_description())


def test_every_route_for_operators_is_described() -> None:
    """The same for the listener of operators."""
    assert served(Admin(_NOTHING).routes()) == described(admin_description())


async def test_it_is_served(start_gateway: StartGateway) -> None:
    """`/openapi.json` is the description, as JSON."""
    reply = await (await start_gateway(quick_gateway(NOBODY))).get("/openapi.json")
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.json == gateway_description()


def check(reply: Reply, method: str, path: str) -> None:
    """Hold an answer against the description of one operation: status, headers and body."""
    description = gateway_description()
    responses = description["paths"][path][method]["responses"]
    name = responses[str(reply.status)]["$ref"].rpartition("/")[2]
    response = description["components"]["responses"][name]
    schema = response["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator(schema | {"components": description["components"]}).validate(
        reply.json
    )
    told = {header.lower() for header in reply.headers} - {"content-type", "content-length", "date"}
    headers = {name.lower(): header for name, header in response.get("headers", {}).items()}
    assert told - {"server", "connection"} <= headers.keys()
    resolved = {
        name: description["components"]["headers"].get(name, header) if "$ref" in header else header
        for name, header in headers.items()
    }
    assert {name for name, header in resolved.items() if header.get("required")} <= told


@pytest.fixture
async def fleet(
    start_replica: StartReplica, start_gateway: StartGateway, store: LocalStore, redis_url: str
) -> Gateway:
    """A gateway over one registered replica and one Cartridge."""
    put_cartridge(store)
    clients = await start_replicas(start_replica, 1, store, redis_url)
    return await start_fleet(start_gateway, clients, store, redis_url)


async def test_answers_are_as_described(fleet: Gateway) -> None:
    """Each route of the gateway's own answers what its description says, and nothing more."""
    answered = await fleet.ask("harbour-rules@1")
    request_id = answered.headers["x-cartridge-request-id"]
    receipt = f"/v1/cartridges/receipts/{request_id}"

    async def has_receipt() -> bool:
        return (await fleet.get(receipt)).status == 200

    await until_true(has_receipt, "the receipt comes")
    await fleet.has_residents("harbour-rules@1", {"sim-0": "dram"})
    check(await fleet.get(receipt), "get", "/v1/cartridges/receipts/{request_id}")
    for path in ("/v1/models", "/v1/cartridges", "/health", "/ready", "/openapi.json"):
        reply = await fleet.get(path)
        assert reply.status == 200
        check(reply, "get", path)
    model = chat_body()["model"]
    check(await fleet.get(f"/v1/models/{model}"), "get", "/v1/models/{model}")
    explained = await fleet.post(
        "/v1/cartridges/explain", chat_body(cartridge_ids=["harbour-rules@1"])
    )
    assert explained.status == 200
    check(explained, "post", "/v1/cartridges/explain")
    check(answered, "post", CHAT)


async def test_a_path_that_no_route_takes(start_gateway: StartGateway) -> None:
    """A line feed in a path is a 404 as described, although it comes to no handler."""
    gateway = await start_gateway(quick_gateway(NOBODY))
    reply = await gateway.post("/v1/a%0Ab", {"model": "sample"})
    assert (reply.status, reply.error["code"]) == (404, "path_not_found")
    check(reply, "post", "/v1/{tail}")


@pytest.mark.parametrize("path", [CHAT, *ANTHROPIC, "/v1/cartridges/explain", "/v1/embeddings"])
@pytest.mark.parametrize(
    "fields", [{}, {"model": "other"}, {"model": 3}, {"cartridge_ids": ["absent@1"]}]
)
async def test_refusals_are_as_described(
    start_gateway: StartGateway, path: str, fields: dict[str, Any]
) -> None:
    """Each refusal has a status, headers and a shape that the route's description names."""
    gateway = await start_gateway(quick_gateway(NOBODY))
    reply = await gateway.post(path, chat_body() | fields)
    assert reply.status >= 400
    check(reply, "post", "/v1/{tail}" if path == "/v1/embeddings" else path)
