"""Which kernels can run here, and the choice of one by name.

Owns the names. Refuses to replace a kernel that was asked for by name: what cannot run raises, and
only `auto` chooses.
"""

import importlib
import logging
from collections.abc import Sequence
from typing import Final, Protocol

import torch

from cartridge_kernels.plan import Attended, LiveTensors, Plan, SegmentTensors

logger = logging.getLogger(__name__)

AUTO: Final = "auto"

_BACKENDS: Final = {
    "cpu": ("cartridge_kernels.cpu", "CpuBackend"),
    "native": ("cartridge_kernels.native", "NativeBackend"),
    "reference": ("cartridge_kernels.reference", "ReferenceBackend"),
    "triton": ("cartridge_kernels.triton_backend", "TritonBackend"),
    "flashinfer": ("cartridge_kernels.flashinfer_backend", "FlashInferBackend"),
}
_PREFERENCE: Final = {
    "cpu": ("native", "cpu", "reference"),
    "cuda": ("triton", "reference"),
}
"""By device type: what `auto` takes, the first that can run."""


class BackendUnavailable(Exception):
    """A kernel that cannot run here; the text says what is missing."""


class AttentionBackend(Protocol):
    """One way to compute attention over segments and live tokens. Not thread-safe."""

    @property
    def name(self) -> str:
        """As settings spell it."""
        ...

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Why it cannot run on a device; `None` when it can."""
        ...

    def attend(
        self,
        plan: Plan,
        queries: torch.Tensor,
        segments: Sequence[SegmentTensors],
        live: LiveTensors,
        *,
        scale: float,
    ) -> Attended:
        """As `cartridge_kernels.reference.attend`, which says what the arguments are.

        What depends on the plan, the page ids and the block table alone is made once for each plan
        object: all layers of a step pass the same ones.

        Raises:
            InvalidPlan: the tensors are not what the plan says.
        """
        ...


def available_backends(device: torch.device) -> dict[str, str | None]:
    """All kernels by name, and why one cannot run on this device; `None` = it can."""
    return {name: _reason(name, device) for name in _BACKENDS}


def open_backend(name: str, device: torch.device) -> AttentionBackend:
    """The kernel of this name, or for `auto` the fastest that can run on this device.

    Raises:
        BackendUnavailable: it cannot run here, or there is none of this name.
    """
    if name == AUTO:
        for candidate in _PREFERENCE.get(device.type, ()):
            reason = _reason(candidate, device)
            if reason is None:
                logger.info("attention over segments: %s on %s", candidate, device)
                return _make(candidate)
            # The answers are the same and late: nothing else would tell.
            logger.warning("attention over segments: %s cannot run: %s", candidate, reason)
        raise BackendUnavailable(f"attention backend auto: none runs on {device.type}")
    if name not in _BACKENDS:
        raise BackendUnavailable(
            f"attention backend {name!r} is none of {', '.join([AUTO, *_BACKENDS])}"
        )
    reason = _reason(name, device)
    if reason is not None:
        raise BackendUnavailable(f"attention backend {name}: {reason}")
    return _make(name)


def _make(name: str) -> AttentionBackend:
    module, cls = _BACKENDS[name]
    backend: AttentionBackend = getattr(importlib.import_module(module), cls)()
    return backend


def _reason(name: str, device: torch.device) -> str | None:
    try:
        return _make(name).unavailable_reason(device)
    except ImportError as error:
        return str(error)
