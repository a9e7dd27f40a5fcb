"""Placement policies: pure functions from demand and view to a decision in seconds."""

from collections.abc import Callable

from cartridge_policies.baselines import (
    ConsistentHashBounded,
    LeastLoaded,
    PowerOfTwo,
    RoundRobin,
    SessionHash,
)
from cartridge_policies.cartridge_aware import CartridgeAware
from cartridge_policies.published import (
    CacheAware,
    DynamoKv,
    LlmdDefault,
    LlmdPrecise,
    MooncakeConductor,
    Preble,
)
from cartridge_policies.types import PlacementPolicy

POLICIES: dict[str, Callable[[], PlacementPolicy]] = {
    "cache_aware": CacheAware,
    "cartridge_aware": CartridgeAware,
    "consistent_hash_bounded": ConsistentHashBounded,
    "dynamo_kv": DynamoKv,
    "least_loaded": LeastLoaded,
    "llm_d": LlmdDefault,
    "llm_d_precise": LlmdPrecise,
    "mooncake": MooncakeConductor,
    "power_of_two": PowerOfTwo,
    "preble": Preble,
    "round_robin": RoundRobin,
    "session_hash": SessionHash,
}
"""Every policy by the name that settings use."""
