"""The HTTP surface: each request as one list of steps.

Owns handlers and the shape of answers. Refuses to choose anything or to talk to Redis, the store or
a replica itself.
"""

import asyncio
import contextlib
import dataclasses
import functools
import http
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from opentelemetry.trace import Span, Tracer

from cartridge_policies.types import Candidate
from cartridge_proto import names
from cartridge_proto.composition import OnMiss
from cartridge_proto.residency import ReplicaId
from cartridge_router.admission import Admission, Ticket
from cartridge_router.catalog import Catalog
from cartridge_router.copies import Copies
from cartridge_router.decisions import DecisionLog, LoggedRequest
from cartridge_router.dialects import DIALECTS, Dialect
from cartridge_router.doors import Doors
from cartridge_router.drain import Drain
from cartridge_router.errors import (
    AllReplicasSaturated,
    DeadlineExceeded,
    GatewayEnding,
    InvalidRequest,
    MethodNotAllowed,
    RequestTimeout,
    RequestTooLarge,
    ResponseUnavailable,
    RouterError,
    UnknownModel,
    UnknownPath,
    UnknownReceipt,
    UnknownResponse,
)
from cartridge_router.finding import Finder
from cartridge_router.fleet import Fleet, ServedModel
from cartridge_router.forwarding import Exchange, Forwarder, Outgoing
from cartridge_router.limits import Limits
from cartridge_router.live_settings import LiveSettings
from cartridge_router.logs import REQUEST_ID
from cartridge_router.observations import Observations
from cartridge_router.openapi import DESCRIPTION
from cartridge_router.placement import MISSES, Instead, Placement, Placer, StandIn
from cartridge_router.prefix_salts import SALTED_PATHS, PrefixSalts
from cartridge_router.receipts import ReceiptBook
from cartridge_router.request import (
    ParsedRequest,
    Route,
    engine_body,
    has_known_length,
    parse_request,
    previous_response_id,
)
from cartridge_router.residency_map import ResidencyMap
from cartridge_router.response_book import MAX_ID_CHARS, ResponseBook
from cartridge_router.selection import NO_CARTRIDGES, SelectedBy, Selection, Selector
from cartridge_router.settings import Settings
from cartridge_router.shared_loads import SharedLoads
from cartridge_router.siblings import Siblings
from cartridge_router.steering import Steering, read_steering
from cartridge_router.telemetry import Metrics, current_traceparent, merged, span_of
from cartridge_router.tenants import Tenant, Tenants
from cartridge_router.text_prompts import (
    can_take_texts,
    num_text_tokens,
    with_text_tokens,
    with_texts,
)
from cartridge_router.texts import Texts

_OUTSIDE_V1 = ("/tokenize", "/detokenize", "/pooling", "/classify")
_RANKING = ("/score", "/rerank", "/v2/rerank")
"""With these, what vLLM serves for clients beside `/v1/`."""
logger = logging.getLogger(__name__)

_OTHERS = (
    "/v1/{tail:(?!(?:chat/completions|completions|responses|messages(?:/count_tokens)?)$"
    "|(?:models|cartridges)(?:/|$)).+}"
)
"""All but what is served here: that says itself which methods it takes, and no engine is asked."""
_STORED = re.compile(r"/v1/responses/([^/]+)(/.*)?", re.DOTALL)
"""What one replica keeps in its memory, and what is below it."""
_CLIENT_CLOSED_REQUEST = 499
"""Status that is counted when the client went away; nobody receives it."""
_SEPARATOR: Final = re.compile(r"[/\\]")
_FOR_OPERATORS: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Change an engine for everybody."""
UNUSABLE: Final = dataclasses.replace(NO_CARTRIDGES, basis="unusable")
"""What was found could not be used, and the request goes without."""
_OF_ALL: Final = (AllReplicasSaturated, DeadlineExceeded, GatewayEnding)
"""What a request fails with whatever Cartridges were found for it; the rest may be theirs."""
MAX_EXPLAINED: Final = 8
"""Candidates in a header: clients take heads of some kilobytes."""
_REPEATABLE: Final = re.compile(r"[ -~]{1,128}")
"""Ids of clients that go into an answer."""


@dataclass(frozen=True)
class Services:
    """Everything the handlers use; made in `app.py`."""

    live: LiveSettings
    tenants: Tenants
    salts: PrefixSalts
    limits: Limits
    catalog: Catalog
    residency: ResidencyMap
    fleet: Fleet
    selector: Selector
    finder: Finder
    texts: Texts
    placer: Placer
    admission: Admission
    forwarder: Forwarder
    observations: Observations
    receipts: ReceiptBook
    responses: ResponseBook
    decisions: DecisionLog
    metrics: Metrics
    tracer: Tracer | None
    """`None` where nothing collects spans."""
    drain: Drain
    render_metrics: Callable[[], bytes]
    """Prometheus text of this process."""
    siblings: Siblings | None
    """The other workers; `None` where there is one process."""
    shared_loads: SharedLoads | None
    """What other gateways have booked; `None` without Redis."""
    copies: Copies | None
    """What has engines copy hot Cartridges; `None` where it is off, or another worker does it."""

    @property
    def settings(self) -> Settings:
        """Those in force."""
        return self.live.present


@dataclass(frozen=True)
class _Asked:
    """One request, as far as it is understood without the fleet."""

    tenant: Tenant
    parsed: ParsedRequest
    steering: Steering
    response_id: str | None
    """The stored response that it is about, or goes on from."""
    request_id: str
    size_bytes: int
    deadline_s: float | None
    """For the first byte of the answer, by `time.monotonic`; `None` without one."""

    def at_most_ms(self, limit_ms: int) -> int:
        """Milliseconds that are left until the deadline, from 1 to a limit."""
        if self.deadline_s is None:
            return limit_ms
        return min(limit_ms, max(1, int((self.deadline_s - time.monotonic()) * 1000)))


@dataclass(frozen=True)
class _OtherWay:
    """A request with texts in the place of its Cartridges; no `parsed` before they were read."""

    stand_in: StandIn
    parsed: ParsedRequest | None


@dataclass(frozen=True)
class _Told:
    """Who is told how one request goes; `read_s` is when its body was there."""

    exchange: Exchange
    logged: LoggedRequest
    span: Span
    read_s: float


class Api:
    """Handlers of one gateway."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        """Every path that is served."""
        return [
            web.post(Route.CHAT, self._handler(Route.CHAT)),
            web.post(Route.COMPLETIONS, self._handler(Route.COMPLETIONS)),
            web.post(Route.RESPONSES, self._handler(Route.RESPONSES)),
            web.post(Route.MESSAGES, self._handler(Route.MESSAGES)),
            web.post(Route.COUNT_TOKENS, self._handler(Route.COUNT_TOKENS)),
            web.get("/v1/models", self._for_tenants(self.models)),
            web.get("/v1/models/{model:.+}", self._for_tenants(self.model)),
            web.get("/v1/cartridges", self._for_tenants(self.cartridges)),
            web.post("/v1/cartridges/explain", self._for_tenants(self.explain)),
            web.get("/v1/cartridges/receipts/{request_id}", self._for_tenants(self.receipt)),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.description),
            *(web.post(path, self._handler(Route.OTHER)) for path in _OUTSIDE_V1 + _RANKING),
            web.post(_OTHERS, self._handler(Route.OTHER)),
            web.get(_OTHERS, self._handler(Route.OTHER)),
            web.delete(_OTHERS, self._handler(Route.OTHER)),
        ]

    # --- the request path ------------------------------------------------------------------------
    def _handler(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._serve(request, route)

        return handle

    async def _serve(self, request: web.Request, route: Route) -> web.StreamResponse:
        started_s = time.monotonic()
        request_id = os.urandom(16).hex()
        REQUEST_ID.set(request_id)
        exchange = Exchange(_identified(request, request_id))
        logged = LoggedRequest(request_id, route.value, started_s)
        selection, status = None, _CLIENT_CLOSED_REQUEST
        with (
            contextlib.ExitStack() as held,
            span_of(self._services.tracer, DIALECTS[route].operation, request.headers) as span,
        ):
            try:
                check_path(request.path)
                tenant = self._services.tenants.authorise(request.headers)
                held.enter_context(self._services.limits.in_flight(tenant))
                data = await self._read_body(request)
                read_s = time.monotonic()
                asked = _asked(request, route, data, tenant, request_id, started_s)
                exchange.headers |= await self._services.limits.spend(
                    tenant, asked.parsed.num_tokens
                )
                selection = await self._select(asked.parsed, tenant, asked.steering.session)
                own_headers = dict(exchange.headers)
                self._services.decisions.add(logged, asked.parsed, selection, tenant.name)
                try:
                    response = await self._place_and_forward(
                        request, asked, selection, _Told(exchange, logged, span, read_s)
                    )
                except RouterError as error:
                    other = await self._without(asked, selection, error)
                    if other is None:
                        raise
                    logger.warning("request %s goes without Cartridges: %s", request_id, error)
                    asked, selection, instead = other
                    exchange.headers = own_headers
                    response = await self._place_and_forward(
                        request, asked, selection, _Told(exchange, logged, span, read_s), instead
                    )
                status = response.status
            except RouterError as error:
                status = error.status
                logged.refuse(error)
                response = error_response(error, exchange.headers, DIALECTS[route])
            except ConnectionError:
                raise  # the client's own: nobody is answered
            except Exception:
                status = RouterError.status
                raise
            finally:
                if span.is_recording():
                    _describe_end(span, status, request_id)
                self._count(route, selection, status, exchange, logged)
        return response

    async def _select(
        self, parsed: ParsedRequest, tenant: Tenant, session: str | None, *, is_dry: bool = False
    ) -> Selection:
        """The Cartridges that the request names, or those found for its question."""
        finder = self._services.finder
        if not (tenant.has_selection and finder.is_asked(parsed)):
            return self._services.selector.select(parsed, tenant.name)
        models = self._services.placer.models_of(parsed.model)
        return await finder.find(
            parsed, tenant=tenant.name, models=models, session=session, is_dry=is_dry
        )

    async def _place_and_forward(
        self,
        request: web.Request,
        asked: "_Asked",
        selection: Selection,
        told: "_Told",
        instead: Instead | None = None,
    ) -> web.StreamResponse:
        """`instead`: what it does already without the Cartridges that it was to have."""
        exchange, metrics = told.exchange, self._services.metrics
        holder = await self._find_holder(asked)
        other = None
        if asked.response_id is None:
            other = await self._other_way(asked.parsed, asked.steering, selection)
        placement, queued_s = await self._services.admission.place(
            _ticket(asked, selection, holder, other),
            functools.partial(self._place, asked, selection, holder, other),
        )
        if placement.instead is not None and other is not None and other.parsed is not None:
            asked = dataclasses.replace(asked, parsed=other.parsed)
            selection = _emptied(selection)
        elif instead is not None:
            placement = dataclasses.replace(placement, instead=instead)
        if placement.instead is not None:
            metrics.fallbacks.labels(placement.instead.kind, placement.instead.why).inc()
        told.logged.place(placement, queued_s)
        self._check_deadline(asked, placement)
        _describe(told.span, asked.parsed, selection, placement)
        outgoing = self._outgoing(request, asked, selection, placement)
        overhead_s = time.monotonic() - told.read_s - (queued_s or 0.0)
        exchange.headers.update(_told(asked, selection, placement, outgoing, overhead_s, queued_s))
        metrics.overhead_seconds.observe(overhead_s)
        if queued_s is not None:
            metrics.queue_seconds.observe(queued_s)
        response = await self._services.forwarder.forward(request, outgoing, exchange)
        self._note_found(asked, outgoing, exchange, response.status)
        return response

    def _check_deadline(self, asked: "_Asked", placement: Placement) -> None:
        """Raise at once what would be raised at the deadline, all other work spared.

        Raises:
            DeadlineExceeded: the first token will in all likelihood come later.
        """
        if asked.deadline_s is None or not self._services.settings.admission.reject_hopeless:
            return
        least_s = self._services.observations.at_least_s(placement.decision.best)
        left_s = asked.deadline_s - time.monotonic()
        if least_s > left_s and has_known_length(asked.parsed):
            raise DeadlineExceeded(
                f"no replica is expected to begin its answer in the {left_s:.3g} s that are left; "
                f"the soonest in {least_s:.3g} s at the least"
            )

    # --- without Cartridges ----------------------------------------------------------------------
    def _on_miss(self, steering: Steering) -> OnMiss:
        return steering.on_miss or self._services.settings.cartridges.on_miss

    async def _other_way(
        self, parsed: ParsedRequest, steering: Steering, selection: Selection
    ) -> _OtherWay | None:
        """The texts that may stand in for the Cartridges of a request; `None` if none may.

        They are read only if they would be taken as things are.
        """
        if (
            not selection.cartridges
            or self._on_miss(steering) is not OnMiss.PREFILL
            or not can_take_texts(parsed)
        ):
            return None
        manifests = [cartridge.manifest for cartridge in selection.cartridges]
        at_least = sum(num_text_tokens(manifest, None) for manifest in manifests)
        if not self._has_room(parsed, at_least):
            return None
        if self._services.placer.prefers_text(
            parsed,
            selection,
            policy=steering.policy,
            session=steering.session,
            num_text_tokens=at_least,
        ):
            return await self._with_texts(parsed, selection)
        return _OtherWay(StandIn(at_least, is_ready=False), None)

    async def _with_texts(self, parsed: ParsedRequest, selection: Selection) -> _OtherWay | None:
        """The same with the texts, if there are any, and they fit."""
        texts = await self._services.texts.read(selection.cartridges)
        if texts is None:
            return None
        instruction = self._services.settings.cartridges.text_instruction
        pairs = zip(selection.cartridges, texts, strict=True)
        num_tokens = sum(num_text_tokens(each.manifest, text) for each, text in pairs)
        changed = with_texts(parsed, texts, instruction)
        if changed is None or not self._has_room(parsed, num_tokens):
            return None
        stand_in = StandIn(num_tokens, is_ready=True)
        return _OtherWay(stand_in, with_text_tokens(changed, num_tokens))

    def _has_room(self, parsed: ParsedRequest, num_text_tokens: int) -> bool:
        """Whether texts fit the context of every replica, with prompt and answer."""
        limit = self._services.placer.context_limit(parsed.model)
        answer = max(1, parsed.num_output_tokens // parsed.num_choices)
        return limit is None or num_text_tokens + parsed.num_live_tokens + answer <= limit

    async def _without(
        self, asked: _Asked, selection: Selection, error: RouterError
    ) -> tuple[_Asked, Selection, Instead | None] | None:
        """How a request goes on whose Cartridges cannot be had; `None`: it fails.

        Nothing has gone to the client: what fails later is no error of the gateway's.
        """
        if not selection.cartridges:
            return None
        is_found = selection.how is SelectedBy.SEMANTIC
        is_miss = isinstance(error, MISSES) or error.is_from_receipt
        on_miss = self._on_miss(asked.steering) if is_miss else OnMiss.FAIL
        if on_miss is OnMiss.PREFILL and asked.response_id is None:
            other = await self._with_texts(asked.parsed, selection)
            if other is not None and other.parsed is not None:
                asked = dataclasses.replace(asked, parsed=other.parsed)
                return asked, _emptied(selection), Instead("text", error.code, error.code)
        if on_miss is OnMiss.DROP and not is_found:
            return asked, _emptied(selection), Instead("drop", error.code, error.code)
        # Nobody asked for what was found: the question is answered without.
        can_drop = is_found and not isinstance(error, _OF_ALL)
        return (asked, UNUSABLE, None) if can_drop else None

    async def _read_body(self, request: web.Request) -> bytes:
        limit, clients = self._services.settings.max_body_bytes, self._services.settings.clients
        if request.content_length is not None and request.content_length > limit:
            raise RequestTooLarge(f"a body of {request.content_length} bytes; the limit is {limit}")
        content, pieces, size = request.content, list[bytes](), 0
        begin_s = asyncio.get_running_loop().time() + clients.body_grace_s
        try:
            while True:
                if content.is_eof():
                    # All of it has come: there is nothing to wait for.
                    piece = content.read_nowait()
                else:
                    async with asyncio.timeout_at(begin_s + size / clients.body_bytes_per_s):
                        piece = await content.readany()
                if not piece:
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
                size += len(piece)
                if size > limit:
                    raise RequestTooLarge(f"the body is over the limit of {limit} bytes")
                pieces.append(piece)
        except TimeoutError as error:
            raise RequestTimeout(
                f"{size} bytes of the body came; {clients.body_bytes_per_s} a second must, after "
                f"{clients.body_grace_s:g} s"
            ) from error
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body cannot be read: {error}") from error

    async def _find_holder(self, asked: "_Asked") -> ReplicaId | None:
        """The replica that keeps the response a request is about.

        `None` where it is about none; without tenants also for one that is not known here: it is
        asked of all replicas.

        Raises:
            UnknownResponse: with tenants, one that is not known, or another tenant's.
            ResponseUnavailable: the same, while another worker could not be asked.
        """
        response_id, tenant = asked.response_id, asked.tenant.name
        if response_id is None:
            return None
        book, siblings = self._services.responses, self._services.siblings
        replica, is_all = book.find(response_id, tenant), True
        if replica is None and siblings is not None and len(response_id) <= MAX_ID_CHARS:
            replica, is_all = await siblings.find_response(response_id, tenant)
            if replica is not None:
                book.note(response_id, tenant, replica)
        if replica is None and self._services.settings.tenants.is_on:
            if not is_all:
                raise ResponseUnavailable("not all processes of the gateway could be asked for it")
            raise UnknownResponse(f"no response with the id {response_id[:MAX_ID_CHARS]!r}")
        return replica

    def _note_found(
        self, asked: "_Asked", outgoing: Outgoing, exchange: Exchange, status: int
    ) -> None:
        """Remember which of all replicas has what was asked for."""
        if outgoing.is_lookup and asked.response_id and status < http.HTTPStatus.BAD_REQUEST:
            replica = ReplicaId(exchange.headers[names.HEADER_REPLICA])
            self._services.responses.note(asked.response_id, asked.tenant.name, replica)

    def _place(
        self,
        asked: "_Asked",
        selection: Selection,
        holder: ReplicaId | None,
        other: _OtherWay | None,
    ) -> Placement:
        return self._services.placer.place(
            asked.parsed,
            selection,
            policy=asked.steering.policy,
            session=asked.steering.session,
            must_ask_all=asked.response_id is not None,
            holder=holder,
            stand_in=None if other is None else other.stand_in,
        )

    def _outgoing(
        self, request: web.Request, asked: "_Asked", selection: Selection, placement: Placement
    ) -> Outgoing:
        parsed, message, on_created = asked.parsed, None, None
        if request.method == "POST" and request.path == Route.RESPONSES:
            tenant, book = asked.tenant.name, self._services.responses

            def on_created(response_id: str, replica: ReplicaId) -> None:
                book.note(response_id, tenant, replica)

        if selection.composition is not None:
            message = selection.message(
                request_id=asked.request_id,
                deadline_ms=asked.at_most_ms(self._services.settings.cartridges.load_deadline_ms),
                traceparent=current_traceparent(),
            )
        is_lookup = asked.response_id is not None and not placement.has_holder
        num_asked = None if is_lookup else self._services.settings.forwarding.max_attempts
        return Outgoing(
            request_id=asked.request_id,
            path=request.path_qs,
            dialect=DIALECTS[parsed.route],
            body=engine_body(
                parsed,
                message,
                is_trusted=asked.tenant.is_trusted,
                salt=self._salt(request.path, asked.tenant),
            ),
            candidates=tuple(placement.decision.ranking[:num_asked]),
            demand=placement.demand,
            composition=selection.composition,
            is_lookup=is_lookup,
            has_holder=placement.has_holder,
            is_streamed=parsed.is_streamed,
            num_openers=DIALECTS[parsed.route].num_openers * parsed.num_choices,
            deadline_s=asked.deadline_s,
            comparison=placement.comparison,
            is_text=placement.instead is not None and placement.instead.kind == "text",
            has_other_way=selection.composition is not None
            and self._on_miss(asked.steering) is not OnMiss.FAIL,
            on_created=on_created,
        )

    def _salt(self, path: str, tenant: Tenant) -> str | None:
        """What keeps a plain request of a tenant apart in prefix caches, where that is asked."""
        settings = self._services.settings.tenants
        if not settings.is_on or not settings.has_own_prefix_caches or path not in SALTED_PATHS:
            return None
        return self._services.salts.of(tenant.name)

    def _count(
        self,
        route: Route,
        selection: Selection | None,
        status: int,
        exchange: Exchange,
        logged: LoggedRequest,
    ) -> None:
        metrics, started_s = self._services.metrics, logged.started_s
        how = selection.how if selection is not None else "unknown"
        elapsed_s = time.monotonic() - started_s
        logged.end(status, exchange, started_s + elapsed_s)
        metrics.note_request(route, status, how, elapsed_s)
        if exchange.num_retries:
            metrics.retries.inc(exchange.num_retries)
        if self._services.settings.logging.has_requests:
            told = {
                "route": route.value,
                "status": status,
                "replica": exchange.headers.get(names.HEADER_REPLICA),
                "seconds": round(elapsed_s, 4),
            }
            logger.info("%s", " ".join(f"{k}={v}" for k, v in told.items()), extra=told)
        if exchange.first_byte_s is not None:
            tier = exchange.headers.get(names.HEADER_TIER, "none")
            metrics.note_first_byte(tier, exchange.first_byte_s - started_s)

    # --- what is known ---------------------------------------------------------------------------
    def _for_tenants(
        self, answer: Callable[[web.Request, Tenant], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """A handler that is told who asks, and whose errors are answered."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await answer(request, self._services.tenants.authorise(request.headers))
            except RouterError as error:
                return error_response(error, {})

        return handle

    async def explain(self, request: web.Request, tenant: Tenant) -> web.Response:
        """The dry run: the same steps, nothing forwarded; all terms for all replicas."""
        route = _explained_route(request)
        with self._services.limits.in_flight(tenant):
            data = await self._read_body(request)
            parsed = parse_request(route, data, request.headers, is_trusted=tenant.is_trusted)
        steering = read_steering(request.headers, tenant.max_priority)
        place = functools.partial(
            self._services.placer.place,
            parsed,
            policy=steering.policy,
            session=steering.session,
        )
        selection = await self._select(parsed, tenant, steering.session, is_dry=True)
        other = None
        if route is not Route.RESPONSES or previous_response_id(parsed) is None:
            other = await self._other_way(parsed, steering, selection)
        try:
            placement = place(selection, stand_in=None if other is None else other.stand_in)
        except RouterError as error:
            if selection.how is not SelectedBy.SEMANTIC or isinstance(error, _OF_ALL):
                raise
            selection = UNUSABLE
            placement = place(selection)
        return json_response(
            {
                "object": "cartridge.explanation",
                "selection": {
                    "how": selection.how.value,
                    "basis": selection.basis,
                    "cartridges": [
                        {"alias": c.manifest.alias, "digest": c.digest}
                        for c in selection.cartridges
                    ],
                    "num_tokens": selection.num_tokens,
                    "layout": selection.layout.value,
                    "is_certified": selection.is_certified,
                },
                "placement": {
                    "replica": placement.replica,
                    "decision": placement.reason,
                    "map_mode": placement.mode.value,
                    "map_age_s": placement.map_age_s,
                    "candidates": [_shown(c) for c in placement.decision.ranking],
                },
                "fallback": _shown_fallback(self._on_miss(steering), placement),
            }
        )

    async def models(self, request: web.Request, tenant: Tenant) -> web.Response:
        """Models of all healthy replicas, each once."""
        return json_response({"object": "list", "data": self._models()})

    async def model(self, request: web.Request, tenant: Tenant) -> web.Response:
        """One of them."""
        name = request.match_info["model"]
        found = next((entry for entry in self._models() if entry["id"] == name), None)
        if found is None:
            return error_response(UnknownModel(f"no replica serves the model {name!r}"), {})
        return json_response(found)

    def _models(self) -> list[dict[str, Any]]:
        merged: dict[str, ServedModel] = {}
        for replica in self._services.fleet.replicas:
            if replica.is_healthy:
                for name, served in replica.models.items():
                    known = merged.get(name)
                    merged[name] = served if known is None else known.merged(served)
        return [
            {
                "id": name,
                "object": "model",
                "created": served.created,
                "owned_by": "vllm",
                "max_model_len": served.max_model_len,
                **({"parent": served.parent} if served.parent is not None else {}),
            }
            for name, served in sorted(merged.items())
        ]

    async def cartridges(self, request: web.Request, tenant: Tenant) -> web.Response:
        """Cartridges the caller may use, and where each is ready."""
        residency = self._services.residency
        data = [
            {
                "object": "cartridge",
                "id": alias,
                "digest": cartridge.digest,
                "kind": cartridge.manifest.kind.value,
                "model": cartridge.manifest.model.name,
                "num_tokens": cartridge.manifest.num_tokens,
                "size_bytes": cartridge.manifest.payload_bytes,
                "prompt_convention": cartridge.manifest.prompt_convention.kind.value,
                "title": cartridge.manifest.card.title,
                "sentence": cartridge.manifest.card.sentence,
                "residency": [
                    {"replica": replica, "tier": tier.value}
                    for replica, tier in residency.holders(cartridge.digest)
                ],
            }
            for alias, cartridge in self._services.catalog.visible_to(tenant.name)
        ]
        return json_response({"object": "list", "data": data})

    async def receipt(self, request: web.Request, tenant: Tenant) -> web.Response:
        """The receipt of one request, by the id in its `x-cartridge-request-id` header."""
        receipt = self._services.receipts.find(request.match_info["request_id"])
        if receipt is None or receipt.scope != tenant.name:
            raise UnknownReceipt("no receipt of that request")
        return json_response(msgspec.to_builtins(receipt))

    async def health(self, request: web.Request) -> web.Response:
        """Whether this process works."""
        return json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """Whether requests are to come here: not while draining, nor without a healthy replica."""
        fleet, residency = self._services.fleet, self._services.residency
        healthy = [replica.replica for replica in fleet.replicas if replica.is_healthy]
        registered = [name for name in healthy if residency.registration(name) is not None]
        status = "ready" if healthy else "no healthy replica"
        if self._services.drain.is_begun:
            status = "draining"
        return json_response(
            {
                "status": status,
                "replicas": {"healthy": healthy, "registered": registered},
                "residency": {"mode": residency.mode.value, "age_s": residency.age_s},
            },
            status=200 if status == "ready" else 503,
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        services = self._services
        if services.siblings is None:
            body = services.render_metrics()
        else:
            body = await asyncio.to_thread(merged, await services.siblings.metrics())
        return web.Response(body=body, headers={"content-type": "text/plain; version=0.0.4"})

    async def description(self, request: web.Request) -> web.Response:
        """What is served here, as OpenAPI."""
        return web.Response(body=DESCRIPTION, content_type="application/json")


def check_path(path: str) -> None:
    """Refuse what an engine would read as an address outside of /v1/, and what is its operator's.

    Raises:
        UnknownPath: as for an address that nothing serves.
    """
    if {".", ".."} & set(_SEPARATOR.split(path)) or path.rstrip("/") in _FOR_OPERATORS:
        raise UnknownPath(f"nothing is served at {path}")


def _identified(request: web.Request, request_id: str) -> dict[str, str]:
    """Both ids of a request: ours, and under the common name the client's if it can be repeated."""
    sent = request.headers.get(names.HEADER_REQUEST_ID, "")
    said_back = sent if _REPEATABLE.fullmatch(sent) else request_id
    return {names.HEADER_OWN_REQUEST_ID: request_id, names.HEADER_REQUEST_ID: said_back}


def _asked(
    request: web.Request,
    route: Route,
    data: bytes,
    tenant: Tenant,
    request_id: str,
    started_s: float,
) -> _Asked:
    stored_id = _stored_id(request)
    steering = read_steering(request.headers, tenant.max_priority)
    deadline_s = steering.deadline_s
    parsed = parse_request(
        route,
        data,
        request.headers,
        is_trusted=tenant.is_trusted,
        needs_body=request.method == "POST" and stored_id is None,
    )
    if stored_id is None and request.path.startswith(Route.RESPONSES):
        stored_id = previous_response_id(parsed)
    return _Asked(
        tenant=tenant,
        parsed=parsed,
        steering=steering,
        response_id=stored_id,
        request_id=request_id,
        size_bytes=len(data),
        deadline_s=None if deadline_s is None else started_s + deadline_s,
    )


def _stored_id(request: web.Request) -> str | None:
    """The response that a path names; what is posted beside them (`…/render`) names none."""
    match = _STORED.fullmatch(request.path)
    if match is None or (request.method == "POST" and match[2] is None):
        return None
    return match[1]


def _emptied(selection: Selection) -> Selection:
    """Without Cartridges, and still saying how they were found."""
    return dataclasses.replace(NO_CARTRIDGES, how=selection.how, basis=selection.basis)


def _shown_fallback(on_miss: OnMiss, placement: Placement) -> dict[str, Any]:
    compared = placement.comparison
    return {
        "on_miss": on_miss.value,
        "instead": None if placement.instead is None else placement.instead.told,
        "with_cartridges_s": None if compared is None else compared.attached_s,
        "with_text_s": None if compared is None else compared.fallback_s,
        "margin": None if compared is None else compared.margin,
    }


def _ticket(
    asked: _Asked, selection: Selection, holder: ReplicaId | None, other: _OtherWay | None
) -> Ticket:
    return Ticket(
        model=asked.parsed.model,
        tenant=asked.tenant.name,
        needs=(selection.composition, holder, other is not None and other.stand_in.is_ready),
        size_bytes=asked.size_bytes,
        priority=asked.steering.priority,
        deadline_s=asked.deadline_s,
    )


def _describe(
    span: Span, parsed: ParsedRequest, selection: Selection, placement: Placement
) -> None:
    """What a trace says of a request."""
    if not span.is_recording():
        return
    operation = DIALECTS[parsed.route].operation
    span.update_name(f"{operation} {parsed.model}")
    span.set_attributes(
        {
            names.ATTR_OPERATION: operation,
            names.ATTR_PROVIDER: "vllm",
            names.ATTR_MODEL: parsed.model,
            names.ATTR_DIGESTS: [cartridge.digest for cartridge in selection.cartridges],
            names.ATTR_REPLICA: placement.replica,
            names.ATTR_DECISION: placement.reason,
        }
    )


def _describe_end(span: Span, status: int, request_id: str) -> None:
    span.set_attributes({names.ATTR_STATUS: status, names.ATTR_REQUEST_ID: request_id})
    if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
        span.set_attribute(names.ATTR_ERROR, str(status))


def _told(
    asked: _Asked,
    selection: Selection,
    placement: Placement,
    outgoing: Outgoing,
    overhead_s: float,
    queued_s: float | None,
) -> dict[str, str]:
    """Response headers about selection and placement."""
    told = {
        names.HEADER_REPLICA: placement.replica,
        names.HEADER_DECISION: placement.reason,
        names.HEADER_SELECTION: selection.told,
        names.HEADER_OVERHEAD_MS: f"{overhead_s * 1000:.2f}",
    }
    if queued_s is not None:
        told[names.HEADER_QUEUED_MS] = f"{queued_s * 1000:.0f}"
    if placement.map_age_s is not None:
        told[names.HEADER_MAP_AGE_MS] = f"{placement.map_age_s * 1000:.0f}"
    if outgoing.composition is not None:
        told[names.HEADER_CARTRIDGE_IDS] = ",".join(c.manifest.alias for c in selection.cartridges)
        told[names.HEADER_DIGEST] = outgoing.composition
    if placement.decision.best.slowest_tier is not None:
        told[names.HEADER_TIER] = placement.decision.best.slowest_tier.value
    if asked.steering.is_explained:
        told[names.HEADER_EXPLANATION] = _explanation(placement)
    return told


def _explanation(placement: Placement) -> str:
    """The costs of the first candidates in one line of JSON; `/explain` tells those of all."""
    shown = [_shown(each) for each in placement.decision.ranking[:MAX_EXPLAINED]]
    return msgspec.json.encode(shown).decode("ascii")


def _explained_route(request: web.Request) -> Route:
    routes = [route for route, dialect in DIALECTS.items() if dialect.convention is not None]
    route = request.query.get("route", Route.CHAT)
    if route not in routes:
        raise InvalidRequest(f"route: must be one of {', '.join(routes)}", param="route")
    return Route(route)


def _shown(candidate: Candidate) -> dict[str, Any]:
    return {
        "replica": candidate.replica,
        "total_s": candidate.total_s,
        "terms": {term.name: term.seconds for term in candidate.terms},
        "tiers": [tier.value for tier in candidate.tiers],
    }


def around_handlers(doors: Doors) -> Middleware:
    """Tells the doors that a request is served, and shapes what no handler answers."""

    @web.middleware
    async def around(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        with doors.request(request.transport, request.content):
            try:
                return await handler(request)
            except web.HTTPNotFound:
                unknown = UnknownPath(f"nothing is served at {request.path}")
                return error_response(unknown, {}, _dialect_of(request.path))
            except web.HTTPMethodNotAllowed as error:
                allowed = error.headers["Allow"]
                return error_response(
                    MethodNotAllowed(f"{request.path} takes {allowed}"),
                    {"Allow": allowed},
                    _dialect_of(request.path),
                )

    return around


def _dialect_of(path: str) -> Dialect:
    """In which shape a client reads errors of what no handler takes."""
    is_messages = path == Route.MESSAGES or path.startswith(f"{Route.MESSAGES}/")
    return DIALECTS[Route.MESSAGES if is_messages else Route.OTHER]


def closing_when_draining(
    drain: Drain,
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Tells clients in each answer that this connection will not be there for the next request."""

    async def prepare(_: web.Request, response: web.StreamResponse) -> None:
        if drain.is_begun:
            response.headers["Connection"] = "close"
            response.force_close()

    return prepare


def json_response(value: object, *, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def error_response(
    error: RouterError, headers: dict[str, str], dialect: Dialect = DIALECTS[Route.OTHER]
) -> web.Response:
    """An error in the shape that clients of the API read; OpenAI's by default."""
    response = web.Response(
        body=dialect.error_body(error),
        status=error.status,
        content_type="application/json",
        headers={**headers, **error.headers},
    )
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
