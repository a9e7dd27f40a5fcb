"""All settings of the gateway: typed, validated as a whole, with a JSON Schema.

Owns names, defaults and where values come from: defaults, then file, then environment, then flags.
Refuses unknown keys, and reports every problem in one message.
"""

import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from urllib.parse import urlsplit

import jsonschema
import msgspec
import yaml

from cartridge_policies import POLICIES
from cartridge_policies.never_worse import DEFAULT_QUEUE_SHARE, DEFAULT_SPREAD
from cartridge_proto.composition import OnMiss
from cartridge_proto.manifest import DEFAULT_INSTRUCTION
from cartridge_proto.names import (
    ENV_ADMIN_TOKEN,
    ENV_PREFIX,
    ENV_REDIS_PASSWORD,
    ENV_REDIS_PASSWORD_FILE,
    ENV_REDIS_USERNAME,
    ENV_WORKER,
)
from cartridge_proto.redis_users import InvalidLogin, with_login
from cartridge_proto.residency import ReplicaId
from cartridge_proto.stores import store_problem
from cartridge_router.errors import ConfigurationError

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
PositiveCount = Annotated[int, msgspec.Meta(gt=0)]
TenantName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")]
"""A scope of compositions. Helm's regular expressions have no look-ahead; a line break at the end,
which `$` lets pass, is a problem of its own."""

MIN_PRIORITY, MAX_PRIORITY = -10, 10
Priority = Annotated[int, msgspec.Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)]

_REPLICA = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]{1,128})=)?(?P<url>https?://[^\s/?#,]+)/?")
_ENDPOINT = re.compile(r"https?://[^\s/?#@]+:[0-9]{1,5}/?")
_NAME_AND_PORT = re.compile(r"https?://[A-Za-z0-9._-]+:[0-9]{1,5}")
_NOT_FROM_ENVIRONMENT = frozenset(
    {"CONFIG", "RESIDENCY_KEY", "CONTROL_TOKEN"}
    | {
        name.removeprefix(ENV_PREFIX)
        for name in (
            ENV_ADMIN_TOKEN,
            ENV_WORKER,
            ENV_REDIS_USERNAME,
            ENV_REDIS_PASSWORD,
            ENV_REDIS_PASSWORD_FILE,
        )
    }
)
"""Secrets, and what is read elsewhere."""


_TEXTS = frozenset(
    {"client", "dns", "file", "host", "redis_url", "store", "tenant", "policy"}
    | {"format", "level", "otlp_endpoint", "cert_file", "key_file", "client_ca_file", "ca_file"}
    | {"api_key_file", "keys_file", "jwks_url", "issuer", "audience", "tenant_claim"}
    | {"kubeconfig", "namespace", "port_name", "service", "token_file", "text_instruction"}
)
"""Settings that are texts, whatever a variable's value looks like."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the settings' structs: frozen and closed."""


class UpstreamClientName(StrEnum):
    """HTTP clients towards replicas."""

    NATIVE = "native"
    """A small one over a C parser."""
    AIOHTTP = "aiohttp"


class ForwardingSettings(_Section, frozen=True, kw_only=True):
    """How requests go to replicas."""

    client: UpstreamClientName = UpstreamClientName.NATIVE
    """Which HTTP client sends them (docs/decisions/0011-upstream-client.md)."""
    connect_timeout_s: PositiveSeconds = 2.0
    first_byte_timeout_s: PositiveSeconds = 600.0
    idle_timeout_s: PositiveSeconds = 300.0
    """Longest silence within an answer."""
    max_attempts: PositiveCount = 3
    """Replicas that are tried before the first byte of an answer."""
    retry_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2
    retries_per_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """Further attempts: so many for each request, and each second."""
    keep_alive_s: PositiveSeconds = 15.0
    """Silence within an event stream after which a comment is sent."""


class PlacementSettings(_Section, frozen=True, kw_only=True):
    """Which replica, and the priors it is predicted with (policies/README.md)."""

    policy: str = "cartridge_aware"
    max_in_flight: PositiveCount | None = None
    """Limit of requests in flight for each replica; absent = none."""
    queue_s_per_request: Annotated[float, msgspec.Meta(ge=0)] = 0.05
    prefill_base_s: Annotated[float, msgspec.Meta(ge=0)] = 0.01
    prefill_s_per_token: Annotated[float, msgspec.Meta(ge=0)] = 0.0005
    prediction_spread: Annotated[float, msgspec.Meta(ge=0, le=2)] = DEFAULT_SPREAD
    """How far predictions are thought to be off before any was compared, as a share: attaching
    Cartridges must save that much more than their texts would (`cartridges.on_miss`)."""
    text_queue_share: Annotated[float, msgspec.Meta(ge=0)] = DEFAULT_QUEUE_SHARE
    """Texts that are sooner than their Cartridges are taken while the queue before them is at most
    this share of the prefill they add; more lets texts keep others waiting."""
    learn_rates: bool = True
    """Learn from first tokens and receipts; the rates above are where that begins."""
    share_loads: bool = True
    """Tell other gateways, by Redis, what this one has booked, and count what they have."""


class AdmissionSettings(_Section, frozen=True, kw_only=True):
    """Requests that wait while all replicas are at `placement.max_in_flight`."""

    max_queued: Annotated[int, msgspec.Meta(ge=0)] = 1000
    """For each model; 0 = none waits."""
    max_queued_per_tenant: PositiveCount = 200
    """For each model."""
    max_queued_bytes: PositiveCount = 256 << 20
    """Of the bodies of all."""
    max_wait_s: PositiveSeconds = 30.0
    reject_hopeless: bool = True
    """Answer at once where a client's deadline (x-cartridge-deadline-ms) will in all likelihood
    pass before the first token."""


class CartridgeSettings(_Section, frozen=True, kw_only=True):
    """How Cartridges may be used."""

    load_deadline_ms: Annotated[int, msgspec.Meta(gt=0, le=3_600_000)] = 30_000
    allow_uncertified_composition: bool = False
    """Join isolated artifacts that were not trained to be read together."""
    refresh_s: PositiveSeconds = 2.0
    """How often the store is looked through for new aliases."""
    on_miss: OnMiss = OnMiss.FAIL
    """What becomes of a request whose Cartridges cannot be had, unless it says so itself: `fail`,
    `prefill` their texts, or `drop` them."""
    max_text_bytes: PositiveCount = 1 << 20
    """Of the texts of one request; larger ones are not put into a prompt."""
    text_cache_bytes: PositiveCount = 64 << 20
    """Of texts that are kept in memory, in each process."""
    text_deadline_ms: Annotated[int, msgspec.Meta(gt=0, le=60_000)] = 1000
    """A text that takes longer to be read is not there."""
    text_instruction: Annotated[str, msgspec.Meta(pattern=r"\{document\}")] = DEFAULT_INSTRUCTION
    """What a text becomes in a system message; what `cartridge build --instruction` said."""


SelectingRoute = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


class SelectionSettings(_Section, frozen=True, kw_only=True):
    """Cartridges for requests that name none (docs/selection.md)."""

    enabled: bool = False
    routes: list[SelectingRoute] = msgspec.field(
        default_factory=lambda: ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
    )
    """On which of them; a client switches it off for one request by `cartridge_ids: []`."""
    max_cartridges: Annotated[int, msgspec.Meta(ge=1, le=8)] = 4
    max_tokens: PositiveCount = 16_384
    """Of all Cartridges of one request."""
    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 100
    """A search that takes longer finds nothing."""
    embedder: str = "minilm-int8"
    """Or the folder of a model that sentence-transformers reads."""
    reranker: str | None = None
    """Folder of a cross-encoder that orders the first candidates anew; takes longer than
    `deadline_ms` is for."""
    index_dir: str | None = None
    """Folder in which vectors and what `index calibrate` has learned outlive the process."""
    max_audiences: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Indexes that are kept: one for each tenant and kind of prompt that asks."""


class ResponseSettings(_Section, frozen=True, kw_only=True):
    """What is known of responses that replicas keep (`/v1/responses`): which one, and whose."""

    max_known: PositiveCount = 100_000
    """In each process, some 300 bytes each; more push out the oldest."""
    keep_s: PositiveSeconds = 86_400.0
    """How long one is known."""


class ResidencySettings(_Section, frozen=True, kw_only=True):
    """How far the map is believed."""

    stale_after_s: PositiveSeconds = 3.0
    """Age from which the map is `degraded`."""
    fallback_after_s: PositiveSeconds = 30.0
    """Age from which there is no map."""


class KubernetesSettings(_Section, frozen=True, kw_only=True):
    """A Service whose ready endpoints are replicas, each named for its pod."""

    service: str | None = None
    """Its name; absent = none. Needs the right to list and watch EndpointSlices."""
    namespace: str | None = None
    port_name: str = "http"
    """Name of its port; empty for a port without a name."""
    scheme: Literal["http", "https"] = "http"
    kubeconfig: str | None = None
    """File of a gateway outside of the cluster; absent = the pod's own service account."""


class FleetSettings(_Section, frozen=True, kw_only=True):
    """Where replicas come from beside `replicas`, and how they are watched."""

    file: str | None = None
    """YAML or JSON list of {name, url}, read again when it changes."""
    file_poll_s: PositiveSeconds = 1.0
    dns: str | None = None
    """http(s)://name:port; every address of the name is a replica, named address:port."""
    dns_refresh_s: PositiveSeconds = 5.0
    kubernetes: KubernetesSettings = KubernetesSettings()
    from_registrations: bool = False
    """Take in engines whose lease in Redis says where they answer; needs the residency key."""
    probe_interval_s: PositiveSeconds = 0.5
    probe_timeout_s: PositiveSeconds = 2.0
    num_failures: PositiveCount = 2
    """Failed probes in a row until a replica is unhealthy."""
    suspect_after_s: PositiveSeconds = 1.0
    """A replica whose probe is unanswered for so long is asked after others."""
    num_request_failures: PositiveCount = 5
    """Failed requests in a row until a replica is ejected; never more than half of the fleet."""
    ejection_s: PositiveSeconds = 10.0
    """How long the first time; each further time longer by as much."""


class ReplicationSettings(_Section, frozen=True, kw_only=True):
    """Copies of hot Cartridges, made before those who have them queue (docs/operating.md)."""

    enabled: bool = False
    """Call engines' control services; needs redis_url, store and the residency key."""
    interval_s: PositiveSeconds = 5.0
    """Between two rounds."""
    max_actions: PositiveCount = 16
    """Of one round."""
    max_copy_bytes_per_s: PositiveCount = 256 << 20
    """Of all copies together, on average; a larger one than a minute of it is not made."""
    rate_window_s: PositiveSeconds = 60.0
    """What came longer ago says little of what will come."""
    token_file: str | None = None
    """File with the engines' control token, if not in CARTRIDGE_ROUTER_CONTROL_TOKEN."""
    ca_file: str | None = None
    """Authority of the control services' certificates; absent = they are called without TLS."""
    cert_file: str | None = None
    """What the gateway shows to them."""
    key_file: str | None = None


class AdminSettings(_Section, frozen=True, kw_only=True):
    """A listener for operators: `/ui`, `/admin/state`, `/admin/replicas`."""

    host: str = "127.0.0.1"
    """Beyond loopback it needs a token."""
    port: Port | None = None
    """Absent = off."""
    token_file: str | None = None
    """File with the token, where the environment has none (CARTRIDGE_ROUTER_ADMIN_TOKEN)."""


class DrainSettings(_Section, frozen=True, kw_only=True):
    """How the gateway ends when it is told to (SIGTERM); `/ready` answers 503 from then on."""

    settle_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    """How long requests are still accepted, until whoever routes here has noticed."""
    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    """How long requests that run may take after that."""


class ClientSettings(_Section, frozen=True, kw_only=True):
    """What clients may take."""

    head_timeout_s: PositiveSeconds = 10.0
    """For all headers of a request."""
    body_grace_s: PositiveSeconds = 10.0
    body_bytes_per_s: PositiveCount = 1024
    """A body must have come after the grace and its size at this rate."""
    keep_alive_s: PositiveSeconds = 75.0
    """How long a connection may lie idle between requests."""
    max_connections: PositiveCount | None = None
    """More are answered 503; absent = nearly half of the process's open-file limit."""
    write_timeout_s: PositiveSeconds = 300.0
    """How long a client may read nothing of an answer that waits for it."""
    write_buffer_bytes: PositiveCount = 8192
    """Of an answer that wait in memory for a client that does not read."""


class LimitSettings(_Section, frozen=True, kw_only=True):
    """What one tenant may ask of one gateway process; an absent limit is none."""

    requests_per_minute: PositiveCount | None = None
    tokens_per_minute: PositiveCount | None = None
    """Counted when a request comes: prompt, estimated, and the longest answer it allows."""
    requests_in_flight: PositiveCount | None = None


class ListedTenant(_Section, frozen=True, kw_only=True):
    """One tenant that is known by name."""

    is_trusted: bool = False
    """May send fields that are meant for the engine (docs/operating.md, "Tenants")."""
    limits: LimitSettings | None = None
    """Absent = `default_limits`."""
    max_priority: Priority = 0
    """Highest priority that its requests may ask for (x-cartridge-priority)."""
    has_selection: bool = True
    """Where `selection.enabled`, Cartridges are found for its requests that name none."""


class TenantSettings(_Section, frozen=True, kw_only=True):
    """Who may come, by key or by token; with neither, everybody is the one tenant `tenant`."""

    keys_file: str | None = None
    """YAML file of tenants and of hashes of their keys; read again when it changes."""
    refresh_s: PositiveSeconds = 2.0
    """How often it is looked at."""
    jwks_url: str | None = None
    """Where the keys are that sign bearer tokens (JWT)."""
    issuer: str | None = None
    audience: str | None = None
    tenant_claim: str = "tenant"
    """Claim of a token that names its tenant."""
    allow_unlisted: bool = False
    """Let tokens name tenants that are listed nowhere; they get `default_limits`."""
    default_limits: LimitSettings = LimitSettings()
    has_own_prefix_caches: bool = True
    """Each tenant finds only its own prompts in engines' prefix caches; else by the time of a first
    token it can learn what others have asked. Engines other than vLLM may refuse the field."""
    listed: dict[TenantName, ListedTenant] = {}
    """Tenants by name, beside those of the keys file."""

    @property
    def is_on(self) -> bool:
        """Whether requests need a key or a token."""
        return self.keys_file is not None or self.jwks_url is not None


class LogFormat(StrEnum):
    """How log lines are written."""

    TEXT = "text"
    JSON = "json"


class LogSettings(_Section, frozen=True, kw_only=True):
    """What is written to stderr."""

    format: LogFormat = LogFormat.TEXT
    level: Literal["debug", "info", "warning", "error"] = "info"
    has_requests: bool = False
    """One line for each request: route, status, replica, seconds."""


class TelemetrySettings(_Section, frozen=True, kw_only=True):
    """Where traces go."""

    otlp_endpoint: str | None = None
    """`http(s)://host:4317`, OTLP by gRPC; absent = nowhere. The client's trace is carried on in
    any case."""


class TlsSettings(_Section, frozen=True, kw_only=True):
    """What clients connect to; without `cert_file` plain HTTP."""

    cert_file: str | None = None
    """PEM: the certificate and those between it and the root."""
    key_file: str | None = None
    client_ca_file: str | None = None
    """Clients must then show a certificate of this authority."""


class EngineSettings(_Section, frozen=True, kw_only=True):
    """How the gateway shows itself to engines, and believes them."""

    ca_file: str | None = None
    """Authority of the engines' certificates, beside the system's."""
    cert_file: str | None = None
    key_file: str | None = None
    api_key_file: str | None = None
    """Key that engines were started with (`--api-key`)."""


class Settings(_Section, frozen=True, kw_only=True):
    """The whole. `--replicas` alone makes an ordinary OpenAI proxy."""

    host: str = "127.0.0.1"
    port: Port = 8000
    workers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    """Processes that listen on the port; limits and queues are of each."""
    replicas: list[str] = []
    """`URL` or `name=URL`; the name defaults to host:port."""
    redis_url: str | None = None
    store: str | None = None
    """Cartridge store: a folder, or a URL (docs/operating.md, "Stores")."""
    tenant: TenantName = "public"
    """Tenant of all requests where `tenants` asks for no keys."""
    trust_client_fields: bool = False
    """Let all clients send fields that are meant for the engine; for one tenant only."""
    max_body_bytes: PositiveCount = 64 << 20
    clients: ClientSettings = ClientSettings()
    logging: LogSettings = LogSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    tls: TlsSettings = TlsSettings()
    engines: EngineSettings = EngineSettings()
    forwarding: ForwardingSettings = ForwardingSettings()
    placement: PlacementSettings = PlacementSettings()
    admission: AdmissionSettings = AdmissionSettings()
    cartridges: CartridgeSettings = CartridgeSettings()
    selection: SelectionSettings = SelectionSettings()
    residency: ResidencySettings = ResidencySettings()
    responses: ResponseSettings = ResponseSettings()
    fleet: FleetSettings = FleetSettings()
    replication: ReplicationSettings = ReplicationSettings()
    drain: DrainSettings = DrainSettings()
    admin: AdminSettings = AdminSettings()
    tenants: TenantSettings = TenantSettings()

    def replica_urls(self) -> dict[ReplicaId, str]:
        """Name -> base URL without a trailing slash, in the order given."""
        urls = {}
        for text in self.replicas:
            match = _REPLICA.fullmatch(text.strip())
            assert match is not None  # noqa: S101 - checked by `load_settings`
            url = match["url"]
            urls[ReplicaId(match["name"] or url.partition("://")[2])] = url
        return urls


def settings_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of the settings file."""
    schema = msgspec.json.schema(Settings)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Cartridge Router settings",
        **schema,
    }


def load_settings(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Any]
) -> Settings:
    """Merge and check; later sources win, key by key.

    Args:
        file: YAML (or JSON) file.
        environment: `CARTRIDGE_ROUTER_PORT`, `CARTRIDGE_ROUTER_PLACEMENT__POLICY`, …; lists are
            separated by commas.
        flags: values from the command line; `None` = not given.

    Raises:
        ConfigurationError: with every problem.
    """
    merged: dict[str, Any] = {}
    problems: list[str] = []
    if file is not None:
        _merge(merged, _read_file(file))
    _merge(merged, _from_environment(environment, problems))
    _merge(merged, {name: value for name, value in flags.items() if value is not None})
    validator = jsonschema.Draft202012Validator(settings_schema())
    errors = sorted(validator.iter_errors(merged), key=lambda error: error.json_path)
    problems += [f"{error.json_path.removeprefix('$.')}: {error.message[:200]}" for error in errors]
    for error in errors:
        _drop_refused(merged, error)
    settings = msgspec.convert(merged, Settings)
    problems += _cross_checks(settings)
    if settings.redis_url is not None:
        try:
            redis_url = with_login(settings.redis_url, environment)
            settings = msgspec.structs.replace(settings, redis_url=redis_url)
        except InvalidLogin as error:
            problems.append(f"redis_url: {error}")
    if problems:
        raise ConfigurationError(problems)
    return settings


def _drop_refused(merged: dict[str, Any], error: jsonschema.ValidationError) -> None:
    """Take out what the schema refuses, so that the other checks can still be made."""
    path = list(error.absolute_path)
    refused: list[Any]
    if error.validator == "additionalProperties":
        instance, schema = cast("dict[str, Any]", error.instance), cast("Any", error.schema)
        refused = [name for name in instance if name not in schema["properties"]]
    else:
        refused = [path.pop()]
    target: Any = merged
    for name in path:
        target = target.get(name) if isinstance(target, dict) else None
    if isinstance(target, dict):
        for name in refused:
            target.pop(name, None)
    elif path:
        merged.pop(str(path[0]), None)


def _cross_checks(settings: Settings) -> list[str]:
    problems = [
        f"replicas: {text!r} is neither http(s)://host:port nor name=http(s)://host:port"
        for text in settings.replicas
        if _REPLICA.fullmatch(text.strip()) is None
    ]
    if not problems and len(settings.replica_urls()) != len(settings.replicas):
        problems.append("replicas: two have the same name")
    if settings.placement.policy not in POLICIES:
        problems.append(
            f"placement.policy: {settings.placement.policy!r} is none of "
            f"{', '.join(sorted(POLICIES))}"
        )
    if settings.store is not None and (problem := store_problem(settings.store)) is not None:
        problems.append(f"store: {problem}")
    endpoint = settings.telemetry.otlp_endpoint
    if endpoint is not None and _ENDPOINT.fullmatch(endpoint) is None:
        problems.append("telemetry.otlp_endpoint: must be http(s)://host:port")
    for section, part in (("tls", settings.tls), ("engines", settings.engines)):
        if part.key_file is not None and part.cert_file is None:
            problems.append(f"{section}.key_file: goes with {section}.cert_file")
    if settings.tls.client_ca_file is not None and settings.tls.cert_file is None:
        problems.append("tls.client_ca_file: goes with tls.cert_file")
    if settings.residency.fallback_after_s < settings.residency.stale_after_s:
        problems.append("residency.fallback_after_s: must not be below residency.stale_after_s")
    return problems + _tenant_problems(settings) + _fleet_problems(settings)


def _fleet_problems(settings: Settings) -> list[str]:
    problems = []
    if settings.fleet.from_registrations and settings.redis_url is None:
        problems.append("fleet.from_registrations: needs redis_url")
    replication = settings.replication
    if replication.enabled:
        problems += [
            f"replication.enabled: needs {name}"
            for name in ("redis_url", "store")
            if getattr(settings, name) is None
        ]
    if (replication.key_file is None) is not (replication.cert_file is None):
        problems.append("replication.cert_file and replication.key_file: both or neither")
    if replication.cert_file is not None and replication.ca_file is None:
        problems.append("replication.cert_file: goes with replication.ca_file")
    kubernetes = settings.fleet.kubernetes
    if kubernetes.service is not None and kubernetes.namespace is None:
        problems.append("fleet.kubernetes.namespace: must be set with a service")
    if settings.fleet.dns is not None and not _NAME_AND_PORT.fullmatch(settings.fleet.dns):
        problems.append(f"fleet.dns: {settings.fleet.dns!r} is not http(s)://name:port")
    return problems


def _tenant_problems(settings: Settings) -> list[str]:
    tenants = settings.tenants
    names = (settings.tenant, *tenants.listed)
    if any(name.endswith("\n") for name in names):
        return ["tenant, tenants.listed: a name ends with a line break"]
    if not tenants.is_on:
        unused = tenants != TenantSettings()
        text = "tenants: without keys_file or jwks_url nobody is asked who it is"
        return [text] if unused else []
    problems = []
    if settings.trust_client_fields:
        problems.append("trust_client_fields: with tenants.* each tenant has is_trusted of its own")
    problems += [
        f"tenants.{name}: goes with tenants.jwks_url, and that with it"
        for name, value in (("issuer", tenants.issuer), ("audience", tenants.audience))
        if (value is None) is not (tenants.jwks_url is None)
    ]
    if tenants.allow_unlisted and tenants.jwks_url is None:
        problems.append("tenants.allow_unlisted: is for tokens, and tenants.jwks_url is not set")
    if tenants.jwks_url is not None and not _is_private_fetch(tenants.jwks_url):
        problems.append(
            "tenants.jwks_url: must be https, or http to this machine, without an account"
        )
    return problems


def _is_private_fetch(url: str) -> bool:
    """Whether nobody on the way can change what is fetched, and the URL may be printed."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    if not host or "@" in parts.netloc:
        return False
    return parts.scheme == "https" or (
        parts.scheme == "http" and host in {"127.0.0.1", "::1", "localhost"}
    )


def _read_file(file: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError([f"{file}: {error}"]) from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigurationError([f"{file}: not a mapping of settings"])
    return value


def _merge(target: dict[str, Any], source: Mapping[str, Any]) -> None:
    for name, value in source.items():
        if isinstance(value, Mapping) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        else:
            target[name] = dict(value) if isinstance(value, Mapping) else value


def _from_environment(environment: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    """Nested values of all variables with the prefix; unknown names are left to the schema."""
    found: dict[str, Any] = {}
    for variable, text in sorted(environment.items()):
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or name in _NOT_FROM_ENVIRONMENT:
            continue
        *sections, leaf = name.lower().split("__")
        target: Any = found
        for section in sections:
            target = target.setdefault(section, {}) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            problems.append(f"{variable}: another variable gives its section a value")
            continue
        try:
            target[leaf] = _parse_text(leaf, text)
        except yaml.YAMLError as error:
            problems.append(f"{variable}: {error}")
    return found


def _parse_text(leaf: str, text: str) -> Any:
    if leaf == "replicas":
        return [part.strip() for part in text.split(",") if part.strip()]
    if leaf in _TEXTS:
        return text
    return yaml.safe_load(text)


def residency_key(environment: Mapping[str, str] = os.environ) -> bytes | None:
    """The key that residency records must be signed with, or `None`."""
    text = environment.get(f"{ENV_PREFIX}RESIDENCY_KEY")
    return text.encode() if text else None
