"""The fleet simulator: small fleets worked out by hand, and what holds of all."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cartridge_loadtest.bounded_tier import BoundedTier
from cartridge_loadtest.event_heap import EventHeap
from cartridge_loadtest.fleet_simulator import (
    Failure,
    FleetSettings,
    Outcome,
    at_utilisation,
    simulate,
)
from cartridge_loadtest.gateway_model import GatewayModel, StaleMap
from cartridge_loadtest.replica_model import EngineProfile
from cartridge_loadtest.shared_link import SharedLink
from cartridge_loadtest.workloads import (
    KV_BYTES_PER_TOKEN,
    FleetRequest,
    Workload,
    cartridge,
    generated_tool_agent,
    generated_zipf,
)
from cartridge_policies import POLICIES
from cartridge_policies.loads import Load
from cartridge_policies.rates import TierRate
from cartridge_proto.digest import sha256_digest
from cartridge_proto.residency import ReplicaId, Tier

DOCUMENT = cartridge("document", 1_000)
PLAIN_LINKS = {
    Tier.HBM: TierRate(0.0, float("inf")),
    Tier.DRAM: TierRate(0.5, KV_BYTES_PER_TOKEN * 1_000.0),
    Tier.NVME: TierRate(1.0, KV_BYTES_PER_TOKEN * 1_000.0),
    Tier.REMOTE: TierRate(2.0, KV_BYTES_PER_TOKEN * 500.0),
}
"""The document takes 1 s on the links to memory and disk, 2 s from the store, after a latency."""
ROUND = EngineProfile(
    prefill_base_s=1.0,
    prefill_s_per_token=0.01,
    prefill_s_per_token2=0.0,
    step_tokens=1_000,
    decode_base_s=1.0,
    decode_s_per_request=0.5,
    decode_s_per_context_token=0.0,
    max_num_seqs=8,
    tiers=PLAIN_LINKS,
)


def run(*requests: FleetRequest, **changed: object) -> Outcome:
    """On one replica that is known exactly, unless changed."""
    given_settings = FleetSettings(
        num_replicas=1, profile=ROUND, rates_error=0.0, estimate_error=0.0, checks=True,
        store_bytes_per_s=1e15,
    )  # fmt: skip
    workload = Workload("by hand", "nothing", requests)
    return simulate(workload, replace(given_settings, **changed))  # type: ignore[arg-type]


def ask(arrival_s: float, num_output_tokens: int = 1, **changed: object) -> FleetRequest:
    """A request of 100 live tokens: 2 s of prefill."""
    return replace(FleetRequest(arrival_s, (), 100, num_output_tokens), **changed)  # type: ignore[arg-type]


def test_prefills_wait_for_one_another() -> None:
    """Two that come at once: 2 s, and 2 s more."""
    assert run(ask(0), ask(0)).ttft_s.tolist() == [2, 4]


def test_a_decoding_request_slows_prefill_and_is_slowed_by_it() -> None:
    """A decodes in 1.5 s a step from 2 s on; B's prefill takes 2 s and 0.5 s for A's step."""
    outcome = run(ask(0, 4), ask(2))
    assert outcome.ttft_s.tolist() == [2, 2.5]
    # A: its second token with B's prefill at 4.5 s, then two steps of 1.5 s alone.
    assert outcome.end_s.tolist() == pytest.approx([7.5, 4.5])


def test_slots_bound_how_many_run() -> None:
    """With one slot the second begins when the first has ended: 2 s, 3 steps of 1.5 s."""
    profile = replace(ROUND, max_num_seqs=1)
    outcome = run(ask(0, 4), ask(0, 1), profile=profile)
    assert outcome.ttft_s.tolist() == pytest.approx([2, 2 + 4.5 + 2])


def test_a_cold_cartridge_is_loaded_once_and_then_in_hbm() -> None:
    """The first waits 4 s for the store, one beside it joins that load, a later one none."""
    outcome = run(
        ask(0, cartridges=(DOCUMENT,)),
        ask(1, cartridges=(DOCUMENT,)),
        ask(100, cartridges=(DOCUMENT,)),
    )
    assert outcome.ttft_s.tolist() == pytest.approx([6, 7, 2])
    assert outcome.moved_bytes[Tier.REMOTE] == DOCUMENT.size_bytes
    assert outcome.tier_hits[Tier.HBM] == 1
    assert outcome.tier_hits[Tier.REMOTE] == 2


def test_a_text_is_taken_where_it_is_sooner() -> None:
    """4.4 s of load against 3 s for 100 tokens more; 1,000 tokens more are later than the load."""
    small = cartridge("small", 100)
    text = run(ask(0, cartridges=(small,)), with_fallback=True)
    assert (text.ttft_s.tolist(), text.fell_back.tolist()) == ([3], [True])
    assert (text.regret.tolist(), text.moved_bytes[Tier.REMOTE]) == ([0], 0)
    attached = run(ask(0, cartridges=(DOCUMENT,)), with_fallback=True)
    assert (attached.ttft_s.tolist(), attached.fell_back.tolist()) == ([6], [False])
    assert run(ask(0, cartridges=(small,))).fell_back.tolist() == [False]


def test_texts_keep_nobody_waiting() -> None:
    """While others are prefilled the Cartridge is loaded, however late that is."""
    small = cartridge("small", 100)
    outcome = run(*(ask(0) for _ in range(3)), ask(0, cartridges=(small,)), with_fallback=True)
    assert outcome.fell_back.tolist() == [False] * 4


def test_what_has_no_cartridges_regrets_none() -> None:
    """A plain request that waits longer than was counted on is not late for a Cartridge."""
    outcome = run(ask(0, 50), ask(0), ask(1))
    assert np.isnan(outcome.plain_s).all()
    assert outcome.regret.tolist() == [0, 0, 0]


def test_regret_is_against_plain_prefill_at_the_same_place() -> None:
    """A load of 4 s beats prefill of 1,000 tokens in 10 s; one of 100 tokens loses to it."""
    small = cartridge("small", 100)
    won = run(ask(0, cartridges=(DOCUMENT,)))
    assert won.plain_s.tolist() == [12]
    assert won.regret.tolist() == [0]
    lost = run(ask(0, cartridges=(small,)))
    assert lost.plain_s.tolist() == [3]
    assert lost.regret.tolist() == pytest.approx([(2 + 0.2 + 2) / 3 - 1])


def test_what_leaves_memory_is_read_from_disk() -> None:
    """Where only one fits into HBM and dram, the older one is read from nvme: 1 s and 1 s."""
    other = cartridge("other", 1_000)
    profile = replace(ROUND, kv_tokens=1_200, dram_bytes=DOCUMENT.size_bytes)
    outcome = run(
        ask(0, cartridges=(DOCUMENT,)),
        ask(50, cartridges=(other,)),
        ask(100, cartridges=(DOCUMENT,)),
        profile=profile,
    )
    assert outcome.ttft_s.tolist() == pytest.approx([6, 6, 4])
    assert outcome.tier_hits[Tier.NVME] == 1


def test_links_are_shared() -> None:
    """Two transfers of 10 bytes over 10 bytes a second: the second one comes when half is done."""
    clock = EventHeap()
    link = SharedLink(clock, 10.0)
    ends = dict[str, float]()
    for name, at_s in (("one", 0.0), ("two", 0.5)):
        clock.at(at_s, link.begin, 10, lambda name=name: ends.setdefault(name, clock.now_s))
    clock.run()
    # From 0.5 s on each gets half: the first has 5 left, the second then 5 alone.
    assert ends == pytest.approx({"one": 1.5, "two": 2.0})
    assert link.num_transfers == 0


@given(sizes=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 100)), min_size=1, max_size=20))
def test_a_shared_link_is_never_faster_than_it_is_nor_idle(
    sizes: list[tuple[float, int]],
) -> None:
    """All end, in no less time than the bytes need, and in no more after the last beginning."""
    clock = EventHeap()
    link = SharedLink(clock, 10.0)
    ends = list[float]()
    for at_s, size in sizes:
        clock.at(at_s, link.begin, size, lambda: ends.append(clock.now_s))
    clock.run()
    work_s = sum(size for _, size in sizes) / 10
    assert len(ends) == len(sizes)
    assert max(ends) >= min(at_s for at_s, _ in sizes) + work_s - 1e-6
    assert max(ends) <= max(at_s for at_s, _ in sizes) + work_s + 1e-6


@given(
    steps=st.lists(st.tuples(st.sampled_from("ptud"), st.integers(0, 5)), max_size=60),
    capacity=st.integers(0, 12),
)
def test_a_tier_keeps_what_is_in_use_and_its_bound(
    steps: list[tuple[str, int]], capacity: int
) -> None:
    """Sizes add up; only pinned entries may be more than the capacity; no pinned one goes."""
    tier = BoundedTier(capacity)
    digests = [sha256_digest(bytes([index])) for index in range(6)]
    pinned = list[int]()
    for what, index in steps:
        if what == "p":
            tier.put(digests[index], index + 1)
        elif what == "t" and digests[index] in tier:
            tier.touch(digests[index])
        elif what == "u" and digests[index] in tier:
            tier.pin(digests[index])
            pinned.append(index)
        elif what == "d" and index in pinned:
            tier.unpin(digests[index])
            pinned.remove(index)
        held = [each for each in range(6) if digests[each] in tier]
        assert tier.used == sum(each + 1 for each in held)
        assert set(pinned) <= set(held)
        assert tier.used <= capacity or all(each in pinned for each in held)


def test_a_map_tells_what_was_true_some_time_ago() -> None:
    """A change is believed after the delay; a replica that lost all is believed empty."""
    residency = StaleMap(2.0)
    replica = ReplicaId("a")
    residency.publish(0.0, replica, DOCUMENT.digest, Tier.DRAM)
    residency.catch_up(1.9)
    assert residency.ready_on(DOCUMENT.digest) == {}
    residency.publish(1.9, replica, None, None)
    residency.catch_up(2.0)
    assert residency.ready_on(DOCUMENT.digest) == {replica: Tier.DRAM}
    residency.catch_up(3.9)
    assert residency.ready_on(DOCUMENT.digest) == {}
    assert residency.num_rows == 0


def test_gateways_with_stale_maps_send_to_holders_late() -> None:
    """A map that is a minute old sends the second request to whoever is free, and copies."""
    asks = [ask(at_s, cartridges=(DOCUMENT,)) for at_s in (0, 10)]
    fresh = run(*asks, num_replicas=2)
    stale = run(*asks, num_replicas=2, map_delay_s=60.0)
    assert fresh.replica[0] == fresh.replica[1]
    assert stale.replica[0] != stale.replica[1]
    assert stale.moved_bytes[Tier.REMOTE] == 2 * fresh.moved_bytes[Tier.REMOTE]


def test_a_dead_replica_is_left_and_comes_back_cold() -> None:
    """What had no first token is answered elsewhere; what had one fails; later it loads anew."""
    asks = [
        ask(0, 1_000, cartridges=(DOCUMENT,)),
        ask(7, 1, cartridges=(DOCUMENT,)),
        ask(100, 1, cartridges=(DOCUMENT,)),
    ]
    first = run(*asks, num_replicas=2).replica[0]
    died = run(*asks, num_replicas=2, failures=(Failure(8.0, int(first), 20.0),), map_delay_s=0.0)
    assert died.num_ends.tolist() == [1, 1, 1]
    assert died.num_failed == 1
    assert died.replica[1] != first
    # It had waited one second; then 4 s of load and 2 s of prefill elsewhere.
    assert died.ttft_s[1] == pytest.approx(7)


def test_gateways_that_tell_one_another_do_not_collide() -> None:
    """Four requests of four gateways find four idle replicas, as late in a run as at its start."""
    asks = [ask(start_s + place / 10) for start_s in (1.0, 50.0) for place in range(4)]
    told = run(*asks, num_replicas=4, num_gateways=4, share_s=0.05)
    assert told.ttft_s.tolist() == pytest.approx([2.0] * len(asks))
    silent = run(*asks, num_replicas=4, num_gateways=4)
    assert silent.ttft_s.max() > 2.0


def test_a_gateway_forgets_what_others_no_longer_have() -> None:
    """What they told last is all that counts."""
    replica = ReplicaId("a")
    gateway = GatewayModel(POLICIES["cartridge_aware"](), StaleMap(0.0), {replica: ROUND.rates})
    gateway.note_others({replica: Load(pending_s=3.0)}, 0.0)
    assert gateway.busy_s(0.0)[replica][0] == pytest.approx(3.0)
    gateway.note_others({}, 1.0)
    assert gateway.busy_s(1.0)[replica][0] == 0.0


def test_what_was_planned_before_a_death_ends_nobody_after_it() -> None:
    """An answer takes as long after a failure as on a fleet that never had one."""
    long, late = ask(0.0, 1_000), ask(6.0, 1_000)
    alone = run(late)
    died = run(long, late, failures=(Failure(3.0, 0, 0.5),))
    assert died.num_failed == 1
    assert died.end_s[1] == pytest.approx(alone.end_s[0])


def test_nobody_left_is_a_refusal() -> None:
    """The only replica is away: the request ends, refused."""
    outcome = run(ask(5), failures=(Failure(1.0, 0, 100.0),))
    assert outcome.num_refused == 1
    assert outcome.num_ends.tolist() == [1]
    assert np.isnan(outcome.ttft_s).all()


def test_the_prefill_of_an_unseen_first_token_is_taken_to_end_when_predicted() -> None:
    """Answers as a whole hold no queue for ever: after its 2 s a replica counts as free again."""
    asks = [ask(at_s, 100, is_streamed=False) for at_s in (0, 0, 10)]
    outcome = run(*asks, num_replicas=2)
    assert sorted(outcome.replica[:2].tolist()) == [0, 1]
    assert outcome.ttft_s[2] == pytest.approx(2.5)


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 1_000),
    size=st.integers(1, 6),
    num_gateways=st.integers(1, 3),
    failures=st.lists(
        st.builds(Failure, st.floats(0, 5), st.integers(0, 0), st.floats(0.1, 5)), max_size=2
    ),
)
def test_every_request_ends_once(
    policy: str, seed: int, size: int, num_gateways: int, failures: list[Failure]
) -> None:
    """Whatever fails, whoever places: one end each, and nothing below zero on the way."""
    profile = replace(EngineProfile(), kv_tokens=20_000, dram_bytes=4 * 10**9, max_num_seqs=4)
    workload = at_utilisation(generated_zipf(60, seed=seed), size, 0.8, profile)
    outcome = simulate(
        workload,
        FleetSettings(
            num_replicas=size,
            policy=policy,
            profile=profile,
            num_gateways=num_gateways,
            failures=tuple(failures),
            seed=seed,
            checks=True,
        ),
    )
    assert outcome.num_ends.tolist() == [1] * 60
    num_answered = int(np.isfinite(outcome.ttft_s).sum())
    assert num_answered + outcome.num_failed + outcome.num_refused >= 60
    assert sum(outcome.tier_hits.values()) <= sum(len(r.cartridges) for r in workload.requests)


def test_a_seed_says_everything() -> None:
    """Two runs of one seed are the same to the last bit; another seed is another run."""
    workload = at_utilisation(generated_tool_agent(200, seed=3), 4, 0.7, EngineProfile())

    def ttft(seed: int) -> list[float]:
        outcome = simulate(workload, FleetSettings(num_replicas=4, num_gateways=2, seed=seed))
        return [float(each) for each in outcome.ttft_s]

    assert ttft(1) == ttft(1)
    assert ttft(1) != ttft(2)
