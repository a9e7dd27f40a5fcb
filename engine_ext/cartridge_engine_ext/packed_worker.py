"""What vLLM's `--worker-cls` names: a CPU worker whose requests may have packed prefixes.

Owns the positions of live tokens, which are not those of their slots, and the choice of the
attention backend. Refuses other model runners than the one it was tried with.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.load_plan import LoadPlan
from cartridge_engine_ext.packed_steps import STEPS

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# On a CPU vLLM takes CPU_ATTN whatever `--attention-backend` says.
register_backend(
    AttentionBackendEnum.CPU_ATTN,
    "cartridge_engine_ext.segment_attention.SegmentAttentionBackend",
)


class PackedCpuModelRunner(CPUModelRunner):
    """vLLM's, with live tokens at the positions behind a packed prefix."""

    def _prepare_inputs(
        self,
        scheduler_output: "SchedulerOutput",
        num_scheduled_tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]",
    ) -> Any:
        # The mapping to slots is computed in here, from positions that are slots still.
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        request_ids = self.input_batch.req_ids
        ahead = np.repeat(STEPS.num_positions_ahead(request_ids), num_scheduled_tokens)
        if ahead.any():
            self.positions[: len(ahead)] += torch.from_numpy(ahead).to(self.device)
        num_requests = len(request_ids)
        STEPS.begin(
            request_ids,
            self.input_batch.num_computed_tokens_cpu[:num_requests],
            num_scheduled_tokens,
            self.input_batch.block_table[0].get_numpy_array(),
            self.device,
        )
        return prepared

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """One step; what was planned for it is for no other."""
        plan = scheduler_output.kv_connector_metadata
        # The connector's own `start_load_kv` runs too late: the first step would miss it.
        prefixes = plan.prefixes if isinstance(plan, LoadPlan) else {}
        STEPS.note(prefixes, scheduler_output.finished_req_ids)
        try:
            return super().execute_model(scheduler_output, *args, **kwargs)
        finally:
            STEPS.current = None


class PackedCpuWorker(CPUWorker):
    """vLLM's, with `PackedCpuModelRunner`."""

    def init_device(self) -> None:
        """As vLLM's.

        Raises:
            ConfigurationError: vLLM made another model runner.
        """
        super().init_device()
        if type(self.model_runner) is not CPUModelRunner:
            raise ConfigurationError(
                f"packed prefixes: model runner {type(self.model_runner).__name__}; only "
                "CPUModelRunner of vLLM 0.32 is supported"
            )
        # vLLM has no way to name a model runner; this one has the same state.
        self.model_runner.__class__ = PackedCpuModelRunner
