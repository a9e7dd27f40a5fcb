"""Bad input and faults against the real engine: a clear error, nothing generated, nothing lost."""

import json
import time
from typing import Any

import grpc
import httpx
import msgspec
import pytest
import redis

from cartridge_proto import names
from cartridge_proto.codec import unseal
from cartridge_proto.composition import cache_salt
from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.residency import Registration
from cartridge_proto.v1 import control_pb2, control_pb2_grpc
from cartridge_router.catalog import Cartridge
from cartridge_router.demo.stack import MODEL_NAME
from cartridge_router.selection import SelectedBy, Selection
from tests.integration.fleet import (
    LIVE_PROMPT,
    MAX_MODEL_LEN,
    RESIDENCY_KEY,
    TOLERANCE,
    Fleet,
    document_tokens,
)

pytestmark = pytest.mark.engine


def _error(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


def _body(cartridge_ids: list[str], **extra: Any) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": LIVE_PROMPT,
        "max_tokens": 4,
        names.FIELD_CARTRIDGE_IDS: cartridge_ids,
        **extra,
    }


def _engine_body(fleet: Fleet, manifest: Manifest, digest: str, **extra: Any) -> dict[str, Any]:
    """What the gateway would send, for tests that go around it."""
    selection = Selection(
        (Cartridge(parse_digest(digest), manifest),),
        manifest.composition.position_layout,
        SelectedBy.EXPLICIT,
        scope="public",
    )
    message = selection.message(request_id="around", deadline_ms=30_000)
    assert message is not None
    return {
        "model": MODEL_NAME,
        "prompt": LIVE_PROMPT,
        "max_tokens": 4,
        names.FIELD_KV_TRANSFER_PARAMS: {names.FIELD_CARTRIDGES: msgspec.to_builtins(message)},
        names.FIELD_CACHE_SALT: cache_salt(Digest(message.composition)),
        **extra,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_flipped_bit_fails_the_request_and_only_that(fleet: Fleet, *, stream: bool) -> None:
    """One flipped bit in a blob: a clear 503, no token, and the engine serves on."""
    document = document_tokens(50, seed=600 + stream)
    name = f"flipped-{int(stream)}"
    built = fleet.put(name, document)
    path = fleet.store.blob_path(parse_digest(built.manifest.payload[0].sha256))
    good = path.read_bytes()
    bad = bytearray(good)
    bad[-100] ^= 1
    path.write_bytes(bytes(bad))
    response = fleet.post("/v1/completions", _body([f"{name}@1"], stream=stream))
    assert response.status_code == 503, response.text
    assert "corrupt_artifact" in _error(response)
    assert "choices" not in response.text
    assert fleet.complete(LIVE_PROMPT).token_ids, "the engine lives"
    path.write_bytes(good)
    ordinary = fleet.complete(document + LIVE_PROMPT)
    assert ordinary.difference(fleet.complete(LIVE_PROMPT, [f"{name}@1"])) <= TOLERANCE


def test_unknown_cartridge_is_404(fleet: Fleet) -> None:
    """A name that does not exist is 404, naming it."""
    response = fleet.post("/v1/completions", _body(["nobody@1"]))
    assert response.status_code == 404
    assert "nobody@1" in _error(response)


def test_incompatible_model_is_409_naming_the_field(fleet: Fleet) -> None:
    """An artifact of another model is refused by the gateway, and by the engine itself."""
    built = fleet.put("other-model", document_tokens(20, seed=601))
    other = msgspec.structs.replace(
        built.manifest,
        model=msgspec.structs.replace(built.manifest.model, config_digest="sha256:" + "0" * 64),
    )
    digest = fleet.store.put_manifest(other)
    fleet.store.set_alias("other-model@1", digest)
    fleet.wait_for_catalog("other-model@1", digest)
    response = fleet.post("/v1/completions", _body(["other-model@1"]))
    assert response.status_code == 409, response.text
    assert "model.config_digest" in _error(response)
    around = fleet.post(
        "/v1/completions", _engine_body(fleet, other, digest), base=fleet.engine_url
    )
    assert around.status_code == 500
    assert "choices" not in around.json()


def test_context_limit_counts_virtual_tokens(fleet: Fleet) -> None:
    """Generation stops where Cartridge, prompt and answer fill the context; longer prompts: 422.

    Only the engine knows how many tokens a prompt has, so the numbers are from its receipt.
    """
    num_tokens = MAX_MODEL_LEN - 18
    fleet.put("huge", document_tokens(num_tokens, seed=602))
    answer = fleet.complete(LIVE_PROMPT, ["huge@1"], num_new_tokens=100)
    assert len(answer.token_ids) == MAX_MODEL_LEN - num_tokens - len(LIVE_PROMPT)
    response = fleet.post("/v1/completions", {**_body(["huge@1"]), "prompt": LIVE_PROMPT * 3})
    assert response.status_code == 422, response.text
    for number in (num_tokens, 3 * len(LIVE_PROMPT), MAX_MODEL_LEN):
        assert str(number) in _error(response)
    assert fleet.complete(LIVE_PROMPT).token_ids, "the engine lives"


def test_prompt_logprobs_is_refused_by_gateway_and_engine(fleet: Fleet) -> None:
    """`prompt_logprobs` is 400 at the gateway, and fails at an engine that is asked directly."""
    built = fleet.put("no-prompt-logprobs", document_tokens(20, seed=603))
    response = fleet.post("/v1/completions", _body(["no-prompt-logprobs@1"], prompt_logprobs=1))
    assert response.status_code == 400
    assert "prompt_logprobs" in _error(response)
    body = _engine_body(fleet, built.manifest, built.digest, prompt_logprobs=1)
    around = fleet.post("/v1/completions", body, base=fleet.engine_url)
    assert around.status_code == 500, around.text
    assert "choices" not in around.json()


@pytest.mark.parametrize("fault", ["salt", "composition", "num_tokens", "scope", "digest", "junk"])
def test_engine_checks_the_gateways_claims_itself(fleet: Fleet, fault: str) -> None:
    """A message that is wrong in one place fails its request; the gateway is not believed."""
    built = fleet.put("claims", document_tokens(20, seed=604))
    body = _engine_body(fleet, built.manifest, built.digest)
    message = body[names.FIELD_KV_TRANSFER_PARAMS][names.FIELD_CARTRIDGES]
    good = fleet.post("/v1/completions", body, base=fleet.engine_url)
    assert good.status_code == 200, good.text
    other = "sha256:" + "1" * 64
    if fault == "salt":
        body[names.FIELD_CACHE_SALT] = "2" * 64
    elif fault == "composition":
        message["composition"] = other
        body[names.FIELD_CACHE_SALT] = cache_salt(Digest(other))
    elif fault == "num_tokens":
        message["items"][0]["num_tokens"] = 19
    elif fault == "scope":
        message["scope"] = "somebody-else"
    elif fault == "digest":
        message["items"][0]["digest"] = other
    else:
        body[names.FIELD_KV_TRANSFER_PARAMS][names.FIELD_CARTRIDGES] = ["junk"]
    response = fleet.post("/v1/completions", body, base=fleet.engine_url)
    assert response.status_code == 500, response.text
    assert "choices" not in response.json()


def test_self_test_door_is_closed_to_others(fleet: Fleet) -> None:
    """The self-test's field without its token has no effect on an ordinary answer."""
    body = {
        "model": MODEL_NAME,
        "prompt": LIVE_PROMPT,
        "max_tokens": 4,
        "temperature": 0,
        names.FIELD_KV_TRANSFER_PARAMS: {
            names.FIELD_SELF_TEST: {"token": "0" * 32, "num_tokens": 4}
        },
    }
    response = fleet.post("/v1/completions", body, base=fleet.engine_url)
    assert response.status_code == 200
    assert names.FIELD_RECEIPT not in response.text


def _registration(fleet: Fleet) -> Registration:
    with redis.Redis.from_url(fleet.redis_url) as client:
        data = client.get(names.lease_key("replica-0"))
    assert isinstance(data, bytes)
    return unseal(data, Registration, RESIDENCY_KEY.encode())


def test_control_service_describes_prefetches_and_evicts(fleet: Fleet) -> None:
    """A prefetched Cartridge is in dram at its first request; an evicted one is not."""
    built = fleet.put("prefetched", document_tokens(40, seed=605))
    address = _registration(fleet).control_address
    assert address is not None
    with grpc.insecure_channel(address) as channel:
        stub = control_pb2_grpc.CartridgeControlStub(channel)
        assert stub.Describe(control_pb2.DescribeRequest()).ready
        stub.Prefetch(control_pb2.PrefetchRequest(digest=built.digest, deadline_ms=30_000))
        held = {r.digest for r in stub.Describe(control_pb2.DescribeRequest()).residents}
        assert built.digest in held
        first = fleet.complete(LIVE_PROMPT, ["prefetched@1"])
        assert first.receipt is not None
        assert first.receipt["items"][0]["tier"] == "dram"
        assert stub.Evict(control_pb2.EvictRequest(digest=built.digest)).evicted
        held = {r.digest for r in stub.Describe(control_pb2.DescribeRequest()).residents}
        assert built.digest not in held
        with pytest.raises(grpc.RpcError) as caught:
            stub.Prefetch(control_pb2.PrefetchRequest(digest="sha256:" + "9" * 64))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_residency_and_receipts_reach_the_gateway(fleet: Fleet) -> None:
    """After a request the gateway lists the Cartridge as resident and has the receipt."""
    fleet.put("listed", document_tokens(30, seed=606))
    answer = fleet.complete(LIVE_PROMPT, ["listed@1"])
    assert answer.headers[names.HEADER_TIER] == "remote"
    request_id = answer.headers[names.HEADER_OWN_REQUEST_ID]
    give_up_s = time.monotonic() + 10
    receipt: dict[str, Any] = {}
    residency: list[dict[str, str]] = []
    while not (receipt and residency) and time.monotonic() < give_up_s:
        listed = fleet.client.get(f"{fleet.gateway_url}/v1/cartridges").json()["data"]
        residency = next(row["residency"] for row in listed if row["id"] == "listed@1")
        found = fleet.client.get(f"{fleet.gateway_url}/v1/cartridges/receipts/{request_id}")
        receipt = found.json() if found.status_code == 200 else {}
    assert residency == [{"replica": "replica-0", "tier": "dram"}]
    assert receipt == answer.receipt
    again = fleet.complete(LIVE_PROMPT, ["listed@1"])
    assert again.headers[names.HEADER_TIER] == "dram"
    assert again.headers[names.HEADER_DECISION] == "resident"


def test_malformed_json_is_400(fleet: Fleet) -> None:
    """A body that is not JSON is 400 in OpenAI's shape."""
    response = fleet.client.post(f"{fleet.gateway_url}/v1/completions", content=b'{"model": ')
    assert response.status_code == 400
    assert json.loads(response.text)["error"]["type"] == "invalid_request_error"
