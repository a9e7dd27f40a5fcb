"""Finds Cartridges for requests that name none, in the index of what their tenant may read.

Owns the indexes, one for each audience (tenant, kind of prompt, model), the documents prepared for
them, and what each session was given last. Refuses to put documents of different audiences into one
index: what one tenant adds changes nothing for another.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cartridge_proto.manifest import ConventionKind, Manifest
from cartridge_router.catalog import Cartridge, Catalog
from cartridge_router.dialects import DIALECTS
from cartridge_router.questions import question_of
from cartridge_router.request import ParsedRequest
from cartridge_router.selection import (
    NO_CARTRIDGES,
    ModelKey,
    Selection,
    Selector,
    is_of_one_model,
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
"""Of one tenant."""
SESSION_S: Final = 1800.0
"""How long a session's Cartridges are remembered without a request."""
MAX_WAITING: Final = 64
"""Searches that wait for a thread; more find nothing at once."""
MAX_WAITING_OF_TENANT: Final = 16
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
    FAILED = "failed"
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
        self._sessions: dict[str, OrderedDict[str, tuple[float, tuple[str, ...]]]] = {}
        self._library: Shelves | None = None
        self._searchers = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._builder = ThreadPoolExecutor(1, thread_name_prefix="index")
        self._waiting = Counter[str]()
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
        is_dry: bool = False,
    ) -> Selection:
        """Cartridges for the question of a request; none where nothing is sure.

        `models`: of the engines that serve the request's model. Never raises, and never takes
        longer than `deadline_ms`: selection is a help, not a step that may fail. `is_dry`: nothing
        is remembered of it.
        """
        started_s = time.monotonic()
        selection, outcome = await self._find(request, tenant, frozenset(models), session)
        if not is_dry:
            self._on_search(outcome, time.monotonic() - started_s)
            if session is not None and selection.cartridges:
                digests = tuple(cartridge.digest for cartridge in selection.cartridges)
                self._remember(tenant, session, digests)
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
        is_full = self._waiting.total() >= MAX_WAITING
        if is_full or self._waiting[tenant] >= MAX_WAITING_OF_TENANT:
            return _nothing(SearchOutcome.BUSY)
        index, cartridges = shelf.index, shelf.cartridges
        try:
            async with asyncio.timeout(self.settings.deadline_ms / 1000):
                found = await self._search(index, question, tenant)
        except TimeoutError:
            return _nothing(SearchOutcome.LATE)
        except Exception:
            logger.exception("a search failed")
            return _nothing(SearchOutcome.FAILED)
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
        return selection, outcome

    async def _search(self, index: "Index", question: str, tenant: str) -> "Found":
        from cartridge_router.retrieval.search import search

        self._waiting[tenant] += 1
        loop, library = asyncio.get_running_loop(), self._library
        try:
            job = self._searchers.submit(
                search,
                index,
                question,
                max_size=self.settings.max_cartridges,
                reranker=None if library is None else library.reranker,
            )
            try:
                return await asyncio.wrap_future(job, loop=loop)
            finally:
                job.cancel()
        finally:
            self._waiting[tenant] -= 1

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
        known = self._sessions[tenant].get(session) if tenant in self._sessions else None
        return known[1] if known and time.monotonic() - known[0] < SESSION_S else ()

    def _remember(self, tenant: str, session: str, ids: tuple[str, ...]) -> None:
        sessions = self._sessions.setdefault(tenant, OrderedDict())
        sessions[session] = time.monotonic(), ids
        sessions.move_to_end(session)
        while len(sessions) > MAX_SESSIONS:
            sessions.popitem(last=False)

    # --- beside it -------------------------------------------------------------------------------
    async def run(self) -> None:
        """Keep the indexes as the catalog is, until cancelled."""
        known: dict[Audience, object] = {}
        while True:
            self._is_wanted.clear()
            edition = self._catalog.edition
            for audience, shelf in list(self._shelves.items()) if self.settings.enabled else ():
                if shelf.digests is None or known.get(audience) is not edition:
                    known[audience] = edition
                    await self._try_to_renew(audience, shelf)
            for audience in known.keys() - self._shelves.keys():
                del known[audience]
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

    async def _try_to_renew(self, audience: Audience, shelf: _Shelf) -> None:
        """As `_renew`; one audience's trouble is not the others'."""
        try:
            if await self._renew(audience, shelf):
                self._forget_unread()
        except Exception:
            logger.exception("the index of %s stays as it is", audience.tenant)

    async def _renew(self, audience: Audience, shelf: _Shelf) -> bool:
        """Make the index of an audience anew, beside the old one, if what it may read changed."""
        loop = asyncio.get_running_loop()
        cartridges, learned = await loop.run_in_executor(self._builder, self._look_at, audience)
        if shelf.digests == cartridges.keys() and learned == shelf.learned:
            return False
        index, shelf.learned = await loop.run_in_executor(
            self._builder, self._make, audience, list(cartridges.values())
        )
        shelf.digests = frozenset(cartridges)
        shelf.cartridges, shelf.index = cartridges, index
        logger.info(
            "index of %s (%s): %d documents, %s",
            *(audience.tenant, audience.convention.value, len(cartridges), index.version[:12]),
        )
        return True

    def _look_at(self, audience: Audience) -> tuple[dict[str, Cartridge], str]:
        """What an audience may read, the last version of each name; which calibration there is."""

        def is_wanted(manifest: Manifest) -> bool:
            key = model_key(manifest.model)
            return (
                manifest.prompt_convention.kind is audience.convention
                and manifest.model.adapter is None
                and any(is_of_one_model(key, model) for model in audience.models)
            )

        wanted = self._catalog.newest_for(audience.tenant, is_wanted)
        found: dict[str, Cartridge] = {cartridge.digest: cartridge for cartridge in wanted}
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
            folder, reranker = self.settings.index_dir, self.settings.reranker
            self._library = Shelves(
                self._catalog,
                embedder=self.settings.embedder,
                folder=None if folder is None else Path(folder),
                reranker=None if reranker is None else Path(reranker),
            )
        return self._library

    def close(self) -> None:
        """End the threads, without waiting for what they do."""
        self._searchers.shutdown(wait=False, cancel_futures=True)
        self._builder.shutdown(wait=False, cancel_futures=True)


def _nothing(outcome: SearchOutcome) -> tuple[Selection, SearchOutcome]:
    return replace(NO_CARTRIDGES, basis=outcome.value), outcome
