"""Frequencies of each layer: those of the model's own rotary embedding."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from cartridge_engine_ext.rotary import rotary_embeddings
from cartridge_kernels.rope import default_inverse_frequencies, relocate_keys, relocate_latents
from tests.engine_ext.tiny_kinds import save_tiny_kind


def test_kinds_of_layers_turn_by_their_own_frequencies(tmp_path: Path) -> None:
    """Each layer has the frequencies of its kind, as transformers computes them."""
    model_dir = save_tiny_kind(tmp_path, "windows_and_full")
    config = AutoConfig.from_pretrained(model_dir)
    config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    config.save_pretrained(model_dir)
    theirs = Gemma3RotaryEmbedding(config)
    found = rotary_embeddings(model_dir, config)
    assert len(found) == 4
    for embedding, layer_type in zip(found, config.layer_types, strict=True):
        expected = getattr(theirs, f"{layer_type}_inv_freq")
        torch.testing.assert_close(embedding.inverse_frequencies, expected, atol=0, rtol=1e-6)
    assert not torch.equal(found[0].inverse_frequencies, found[1].inverse_frequencies)


@pytest.mark.parametrize("kind", ["windows_only", "latents_v2"])
def test_keys_and_latents_are_moved_each_in_their_way(kind: str, tmp_path: Path) -> None:
    """A layer with latents turns pairs of neighbours at the end, others halves at the beginning."""
    model_dir = save_tiny_kind(tmp_path, kind)
    embedding = rotary_embeddings(model_dir, AutoConfig.from_pretrained(model_dir))[1]
    keys = torch.randn(1, 3, 576)
    rotary_dim, relocate = (64, relocate_latents) if kind == "latents_v2" else (32, relocate_keys)
    expected = relocate(keys, 7, default_inverse_frequencies(10_000.0, rotary_dim))
    assert torch.equal(embedding.move(keys, 7), expected)
