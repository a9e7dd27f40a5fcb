"""K16/V8 in the worker half: what stands in the cache is what the codes and their scales mean."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext import artifact_pool, worker_side
from cartridge_engine_ext.load_plan import LoadPlan
from cartridge_engine_ext.payload import pack_payload, quantised_values
from cartridge_engine_ext.sealed_memory import SealedMemory
from cartridge_engine_ext.stored_segments import Segment, TensorReference
from cartridge_engine_ext.virtual_prefix import num_blocks
from cartridge_engine_ext.worker_side import HeadShard
from tests.engine_ext.fake_layers import LAYOUTS, FakeLayer, Layout, Packed
from tests.engine_ext.test_worker_side import (
    BLOCK,
    CACHE_BLOCKS,
    DIM,
    HEADS,
    NUM_LAYERS,
    Source,
    expect_rows,
    load_of,
    seal,
    worker,
    write,
)

Tensors = dict[str, torch.Tensor]


def some_tensors(num_tokens: int, seed: int = 0) -> Tensors:
    """Random keys and values; sizes differ by layer, head and channel, so that scales do."""
    generator = torch.Generator().manual_seed(seed)
    by_head = torch.tensor([1.0, 7.0]).reshape(HEADS, 1, 1)
    by_channel = 2.0 ** torch.arange(DIM)
    return {
        f"layers.{layer}.{part}": (layer + 1)
        * by_head
        * by_channel
        * torch.randn(HEADS, num_tokens, DIM, generator=generator)
        for layer in range(NUM_LAYERS)
        for part in ("k", "v")
    }


def seal_tensors(tensors: Tensors, num_positions: int = 0) -> Source:
    """Tensors as they are, in sealed memory; `values` are what they mean, in float64."""
    payload = pack_payload(tensors)

    def fill(buffer: memoryview) -> None:
        buffer[:] = payload.data

    memory = SealedMemory(len(payload.data), fill)

    def references(part: str) -> tuple[TensorReference, ...]:
        table = [payload.tensors.get(f"layers.{layer}.{part}") for layer in range(NUM_LAYERS)]
        return tuple(
            TensorReference(memory.reference, tensor.dtype, tuple(tensor.shape), *tensor.byte_range)
            for tensor in table
            if tensor is not None
        )

    keys = [tensors[f"layers.{layer}.k"] for layer in range(NUM_LAYERS)]
    scales = references("v_scale")
    digest, length = payload.blob.sha256, keys[0].shape[1]
    segment = Segment(digest, length, num_positions, references("k"), references("v"), scales)
    return Source(keys, [meaning(tensors, layer) for layer in range(NUM_LAYERS)], memory, segment)


def meaning(tensors: Tensors, layer: int) -> torch.Tensor:
    """Values of a layer in float64: the product of codes and scales written out."""
    codes = tensors[f"layers.{layer}.v"].double()
    scale = tensors.get(f"layers.{layer}.v_scale")
    return codes if scale is None else codes * scale.double().reshape(HEADS, 1, -1)


@contextmanager
def closing(*sources: Source) -> Iterator[list[Source]]:
    """Sources that are freed at the end."""
    with ExitStack() as stack:
        for source in sources:
            stack.callback(source.memory.close)
        yield list(sources)


def scaled(num_tokens: int, *, by_channel: bool, num_positions: int = 0, seed: int = 0) -> Source:
    """An artifact with values in 8 bits."""
    tensors = quantised_values(some_tensors(num_tokens, seed), by_channel=by_channel)
    return seal_tensors(tensors, num_positions)


# --- writing -------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("start", [0, 3, 6, 9], ids=lambda start: f"from {start}")
def test_values_come_to_the_cache_as_they_are_meant(
    layout: Layout, by_channel: bool, start: int
) -> None:
    """Equal to the float64 product rounded to float32, beside an artifact with full values."""
    side, layers = worker(layout)
    with closing(
        scaled(5, by_channel=by_channel),
        seal(3, seed=1, num_positions=5),
        scaled(3, by_channel=True),
    ) as sources:
        load = load_of(sources, start, [9, 2, 5])
        assert write(side, LoadPlan(loads=[load])) == ({"r"}, set())
        expect_rows(layers, sources, load)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_cache_gets_rounded_values(dtype: torch.dtype) -> None:
    """The float32 product comes to the cache with one more rounding."""
    side, layers = worker(Packed(), dtype)
    with closing(scaled(5, by_channel=True)) as sources:
        load = load_of(sources, 0, [3, 4])
        assert write(side, LoadPlan(loads=[load])) == ({"r"}, set())
        expect_rows(layers, sources, load)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("by_channel", [False, True])
def test_a_worker_takes_the_scales_of_its_own_heads(rank: int, by_channel: bool) -> None:
    """With two workers each has one head's codes and the same head's scales."""
    side, layers = worker(Packed(), shard=HeadShard(rank, 2, HEADS))
    with closing(scaled(5, by_channel=by_channel)) as sources:
        load = load_of(sources, 0, [3, 4])
        assert write(side, LoadPlan(loads=[load])) == ({"r"}, set())
        for source in sources:
            source.keys = [key[rank : rank + 1] for key in source.keys]
            source.values = [value[rank : rank + 1] for value in source.values]
        expect_rows(layers, sources, load)


def test_chunks_of_rows_have_the_same_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale is over all tokens of an artifact, however many are written at a time."""
    monkeypatch.setattr(worker_side, "CHUNK_TOKENS", 3)
    side, layers = worker(Packed())
    with closing(scaled(11, by_channel=True)) as sources:
        load = load_of(sources, 0, [3, 4, 5])
        assert write(side, LoadPlan(loads=[load])) == ({"r"}, set())
        expect_rows(layers, sources, load)


@given(st.data())
def test_any_mixture_is_written(data: st.DataObject) -> None:
    """Full values and both granularities, in any order, from any start."""
    kinds = data.draw(st.lists(st.sampled_from([None, False, True]), min_size=1, max_size=4))
    lengths = [data.draw(st.integers(1, 9)) for _ in kinds]
    start = data.draw(st.integers(0, sum(lengths) - 1))
    order = data.draw(st.permutations(range(CACHE_BLOCKS)))
    side, layers = worker(Packed())
    sources = [
        seal(length, seed=index) if kind is None else scaled(length, by_channel=kind, seed=index)
        for index, (kind, length) in enumerate(zip(kinds, lengths, strict=True))
    ]
    with closing(*sources):
        load = load_of(sources, start, order[: num_blocks(sum(lengths), BLOCK)])
        write(side, LoadPlan(loads=[load]))
        expect_rows(layers, sources, load)


# --- canaries ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Canary:
    """One way to get K16/V8 wrong: in what is stored, in the plan, or in how codes are read."""

    stored: Callable[[Tensors], Tensors] = lambda tensors: tensors
    planned: Callable[[Segment], Segment] = lambda segment: segment
    read_as: torch.dtype = torch.float8_e4m3fn


def with_scales(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    """Every scale tensor changed."""
    return lambda tensors: {
        name: change(tensor) if name.endswith("_scale") else tensor
        for name, tensor in tensors.items()
    }


def with_codes_in_e5m2(tensors: Tensors) -> Tensors:
    """Codes rounded to the two bits of mantissa of e5m2 first."""
    return {
        name: tensor.to(torch.float32).to(torch.float8_e5m2).to(torch.float32).to(tensor.dtype)
        if name.endswith(".v")
        else tensor
        for name, tensor in tensors.items()
    }


def with_small_keys(tensors: Tensors) -> Tensors:
    """Keys rounded to 8 bits, values left alone."""
    original = some_tensors(tensors["layers.0.k"].shape[1])
    rounded = quantised_values(
        {name.replace(".k", ".v"): tensor for name, tensor in original.items() if ".k" in name}
    )
    return {
        name: tensor if name.endswith(".v") else meaning(rounded, int(name.split(".")[1])).float()
        for name, tensor in original.items()
    }


CANARIES = {
    "scale dropped": Canary(planned=lambda segment: replace(segment, value_scales=())),
    "scale of the neighbour's head": Canary(stored=with_scales(lambda scale: scale.flip(0))),
    "scale of another layer": Canary(
        planned=lambda segment: replace(segment, value_scales=segment.value_scales[::-1])
    ),
    "scale of another channel": Canary(stored=with_scales(lambda scale: scale.roll(1, -1))),
    "scale inverted": Canary(stored=with_scales(lambda scale: 1 / scale)),
    "codes read as e5m2": Canary(read_as=torch.float8_e5m2),
    "codes written as e5m2": Canary(stored=with_codes_in_e5m2),
    "keys quantised instead of values": Canary(stored=with_small_keys),
}


def expect_near(layers: list[FakeLayer], original: Tensors, num_tokens: int) -> None:
    """Keys are the original ones, and values as near as e4m3 allows, in float64."""
    scales = quantised_values(original)
    for index, layer in enumerate(layers):
        scale = scales[f"layers.{index}.v_scale"].double()
        for token in range(num_tokens):
            key, value = layer.row(3 * BLOCK + token)
            assert torch.equal(key, original[f"layers.{index}.k"][:, token])
            wanted = original[f"layers.{index}.v"][:, token].double()
            # 2^-4 of the number, and 2^-10 of the scale below the smallest normal code.
            bound = torch.maximum(wanted.abs() * 2**-4, scale * 2**-10) * (1 + 2**-20)
            assert bool(((value.double() - wanted).abs() <= bound).all())


def written_with(canary: Canary, original: Tensors, patch: pytest.MonkeyPatch) -> list[FakeLayer]:
    """The layers after a load of an artifact that was built, planned and read so."""
    patch.setitem(artifact_pool.TORCH_DTYPES, "F8_E4M3", canary.read_as)
    side, layers = worker(Packed())
    with closing(seal_tensors(canary.stored(quantised_values(original)))) as sources:
        (source,) = sources
        load = load_of([source], 0, [3])
        load = replace(load, segments=(canary.planned(source.segment),))
        assert write(side, LoadPlan(loads=[load])) == ({"r"}, set())
    return layers


def test_a_right_artifact_is_near_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the canaries are measured against."""
    original = some_tensors(BLOCK)
    expect_near(written_with(Canary(), original, monkeypatch), original, BLOCK)


@pytest.mark.parametrize("canary", CANARIES.values(), ids=CANARIES)
def test_each_way_to_get_it_wrong_is_seen(canary: Canary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same comparison that a right artifact passes fails for each of them."""
    original = some_tensors(BLOCK)
    layers = written_with(canary, original, monkeypatch)
    with pytest.raises(AssertionError):
        expect_near(layers, original, BLOCK)
