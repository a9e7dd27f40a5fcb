"""What the default policy must beat, and what operators of other fleets are used to.

Owns policies that look at load or at a name only. Refuses residency.
"""

import hashlib
from functools import lru_cache
from typing import Final

import numpy as np

from cartridge_policies.cost import CostTable
from cartridge_policies.loads import Floats, Rows
from cartridge_policies.ranking import decide_by
from cartridge_policies.types import ClusterView, Decision, Demand, Refusal


class RoundRobin:
    """Each replica in turn, whatever it holds. Formula: none. Inputs: the view's tick."""

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """The next replica in the order of names."""
        return decide_by(
            lambda table, rows: np.zeros(len(rows)),
            demand,
            view,
            reason=lambda best: "round-robin",
        )


class LeastLoaded:
    """Fewest requests in flight; ties take turns. Inputs: requests in flight."""

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """The replica with the fewest requests in flight."""
        return decide_by(
            lambda table, rows: view.loads.column("in_flight", rows),
            demand,
            view,
            reason=lambda best: "least-loaded",
        )


class PowerOfTwo:
    """The less loaded of two that chance names.

    Chance is a hash of the tick. Source: Mitzenmacher, "The Power of Two Choices in Randomized Load
    Balancing", 2001. Inputs: requests in flight, tick.
    """

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """The two first, then the others by load."""

        def key(table: CostTable, rows: Rows) -> Floats:
            in_flight = view.loads.column("in_flight", rows)
            first, second = _two_of(len(rows), view.tick)
            behind = np.full(len(rows), in_flight.max() + 1)
            behind[[first, second]] = 0.0
            values: Floats = in_flight + behind
            return values

        return decide_by(key, demand, view, reason=lambda best: "power-of-two")


class SessionHash:
    """Requests of one session on one replica (rendezvous hashing).

    A replica that joins or leaves moves only its own share. Without a session the set of Cartridges
    stands for it, and without that the policy is least loaded. Source: Thaler, Ravishankar, "Using
    Name-Based Mappings to Increase Hit Rates", 1998.
    """

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """The replica whose name and the session's give the highest hash."""
        name = key_of(demand)

        def key(table: CostTable, rows: Rows) -> Floats:
            if name is None:
                return view.loads.column("in_flight", rows)
            return -_weights(name, view, rows)

        return decide_by(key, demand, view, reason=lambda best: "session-hash")


class ConsistentHashBounded:
    """As session hash, but nobody gets more than its share of the load, by a factor.

    Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016.
    Parameters: `factor` over the mean of requests in flight.
    """

    def __init__(self, factor: float = 1.25) -> None:
        self._factor = factor

    def decide(self, demand: Demand, view: ClusterView) -> Decision | Refusal:
        """The first below the bound, in the order of the hash."""
        name = key_of(demand)

        def key(table: CostTable, rows: Rows) -> Floats:
            in_flight = view.loads.column("in_flight", rows)
            if name is None:
                return in_flight
            bound = np.ceil(self._factor * (in_flight.sum() + 1) / len(rows))
            values: Floats = -_weights(name, view, rows) + np.where(in_flight + 1 > bound, 2.0, 0.0)
            return values

        return decide_by(key, demand, view, reason=lambda best: "hash-bounded")


def key_of(demand: Demand) -> str | None:
    """What stands for the prefix of a request: its session, or its Cartridges."""
    if demand.session is not None:
        return demand.session
    return demand.artifacts[0].digest if demand.artifacts else None


_HASHED: Final = 1 << 16


@lru_cache(maxsize=_HASHED)
def _weight(name: str, replica: str) -> float:
    """From 0 to below 1, as good as random and always the same."""
    digest = hashlib.blake2b(
        f"{len(name)}:{name}{replica}".encode("utf-8", "surrogateescape"), digest_size=8
    ).digest()
    return int.from_bytes(digest) / 2**64


def _weights(name: str, view: ClusterView, rows: Rows) -> Floats:
    return np.array([_weight(name, view.loads.name(row)) for row in rows.tolist()])


def _two_of(count: int, tick: int) -> tuple[int, int]:
    """Two places, different where there are two."""
    draw = int.from_bytes(hashlib.blake2b(tick.to_bytes(8), digest_size=8).digest())
    first = draw % count
    second = (first + 1 + (draw >> 32) % max(1, count - 1)) % count
    return first, second
