"""Bookings of several gateways: told, counted, forgotten; and who is not believed."""

import asyncio
from collections.abc import Mapping

import aiohttp
import msgspec
import pytest

from cartridge_policies.loads import IDLE, Booking
from cartridge_policies.types import ArtifactDemand, Demand
from cartridge_proto.codec import seal
from cartridge_proto.digest import sha256_digest
from cartridge_proto.loads import MAX_LOADING_TOLD, MAX_REPLICAS_TOLD, GatewayLoads
from cartridge_proto.residency import ReplicaId, Tier
from cartridge_router.roster import Source
from cartridge_router.settings import PlacementSettings, Settings
from cartridge_router.shared_loads import FORGET_S, MAX_GATEWAYS, TELL_AGAIN_S, SharedLoads
from cartridge_router.testing import FakeClock
from tests.router.fleets import fleet_of
from tests.router.gateway_client import CHAT, StartGateway, quick_gateway, until_true
from tests.router.stub_engine import StartStub, answer_ok, never_answer

KEY = b"the residency key of these tests"
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
DIGEST = sha256_digest(b"an artifact")
DEMAND = Demand("m", (ArtifactDemand(DIGEST, 1 << 30, 1000),), 100)


class Teller:
    """One gateway's half: its fleet, and what it tells and hears."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        clock: FakeClock,
        names: tuple[ReplicaId, ...] = (R0, R1),
        key: bytes | None = KEY,
    ) -> None:
        self.rejected: list[str] = []
        self.clock = clock
        self.fleet = fleet_of(session, dict.fromkeys(names, "http://127.0.0.1:1"))
        self.shared = SharedLoads(
            url="redis://127.0.0.1:1",
            key=key,
            fleet=self.fleet,
            is_on=True,
            on_rejected=self.rejected.append,
            clock=clock,
        )

    def book(self, replica: ReplicaId = R0) -> Booking:
        """A request goes there."""
        found = self.fleet.find(replica)
        assert found is not None
        tiers = {DIGEST: Tier.REMOTE}
        return self.fleet.loads.book(found.row, DEMAND, tiers=tiers, now_s=self.clock())

    def others(self, replica: ReplicaId = R0) -> int:
        """Requests that others have there, as far as it knows."""
        found = self.fleet.find(replica)
        assert found is not None
        return found.row.others.num_in_flight

    def tell(self, *listeners: "Teller") -> list[bytes]:
        """Say what there is to say, to some."""
        messages = self.shared.messages()
        for message in messages:
            for listener in listeners:
                listener.shared.take(message)
        return messages


@pytest.fixture
def clock() -> FakeClock:
    """Both gateways' clock."""
    return FakeClock()


@pytest.fixture
async def pair(session: aiohttp.ClientSession, clock: FakeClock) -> tuple[Teller, Teller]:
    """Two gateways that have heard of each other."""
    one, other = Teller(session, clock), Teller(session, clock)
    one.tell(other)
    other.tell(one)
    one.tell(other)
    return one, other


async def test_a_booking_is_told_and_so_is_its_end(
    pair: tuple[Teller, Teller], clock: FakeClock
) -> None:
    """Its work and its load count at the other gateway too, until they are over."""
    one, other = pair
    booking = one.book()
    one.tell(other)
    found = other.fleet.find(R0)
    assert found is not None
    load = found.row.others
    assert (load.num_in_flight, load.num_pending, load.pending_tokens) == (1, 1, 100)
    assert load.pending_s == pytest.approx(booking.work_s)
    assert load.pending_bytes == {Tier.REMOTE: 1 << 30}
    assert other.fleet.loads.loading(DIGEST)[found.row] == pytest.approx(booking.loaded_s)
    assert other.others(R1) == 0
    booking.note_first_token(clock())
    one.tell(other)
    assert (found.row.others.num_in_flight, found.row.others.num_pending) == (1, 0)
    assert not other.fleet.loads.loading(DIGEST)
    booking.end()
    one.tell(other)
    assert found.row.others.num_in_flight == 0


async def test_what_does_not_change_is_not_told_at_once(
    pair: tuple[Teller, Teller], clock: FakeClock
) -> None:
    """But now and then, so that a lost message mends itself."""
    one, other = pair
    one.book()
    assert len(one.tell()) == 1
    assert one.tell(other) == []
    assert other.others() == 0
    clock.advance(TELL_AGAIN_S)
    one.tell(other)
    assert other.others() == 1


async def test_alone_it_is_silent_but_for_a_sign_of_life(
    session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    """Who is not heard by anybody saves the work; who comes is told all that runs."""
    one = Teller(session, clock)
    assert len(one.tell()) == 1
    one.book()
    assert one.tell() == []
    newcomer = Teller(session, clock)
    newcomer.tell(one)
    one.tell(newcomer)
    assert newcomer.others() == 1


async def test_a_gateway_that_falls_silent_is_forgotten(
    pair: tuple[Teller, Teller], clock: FakeClock
) -> None:
    """It may have died with all its requests."""
    one, other = pair
    one.book()
    one.tell(other)
    clock.advance(FORGET_S - 0.1)
    other.tell()
    assert other.others() == 1
    clock.advance(TELL_AGAIN_S)
    other.tell()
    assert other.others() == 0
    assert other.fleet.loads.loading(DIGEST) == {}


async def test_others_add_up_and_their_work_goes_on(
    session: aiohttp.ClientSession, pair: tuple[Teller, Teller], clock: FakeClock
) -> None:
    """Of a word that is older, less is left."""
    one, other = pair
    third = Teller(session, clock)
    third.tell(one, other)
    one.tell(third)
    booking = one.book()
    one.tell(other)
    clock.advance(booking.work_s / 2)
    third.book()
    third.tell(other)
    found = other.fleet.find(R0)
    assert found is not None
    assert found.row.others.num_in_flight == 2
    assert found.row.others.pending_s == pytest.approx(1.5 * booking.work_s)


@pytest.mark.parametrize(
    ("key", "rejected"), [(KEY, []), (b"another key of the same length!!", ["rejected"])]
)
async def test_only_signed_messages_are_believed(
    key: bytes, rejected: list[str], session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    """Whoever can write to Redis could else drive requests away from replicas."""
    one, other = Teller(session, clock, key=key), Teller(session, clock)
    other.tell(one)
    one.book()
    one.tell(other)
    assert other.rejected == rejected
    assert other.others() == (0 if rejected else 1)


async def test_what_was_said_before_is_not_said_again(pair: tuple[Teller, Teller]) -> None:
    """A message that is played back changes nothing."""
    one, other = pair
    booking = one.book()
    old = one.tell(other)
    booking.end()
    one.tell(other)
    for message in old:
        other.shared.take(message)
    assert other.others() == 0


async def test_it_does_not_hear_itself(pair: tuple[Teller, Teller]) -> None:
    """The channel brings its own messages back."""
    one, _ = pair
    one.book()
    one.tell(one)
    assert one.others() == 0


async def test_a_replica_that_is_not_known_here_is_passed_over(
    session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    """Gateways learn of new replicas at different times."""
    one, other = Teller(session, clock, (R0, R1)), Teller(session, clock, (R1,))
    other.tell(one)
    one.book(R0)
    one.book(R1)
    one.tell(other)
    assert other.others(R1) == 1
    other.fleet.set_all(Source.SETTINGS, {R0: "http://127.0.0.1:1"})
    assert other.others(R0) == 0
    clock.advance(TELL_AGAIN_S)
    one.tell(other)
    assert other.others(R0) == 1


async def test_a_large_fleet_is_told_in_parts(
    session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    """Each message is bounded, and nothing is left out but loads beyond what one may name."""
    names = tuple(ReplicaId(f"r{index}") for index in range(MAX_REPLICAS_TOLD + 1))
    one, other = Teller(session, clock, names), Teller(session, clock, names)
    other.tell(one)
    for name in names:
        one.book(name)
    found = one.fleet.find(names[0])
    assert found is not None
    for index in range(2 * MAX_LOADING_TOLD):
        digest = sha256_digest(b"%d" % index)
        demand = Demand("m", (ArtifactDemand(digest, 1, 1),), 1)
        one.fleet.loads.book(found.row, demand, tiers={digest: Tier.REMOTE}, now_s=clock())
    assert len(one.tell(other)) == 2
    assert [other.others(name) for name in names[1:]] == [1] * MAX_REPLICAS_TOLD
    assert other.others(names[0]) == 2 * MAX_LOADING_TOLD + 1
    assert other.rejected == []


async def test_only_so_many_gateways_are_listened_to(
    session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    """A key that leaked must not fill the memory."""
    other = Teller(session, clock)
    for index in range(MAX_GATEWAYS + 3):
        message = GatewayLoads(gateway=f"{index:032x}", seq=1, loads=[])
        other.shared.take(seal(message, KEY))
    assert other.rejected == ["too_many_gateways"] * 3


async def test_switched_off_it_neither_tells_nor_counts(
    pair: tuple[Teller, Teller], clock: FakeClock
) -> None:
    """Live, as the other settings; what was counted is forgotten."""
    one, other = pair
    one.book()
    one.tell(other)
    other.shared.is_on = False
    clock.advance(TELL_AGAIN_S)
    other.book()
    assert other.tell(one) == []
    assert (one.others(), other.others()) == (0, 0)
    one.tell(other)
    assert other.others() == 0


@pytest.mark.services
@pytest.mark.parametrize("is_on", [True, False])
async def test_a_second_gateway_avoids_where_the_first_is_busy(
    is_on: bool, start_gateway: StartGateway, start_stub: StartStub, redis_url: str
) -> None:
    """Both have r0 and r1; the first one's request hangs on one of them, over a real Redis."""
    hung, _ = [await start_stub(never_answer) for _ in range(2)]
    quick = await start_stub(answer_ok)
    placement = PlacementSettings(share_loads=is_on, policy="least_loaded")

    def settings(urls: Mapping[str, str]) -> Settings:
        named = [f"{name}={url}" for name, url in urls.items()]
        return msgspec.structs.replace(
            quick_gateway(*named, redis_url=redis_url), placement=placement
        )

    first = await start_gateway(settings({"r0": hung.url}), KEY)
    second = await start_gateway(settings({"r0": quick.url, "r1": quick.url}), KEY)
    body = {"model": "sample", "messages": []}
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(first.post(CHAT, body))
        await until_true(lambda: _has_request(hung), "the first is busy")

        async def goes_to(*replicas: str) -> bool:
            replies = [await second.post(CHAT, body) for _ in range(6)]
            return {reply.headers["x-cartridge-replica"] for reply in replies} == {*replicas}

        if is_on:
            await until_true(lambda: goes_to("r1"), "the second knows")
        else:
            assert await goes_to("r0", "r1")
        waiting.cancel()


async def _has_request(stub: object) -> bool:
    return bool(getattr(stub, "num_open", 0))


def test_nothing_booked_is_nothing() -> None:
    """The sum of no gateways is what a row begins with."""
    assert IDLE + IDLE == IDLE
