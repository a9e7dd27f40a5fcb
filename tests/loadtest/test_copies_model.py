"""Replication in the simulator: actions take effect as engines would have them."""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from cartridge_loadtest.event_heap import EventHeap
from cartridge_loadtest.fleet_simulator import FleetSettings, Outcome, at_utilisation, simulate
from cartridge_loadtest.replica_model import EngineProfile, ReplicaModel, Visit
from cartridge_loadtest.shared_link import SharedLink
from cartridge_loadtest.workloads import (
    KV_BYTES_PER_TOKEN,
    FleetRequest,
    Workload,
    cartridge,
    generated_tool_agent,
    generated_zipf,
)
from cartridge_policies.rates import TierRate
from cartridge_policies.replication import Bounds
from cartridge_proto.residency import ReplicaId, Tier

if TYPE_CHECKING:
    from cartridge_proto.digest import Digest

DOCUMENT, OTHER = cartridge("document", 1_000), cartridge("other", 1_000)
PROFILE = EngineProfile(
    dram_bytes=DOCUMENT.size_bytes,
    tiers={
        Tier.HBM: TierRate(0.0, float("inf")),
        Tier.DRAM: TierRate(0.0, KV_BYTES_PER_TOKEN * 1e9),
        Tier.NVME: TierRate(0.0, KV_BYTES_PER_TOKEN * 1_000.0),
        Tier.REMOTE: TierRate(0.0, KV_BYTES_PER_TOKEN * 500.0),
    },
)
"""A document takes 1 s from disk and 2 s from the store; memory holds one."""


class Alone:
    """One replica and what it says of its tiers, with the time."""

    def __init__(self) -> None:
        self.clock = EventHeap()
        self.said: list[tuple[float, Digest, Tier | None]] = []
        store_link = SharedLink(self.clock, 1e15)
        self.replica = ReplicaModel(
            ReplicaId("r0"),
            PROFILE,
            self.clock,
            store_link,
            lambda _, digest, tier: self.said.append((self.clock.now_s, digest, tier)),
        )

    def ask(self, *names: str) -> None:
        """A request for these documents, now."""
        held = tuple(cartridge(name, 1_000) for name in names)
        visit = Visit(FleetRequest(0, held, 1, 1), 0.0, _nothing, _nothing, _nothing)
        self.replica.send(visit)


def _nothing() -> None:
    """Nobody waits for it."""


def test_a_prefetch_brings_an_artifact_to_dram() -> None:
    """Through the link to the store, once; where it is already nothing moves."""
    alone = Alone()
    alone.clock.at(0.0, alone.replica.prefetch, DOCUMENT)
    alone.clock.at(0.5, alone.replica.prefetch, DOCUMENT)
    alone.clock.at(5.0, alone.replica.prefetch, DOCUMENT)
    alone.clock.run()
    assert alone.said == [(2.0, DOCUMENT.digest, Tier.DRAM)]
    assert alone.replica.prefetched_bytes == DOCUMENT.size_bytes
    assert alone.replica.links[Tier.REMOTE].num_bytes == DOCUMENT.size_bytes


def test_a_prefetch_waits_until_no_request_loads() -> None:
    """It begins when the load of a request has ended, and then reads from disk what is there."""
    alone = Alone()
    alone.clock.at(0.0, alone.ask, "other")
    alone.clock.at(0.5, alone.replica.prefetch, DOCUMENT)
    alone.clock.run()
    ready = {digest: at_s for at_s, digest, tier in alone.said if tier is Tier.DRAM}
    # Sharing the link, the request's would have come at 3.5, and the last byte of both at 4 too.
    assert ready[OTHER.digest] == pytest.approx(2.0)
    assert ready[DOCUMENT.digest] == pytest.approx(4.0)
    alone.clock.at(10.0, alone.replica.prefetch, OTHER)
    alone.clock.run()
    assert alone.said[-1][0] == pytest.approx(11.0)


def test_a_request_joins_a_prefetch_that_has_begun() -> None:
    """It waits for the rest of it and moves nothing itself."""
    alone = Alone()
    alone.clock.at(0.0, alone.replica.prefetch, DOCUMENT)
    alone.clock.at(1.5, alone.ask, "document")
    alone.clock.run()
    assert alone.replica.links[Tier.REMOTE].num_bytes == DOCUMENT.size_bytes
    assert alone.replica.num_visits == 0


def test_an_evicted_artifact_is_left_on_disk() -> None:
    """Evict drops it from memory, as engines do; a dead replica does nothing."""
    alone = Alone()
    alone.clock.at(0.0, alone.replica.prefetch, DOCUMENT)
    alone.clock.at(5.0, alone.replica.evict, DOCUMENT.digest)
    alone.clock.at(6.0, alone.replica.die)
    alone.clock.at(7.0, alone.replica.prefetch, DOCUMENT)
    alone.clock.run()
    assert alone.said == [(2.0, DOCUMENT.digest, Tier.DRAM), (5.0, DOCUMENT.digest, Tier.NVME)]
    assert alone.replica.prefetched_bytes == DOCUMENT.size_bytes


def run(workload: Workload, **changed: object) -> Outcome:
    """On four replicas, prefill busy 60 % of the time."""
    settings = FleetSettings(num_replicas=4, seed=7, checks=True)
    settings = replace(settings, **changed)  # type: ignore[arg-type]
    return simulate(at_utilisation(workload, 4, 0.6, settings.profile), settings)


def test_without_replication_nothing_is_brought_ahead() -> None:
    """By default the simulator is what it was."""
    assert run(generated_tool_agent(200, seed=7)).prefetched_bytes == 0


def test_with_replication_fewer_requests_find_their_cartridges_in_the_store() -> None:
    """All end; copies come before they are asked for, within their bytes."""
    workload = generated_tool_agent(600, seed=7)
    plain, copied = run(workload), run(workload, replication=True)
    assert copied.num_ends.tolist() == [1] * 600
    assert 0 < copied.prefetched_bytes <= copied.moved_bytes[Tier.REMOTE]
    assert copied.tier_hits[Tier.REMOTE] < plain.tier_hits[Tier.REMOTE]


def test_no_bytes_no_copies() -> None:
    """Bounds of the policy are those of the run."""
    bounds = Bounds(max_copy_bytes=0)
    outcome = run(generated_zipf(200, seed=7), replication=True, replication_bounds=bounds)
    assert outcome.prefetched_bytes == 0


def test_one_seed_is_one_course() -> None:
    """With replication as without."""
    workload = generated_zipf(200, seed=7)
    one, other = (run(workload, replication=True, num_gateways=2) for _ in range(2))
    assert one.ttft_s.tolist() == other.ttft_s.tolist()
