"""Finds Cartridges for requests that name none, in the index of what their tenant may read.

Owns the indexes, one for each audience (tenant, kind of prompt, model), the documents prepared for
them, and what each session was given last. Refuses to put documents of different audiences into one
index: what one tenant adds changes nothing for another.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cartridge_proto.manifest import ConventionKind
from cartridge_router.catalog import Cartridge, Catalog
from cartridge_router.dialects import DIALECTS
from cartridge_router.questions import question_of
from cartridge_router.request import ParsedRequest
from cartridge_router.selection import (
    NO_CARTRIDGES,
    ModelKey,
    Selection,
    Selector,
    model_key,
)
from cartridge_router.settings import SelectionSettings

if TYPE_CHECKING:
    # Brought by the extra `selection`; loaded where it is used.
    from cartridge_router.retrieval.index import Index
    from cartridge_router.retrieval.parts import Found
    from cartridge_router.shelves import Shelves

logger = logging.getLogger(__name__)

MAX_SESSIONS: Final = 10_000
SESSION_S: Final = 1800.0
"""How long a session's Cartridges are remembered without a request."""
MAX_WAITING: Final = 64
"""Searches that wait for a thread; more find nothing at once."""
LOOK_S: Final = 0.5
"""How often audiences are compared with the catalog."""


class SearchOutcome(StrEnum):
    """How a search ended."""

    FOUND = "found"
    KEPT = "kept"
    """Nothing of its own: the session's Cartridges go on."""
    OUT_OF_SCOPE = "out_of_scope"
    NOTHING_MATCHES = "nothing_matches"
    EMPTY_INDEX = "empty_index"
    NOT_READY = "not_ready"
    """The audience's index is being made."""
    LATE = "late"
    BUSY = "busy"
    UNUSABLE = "unusable"
    """What was found cannot be joined, is too long, or no replica takes it."""


@dataclass(frozen=True)
class Audience:
    """Whose index: what it may read, in which kind of prompt, with which models."""

    tenant: str
    convention: ConventionKind
    models: frozenset[ModelKey]


@dataclass
class _Shelf:
    """One audience's index. `digests` is what it was made of; `index` is `None` until it is."""

    digests: frozenset[str] | None = None
    learned: str = ""
    """Tells which calibration it has; `index calibrate` writes another."""
    cartridges: Mapping[str, Cartridge] = field(default_factory=dict)
    index: "Index | None" = None


class Finder:
    """Searches in threads of its own. For use from one event loop.

    `on_search(outcome, seconds)` is called for each search.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        selector: Selector,
        settings: SelectionSettings,
        on_search: Callable[[SearchOutcome, float], None] = lambda outcome, seconds: None,
    ) -> None:
        self.settings = settings
        self._catalog = catalog
        self._selector = selector
        self._on_search = on_search
        self._shelves: OrderedDict[Audience, _Shelf] = OrderedDict()
        self._sessions: OrderedDict[tuple[str, str], tuple[float, tuple[str, ...]]] = OrderedDict()
        self._library: Shelves | None = None
        self._searchers = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="index")
        self._num_waiting = 0
        self._is_wanted = asyncio.Event()

    # --- the request path ------------------------------------------------------------------------
    def is_asked(self, request: ParsedRequest) -> bool:
        """Whether Cartridges are to be found for a request: it says nothing of them itself."""
        return (
            self.settings.enabled
            and request.cartridge_ids is None
            and request.can_take_prefix
            and request.route in self.settings.routes
        )

    async def find(
        self,
        request: ParsedRequest,
        *,
        tenant: str,
        models: Collection[ModelKey],
        session: str | None,
    ) -> Selection:
        """Cartridges for the question of a request; none where nothing is sure.

        `models`: of the engines that serve the request's model. Never raises, and never takes
        longer than `deadline_ms`: selection is a help, not a step that may fail.
        """
        started_s = time.monotonic()
        selection, outcome = await self._find(request, tenant, frozenset(models), session)
        self._on_search(outcome, time.monotonic() - started_s)
        return selection

    async def _find(
        self, request: ParsedRequest, tenant: str, models: frozenset[ModelKey], session: str | None
    ) -> tuple[Selection, SearchOutcome]:
        convention = DIALECTS[request.route].convention
        question = question_of(request)
        if convention is None or not question:
            return _nothing(SearchOutcome.NOTHING_MATCHES)
        shelf = self._shelf(Audience(tenant, convention, models))
        if shelf.index is None:
            return _nothing(SearchOutcome.NOT_READY)
        if self._num_waiting >= MAX_WAITING:
            return _nothing(SearchOutcome.BUSY)
        index, cartridges = shelf.index, shelf.cartridges
        try:
            async with asyncio.timeout(self.settings.deadline_ms / 1000):
                found = await self._search(index, question)
        except TimeoutError:
            return _nothing(SearchOutcome.LATE)
        ids: tuple[str, ...] = found.ids
        outcome = SearchOutcome(found.outcome.value)
        if not ids and session is not None:
            ids = tuple(i for i in self._last_of(tenant, session) if i in cartridges)
            outcome = SearchOutcome.KEPT if ids else outcome
        basis = f"chance={found.ranked.scope:.2f}; index={found.index_version[:12]}"
        if not ids:
            return replace(NO_CARTRIDGES, basis=f"{outcome}; {basis}"), outcome
        selection = self._selector.join_found(
            self._within_budget([cartridges[each] for each in ids]), tenant, basis=basis
        )
        if not selection.cartridges:
            return _nothing(SearchOutcome.UNUSABLE)
        if session is not None:
            self._remember(tenant, session, tuple(c.digest for c in selection.cartridges))
        return selection, outcome

    async def _search(self, index: "Index", question: str) -> "Found":
        from cartridge_router.retrieval.search import search

        self._num_waiting += 1
        loop, size = asyncio.get_running_loop(), self.settings.max_cartridges
        try:
            job = self._searchers.submit(search, index, question, max_size=size)
            try:
                return await asyncio.wrap_future(job, loop=loop)
            finally:
                job.cancel()
        finally:
            self._num_waiting -= 1

    def _within_budget(self, found: Sequence[Cartridge]) -> list[Cartridge]:
        """As many of the first as the budget of tokens has room for."""
        kept, left = [], self.settings.max_tokens
        for cartridge in found:
            left -= cartridge.manifest.num_tokens
            if left < 0:
                break
            kept.append(cartridge)
        return kept

    def _shelf(self, audience: Audience) -> _Shelf:
        shelf = self._shelves.get(audience)
        if shelf is None:
            shelf = self._shelves[audience] = _Shelf()
            self._is_wanted.set()
            while len(self._shelves) > self.settings.max_audiences:
                self._shelves.popitem(last=False)
        self._shelves.move_to_end(audience)
        return shelf

    # --- sessions --------------------------------------------------------------------------------
    def _last_of(self, tenant: str, session: str) -> tuple[str, ...]:
        used_s, ids = self._sessions.get((tenant, session), (0.0, ()))
        return ids if time.monotonic() - used_s < SESSION_S else ()

    def _remember(self, tenant: str, session: str, ids: tuple[str, ...]) -> None:
        self._sessions[tenant, session] = time.monotonic(), ids
        self._sessions.move_to_end((tenant, session))
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    # --- beside it -------------------------------------------------------------------------------
    @property
    def versions(self) -> dict[Audience, str | None]:
        """Version of each audience's index; `None` while it is being made."""
        return {
            audience: None if shelf.index is None else shelf.index.version
            for audience, shelf in self._shelves.items()
        }

    async def run(self) -> None:
        """Keep the indexes as the catalog is, until cancelled."""
        edition: object = None
        while True:
            self._is_wanted.clear()
            if self.settings.enabled:
                for audience in list(self._shelves):
                    shelf = self._shelves.get(audience)
                    if shelf is not None and (
                        shelf.digests is None or edition is not self._catalog.edition
                    ):
                        await self._renew(audience, shelf)
                edition = self._catalog.edition
                self._forget_unread()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._is_wanted.wait()
            except TimeoutError:
                continue

    def _forget_unread(self) -> None:
        """Drop what no index is made of any more."""
        read = {digest for shelf in self._shelves.values() for digest in shelf.cartridges}
        if self._library is not None:
            self._builder.submit(self._library.forget_all_but, read)

    async def _renew(self, audience: Audience, shelf: _Shelf) -> None:
        """Make the index of an audience anew, beside the old one, if what it may read changed."""
        loop = asyncio.get_running_loop()
        cartridges, learned = await loop.run_in_executor(self._builder, self._look_at, audience)
        if shelf.digests == cartridges.keys() and learned == shelf.learned:
            return
        index, shelf.learned = await loop.run_in_executor(
            self._builder, self._make, audience, list(cartridges.values())
        )
        shelf.digests = frozenset(cartridges)
        shelf.cartridges, shelf.index = cartridges, index
        logger.info(
            "index of %s (%s): %d documents, %s",
            *(audience.tenant, audience.convention.value, len(cartridges), index.version[:12]),
        )

    def _look_at(self, audience: Audience) -> tuple[dict[str, Cartridge], str]:
        """What an audience may read, the last version of each name; which calibration there is."""
        found: dict[str, Cartridge] = {
            cartridge.digest: cartridge
            for _, cartridge in self._catalog.newest_for(audience.tenant)
            if cartridge.manifest.prompt_convention.kind is audience.convention
            and cartridge.manifest.model.adapter is None
            and model_key(cartridge.manifest.model) in audience.models
        }
        return found, self._load_shelves().learned(audience.tenant, audience.convention)

    def _make(self, audience: Audience, cartridges: Sequence[Cartridge]) -> tuple["Index", str]:
        shelves = self._load_shelves()
        index = shelves.make(audience.tenant, audience.convention, cartridges)
        return index, shelves.learned(audience.tenant, audience.convention)

    def load(self) -> None:
        """Make ready what every index needs, if selection is on. Blocks for a second.

        Raises:
            ExtraMissing: a package of the extra `selection` is not installed.
        """
        if self.settings.enabled:
            self._load_shelves()

    def _load_shelves(self) -> "Shelves":
        from cartridge_router.shelves import Shelves

        if self._library is None:
            folder = self.settings.index_dir
            self._library = Shelves(
                self._catalog,
                embedder=self.settings.embedder,
                folder=None if folder is None else Path(folder),
            )
        return self._library

    def close(self) -> None:
        """End the threads, without waiting for what they do."""
        self._searchers.shutdown(wait=False, cancel_futures=True)
        self._builder.shutdown(wait=False, cancel_futures=True)


def _nothing(outcome: SearchOutcome) -> tuple[Selection, SearchOutcome]:
    return replace(NO_CARTRIDGES, basis=outcome.value), outcome
