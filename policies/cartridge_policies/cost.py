"""Predicted seconds to the first token on each replica, as named terms that add up.

Owns the cost model, over all replicas at once. Refuses to choose, and to return anything but
seconds.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from cartridge_policies.loads import NUMBERS, Floats, Rows
from cartridge_policies.rates import CHUNK_BYTES
from cartridge_policies.types import (
    Candidate,
    ClusterView,
    CostTerm,
    Demand,
    MapMode,
)
from cartridge_proto.residency import TIERS_FASTEST_FIRST, ReplicaId, Tier

TERMS: Final = ("queue", "load", "prefill", "interference", "copy")
_HBM: Final = TIERS_FASTEST_FIRST.index(Tier.HBM)
_PLACE_OF: Final = {tier: place for place, tier in enumerate(TIERS_FASTEST_FIRST)}
_REMOTE: Final = TIERS_FASTEST_FIRST.index(Tier.REMOTE)
_PENDING, _BEHIND, _UNTIL, _UNSEEN, _OTHERS, _SLOT_WAIT, _STEP, _STEP_TOKENS, _COPY = (
    NUMBERS.index(name)
    for name in (
        "pending_s",
        "behind_s",
        "pending_until_s",
        "unseen_until_s",
        "others_until_s",
        "slot_wait_s",
        "step_s",
        "step_tokens",
        "copy_s_per_byte",
    )
)
_BASE: Final = NUMBERS.index("prefill_base_s")
_PREFILL: Final = slice(_BASE, _BASE + 3)
"""Coefficients of 1, m and (P + m)² - P²."""


@dataclass(frozen=True)
class CostTable:
    """Costs of one demand on some rows: `terms` [terms, rows], `tiers` [artifacts, rows]."""

    terms: Floats
    tiers: Rows
    """Places in `TIERS_FASTEST_FIRST`."""
    total_s: Floats

    def candidate(self, place: int, replica: ReplicaId) -> Candidate:
        """One row in words."""
        return Candidate(
            replica=replica,
            terms=tuple(map(CostTerm, TERMS, self.terms[:, place].tolist())),
            tiers=tuple(TIERS_FASTEST_FIRST[tier] for tier in self.tiers[:, place].tolist()),
        )


def costs(demand: Demand, view: ClusterView, rows: Rows) -> CostTable:
    """What the first token of a request costs on each of some rows.

    queue: predicted work of those whose first token has not come, and waiting for a slot of the
    engine. load: the slowest path of what is missing, each tier's link shared by what is on it.
    prefill: live tokens behind the virtual ones. interference: steps that running requests decode
    in. copy: what a new copy drives out.
    """
    numbers = view.loads.columns(rows)
    live, virtual = demand.num_live_tokens, demand.num_virtual_tokens
    terms = np.zeros((len(TERMS), len(rows)))
    terms[0] = _pending_s(numbers, view.now_s) + numbers[_SLOT_WAIT]
    sizes_of_prefill = np.array([1.0, live, (virtual + live) ** 2 - virtual**2])
    terms[2] = sizes_of_prefill @ numbers[_PREFILL]
    num_steps = np.maximum(1.0, np.ceil(live / numbers[_STEP_TOKENS]))
    terms[3] = num_steps * numbers[_STEP]
    tiers = np.full((len(demand.artifacts), len(rows)), _REMOTE, dtype=np.intp)
    if demand.artifacts:
        _place(demand, view, rows, tiers)
        terms[1] = _load_s(demand, view, rows, tiers)
        copy_s_per_byte = numbers[_COPY]
        if copy_s_per_byte.any():
            sizes = np.array([artifact.size_bytes for artifact in demand.artifacts])
            terms[4] = sizes @ (tiers == _REMOTE) * copy_s_per_byte
    return CostTable(terms, tiers, np.add.reduce(terms))


def _pending_s(numbers: Floats, now_s: float) -> Floats:
    """Predicted work before the first tokens of those ahead, less what is done of it by now."""
    # What is done is at most the oldest one's; of that, what passed since the engine turned to it.
    left_s: Floats = np.minimum(numbers[_PENDING], numbers[_UNTIL] - now_s)
    left_s = np.maximum(left_s, numbers[_BEHIND])
    left_s += np.maximum(numbers[_UNSEEN] - now_s, 0.0)
    left_s += np.maximum(numbers[_OTHERS] - now_s, 0.0)
    return left_s


def _place(demand: Demand, view: ClusterView, rows: Rows, tiers: Rows) -> None:
    """Fill in the tier of each artifact on each row; what no tier of its own holds is remote."""
    if view.mode is MapMode.FALLBACK:
        return
    whole = view.residency.ready_on(demand.composition) if demand.composition else {}
    held_by = [view.residency.ready_on(artifact.digest) for artifact in demand.artifacts]
    if not whole and not any(held_by):
        return
    places = view.loads.places(rows)
    for held, holders in zip(tiers, held_by, strict=True):
        for replica, tier in holders.items():
            row = view.loads.find(replica)
            if row is not None and (place := places[row.index]) >= 0:
                held[place] = _PLACE_OF[tier]
    for replica in whole:
        row = view.loads.find(replica)
        if row is not None and (place := places[row.index]) >= 0:
            tiers[:, place] = _HBM


def _load_s(demand: Demand, view: ClusterView, rows: Rows, tiers: Rows) -> Floats:
    """Seconds until all artifacts are read on each row, one after another."""
    count = len(demand.artifacts)
    # What is on a link already delays a request once, not each of its artifacts.
    factors = np.array(
        [
            (1.0, artifact.size_bytes, -(-artifact.size_bytes // CHUNK_BYTES), 1 / count)
            for artifact in demand.artifacts
        ]
    )
    # [tiers, artifacts, rows]
    by_tier = factors @ view.loads.tier_columns(rows)
    # A faster tier never costs more than a slower one: it could be read from there as well.
    for place in range(_REMOTE, 0, -1):
        np.minimum(by_tier[place - 1], by_tier[place], out=by_tier[place - 1])
    # Flat indices: the cheapest way to take one tier for each artifact and row.
    places = tiers.ravel() * tiers.size + np.arange(tiers.size)
    load_s: Floats = by_tier.ravel()[places].reshape(tiers.shape)
    _join_loads(demand, view, rows, load_s)
    total_s: Floats = np.add.reduce(load_s)
    return total_s


def _join_loads(demand: Demand, view: ClusterView, rows: Rows, load_s: Floats) -> None:
    """Where another request brings an artifact already, one load serves both."""
    for artifact, seconds in zip(demand.artifacts, load_s, strict=True):
        loading = view.loads.loading(artifact.digest)
        if not loading:
            continue
        places = view.loads.places(rows)
        for row, ready_s in loading.items():
            if row.index >= 0 and (place := places[row.index]) >= 0:
                seconds[place] = min(seconds[place], max(0.0, ready_s - view.now_s))
