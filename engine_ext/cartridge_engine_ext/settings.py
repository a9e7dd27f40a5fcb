"""Settings of the extension: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`.

Owns their names, defaults and checks. Refuses unknown keys and reports every problem at once.
"""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto.names import ENV_RESIDENCY_KEY
from cartridge_proto.residency import ReplicaId

DEFAULT_DRAM_BYTES = 4 << 30


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator sets. Sizes in bytes, times in seconds."""

    store: str
    """Folder of the Cartridge store."""
    self_url: str
    """Where this engine's own API server answers, for the boot self-test."""
    replica_id: str | None = None
    """Name of this replica in the fleet; default: host:port of `self_url`."""
    api_key: str | None = None
    """Key of this engine's own API server, for the self-test."""
    redis_url: str | None = None
    """Where residency is published; without it the engine serves but is not on the map."""
    control_address: str | None = None
    """host:port of the gRPC control service; port 0 takes a free one; absent = no service."""
    dram_bytes: int = DEFAULT_DRAM_BYTES
    """Bound of the verified artifacts kept in memory."""
    num_loaders: int = 2
    """Threads that fetch and verify."""
    lease_s: float = 6.0
    """Life of the replica's lease without a heartbeat."""
    with_weights_digest: bool = True
    """Hash the model's weights at start, so that artifacts are matched by weights."""
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
    try:
        settings = msgspec.convert(config, EngineSettings)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"kv_connector_extra_config: {error}") from error
    problems = []
    if not Path(settings.store).is_dir():
        problems.append(f"store: {settings.store} is not a folder")
    if settings.dram_bytes <= 0:
        problems.append(f"dram_bytes: {settings.dram_bytes} must be above 0")
    if settings.num_loaders <= 0:
        problems.append(f"num_loaders: {settings.num_loaders} must be above 0")
    if settings.lease_s < 1:
        problems.append(f"lease_s: {settings.lease_s} must be at least 1")
    if urlsplit(settings.self_url).scheme not in {"http", "https"}:
        problems.append(f"self_url: {settings.self_url[:80]!r} is no http URL")
    if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", settings.replica) is None:
        problems.append(f"replica_id: {settings.replica[:80]!r} has other signs than A-Za-z0-9._:-")
    if problems:
        raise ConfigurationError("kv_connector_extra_config: " + "; ".join(problems))
    return settings


def residency_key_from_environment() -> bytes | None:
    """The key that signs residency records, or `None` for unsigned ones."""
    text = os.environ.get(ENV_RESIDENCY_KEY)
    return text.encode() if text else None
