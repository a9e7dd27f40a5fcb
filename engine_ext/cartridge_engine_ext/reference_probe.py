"""The probe of an artifact as transformers answers it, from what the artifact stores.

Owns the greedy steps and the cache that they go on from. Refuses to know where tensors come from.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from cartridge_proto.manifest import Probe, ProbeStep

NUM_PROBE_STEPS = 4
NUM_PROBE_TOP = 5


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
