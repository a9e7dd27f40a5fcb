"""What one replica's work costs: seconds for each token, byte and request.

Owns the rates and what they are before anything was measured. Refuses to learn (`estimation.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cartridge_proto.residency import TIERS_FASTEST_FIRST, Tier


@dataclass(frozen=True)
class TierRate:
    """How fast a tier gives bytes: seconds to the first, bytes per second, seconds per chunk."""

    latency_s: float
    bytes_per_s: float
    s_per_chunk: float = 0.0


CHUNK_BYTES: Final = 16 << 20
"""What one request to a tier brings; each has an overhead of its own."""


def _default_tiers() -> dict[Tier, TierRate]:
    return {
        Tier.HBM: TierRate(0.0, float("inf")),
        Tier.DRAM: TierRate(0.0005, 5e9),
        Tier.NVME: TierRate(0.002, 1.5e9),
        Tier.REMOTE: TierRate(0.02, 5e8, 0.002),
    }


@dataclass(frozen=True)
class ReplicaRates:
    """Rates of one replica; the defaults are priors.

    Prefill of m live tokens behind P virtual ones takes
    `prefill_base_s + prefill_s_per_token * m + prefill_s_per_token2 * ((P + m)**2 - P**2)`.
    """

    prefill_base_s: float = 0.01
    prefill_s_per_token: float = 0.0005
    prefill_s_per_token2: float = 0.0
    queue_s_per_request: float = 0.05
    """What each request that is being answered delays the first token of the next."""
    decode_s_per_context_token: float = 0.0
    """The same for each token of context that a running request reads in a step."""
    step_tokens: int = 2048
    """Live tokens that one step takes; running requests decode once in each."""
    num_slots: int | None = None
    """Requests that the engine runs at once; others wait inside it. `None` = never reached."""
    slot_s: float = 1.0
    """How long a request holds a slot."""
    copy_s_per_byte: float = 0.0
    """What the room for a new copy is worth: seconds lost elsewhere by what it drives out."""
    tiers: Mapping[Tier, TierRate] = field(default_factory=_default_tiers)

    def prefill_s(self, num_live_tokens: int, num_virtual_tokens: int) -> float:
        """Seconds of one prefill on an idle engine."""
        total = num_live_tokens + num_virtual_tokens
        return (
            self.prefill_base_s
            + self.prefill_s_per_token * num_live_tokens
            + self.prefill_s_per_token2 * (total**2 - num_virtual_tokens**2)
        )

    def load_s(self, tier: Tier, size_bytes: int) -> float:
        """Seconds until an artifact is read from a tier, with the link to itself.

        Never more than from a slower tier: it could be read from there as well.
        """
        slower = TIERS_FASTEST_FIRST[TIERS_FASTEST_FIRST.index(tier) :]
        num_chunks = -(-size_bytes // CHUNK_BYTES)
        return min(
            rate.latency_s + size_bytes / rate.bytes_per_s + num_chunks * rate.s_per_chunk
            for rate in (self.tiers[each] for each in slower)
        )


PRIORS: Final = ReplicaRates()
