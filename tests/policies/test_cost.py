"""The cost model: seconds that add up, and that never rise for being nearer or less loaded."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_policies.cost import costs
from cartridge_policies.rates import CHUNK_BYTES, PRIORS, ReplicaRates, TierRate
from cartridge_policies.types import ArtifactDemand, ClusterView, Demand, MapMode
from cartridge_proto.residency import TIERS_FASTEST_FIRST, ReplicaId, Tier
from tests.contracts.placement_policy import DIGESTS, Member, demands, members, view_of

ONE = Demand("m", (ArtifactDemand(DIGESTS[0], 500_000_000, 500),), 100)


@st.composite
def rates(draw: st.DrawFn) -> ReplicaRates:
    """Any rates; a faster tier need not even be faster."""
    tiers = {
        tier: TierRate(draw(st.floats(0, 10)), draw(st.floats(1e3, 1e12)), draw(st.floats(0, 0.1)))
        for tier in TIERS_FASTEST_FIRST
    }
    tiers[Tier.HBM] = TierRate(0.0, float("inf"))
    return ReplicaRates(
        prefill_base_s=draw(st.floats(0, 10)),
        prefill_s_per_token=draw(st.floats(0, 1)),
        prefill_s_per_token2=draw(st.floats(0, 1e-6)),
        queue_s_per_request=draw(st.floats(0, 10)),
        decode_s_per_context_token=draw(st.floats(0, 1e-3)),
        num_slots=draw(st.none() | st.integers(1, 8)),
        copy_s_per_byte=draw(st.floats(0, 1e-9)),
        tiers=tiers,
    )


def terms(demand: Demand, view: ClusterView) -> dict[str, float]:
    """Terms of the only replica of a view."""
    candidate = costs(demand, view, view.rows).candidate(0, view.loads.name(0))
    return {term.name: term.seconds for term in candidate.terms}


def of(demand: Demand, member: Member) -> dict[str, float]:
    """Terms of a fleet of one."""
    return terms(demand, view_of([member]))


def test_the_terms_are_those_of_the_formula() -> None:
    """A worked example: two that decode, one that prefills, 500 MB from memory, 1 GB from afar."""
    given_rates = ReplicaRates(
        prefill_base_s=0.25,
        prefill_s_per_token=0.001,
        prefill_s_per_token2=1e-6,
        queue_s_per_request=0.5,
        decode_s_per_context_token=0.01,
        step_tokens=200,
        num_slots=2,
        slot_s=3.0,
        copy_s_per_byte=1e-9,
        tiers={
            **PRIORS.tiers,
            Tier.DRAM: TierRate(0.125, 1e9),
            Tier.NVME: TierRate(0.5, 5e8),
            Tier.REMOTE: TierRate(2.0, 5e8, 0.01),
        },
    )
    demand = Demand(
        "m",
        (
            ArtifactDemand(DIGESTS[0], 500_000_000, 300),
            ArtifactDemand(DIGESTS[1], 1_000_000_000, 100),
        ),
        num_live_tokens=250,
    )
    member = Member(
        "a", num_in_flight=2, tiers={DIGESTS[0]: Tier.DRAM}, rates=given_rates, num_pending=1
    )
    found = of(demand, member)
    ahead_s = 0.25 + 100 * 0.001 + 1e-6 * 100**2
    assert found == pytest.approx(
        {
            # Three ahead on two slots: two must end first.
            "queue": ahead_s + 2 / 2 * 3.0,
            "load": 0.125 + 0.5 + 2.0 + 2.0 + 60 * 0.01,
            "prefill": 0.25 + 250 * 0.001 + 1e-6 * (650**2 - 400**2),
            # 250 tokens are two steps; in each, two requests decode and read 200 tokens.
            "interference": 2 * (2 * 0.5 + 200 * 0.01),
            "copy": 1.0,
        }
    )
    assert -(-1_000_000_000 // CHUNK_BYTES) == 60


@given(demand=demands(), member=members("a"), rate=rates(), data=st.data())
def test_a_faster_tier_never_costs_more(
    demand: Demand, member: Member, rate: ReplicaRates, data: st.DataObject
) -> None:
    """Moving one artifact to a faster tier does not raise any term, whatever was measured."""
    digest = data.draw(st.sampled_from(DIGESTS))
    held = member.tiers.get(digest, Tier.REMOTE)
    place = TIERS_FASTEST_FIRST.index(held)
    faster = data.draw(st.sampled_from(TIERS_FASTEST_FIRST[: place + 1]))
    member = replace(member, rates=rate, refusal=None)
    moved = replace(
        member, tiers={**member.tiers, **({digest: faster} if faster is not Tier.REMOTE else {})}
    )
    before, after = of(demand, member), of(demand, moved)
    for name, seconds in after.items():
        assert seconds <= before[name] * (1 + 1e-12)


@given(demand=demands(), member=members("a"), rate=rates(), more=st.integers(1, 20))
def test_more_in_flight_never_costs_less(
    demand: Demand, member: Member, rate: ReplicaRates, more: int
) -> None:
    """More that decode and more that wait raise no other term than theirs, and lower none."""
    member = replace(member, rates=rate, refusal=None)
    before = of(demand, member)
    decoding = of(demand, replace(member, num_in_flight=member.num_in_flight + more))
    waiting = of(demand, replace(member, num_pending=member.num_pending + more))
    for busier in (decoding, waiting):
        assert {k: busier[k] for k in ("load", "prefill", "copy")} == {
            k: before[k] for k in ("load", "prefill", "copy")
        }
        assert busier["queue"] >= before["queue"] - 1e-12
        assert busier["interference"] >= before["interference"] - 1e-12
    assert waiting["queue"] > before["queue"] or rate.prefill_s(100, 0) == 0


@given(demand=demands(), member=members("a"), more=st.integers(1, 10_000))
def test_more_live_tokens_cost_more_prefill(demand: Demand, member: Member, more: int) -> None:
    """Live tokens raise the prefill, and what their steps wait for; nothing else."""
    member = replace(member, refusal=None)
    before = of(demand, member)
    after = of(replace(demand, num_live_tokens=demand.num_live_tokens + more), member)
    assert after["prefill"] > before["prefill"]
    assert after["interference"] >= before["interference"]
    for name in ("queue", "load", "copy"):
        assert after[name] == before[name]


def test_default_tiers_are_ordered() -> None:
    """The priors make each tier cheaper than the next, and HBM free."""
    found = [
        of(ONE, Member("a", tiers={} if tier is Tier.REMOTE else {DIGESTS[0]: tier}))["load"]
        for tier in TIERS_FASTEST_FIRST
    ]
    assert found == sorted(found)
    assert len(set(found)) == len(found)
    assert found[0] == 0


def test_a_whole_prefix_in_hbm_costs_no_load() -> None:
    """Where the composition is cached it does not matter what tiers hold its parts."""
    composed = replace(ONE, composition=DIGESTS[2])
    cached = Member("a", tiers={DIGESTS[0]: Tier.NVME, DIGESTS[2]: Tier.HBM})
    assert of(composed, cached)["load"] == 0
    assert of(composed, Member("a", tiers={DIGESTS[0]: Tier.NVME}))["load"] > 0


def test_without_a_map_nothing_is_known_to_be_anywhere() -> None:
    """In fallback mode an artifact is remote, whatever the last known rows say."""
    member = Member("a", tiers={DIGESTS[0]: Tier.HBM})
    blind = view_of([member], mode=MapMode.FALLBACK)
    assert terms(ONE, blind)["load"] == of(ONE, Member("a"))["load"] > 0


def test_bytes_on_the_way_delay_those_behind_them() -> None:
    """Two loads from one tier share its link; one from another tier has its own."""
    view = view_of([Member("a", tiers={DIGESTS[1]: Tier.DRAM})])
    row = view.loads.find(ReplicaId("a"))
    assert row is not None
    other = Demand("m", (ArtifactDemand(DIGESTS[2], 1_000_000_000, 10),), 1)
    near = replace(ONE, artifacts=(ArtifactDemand(DIGESTS[1], 500_000_000, 500),))
    before, before_near = terms(ONE, view)["load"], terms(near, view)["load"]
    booking = view.loads.book(row, other, tiers={DIGESTS[2]: Tier.REMOTE}, now_s=0.0)
    remote = PRIORS.tiers[Tier.REMOTE]
    assert terms(ONE, view)["load"] == pytest.approx(before + 1e9 / remote.bytes_per_s)
    assert terms(near, view)["load"] == pytest.approx(before_near)
    booking.note_first_token()
    assert terms(ONE, view)["load"] == pytest.approx(before)


def test_one_load_serves_all_who_wait_for_it() -> None:
    """A second request for what is being loaded waits for the rest of that load only."""
    view = view_of([Member("a")])
    row = view.loads.find(ReplicaId("a"))
    assert row is not None
    whole_s = terms(ONE, view)["load"]
    first = view.loads.book(row, ONE, tiers={DIGESTS[0]: Tier.REMOTE}, now_s=10.0)
    later = replace(view, now_s=10.0 + whole_s / 4)
    assert terms(ONE, later)["load"] == pytest.approx(whole_s * 3 / 4)
    second = view.loads.book(row, ONE, tiers={DIGESTS[0]: Tier.REMOTE}, now_s=10.0)
    assert row.pending_bytes[Tier.REMOTE] == ONE.artifacts[0].size_bytes
    second.end()
    first.end()
    assert row.pending_bytes[Tier.REMOTE] == 0
    assert terms(ONE, later)["load"] == whole_s
