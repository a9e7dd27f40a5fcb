"""The probe of an artifact as transformers answers it, from what the artifact stores.

Owns the greedy steps, and how stored tensors become the cache that they go on from. Refuses to know
where tensors come from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from cartridge_kernels.scaled_values import dequantise_values
from cartridge_proto.manifest import Probe, ProbeStep

NUM_PROBE_STEPS = 4
NUM_PROBE_TOP = 5


def full_layers(
    tensors: Mapping[str, torch.Tensor], num_layers: int, dtype: torch.dtype = torch.float32
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and dequantised values of each layer, [num_kv_heads, num_tokens, dim], of one dtype."""
    layers = []
    for layer in range(num_layers):
        values, scale = tensors[f"layers.{layer}.v"], tensors.get(f"layers.{layer}.v_scale")
        values = values if scale is None else dequantise_values(values, scale)
        layers.append((tensors[f"layers.{layer}.k"].to(dtype), values.to(dtype)))
    return layers


def filled_cache(layers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """A cache that holds these keys and values, each [num_kv_heads, num_tokens, dim], by layer."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys[None], values[None], index)
    return cache


def reference_probe(model: Any, cache: Any, live: list[int]) -> Probe:
    """Greedy steps of a transformers model after a prefix; `cache` is used up."""
    steps, token_ids = [], live
    for _ in range(NUM_PROBE_STEPS):
        logits = model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True).logits
        logprobs = torch.log_softmax(logits[0, -1].to(torch.float32), -1)
        top = logprobs.topk(NUM_PROBE_TOP)
        pairs = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        steps.append(ProbeStep(token_id=pairs[0][0], top=pairs))
        token_ids = [pairs[0][0]]
    return Probe(prompt_token_ids=live, steps=steps)
