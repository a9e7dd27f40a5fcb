"""Puts the extension together inside an engine: the only place that constructs.

Owns the start and the end of everything that lives beside the scheduler, and the verdict of the
boot self-test. Refuses engines whose flags would let a virtual position be prefilled as text.
"""

import importlib.metadata
import logging
import queue
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import vllm
from huggingface_hub import snapshot_download
from opentelemetry import trace
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from cartridge_engine_ext import identity
from cartridge_engine_ext.activity import Activity
from cartridge_engine_ext.adapter_identity import AdapterIdentities
from cartridge_engine_ext.agent_pool import AgentPool
from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_engine_ext.control_access import ControlAccess, read_access
from cartridge_engine_ext.control_service import ControlServer, ControlService
from cartridge_engine_ext.dram_tier import ArtifactReader, DramTier
from cartridge_engine_ext.engine_client import EngineClient
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.eviction import EVICTION_POLICIES
from cartridge_engine_ext.first_load_probe import PASSED, FirstLoadProbe, build_digest
from cartridge_engine_ext.fleet_control import EnginePins, FleetDrain
from cartridge_engine_ext.hbm_census import HbmCensus
from cartridge_engine_ext.kv_hints import KvHints
from cartridge_engine_ext.layout_probe import Captured
from cartridge_engine_ext.nvme_source import NvmeSource
from cartridge_engine_ext.nvme_tier import NvmeTier
from cartridge_engine_ext.packed_layout import PACKED_GPU_WORKER, PACKED_WORKER, CacheGeometry
from cartridge_engine_ext.payload import DTYPE_NAMES
from cartridge_engine_ext.residency_ledger import ResidencyLedger
from cartridge_engine_ext.residency_publisher import ResidencyPublisher, new_epoch
from cartridge_engine_ext.rotary import RotaryEmbedding, rotary_embeddings
from cartridge_engine_ext.scheduler_side import EndedPrefix, SchedulerSide, SelfTestGate
from cartridge_engine_ext.self_test import (
    Answer,
    Subject,
    Verdict,
    composition_of,
    full_lengths,
    quick_lengths,
    run_packed_test,
    run_self_test,
)
from cartridge_engine_ext.settings import (
    EngineSettings,
    parse_settings,
    redis_url_with_login,
    residency_key_from_environment,
)
from cartridge_engine_ext.tracing import PrefixSpans, otlp_provider
from cartridge_engine_ext.virtual_prefix import num_blocks
from cartridge_engine_ext.worker_side import HeadShard, WorkerSide, all_heads
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.composition import cache_salt
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import LayerKind, Manifest
from cartridge_proto.names import FIELD_CARTRIDGES, FIELD_SELF_TEST
from cartridge_proto.residency import Tier
from cartridge_proto.stores import StoreError, open_store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

PROVEN_VLLM_VERSIONS = ("0.32.0",)
"""On others the boot self-test is the full one."""
EVICTION_FLUSH_S = 1.0
NVME_REFRESH_S = 5.0
CAPTURE_TIMEOUT_S = 300.0


def check_engine_flags(config: "VllmConfig") -> None:
    """Refuse engine settings under which answers could be wrong.

    Raises:
        ConfigurationError: listing every such setting.
    """
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    problems = []
    if transfer is None or transfer.kv_load_failure_policy != "fail":
        problems.append(
            "kv_load_failure_policy must be fail: recomputing a virtual position would run the "
            "model on placeholder ids"
        )
    if transfer is None or transfer.kv_role != "kv_both":
        problems.append("kv_role must be kv_both")
    if parallel.pipeline_parallel_size != 1 or parallel.data_parallel_size != 1:
        problems.append("pipeline and data parallel sizes must be 1 in this version")
    if parallel.nnodes != 1:
        problems.append("all workers must be on one machine: they map the same memory")
    if config.speculative_config is not None:
        problems.append("speculative decoding is not supported with Cartridges in this version")
    settings = parse_settings(transfer.kv_connector_extra_config) if transfer else None
    # On a GPU queries would have to come to the memory.
    is_able = parallel.worker_cls == PACKED_WORKER
    if settings is not None and settings.attend_in_place and not is_able:
        problems.append(f"attend_in_place needs --worker-cls {PACKED_WORKER}")
    if problems:
        raise ConfigurationError("; ".join(problems))


def engine_identity(config: "VllmConfig") -> EngineIdentity:
    """What this engine serves.

    Raises:
        ConfigurationError: the model's files do not say.
    """
    settings = parse_settings(config.kv_transfer_config.kv_connector_extra_config)
    model = config.model_config
    model_dir = _model_dir(config)
    return EngineIdentity(
        model=identity.model_identity(
            model_dir, name=model_dir.name, with_weights=settings.with_weights_digest
        ),
        geometry=identity.geometry(model_dir),
        rope=identity.rope(model_dir),
        chat_template_digest=identity.chat_template_digest(model_dir),
        max_model_len=model.max_model_len,
        block_size=config.cache_config.block_size,
    )


def _model_dir(config: "VllmConfig") -> Path:
    """Folder of the model's files: set, or where vLLM was told to look, or its hub cache."""
    settings = parse_settings(config.kv_transfer_config.kv_connector_extra_config)
    model = config.model_config
    named = Path(settings.model_dir or model.model)
    if named.is_dir():
        return named
    try:
        # vLLM has fetched it before a connector is made; nothing is downloaded here.
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model_dir: {named} is no folder, and the files of {model.model} are not in the hub "
            "cache; set model_dir in kv_connector_extra_config"
        ) from error


def _rotary_embeddings(config: "VllmConfig") -> list[RotaryEmbedding]:
    return rotary_embeddings(_model_dir(config), config.model_config.hf_text_config)


def make_worker_side(config: "VllmConfig", num_cache_blocks: int) -> WorkerSide:
    """The worker half; called in the worker, whose tensor-parallel rank vLLM has set."""
    geometry = identity.geometry(_model_dir(config))
    shard = HeadShard(
        rank=get_tensor_model_parallel_rank(),
        size=config.parallel_config.tensor_parallel_size,
        num_kv_heads=geometry.num_kv_heads,
    )
    settings = parse_settings(config.kv_transfer_config.kv_connector_extra_config)
    return WorkerSide(
        shard=shard,
        moved_keys_bytes=settings.moved_keys_bytes,
        segment_kernel=settings.segment_kernel if has_packed_worker(config) else None,
        attention_layers=config.compilation_config.static_forward_context,
        rotary=_rotary_embeddings(config),
        geometry=geometry,
        block_size=config.cache_config.block_size,
        num_cache_blocks=num_cache_blocks,
    )


def has_packed_worker(config: "VllmConfig") -> bool:
    """Whether the engine was started with the worker that can read packed prefixes."""
    return config.parallel_config.worker_cls in (PACKED_WORKER, PACKED_GPU_WORKER)


def _packed_cache(config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> CacheGeometry | None:
    """The cache as packed prefixes see it; `None` where the engine has none."""
    if not has_packed_worker(config):
        return None
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    geometry = identity.geometry(_model_dir(config))
    kinds = set(geometry.layer_kinds)
    if kinds != {LayerKind.FULL} or geometry.head_dim_k != geometry.head_dim_v:
        raise ConfigurationError(
            f"--worker-cls {config.parallel_config.worker_cls}: layers of kinds {sorted(kinds)} "
            f"with keys of {geometry.head_dim_k} and values of {geometry.head_dim_v} numbers "
            "cannot read packed prefixes; start the engine without it"
        )
    return CacheGeometry(spec.block_size, geometry.head_dim_k, DTYPE_NAMES[spec.dtype])


def adopt_engine_logging() -> None:
    """Let this package's messages go where vLLM's go."""
    package = logging.getLogger("cartridge_engine_ext")
    engine = logging.getLogger("vllm")
    if not package.handlers and engine.handlers:
        package.handlers = engine.handlers
        package.setLevel(engine.level)
        package.propagate = False


def _control_access(settings: EngineSettings) -> ControlAccess:
    return read_access(
        token_file=settings.control_token_file,
        tls_cert=settings.control_tls_cert,
        tls_key=settings.control_tls_key,
        tls_client_ca=settings.control_tls_client_ca,
    )


def _build_name(config: "VllmConfig", engine: EngineIdentity) -> str:
    """Name of this engine build: all that changes what it computes."""
    return build_digest(
        vllm.__version__,
        torch.__version__,
        importlib.metadata.version("cartridge-router"),
        msgspec.json.encode(engine).decode(),
        str(config.cache_config.cache_dtype),
        str(config.parallel_config.tensor_parallel_size),
        str(config.device_config.device_type),
        str(config.lora_config and config.lora_config.lora_dtype),
    )


def _check_cache_groups(config: "KVCacheConfig") -> None:
    """Refuse layers that do not share one block table.

    Raises:
        ConfigurationError: naming the kinds.
    """
    kinds = [type(group.kv_cache_spec).__name__ for group in config.kv_cache_groups]
    if len(kinds) != 1:
        raise ConfigurationError(
            f"layers need block tables of their own ({', '.join(kinds)}): such hybrid models "
            "cannot have a virtual prefix in this version"
        )


def _window_blocks(config: "KVCacheConfig") -> int | None:
    """Blocks at the end of a prefix that are kept, where every layer has a window; else `None`.

    Beside layers of full attention vLLM keeps everything for those with a window too.
    """
    spec = config.kv_cache_groups[0].kv_cache_spec
    if not isinstance(spec, SlidingWindowSpec):
        return None
    return num_blocks(spec.sliding_window - 1, spec.block_size)


def _block_bytes(config: "KVCacheConfig") -> int:
    """Bytes of one block of all layers, on one worker."""
    size: int = sum(
        group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        for group in config.kv_cache_groups
    )
    return size


class SchedulerRuntime:
    """Everything beside the scheduler. Made once; `stop` ends it."""

    def __init__(self, config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        adopt_engine_logging()
        _check_cache_groups(kv_cache_config)
        settings = parse_settings(config.kv_transfer_config.kv_connector_extra_config)
        self._engine = engine_identity(config)
        self._rotary = _rotary_embeddings(config)
        self._vocab_size = config.model_config.get_vocab_size()
        self._packed_cache = _packed_cache(config, kv_cache_config)
        epoch = new_epoch()
        self._gate = SelfTestGate()
        self._not_ready: str | None = "the boot self-test has not run yet"
        self._captured: queue.Queue[dict[int, Captured]] = queue.Queue()
        self._is_stopping = threading.Event()
        self._client = EngineClient(settings.self_url, settings.api_key)
        self.activity = Activity()
        self._adapters = AdapterIdentities()
        self._probes = FirstLoadProbe(
            self._answer_probe,
            build=_build_name(config, self._engine),
            folder=Path(settings.state_dir) if settings.state_dir is not None else None,
            on_quarantine=lambda digest: self.activity.note_quarantined(),
        )
        self._publisher = (
            ResidencyPublisher(
                redis_url=redis_url_with_login(settings.redis_url),
                replica=settings.replica,
                epoch=epoch,
                key=residency_key_from_environment(),
                engine=self._engine,
                engine_version=vllm.__version__,
                url=settings.advertise_url,
                lease_s=settings.lease_s,
            )
            if settings.redis_url
            else None
        )
        self._ledger = ResidencyLedger(self._publisher, self.activity)
        self.census = HbmCensus(
            self._ledger,
            group_ids=kv_cache_config.prefix_cacheable_group_ids,
            block_bytes=_block_bytes(kv_cache_config) * config.parallel_config.tensor_parallel_size,
            pinned_fraction=settings.hbm_pinned_fraction,
            longest_request_blocks=num_blocks(self._engine.max_model_len, self._engine.block_size),
            window_blocks=_window_blocks(kv_cache_config),
        )
        self._nvme, source = self._open_store(settings)
        own = ArtifactPool(
            store=source,
            engine=self._engine,
            capacity_bytes=settings.dram_bytes,
            num_loaders=settings.num_loaders,
            pinned_bytes=settings.pinned_bytes,
            policy=EVICTION_POLICIES[settings.eviction_policy](),
            on_ready=self._note_ready,
            on_evict=self._withdraw,
            on_pin=self._note_pin,
        )
        self._pool: DramTier = own
        if settings.agent_socket is not None:
            self._pool = AgentPool(
                path=Path(settings.agent_socket.removeprefix("unix:")),
                name=settings.replica,
                engine=self._engine,
                own=own,
                num_verifiers=settings.num_loaders,
                on_ready=self._note_ready,
                on_evict=self._withdraw,
                on_pin=self._note_pin,
            )
        self._hints = KvHints(
            dram=self._pool,
            census=self.census,
            on_outcome=self.activity.note_hint,
        )
        self._trace_provider = (
            otlp_provider(settings.otlp_endpoint, settings.replica)
            if settings.otlp_endpoint
            else None
        )
        self._spans = PrefixSpans(self._trace_provider or trace.get_tracer_provider())
        self.scheduler_side = SchedulerSide(
            packed_cache=self._packed_cache,
            is_in_place=settings.attend_in_place,
            pool=self._pool,
            engine=self._engine,
            replica=settings.replica,
            epoch=epoch,
            # One past the vocabulary: penalties count only ids below it, and a virtual position
            # that were prefilled as text would fail loudly.
            placeholder_token_id=self._vocab_size,
            gate=self._gate,
            census=self.census,
            adapters=self._adapters,
            verdict_of=self._probes.verdict if settings.with_probe else lambda *_: PASSED,
            hints=self._hints.take,
            on_ended=self._note_ended,
            on_captured=self._captured.put,
        )
        self._hbm_pins = EnginePins(self.census, self._wake)
        service = ControlService(
            pool=self._pool,
            engine=self._engine,
            engine_version=vllm.__version__,
            replica=settings.replica,
            epoch=epoch,
            not_ready_reason=lambda: self._not_ready,
            ledger=self._ledger,
            hbm_pins=self._hbm_pins,
            drainable=FleetDrain(self.scheduler_side, self._publisher),
            quarantined=self._probes.quarantined,
        )
        self._control = (
            ControlServer(service, settings.control_address, _control_access(settings))
            if settings.control_address
            else None
        )
        self._boot = threading.Thread(target=self._run_boot, name="cartridge-boot", daemon=True)
        self._boot.start()

    def stop(self) -> None:
        """Leave the fleet and give everything back. Idempotent."""
        self._is_stopping.set()
        self._gate.is_open = False
        if self._publisher is not None:
            self._publisher.stop()
        if self._control is not None:
            self._control.stop()
        self._hints.stop()
        self._hbm_pins.stop()
        self._probes.stop()
        self._adapters.stop()
        if self._nvme is not None:
            self._nvme.close()
        self._pool.close()
        if self._trace_provider is not None:
            self._trace_provider.shutdown()

    def _open_store(self, settings: EngineSettings) -> tuple[NvmeTier | None, ArtifactReader]:
        """The nvme tier, if there is one, and what the dram tier reads from."""
        store = open_store(settings.store)
        if settings.nvme_dir is None:
            return None, store
        tier = NvmeTier(
            store=store,
            root=Path(settings.nvme_dir),
            capacity_bytes=settings.nvme_bytes,
            on_ready=lambda digest, size_bytes: self._ledger.enter(digest, Tier.NVME, size_bytes),
            on_evict=lambda digest: self._ledger.leave(digest, Tier.NVME),
        )
        return tier, NvmeSource(store, tier)

    # --- boot ----------------------------------------------------------------------------------
    def _run_boot(self) -> None:
        if not self._client.wait_until_healthy(self._is_stopping.is_set):
            return
        is_proven = vllm.__version__ in PROVEN_VLLM_VERSIONS
        if not is_proven:
            logger.warning(
                "vLLM %s is not one of those that this extension was proven on (%s): the self-test "
                "runs at every block edge",
                vllm.__version__,
                ", ".join(PROVEN_VLLM_VERSIONS),
            )
        lengths = (quick_lengths if is_proven else full_lengths)(self._engine.block_size)
        try:
            verdicts = [self._self_test(num_tokens) for num_tokens in lengths]
            differences = [verdict.difference for verdict in verdicts]
            if self._packed_cache is not None:
                differences.append(run_packed_test(self._subject()))
        except Exception as error:
            logger.exception("boot self-test failed: this engine does not join the fleet")
            self._not_ready = f"boot self-test on vLLM {vllm.__version__}: {error}"
            return
        logger.info("boot self-test passed: logprobs differ by at most %.1e", max(differences))
        reasons = [verdict.immovable for verdict in verdicts if verdict.immovable is not None]
        if reasons:
            logger.warning("Cartridges at an offset are refused: %s", reasons[0])
        self._gate.immovable = reasons[0] if reasons else None
        self._gate.is_open = True
        self._not_ready = None
        if self._control is not None:
            self._control.set_serving(is_serving=True)
        if self._publisher is not None:
            self._publisher.start(self._control.address if self._control is not None else None)
        self._watch_nvme()

    def _watch_nvme(self) -> None:
        """Note what other engines do to the shared folder, until the end."""
        while self._nvme is not None and not self._is_stopping.wait(NVME_REFRESH_S):
            try:
                self._nvme.refresh()
            except StoreError as error:
                logger.warning("nvme tier: %s", error)

    def _self_test(self, num_tokens: int) -> Verdict:
        return run_self_test(
            self._subject(),
            num_tokens,
            lambda layer, keys, count: self._rotary[layer].move(keys, count),
        )

    def _subject(self) -> Subject:
        """This engine, as the self-tests reach it."""
        model = self._client.served_model()

        def proof(num_captured: int) -> dict[str, Any]:
            return {"token": self._gate.token, "num_tokens": num_captured}

        def complete(prompt: list[int], message: dict[str, Any]) -> Answer:
            params = {FIELD_SELF_TEST: proof(0), FIELD_CARTRIDGES: message}
            salt = cache_salt(Digest(message["composition"]))
            return self._client.complete(model, prompt, params, salt)

        def capture(prompt: list[int], num_captured: int) -> tuple[Answer, Captured]:
            params = {FIELD_SELF_TEST: proof(num_captured)}
            answer = self._client.complete(model, prompt, params, secrets.token_hex(16))
            by_rank = self._captured.get(timeout=CAPTURE_TIMEOUT_S)
            return answer, all_heads(by_rank, self._engine.geometry.num_kv_heads)

        return Subject(
            engine=self._engine,
            vocab_size=self._vocab_size,
            complete=complete,
            capture=capture,
            adopt=self._pool.adopt,
            discard=self._pool.evict,
        )

    def _answer_probe(
        self,
        manifest: Manifest,
        digest: Digest,
        prompt: list[int],
        num_new_tokens: int,
        adapter: str | None,
    ) -> Answer:
        message = composition_of(digest, manifest)
        params = {
            FIELD_SELF_TEST: {"token": self._gate.token, "num_tokens": 0},
            FIELD_CARTRIDGES: message,
        }
        salt = cache_salt(Digest(message["composition"]))
        model = adapter or self._client.served_model()
        return self._client.complete(model, prompt, params, salt, num_new_tokens)

    def _wake(self) -> None:
        """Let an idle scheduler take a step."""
        model = self._client.served_model()
        self._client.complete(model, [0], {}, secrets.token_hex(16), 1)

    # --- what is told ----------------------------------------------------------------------------
    def _note_ready(self, digest: Digest, size_bytes: int) -> None:
        self._ledger.enter(digest, Tier.DRAM, size_bytes)

    def _note_pin(self, digest: Digest, is_pinned: bool) -> None:
        self._ledger.set_pinned(digest, Tier.DRAM, is_pinned=is_pinned)

    def _withdraw(self, digest: Digest) -> None:
        self._ledger.leave(digest, Tier.DRAM)
        if self._publisher is not None and self._publisher.is_writing:
            self._publisher.flush(EVICTION_FLUSH_S)

    def _note_ended(self, ended: EndedPrefix) -> None:
        scope = ended.message.scope if ended.message is not None else ""
        self.activity.note_receipt(ended.receipt, scope)
        if ended.message is not None:
            self._spans.record(
                ended.message,
                ended.receipt,
                ended.trace_headers,
                ended.start_ns,
                ended.ready_ns,
            )
        if self._publisher is not None and self._gate.is_open:
            self._publisher.publish_receipt(ended.receipt)
