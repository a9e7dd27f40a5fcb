"""Schemathesis, run over listeners of a gateway by the descriptions that it serves or ships."""

import dataclasses
import re
from pathlib import Path

import aiohttp

from cartridge_proto.residency import ReplicaId
from cartridge_proto.stores import LocalStore
from cartridge_router.admin import running_admin
from cartridge_router.app import drain_of, running_services
from cartridge_router.openapi import EXAMPLE_MODEL
from cartridge_router.roster import Source
from cartridge_router.settings import AdminSettings, TenantSettings
from tests.conformance.conftest import CLIENTS, PROGRAMS, ROOT, RunProgram, StartUrl
from tests.router.fleets import fleet_of
from tests.router.gateway_client import quick_gateway
from tests.router.keys_files import ACME_KEY, write_keys
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import StubEngine, answer_ok

CHECKS = (
    *("no_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "wrong_data_rejection"),
    *("unsupported_method", "allow_header_conformance"),
)
COMMAND = (
    *(CLIENTS / "st", "run", "--no-color", "--seed", "1", "--max-examples", "40"),
    *("--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS)),
)
HOOKS = {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(PROGRAMS)}
TOKEN = "the-token-of-the-operators"


def num_cases(said: str) -> int:
    """How many requests a run has made up."""
    found = re.search(r"(\d+) generated", said)
    assert found is not None, said
    return int(found[1])


async def test_the_gateway(
    run_program: RunProgram, start_url: StartUrl, store: LocalStore, tmp_path: Path
) -> None:
    """A thousand requests, right and wrong, get what the description says and never a 5xx."""
    put_cartridge(store)
    engine = StubEngine(answer_ok, model=EXAMPLE_MODEL)
    await engine.start()
    try:
        keys = TenantSettings(keys_file=write_keys(tmp_path / "keys.yaml"))
        url = await start_url(quick_gateway(engine.url, store=store, tenants=keys))
        login = ("--header", f"Authorization: Bearer {ACME_KEY}")
        said = await run_program(*COMMAND, f"{url}/openapi.json", *login, **HOOKS)
        assert num_cases(said) > 1000
        assert {"/v1/chat/completions", "/v1/messages"} <= {r.path for r in engine.requests}
    finally:
        await engine.stop()


async def test_the_listener_for_operators(run_program: RunProgram) -> None:
    """The same for `/admin/replicas`, over a fleet that asks none of the replicas it is told."""
    settings = quick_gateway()
    async with (
        aiohttp.ClientSession() as session,
        running_services(settings, None, drain_of(settings), None) as services,
    ):
        fleet = fleet_of(session, {ReplicaId("first"): "http://127.0.0.1:9"})
        unwatched = dataclasses.replace(services, fleet=fleet)
        async with running_admin(AdminSettings(port=0), TOKEN, unwatched, lambda _: None) as url:
            assert url is not None
            description = ROOT / "docs" / "spec" / "openapi-admin.json"
            login = ("--header", f"Authorization: Bearer {TOKEN}")
            said = await run_program(*COMMAND, description, "--url", url, *login, **HOOKS)
    assert num_cases(said) > 50
    assert any(replica.source is Source.OPERATOR for replica in fleet.replicas)
