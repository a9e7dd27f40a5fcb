"""Every policy that settings can name keeps the contract of placement policies."""

import pytest

from cartridge_policies import POLICIES
from tests.contracts.placement_policy import FairPolicyContract, PlacementPolicyContract

CHOOSE_BY_NAME = {"consistent_hash_bounded", "power_of_two", "session_hash"}
"""Policies for which equals are not equal: a hash of their names, or chance, tells them apart."""


@pytest.mark.parametrize("policy", [POLICIES[name]() for name in sorted(CHOOSE_BY_NAME)])
class TestPoliciesThatChooseByName(PlacementPolicyContract):
    """The suite, but for turns."""


@pytest.mark.parametrize(
    "policy", [make() for name, make in POLICIES.items() if name not in CHOOSE_BY_NAME]
)
class TestFairPolicies(FairPolicyContract):
    """The whole suite over all others."""
