"""What is refused beside packed prefixes, and which kernel answers which request of a batch."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from cartridge_engine_ext import segment_attention
from cartridge_engine_ext.cache_layer import CacheLayer
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.in_place import InPlaceSegments
from cartridge_engine_ext.layout_probe import CacheReader
from cartridge_engine_ext.packed_steps import PackedSteps
from cartridge_engine_ext.segment_attention import SegmentAttentionImpl, SegmentMetadata
from cartridge_engine_ext.stored_segments import InPlacePrefix
from cartridge_kernels.reference import ReferenceBackend, attend_dense
from tests.engine_ext.fake_layers import FakeLayer, Packed, fake_layer

HEADS, DIM, BLOCK, NUM_BLOCKS = 2, 8, 4, 8
OTHERS = 5.0
"""What the platform's kernel is made to answer."""


@pytest.fixture(autouse=True)
def _model_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a layer asks vLLM's configuration for while it is made."""
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    monkeypatch.setattr(cpu_attn, "get_current_vllm_config", lambda: config)


def impl(**changes: Any) -> SegmentAttentionImpl:
    """A layer of full attention, but for the changes."""
    arguments: dict[str, Any] = {
        "num_heads": 2 * HEADS,
        "head_size": DIM,
        "scale": DIM**-0.5,
        "num_kv_heads": HEADS,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    return SegmentAttentionImpl(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"alibi_slopes": [0.5] * 2 * HEADS}, "alibi"),
        ({"sliding_window": 128}, "a sliding window"),
        ({"logits_soft_cap": 30.0}, "a softcap of logits"),
        ({"sinks": torch.zeros(2 * HEADS)}, "sinks"),
        ({"kv_cache_dtype": "fp8"}, "a KV cache of 8 bits"),
        ({"kv_sharing_target_layer_name": "model.layers.0.attn"}, "another layer's KV cache"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "type .*ENCODER_ONLY"),
    ],
)
def test_more_than_scaled_products_is_refused_at_start(change: dict[str, Any], text: str) -> None:
    """The kernels here know none of it, so the engine says so before it serves."""
    with pytest.raises(ConfigurationError, match=f"packed prefixes.*{text}.*without --worker-cls"):
        impl(**change)


@dataclass
class NamedLayer:
    """What vLLM passes to an implementation, as far as it is used here."""

    layer_name: str = "model.layers.0.self_attn.attn"


@dataclass
class Batch:
    """A worker's steps over one layer, and the calls of the platform's kernel."""

    layer: FakeLayer
    steps: PackedSteps
    calls: list[object]
    queries: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def forward(self, request_ids: list[str], scheduled: list[int]) -> torch.Tensor:
        """Run a step of fresh requests, each in a block of its own; the output by row."""
        count = np.array(scheduled, np.int32)
        table = np.arange(1, len(scheduled) + 1, dtype=np.int32)[:, None]
        computed = np.zeros_like(count)
        self.steps.begin(request_ids, computed, count, table, torch.device("cpu"))
        rows = int(count.sum())
        queries = torch.randn(rows, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(2))
        output = torch.full((rows, 2 * HEADS, DIM), float("nan"))
        unused = torch.zeros(1, dtype=torch.int32)
        metadata = SegmentMetadata(
            rows, max(scheduled), unused, max(scheduled), unused, unused, unused, None
        )
        metadata.packed = self.steps.current
        keys = torch.zeros(rows, HEADS, DIM)
        cache = self.layer.kv_cache
        impl().forward(NamedLayer(), queries, keys, keys, cache, metadata, output)
        self.queries = queries
        return output


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    """A worker over one layer whose slots hold random live tokens."""
    layer = fake_layer(Packed(), num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
    strides = CacheReader.probe(CacheLayer(layer), BLOCK, NUM_BLOCKS).strides(layer.kv_cache)
    layer.kv_cache.normal_(generator=torch.Generator().manual_seed(1))
    steps = PackedSteps()
    steps.prepare(strides, ReferenceBackend(), InPlaceSegments([], slice(None)))
    calls: list[object] = []

    def platform(
        self: object, layer: object, query: object, key: object, value: object, *rest: Any
    ) -> torch.Tensor:
        calls.append(self)
        output: torch.Tensor = rest[2]
        return output.fill_(OTHERS)

    monkeypatch.setattr(CPUAttentionBackendImpl, "forward", platform)
    monkeypatch.setattr(segment_attention, "STEPS", steps)
    return Batch(layer, steps, calls)


def test_the_platforms_kernel_is_not_called_for_packed_requests_alone(batch: Batch) -> None:
    """Every row is then answered here, none left as it was."""
    batch.steps.note({"a": InPlacePrefix(()), "b": InPlacePrefix(())}, [])
    output = batch.forward(["a", "b"], [2, 1])
    assert batch.calls == []
    assert bool(output.isfinite().all())


def test_in_a_mixed_batch_each_row_has_its_own_kernels_answer(batch: Batch) -> None:
    """Ordinary rows keep the platform's answer, packed ones are replaced."""
    batch.steps.note({"b": InPlacePrefix(())}, [])
    output = batch.forward(["a", "b", "c"], [2, 3, 1])
    assert len(batch.calls) == 1
    step = batch.steps.current
    assert step is not None
    live = batch.steps.strides.live(batch.layer.kv_cache, step.block_table)
    exact = attend_dense(step.plan, batch.queries[2:5], [], live, scale=DIM**-0.5).output
    torch.testing.assert_close(output[2:5].double(), exact, atol=1e-6, rtol=1e-5)
    assert bool((output[[0, 1, 5]] == OTHERS).all())


def test_without_packed_requests_the_platform_answers_alone(batch: Batch) -> None:
    """Also in a step right after one that had some."""
    batch.steps.note({"a": InPlacePrefix(())}, [])
    batch.forward(["a"], [1])
    output = batch.forward(["plain"], [2])
    assert batch.steps.current is None
    assert len(batch.calls) == 1
    assert bool((output == OTHERS).all())
