"""From able replicas to an ordered decision: lowest cost first, fair among equals.

Owns the steps and the tie rule that all policies share, and why none can be chosen. Refuses
randomness: fairness comes from the view's tick.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, overload

import numpy as np

from cartridge_policies.cost import CostTable, costs
from cartridge_policies.loads import Floats, Rows
from cartridge_policies.types import (
    Candidate,
    ClusterView,
    Decision,
    Demand,
    Refusal,
    RefusalKind,
)

RELATIVE_TIE: Final = 1e-9

Key = Callable[[CostTable, Rows], Floats]
"""What a policy sorts by, one number for each row; lower is better."""


class Ranking(Sequence[Candidate]):
    """Candidates, best first; each is put into words when it is looked at."""

    def __init__(self, table: CostTable, view: ClusterView, rows: Rows, order: Rows) -> None:
        self._table = table
        # Rows of the table may be others by the time somebody looks.
        self._names = [view.loads.name(row) for row in rows.tolist()]
        self._order = order.tolist()
        self._told: dict[int, Candidate] = {}

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...
    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        if isinstance(index, slice):
            return tuple(self._tell(place) for place in self._order[index])
        return self._tell(self._order[index])

    def __iter__(self) -> Iterator[Candidate]:
        return map(self._tell, self._order)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _tell(self, place: int) -> Candidate:
        told = self._told.get(place)
        if told is None:
            told = self._told[place] = self._table.candidate(place, self._names[place])
        return told


def able_rows(view: ClusterView) -> Rows | Refusal:
    """Rows below their limit; or what stood in the way of each replica."""
    refusals = view.refusals or {}
    if not len(view.rows):
        return Refusal(RefusalKind.NO_ELIGIBLE, dict(refusals))
    if view.max_in_flight is None:
        return view.rows
    in_flight = view.loads.column("own_in_flight", view.rows)
    free = in_flight < view.max_in_flight
    if free.all():
        return view.rows
    if not free.any():
        full = {
            view.loads.name(row): f"{int(count)} requests in flight"
            for row, count in zip(view.rows.tolist(), in_flight, strict=True)
        }
        return Refusal(RefusalKind.SATURATED, {**refusals, **full})
    return view.rows[free]


def decide_by(
    key: Key, demand: Demand, view: ClusterView, *, reason: Callable[[Candidate], str]
) -> Decision | Refusal:
    """Rank the able replicas by a key; `reason` says why the best one is.

    Those tied for the best take turns by tick. Independent of the order of the table's rows.
    """
    rows = able_rows(view)
    if isinstance(rows, Refusal):
        return rows
    table = costs(demand, view, rows)
    values = key(table, rows)
    # Rows are in the order of names, and the sort is stable.
    order = values.argsort(kind="stable")
    best = values[order[0]]
    num_tied = int(np.count_nonzero(values <= best + abs(best) * RELATIVE_TIE))
    if num_tied > 1 and (turn := view.tick % num_tied):
        order[:num_tied] = np.concatenate((order[turn:num_tied], order[:turn]))
    ranking = Ranking(table, view, rows, order)
    return Decision(ranking, reason(ranking[0]))
