"""The dram tier inside an engine: a pool that also refuses what this engine cannot serve.

Owns the checks that need the engine's identity and tensors. Refuses artifacts that do not fit the
engine before their bytes are moved, and numbers that are not finite.
"""

from collections.abc import Callable, Sequence

import torch

from cartridge_engine_ext.dram_pool import DramPool
from cartridge_engine_ext.dram_tier import Artifact, ArtifactReader
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.eviction import EvictionPolicy
from cartridge_kernels.scaled_values import E4M3_MAX
from cartridge_proto.compatibility import EngineIdentity, incompatibilities, unsupported
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.residency import FailureReason
from cartridge_proto.safetensors_header import InvalidPayload

__all__ = [
    "TORCH_DTYPES",
    "Artifact",
    "ArtifactPool",
    "check_finite",
    "refuse_unfit",
    "tensor_view",
]

TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""safetensors dtype name -> torch dtype."""


class ArtifactPool(DramPool):
    """Artifacts that `engine` can serve, up to `capacity_bytes`; see `DramPool`.

    `store` is a store, or a source in front of one.
    """

    def __init__(
        self,
        *,
        store: ArtifactReader,
        engine: EngineIdentity,
        capacity_bytes: int,
        num_loaders: int,
        pinned_bytes: int | None = None,
        policy: EvictionPolicy | None = None,
        on_ready: Callable[[Digest, int], None] = lambda digest, size_bytes: None,
        on_evict: Callable[[Digest], None] = lambda digest: None,
        on_pin: Callable[[Digest, bool], None] = lambda digest, is_pinned: None,
    ) -> None:
        self._engine = engine
        super().__init__(
            source=store,
            capacity_bytes=capacity_bytes,
            num_loaders=num_loaders,
            pinned_bytes=pinned_bytes,
            policy=policy,
            admit=lambda manifest: refuse_unfit(manifest, self._engine),
            check=check_finite,
            on_ready=on_ready,
            on_evict=on_evict,
            on_pin=on_pin,
        )


def refuse_unfit(manifest: Manifest, engine: EngineIdentity) -> None:
    """Refuse an artifact that an engine cannot serve, naming each field.

    Raises:
        Refusal: unsupported in this version, or made for another model.
    """
    refused = unsupported(manifest)
    if refused:
        raise Refusal(FailureReason.UNSUPPORTED, "; ".join(map(str, refused)))
    mismatches = incompatibilities(manifest, engine)
    if mismatches:
        raise Refusal(FailureReason.INCOMPATIBLE, "; ".join(map(str, mismatches)))


def tensor_view(
    buffer: memoryview | bytearray, dtype: str, shape: Sequence[int], begin: int, end: int
) -> torch.Tensor:
    """A tensor over bytes [begin, end) of a writable buffer, without a copy."""
    count = (end - begin) // TORCH_DTYPES[dtype].itemsize
    flat = torch.frombuffer(buffer, dtype=TORCH_DTYPES[dtype], count=count, offset=begin)
    return flat.reshape(list(shape))


def check_finite(manifest: Manifest, digest: str, buffer: memoryview) -> None:
    """Refuse a blob with a number that is none; `buffer` is writable and holds the decoded blob.

    Scales are so small that no value under them becomes infinite in float32.

    Raises:
        InvalidPayload: naming the tensor.
    """
    for name, tensor in manifest.tensors.items():
        if tensor.blob != digest:
            continue
        values = tensor_view(buffer, tensor.dtype, tensor.shape, *tensor.byte_range)
        # A float8 type has no isfinite of its own.
        largest = values.to(torch.float32)
        if name.endswith(".v_scale"):
            largest = largest * E4M3_MAX
        if not bool(largest.isfinite().all()):
            raise InvalidPayload(f"tensor {name}: NaN or infinity")
