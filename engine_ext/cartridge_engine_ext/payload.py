"""The payload of an artifact as it is written: one safetensors blob and its table of tensors.

Owns the packing of keys and values, full or quantised, and their encoding. Refuses dtypes that a
Cartridge does not have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import save

from cartridge_kernels.scaled_values import quantise_values
from cartridge_proto.codecs import ItemSpan, encode_blob
from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import ITEM_BYTES, Blob, Representation, Tensor
from cartridge_proto.safetensors_header import tensor_ranges

DTYPE_NAMES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
"""torch dtype -> safetensors dtype name, of unquantised keys and values."""
_QUANTISED: Final = {torch.float8_e4m3fn: "F8_E4M3"}


@dataclass(frozen=True)
class Payload:
    """A blob's bytes as they are stored, and what the manifest says of them."""

    data: bytes
    blob: Blob
    tensors: dict[str, Tensor]
    representation: Representation


def quantised_values(
    named: Mapping[str, torch.Tensor], *, by_channel: bool = True, power_of_two: bool = False
) -> dict[str, torch.Tensor]:
    """The same tensors with values in 8 bits (e4m3), and `layers.{i}.v_scale` beside them.

    The options are those of `quantise_values`.

    Raises:
        ValueError: a value is NaN or infinite, naming the tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        tensors[name] = tensor
        if name.endswith(".v"):
            try:
                codes, scale = quantise_values(
                    tensor, by_channel=by_channel, power_of_two=power_of_two
                )
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            tensors[name], tensors[f"{name}_scale"] = codes, scale
    return tensors


def pack_payload(named: Mapping[str, torch.Tensor], codec: str = "identity") -> Payload:
    """Pack `layers.{i}.k` and `layers.{i}.v`, each [num_kv_heads, num_tokens, head_dim].

    Latents are `layers.{i}.k` alone.
    Values may be e4m3 with `layers.{i}.v_scale`, [num_kv_heads] or [num_kv_heads, head_dim].

    Raises:
        KeyError: a dtype is none of float32, bfloat16, float16, and e4m3 for values; or there is
            no such codec.
        CodecUnavailable: the package for the codec is not installed.
    """
    dtypes = {
        name: (DTYPE_NAMES | _QUANTISED if name.endswith(".v") else DTYPE_NAMES)[tensor.dtype]
        for name, tensor in named.items()
    }
    data = save({name: tensor.contiguous() for name, tensor in named.items()})
    ranges = tensor_ranges(data)
    spans = [ItemSpan(*ranges[name], ITEM_BYTES[dtype]) for name, dtype in dtypes.items()]
    stored, blob = encode_blob(data, codec, spans)
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
        data=stored,
        blob=blob,
        tensors={
            name: msgspec.convert(table_entry(name, tensor), Tensor)
            for name, tensor in named.items()
        },
        representation=msgspec.convert(
            {
                "k_dtype": dtypes["layers.0.k"],
                "v_dtype": dtypes.get("layers.0.v", dtypes["layers.0.k"]),
                "v_scale": _value_scale(named.get("layers.0.v_scale")),
            },
            Representation,
        ),
    )


def _value_scale(scale: torch.Tensor | None) -> dict[str, str] | None:
    if scale is None:
        return None
    return {"granularity": "head" if scale.dim() == 1 else "head_channel", "dtype": "F32"}
