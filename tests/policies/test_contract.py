"""Every policy that settings can name keeps the contract of placement policies."""

import pytest

from cartridge_policies import POLICIES
from cartridge_policies.cost import CostPriors
from tests.contracts.placement_policy import PlacementPolicyContract


@pytest.mark.parametrize(
    "policy", [make(CostPriors()) for make in POLICIES.values()], ids=list(POLICIES)
)
class TestPlacementPolicies(PlacementPolicyContract):
    """The suite, run over all of `POLICIES`."""
