"""The last requests and why they went where they did, and which Cartridges are asked for most.

Owns a ring of requests and counts of the last minutes. Refuses bodies, keys, whatever else is as
long as a client likes, and to cost a request more than a few references.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from cartridge_policies.types import Candidate, MapMode
from cartridge_proto.digest import Digest
from cartridge_proto.names import HEADER_REPLICA
from cartridge_router.errors import RouterError
from cartridge_router.forwarding import Exchange
from cartridge_router.placement import Placement
from cartridge_router.request import ParsedRequest
from cartridge_router.selection import Selection

MAX_REQUESTS: Final = 100
MAX_CANDIDATES: Final = 8
"""Of one decision that are kept, best first."""
MAX_TEXT: Final = 120
"""Characters of what a client chose."""
HOT_WINDOW_S: Final = 300.0
_SLICE_S: Final = 15.0


@dataclass(eq=False, slots=True)
class LoggedRequest:
    """One request, filled while it is served; times are `time.monotonic()`, but `at_s` Unix time.

    `status` is `None` while it is served. `replica` is who was asked last.
    """

    request_id: str
    route: str
    started_s: float
    at_s: float = 0.0
    model: str = ""
    tenant: str = ""
    cartridges: tuple[str, ...] = ()
    """Aliases, in order."""
    selected_by: str = ""
    candidates: tuple[Candidate, ...] = ()
    """The best of them, the chosen one first; empty while none is chosen."""
    num_candidates: int = 0
    reason: str | None = None
    map_mode: MapMode | None = None
    map_age_s: float | None = None
    status: int | None = None
    problem: str | None = None
    """Why the gateway itself refused or failed it."""
    ended_s: float | None = None
    first_byte_s: float | None = None
    queued_s: float | None = None
    """How long it waited for room; `None` for not at all."""
    replica: str | None = None
    num_retries: int = 0

    def place(self, placement: Placement, queued_s: float | None) -> None:
        """It is known where the request goes."""
        self.queued_s = queued_s
        ranking = placement.decision.ranking
        self.candidates = tuple(ranking[:MAX_CANDIDATES])
        self.num_candidates = len(ranking)
        self.reason, self.replica = placement.reason, placement.replica
        self.map_mode, self.map_age_s = placement.mode, placement.map_age_s

    def refuse(self, error: RouterError) -> None:
        """The gateway answers with an error of its own."""
        self.problem = f"{error.code}: {error.message[:MAX_TEXT]}"

    def end(self, status: int, exchange: Exchange, ended_s: float) -> None:
        """It is over."""
        self.status, self.ended_s = status, ended_s
        self.first_byte_s, self.num_retries = exchange.first_byte_s, exchange.num_retries
        self.replica = exchange.headers.get(HEADER_REPLICA, self.replica)


class DecisionLog:
    """The last requests of tenants whose Cartridges were found. For use from one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.hot = HotCounts(clock)
        self._ring: deque[LoggedRequest] = deque(maxlen=MAX_REQUESTS)

    def add(
        self, logged: LoggedRequest, parsed: ParsedRequest, selection: Selection, tenant: str
    ) -> None:
        """A request is about to be placed."""
        logged.at_s = time.time()
        logged.model, logged.tenant = parsed.model[:MAX_TEXT], tenant[:MAX_TEXT]
        logged.selected_by = selection.how.value
        if selection.cartridges:
            logged.cartridges = tuple(c.manifest.alias for c in selection.cartridges)
            self.hot.note(c.digest for c in selection.cartridges)
        self._ring.append(logged)

    @property
    def requests(self) -> list[LoggedRequest]:
        """Those that are kept, the newest first."""
        return list(reversed(self._ring))


class HotCounts:
    """How often each artifact was asked for in the last `HOT_WINDOW_S` seconds, about."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slices: deque[tuple[float, Counter[Digest]]] = deque(
            maxlen=int(HOT_WINDOW_S / _SLICE_S)
        )

    def note(self, digests: Iterable[Digest]) -> None:
        """A request asked for these."""
        now_s = self._clock()
        if not self._slices or now_s - self._slices[-1][0] >= _SLICE_S:
            self._slices.append((now_s, Counter()))
        self._slices[-1][1].update(digests)

    @property
    def counts(self) -> Counter[Digest]:
        """Requests by artifact."""
        oldest_s, total = self._clock() - HOT_WINDOW_S, Counter[Digest]()
        for begun_s, counted in self._slices:
            if begun_s > oldest_s:
                total.update(counted)
        return total
