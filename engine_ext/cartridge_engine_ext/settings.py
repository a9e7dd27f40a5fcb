"""Settings of the extension: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`.

Owns their names, defaults and checks. Refuses unknown keys and reports every problem at once.
"""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.eviction import EvictionPolicyName
from cartridge_proto.names import ENV_RESIDENCY_KEY, REDIS_CHANGES, residency_key
from cartridge_proto.redis_users import InvalidLogin, with_login
from cartridge_proto.residency import BaseUrlText, ReplicaId
from cartridge_proto.stores import store_problem

DEFAULT_DRAM_BYTES = 4 << 30
DEFAULT_NVME_BYTES = 64 << 30
MAX_LEASE_S = 3600


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator sets. Sizes in bytes, times in seconds."""

    store: str
    """Cartridge store: a folder, or a URL (docs/operating.md, "Stores")."""
    self_url: str
    """Where this engine's own API server answers, for the boot self-test."""
    replica_id: str | None = None
    """Name of this replica in the fleet; default: host:port of `self_url`."""
    advertise_url: str | None = None
    """Where gateways reach this engine's API server, told in its lease; absent = not told."""
    api_key: str | None = None
    """Key of this engine's own API server, for the self-test."""
    redis_url: str | None = None
    """Where residency is published; without it the engine serves but is not on the map."""
    control_address: str | None = None
    """host:port of the gRPC control service; port 0 takes a free one; absent = no service."""
    control_token_file: str | None = None
    """File with the token of control calls, where the environment has none."""
    control_tls_cert: str | None = None
    """PEM file: the control service's certificate, and those that signed it."""
    control_tls_key: str | None = None
    """PEM file: its private key."""
    control_tls_client_ca: str | None = None
    """PEM file: who signs the certificates that callers need."""
    dram_bytes: int = DEFAULT_DRAM_BYTES
    """Bound of the verified artifacts kept in memory."""
    pinned_bytes: int | None = None
    """Part of `dram_bytes` that pins may take; default: half."""
    eviction_policy: EvictionPolicyName = EvictionPolicyName.LRU
    """What leaves the dram tier first."""
    hbm_pinned_fraction: float = 0.25
    """Part of vLLM's KV blocks that pins may keep from eviction."""
    nvme_dir: str | None = None
    """Folder on a local disk that keeps what was fetched from the store; all engines of a machine
    may share it. Absent = no nvme tier."""
    nvme_bytes: int = DEFAULT_NVME_BYTES
    """Bound of that folder."""
    agent_socket: str | None = None
    """unix:/path of a node agent, which then owns the dram tier; `dram_bytes` bounds what this
    engine loads itself while the agent is away."""
    num_loaders: int = 2
    """Threads that fetch and verify."""
    otlp_endpoint: str | None = None
    """Where spans go (OTLP over gRPC, http:// or https://); absent = to the process's provider."""
    lease_s: float = 6.0
    """Life of the replica's lease without a heartbeat."""
    with_weights_digest: bool = True
    """Hash the model's weights at start, so that artifacts are matched by weights."""
    with_probe: bool = True
    """Let each artifact answer its manifest's probe on this engine before it serves."""
    state_dir: str | None = None
    """Folder that keeps what was found out about this engine build over restarts: the verdicts of
    probes; absent = found out anew on each start."""
    segment_kernel: str = "auto"
    """What computes attention over packed prefixes, where `--worker-cls` allows them: a name of
    `cartridge_kernels.backends`, or the fastest that can run."""
    attend_in_place: bool = False
    """Read Cartridges from the dram tier in every step instead of copying them into KV blocks; on
    engines whose `--worker-cls` allows packed prefixes (docs/attention.md says when it pays)."""
    moved_keys_bytes: int = 256 << 20
    """Bound of the keys that each worker remembers as they were moved along the sequence, for
    Cartridges that stand behind others again; 0 = none."""
    model_dir: str | None = None
    """Folder of the model's files; default: the model path that vLLM was given."""

    @property
    def replica(self) -> ReplicaId:
        """The replica's name."""
        return ReplicaId(self.replica_id or urlsplit(self.self_url).netloc)


def parse_settings(config: dict[str, object]) -> EngineSettings:
    """Check the extra config.

    Raises:
        ConfigurationError: listing every problem.
    """
    problems, values = _typed(config)
    problems += _value_problems(values)
    if problems:
        raise ConfigurationError("kv_connector_extra_config: " + "; ".join(problems))
    return msgspec.convert(values, EngineSettings)


def _typed(config: dict[str, object]) -> tuple[list[str], dict[str, Any]]:
    """Problems with names and types, and the values that have none."""
    fields = {field.name: field for field in msgspec.structs.fields(EngineSettings)}
    problems = [f"{name}: there is no such setting" for name in config if name not in fields]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in config:
            if field.required:
                problems.append(f"{name}: must be set")
            continue
        try:
            values[name] = msgspec.convert(config[name], field.type)
        except msgspec.ValidationError as error:
            problems.append(f"{name}: {error}")
    return problems, values


def _value_problems(values: dict[str, Any]) -> list[str]:
    """Problems with values of the right type; defaults have none."""
    problems = [
        f"{name}: {values[name]} must be above 0"
        for name in ("dram_bytes", "nvme_bytes", "num_loaders")
        if name in values and values[name] <= 0
    ]
    if values.get("moved_keys_bytes", 0) < 0:
        problems.append(f"moved_keys_bytes: {values['moved_keys_bytes']} must be at least 0")
    agent_socket = values.get("agent_socket")
    if agent_socket is not None and not agent_socket.startswith("unix:/"):
        problems.append(f"agent_socket: {agent_socket[:120]!r}; unix:/path")
    pinned, capacity = values.get("pinned_bytes"), values.get("dram_bytes", DEFAULT_DRAM_BYTES)
    if pinned is not None and not 0 <= pinned <= capacity:
        problems.append(f"pinned_bytes: {pinned} must be from 0 to dram_bytes ({capacity})")
    if "store" in values and (problem := store_problem(values["store"])) is not None:
        problems.append(f"store: {problem}")
    if values.get("nvme_dir") is not None and not Path(values["nvme_dir"]).is_absolute():
        problems.append(f"nvme_dir: {values['nvme_dir']} is not an absolute path")
    fraction = values.get("hbm_pinned_fraction")
    if fraction is not None and not 0 <= fraction <= 1:
        problems.append(f"hbm_pinned_fraction: {fraction} must be from 0 to 1")
    # Written so that NaN is out of range too.
    if "lease_s" in values and not 1 <= values["lease_s"] <= MAX_LEASE_S:
        problems.append(f"lease_s: {values['lease_s']} must be from 1 to {MAX_LEASE_S}")
    return problems + _address_problems(values)


def _address_problems(values: dict[str, Any]) -> list[str]:
    """Problems with how others know this engine."""
    problems = []
    if values.get("advertise_url") is not None:
        try:
            msgspec.convert(values["advertise_url"], BaseUrlText)
        except msgspec.ValidationError:
            shown = values["advertise_url"][:80]
            problems.append(f"advertise_url: {shown!r} is not http(s)://host:port")
    if "self_url" not in values:
        return problems
    url = urlsplit(values["self_url"])
    if url.scheme not in {"http", "https"}:
        problems.append(f"self_url: {values['self_url'][:80]!r} is no http URL")
    return problems + _replica_problems(values.get("replica_id") or url.netloc)


def _replica_problems(replica: str) -> list[str]:
    if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", replica) is None:
        return [f"replica_id: {replica[:80]!r} has other signs than A-Za-z0-9._:-"]
    if residency_key(replica) == REDIS_CHANGES:
        return [f"replica_id: {replica!r} is taken: its rows would be the stream of changes"]
    return []


def residency_key_from_environment() -> bytes | None:
    """The key that signs residency records, or `None` for unsigned ones."""
    text = os.environ.get(ENV_RESIDENCY_KEY)
    return text.encode() if text else None


def redis_url_with_login(redis_url: str) -> str:
    """The URL with the login of the environment, if it has none of its own.

    Raises:
        ConfigurationError: half a login, or a password file that cannot be read.
    """
    try:
        return with_login(redis_url, os.environ)
    except InvalidLogin as error:
        raise ConfigurationError(f"kv_connector_extra_config: redis_url: {error}") from error
