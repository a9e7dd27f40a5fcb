"""The rotary embedding of each layer: how its keys are moved along the sequence.

Owns the choice of frequencies and pairing by what the model's files say. Refuses to trust it: the
boot self-test moves keys of every layer and compares them with the engine's own.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cartridge_engine_ext import identity
from cartridge_kernels.rope import default_inverse_frequencies, relocate_keys, relocate_latents
from cartridge_proto.compatibility import ROPE_PER_LAYER_KIND, immovable_types
from cartridge_proto.manifest import LayerKind, Rope


@dataclass(frozen=True)
class RotaryEmbedding:
    """Rotary embedding of one layer: [rotary_dim / 2] inverse frequencies, float32."""

    inverse_frequencies: torch.Tensor
    has_latents: bool = False

    def move(self, keys: torch.Tensor, num_positions: int) -> torch.Tensor:
        """Keys [num_kv_heads, num_tokens, head_dim_k] as if they stood further along."""
        relocate = relocate_latents if self.has_latents else relocate_keys
        return relocate(keys, num_positions, self.inverse_frequencies)


def rotary_embeddings(model_dir: Path, hf_config: object) -> list[RotaryEmbedding]:
    """Of each layer of a model.

    Where keys cannot be moved, a composition's offsets are refused and these stay unused.

    Args:
        model_dir: Hugging Face folder.
        hf_config: the text model's configuration as transformers has it.

    Raises:
        ConfigurationError: the folder does not say what is needed.
    """
    rope, geometry = identity.rope(model_dir), identity.geometry(model_dir)
    by_kind = {
        kind: RotaryEmbedding(_inverse_frequencies(rope, kind, hf_config), geometry.has_latents)
        for kind in set(geometry.layer_kinds)
    }
    return [by_kind[kind] for kind in geometry.layer_kinds]


def _inverse_frequencies(rope: Rope, kind: LayerKind, hf_config: object) -> torch.Tensor:
    rope_type, theta, name = rope.type, rope.theta, None
    if rope.type == ROPE_PER_LAYER_KIND:
        part = (rope.scaling or {})[kind]
        rope_type, theta, name = part["type"], part["theta"], identity.layer_type(kind)
    if rope_type == "default" or immovable_types(rope):
        return default_inverse_frequencies(theta, rope.rotary_dim)
    found: torch.Tensor
    found, _ = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"), layer_type=name)
    return found.to(torch.float32)
