"""The log of decisions: what it keeps of a request, how much, and which Cartridges count as hot."""

import dataclasses

from cartridge_policies.loads import LoadTable
from cartridge_policies.types import Candidate, CostTerm, Decision, MapMode
from cartridge_proto.digest import sha256_digest
from cartridge_proto.residency import ReplicaId
from cartridge_router.decisions import (
    HOT_WINDOW_S,
    MAX_CANDIDATES,
    MAX_REQUESTS,
    MAX_TEXT,
    DecisionLog,
    HotCounts,
    LoggedRequest,
)
from cartridge_router.errors import NoEligibleReplica
from cartridge_router.fleet import NOTHING
from cartridge_router.forwarding import Exchange
from cartridge_router.placement import Instead, Placement
from cartridge_router.request import Route, parse_request
from cartridge_router.selection import NO_CARTRIDGES
from cartridge_router.testing import FakeClock

A, B = sha256_digest(b"a"), sha256_digest(b"b")


def placed_on(num_replicas: int) -> Placement:
    """A placement with so many candidates."""
    ranking = tuple(
        Candidate(ReplicaId(f"r{index}"), (CostTerm("queue", float(index)),), ())
        for index in range(num_replicas)
    )
    return Placement(NOTHING, Decision(ranking, "load"), MapMode.DEGRADED, 4.5, is_certified=True)


def test_it_keeps_the_last_requests_newest_first() -> None:
    """So many, whatever comes."""
    log = DecisionLog()
    parsed = parse_request(Route.CHAT, b'{"model": "sample"}', {})
    for index in range(MAX_REQUESTS + 7):
        log.add(LoggedRequest(str(index), Route.CHAT, 0.0), parsed, NO_CARTRIDGES, "public")
    kept = [logged.request_id for logged in log.requests]
    assert kept == [str(index) for index in reversed(range(7, MAX_REQUESTS + 7))]


def test_it_keeps_little_of_what_a_client_may_make_long() -> None:
    """A model's name and the words of a refusal are cut; bodies are not there at all."""
    name = "m" * 100_000
    parsed = parse_request(Route.CHAT, b'{"model": "%b", "messages": []}' % name.encode(), {})
    log, logged = DecisionLog(), LoggedRequest("1", Route.CHAT, 0.0)
    log.add(logged, parsed, NO_CARTRIDGES, "public")
    logged.refuse(NoEligibleReplica(f"nobody serves {name}"))
    assert logged.model == name[:MAX_TEXT]
    assert logged.problem is not None
    assert len(logged.problem) < MAX_TEXT + 40
    kept = [getattr(logged, field) for field in LoggedRequest.__slots__]
    assert parsed.body not in kept


def test_it_says_what_was_done_without_cartridges() -> None:
    """Before why the replica was chosen, as the client is told."""
    logged = LoggedRequest("1", Route.CHAT, 0.0)
    instead = Instead("text", "sooner", "predicted 0.1 s, with Cartridges 0.4 s")
    logged.place(dataclasses.replace(placed_on(1), instead=instead), None)
    assert logged.reason == (
        "fallback-text (predicted 0.1 s, with Cartridges 0.4 s); load; map=degraded"
    )


def test_of_a_large_fleet_it_keeps_the_best_candidates() -> None:
    """And how many there were."""
    logged = LoggedRequest("1", Route.CHAT, 0.0)
    logged.place(placed_on(4096), None)
    assert [candidate.replica for candidate in logged.candidates] == [
        f"r{index}" for index in range(MAX_CANDIDATES)
    ]
    assert (logged.num_candidates, logged.replica) == (4096, "r0")
    assert logged.reason == "load; map=degraded"


def test_the_end_says_who_answered() -> None:
    """Which is another than the chosen one after a retry."""
    logged = LoggedRequest("1", Route.CHAT, 10.0)
    logged.place(placed_on(2), None)
    exchange = Exchange({"x-cartridge-replica": "r0", "x-cartridge-decision": "load"})
    exchange.num_retries = 1
    loads = LoadTable()
    other = placed_on(2).decision.ranking[1]
    booking = loads.book(loads.add(other.replica), NOTHING, tiers={}, now_s=0.0)
    exchange.answer_from(other, booking, 10.0)
    exchange.note_first_byte()
    logged.end(200, exchange, 12.0)
    assert (logged.replica, logged.num_retries, logged.status) == ("r1", 1, 200)
    assert logged.first_byte_s == exchange.first_byte_s


def test_a_request_that_was_never_sent_has_no_replica() -> None:
    """Nor a first byte."""
    logged = LoggedRequest("1", Route.CHAT, 10.0)
    logged.end(503, Exchange({}), 12.0)
    assert (logged.replica, logged.first_byte_s, logged.status) == (None, None, 503)


def test_hot_counts_are_of_the_last_minutes() -> None:
    """What was asked for before is forgotten, and takes no room."""
    clock = FakeClock()
    hot = HotCounts(clock)
    hot.note([A, B])
    clock.advance(HOT_WINDOW_S - 1)
    hot.note([A])
    assert hot.counts == {A: 2, B: 1}
    clock.advance(2)
    assert hot.counts == {A: 1}
    for _ in range(1000):
        clock.advance(HOT_WINDOW_S / 10)
        hot.note([B])
    assert hot.counts[A] == 0
    assert len(hot._slices) <= 20
