"""Rates that are learned come near the true ones, forget, and are not moved by one stall."""

import random

import pytest

from cartridge_policies.estimation import RateEstimate
from cartridge_policies.rates import PRIORS, ReplicaRates
from cartridge_proto.residency import Tier

TRUE = ReplicaRates(
    prefill_base_s=0.2,
    prefill_s_per_token=0.004,
    prefill_s_per_token2=1e-6,
)
"""An engine on a CPU: ten times slower than the priors."""


def learn(estimate: RateEstimate, true: ReplicaRates, count: int, seed: int = 0) -> None:
    """Observe requests of that engine, each up to a tenth off."""
    chance = random.Random(seed)
    for _ in range(count):
        live, virtual = chance.randrange(10, 800), chance.choice([0, 0, 500, 2000])
        estimate.note_prefill(
            live, virtual, true.prefill_s(live, virtual) * chance.uniform(0.9, 1.1)
        )


def off(rates: ReplicaRates, true: ReplicaRates, live: int, virtual: int) -> float:
    """Relative error of one prediction."""
    return abs(rates.prefill_s(live, virtual) / true.prefill_s(live, virtual) - 1)


@pytest.mark.parametrize(("live", "virtual"), [(20, 0), (400, 0), (100, 2000)])
def test_prefill_is_predicted_after_a_few_requests(live: int, virtual: int) -> None:
    """From priors ten times too fast to within 15 % after thirty requests."""
    estimate = RateEstimate(PRIORS)
    assert off(estimate.rates, TRUE, live, virtual) > 0.5
    learn(estimate, TRUE, 30)
    assert off(estimate.rates, TRUE, live, virtual) < 0.15


def test_one_observation_is_better_than_a_wrong_prior() -> None:
    """The first request tells more than a guess."""
    estimate = RateEstimate(PRIORS)
    estimate.note_prefill(100, 0, TRUE.prefill_s(100, 0))
    assert off(estimate.rates, TRUE, 100, 0) < 0.5


def test_a_replica_that_changes_is_learned_anew() -> None:
    """An engine that becomes three times slower is known as that soon."""
    estimate = RateEstimate(PRIORS)
    learn(estimate, TRUE, 200)
    slower = ReplicaRates(prefill_base_s=0.6, prefill_s_per_token=0.012, prefill_s_per_token2=3e-6)
    learn(estimate, slower, 120, seed=1)
    assert off(estimate.rates, slower, 400, 0) < 0.2


def test_a_stall_moves_little() -> None:
    """One request that took a minute does not change what the next is predicted to take."""
    estimate = RateEstimate(PRIORS)
    learn(estimate, TRUE, 50)
    before = estimate.rates.prefill_s(200, 0)
    estimate.note_prefill(200, 0, 60.0)
    assert estimate.rates.prefill_s(200, 0) < before * 1.5


def test_rates_are_never_negative() -> None:
    """Observations that fall with the size do not make longer prompts free."""
    estimate = RateEstimate(PRIORS)
    for live, seconds in ((10, 1.0), (1000, 0.1)) * 20:
        estimate.note_prefill(live, 0, seconds)
    rates = estimate.rates
    assert min(rates.prefill_base_s, rates.prefill_s_per_token, rates.prefill_s_per_token2) >= 0


def test_each_tier_is_learned_by_itself() -> None:
    """Loads from nvme say nothing about dram; HBM is never loaded from."""
    estimate = RateEstimate(PRIORS)
    for size in (1 << 20, 64 << 20, 8 << 20, 128 << 20) * 8:
        estimate.note_load(Tier.NVME, size, 0.05 + size / 2e8)
    estimate.note_load(Tier.HBM, 1 << 20, 5.0)
    rates = estimate.rates
    assert rates.tiers[Tier.NVME].bytes_per_s == pytest.approx(2e8, rel=0.1)
    assert rates.tiers[Tier.NVME].latency_s == pytest.approx(0.05, rel=0.3)
    assert rates.tiers[Tier.DRAM] == PRIORS.tiers[Tier.DRAM]
    assert rates.tiers[Tier.HBM] == PRIORS.tiers[Tier.HBM]
