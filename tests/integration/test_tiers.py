"""Tiers smaller than what is served: evicted, reloaded, pinned, drained; and what is told of it."""

from collections.abc import Iterator

import grpc
import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cartridge_proto import names
from cartridge_proto.v1 import control_pb2, control_pb2_grpc
from cartridge_router.demo.stack import MODEL_NAME
from tests.engine_ext.waiting import until
from tests.integration.fleet import BLOCK_SIZE, Fleet, document_tokens
from tests.integration.span_receiver import SpanReceiver
from tests.integration.tiny_fleet import (
    BYTES_PER_TOKEN,
    CONTROL_TOKEN,
    IDS,
    LIVE,
    NUM_BLOCKS,
    NUM_TOKENS,
    drop_prefix_cache,
    expect_ordinary,
    put_documents,
    rows,
    tier_of,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def documents(tiered: Fleet) -> None:
    """More Cartridges than any tier but the store holds."""
    put_documents(tiered, "tier", 5)


@pytest.fixture
def control(tiered: Fleet) -> Iterator[control_pb2_grpc.CartridgeControlStub]:
    """The engine's control service, by the address of its lease."""
    with grpc.insecure_channel(tiered.control_address()) as channel:
        yield control_pb2_grpc.CartridgeControlStub(channel)


METADATA = (("authorization", f"Bearer {CONTROL_TOKEN}"),)


def test_from_every_tier(tiered: Fleet) -> None:
    """Cold from the store, evicted from dram and read from nvme, warm from dram and HBM."""
    tiers = [tier_of(expect_ordinary(tiered, "tier", index)) for index in range(3)]
    assert tiers == ["remote"] * 3
    # Two fit into dram: the first has left it, and is in the folder still.
    assert rows(tiered)[tiered.store.resolve("tier-0@1")].tier == "nvme"
    drop_prefix_cache(tiered)
    assert tier_of(expect_ordinary(tiered, "tier", 0)) == "nvme"
    drop_prefix_cache(tiered)
    assert tier_of(expect_ordinary(tiered, "tier", 0)) == "dram"
    assert tier_of(expect_ordinary(tiered, "tier", 0)) == "hbm"


def test_hbm_is_told_while_the_whole_prefix_is_there(tiered: Fleet) -> None:
    """A row under the composition's identity comes with the prefix and goes with its blocks."""
    answer = tiered.complete(LIVE, ["tier-1@1"])
    composition = answer.headers[names.HEADER_DIGEST]
    until(lambda: composition in rows(tiered))
    row = rows(tiered)[composition]
    assert row.tier == "hbm"
    assert row.size_bytes == 2 * BLOCK_SIZE * BYTES_PER_TOKEN
    again = tiered.complete(LIVE, ["tier-1@1"])
    assert again.headers[names.HEADER_TIER] == "hbm"
    drop_prefix_cache(tiered)
    tiered.complete(LIVE)  # any step
    until(lambda: composition not in rows(tiered))


def test_kv_pressure_takes_prefixes_back(tiered: Fleet) -> None:
    """Ordinary requests that need the blocks evict a prefix; its row goes, and it loads again."""
    answer = tiered.complete(LIVE, ["tier-2@1"])
    composition = answer.headers[names.HEADER_DIGEST]
    until(lambda: composition in rows(tiered))
    for seed in range(NUM_BLOCKS * BLOCK_SIZE // 300 + 2):
        tiered.complete(document_tokens(300, seed=seed, ids=IDS))
    until(lambda: composition not in rows(tiered))
    assert expect_ordinary(tiered, "tier", 2)["num_reused_tokens"] == 0


def test_a_pin_in_hbm_holds_against_pressure(
    tiered: Fleet, control: control_pb2_grpc.CartridgeControlStub
) -> None:
    """Pinned through the control service while the engine is idle; let go again."""
    answer = tiered.complete(LIVE, ["tier-3@1"])
    composition = answer.headers[names.HEADER_DIGEST]
    until(lambda: composition in rows(tiered))
    pin = control_pb2.PinRequest(
        digest=composition, owner="test", tier=control_pb2.TIER_HBM, deadline_ms=30_000
    )
    control.Pin(pin, metadata=METADATA)
    until(lambda: rows(tiered)[composition].is_pinned)
    for seed in range(NUM_BLOCKS * BLOCK_SIZE // 300 + 2):
        tiered.complete(document_tokens(300, seed=seed, ids=IDS))
    assert rows(tiered)[composition].tier == "hbm"
    assert expect_ordinary(tiered, "tier", 3)["num_reused_tokens"] == 2 * BLOCK_SIZE
    unpin = control_pb2.UnpinRequest(digest=composition, owner="test", tier=control_pb2.TIER_HBM)
    control.Unpin(unpin, metadata=METADATA)
    until(lambda: not rows(tiered)[composition].is_pinned)


def test_the_control_service_wants_its_token(
    control: control_pb2_grpc.CartridgeControlStub,
) -> None:
    """Without it nothing is told or done."""
    with pytest.raises(grpc.RpcError) as refused:
        control.Describe(control_pb2.DescribeRequest())
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    described = control.Describe(control_pb2.DescribeRequest(), metadata=METADATA)
    assert described.ready


def test_what_answers_its_probe_wrongly_is_shown(
    tiered: Fleet, control: control_pb2_grpc.CartridgeControlStub
) -> None:
    """A quarantined artifact is refused, named in Describe with the reason, and counted."""
    manifest = tiered.store.read_manifest(tiered.store.resolve("tier-0@1"))
    first = manifest.probe.steps[0]
    wrong = msgspec.structs.replace(first, token_id=0, top=[(0, -0.1)])
    assert first.token_id != 0
    probe = msgspec.structs.replace(manifest.probe, steps=[wrong, *manifest.probe.steps[1:]])
    tiered.put_manifest(msgspec.structs.replace(manifest, name="wrong-probe", probe=probe))
    body = {
        "model": MODEL_NAME,
        "prompt": LIVE,
        "max_tokens": 1,
        names.FIELD_CARTRIDGE_IDS: ["wrong-probe@1"],
    }
    assert tiered.post("/v1/completions", body).status_code == 409
    described = control.Describe(control_pb2.DescribeRequest(), metadata=METADATA)
    reasons = {found.digest: found.reason for found in described.quarantined}
    assert "expected 0" in reasons[tiered.store.resolve("wrong-probe@1")]
    tiered.complete(LIVE)  # vLLM carries counts with its steps
    assert tiered.metric(names.METRIC_ENGINE_QUARANTINED + "{") >= 1


def test_a_drained_replica_gets_no_cartridges(
    tiered: Fleet, control: control_pb2_grpc.CartridgeControlStub
) -> None:
    """The gateway stops sending them there; ordinary requests go on; resumed, all is as before."""
    control.Drain(control_pb2.DrainRequest(deadline_ms=10_000), metadata=METADATA)
    request = {"model": MODEL_NAME, "prompt": LIVE, "max_tokens": 1}

    def status(cartridge_ids: list[str]) -> int:
        body = {**request, names.FIELD_CARTRIDGE_IDS: cartridge_ids}
        return tiered.post("/v1/completions", body).status_code

    until(lambda: status(["tier-0@1"]) == 503)
    assert status([]) == 200
    control.Resume(control_pb2.ResumeRequest(), metadata=METADATA)
    until(lambda: status(["tier-0@1"]) == 200)


def test_hints_of_a_request_are_followed(tiered: Fleet) -> None:
    """An envelope in `kv_transfer_params` brings an artifact to dram beside the request."""
    digest = tiered.store.resolve("tier-4@1")
    action = {
        "action_id": "1",
        "action_type": "cartridge.prefetch",
        "action_version": "1.0",
        "payload": {"digest": digest, "priority": 5},
    }
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
    body = {
        "model": MODEL_NAME,
        "prompt": LIVE,
        "max_tokens": 1,
        names.FIELD_KV_TRANSFER_PARAMS: {names.FIELD_KV_HINTS: envelope},
    }
    response = tiered.client.post(f"{tiered.engine_url}/v1/completions", json=body)
    assert response.status_code == 200
    until(lambda: rows(tiered)[digest].tier == "dram" if digest in rows(tiered) else False)


def test_metrics_beside_vllms_own(tiered: Fleet) -> None:
    """Requests by tier, loads, tiers' bytes and refusals are on the engine's `/metrics`."""
    expect_ordinary(tiered, "tier", 0)
    assert tiered.metric(names.METRIC_ENGINE_REQUESTS + "_total") > 0
    assert tiered.metric(names.METRIC_ENGINE_TOKENS + "_total") >= NUM_TOKENS
    assert tiered.metric(names.METRIC_ENGINE_LOAD_SECONDS + "_count") > 0
    assert tiered.metric(names.METRIC_ENGINE_LEFT + "_total") > 0
    assert tiered.metric(names.METRIC_ENGINE_HINTS + "_total") > 0
    assert 0 < tiered.metric(f'{names.METRIC_ENGINE_RESIDENT_BYTES}{{engine="0",') < 10e9


def test_a_span_in_the_clients_trace(tiered: Fleet, spans: SpanReceiver) -> None:
    """The engine's span of the prefix is in the trace that the client began, with its numbers."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    request = {
        "model": MODEL_NAME,
        "prompt": LIVE,
        "max_tokens": 1,
        names.FIELD_CARTRIDGE_IDS: ["tier-1@1"],
    }
    response = tiered.client.post(
        f"{tiered.gateway_url}/v1/completions",
        json=request,
        headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
    )
    assert response.status_code == 200

    def found() -> list[Span]:
        return [span for span in spans.of_trace(trace_id) if span.name == names.SPAN_PREFIX]

    until(lambda: bool(found()))
    (span,) = found()
    numbers = {item.key: item.value for item in span.attributes}
    assert numbers[names.ATTRIBUTE_NUM_TOKENS].int_value == NUM_TOKENS
    assert (
        numbers[names.ATTRIBUTE_COMPOSITION].string_value == response.headers[names.HEADER_DIGEST]
    )
    assert span.start_time_unix_nano < span.end_time_unix_nano
