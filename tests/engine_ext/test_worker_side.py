"""The worker half: right rows at right slots, moved keys, failures that stay with their request."""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.load_plan import (
    Capture,
    Load,
    LoadPlan,
)
from cartridge_engine_ext.payload import pack_payload
from cartridge_engine_ext.rotary import RotaryEmbedding
from cartridge_engine_ext.sealed_memory import SealedMemory
from cartridge_engine_ext.stored_segments import Segment, TensorReference
from cartridge_engine_ext.virtual_prefix import num_blocks
from cartridge_engine_ext.worker_side import HeadShard, WorkerSide, all_heads
from cartridge_kernels.rope import default_inverse_frequencies, relocate_latents
from cartridge_proto.manifest import Geometry, LayerKind
from tests.engine_ext.fake_layers import (
    LAYOUTS,
    FakeLayer,
    Layout,
    Packed,
    fake_latent_layer,
    fake_layer,
)
from tests.engine_ext.stored_artifacts import WAIT_S
from tests.engine_ext.waiting import until

NUM_LAYERS, HEADS, DIM, BLOCK, CACHE_BLOCKS = 2, 2, 8, 4, 12
FREQUENCIES = default_inverse_frequencies(100.0, DIM)
ROTARY = RotaryEmbedding(FREQUENCIES)
GEOMETRY = Geometry(
    num_layers=NUM_LAYERS,
    num_kv_heads=HEADS,
    head_dim_k=DIM,
    head_dim_v=DIM,
    layer_kinds=[LayerKind.FULL] * NUM_LAYERS,
)
BEFORE = 7.0
"""What every slot of a cache holds before a load."""


@dataclass
class Source:
    """One artifact: its tensors by layer, [heads, num_tokens, dim], and where they are sealed."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    memory: SealedMemory
    segment: Segment


def seal(num_tokens: int, *, seed: int = 0, num_positions: int = 0, factor: float = 1.0) -> Source:
    """Random tensors, times a factor, in sealed memory, packed as the builder packs them."""
    generator = torch.Generator().manual_seed(seed)
    named = {
        f"layers.{layer}.{part}": factor * torch.randn(HEADS, num_tokens, DIM, generator=generator)
        for layer in range(NUM_LAYERS)
        for part in ("k", "v")
    }
    payload = pack_payload(named)

    def fill(buffer: memoryview) -> None:
        buffer[:] = payload.data

    memory = SealedMemory(len(payload.data), fill)

    def references(part: str) -> tuple[TensorReference, ...]:
        tensors = [payload.tensors[f"layers.{layer}.{part}"] for layer in range(NUM_LAYERS)]
        return tuple(
            TensorReference(memory.reference, tensor.dtype, tuple(tensor.shape), *tensor.byte_range)
            for tensor in tensors
        )

    return Source(
        keys=[named[f"layers.{layer}.k"] for layer in range(NUM_LAYERS)],
        values=[named[f"layers.{layer}.v"] for layer in range(NUM_LAYERS)],
        memory=memory,
        segment=Segment(
            payload.blob.sha256, num_tokens, num_positions, references("k"), references("v")
        ),
    )


@contextmanager
def sealed(*lengths: int, moves: Sequence[int] = ()) -> Iterator[list[Source]]:
    """Artifacts of these lengths, moved by these numbers of positions; freed at the end."""
    with ExitStack() as stack:
        sources = []
        for index, length in enumerate(lengths):
            num_positions = moves[index] if moves else 0
            source = seal(length, seed=index + 1, num_positions=num_positions)
            stack.callback(source.memory.close)
            sources.append(source)
        yield sources


ALL_HEADS = HeadShard(rank=0, size=1, num_kv_heads=HEADS)


def write(side: WorkerSide, plan: LoadPlan) -> tuple[set[str], set[str]]:
    """Start the loads of a step and wait for all; returns which ended and which failed."""
    side.start_load(plan)
    expected = {load.request_id for load in plan.loads} | set(plan.failures)
    ended: set[str] = set()
    failed: set[str] = set()

    def are_done() -> bool:
        now_ended, now_failed = side.take_transfers()
        ended.update(now_ended)
        failed.update(now_failed)
        return ended >= expected

    until(are_done)
    return ended, failed


def worker(
    layout: Layout, dtype: torch.dtype = torch.float32, shard: HeadShard = ALL_HEADS
) -> tuple[WorkerSide, list[FakeLayer]]:
    """A worker half over fake layers, registered, and every slot of every cache set."""
    heads = len(range(*shard.heads.indices(HEADS)))
    layers = [
        fake_layer(layout, num_blocks=CACHE_BLOCKS, heads=heads, block=BLOCK, dim=DIM, dtype=dtype)
        for _ in range(NUM_LAYERS)
    ]
    named = {f"model.layers.{index}.self_attn.attn": layer for index, layer in enumerate(layers)}
    side = WorkerSide(
        attention_layers=dict(named),
        rotary=[ROTARY] * NUM_LAYERS,
        geometry=GEOMETRY,
        block_size=BLOCK,
        num_cache_blocks=CACHE_BLOCKS,
        shard=shard,
    )
    side.register_kv_caches({name: layer.kv_cache for name, layer in named.items()})
    for layer in layers:
        layer.kv_cache.fill_(BEFORE)
    return side, layers


def load_of(
    sources: Sequence[Source], start: int, block_ids: Sequence[int], request_id: str = "r"
) -> Load:
    """A load of everything from `start` on."""
    segments = tuple(source.segment for source in sources)
    stop = sum(segment.num_tokens for segment in segments)
    return Load(request_id, segments, start, stop, tuple(block_ids))


def moved(key: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Keys [heads, dim] rotated once more, in float64, pair by pair."""
    result = key.to(torch.float64).clone()
    for pair, frequency in enumerate(FREQUENCIES.tolist()):
        cosine, sine = math.cos(frequency * num_positions), math.sin(frequency * num_positions)
        first, second = key[:, pair].double(), key[:, pair + DIM // 2].double()
        result[:, pair] = first * cosine - second * sine
        result[:, pair + DIM // 2] = first * sine + second * cosine
    return result


def expect_rows(layers: Sequence[FakeLayer], sources: Sequence[Source], load: Load) -> None:
    """The slots of the load hold its rows, and every other slot what it held before."""
    everything = [(source, row) for source in sources for row in range(source.segment.num_tokens)]
    written = {
        load.block_ids[position // BLOCK] * BLOCK + position % BLOCK: everything[position]
        for position in range(load.start, load.stop)
    }
    for index, layer in enumerate(layers):
        for slot in range(CACHE_BLOCKS * BLOCK):
            key, value = layer.row(slot)
            if slot not in written:
                assert torch.equal(key, torch.full_like(key, BEFORE))
                assert torch.equal(value, torch.full_like(value, BEFORE))
                continue
            source, row = written[slot]
            assert torch.equal(value, source.values[index][:, row].to(value.dtype))
            exact = moved(source.keys[index][:, row], source.segment.num_positions)
            # Float32 rotation of values near 1, see tests/kernels; one more rounding to the cache.
            torch.testing.assert_close(
                key.double(), exact, atol=3e-6, rtol=torch.finfo(key.dtype).eps / 2
            )


# --- writing -------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("start", [0, 3, 4, 6, 9], ids=lambda start: f"from {start}")
def test_rows_stand_at_the_slots_of_their_positions(layout: Layout, start: int) -> None:
    """Whole and partial ranges, from the middle of a block, across two segments, moved or not."""
    side, layers = worker(layout)
    with sealed(7, 3, moves=[0, 7]) as sources:
        load = load_of(sources, start, [9, 2, 5])
        assert write(side, LoadPlan(loads=[load])) == ({"r"}, set())
        expect_rows(layers, sources, load)
    assert side.take_transfers() == (set(), set())


@given(st.data())
def test_any_composition_in_any_blocks_is_written(data: st.DataObject) -> None:
    """Any segments, offsets, start and block order put every row exactly where it belongs."""
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    moves = data.draw(
        st.lists(st.integers(0, 99), min_size=len(lengths), max_size=len(lengths)), label="moves"
    )
    start = data.draw(st.integers(0, sum(lengths) - 1), label="start")
    order = data.draw(st.permutations(range(CACHE_BLOCKS)), label="blocks")
    side, layers = worker(data.draw(st.sampled_from(list(LAYOUTS.values()))))
    with sealed(*lengths, moves=moves) as sources:
        load = load_of(sources, start, order[: num_blocks(sum(lengths), BLOCK)])
        write(side, LoadPlan(loads=[load]))
        expect_rows(layers, sources, load)


def test_a_half_precision_cache_gets_rounded_rows() -> None:
    """Float32 rows come to a bfloat16 cache with one rounding, keys after their rotation."""
    side, layers = worker(Packed(), torch.bfloat16)
    with sealed(5, moves=[11]) as sources:
        load = load_of(sources, 0, [3, 4])
        write(side, LoadPlan(loads=[load]))
        expect_rows(layers, sources, load)


def test_a_report_counts_bytes_and_seconds() -> None:
    """The result of a load is what was written to all layers; a report is taken once."""
    side, _ = worker(Packed())
    assert side.take_report() is None
    with sealed(7, 3) as sources:
        write(side, LoadPlan(loads=[load_of(sources, 4, [1, 2, 3])]))
    report = side.take_report()
    assert report is not None
    result = report.results["r"]
    assert result.size_bytes == 6 * 2 * NUM_LAYERS * HEADS * DIM * 4
    assert result.error is None
    assert result.write_s > 0
    assert report.captured == {}
    assert side.take_report() is None


def test_a_load_counts_its_time_behind_others() -> None:
    """A small load that is planned with a large one is done after it, and says so."""
    side, _ = worker(Packed())
    with sealed(7, 3) as sources:
        large = load_of(sources, 0, [1, 2, 3])
        small = load_of(sources, 9, [4, 5, 6], request_id="small")
        write(side, LoadPlan(loads=[large, small]))
    report = side.take_report()
    assert report is not None
    assert report.results["small"].write_s > report.results["r"].write_s


# --- failures ------------------------------------------------------------------------------------
def test_memory_that_is_gone_fails_its_request_only() -> None:
    """Exactly that request is reported as failed; the other load of the step is whole."""
    side, layers = worker(Packed())
    with sealed(10, 7) as (lost, kept):
        lost.memory.close()
        failing = load_of([lost], 5, [9, 2, 5], "failing")
        good = load_of([kept], 0, [0, 1], "good")
        ended, failed = write(side, LoadPlan(loads=[failing, good]))
        expect_rows(layers, [kept], good)
    assert (ended, failed) == ({"failing", "good"}, {"failing"})
    report = side.take_report()
    assert report is not None
    assert report.results["good"].error is None
    assert report.results["failing"].size_bytes == 0
    assert "Error" in (report.results["failing"].error or "")


def test_numbers_beyond_the_caches_dtype_are_not_written() -> None:
    """Float32 rows that a float16 cache cannot hold fail the load instead of becoming infinite."""
    side, layers = worker(Packed(), torch.float16)
    source = seal(5, factor=1e6)
    _, failed = write(side, LoadPlan(loads=[load_of([source], 0, [3, 4], "large")]))
    source.memory.close()
    assert failed == {"large"}
    report = side.take_report()
    assert report is not None
    assert "do not fit torch.float16" in (report.results["large"].error or "")
    assert all(bool(layer.kv_cache.isfinite().all()) for layer in layers)


def test_other_memory_than_referenced_is_not_written() -> None:
    """A descriptor that names something else by now fails the load instead of being read."""
    side, layers = worker(Packed())
    with sealed(4) as (source,):
        segment = source.segment
        wrong = tuple(
            replace(reference, memory=replace(reference.memory, inode=1))
            for reference in segment.keys
        )
        load = replace(load_of([source], 0, [3]), segments=(replace(segment, keys=wrong),))
        assert write(side, LoadPlan(loads=[load])) == ({"r"}, {"r"})
    for layer in layers:
        assert bool((layer.kv_cache == BEFORE).all())


def test_a_range_beyond_its_blocks_is_not_written() -> None:
    """A load with too few blocks fails and touches no slot of anybody."""
    side, layers = worker(Packed())
    with sealed(9) as sources:
        assert write(side, LoadPlan(loads=[load_of(sources, 0, [3, 4])])) == ({"r"}, {"r"})
    for layer in layers:
        assert bool((layer.kv_cache == BEFORE).all())


def test_failures_of_the_scheduler_half_are_passed_on() -> None:
    """Requests that the plan calls failed are reported with those that failed here."""
    side, _ = worker(Packed())
    with sealed(4) as (source,):
        source.memory.close()
        plan = LoadPlan(loads=[load_of([source], 0, [3], "c")], failures=["a", "b"])
        ended, failed = write(side, plan)
    assert ended == failed == {"a", "b", "c"}


def test_a_load_goes_on_beside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """`start_load` returns while the bytes are written, and nothing has ended before they are."""
    side, layers = worker(Packed())
    may_write = threading.Event()
    written = layers[0].impl.do_kv_cache_update

    def waiting(*arguments: Any) -> None:
        assert may_write.wait(WAIT_S)
        written(*arguments)

    monkeypatch.setattr(layers[0].impl, "do_kv_cache_update", waiting)
    with sealed(5) as sources:
        load = load_of(sources, 0, [3, 4])
        side.start_load(LoadPlan(loads=[load]))
        assert side.take_transfers() == (set(), set())
        assert side.take_report() is None
        may_write.set()
        until(lambda: side.take_transfers() == ({"r"}, set()))
        expect_rows(layers, sources, load)
    side.stop()


# --- tensor parallel -----------------------------------------------------------------------------
def heads_of(size: int, num_kv_heads: int) -> list[list[int]]:
    """Heads of each worker."""
    shards = [HeadShard(rank, size, num_kv_heads) for rank in range(size)]
    return [list(range(num_kv_heads))[shard.heads] for shard in shards]


def test_heads_are_dealt_out_as_vllm_deals_them() -> None:
    """In order, and with fewer heads than workers each head to neighbours."""
    assert heads_of(1, 3) == [[0, 1, 2]]
    assert heads_of(2, 4) == [[0, 1], [2, 3]]
    assert heads_of(4, 2) == [[0], [0], [1], [1]]
    assert heads_of(2, 1) == [[0], [0]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_writes_its_own_heads(rank: int) -> None:
    """Each of two workers writes its head of every layer, moved as all are."""
    side, layers = worker(Packed(), shard=HeadShard(rank, 2, HEADS))
    with sealed(7, 3, moves=[0, 7]) as sources:
        load = load_of(sources, 0, [9, 2, 5])
        assert write(side, LoadPlan(loads=[load])) == ({"r"}, set())
        for source in sources:
            source.keys = [key[rank : rank + 1] for key in source.keys]
            source.values = [value[rank : rank + 1] for value in source.values]
        expect_rows(layers, sources, load)


@pytest.mark.parametrize(("size", "num_kv_heads"), [(1, 2), (2, 4), (4, 2), (3, 3)])
def test_read_backs_of_all_workers_join(size: int, num_kv_heads: int) -> None:
    """Every head is there once and in order, also where several workers hold the same one."""
    whole = [(torch.randn(num_kv_heads, 5, DIM), torch.randn(num_kv_heads, 5, DIM))]
    by_rank = {
        rank: [(key[shard.heads], value[shard.heads]) for key, value in whole]
        for rank in reversed(range(size))
        for shard in [HeadShard(rank, size, num_kv_heads)]
    }
    ((key, value),) = all_heads(by_rank, num_kv_heads)
    assert torch.equal(key, whole[0][0])
    assert torch.equal(value, whole[0][1])


# --- reading back --------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_capture_reads_what_was_written(layout: Layout) -> None:
    """Every layer's first positions come back, after the step and not before."""
    side, _ = worker(layout)
    with sealed(10) as (source,):
        plan = LoadPlan(
            loads=[load_of([source], 0, [9, 2, 5])], captures=[Capture("r", 9, (9, 2, 5))]
        )
        write(side, plan)
        side.finish_step(plan)
        report = side.take_report()
        assert report is not None
        for index, (key, value) in enumerate(report.captured["r"][0]):
            assert torch.equal(key, source.keys[index][:, :9])
            assert torch.equal(value, source.values[index][:, :9])
        assert len(report.captured["r"][0]) == NUM_LAYERS


# --- layers --------------------------------------------------------------------------------------
def unregistered(
    layers: Mapping[str, object], segment_kernel: str | None = None, **changes: Any
) -> WorkerSide:
    """A worker half over layers that it has not seen yet; `changes` of the geometry."""
    geometry = msgspec.structs.replace(GEOMETRY, **changes)
    return WorkerSide(
        attention_layers=dict(layers),
        rotary=[ROTARY] * geometry.num_layers,
        geometry=geometry,
        block_size=BLOCK,
        num_cache_blocks=CACHE_BLOCKS,
        shard=ALL_HEADS,
        segment_kernel=segment_kernel,
    )


def plain_layers(names: Sequence[str]) -> dict[str, FakeLayer]:
    """Layers of the geometry."""
    return {
        name: fake_layer(Packed(), num_blocks=CACHE_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
        for name in names
    }


def test_layers_are_numbered_not_sorted_as_text() -> None:
    """Layer 10 comes after layer 2, in whatever order the caches were registered."""
    names = [f"model.layers.{index}.self_attn.attn" for index in (10, 2, *range(2), *range(3, 10))]
    layers = plain_layers(names)
    side = unregistered(layers, num_layers=11, layer_kinds=[LayerKind.FULL] * 11)
    side.register_kv_caches({name: layer.kv_cache for name, layer in layers.items()})
    expected = [layers[f"model.layers.{index}.self_attn.attn"].kv_cache for index in range(11)]
    assert [layer.cache.data_ptr() for layer in side._layers] == [
        cache.data_ptr() for cache in expected
    ]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["model.embed_tokens"], "model.embed_tokens belongs to no numbered attention layer"),
        (["model.layers.0.unknown"], "model.layers.0.unknown belongs to no"),
        (["model.layers.0.attn", "model.layers.2.attn"], r"geometry\.num_layers: 2 .*: \[0, 2\]"),
        (["model.layers.1.attn"], r"geometry\.num_layers: 2 .*: \[1\]"),
        (["model.layers.0.attn", "model.layers.0.indexer"], "is the second one of its layer"),
    ],
)
def test_caches_without_their_layer_are_refused(names: list[str], text: str) -> None:
    """A cache that is no numbered attention layer's, or a gap in the numbers, stops the engine."""
    side = unregistered(plain_layers([name for name in names if not name.endswith("unknown")]))
    with pytest.raises(ConfigurationError, match=text):
        side.register_kv_caches({name: torch.zeros(1) for name in names})


def test_layers_that_keep_a_state_are_refused() -> None:
    """A layer without KV heads, as those of state-space models, has nothing to write into."""
    side = unregistered({"model.layers.0.mixer": object()})
    with pytest.raises(ConfigurationError, match="belongs to no numbered attention layer"):
        side.register_kv_caches({"model.layers.0.mixer": torch.zeros(1)})


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_heads": 4},
        {"head_dim_k": DIM * 2},
        {"head_dim_v": DIM * 2},
        {"layer_kinds": [LayerKind.FULL, LayerKind.SLIDING]},
        {"layer_kinds": [LayerKind.LATENT] * 2},
    ],
    ids=str,
)
def test_layers_that_are_not_what_the_files_say_are_refused(change: dict[str, Any]) -> None:
    """The engine's own layers are compared with what artifacts are compared with."""
    names = [f"model.layers.{index}.attn" for index in range(NUM_LAYERS)]
    geometry = msgspec.structs.replace(GEOMETRY, **change)
    shard = replace(ALL_HEADS, num_kv_heads=geometry.num_kv_heads)
    side = WorkerSide(
        attention_layers=dict(plain_layers(names)),
        rotary=[ROTARY] * NUM_LAYERS,
        geometry=geometry,
        block_size=BLOCK,
        num_cache_blocks=CACHE_BLOCKS,
        shard=shard,
    )
    with pytest.raises(ConfigurationError, match="geometry: by the model's files"):
        side.register_kv_caches({name: torch.zeros(1) for name in names})


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        ("fast", "segment_kernel: attention backend 'fast' is none of auto, cpu, native"),
        ("flashinfer", "segment_kernel: attention backend flashinfer: "),
    ],
)
def test_a_kernel_that_cannot_run_ends_the_start(kernel: str, text: str) -> None:
    """It was asked for by name: no other takes its place."""
    layers = plain_layers([f"layers.{index}.attn" for index in range(NUM_LAYERS)])
    side = unregistered(layers, segment_kernel=kernel)
    with pytest.raises(ConfigurationError, match=text):
        side.register_kv_caches({name: layer.kv_cache for name, layer in layers.items()})


def test_latents_are_moved_and_written() -> None:
    """Only the last channels of a latent are turned; it goes where its position is."""
    rank, rotary_dim, num_tokens, num_positions = 6, 4, 5, 3
    frequencies = default_inverse_frequencies(100.0, rotary_dim)
    layers = {
        f"model.layers.{index}.attn": fake_latent_layer(
            num_blocks=CACHE_BLOCKS, block=BLOCK, rank=rank, rotary_dim=rotary_dim
        )
        for index in range(NUM_LAYERS)
    }
    side = WorkerSide(
        attention_layers=dict(layers),
        rotary=[RotaryEmbedding(frequencies, has_latents=True)] * NUM_LAYERS,
        geometry=Geometry(
            num_layers=NUM_LAYERS,
            num_kv_heads=1,
            head_dim_k=rank + rotary_dim,
            head_dim_v=rank,
            layer_kinds=[LayerKind.LATENT] * NUM_LAYERS,
        ),
        block_size=BLOCK,
        num_cache_blocks=CACHE_BLOCKS,
        shard=HeadShard(rank=0, size=1, num_kv_heads=1),
    )
    side.register_kv_caches({name: layer.kv_cache for name, layer in layers.items()})
    latents = [torch.randn(1, num_tokens, rank + rotary_dim) for _ in range(NUM_LAYERS)]
    payload = pack_payload({f"layers.{i}.k": latent for i, latent in enumerate(latents)})

    def fill(buffer: memoryview) -> None:
        buffer[:] = payload.data

    memory = SealedMemory(len(payload.data), fill)
    keys = tuple(
        TensorReference(memory.reference, tensor.dtype, tuple(tensor.shape), *tensor.byte_range)
        for tensor in (payload.tensors[f"layers.{index}.k"] for index in range(NUM_LAYERS))
    )
    load = Load(
        "r", (Segment("latents", num_tokens, num_positions, keys, ()),), 0, num_tokens, (7, 2)
    )
    assert write(side, LoadPlan(loads=[load])) == ({"r"}, set())
    memory.close()
    for layer, latent in zip(layers.values(), latents, strict=True):
        moved = relocate_latents(latent, num_positions, frequencies)[0]
        assert torch.equal(layer.kv_cache[7], moved[:BLOCK])
        assert torch.equal(layer.kv_cache[2, :1], moved[BLOCK:])
        assert torch.equal(moved[:, :rank], latent[0, :, :rank])
        assert not torch.equal(moved[:, rank:], latent[0, :, rank:])
