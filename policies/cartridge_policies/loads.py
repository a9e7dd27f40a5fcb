"""What every replica is busy with, as numbers that change with each request.

Owns one row for each replica: requests, predicted seconds of work before their first tokens, bytes
on the way; of this gateway's bookings, and of what others say of theirs. Refuses clocks: whoever
books says when. Arrays are kept up to date row by row, so that a decision over a thousand replicas
reads them as they are.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cartridge_policies.rates import PRIORS, ReplicaRates
from cartridge_policies.types import Demand
from cartridge_proto.digest import Digest
from cartridge_proto.residency import TIERS_FASTEST_FIRST, ReplicaId, Tier

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

NUMBERS: Final = (
    "in_flight",
    "own_in_flight",
    "pending",
    "pending_s",
    "pending_tokens",
    "context_tokens",
    "behind_s",
    "pending_until_s",
    "unseen_until_s",
    "others_until_s",
    "slot_wait_s",
    "step_s",
    "prefill_base_s",
    "prefill_s_per_token",
    "prefill_s_per_token2",
    "queue_s_per_request",
    "step_tokens",
    "copy_s_per_byte",
)
"""Columns; from `prefill_base_s` on they are those of `ReplicaRates`.

`behind_s`: of `pending_s` what is not the oldest one's. `pending_until_s`: when all pending work
would be over, had the engine turned to it when it did; `inf` where that is not known. These three
and `own_in_flight` are of this gateway's requests; `others_until_s`: when the pending work of the
other gateways would be over, were it done at once. `slot_wait_s`: for a slot of the engine.
`step_s`: what running requests add to each step.
"""
_FIRST_RATE: Final = NUMBERS.index("prefill_base_s")


_IN_LOADS: Final = ("num_slots", "slot_s", "queue_s_per_request", "decode_s_per_context_token")
"""Rates that are in `slot_wait_s` and `step_s`."""


@dataclass(frozen=True)
class Load:
    """What requests of one gateway, or of several, are to a replica at one moment."""

    num_in_flight: int = 0
    num_pending: int = 0
    """Of them those whose first token has not come."""
    pending_s: float = 0.0
    """Predicted work before the first tokens."""
    pending_tokens: int = 0
    context_tokens: int = 0
    """Positions that each step of those that answer reads."""
    pending_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """On the way from each tier."""
    due_s: Mapping[Digest, float] = field(default_factory=dict)
    """Artifacts that are being brought -> in how many seconds they should be there."""

    def __add__(self, other: "Load") -> "Load":
        """Of both."""
        return Load(
            self.num_in_flight + other.num_in_flight,
            self.num_pending + other.num_pending,
            self.pending_s + other.pending_s,
            self.pending_tokens + other.pending_tokens,
            self.context_tokens + other.context_tokens,
            {
                tier: self.pending_bytes.get(tier, 0) + other.pending_bytes.get(tier, 0)
                for tier in self.pending_bytes.keys() | other.pending_bytes.keys()
            },
            # Whoever asked first has its load under way.
            {
                digest: min(self.due_s.get(digest, math.inf), other.due_s.get(digest, math.inf))
                for digest in self.due_s.keys() | other.due_s.keys()
            },
        )


IDLE: Final = Load()


class Row:
    """The place of one replica; stays valid for its requests after the replica has left."""

    def __init__(self, table: "LoadTable", replica: ReplicaId) -> None:
        self.replica = replica
        self.own_rates: ReplicaRates | None = None
        """Where it differs from the rest of the fleet."""
        self._table = table
        self.index = -1
        """In the table's arrays; -1 once it has left."""
        self.num_in_flight = 0
        self.num_pending = 0
        self.pending_s = 0.0
        self.pending_tokens = 0
        self.context_tokens = 0
        self.pending_order: dict[Booking, None] = {}
        """Those whose first token has not come, oldest first."""
        self.head_s = 0.0
        """Predicted work of the oldest of them."""
        self.head_since_s = math.inf
        """When the engine turned to it, as far as is known; `inf`: nothing is known."""
        self.unseen_until_s = -math.inf
        """When the prefill of those is over whose first token nobody sees."""
        self.num_unseen = 0
        """Of those that have not ended."""
        self.pending_bytes = dict.fromkeys(TIERS_FASTEST_FIRST, 0)
        self.num_waiting = Counter[Digest]()
        """Requests whose first token has not come, by each artifact that they demand."""
        self.loading: dict[Digest, float] = {}
        """Artifacts that this gateway's requests have brought -> when they are due."""
        self.others = IDLE
        """What other gateways have on this replica, as of `others_since_s`."""
        self.others_since_s = -math.inf

    @property
    def has_one(self) -> bool:
        """Whether one request runs, as far as is known."""
        return self.num_in_flight + self.others.num_in_flight == 1

    def own_load(self, now_s: float) -> Load:
        """What this gateway's requests are to the replica now, for other gateways."""
        if not self.num_in_flight:
            return IDLE
        left_s = min(self.pending_s, self.pending_s + self.head_since_s - now_s)
        return Load(
            self.num_in_flight,
            self.num_pending,
            # Sums of floats: what is left of nothing may be just below it, and is not believed.
            max(0.0, left_s, self.pending_s - self.head_s) + max(0.0, self.unseen_until_s - now_s),
            self.pending_tokens,
            self.context_tokens,
            {tier: size for tier, size in self.pending_bytes.items() if size},
            {digest: max(0.0, ready_s - now_s) for digest, ready_s in self.loading.items()},
        )

    @property
    def rates(self) -> ReplicaRates:
        """What it is predicted by."""
        return self.own_rates or self._table.shared_rates


class Booking:
    """One request on one replica: before its first token, then until its end."""

    def __init__(
        self,
        table: "LoadTable",
        row: Row,
        demand: Demand,
        work_s: float,
        loads: Mapping[Digest, Tier],
        now_s: float,
        loaded_s: float,
        is_streamed: bool,
    ) -> None:
        self.row = row
        self.was_alone = row.num_in_flight + row.others.num_in_flight == 0
        """Nothing else ran when it began: what it took tells the replica's rates."""
        self._table, self._demand, self._loads = table, demand, loads
        self.work_s = work_s
        """Predicted, of its prefill."""
        self.loaded_s = loaded_s
        """When all that it needs is predicted to be there."""
        self._is_pending = self._is_loading = True
        self._is_unseen = not is_streamed
        row.num_in_flight += 1
        for artifact in demand.artifacts:
            row.num_waiting[artifact.digest] += 1
            if artifact.digest in loads:
                row.pending_bytes[loads[artifact.digest]] += artifact.size_bytes
        if is_streamed:
            row.num_pending += 1
            row.pending_s += work_s
            row.pending_tokens += demand.num_live_tokens
            row.pending_order[self] = None
            if row.num_pending == 1:
                self._turn_to_head(now_s)
        else:
            # It decodes long before its answer comes as a whole; its prefill passes unseen.
            row.unseen_until_s = max(now_s, row.unseen_until_s) + work_s
            row.num_unseen += 1
            self._is_pending = False
            row.context_tokens += demand.num_context_tokens
        table.note(row)

    def _turn_to_head(self, now_s: float) -> None:
        """The engine turns to the oldest that waits, at the earliest when that is loaded."""
        row = self.row
        head = next(iter(row.pending_order), None)
        row.head_s = 0.0 if head is None else head.work_s
        row.head_since_s = math.inf if head is None else max(now_s, head.loaded_s)

    def note_first_token(self, now_s: float = math.inf) -> None:
        """Its prefill is done; from now on it decodes.

        `now_s`, by the clock of `book`: the next one's prefill begins. Without it the work of that
        one counts as a whole until it is done.
        """
        self._note_loaded(has_come=True)
        self._note_begun(now_s)

    def _note_begun(self, now_s: float) -> None:
        if not self._is_pending:
            return
        self._is_pending = False
        row = self.row
        row.num_pending -= 1
        row.pending_tokens -= self._demand.num_live_tokens
        row.pending_s = max(0.0, row.pending_s - self.work_s) if row.num_pending else 0.0
        row.context_tokens += self._demand.num_context_tokens
        del row.pending_order[self]
        self._turn_to_head(now_s)
        self._table.note(row)

    def _note_loaded(self, *, has_come: bool) -> None:
        """It waits for no load any more: all is there, or it has ended before."""
        if not self._is_loading:
            return
        self._is_loading = False
        row = self.row
        for artifact in self._demand.artifacts:
            tier = self._loads.get(artifact.digest)
            if tier is not None:
                row.pending_bytes[tier] -= artifact.size_bytes
            self._table.note_waits_no_more(artifact.digest, row, has_come=has_come)
        self._table.note(row)

    def end(self) -> None:
        """It is over; once."""
        # Without a first token it was given up, or its tokens were not seen one by one.
        self._note_loaded(has_come=self._is_unseen)
        self._note_begun(math.inf)
        if self._is_unseen:
            self.row.num_unseen -= 1
            if not self.row.num_unseen:
                # The answers are there: whatever was predicted, nothing is left to be done.
                self.row.unseen_until_s = -math.inf
        self.row.num_in_flight -= 1
        self.row.context_tokens -= self._demand.num_context_tokens
        self._table.note(self.row)


class LoadTable:
    """Rows of all replicas of a fleet; those without rates of their own share one set."""

    def __init__(self, rates: ReplicaRates = PRIORS) -> None:
        self.shared_rates = rates
        self._rows: list[Row] = []
        self._by_name: dict[ReplicaId, Row] = {}
        self._numbers: Floats = np.zeros((len(NUMBERS), 4))
        self._tiers: Floats = np.zeros((len(TIERS_FASTEST_FIRST), 4, 4))
        self._is_shared = np.zeros(4, dtype=bool)
        self._loading: dict[Digest, dict[Row, float]] = {}
        self._others_loading: dict[Digest, dict[Row, float]] = {}
        self.edition = 0
        """Grows when replicas join or leave: indices of rows are of one edition."""
        self._changed: set[Row] = set()

    # --- who is there ----------------------------------------------------------------------------
    def add(self, replica: ReplicaId, rates: ReplicaRates | None = None) -> Row:
        """A replica joins, idle."""
        if replica in self._by_name:
            raise ValueError(f"{replica} is in the table")
        row = Row(self, replica)
        row.index = len(self._rows)
        self._rows.append(row)
        self._by_name[replica] = row
        if row.index == self._numbers.shape[1]:
            self._numbers = np.concatenate((self._numbers, self._numbers), axis=1)
            self._tiers = np.concatenate((self._tiers, self._tiers), axis=2)
            self._is_shared = np.concatenate((self._is_shared, self._is_shared))
        self.set_rates(row, rates)
        self.edition += 1
        return row

    def remove(self, row: Row) -> None:
        """A replica leaves; its running requests go on counting in its row."""
        last = self._rows.pop()
        if last is not row:
            # The last one takes its place: arrays stay without gaps.
            self._rows[row.index] = last
            self._numbers[:, row.index] = self._numbers[:, last.index]
            self._tiers[:, :, row.index] = self._tiers[:, :, last.index]
            self._is_shared[row.index] = self._is_shared[last.index]
            last.index = row.index
        row.index = -1
        self._changed.discard(row)
        for digest in row.others.due_s:
            _forget(self._others_loading, digest, row)
        del self._by_name[row.replica]
        self.edition += 1

    def find(self, replica: ReplicaId) -> Row | None:
        """The row of a replica that is there."""
        return self._by_name.get(replica)

    def rows(self, replicas: Iterable[ReplicaId]) -> Rows:
        """Indices of replicas, in the order of their names: valid for this edition."""
        indices = [self._by_name[name].index for name in sorted(replicas)]
        return np.array(indices, dtype=np.intp)

    def name(self, index: int) -> ReplicaId:
        """Whose row an index is."""
        return self._rows[index].replica

    def places(self, rows: Rows) -> Rows:
        """For each index of the table its place in `rows`, or -1."""
        places = np.full(len(self._rows), -1, dtype=np.intp)
        places[rows] = np.arange(len(rows))
        return places

    # --- what they do ----------------------------------------------------------------------------
    def set_rates(self, row: Row, rates: ReplicaRates | None) -> None:
        """Predict a replica by rates of its own from now on; `None` = by the shared ones."""
        row.own_rates = rates
        if row.index >= 0:
            self._is_shared[row.index] = rates is None
            self._write_rates(rates or self.shared_rates, np.array([row.index]))
            self._write(row)

    def share_rates(self, rates: ReplicaRates) -> None:
        """Predict all replicas without rates of their own by these from now on."""
        before, self.shared_rates = self.shared_rates, rates
        shared = np.flatnonzero(self._is_shared[: len(self._rows)])
        self._write_rates(rates, shared)
        if any(getattr(before, name) != getattr(rates, name) for name in _IN_LOADS):
            for index in shared.tolist():
                self._write(self._rows[index])

    def _write_rates(self, rates: ReplicaRates, rows: Rows) -> None:
        column = np.array([getattr(rates, name) for name in NUMBERS[_FIRST_RATE:]], float)
        self._numbers[_FIRST_RATE:, rows] = column[:, None]
        tiers = np.array(
            [
                (rate.latency_s, 1 / rate.bytes_per_s, rate.s_per_chunk)
                for rate in (rates.tiers[tier] for tier in TIERS_FASTEST_FIRST)
            ]
        )
        self._tiers[:, :3, rows] = tiers[:, :, None]

    def book(
        self,
        row: Row,
        demand: Demand,
        *,
        tiers: Mapping[Digest, Tier],
        now_s: float,
        is_streamed: bool = True,
    ) -> Booking:
        """Count a request, at once, so that the next decision sees it.

        `tiers`: where the replica reads each artifact from. One that another request is already
        bringing is not brought again. `is_streamed`: its first token will be seen; if not, its
        prefill is taken to be over when it is predicted to be.
        """
        loads = {
            digest: tier
            for digest, tier in tiers.items()
            if tier is not Tier.HBM and row not in self.loading(digest)
        }
        loaded_s = now_s
        for artifact in demand.artifacts:
            digest = artifact.digest
            if digest in loads:
                load_s = row.rates.load_s(loads[digest], artifact.size_bytes)
                row.loading[digest] = now_s + load_s
                self._loading.setdefault(digest, {})[row] = now_s + load_s
            loaded_s = max(loaded_s, self.loading(digest).get(row, now_s))
        work_s = row.rates.prefill_s(demand.num_live_tokens, demand.num_virtual_tokens)
        return Booking(self, row, demand, work_s, loads, now_s, loaded_s, is_streamed)

    def loading(self, digest: Digest) -> Mapping[Row, float]:
        """Replicas that are being brought an artifact -> when it is due, by `book`'s clock."""
        own, others = self._loading.get(digest, {}), self._others_loading.get(digest)
        return own if others is None else {**others, **own}

    def note_waits_no_more(self, digest: Digest, row: Row, *, has_come: bool) -> None:
        """A request that waited for an artifact has it, or was given up; others may still wait."""
        row.num_waiting[digest] -= 1
        if row.num_waiting[digest] <= 0:
            del row.num_waiting[digest]
        elif not has_come:
            return
        row.loading.pop(digest, None)
        _forget(self._loading, digest, row)
        if has_come:
            # Whoever had it brought.
            _forget(self._others_loading, digest, row)

    def take_changed(self) -> list[Row]:
        """Rows whose bookings have changed since the last call, in no order."""
        changed, self._changed = self._changed, set()
        return list(changed)

    def note_others(self, row: Row, load: Load, now_s: float) -> None:
        """Count what all other gateways have on a replica, instead of what they had before."""
        for digest in row.others.due_s.keys() - load.due_s.keys():
            _forget(self._others_loading, digest, row)
        row.others, row.others_since_s = load, now_s
        if row.index >= 0:
            for digest, due_s in load.due_s.items():
                self._others_loading.setdefault(digest, {})[row] = now_s + due_s
        self._write(row)

    def note(self, row: Row) -> None:
        """Bookings of a row have changed."""
        if row.index >= 0:
            self._changed.add(row)
            self._write(row)

    def _write(self, row: Row) -> None:
        """Write a row's numbers into the arrays."""
        if row.index < 0:
            return
        rates, others = row.rates, row.others
        num_in_flight = row.num_in_flight + others.num_in_flight
        num_pending = row.num_pending + others.num_pending
        context_tokens = row.context_tokens + others.context_tokens
        slot_wait_s = 0.0
        if rates.num_slots is not None:
            num_before = max(0, num_in_flight + 1 - rates.num_slots)
            slot_wait_s = num_before / rates.num_slots * rates.slot_s
        self._numbers[:_FIRST_RATE, row.index] = (
            num_in_flight,
            row.num_in_flight,
            num_pending,
            row.pending_s,
            row.pending_tokens + others.pending_tokens,
            context_tokens,
            row.pending_s - row.head_s,
            row.pending_s + row.head_since_s,
            row.unseen_until_s,
            row.others_since_s + others.pending_s,
            slot_wait_s,
            (num_in_flight - num_pending) * rates.queue_s_per_request
            + context_tokens * rates.decode_s_per_context_token,
        )
        self._tiers[:, 3, row.index] = [
            (num_bytes + others.pending_bytes.get(tier, 0)) / rates.tiers[tier].bytes_per_s
            for tier, num_bytes in row.pending_bytes.items()
        ]

    # --- for policies ----------------------------------------------------------------------------
    def column(self, name: str, rows: Rows) -> Floats:
        """One of `NUMBERS` for some rows."""
        taken: Floats = self._numbers[NUMBERS.index(name), rows]
        return taken

    def columns(self, rows: Rows) -> Floats:
        """All of `NUMBERS` for some rows, [numbers, rows]."""
        taken: Floats = self._numbers.take(rows, axis=1)
        return taken

    def tier_columns(self, rows: Rows) -> Floats:
        """Seconds of latency, per byte, per chunk, and of what is on the way: [tiers, 4, rows]."""
        taken: Floats = self._tiers.take(rows, axis=2)
        return taken


def _forget(loading: dict[Digest, dict[Row, float]], digest: Digest, row: Row) -> None:
    rows = loading.get(digest)
    if rows is not None and rows.pop(row, None) is not None and not rows:
        del loading[digest]
