"""The node agent: the process that owns the dram tier for all engines of a machine.

Owns putting its parts together (source, pool, socket, control) and ending them. Refuses torch,
vLLM and the identities of engines: it knows stores and bytes.
"""

import contextlib
import importlib.metadata
import logging
import resource
import secrets
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cartridge_engine_ext.agent_metrics import AgentMetrics, MetricsServer
from cartridge_engine_ext.agent_service import AgentService
from cartridge_engine_ext.control_access import OPEN_ACCESS, ControlAccess
from cartridge_engine_ext.control_service import ControlServer, ControlService
from cartridge_engine_ext.dram_pool import DramPool
from cartridge_engine_ext.dram_tier import ArtifactReader
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.eviction import EVICTION_POLICIES, EvictionPolicyName
from cartridge_engine_ext.nvme_source import NvmeSource
from cartridge_engine_ext.nvme_tier import DiskFailed, NvmeTier
from cartridge_engine_ext.residency_ledger import ResidencyLedger
from cartridge_proto.residency import Epoch, FailureReason, ReplicaId, Tier
from cartridge_proto.stores import Store, StoreError, open_store

if TYPE_CHECKING:
    from cartridge_proto.digest import Digest

logger = logging.getLogger(__name__)

TAKE_BACK_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class AgentOptions:
    """What an operator says. Sizes in bytes; `listen` is `unix:/path`."""

    listen: str
    store: str
    dram_bytes: int
    pinned_bytes: int | None = None
    eviction_policy: EvictionPolicyName = EvictionPolicyName.LRU
    num_loaders: int = 2
    nvme_dir: Path | None = None
    nvme_bytes: int | None = None
    allowed_uids: frozenset[int] | None = None
    control_address: str | None = None
    access: ControlAccess = OPEN_ACCESS
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """0 takes a free one; `None` = no metrics are served."""
    name: str = "agent"


def check_options(options: AgentOptions) -> None:
    """Refuse options that cannot work.

    Raises:
        ConfigurationError: listing every problem.
    """
    problems = []
    scheme, _, path = options.listen.partition(":")
    # The kernel's bound is 108 bytes with the final zero.
    if scheme != "unix" or not path.startswith("/") or len(path.encode()) > 107:
        problems.append(f"listen: {options.listen[:120]!r}; unix:/path of at most 107 bytes")
    problems += [
        f"{name}: {getattr(options, name)} must be above 0"
        for name in ("dram_bytes", "num_loaders")
        if getattr(options, name) <= 0
    ]
    pinned = options.pinned_bytes
    if pinned is not None and not 0 <= pinned <= options.dram_bytes:
        problems.append(f"pinned_bytes: {pinned} must be from 0 to dram_bytes")
    if (options.nvme_dir is None) != (options.nvme_bytes is None):
        problems.append("nvme_dir and nvme_bytes: both or neither")
    if options.nvme_bytes is not None and options.nvme_bytes <= 0:
        problems.append(f"nvme_bytes: {options.nvme_bytes} must be above 0")
    if options.metrics_port is not None and not 0 <= options.metrics_port <= 65535:
        problems.append(f"metrics_port: {options.metrics_port} must be from 0 to 65535")
    if problems:
        raise ConfigurationError("; ".join(problems))


class AgentDramPool(DramPool):
    """The agent's pool: what engines only keep does not stand in the way of an eviction.

    A use here is the hold of an engine, which may be idle.
    """

    take_back: Callable[["Digest", float], None] = staticmethod(lambda digest, timeout_s: None)
    """Asks engines for an artifact; set once, before anything is loaded."""

    def evict(self, digest: "Digest") -> str | None:
        """Drop an artifact, after engines that hold it idle have given it back."""
        self.take_back(digest, TAKE_BACK_TIMEOUT_S)
        return super().evict(digest)


class NodeAgent:
    """Serves engines from its making until `stop`; `opener` opens the store.

    Raises:
        ConfigurationError: an address, a folder or the store cannot be had.
    """

    def __init__(self, options: AgentOptions, opener: Callable[[str], Store] = open_store) -> None:
        check_options(options)
        self._opener = opener
        boot = secrets.token_hex(16)
        with contextlib.ExitStack() as undo:
            self._metrics = AgentMetrics()
            self._ledger = ResidencyLedger(observer=self._metrics)
            source = self._open_source(options, undo)
            self.service = AgentService(
                Path(options.listen.partition(":")[2]),
                boot=boot,
                allowed_uids=options.allowed_uids,
            )
            self.pool = AgentDramPool(
                source=source,
                capacity_bytes=options.dram_bytes,
                num_loaders=options.num_loaders,
                pinned_bytes=options.pinned_bytes,
                policy=EVICTION_POLICIES[options.eviction_policy](),
                on_ready=self._on_ready,
                on_failed=self._on_failed,
                on_evict=lambda digest: self._ledger.leave(digest, Tier.DRAM),
                on_pin=lambda digest, is_pinned: self._ledger.set_pinned(
                    digest, Tier.DRAM, is_pinned=is_pinned
                ),
                on_shortage=self.service.on_shortage,
            )
            self.pool.take_back = self.service.take_back
            undo.callback(self.pool.close)
            # Before the pool: engines whose connection has ended load by themselves.
            undo.callback(self.service.stop)
            self.control = self._open_control(options, boot, undo)
            self.metrics = self._open_metrics(options, undo)
            self.service.start(self.pool)
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Let engines go and give everything back. What engines hold stays theirs."""
        self._undo.close()

    def _on_ready(self, digest: "Digest", size_bytes: int) -> None:
        self._ledger.enter(digest, Tier.DRAM, size_bytes)
        self._metrics.note_loaded(None)
        self.service.on_ready(digest, size_bytes)

    def _on_failed(self, digest: "Digest", reason: FailureReason) -> None:
        self._metrics.note_loaded(reason)
        self.service.on_failed(digest, reason)

    def _open_source(self, options: AgentOptions, undo: contextlib.ExitStack) -> ArtifactReader:
        try:
            store = self._opener(options.store)
            undo.callback(store.close)
            if options.nvme_dir is None or options.nvme_bytes is None:
                return store
            tier = NvmeTier(
                store=store,
                root=options.nvme_dir,
                capacity_bytes=options.nvme_bytes,
                on_ready=lambda digest, size_bytes: self._ledger.enter(
                    digest, Tier.NVME, size_bytes
                ),
                on_evict=lambda digest: self._ledger.leave(digest, Tier.NVME),
            )
        except DiskFailed as error:
            raise ConfigurationError(f"nvme_dir: {error}") from error
        except StoreError as error:
            raise ConfigurationError(f"store: {error}") from error
        undo.callback(tier.close)
        return NvmeSource(store, tier)

    def _open_control(
        self, options: AgentOptions, boot: str, undo: contextlib.ExitStack
    ) -> ControlServer | None:
        if options.control_address is None:
            return None
        service = ControlService(
            pool=self.pool,
            engine=None,
            engine_version=f"cartridge-router {importlib.metadata.version('cartridge-router')}",
            replica=ReplicaId(options.name),
            epoch=Epoch(boot),
            not_ready_reason=lambda: None,
            ledger=self._ledger,
        )
        server = ControlServer(service, options.control_address, options.access)
        undo.callback(server.stop)
        server.set_serving(is_serving=True)
        return server

    def _open_metrics(
        self, options: AgentOptions, undo: contextlib.ExitStack
    ) -> MetricsServer | None:
        if options.metrics_port is None:
            return None
        self._metrics.watch(
            num_engines=lambda: self.service.num_engines,
            used_bytes=lambda: self.pool.used_bytes,
            capacity_bytes=options.dram_bytes,
        )
        server = MetricsServer(self._metrics.registry, options.metrics_host, options.metrics_port)
        undo.callback(server.stop)
        return server


def run_agent(options: AgentOptions, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `say` gets a line when engines may connect.

    Raises:
        ConfigurationError: the options cannot work here.
    """
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Two descriptors for each blob on its way to an engine, one for each that is held.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    agent = NodeAgent(options)
    try:
        control = "" if agent.control is None else f", control at {agent.control.address}"
        metrics = "" if agent.metrics is None else f", metrics at {agent.metrics.address}"
        say(f"serving engines at {options.listen}{control}{metrics}")
        stopped.wait()
    finally:
        agent.stop()
