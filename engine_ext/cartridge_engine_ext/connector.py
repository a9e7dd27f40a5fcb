"""`CartridgeConnector`: the class that vLLM's `--kv-transfer-config` names.

Owns nothing but the translation between vLLM's connector interface and the two halves. The class
path is public: operators write it into deployment files.
"""

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cartridge_engine_ext.load_plan import LoadPlan, LoadReport
from cartridge_engine_ext.plugin import SchedulerRuntime, check_engine_flags, make_worker_side
from cartridge_engine_ext.scheduler_side import SchedulerSide
from cartridge_engine_ext.stats import ConnectorMetrics, ConnectorStats
from cartridge_engine_ext.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


IDLE_STEP_S = 0.001


class CartridgeConnector(KVConnectorBase_V1):
    """Serves Cartridges as virtual prefixes; one instance per role."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine_flags(vllm_config)
        self._runtime: SchedulerRuntime | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._runtime = SchedulerRuntime(vllm_config, kv_cache_config)
        else:
            self._worker = make_worker_side(vllm_config, kv_cache_config.num_blocks)

    # --- scheduler half --------------------------------------------------------------------------
    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._runtime is not None  # noqa: S101 - vLLM calls each role's methods only
        return self._runtime.scheduler_side

    def on_new_request(self, request: "Request") -> None:
        """See `SchedulerSide.on_new_request`."""
        self._scheduler_side.on_new_request(request)

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Let the census of prefixes in HBM look at vLLM's blocks."""
        assert self._runtime is not None  # noqa: S101 - called by the scheduler only
        self._runtime.census.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Virtual tokens to load, between steps."""
        return self._scheduler_side.num_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Plan a load into the blocks that were allocated."""
        num_skipped = sum(1 for block in blocks.blocks[0] if block.is_null)
        self._scheduler_side.after_allocation(
            request, blocks.get_block_ids()[0], num_external_tokens, num_skipped
        )

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """The loads of this step.

        While a step runs no token and requests wait for bytes, vLLM would ask again at once, and
        take the interpreter and a core from the very threads that bring them.
        """
        plan = self._scheduler_side.take_plan()
        if scheduler_output.total_num_scheduled_tokens == 0 and self._scheduler_side.is_waiting:
            time.sleep(IDLE_STEP_S)
        return plan

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take in what the worker did."""
        report = connector_output.kv_connector_worker_meta
        self._scheduler_side.take_output(
            report if isinstance(report, LoadReport) else None,
            connector_output.finished_recving or (),
        )

    def reset_cache(self) -> bool:
        """Give pinned blocks back. vLLM resets its prefix cache before it asks this.

        So a first `reset_prefix_cache?reset_external=true` answers no and unpins, a second works.
        """
        assert self._runtime is not None  # noqa: S101 - called by the scheduler only
        self._runtime.census.unpin_all()
        return True

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are freed at once; the receipt goes with the answer."""
        return False, self._scheduler_side.finish(request)

    # --- worker half -----------------------------------------------------------------------------
    @property
    def _worker_side(self) -> WorkerSide:
        assert self._worker is not None  # noqa: S101 - vLLM calls each role's methods only
        return self._worker

    @property
    def _plan(self) -> LoadPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, LoadPlan)  # noqa: S101 - made by build_connector_meta
        return plan

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See `WorkerSide.register_kv_caches`."""
        self._worker_side.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Begin this step's loads."""
        self._worker_side.start_load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled after its load has ended."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """The forward pass has run: serve the self-test's read-backs."""
        self._worker_side.finish_step(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose load has ended, and those of them that failed."""
        ended, failed = self._worker_side.take_transfers()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What was loaded in this step."""
        return self._worker_side.take_report()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What happened since the last call; the scheduler half's, for all workers."""
        data = self._runtime.activity.take() if self._runtime is not None else None
        return ConnectorStats(data=data) if data is not None else None

    # --- the process that serves /metrics --------------------------------------------------------
    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Stats from what came over the wire."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """The instruments beside vLLM's own."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the threads of either half."""
        if self._runtime is not None:
            self._runtime.stop()
        if self._worker is not None:
            self._worker.stop()
