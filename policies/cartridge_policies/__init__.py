"""Placement policies: pure functions from demand and view to a decision in seconds."""

from collections.abc import Callable

from cartridge_policies.baselines import LeastLoaded, RoundRobin
from cartridge_policies.cartridge_aware import CartridgeAware
from cartridge_policies.cost import CostPriors
from cartridge_policies.types import PlacementPolicy

POLICIES: dict[str, Callable[[CostPriors], PlacementPolicy]] = {
    "cartridge_aware": CartridgeAware,
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
}
"""Every policy by the name that settings use."""
