"""The split of a batch between a platform's kernel and attention over packed prefixes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.packed_layout import PackedPrefix
from cartridge_engine_ext.packed_steps import STEPS, CacheStrides
from cartridge_engine_ext.segment_attention import SegmentAttentionImpl, SegmentMetadataBuilder
from cartridge_kernels.plan import (
    LiveTensors,
    PagedRows,
    Representation,
    RequestShape,
    Segment,
    SegmentTensors,
)
from cartridge_kernels.plan import Plan as KernelPlan
from cartridge_kernels.reference import ReferenceBackend, attend_dense
from tests.engine_ext.fake_layers import Packed, fake_layer
from tests.engine_ext.test_packed_steps import (
    BLOCK,
    CPU,
    DIM,
    HEADS,
    NUM_BLOCKS,
    laid_out,
    made,
    steps_of,
    strides_of,
    write,
)

QUERY_HEADS = 4


@dataclass
class PlatformMetadata:
    """What a platform's builder makes of the common metadata."""

    seq_lens: torch.Tensor


@dataclass
class Common:
    """What vLLM gives a builder."""

    seq_lens: torch.Tensor


class PlatformBuilder:
    """A platform's builder."""

    def build(self, common_prefix_len: int, common: Common, fast_build: bool) -> PlatformMetadata:
        """Take the lengths."""
        return PlatformMetadata(common.seq_lens)


class PlatformImpl:
    """A platform's kernel: writes ones, and counts its calls."""

    def __init__(self, num_heads: int, head_size: int, scale: float, *_: Any, **extra: Any) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.calls: list[tuple[Any, ...]] = []

    def forward(self, *arguments: Any) -> torch.Tensor:
        """Write ones into the output."""
        self.calls.append(arguments)
        output: torch.Tensor = arguments[6]
        return output.fill_(1.0)


class Builder(SegmentMetadataBuilder, PlatformBuilder):
    """The builder under test."""


class Impl(SegmentAttentionImpl, PlatformImpl):
    """The implementation under test."""


@dataclass
class Layer:
    """As vLLM passes it."""

    layer_name: str = "model.layers.0.self_attn.attn"


@dataclass
class Bench:
    """A layer with a packed prefix in its cache, and one ordinary request beside it."""

    cache: torch.Tensor
    strides: CacheStrides
    prefix: PackedPrefix
    segment: Any
    blocks: list[int]
    live: torch.Tensor

    def begin(self, *, with_ordinary: bool) -> None:
        """Plan a step: two queries behind the prefix, one of an ordinary request before them."""
        slots = self.prefix.num_slots
        ids = (["plain"] if with_ordinary else []) + ["packed"]
        table = np.zeros((len(ids), len(self.blocks) + 1), np.int32)
        table[-1] = [*self.blocks, 22]
        computed = ([4] if with_ordinary else []) + [slots]
        scheduled = ([1] if with_ordinary else []) + [2]
        STEPS.begin(ids, np.array(computed, np.int32), np.array(scheduled, np.int32), table, CPU)

    def expected(self, queries: torch.Tensor) -> torch.Tensor:
        """One softmax over the prefix and the live tokens, in float64."""
        plan = KernelPlan(
            (Segment(self.segment.keys.shape[1], 0, Representation.K16V8),),
            (RequestShape(2, 2, (0,)),),
        )
        tensors = SegmentTensors(
            PagedRows.whole(self.segment.keys),
            PagedRows.whole(self.segment.values),
            self.segment.scales,
        )
        live = LiveTensors(
            self.live[0].transpose(0, 1)[None],
            self.live[1].transpose(0, 1)[None],
            torch.zeros(1, 1, dtype=torch.int32),
        )
        return attend_dense(plan, queries, [tensors], live, scale=0.25).output


@pytest.fixture
def bench() -> Iterator[Bench]:
    """The process's one `STEPS`, as a worker prepares it, and given back as it was."""
    layer = fake_layer(Packed(), num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
    strides = strides_of(layer)
    segment = made(50, 1, is_small=True)
    prefix = laid_out([segment])
    blocks = list(range(2, 2 + prefix.num_blocks))
    write(layer, strides, prefix, blocks, [segment])
    live = torch.randn(2, 2, HEADS, DIM, generator=torch.Generator().manual_seed(2))
    slots = torch.tensor([22 * BLOCK, 22 * BLOCK + 1])
    layer.impl.do_kv_cache_update(layer, live[0], live[1], layer.kv_cache, slots)
    before = dict(vars(STEPS))
    vars(STEPS).update(vars(steps_of(strides)))
    STEPS.prepare(strides, ReferenceBackend(), STEPS.in_place)
    STEPS.note({"packed": prefix}, [])
    yield Bench(layer.kv_cache, strides, prefix, segment, blocks, live)
    vars(STEPS).update(before)


def impl(**arguments: Any) -> Impl:
    """An implementation of the layer."""
    return Impl(QUERY_HEADS, DIM, 0.25, HEADS, **arguments)


def forward(
    under_test: Impl, bench: Bench, metadata: Any, num_rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and the output of a layer."""
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(num_rows, QUERY_HEADS, DIM, generator=generator).to(dtype)
    output = torch.full((num_rows, QUERY_HEADS, DIM), 9.0, dtype=dtype)
    nothing = queries[:, :HEADS]
    found = under_test.forward(
        Layer(),
        queries,
        nothing,
        nothing,
        bench.cache,
        metadata,
        output,
    )
    assert found is output
    return queries, output


def built(lengths: list[int]) -> Any:
    """Metadata of the step that was begun."""
    return Builder().build(0, Common(torch.tensor(lengths, dtype=torch.int32)))


def test_ordinary_batches_take_the_platforms_kernel_untouched(bench: Bench) -> None:
    """Lengths, arguments and output are the platform's own."""
    STEPS.begin(
        ["plain"], np.array([4], np.int32), np.array([1], np.int32), np.zeros((1, 2), np.int32), CPU
    )
    metadata = built([5])
    assert metadata.seq_lens.tolist() == [5]
    under_test = impl()
    _, output = forward(under_test, bench, metadata, 1, torch.float32)
    assert len(under_test.calls) == 1
    assert bool((output == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_are_replaced_and_others_left(bench: Bench, dtype: torch.dtype) -> None:
    """The platform computes the ordinary row; those behind the prefix are the exact attention."""
    bench.begin(with_ordinary=True)
    metadata = built([5, bench.prefix.num_slots + 2])
    assert metadata.seq_lens.tolist() == [5, 2], "the platform must not read packed blocks"
    under_test = impl()
    queries, output = forward(under_test, bench, metadata, 3, dtype)
    assert len(under_test.calls) == 1
    assert bool((output[0] == 1).all())
    difference = (output[1:].double() - bench.expected(queries[1:])).abs().max()
    # bfloat16: half a unit in the last place of outputs below 2.
    assert float(difference) <= (1e-5 if dtype == torch.float32 else 2**-8)


def test_a_batch_of_packed_requests_needs_no_platform(bench: Bench) -> None:
    """Its kernel is not run at all."""
    bench.begin(with_ordinary=False)
    under_test = impl()
    queries, output = forward(
        under_test, bench, built([bench.prefix.num_slots + 2]), 2, torch.float32
    )
    assert under_test.calls == []
    assert float((output.double() - bench.expected(queries)).abs().max()) <= 1e-5


def test_without_metadata_the_platform_warms_up(bench: Bench) -> None:
    """Also right after a packed step."""
    bench.begin(with_ordinary=False)
    under_test = impl()
    forward(under_test, bench, None, 2, torch.float32)
    assert len(under_test.calls) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"alibi_slopes": [1.0]}, "alibi"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"logits_soft_cap": 30.0}, "a softcap of logits"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "a KV cache of 8 bits"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "another layer's KV cache"),
        ({"attn_type": "encoder_only"}, "type encoder_only"),
    ],
)
def test_layers_with_more_than_scaled_products_are_refused(
    arguments: dict[str, Any], text: str
) -> None:
    """At start, by name."""
    with pytest.raises(ConfigurationError, match=text):
        impl(**arguments)
    impl(logits_soft_cap=0.0)
