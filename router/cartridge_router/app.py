"""Puts the gateway together: the only place that constructs.

Owns the start and the end of every task and connection. Refuses request logic.
"""

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Final

import aiohttp
from aiohttp import web
from opentelemetry import trace

from cartridge_policies.never_worse import NeverWorse
from cartridge_policies.types import MapMode
from cartridge_proto.names import ENV_RESIDENCY_KEY
from cartridge_proto.residency import TIERS_FASTEST_FIRST, Receipt, ReceiptStatus, ReplicaId
from cartridge_proto.stores import open_store
from cartridge_router.admin import running_admin
from cartridge_router.admission import Admission
from cartridge_router.api import Api, Services, around_handlers, closing_when_draining
from cartridge_router.catalog import Catalog
from cartridge_router.copies import ControlLogin, Copies, read_control_login
from cartridge_router.decisions import DecisionLog
from cartridge_router.discovery import Channel
from cartridge_router.discovery.dns_name import DnsName
from cartridge_router.discovery.registrations import Registrations
from cartridge_router.discovery.watched_file import WatchedFile
from cartridge_router.doors import Doors, most_connections
from cartridge_router.drain import Drain
from cartridge_router.errors import ConfigurationError, GatewayEnding
from cartridge_router.finding import Finder, SearchOutcome
from cartridge_router.fleet import Fleet
from cartridge_router.forwarding import Forwarder
from cartridge_router.limits import Limits
from cartridge_router.listening import Listener, listening_sockets
from cartridge_router.live_settings import LiveSettings, SettingsSource
from cartridge_router.logs import configure_logging, server_logger
from cartridge_router.observations import Observations
from cartridge_router.placement import Placer
from cartridge_router.prefix_salts import PrefixSalts
from cartridge_router.receipts import ReceiptBook
from cartridge_router.residency_map import RedisReader, ResidencyMap
from cartridge_router.response_book import ResponseBook
from cartridge_router.roster import Source
from cartridge_router.selection import Selector
from cartridge_router.settings import KubernetesSettings, Settings, UpstreamClientName
from cartridge_router.shared_loads import SharedLoads
from cartridge_router.siblings import Siblings, Worker
from cartridge_router.signing_keys import SigningKeys
from cartridge_router.telemetry import SERVICE, Metrics, otlp_provider
from cartridge_router.tenants import Tenants
from cartridge_router.texts import Texts
from cartridge_router.tls import EngineLogin, Renewed, ServerTls
from cartridge_router.upstream import UpstreamClient
from cartridge_router.upstream.native import NativeClient
from cartridge_router.upstream.over_aiohttp import AiohttpClient

logger = logging.getLogger(__name__)


Job = Callable[[], Coroutine[None, None, None]]
"""What runs beside the server until it is cancelled."""

RESTART_S = 1.0
FIRST_LOOK_S = 3.0
"""How long the first probes may keep the gateway from listening: engines may be busy."""
RECEIPT_WAIT_S = 1.0
"""How long a failed request waits for the receipt that explains it."""
LAST_WORDS_S: Final = 1.0
"""How long those whose requests are cut off may take to read why."""
USUAL_TOKENS: Final = 500
"""Of a prompt, where none was seen yet."""
BACKLOG = 1024
"""Connections that the kernel holds for us; clients come in bursts."""
TURNS_TO_HANDLER = 10
"""Of the event loop, in which a connection becomes one, and its bytes a request that is handled."""
UPSTREAM_BUFFER_BYTES = 8192
"""Of an answer, that are held for a client that does not read; its replica waits with the rest."""
ENGINE_KEEPALIVE_S = 3.0
"""vLLM's server closes idle connections after 5 s; ours are given up before."""


CLIENTS: Final[Mapping[UpstreamClientName, Callable[..., UpstreamClient]]] = {
    UpstreamClientName.NATIVE: NativeClient,
    UpstreamClientName.AIOHTTP: AiohttpClient,
}


@contextlib.asynccontextmanager
async def running_services(
    settings: Settings, key: bytes | None, drain: Drain, worker: Worker | None
) -> AsyncIterator[Services]:
    """Everything that runs beside the HTTP server, for as long as the block does."""
    login = await asyncio.to_thread(EngineLogin, settings.engines)
    control = None
    if worker is None or worker.serves_operators:
        control = await asyncio.to_thread(read_control_login, settings.replication, os.environ)
    client = CLIENTS[settings.forwarding.client](
        idle_s=ENGINE_KEEPALIVE_S, read_buffer_bytes=UPSTREAM_BUFFER_BYTES
    )
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=ENGINE_KEEPALIVE_S)
    async with (
        contextlib.aclosing(client),
        aiohttp.ClientSession(connector=connector) as session,
    ):
        endpoint = settings.telemetry.otlp_endpoint
        traces = await asyncio.to_thread(otlp_provider, endpoint) if endpoint else None
        provider = traces or trace.get_tracer_provider()
        is_collected = not isinstance(provider, trace.ProxyTracerProvider)
        tracer = provider.get_tracer(SERVICE) if is_collected else None
        async with contextlib.AsyncExitStack() as stack:
            if traces is not None:
                stack.push_async_callback(asyncio.to_thread, traces.shutdown)
            services, jobs = _construct(
                settings, key, session, client, login, control, tracer, drain, worker
            )
            stack.callback(services.catalog.close)
            stack.callback(services.finder.close)
            stack.callback(services.texts.close)
            await asyncio.to_thread(_load_finder, services.finder)
            if services.siblings is not None:
                await services.siblings.catch_up()
            await services.tenants.read_first()
            await services.catalog.read_first()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_LOOK_S):
                    looks = (services.fleet.probe(r) for r in services.fleet.replicas)
                    await asyncio.gather(*looks)
            running = [asyncio.create_task(kept_running(job)) for job in jobs]
            stack.push_async_callback(_end, running)
            yield services


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _construct(
    settings: Settings,
    key: bytes | None,
    session: aiohttp.ClientSession,
    client: UpstreamClient,
    login: EngineLogin,
    control: ControlLogin | None,
    tracer: trace.Tracer | None,
    drain: Drain,
    worker: Worker | None,
) -> tuple[Services, list[Job]]:
    _check_key(settings, key)
    metrics = Metrics()
    receipts = ReceiptBook()

    def count_rejected(reason: str) -> None:
        metrics.rejected_records.labels(reason).inc()

    residency = ResidencyMap(key=key, settings=settings.residency, on_rejected=count_rejected)

    def must_probe_extension(replica: ReplicaId) -> bool:
        return (
            settings.store is not None
            and residency.mode is MapMode.FALLBACK
            and residency.registration(replica) is None
        )

    def on_gone(replica: ReplicaId) -> None:
        metrics.forget(replica)
        observations.forget(replica)
        placer.forget(replica)

    fleet = Fleet(
        session=session,
        login=login,
        settings=settings.fleet,
        max_in_flight=settings.placement.max_in_flight,
        must_probe_extension=must_probe_extension,
        on_gone=on_gone,
    )
    never_worse = NeverWorse(settings.placement.prediction_spread)
    placer = Placer(
        fleet=fleet, residency=residency, settings=settings.placement, never_worse=never_worse
    )
    observations = Observations(
        fleet,
        on_prediction=metrics.prediction_ratio.observe,
        never_worse=never_worse,
        on_compared=metrics.regret_ratio.observe,
    )
    observations.is_learning = settings.placement.learn_rates
    fleet.set_all(Source.SETTINGS, settings.replica_urls())
    sources = _construct_sources(settings, fleet, residency, metrics)
    signing_keys = None
    if settings.tenants.jwks_url is not None:
        signing_keys = SigningKeys(settings.tenants.jwks_url, session)
    tenants = Tenants(settings, signing_keys)
    store = open_store(settings.store) if settings.store else None
    catalog = Catalog(store, settings.cartridges.refresh_s)
    admission = Admission(fleet, settings.admission)
    responses = ResponseBook(
        max_known=settings.responses.max_known, keep_s=settings.responses.keep_s
    )

    def render_metrics() -> bytes:
        return metrics.render(fleet, residency, admission.num_queued)

    siblings = None
    if worker is not None:
        siblings = Siblings(
            worker,
            render=render_metrics,
            changes=lambda: fleet.changes,
            follow=fleet.follow,
            find_response=responses.find,
        )
    selector = Selector(
        catalog,
        allow_uncertified_composition=settings.cartridges.allow_uncertified_composition,
    )
    finder = Finder(
        catalog=catalog,
        selector=selector,
        settings=settings.selection,
        on_search=functools.partial(_count_search, metrics),
    )
    shared_loads = _construct_shared_loads(settings, key, fleet, count_rejected)
    copies = None
    if control is not None:
        copies = Copies(
            settings.replication,
            fleet=fleet,
            residency=residency,
            catalog=catalog,
            login=control,
            service_s=lambda: observations.service_s or fleet.rates.prefill_s(USUAL_TOKENS, 0),
            on_outcome=lambda action, outcome: metrics.copies.labels(action, outcome).inc(),
        )
    services = Services(
        live=LiveSettings(settings),
        tenants=tenants,
        salts=PrefixSalts(key),
        limits=Limits(),
        catalog=catalog,
        residency=residency,
        fleet=fleet,
        selector=selector,
        finder=finder,
        texts=Texts(catalog, settings.cartridges),
        placer=placer,
        admission=admission,
        forwarder=Forwarder(
            client=client,
            login=login,
            fleet=fleet,
            receipts=receipts,
            settings=settings.forwarding,
            metrics=metrics,
            observations=observations,
            # Receipts come by Redis; without it there is nothing to wait for.
            receipt_wait_s=RECEIPT_WAIT_S if settings.redis_url is not None else 0.0,
            write_timeout_s=settings.clients.write_timeout_s,
        ),
        observations=observations,
        receipts=receipts,
        responses=responses,
        decisions=DecisionLog(),
        metrics=metrics,
        tracer=tracer,
        drain=drain,
        render_metrics=render_metrics,
        siblings=siblings,
        shared_loads=shared_loads,
        copies=copies,
    )

    return services, [*sources, *_jobs(settings, services, login, signing_keys)]


def _jobs(
    settings: Settings, services: Services, login: EngineLogin, signing_keys: SigningKeys | None
) -> list[Job]:
    """What keeps services true."""
    jobs: list[Job] = [services.fleet.watch, services.admission.run]
    jobs += [services.catalog.run, services.finder.run]
    if login.watch.files:
        failed = services.metrics.reload_failures.labels("engines")
        renewed = Renewed("engines", login.watch, login.renew, failed.inc)
        jobs.append(renewed.run)
    if settings.redis_url is not None:
        on_receipt = _counted(
            services.metrics, services.receipts, services.observations, services.copies
        )
        reader = RedisReader(
            url=settings.redis_url, residency=services.residency, on_receipt=on_receipt
        )
        jobs.append(reader.run)
    if services.shared_loads is not None:
        jobs.append(services.shared_loads.run)
    if services.copies is not None:
        jobs.append(services.copies.run)
    if settings.tenants.keys_file is not None:
        jobs.append(services.tenants.run)
    if signing_keys is not None:
        jobs.append(signing_keys.run)
    return jobs


def _construct_shared_loads(
    settings: Settings, key: bytes | None, fleet: Fleet, on_rejected: Callable[[str], None]
) -> SharedLoads | None:
    if settings.redis_url is None:
        return None
    return SharedLoads(
        url=settings.redis_url,
        key=key,
        fleet=fleet,
        is_on=settings.placement.share_loads,
        on_rejected=on_rejected,
    )


def _check_key(settings: Settings, key: bytes | None) -> None:
    """Without a key whoever can write to Redis could say where replicas and their controls are.

    Raises:
        ConfigurationError: naming what needs it.
    """
    needing = {
        "fleet.from_registrations": settings.fleet.from_registrations,
        "replication.enabled": settings.replication.enabled,
    }
    problems = [
        f"{name}: needs the residency key, in {ENV_RESIDENCY_KEY}"
        for name, is_on in needing.items()
        if is_on and key is None
    ]
    if problems:
        raise ConfigurationError(problems)


def _load_finder(finder: Finder) -> None:
    """Have the packages of selection there before anything is served.

    Raises:
        ConfigurationError: selection is on, and they are not installed.
    """
    try:
        finder.load()
    except Exception as error:  # a model folder may be anything
        raise ConfigurationError([f"selection.enabled: {error}"]) from error


def _count_search(metrics: Metrics, outcome: SearchOutcome, seconds: float) -> None:
    metrics.searches.labels(outcome.value).inc()
    metrics.search_seconds.observe(seconds)


def _counted(
    metrics: Metrics, receipts: ReceiptBook, observations: Observations, copies: Copies | None
) -> Callable[[Receipt], None]:
    """What happens to a receipt: it is compared with what was predicted, learned from, kept."""

    def on_receipt(receipt: Receipt) -> None:
        metrics.receipts.labels(receipt.status.value).inc()
        predicted = receipts.take_prediction(receipt.request_id)
        served = max(
            (item.tier for item in receipt.items), key=TIERS_FASTEST_FIRST.index, default=None
        )
        # Of others the tiers may be a guess.
        is_known = receipt.status is ReceiptStatus.SERVED
        if is_known and predicted is not None and served is not None and served is not predicted:
            metrics.mispredictions.labels(predicted.value, served.value).inc()
        observations.note_receipt(receipt)
        receipts.note(receipt)
        if copies is not None:
            copies.note_receipt(receipt)

    return on_receipt


def _construct_sources(
    settings: Settings, fleet: Fleet, residency: ResidencyMap, metrics: Metrics
) -> list[Job]:
    """What keeps the fleet as its sources list it.

    Raises:
        ConfigurationError: a source needs what is not there.
    """
    wanted, jobs = settings.fleet, list[Job]()

    def channel(source: Source) -> Channel:
        return Channel(
            on_listed=functools.partial(fleet.set_all, source),
            on_failed=metrics.discovery_failures.labels(source.value).inc,
        )

    if wanted.file is not None:
        file = WatchedFile(Path(wanted.file), channel(Source.FILE), poll_s=wanted.file_poll_s)
        jobs.append(file.run)
    if wanted.dns is not None:
        name = DnsName(wanted.dns, channel(Source.DNS), refresh_s=wanted.dns_refresh_s)
        jobs.append(name.run)
    if wanted.kubernetes.service is not None:
        jobs.append(_endpoint_slices(wanted.kubernetes, channel(Source.KUBERNETES)))
    if wanted.from_registrations:
        jobs.append(Registrations(residency, channel(Source.REGISTRATION)).run)
    return jobs


def _endpoint_slices(settings: KubernetesSettings, channel: Channel) -> Job:
    try:
        # Slow to import, and an extra.
        from cartridge_router.discovery.endpoint_slices import EndpointSlices, Service
    except ModuleNotFoundError as error:
        problem = "fleet.kubernetes: needs pip install 'cartridge-router[kubernetes]'"
        raise ConfigurationError([problem]) from error
    assert settings.service is not None  # noqa: S101 - else nobody asks
    assert settings.namespace is not None  # noqa: S101 - checked with the settings
    service = Service(
        namespace=settings.namespace,
        name=settings.service,
        port_name=settings.port_name,
        scheme=settings.scheme,
        kubeconfig=settings.kubeconfig,
    )
    return EndpointSlices(service, channel).run


async def kept_running(job: Job, pause_s: float = RESTART_S) -> None:
    """Run a job that never ends by itself; begin it again when it fails all the same."""
    while True:
        try:
            await job()
        except Exception:
            logger.exception("%s failed and is begun again", job)
        await asyncio.sleep(pause_s)


def make_app(services: Services, doors: Doors) -> web.Application:
    """The HTTP application over running services."""
    app = web.Application(middlewares=[around_handlers(doors)])
    app.add_routes(Api(services).routes())
    app.on_response_prepare.append(closing_when_draining(services.drain))
    return app


def drain_of(settings: Settings) -> Drain:
    """How a gateway with these settings ends."""
    return Drain(settings.drain)


@contextlib.asynccontextmanager
async def running_gateway(
    settings: Settings,
    key: bytes | None,
    drain: Drain | None = None,
    operators_token: str | None = None,
    source: SettingsSource | None = None,
    worker: Worker | None = None,
) -> AsyncIterator[str]:
    """A listening gateway; yields its base URL (with the real port when 0 was asked for).

    `operators_token` is asked of whoever comes to the listener of `settings.admin`. `source`: where
    the settings come from again when they change there; `None` = they stay. `worker`: which of
    several processes on one port this is; `None` = it is the only one.
    At the end of the block it takes no more connections, and lets what runs finish as `drain` says.
    """
    clients = settings.clients
    drain = drain or drain_of(settings)
    async with contextlib.AsyncExitStack() as stack:
        services = await stack.enter_async_context(running_services(settings, key, drain, worker))

        def on_refused(reason: str) -> None:
            services.metrics.refused_connections.labels(reason).inc()

        if worker is None or worker.serves_operators:
            admin = running_admin(settings.admin, operators_token, services, on_refused)
            if (admin_url := await stack.enter_async_context(admin)) is not None:
                logger.info("operators are served at %s", admin_url)
        doors = Doors(
            max_connections=clients.max_connections or most_connections(),
            head_timeout_s=clients.head_timeout_s,
            write_buffer_bytes=clients.write_buffer_bytes,
            on_refused=on_refused,
        )
        tls = None
        if settings.tls.cert_file is not None:
            tls = await asyncio.to_thread(ServerTls, settings.tls)
        services.metrics.connections.set_function(lambda: doors.num_open)
        runner = web.AppRunner(
            make_app(services, doors),
            handler_cancellation=True,
            access_log=None,
            logger=server_logger,
            shutdown_timeout=10,
            keepalive_timeout=clients.keep_alive_s,
        )
        await runner.setup()
        assert runner.server is not None  # noqa: S101 - there after `setup`
        try:
            sockets = await asyncio.to_thread(
                listening_sockets,
                settings.host,
                settings.port if worker is None else worker.port,
                backlog=BACKLOG,
                reuse_port=worker is not None,
            )
            listener = Listener(
                sockets,
                doors.before(runner.server),
                tls=None if tls is None else tls.context,
                handshake_timeout_s=clients.head_timeout_s,
            )
            jobs = list[Job]()
            failures = services.metrics.reload_failures
            if tls is not None:
                renewed = Renewed("tls", tls.watch, tls.renew, failures.labels("tls").inc)
                jobs.append(renewed.run)
            if source is not None:
                jobs.append(
                    functools.partial(
                        services.live.follow,
                        source,
                        functools.partial(apply_settings, services, doors),
                        failures.labels("settings").inc,
                    )
                )
            running = [asyncio.create_task(kept_running(job)) for job in jobs]
            try:
                if services.siblings is not None:
                    # Whoever started this process sees by the socket that it serves.
                    await stack.enter_async_context(services.siblings.listening())
                    # What changed between the first look and now nobody could tell this worker.
                    await services.siblings.catch_up()
                scheme = "http" if tls is None else "https"
                yield f"{scheme}://{settings.host}:{listener.port}"
            finally:
                listener.close()
                await _end(running)
                await _finish(runner.server, doors, drain, services)
                await listener.end()
        finally:
            await runner.cleanup()


def apply_settings(services: Services, doors: Doors, settings: Settings) -> None:
    """Have everything go by other settings, from the next request on.

    Raises:
        ConfigurationError: what is new in them does not go with the keys file; nothing has changed.
    """
    services.tenants.configure(settings)
    services.fleet.configure(settings.fleet, settings.placement.max_in_flight)
    services.fleet.set_all(Source.SETTINGS, settings.replica_urls())
    services.residency.settings = settings.residency
    services.catalog.refresh_s = settings.cartridges.refresh_s
    services.texts.settings = settings.cartridges
    services.selector.allow_uncertified_composition = (
        settings.cartridges.allow_uncertified_composition
    )
    services.finder.settings = settings.selection
    services.admission.settings = settings.admission
    services.responses.configure(
        max_known=settings.responses.max_known, keep_s=settings.responses.keep_s
    )
    services.placer.configure(settings.placement)
    services.observations.is_learning = settings.placement.learn_rates
    if services.shared_loads is not None:
        services.shared_loads.is_on = settings.placement.share_loads
    services.forwarder.configure(settings.forwarding, settings.clients.write_timeout_s)
    if services.copies is not None:
        services.copies.settings = settings.replication
    services.drain.settings = settings.drain
    doors.max_connections = settings.clients.max_connections or most_connections()
    doors.head_timeout_s = settings.clients.head_timeout_s
    doors.write_buffer_bytes = settings.clients.write_buffer_bytes
    if settings.logging != services.settings.logging:
        configure_logging(settings.logging)


async def _finish(server: web.Server, doors: Doors, drain: Drain, services: Services) -> None:
    """Let the requests of a closed listener finish; cut off those that take too long."""
    for _ in range(TURNS_TO_HANDLER):
        await asyncio.sleep(0)
    server.pre_shutdown()
    doors.close_idle()
    await drain.finish(doors.has_emptied)
    # First those who wait: what is cut gives room.
    services.admission.refuse_all(
        GatewayEnding("the gateway ends, and there was no room until then")
    )
    services.forwarder.cut()
    with contextlib.suppress(TimeoutError):
        # Clients that read are told so; the others are left.
        async with asyncio.timeout(LAST_WORDS_S):
            await doors.has_emptied.wait()
    doors.cut()
