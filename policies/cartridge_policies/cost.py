"""Predicted seconds to the first token on one replica, as named terms that add up.

Owns the cost model and its priors. Refuses to compare replicas or to return anything but seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cartridge_policies.types import CostTerm, Demand, ReplicaView
from cartridge_proto.digest import Digest
from cartridge_proto.residency import Tier


@dataclass(frozen=True)
class TierRate:
    """How fast a tier gives bytes: seconds to the first, then bytes per second."""

    latency_s: float
    bytes_per_s: float


def _default_rates() -> dict[Tier, TierRate]:
    return {
        Tier.HBM: TierRate(0.0, float("inf")),
        Tier.DRAM: TierRate(0.0005, 5e9),
        Tier.NVME: TierRate(0.002, 1.5e9),
        Tier.REMOTE: TierRate(0.02, 5e8),
    }


@dataclass(frozen=True)
class CostPriors:
    """Fixed rates until they are estimated online.

    `queue_s_per_request`: seconds that one request in flight delays the next.
    `prefill_s_per_token`: seconds per live token.
    """

    queue_s_per_request: float = 0.05
    prefill_base_s: float = 0.01
    prefill_s_per_token: float = 0.0005
    tiers: Mapping[Tier, TierRate] = field(default_factory=_default_rates)


def tier_of(replica: ReplicaView, digest: Digest) -> Tier:
    """Where an artifact is for a replica; what no tier of its own holds comes from the store."""
    return replica.tiers.get(digest, Tier.REMOTE)


def cost_terms(demand: Demand, replica: ReplicaView, priors: CostPriors) -> tuple[CostTerm, ...]:
    """Queue wait, load of what is missing, and prefill of the live tokens."""
    load_s = 0.0
    for artifact in demand.artifacts:
        rate = priors.tiers[tier_of(replica, artifact.digest)]
        load_s += rate.latency_s + artifact.size_bytes / rate.bytes_per_s
    return (
        CostTerm("queue", replica.num_in_flight * priors.queue_s_per_request),
        CostTerm("load", load_s),
        CostTerm(
            "prefill", priors.prefill_base_s + demand.num_live_tokens * priors.prefill_s_per_token
        ),
    )
