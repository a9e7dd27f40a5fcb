"""What a model runner of vLLM 0.32 does otherwise where requests have packed prefixes.

Owns the positions of live tokens, which are not those of their slots. Refuses to be made: it takes
the place of a runner's class, whose state it shares.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.load_plan import LoadPlan
from cartridge_engine_ext.packed_steps import STEPS

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class PackedRunner:
    """Stands in front of vLLM's `GPUModelRunner`, or a subclass of it, in a list of bases."""

    input_batch: Any
    positions: torch.Tensor
    device: torch.device

    def _prepare_inputs(
        self,
        scheduler_output: "SchedulerOutput",
        num_scheduled_tokens: "np.ndarray[tuple[int], np.dtype[np.int32]]",
    ) -> Any:
        # The mapping to slots is computed in here, from positions that are slots still.
        prepared = super()._prepare_inputs(  # type: ignore[misc] # vLLM's
            scheduler_output, num_scheduled_tokens
        )
        request_ids = self.input_batch.req_ids
        ahead = np.repeat(STEPS.num_positions_ahead(request_ids), num_scheduled_tokens)
        if ahead.any():
            self.positions[: len(ahead)] += torch.from_numpy(ahead).to(self.device)
        STEPS.begin(
            request_ids,
            self.input_batch.num_computed_tokens_cpu[: len(request_ids)],
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
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        finally:
            STEPS.current = None


def take_the_place(runner: Any, expected: type, packed: type) -> None:
    """Make a model runner a packed one: vLLM has no way to name its class.

    Raises:
        ConfigurationError: it is of another class than expected.
    """
    if type(runner) is not expected:
        raise ConfigurationError(
            f"packed prefixes: the model runner is {type(runner).__module__}."
            f"{type(runner).__qualname__}, and not {expected.__module__} of vLLM 0.32; set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or start the engine without --worker-cls"
        )
    runner.__class__ = packed
