"""The payload of an artifact as it is written: one safetensors blob and its table of tensors.

Owns the packing of keys and values. Refuses dtypes that a Cartridge does not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import save

from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import Blob, Representation, Tensor
from cartridge_proto.safetensors_header import tensor_ranges

DTYPE_NAMES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
"""torch dtype -> safetensors dtype name, of unquantised keys and values."""


@dataclass(frozen=True)
class Payload:
    """A blob's bytes and what the manifest says of them."""

    data: bytes
    blob: Blob
    tensors: dict[str, Tensor]
    representation: Representation


def pack_payload(named: Mapping[str, torch.Tensor]) -> Payload:
    """Pack `layers.{i}.k` and `layers.{i}.v`, each [num_kv_heads, num_tokens, head_dim].

    Raises:
        KeyError: a dtype is none of float32, bfloat16, float16.
    """
    dtypes = {name: DTYPE_NAMES[tensor.dtype] for name, tensor in named.items()}
    data = save({name: tensor.contiguous() for name, tensor in named.items()})
    ranges = tensor_ranges(data)
    blob = Blob(sha256=sha256_digest(data), size_bytes=len(data))
    view = memoryview(data)

    def table_entry(name: str, tensor: torch.Tensor) -> dict[str, Any]:
        return {
            "blob": blob.sha256,
            "byte_range": ranges[name],
            "shape": list(tensor.shape),
            "dtype": dtypes[name],
            "sha256": sha256_digest(view[slice(*ranges[name])]),
        }

    return Payload(
        data=data,
        blob=blob,
        tensors={
            name: msgspec.convert(table_entry(name, tensor), Tensor)
            for name, tensor in named.items()
        },
        representation=msgspec.convert(
            {
                "k_dtype": dtypes["layers.0.k"],
                "v_dtype": dtypes["layers.0.v"],
                "v_scale": None,
            },
            Representation,
        ),
    )
