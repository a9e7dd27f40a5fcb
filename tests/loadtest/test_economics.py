"""What Cartridges save and cost: one case worked out by hand, and what holds of all."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from math import ceil, floor
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cartridge_loadtest.economics import (
    BOUNDED_TIERS,
    Economics,
    NothingToWeigh,
    RequestSeconds,
    assess,
    at_gpu_prices,
    best_of,
    keepings,
    usages,
)
from cartridge_loadtest.economics_costs import GIB, Costs, costs_of
from cartridge_loadtest.workloads import FleetRequest, Workload, cartridge
from cartridge_proto.residency import TIERS_FASTEST_FIRST, Tier

A, B, C = (cartridge(name, tokens) for name, tokens in (("a", 1_000), ("b", 2_000), ("c", 500)))
ROUND: Mapping[str, Any] = {
    "prices": {
        # One USD for a second of a replica.
        "gpu_usd_per_hour": 3_600, "hbm_value_share": 0.5, "transfer_usd_per_gib": 8,
        "dram_usd_per_gib_month": 7300, "nvme_usd_per_gib_month": 73,
        "object_usd_per_gib_month": 7.3,
    },
    "fleet": {"num_replicas": 1, "hbm_kv_gib_per_replica": 100},
    # 2^20 bytes a token.
    "model": {"num_layers": 32, "num_kv_heads": 64},
    "inference": {
        "prefill_base_s": 1, "prefill_s_per_token": 0.01, "prefill_s_per_token2": 0,
        "decode_s_per_context_token": 0,
    },
    "links": {
        "dram": {"latency_s": 0.5, "gb_per_s": 1e6},
        "nvme": {"latency_s": 1, "gb_per_s": 1e6},
        "remote": {"latency_s": 2, "gb_per_s": 1e6},
    },
}  # fmt: skip
HOUR_S = 3_600.0
A_GIB = 1_000 / 1_024


def with_section(section: str, **changed: object) -> Costs:
    """The round costs, but for some of a section."""
    data = dict(ROUND)
    data[section] = {**data.get(section, {}), **changed}
    return costs_of(data)


def ask(arrival_s: float, *held: Any, num_live: int = 100, num_output: int = 10) -> FleetRequest:
    """A request for some Cartridges."""
    return FleetRequest(arrival_s, held, num_live, num_output)


def workload(*requests: FleetRequest) -> Workload:
    """Of these requests."""
    return Workload("by hand", "nothing", requests)


def hour_of(count: int) -> Workload:
    """A asked for so often (at least twice) in an hour."""
    return workload(*(ask(HOUR_S * index / (count - 1), A) for index in range(count)))


def test_one_cartridge_worked_out_by_hand() -> None:
    """Ten seconds saved a use, 11 to build; GiB-hours at 10, 0.1, 0.01 USD; half a GPU for HBM."""
    verdict = assess(hour_of(4), costs_of(ROUND)).verdicts[0]
    assert verdict.usage.saved_s == pytest.approx(40)
    for tier, load_s, residency in (
        (Tier.HBM, 0.0, HOUR_S * 0.5 * A_GIB / 100),
        (Tier.DRAM, 0.5, 10 * A_GIB),
        (Tier.NVME, 1.0, A_GIB / 10),
        (Tier.REMOTE, 2.0, 0.0),
    ):
        keeping = verdict.keepings[tier]
        from_store = 2.0 + 8 * A_GIB
        assert keeping.saved_usd == pytest.approx(40)
        assert keeping.build_usd == pytest.approx(11)
        assert keeping.store_usd == pytest.approx(A_GIB / 100)
        assert keeping.residency_usd == pytest.approx(residency)
        # Links take a millisecond beside their latency.
        assert keeping.load_s == pytest.approx(load_s, abs=0.002)
        is_store = tier is Tier.REMOTE
        assert keeping.load_usd == pytest.approx(4 * (from_store if is_store else load_s), abs=0.01)
        assert keeping.fill_usd == pytest.approx(0 if is_store else from_store, abs=0.002)
        assert keeping.room_bytes == 1_000 << 20
    assert verdict.kept_in is Tier.NVME
    assert verdict.net_usd == pytest.approx(40 - 4 - 11 - 0.11 * A_GIB - 2 - 8 * A_GIB, abs=0.01)
    assert verdict.shown.break_even_uses == pytest.approx(
        (11 + 0.11 * A_GIB + 2 + 8 * A_GIB) / 9, abs=0.01
    )


def test_what_is_built_by_training_costs_gpu_hours_and_is_smaller() -> None:
    """Ten tokens of text in one: a tenth of the bytes, and less context for every token written."""
    costs = costs_of(
        {
            **ROUND,
            "build": {
                "kind": "trained", "gpu_hours_per_cartridge": 2, "source_tokens_per_token": 10,
            },
            "inference": {**ROUND["inference"], "decode_s_per_context_token": 0.001},
        }
    )  # fmt: skip
    usage = usages(hour_of(2).requests, costs)[A.digest]
    assert usage.num_tokens == 100
    assert usage.stored_bytes == 100 << 20
    # Of each: 10 s of prefill, and 10 tokens that need not read 900 positions.
    assert usage.saved_s == pytest.approx(2 * (10 + 10 * 900 * 0.001))
    keeping = keepings(usage, costs, horizon_s=HOUR_S, scale=1.0)[Tier.DRAM]
    assert keeping.build_usd == 2 * 3_600


def test_a_month_of_the_same_demand() -> None:
    """Uses and keeping grow with the horizon, building does not."""
    hour = assess(hour_of(4), costs_of(ROUND)).verdicts[0].keepings[Tier.DRAM]
    costs = costs_of({**ROUND, "horizon_days": 1})
    day = assess(hour_of(4), costs).verdicts[0].keepings[Tier.DRAM]
    for name in ("num_uses", "saved_usd", "load_usd", "store_usd", "residency_usd"):
        assert getattr(day, name) == pytest.approx(24 * getattr(hour, name))
    assert (day.build_usd, day.fill_usd) == (hour.build_usd, hour.fill_usd)


def test_a_prefix_cache_that_has_the_text_leaves_nothing_to_save() -> None:
    """And half of the hits leave half of the saving."""
    saved_s = [
        usages(hour_of(2).requests, with_section("inference", prefix_cache_hit_share=share))[
            A.digest
        ].saved_s
        for share in (0, 0.5, 1)
    ]
    assert saved_s == pytest.approx([20, 10, 0])


def test_hbm_serves_no_cartridge_of_a_set() -> None:
    """A set is there as a whole or not: each use in one is read from the store."""
    found = usages([ask(0, A, B), ask(1, A)], costs_of(ROUND))
    assert (found[A.digest].num_alone, found[B.digest].num_alone) == (1, 0)
    in_hbm = keepings(found[A.digest], costs_of(ROUND), horizon_s=1, scale=1)[Tier.HBM]
    assert in_hbm.load_s == pytest.approx(1, abs=0.002)
    assert in_hbm.load_usd == pytest.approx(2 + 8 * A_GIB, abs=0.002)


def test_a_load_as_dear_as_what_it_saves_never_breaks_even() -> None:
    """However often it is used."""
    costs = with_section("inference", prefill_s_per_token=0.0005)
    verdict = assess(hour_of(100), costs).verdicts[0]
    assert verdict.usage.saved_s == pytest.approx(100 * 0.5)
    assert verdict.keepings[Tier.NVME].break_even_uses is None
    assert verdict.keepings[Tier.HBM].break_even_uses is not None


def test_of_a_set_each_gets_its_shapley_value() -> None:
    """What each adds, on average over all orders in which they could be made."""
    costs = with_section("inference", prefill_s_per_token2=1e-5)
    request = ask(0, A, B, C)
    seconds = RequestSeconds(costs)
    shares = dict.fromkeys((A.digest, B.digest, C.digest), 0.0)
    orders = list(permutations(shares))
    for order in orders:
        for place, digest in enumerate(order):
            before, after = set(order[:place]), set(order[: place + 1])
            added_s = seconds.served_s(request, before) - seconds.served_s(request, after)
            shares[digest] += added_s / len(orders)
    found = usages([request], costs)
    assert {digest: usage.saved_s for digest, usage in found.items()} == pytest.approx(shares)


def test_no_requests_and_no_time_cannot_be_weighed() -> None:
    """Without a horizon; with one, what comes at once comes once."""
    with pytest.raises(NothingToWeigh, match="no requests"):
        assess(workload(), costs_of(ROUND))
    at_once = workload(ask(5, A), ask(5, A))
    with pytest.raises(NothingToWeigh, match="horizon_days"):
        assess(at_once, costs_of(ROUND))
    found = assess(at_once, costs_of({**ROUND, "horizon_days": 2}))
    assert found.verdicts[0].shown.num_uses == 2
    assert found.horizon_s == 2 * 86_400


def test_without_cartridges_there_is_nothing_to_keep() -> None:
    """The bill is that of the text."""
    found = assess(workload(ask(0), ask(1)), costs_of(ROUND))
    assert (found.verdicts, found.net_usd, found.plain_s) == ((), 0, 4)


def test_where_room_is_short_the_rest_goes_one_tier_down() -> None:
    """Disks for one of two: the other stays in the store, which costs more for each use."""
    requests = [ask(36.0 * index, cartridge(f"{index % 2}", 1_000)) for index in range(101)]
    costs = with_section("fleet", dram_gib_per_replica=0, hbm_share=0, nvme_gib_per_replica=1)
    found = assess(workload(*requests), with_transfer(costs, 0))
    assert sorted(str(each.kept_in) for each in found.verdicts) == ["nvme", "remote"]
    roomy = assess(workload(*requests), with_transfer(costs, 0), has_all_room=True)
    assert roomy.net_usd > found.net_usd


def with_transfer(costs: Costs, usd_per_gib: float) -> Costs:
    """With another price of transfer."""
    prices = msgspec.structs.replace(costs.prices, transfer_usd_per_gib=usd_per_gib)
    return msgspec.structs.replace(costs, prices=prices)


def test_a_cartridge_larger_than_a_replica_stays_out_of_its_tier() -> None:
    """Though all replicas together had the room."""
    costs = with_section(
        "fleet", num_replicas=8, dram_gib_per_replica=0.5, nvme_gib_per_replica=0, hbm_share=0
    )
    verdict = assess(hour_of(100), costs).verdicts[0]
    assert verdict.keepings[Tier.DRAM].net_usd > verdict.keepings[Tier.REMOTE].net_usd > 0
    assert verdict.kept_in is Tier.REMOTE


def test_each_replica_adds_its_room() -> None:
    """Two disks of 1 GiB keep two Cartridges of nearly that, in one copy, or one in two."""
    requests = [ask(36.0 * index, cartridge(f"{index % 2}", 1_000)) for index in range(101)]
    for copies, kept_in in ((1, ["nvme", "nvme"]), (2, ["nvme", "remote"])):
        costs = with_section(
            "fleet", num_replicas=2, dram_gib_per_replica=0, hbm_share=0, nvme_gib_per_replica=1,
            nvme_copies=copies,
        )  # fmt: skip
        found = assess(workload(*requests), with_transfer(costs, 0))
        assert sorted(str(each.kept_in) for each in found.verdicts) == kept_in


def test_copies_are_paid_for_and_take_room_but_are_built_once() -> None:
    """Three on disks: three times the bytes and the reads that bring them, in one store."""
    once, thrice = (
        assess(hour_of(4), with_section("fleet", num_replicas=3, nvme_copies=copies))
        .verdicts[0]
        .keepings[Tier.NVME]
        for copies in (1, 3)
    )
    for name in ("room_bytes", "residency_usd", "fill_usd"):
        assert getattr(thrice, name) == pytest.approx(3 * getattr(once, name))
    for name in ("saved_usd", "load_usd", "build_usd", "store_usd"):
        assert getattr(thrice, name) == getattr(once, name)


# --- what holds of all ---------------------------------------------------------------------------
LIBRARY = [cartridge(f"{index}", 64 << index) for index in range(5)]

requests_of = st.lists(
    st.builds(
        ask,
        st.floats(0, HOUR_S),
        st.sampled_from(LIBRARY),
        num_live=st.integers(1, 2_000),
        num_output=st.integers(0, 500),
    )
    | st.builds(
        lambda at, held, live: ask(at, *held, num_live=live),
        st.floats(0, HOUR_S),
        st.lists(st.sampled_from(LIBRARY), max_size=3, unique_by=lambda each: each.digest),
        st.integers(1, 2_000),
    ),
    max_size=20,
).map(lambda drawn: workload(ask(0), *drawn, ask(HOUR_S)))
"""An hour of them."""

share = st.floats(0, 1)
costs_of_any_kind = st.builds(
    lambda prices, fleet, build, inference, links: costs_of(
        {
            "prices": prices, "fleet": fleet, "build": build, "inference": inference,
            "links": links, "horizon_days": 30,
        }
    ),
    st.fixed_dictionaries(
        {
            "gpu_usd_per_hour": st.floats(0.01, 100), "dram_usd_per_gib_month": st.floats(0, 10),
            "nvme_usd_per_gib_month": st.floats(0, 1), "object_usd_per_gib_month": st.floats(0, 1),
            "transfer_usd_per_gib": st.floats(0, 0.1), "hbm_value_share": share,
            "load_gpu_share": share,
        }
    ),
    st.fixed_dictionaries(
        {
            "num_replicas": st.integers(2, 9), "hbm_share": st.floats(0, 0.1),
            "dram_gib_per_replica": st.floats(0, 0.3), "nvme_gib_per_replica": st.floats(0, 1),
            "dram_copies": st.integers(1, 2),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["prefill", "trained"]),
            "gpu_hours_per_cartridge": st.floats(0, 0.1),
            "source_tokens_per_token": st.floats(1, 30),
        }
    ),
    st.fixed_dictionaries(
        {"prefill_s_per_token2": st.floats(0, 1e-7), "prefix_cache_hit_share": share}
    ),
    st.fixed_dictionaries(
        {
            name: st.fixed_dictionaries(
                {"latency_s": st.floats(0, 0.5), "gb_per_s": st.floats(0.05, 50)}
            )
            for name in ("dram", "nvme", "remote")
        }
    ),
)  # fmt: skip


@given(requests_of, costs_of_any_kind)
def test_terms_add_up_to_what_the_requests_cost_less(asked: Workload, costs: Costs) -> None:
    """The plan's net is the plain bill less the bill with it, request by request."""
    found = assess(asked, costs)
    kept = {verdict.usage.digest: verdict for verdict in found.kept}
    seconds = RequestSeconds(costs)
    bill_usd = sum(verdict.shown.fixed_usd for verdict in kept.values())
    for request in asked.requests:
        bill_usd += found.scale * costs.replica_usd_per_s * seconds.served_s(request, set(kept))
        held = [kept[each.digest] for each in request.cartridges if each.digest in kept]
        bill_usd += found.scale * sum(load_usd(each.shown) for each in held)
    plain_usd = found.plain_s * costs.replica_usd_per_s
    assert plain_usd - bill_usd == pytest.approx(found.net_usd, rel=1e-6, abs=1e-9 * plain_usd)
    assert found.net_usd >= 0
    assert all(verdict.net_usd > 0 for verdict in kept.values())


def load_usd(keeping: Any) -> float:
    """Of one use, on average."""
    return float(keeping.load_usd / keeping.num_uses)


@given(requests_of, costs_of_any_kind)
def test_a_plan_keeps_within_the_rooms_of_the_fleet(asked: Workload, costs: Costs) -> None:
    """Copies count, and no Cartridge is larger than a replica's room."""
    found = assess(asked, costs)
    for tier in BOUNDED_TIERS:
        room_bytes = costs.room_bytes_per_replica[tier]
        assert found.room_bytes(tier) <= room_bytes * costs.fleet.num_replicas
        for verdict in found.kept:
            if verdict.kept_in is tier:
                assert verdict.shown.room_bytes / costs.copies[tier] <= room_bytes


@given(requests_of, costs_of_any_kind)
def test_break_even_is_where_net_crosses_zero(asked: Workload, costs: Costs) -> None:
    """Below it is a loss, above a gain; `None` where more uses lose more."""
    found = assess(asked, costs)
    for verdict in found.verdicts:
        for keeping in verdict.keepings.values():
            at = keeping.break_even_uses
            # Against the terms that nearly cancel.
            tiny_usd = 1e-9 * (keeping.saved_usd + keeping.load_usd + keeping.fixed_usd)
            assert keeping.net_usd_at(keeping.num_uses) == pytest.approx(
                keeping.net_usd, rel=1e-9, abs=tiny_usd
            )
            if at is None:
                assert keeping.net_usd_at(keeping.num_uses * 2) <= keeping.net_usd + tiny_usd
                assert keeping.net_usd <= tiny_usd
            else:
                assert keeping.net_usd_at(at) == pytest.approx(0, abs=1e-9 * keeping.fixed_usd)
                assert keeping.net_usd_at(at * 1.01 + 1) > 0
                if keeping.fixed_usd > 0:
                    assert keeping.net_usd_at(at * 0.99) < 0


@given(costs_of_any_kind, st.sampled_from(TIERS_FASTEST_FIRST))
def test_a_trace_with_so_many_uses_as_break_even_says_pays(costs: Costs, tier: Tier) -> None:
    """Counted anew from traces: one use fewer loses, one more gains."""
    at = net_of(2, costs, tier).break_even_uses
    # So that whole numbers of uses lie on both sides, and traces stay short.
    assume(at is not None and 3 < at < 200)
    assert at is not None
    assert net_of(floor(at - 1e-6), costs, tier).net_usd < 1e-9
    assert net_of(ceil(at + 1e-6), costs, tier).net_usd > -1e-9


def net_of(count: int, costs: Costs, tier: Tier) -> Any:
    """A asked for so often in the horizon."""
    found = usages([ask(0, A)] * count, costs)
    return keepings(found[A.digest], costs, horizon_s=HOUR_S, scale=1.0)[tier]


@given(requests_of, costs_of_any_kind, st.integers(2, 5))
def test_net_rises_with_reuse(asked: Workload, costs: Costs, times: int) -> None:
    """The same requests several times as often: what pays brings more, what is text stays at 0."""
    before = best_net_usd(asked, costs)
    after = best_net_usd(replace(asked, requests=asked.requests * times), costs)
    assert before.keys() == after.keys()
    for digest, net_usd in before.items():
        # What is fixed is paid once, so that net grows at least as uses do.
        assert after[digest] >= net_usd * times * (1 - 1e-9) - 1e-12
        if net_usd > 1e-9:
            assert after[digest] > net_usd


def best_net_usd(asked: Workload, costs: Costs) -> dict[Any, float]:
    """What each Cartridge brings where it brings most, or as text."""
    found = usages(asked.requests, costs)
    scale = 30 * 24.0
    return {
        digest: max(
            0.0, best_of(keepings(usage, costs, horizon_s=30 * 86_400, scale=scale)).net_usd
        )
        for digest, usage in found.items()
    }


BETTER = [
    ("prices", name)
    for name in (
        "dram_usd_per_gib_month", "nvme_usd_per_gib_month", "object_usd_per_gib_month",
        "transfer_usd_per_gib", "hbm_value_share", "load_gpu_share",
    )
] + [("links", name) for name in ("dram", "nvme", "remote")]  # fmt: skip


@given(requests_of, costs_of_any_kind, st.sampled_from(BETTER), st.floats(0.1, 0.9))
def test_a_faster_or_cheaper_tier_never_brings_less(
    asked: Workload, costs: Costs, what: tuple[str, str], factor: float
) -> None:
    """In no tier, for no Cartridge."""
    better = improved(costs, *what, factor)
    for digest, usage in usages(asked.requests, costs).items():
        improved_usage = usages(asked.requests, better)[digest]
        assert improved_usage == usage
        before = keepings(usage, costs, horizon_s=HOUR_S, scale=1.0)
        after = keepings(usage, better, horizon_s=HOUR_S, scale=1.0)
        for tier in TIERS_FASTEST_FIRST:
            assert after[tier].net_usd >= before[tier].net_usd - 1e-12 * before[tier].fixed_usd


def improved(costs: Costs, section: str, name: str, factor: float) -> Costs:
    """A price or a latency is lower, a bandwidth higher."""
    part = getattr(costs, section)
    value = getattr(part, name)
    if section == "links":
        better: Any = msgspec.structs.replace(
            value, latency_s=value.latency_s * factor, gb_per_s=value.gb_per_s / factor
        )
    else:
        better = value * factor
    part = msgspec.structs.replace(part, **{name: better})
    return msgspec.structs.replace(costs, **{section: part})


def test_net_over_the_price_of_gpus() -> None:
    """At today's price both are the plan's own; a plan made for a price is never worse there."""
    asked, costs = hour_of(4), costs_of(ROUND)
    found: Economics = assess(asked, costs)
    rows = at_gpu_prices(asked, costs, found)
    (today,) = [row for row in rows if row.gpu_usd_per_hour == 3_600]
    assert today.planned_anew_usd == today.same_plan_usd == found.net_usd
    assert [row.gpu_usd_per_hour for row in rows] == sorted(row.gpu_usd_per_hour for row in rows)
    assert all(row.planned_anew_usd >= row.same_plan_usd for row in rows)
    assert rows[0].planned_anew_usd == 0
    assert rows[0].same_plan_usd < 0


def test_bytes_of_the_store_are_of_all_that_is_kept() -> None:
    """One on a disk is in the store as well."""
    found = assess(hour_of(4), costs_of(ROUND))
    assert found.room_bytes(Tier.NVME) == found.room_bytes(Tier.REMOTE) == 1_000 << 20
    assert found.room_bytes(Tier.DRAM) == 0
    assert A_GIB * GIB == 1_000 << 20
