"""Prefix caches: of tenants that share engines, each finds only its own prompts."""

import json
import re
from pathlib import Path

import pytest

from cartridge_proto.composition import cache_salt
from cartridge_proto.digest import Digest
from cartridge_proto.stores import LocalStore
from cartridge_router.prefix_salts import PrefixSalts
from cartridge_router.settings import TenantSettings
from tests.router.gateway_client import CHAT, StartGateway, quick_gateway
from tests.router.keys_files import ACME_KEY, BETA_KEY, write_keys
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import StartStub, answer_ok
from tests.router.test_forwarding import ODD_BODY
from tests.router.test_routes import streaming

KEY = b"a residency key"


def tenants_of(tmp_path: Path, **fields: object) -> TenantSettings:
    """Two tenants with a key each; `fields` are those of `acme`."""
    return TenantSettings(
        keys_file=write_keys(tmp_path / "keys.yaml", {"acme": fields, "beta": {}})
    )


@pytest.mark.parametrize(
    "path",
    [
        *(CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/chat/completions/batch"),
        *("/v1/embeddings", "/v1/score", "/rerank", "/pooling", "/classify", "/v1/systemone"),
        "/v1/chat%2Fcompletions",
    ],
)
async def test_each_tenant_has_a_salt_of_its_own(
    path: str, start_stub: StartStub, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """Put behind the body's own bytes, the same each time, and telling nothing of the name."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url, tenants=tenants_of(tmp_path)), KEY)
    for key in (ACME_KEY, BETA_KEY, ACME_KEY):
        reply = await gateway.session.post(
            gateway.url + path,
            data=ODD_BODY,
            headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
        )
        assert reply.status == 200
    assert all(body.startswith(ODD_BODY[:-1] + b',"cache_salt":"') for body in stub.bodies)
    acme, beta, again = (json.loads(body)["cache_salt"] for body in stub.bodies)
    assert (again, acme != beta) == (acme, True)
    assert re.fullmatch("[0-9a-f]{64}", acme)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/new/route"])
async def test_what_takes_no_salt_gets_none(
    path: str, start_stub: StartStub, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """Nor does what the gateway does not know."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url, tenants=tenants_of(tmp_path)))
    assert (await gateway.as_caller(ACME_KEY).post_bytes(path, ODD_BODY)).status == 200
    assert stub.bodies == [ODD_BODY]


async def test_it_can_be_switched_off(
    start_stub: StartStub, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """For engines that refuse the field; the body then is the client's."""
    stub = await start_stub(answer_ok)
    tenants = TenantSettings(
        keys_file=write_keys(tmp_path / "keys.yaml"), has_own_prefix_caches=False
    )
    gateway = await start_gateway(quick_gateway(stub.url, tenants=tenants))
    assert (await gateway.as_caller(ACME_KEY).post_bytes(CHAT, ODD_BODY)).status == 200
    assert stub.bodies == [ODD_BODY]


async def test_a_client_cannot_take_another_tenants_salt(
    start_stub: StartStub, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """What one that is not trusted sends is replaced."""
    stub = await start_stub(answer_ok)
    gateway = await start_gateway(quick_gateway(stub.url, tenants=tenants_of(tmp_path)), KEY)
    beta = PrefixSalts(KEY).of("beta")
    body = {"model": "sample", "cache_salt": beta}
    assert (await gateway.as_caller(ACME_KEY).post(CHAT, body)).status == 200
    assert json.loads(stub.bodies[0])["cache_salt"] == PrefixSalts(KEY).of("acme") != beta


async def test_a_trusted_tenant_may_send_its_own(
    start_stub: StartStub, start_gateway: StartGateway, tmp_path: Path
) -> None:
    """It reaches the engine as it is; without one, or with `null`, it gets the tenant's."""
    stub = await start_stub(answer_ok)
    tenants = tenants_of(tmp_path, is_trusted=True)
    gateway = await start_gateway(quick_gateway(stub.url, tenants=tenants))
    for fields in ({"cache_salt": "mine"}, {"cache_salt": None}, {}):
        body = {"model": "sample", **fields}
        assert (await gateway.as_caller(ACME_KEY).post(CHAT, body)).status == 200
    salts = [json.loads(body)["cache_salt"] for body in stub.bodies]
    assert salts == ["mine", *[PrefixSalts(None).of("acme")] * 2]


async def test_a_cartridge_request_keeps_the_salt_of_its_composition(
    start_stub: StartStub, start_gateway: StartGateway, store: LocalStore, tmp_path: Path
) -> None:
    """Engines refuse another one, and it names the tenant already."""
    put_cartridge(store)
    stub = await start_stub(streaming(b"data: 1\n\n"))
    tenants = TenantSettings(
        keys_file=write_keys(tmp_path / "keys.yaml", {"public": {}}, {ACME_KEY: "public"}),
    )
    gateway = await start_gateway(quick_gateway(stub.url, store=store, tenants=tenants))
    reply = await gateway.as_caller(ACME_KEY).ask("harbour-rules@1", model="sample")
    assert reply.status == 200
    sent = json.loads(stub.bodies[-1])
    composition = sent["kv_transfer_params"]["cartridges"]["composition"]
    assert sent["cache_salt"] == cache_salt(Digest(composition))


def test_a_salt_depends_on_key_and_name() -> None:
    """Two gateways with one key agree; who does not know the key cannot make it."""
    assert PrefixSalts(KEY).of("acme") == PrefixSalts(KEY).of("acme")
    made = {PrefixSalts(key).of(name) for key in (KEY, None) for name in ("acme", "beta")}
    assert len(made) == 4
