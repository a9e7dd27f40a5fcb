"""What the gateway learns of its replicas: rates from first tokens and receipts, and how well."""

import asyncio
import dataclasses
import json

import aiohttp
import pytest
from aiohttp import web

from cartridge_policies.never_worse import Comparison, NeverWorse
from cartridge_policies.rates import PRIORS
from cartridge_policies.types import ArtifactDemand, Candidate, CostTerm, Demand
from cartridge_proto.digest import sha256_digest
from cartridge_proto.residency import (
    Epoch,
    Receipt,
    ReceiptItem,
    ReceiptStatus,
    ReplicaId,
    Tier,
)
from cartridge_router.fleet import Fleet
from cartridge_router.observations import KNOWN_S, Observations
from cartridge_router.testing import FakeClock
from tests.loadtest.cartridge_requests import chat_body
from tests.router.fleets import fleet_of
from tests.router.gateway_client import CHAT, StartGateway, quick_gateway
from tests.router.stub_engine import StartStub

DIGEST = sha256_digest(b"one")
A = ReplicaId("a")
DEMAND = Demand("m", (), 100)
RECEIPT = Receipt(
    replica=A,
    epoch=Epoch("0" * 32),
    request_id="1" * 32,
    status=ReceiptStatus.SERVED,
    reason=None,
    detail="",
    items=[ReceiptItem(digest=DIGEST, tier=Tier.NVME)],
    num_virtual_tokens=100,
    num_reused_tokens=0,
    num_loads=1,
    loaded_bytes=100_000_000,
    load_s=2.0,
)


@pytest.fixture
def fleet(session: aiohttp.ClientSession) -> Fleet:
    """One replica."""
    return fleet_of(session, {A: "http://a"})


def predicted(seconds: float, *tiers: Tier) -> Candidate:
    """A candidate whose first token is expected in so long."""
    return Candidate(A, (CostTerm("prefill", seconds),), tiers)


def rate(fleet: Fleet) -> float:
    """Seconds that a hundred tokens are predicted to take."""
    return fleet.replicas[0].row.rates.prefill_s(100, 0)


def test_a_first_token_teaches_the_prefill_rate(fleet: Fleet) -> None:
    """And how far the prediction was off is told."""
    ratios: list[float] = []
    observations = Observations(fleet, ratios.append)
    for _ in range(5):
        with fleet.in_flight(fleet.replicas[0], DEMAND) as booking:
            observations.note_first_token(predicted(0.5), DEMAND, booking, 1.0)
    assert rate(fleet) == pytest.approx(1.0, rel=0.05)
    assert ratios == [2.0] * 5


def test_a_bound_ends_when_no_first_token_comes(fleet: Fleet) -> None:
    """Whom it refuses can teach nothing: after a slow minute all would be refused for ever."""
    clock = FakeClock()
    observations = Observations(fleet, clock=clock)

    def come(number: int, seconds: float) -> None:
        for _ in range(number):
            with fleet.in_flight(fleet.replicas[0], DEMAND) as booking:
                observations.note_first_token(predicted(0.5), DEMAND, booking, seconds)

    come(300, 2.0)
    clock.advance(KNOWN_S)
    assert observations.at_least_s(predicted(0.5)) > 1.5
    come(1, 2.0)
    clock.advance(KNOWN_S)
    assert observations.at_least_s(predicted(0.5)) > 1.5
    clock.advance(1.0)
    assert observations.at_least_s(predicted(0.5)) == 0
    come(30, 0.5)
    assert 0 < observations.at_least_s(predicted(0.5)) < 0.6


def test_a_text_teaches_its_own_residual_and_no_rate(fleet: Fleet) -> None:
    """A part of it may have been in the engine's prefix cache; Cartridges have a residual too."""
    never_worse = NeverWorse()
    ratios: list[float] = []
    observations = Observations(fleet, never_worse=never_worse, on_compared=ratios.append)
    before = rate(fleet)
    attached = Demand("m", (ArtifactDemand(DIGEST, 1_000, 100),), 100)
    comparison = Comparison(0.5, 2.0, 0.1)
    with fleet.in_flight(fleet.replicas[0], DEMAND) as booking:
        observations.note_first_token(predicted(0.5), DEMAND, booking, 1.0, is_text=True)
    learned = never_worse.fallback.mean
    assert learned > 0
    assert (never_worse.attached.mean, rate(fleet)) == (0.0, before)
    with fleet.in_flight(fleet.replicas[0], attached) as booking:
        observations.note_first_token(
            predicted(0.5, Tier.HBM), attached, booking, 1.0, comparison=comparison
        )
    assert never_worse.attached.mean == pytest.approx(learned)
    assert never_worse.fallback.mean == learned
    assert ratios == [0.5]
    # What needs no Cartridges says nothing of either.
    with fleet.in_flight(fleet.replicas[0], DEMAND) as booking:
        observations.note_first_token(predicted(0.5), DEMAND, booking, 1.0)
    assert (never_worse.attached.mean, never_worse.fallback.mean) == (learned, learned)


def test_what_ran_beside_others_teaches_nothing(fleet: Fleet) -> None:
    """Nor does what had to load first, whose load is in the time."""
    observations = Observations(fleet)
    replica = fleet.replicas[0]
    with fleet.in_flight(replica, DEMAND), fleet.in_flight(replica, DEMAND) as booking:
        observations.note_first_token(predicted(0.5), DEMAND, booking, 30.0)
    loading = dataclasses.replace(DEMAND, artifacts=(ArtifactDemand(DIGEST, 1, 1),))
    with fleet.in_flight(replica, loading) as booking:
        observations.note_first_token(predicted(0.5, Tier.REMOTE), loading, booking, 30.0)
    assert replica.row.rates == PRIORS


@pytest.mark.parametrize(
    ("changes", "is_learned"),
    [
        ({}, True),
        ({"status": ReceiptStatus.ABANDONED}, False),
        ({"num_loads": 2}, False),
        ({"num_loads": 0, "loaded_bytes": 0}, False),
        ({"replica": ReplicaId("gone")}, False),
    ],
)
def test_a_receipt_teaches_how_fast_a_tier_is(
    fleet: Fleet, changes: dict[str, object], is_learned: bool
) -> None:
    """One whole load of a replica that is there; nothing else."""
    observations = Observations(fleet)
    for _ in range(5):
        observations.note_receipt(
            Receipt(**({f: getattr(RECEIPT, f) for f in RECEIPT.__struct_fields__} | changes))
        )
    rates = fleet.replicas[0].row.rates
    if is_learned:
        assert rates.load_s(Tier.NVME, 100_000_000) <= PRIORS.load_s(Tier.REMOTE, 100_000_000)
        nvme = rates.tiers[Tier.NVME]
        assert nvme.latency_s + 1e8 / nvme.bytes_per_s == pytest.approx(2.0, rel=0.2)
    else:
        assert rates == PRIORS


def test_it_can_be_switched_off(fleet: Fleet) -> None:
    """Then priors stay, and predictions are still judged."""
    ratios: list[float] = []
    observations = Observations(fleet, ratios.append)
    observations.is_learning = False
    with fleet.in_flight(fleet.replicas[0], DEMAND) as booking:
        observations.note_first_token(predicted(0.5), DEMAND, booking, 1.0)
    observations.note_receipt(RECEIPT)
    assert (fleet.replicas[0].row.rates, ratios) == (PRIORS, [2.0])


def learn(observations: Observations, fleet: Fleet, name: str, seconds: float, count: int) -> None:
    """So many requests of one replica, each alone on it."""
    replica = fleet.find(ReplicaId(name))
    assert replica is not None
    for _ in range(count):
        with fleet.in_flight(replica, DEMAND) as booking:
            observations.note_first_token(predicted(0.5), DEMAND, booking, seconds)


def test_equal_replicas_are_predicted_alike(session: aiohttp.ClientSession) -> None:
    """What one teaches holds for those that were never asked; who is slower is known by itself."""
    fleet = fleet_of(session, {ReplicaId(name): f"http://{name}" for name in "abc"})
    observations = Observations(fleet)
    learn(observations, fleet, "a", 1.0, 3)
    seconds = {r.replica: r.row.rates.prefill_s(100, 0) for r in fleet.replicas}
    assert len(set(seconds.values())) == 1
    assert seconds[A] == pytest.approx(1.0, rel=0.1)
    for _ in range(20):
        learn(observations, fleet, "a", 1.0, 1)
        learn(observations, fleet, "b", 1.02, 1)
        learn(observations, fleet, "c", 3.0, 1)
    fast, other, slow = (r.row.rates.prefill_s(100, 0) for r in fleet.replicas)
    assert slow == pytest.approx(3.0, rel=0.15)
    assert fast == pytest.approx(1.0, rel=0.2)
    assert other == pytest.approx(1.0, rel=0.2)


def test_a_replica_that_comes_back_begins_as_the_rest(fleet: Fleet) -> None:
    """Under the same name, at another address; after new priors all begin anew."""
    observations = Observations(fleet)
    learn(observations, fleet, "a", 9.0, 3)
    fleet.add(A, "http://elsewhere")
    assert fleet.replicas[0].row.own_rates is None
    assert rate(fleet) == pytest.approx(9.0, rel=0.2)
    fleet.set_rates(dataclasses.replace(PRIORS, prefill_base_s=5.0))
    assert rate(fleet) == PRIORS.prefill_s(100, 0) - PRIORS.prefill_base_s + 5.0
    learn(observations, fleet, "a", 1.0, 3)
    assert rate(fleet) == pytest.approx(1.0, rel=0.2)


async def test_the_first_token_of_a_stream_is_what_is_learned_from(
    start_gateway: StartGateway, start_stub: StartStub
) -> None:
    """Not its head, which vLLM sends at once, nor the events in front of the token."""
    may_go_on = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"role":"assistant"}\n\n')
        await may_go_on.wait()
        await response.write(b'data: {"content":"Nine"}\n\ndata: [DONE]\n\n')
        await response.write_eof()
        return response

    stub = await start_stub(answer)
    gateway = await start_gateway(quick_gateway(stub.url))
    body = json.dumps(chat_body(stream=True)).encode()
    headers = {"Content-Type": "application/json"}
    async with gateway.session.post(gateway.url + CHAT, data=body, headers=headers) as response:
        assert b"assistant" in await response.content.readany()
        assert await gateway.metric("cartridge_router_prediction_ratio_count") == 0
        may_go_on.set()
        assert b"Nine" in await response.content.read()
    assert await gateway.metric("cartridge_router_prediction_ratio_count") == 1
