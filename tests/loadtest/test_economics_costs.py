"""The costs file: defaults, units, and every problem in one message."""

import dataclasses
from pathlib import Path

import pytest

from cartridge_loadtest.economics_costs import GIB, Costs, CostsError, costs_of, read_costs
from cartridge_loadtest.replica_model import EngineProfile
from cartridge_loadtest.workloads import KV_BYTES_PER_TOKEN
from cartridge_proto.residency import Tier


def problems_of(data: object) -> list[str]:
    """What is said of a wrong file."""
    with pytest.raises(CostsError) as caught:
        costs_of(data)
    return caught.value.problems


def test_without_a_file_everything_has_a_default() -> None:
    """An empty file is the same."""
    assert read_costs(None) == costs_of({}) == Costs()


def test_the_defaults_are_those_of_the_simulator() -> None:
    """One engine: the same prefill, links, rooms and bytes of a token."""
    costs, profile = Costs(), EngineProfile()
    for field in ("prefill_base_s", "prefill_s_per_token", "prefill_s_per_token2"):
        assert getattr(costs.rates, field) == getattr(profile.rates, field)
    assert costs.rates.decode_s_per_context_token == profile.rates.decode_s_per_context_token
    for tier, rate in profile.tiers.items():
        assert dataclasses.asdict(costs.rates.tiers[tier]) == pytest.approx(
            dataclasses.asdict(rate)
        )
    assert costs.model.stored_bytes_per_token == KV_BYTES_PER_TOKEN
    fleet = costs.fleet
    assert fleet.hbm_kv_gib_per_replica * GIB == pytest.approx(
        profile.kv_tokens * KV_BYTES_PER_TOKEN, rel=0.01
    )
    assert fleet.dram_gib_per_replica * GIB == pytest.approx(profile.dram_bytes, rel=0.01)
    assert fleet.nvme_gib_per_replica * GIB == pytest.approx(profile.nvme_bytes, rel=0.01)


def test_values_in_8_bits_take_three_quarters_of_the_bytes_but_not_in_hbm() -> None:
    """Engines hold them dequantised."""
    model = costs_of({"model": {"values": "e4m3"}}).model
    assert model.stored_bytes_per_token == KV_BYTES_PER_TOKEN * 3 // 4
    assert model.hbm_bytes_per_token == KV_BYTES_PER_TOKEN


def test_prices_are_turned_into_seconds_and_bytes() -> None:
    """A GiB for a month of 730 hours; HBM by the part of the replica that it takes."""
    costs = costs_of(
        {
            "prices": {
                "gpu_usd_per_hour": 3600, "hbm_value_share": 0.5, "dram_usd_per_gib_month": 7.3,
                "nvme_usd_per_gib_month": 0.73, "object_usd_per_gib_month": 0.073,
            },
            "fleet": {"gpus_per_replica": 2, "hbm_kv_gib_per_replica": 10},
        }
    )  # fmt: skip
    assert costs.replica_usd_per_s == 2
    per_gib_hour = {
        tier: per_byte_s * GIB * 3600 for tier, per_byte_s in costs.usd_per_byte_s.items()
    }
    assert per_gib_hour == pytest.approx(
        {Tier.HBM: 360, Tier.DRAM: 0.01, Tier.NVME: 0.001, Tier.REMOTE: 0.0001}
    )


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    """Also numbers that YAML 1.1 reads as texts, as 1e-9."""
    file = tmp_path / "costs.yaml"
    file.write_text("inference: {prefill_s_per_token2: 2e-9}\nfleet: {num_replicas: 3}\n")
    costs = read_costs(file)
    assert costs.inference.prefill_s_per_token2 == 2e-9
    assert costs.fleet.num_replicas == 3
    assert costs.prices == Costs().prices


def test_every_problem_is_told_with_its_place_and_limit() -> None:
    """A negative price, an unknown field, a share above 1, a text, not a number: all at once."""
    problems = problems_of(
        {
            "prices": {"gpu_usd_per_hour": -1, "gpu_usd": 2, "hbm_value_share": 1.5},
            "links": {"nvme": {"latency_s": 0, "gb_per_s": 0}},
            "horizon_days": "a month",
            "build": {"kind": "guessed", "gpu_hours_per_cartridge": float("nan")},
        }
    )
    for place, what in (
        ("prices.gpu_usd_per_hour: -1", "minimum of 0"),
        ("prices: ", "'gpu_usd'"),
        ("prices.hbm_value_share: 1.5", "maximum of 1"),
        ("links.nvme.gb_per_s: 0", "minimum of 0"),
        ("horizon_days: 'a month'", "number"),
        ("build.kind: 'guessed'", "prefill"),
        ("build.gpu_hours_per_cartridge: ", "finite"),
    ):
        assert [each for each in problems if each.startswith(place) and what in each], place
    assert len(problems) == 7


def test_a_whole_number_is_a_count_however_it_is_written() -> None:
    """With a point, an exponent or in quotes; one that is not whole is refused with its place."""
    costs = costs_of({"fleet": {"num_replicas": 8.0}, "model": {"num_layers": "1e1"}})
    assert (costs.fleet.num_replicas, costs.model.num_layers) == (8, 10)
    with pytest.raises(CostsError, match=r"fleet\.num_replicas"):
        costs_of({"fleet": {"num_replicas": 8.5}})


def test_no_time_at_all_is_refused() -> None:
    """With its limit, though it may be absent."""
    (problem,) = problems_of({"horizon_days": 0})
    assert problem.startswith("horizon_days: 0 ")
    assert "minimum of 0" in problem


def test_more_copies_than_replicas_are_refused() -> None:
    """They would be in one place twice."""
    assert problems_of({"fleet": {"num_replicas": 2, "dram_copies": 3}}) == [
        "fleet.dram_copies: 3 is more than num_replicas, 2"
    ]


@pytest.mark.parametrize(
    ("text", "what"), [("- a", "object"), ("a: [", "costs.yaml"), ("1: 2", "unexpected")]
)
def test_a_file_that_is_no_costs_is_told(tmp_path: Path, text: str, what: str) -> None:
    """A list, no YAML, a key that is no name."""
    file = tmp_path / "costs.yaml"
    file.write_text(text)
    with pytest.raises(CostsError, match=what):
        read_costs(file)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    """By its name."""
    with pytest.raises(CostsError, match=r"none\.yaml: No such file"):
        read_costs(tmp_path / "none.yaml")
