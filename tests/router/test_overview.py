"""`/admin/state`: what operators are told of a gateway, who is told, and how much at most."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from cartridge_policies.types import Candidate, CostTerm, Decision, MapMode
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import PositionLayout
from cartridge_proto.residency import Registration, ReplicaId, ResidencyRecord, ResidencyState, Tier
from cartridge_router.app import drain_of, running_gateway, running_services
from cartridge_router.catalog import Cartridge
from cartridge_router.decisions import MAX_REQUESTS, LoggedRequest
from cartridge_router.demo.stack import free_port
from cartridge_router.fleet import NOTHING, ServedModel
from cartridge_router.overview import MAX_CARTRIDGES, MAX_MODELS, MAX_REPLICAS, Overview
from cartridge_router.placement import Placement
from cartridge_router.request import Route, parse_request
from cartridge_router.roster import Source
from cartridge_router.selection import SelectedBy, Selection
from cartridge_router.settings import AdminSettings, ForwardingSettings
from tests.proto.sample_artifact import engine_of, sample_artifact
from tests.router.gateway_client import Gateway, quick_gateway, until_true
from tests.router.staged_fleet import StagedFleet, staged_fleet
from tests.router.stub_engine import StartStub, answer_ok, never_answer
from tests.router.test_failover import answer_with

TOKEN = "the-token-of-the-tests"
LONG = "\x00" * 1000
"""Each of which takes six bytes in JSON."""


async def state_of(session: aiohttp.ClientSession, admin: str) -> Any:
    """The state now, not of half a second ago."""
    async with session.get(f"{admin}/admin/state") as response:
        assert response.status == 200
        return await response.json()


async def decisions_of(session: aiohttp.ClientSession, admin: str, count: int) -> Any:
    """The decisions, once there are so many that have ended."""
    found: list[dict[str, Any]] = []

    async def are_there() -> bool:
        found[:] = (await state_of(session, admin))["decisions"]["data"]
        return len(found) == count and all(row["status"] is not None for row in found)

    await until_true(are_there, f"{count} decisions")
    return found


async def test_a_decision_has_all_its_terms(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    """They add up; the chosen replica stands first; times are those of the request."""
    async with staged_fleet(tmp_path, session) as fleet:
        assert await fleet.ask("crane-manual") == 200
        (row,) = await decisions_of(session, fleet.admin, 1)
        assert row["cartridges"] == ["crane-manual@1"]
        fields = ("route", "model", "tenant", "selected_by", "replica", "reason", "map_mode")
        assert [row[field] for field in fields] == [
            *("/v1/chat/completions", "sample", "public", "explicit"),
            *("engine-2", "resident", "exact"),
        ]
        assert (row["status"], row["problem"], row["num_retries"]) == (200, None, 0)
        assert 0 < row["first_byte_s"] <= row["total_s"]
        names = [candidate["replica"] for candidate in row["candidates"]]
        assert (names[:2], set(names[2:])) == (["engine-2", "engine-0"], {"engine-1", "engine-3"})
        for candidate in row["candidates"]:
            assert sum(candidate["terms"].values()) == pytest.approx(candidate["total_s"])
        assert row["candidates"][0]["tiers"] == ["hbm"]


async def test_the_state_counts_and_maps(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    """Requests by class, in flight, the tiers of each Cartridge by replica, the hot ones first."""
    async with staged_fleet(tmp_path, session) as fleet:
        for name in ("vhf-channels", "tide-tables", "tide-tables"):
            await fleet.ask(name)
        await fleet.ask(model="absent")
        fleet.holding.update(fleet.engines)
        asking = asyncio.create_task(fleet.ask())

        async def has_counted() -> bool:
            totals = (await state_of(session, fleet.admin))["totals"]
            return bool(totals == {"requests": {"2xx": 3, "4xx": 1}, "in_flight": 1, "queued": 0})

        await until_true(has_counted, "all are counted")
        state = await state_of(session, fleet.admin)
        cartridges = state["cartridges"]
        assert cartridges["replicas"] == ["engine-0", "engine-1", "engine-2", "engine-3"]
        assert [(row["alias"], row["num_requests"]) for row in cartridges["data"][:3]] == [
            ("tide-tables@1", 2),
            ("vhf-channels@1", 1),
            ("berth-plan@1", 0),
        ]
        assert cartridges["data"][0]["tiers"] == ["hbm", "dram", None, "nvme"]
        assert (cartridges["left_out"], len(cartridges["data"])) == (0, 12)
        assert state["map"]["mode"] == "exact"
        held = {row["name"]: row["used_bytes"] for row in state["replicas"]["data"]}
        size_bytes = fleet.manifests["vhf-channels"].payload_bytes
        assert held["engine-3"]["dram"] == size_bytes
        fleet.release.set()
        assert await asking == 200


async def test_what_went_wrong_is_told(
    start_stub: StartStub, session: aiohttp.ClientSession
) -> None:
    """A retry with who answered; a client that left; what the gateway refused."""
    stubs = [await start_stub(answer_with(503)), await start_stub(answer_ok)]
    settings = quick_gateway(
        *(f"r{index}={stub.url}" for index, stub in enumerate(stubs)),
        admin=AdminSettings(port=free_port()),
        forwarding=ForwardingSettings(retry_ratio=1.0, retries_per_s=100.0),
    )
    admin = f"http://127.0.0.1:{settings.admin.port}"
    async with running_gateway(settings, None) as url:
        gateway = Gateway(session, url)
        assert (await gateway.ask()).status == 200
        assert (await gateway.ask(model="absent")).status == 404
        rows = await decisions_of(session, admin, 2)
        assert (rows[0]["status"], rows[0]["replica"], rows[0]["candidates"]) == (404, None, [])
        assert rows[0]["problem"].startswith("model_not_found: no replica serves")
        chosen = rows[1]["candidates"][0]["replica"]
        assert (rows[1]["replica"], rows[1]["num_retries"]) == ("r1", int(chosen == "r0"))
        stubs[1]._handler = never_answer
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await gateway.ask()
        rows = await decisions_of(session, admin, 3)
        assert (rows[0]["status"], rows[0]["first_byte_s"]) == (499, None)


async def test_neither_prompts_nor_keys_are_in_it(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    """Nor answers, nor headers of clients; also where a request was refused."""
    secret = "sesame-sesame-sesame"
    async with staged_fleet(tmp_path, session) as fleet:
        body: dict[str, Any] = {
            "model": "sample",
            "messages": [{"role": "user", "content": secret}],
            "user": secret,
        }
        headers = {"Authorization": f"Bearer {secret}", "x-request-id": secret}
        for extra in ({}, {"cartridge_ids": ["crane-manual@1"]}, {"model": "absent"}):
            await fleet.gateway.post("/v1/chat/completions", body | extra, headers)
        rows = await decisions_of(session, fleet.admin, 3)
        assert secret not in json.dumps(rows)
        assert secret not in json.dumps(await state_of(session, fleet.admin))


@pytest.mark.parametrize("num_replicas", [64, 200])
async def test_a_state_is_bounded(num_replicas: int) -> None:
    """1,000 Cartridges, many replicas, hostile names: below 1 MiB, and how much is left out."""
    settings = quick_gateway()
    async with running_services(settings, None, drain_of(settings), None) as services:
        names = [ReplicaId(f"{index:0128}") for index in range(num_replicas)]
        services.fleet.set_all(Source.SETTINGS, dict.fromkeys(names, f"http://{'a' * 249}"))
        base = sample_artifact()[0]
        card = msgspec.structs.replace(base.card, title=LONG)
        manifests = {
            Digest(sha256_digest(str(index).encode())): msgspec.structs.replace(
                base, name=f"{index:0127}", card=card
            )
            for index in range(1000)
        }
        snapshot = services.catalog._snapshot
        snapshot.manifests.update(manifests)
        snapshot.aliases.update({m.alias: digest for digest, m in manifests.items()})
        services.residency.mark_synced()
        for replica in services.fleet.replicas:
            replica.models = {f"{index}{LONG}": ServedModel(None) for index in range(100)}
            registration = Registration(
                replica=replica.replica,
                epoch="0" * 32,
                seq=0,
                engine=engine_of(base),
                engine_version="0" * 64,
                control_address=None,
            )
            services.residency.put_rows(registration, {})
            rows = services.residency._replicas[replica.replica]
            for digest in manifests:
                rows.put(digest, record_of(replica.replica, digest))
        log_hostile_requests(services, names, [Cartridge(d, m) for d, m in manifests.items()])
        state = Overview(services).state()
        assert len(msgspec.json.encode(state)) < 1 << 20
        num_shown = min(num_replicas, MAX_REPLICAS)
        assert len(state["replicas"]["data"]) == num_shown
        assert state["replicas"]["left_out"] == num_replicas - num_shown
        assert state["replicas"]["data"][0]["models_left_out"] == 100 - MAX_MODELS
        assert len(state["cartridges"]["data"]) == MAX_CARTRIDGES
        assert state["cartridges"]["left_out"] == 1000 - MAX_CARTRIDGES
        assert state["cartridges"]["data"][0]["tiers"] == ["remote"] * num_shown
        assert state["decisions"]["data"][0]["candidates_left_out"] == num_replicas - 8
        assert state["decisions"]["data"][0]["cartridges_left_out"] == 8


def record_of(replica: ReplicaId, digest: Digest) -> ResidencyRecord:
    """A row with the tier that has the longest name."""
    return ResidencyRecord(
        replica=replica,
        epoch="0" * 32,
        digest=digest,
        tier=Tier.REMOTE,
        state=ResidencyState.READY,
        size_bytes=1 << 40,
        is_pinned=False,
        seq=0,
    )


def log_hostile_requests(services: Any, names: list[ReplicaId], found: list[Cartridge]) -> None:
    """As many as are kept, each as long as a request can be."""
    terms = tuple(CostTerm(name, 1 / 3) for name in ("queue", "load", "prefill"))
    ranking = tuple(Candidate(name, terms, (Tier.REMOTE,) * 16) for name in names)
    placement = Placement(NOTHING, Decision(ranking, "resident"), MapMode.FALLBACK, 1 / 3, False)
    selection = Selection(
        tuple(found[:16]), PositionLayout.SEQUENTIAL, SelectedBy.EXPLICIT, scope="t" * 64
    )
    body = json.dumps({"model": LONG, "messages": []}).encode()
    parsed = parse_request(Route.CHAT, body, {})
    for _ in range(MAX_REQUESTS):
        logged = LoggedRequest("0" * 32, Route.CHAT, 0.0)
        services.decisions.add(logged, parsed, selection, "t" * 64)
        logged.place(placement, None)


async def test_only_operators_are_told(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    """With a token nobody is without it, while the page itself holds nothing; no client ever is."""
    async with staged_fleet(tmp_path, session, operators_token=TOKEN) as fleet:
        assert await status_of(session, f"{fleet.admin}/admin/state") == 401
        assert await status_of(session, f"{fleet.admin}/admin/state", Authorization=TOKEN) == 401
        for path in ("/ui", "/ui/page.js", "/ui/page.css", "/ui/icon.svg"):
            assert await status_of(session, fleet.admin + path) == 200
            assert await status_of(session, fleet.gateway.url + path) == 404
        login = {"Authorization": f"Bearer {TOKEN}"}
        assert await status_of(session, f"{fleet.admin}/admin/state", **login) == 200
        assert await status_of(session, f"{fleet.gateway.url}/admin/state", **login) == 404


async def test_no_other_site_gets_at_it(fleet_in: StagedFleet) -> None:
    """Neither by a name that leads to loopback, nor by a script, a frame or a picture."""
    session = fleet_in.gateway.session
    for path in ("/ui", "/ui/page.js", "/admin/state"):
        url = fleet_in.admin + path
        assert await status_of(session, url, Host="evil.example") == 400
        async with session.get(url) as response:
            assert response.headers["cross-origin-resource-policy"] == "same-origin"
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in response.headers
    async with session.get(f"{fleet_in.admin}/ui") as response:
        policy = response.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} < set(policy)
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["referrer-policy"] == "no-referrer"


@pytest.fixture
async def fleet_in(tmp_path: Path, session: aiohttp.ClientSession) -> Any:
    """A staged fleet."""
    async with contextlib.AsyncExitStack() as stack:
        yield await stack.enter_async_context(staged_fleet(tmp_path, session))


async def status_of(session: aiohttp.ClientSession, url: str, **headers: str) -> int:
    """Of a GET."""
    async with session.get(url, headers=headers) as response:
        await response.read()
        return response.status
