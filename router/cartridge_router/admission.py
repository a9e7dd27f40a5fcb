"""Which requests go on at once, and in what order the others wait for room.

Owns the queues, one for each model, bounded in requests, in requests of one tenant and in bytes.
Refuses to choose replicas: it asks for the placement of those that wait again when there is room.

Order: higher priority first; among equals, tenants take turns by start-time fair queueing, so that
one who sends much does not keep the others waiting; among one tenant's, who came first.

Source: Goyal, Vin, Cheng, "Start-Time Fair Queueing", SIGCOMM 1996.
"""

import asyncio
import bisect
import contextlib
import heapq
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Final

from cartridge_router.errors import (
    AllReplicasSaturated,
    DeadlineExceeded,
    QueueFull,
    QueueTimeout,
    RouterError,
)
from cartridge_router.fleet import Fleet
from cartridge_router.placement import Placement
from cartridge_router.settings import AdmissionSettings

LOOK_S: Final = 0.25
"""How often those who wait are looked at without a request having ended: replicas come back."""
MAX_RETRY_AFTER_S: Final = 60
_RATE_WEIGHT: Final = 0.1
"""Of the newest gap between two grants in their running mean."""


@dataclass(frozen=True)
class Ticket:
    """What the order and the bounds of a queue depend on.

    `needs`: requests of one model with equal needs can go to the same replicas. `deadline_s`: when
    the client gives up, by `time.monotonic`; `None` = it does not.
    """

    model: str
    tenant: str
    needs: Hashable
    size_bytes: int
    priority: int = 0
    deadline_s: float | None = None


@dataclass(eq=False)
class _Waiter:
    ticket: Ticket
    place: Callable[[], Placement]
    place_in_line: tuple[int, int]
    """Priority, the other way round, and arrival: smaller goes first among one tenant's."""
    answer: asyncio.Future[Placement | Exception]
    """Never an exception of the future's own: nobody might be there to take it."""
    slot: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Keeps the room on the replica until the request itself takes it."""


class _Queue:
    """Those who wait for one model, in order."""

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []
        self._num_of = Counter[str]()
        self._virtual_time = 0.0
        self._finish_tags: dict[str, float] = {}
        self._granted_s: float | None = None
        self._mean_gap_s = 0.0

    def __len__(self) -> int:
        return len(self._waiters)

    def num_of(self, tenant: str) -> int:
        """Requests of one tenant that wait."""
        return self._num_of[tenant]

    def join(self, waiter: _Waiter) -> None:
        """Let one wait at its place."""
        bisect.insort(self._waiters, waiter, key=lambda each: each.place_in_line)
        self._num_of[waiter.ticket.tenant] += 1

    def leave(self, waiter: _Waiter) -> None:
        """Let one that waits go, whyever."""
        begin = bisect.bisect_left(
            self._waiters, waiter.place_in_line, key=lambda each: each.place_in_line
        )
        assert self._waiters[begin] is waiter  # noqa: S101 - places are unique
        del self._waiters[begin]
        self._num_of[waiter.ticket.tenant] -= 1

    def in_order(self) -> Iterator[_Waiter]:
        """All that wait now, first the one whose turn it is."""
        for _, equals in itertools.groupby(list(self._waiters), lambda each: each.place_in_line[0]):
            lines: dict[str, deque[_Waiter]] = {}
            for waiter in equals:
                lines.setdefault(waiter.ticket.tenant, deque()).append(waiter)
            # Start tags: of the first of each tenant its own, of each further one a request later.
            heads = [
                (self._start_tag(tenant), line[0].place_in_line[1], tenant)
                for tenant, line in lines.items()
            ]
            heapq.heapify(heads)
            while heads:
                tag, _, tenant = heapq.heappop(heads)
                line = lines[tenant]
                yield line.popleft()
                if line:
                    heapq.heappush(heads, (tag + 1.0, line[0].place_in_line[1], tenant))

    def _start_tag(self, tenant: str) -> float:
        return max(self._virtual_time, self._finish_tags.get(tenant, 0.0))

    def note_granted(self, waiter: _Waiter) -> None:
        """Charge its tenant with one request; who leaves without a grant is charged nothing."""
        tenant = waiter.ticket.tenant
        self._virtual_time = self._start_tag(tenant)
        self._finish_tags[tenant] = self._virtual_time + 1.0
        now_s = time.monotonic()
        if self._granted_s is not None:
            self._mean_gap_s += _RATE_WEIGHT * (now_s - self._granted_s - self._mean_gap_s)
        self._granted_s = now_s

    @property
    def wait_s(self) -> int:
        """Guess at how long one who joined now would wait, in whole seconds, at least 1."""
        guess_s = math.ceil(len(self._waiters) * self._mean_gap_s)
        return min(MAX_RETRY_AFTER_S, max(1, guess_s))


class Admission:
    """Lets requests go on or wait. For use from one event loop.

    Room that a request was granted is its own: between the grant and the moment it counts itself
    as in flight nobody else gets it.
    """

    def __init__(self, fleet: Fleet, settings: AdmissionSettings) -> None:
        self.settings = settings
        self._fleet = fleet
        self._queues: dict[str, _Queue] = {}
        self._num_bytes = 0
        self._arrivals = itertools.count()
        self._is_due = False
        fleet.call_when_freed(self._look_soon)

    @property
    def num_queued(self) -> dict[str, int]:
        """Model -> requests that wait; models for which none does are left out."""
        return {model: len(queue) for model, queue in self._queues.items()}

    async def place(
        self, ticket: Ticket, place: Callable[[], Placement]
    ) -> tuple[Placement, float | None]:
        """The placement of a request, and the seconds it waited for room; `None` for not at all.

        The caller counts the request as in flight before it next gives up the event loop.

        Raises:
            QueueFull: too many wait.
            QueueTimeout: it has waited as long as a request may.
            DeadlineExceeded: it has waited as long as its client does.
            RouterError: what `place` raised, at once or while it waited.
        """
        queue = self._queues.get(ticket.model)
        if queue is None:
            try:
                return place(), None
            except AllReplicasSaturated as error:
                if not self.settings.max_queued:
                    raise
                self._check_bounds(ticket, _Queue(), error)
                queue = self._queues[ticket.model] = _Queue()
        else:
            self._check_bounds(ticket, queue, None)
        joined_s = time.monotonic()
        return await self._wait(ticket, queue, place), time.monotonic() - joined_s

    def _check_bounds(
        self, ticket: Ticket, queue: _Queue, cause: AllReplicasSaturated | None
    ) -> None:
        settings = self.settings
        for count, limit, what in (
            (len(queue) + 1, settings.max_queued, f"requests for {ticket.model}"),
            (
                queue.num_of(ticket.tenant) + 1,
                settings.max_queued_per_tenant,
                f"requests of tenant {ticket.tenant} for {ticket.model}",
            ),
            (self._num_bytes + ticket.size_bytes, settings.max_queued_bytes, "bytes of requests"),
        ):
            if count > limit:
                raise QueueFull(
                    f"all replicas are busy, and no more than {limit} {what} may wait",
                    retry_after_s=queue.wait_s,
                ) from cause

    async def _wait(
        self, ticket: Ticket, queue: _Queue, place: Callable[[], Placement]
    ) -> Placement:
        loop = asyncio.get_running_loop()
        place_in_line = (-ticket.priority, next(self._arrivals))
        waiter = _Waiter(ticket, place, place_in_line, loop.create_future())
        longest_s, has_deadline = self.settings.max_wait_s, False
        if ticket.deadline_s is not None:
            left_s = ticket.deadline_s - time.monotonic()
            has_deadline = left_s < longest_s
            longest_s = min(longest_s, left_s)
        queue.join(waiter)
        self._num_bytes += ticket.size_bytes
        # Room that those ahead cannot use may do for this one.
        self._look_soon()
        try:
            async with asyncio.timeout(longest_s):
                answer = await waiter.answer
        except TimeoutError as error:
            if has_deadline:
                raise DeadlineExceeded(
                    "the request waited for a replica until its deadline"
                ) from error
            raise QueueTimeout(
                f"all replicas were busy for {longest_s:g} s", retry_after_s=queue.wait_s
            ) from error
        finally:
            # The caller takes the room before anybody looks for some.
            waiter.slot.close()
            self._num_bytes -= ticket.size_bytes
            queue.leave(waiter)
            if not queue:
                del self._queues[ticket.model]
        if isinstance(answer, Exception):
            raise answer
        return answer

    # --- when there may be room ------------------------------------------------------------------
    async def run(self) -> None:
        """Look now and then until cancelled, for what changes without a request that ends."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._look_soon()

    def refuse_all(self, error: RouterError) -> None:
        """Let nobody wait any longer, and say why."""
        for queue in self._queues.values():
            for waiter in queue.in_order():
                if not waiter.answer.done():
                    waiter.answer.set_result(error)

    def _look_soon(self) -> None:
        # Not at once: whoever gave the room up may be about to take it for itself.
        if self._queues and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_due = False
        for model, queue in self._queues.items():
            self._grant(model, queue)

    def _grant(self, model: str, queue: _Queue) -> None:
        if self._fleet.is_full(model):
            return
        hopeless = set[Hashable]()
        for waiter in queue.in_order():
            if waiter.answer.done() or waiter.ticket.needs in hopeless:
                continue
            try:
                placement = waiter.place()
            except AllReplicasSaturated:
                hopeless.add(waiter.ticket.needs)
            except Exception as error:
                waiter.answer.set_result(error)
            else:
                self._hold(waiter, placement)
                queue.note_granted(waiter)
                waiter.answer.set_result(placement)
                if self._fleet.is_full(model):
                    return

    def _hold(self, waiter: _Waiter, placement: Placement) -> None:
        replica = self._fleet.find(placement.replica)
        assert replica is not None  # noqa: S101 - placed just now
        waiter.slot.enter_context(self._fleet.in_flight(replica, placement.demand))
