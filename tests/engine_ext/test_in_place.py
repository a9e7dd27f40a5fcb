"""Segments that attention reads where they lie: the right numbers, shared, and given back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext.cache_layer import CacheLayer
from cartridge_engine_ext.in_place import InPlaceSegments
from cartridge_engine_ext.layout_probe import CacheReader
from cartridge_engine_ext.packed_layout import CacheGeometry, PackedPrefix, packed_prefix
from cartridge_engine_ext.packed_layout import StoredSegment as PlainSegment
from cartridge_engine_ext.packed_steps import CacheStrides, PackedSteps
from cartridge_engine_ext.packed_writer import PackedWriter, Rows, write_prefix
from cartridge_engine_ext.payload import pack_payload
from cartridge_engine_ext.rotary import RotaryEmbedding
from cartridge_engine_ext.sealed_memory import SealedMemory
from cartridge_engine_ext.stored_segments import InPlacePrefix, Segment, TensorReference
from cartridge_engine_ext.worker_side import HeadShard
from cartridge_kernels.backends import available_backends, open_backend
from cartridge_kernels.plan import Representation, RequestShape
from cartridge_kernels.reference import ReferenceBackend, attend_dense, segment_rows
from cartridge_kernels.rope import default_inverse_frequencies, relocate_keys
from cartridge_kernels.scaled_values import dequantise_values, quantise_values
from tests.engine_ext.fake_layers import FakeLayer, Packed, fake_layer

LAYERS, HEADS, DIM, BLOCK, NUM_BLOCKS = 2, 2, 8, 4, 24
FREQUENCIES = default_inverse_frequencies(100.0, DIM)
ROTARY = [RotaryEmbedding(FREQUENCIES)] * LAYERS
CPU = torch.device("cpu")
WHOLE = slice(0, HEADS)


@dataclass
class Source:
    """One artifact: tensors by layer, [heads, num_tokens, dim], and where they are sealed."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scales: list[torch.Tensor] | None
    memory: SealedMemory
    segment: Segment

    def exact_values(self, layer: int) -> torch.Tensor:
        """What the values mean, float32."""
        if self.scales is None:
            return self.values[layer].float()
        return dequantise_values(self.values[layer], self.scales[layer])

    def exact_keys(self, layer: int) -> torch.Tensor:
        """Keys where the segment stands, float32."""
        keys = relocate_keys(self.keys[layer], self.segment.num_positions, FREQUENCIES)
        return keys.float()


Seal = Callable[..., Source]


@pytest.fixture
def seal() -> Iterator[Seal]:
    """Makes artifacts of random numbers, whose memory goes with the test."""
    with ExitStack() as stack:

        def make(num_tokens: int, *, seed: int = 0, is_small: bool = True, at: int = 0) -> Source:
            source = _sealed(num_tokens, seed, is_small=is_small, num_positions=at)
            stack.callback(source.memory.close)
            return source

        yield make


def _sealed(num_tokens: int, seed: int, *, is_small: bool, num_positions: int) -> Source:
    generator = torch.Generator().manual_seed(seed)
    named: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        keys, values = torch.randn(2, HEADS, num_tokens, DIM, generator=generator)
        named[f"layers.{layer}.k"] = keys.bfloat16()
        if is_small:
            codes, scales = quantise_values(values, by_channel=True)
            named[f"layers.{layer}.v"], named[f"layers.{layer}.v_scale"] = codes, scales
        else:
            named[f"layers.{layer}.v"] = values.bfloat16()
    payload = pack_payload(named)

    def fill(buffer: memoryview) -> None:
        buffer[:] = payload.data

    memory = SealedMemory(len(payload.data), fill)

    def of(part: str) -> list[torch.Tensor]:
        return [named[f"layers.{layer}.{part}"] for layer in range(LAYERS)]

    def references(part: str) -> tuple[TensorReference, ...]:
        tensors = [payload.tensors[f"layers.{layer}.{part}"] for layer in range(LAYERS)]
        return tuple(
            TensorReference(memory.reference, tensor.dtype, tuple(tensor.shape), *tensor.byte_range)
            for tensor in tensors
        )

    return Source(
        of("k"),
        of("v"),
        of("v_scale") if is_small else None,
        memory,
        Segment(
            payload.blob.sha256,
            num_tokens,
            num_positions,
            references("k"),
            references("v"),
            references("v_scale") if is_small else (),
        ),
    )


def prefix_of(*sources: Source) -> InPlacePrefix:
    """A prefix of these artifacts."""
    return InPlacePrefix(tuple(source.segment for source in sources))


def num_mapped(memory: SealedMemory) -> int:
    """How often this process maps sealed memory."""
    inode = memory.reference.inode
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(1 for line in lines if line.split()[4] == str(inode))


# --- mapping -------------------------------------------------------------------------------------
@pytest.mark.parametrize("is_small", [True, False], ids=["k16v8", "bf16"])
@pytest.mark.parametrize("at", [0, 37])
def test_what_is_mapped_is_what_was_stored(seal: Seal, is_small: bool, at: int) -> None:
    """Values bit for bit, keys too or moved along the sequence, in every layer."""
    source = seal(19, is_small=is_small, at=at)
    segments = InPlaceSegments(ROTARY, WHOLE)
    segments.acquire(prefix_of(source))
    found = segments.segment(source.segment)
    kind = Representation.K16V8 if is_small else Representation.FULL
    assert (found.planned.num_tokens, found.planned.offset) == (19, at)
    assert found.planned.representation is kind
    for layer in range(LAYERS):
        keys, values = segment_rows(found.tensors(layer, torch.empty(0), DIM), 19)
        assert torch.equal(keys, source.exact_keys(layer))
        assert torch.equal(values, source.exact_values(layer))
    assert bool(at) == (not torch.equal(source.exact_keys(0), source.keys[0].float()))


def test_only_keys_that_move_are_copied(seal: Seal) -> None:
    """Everything else is a view of one mapping, and page ids are one object for all layers."""
    source = seal(19)
    segments = InPlaceSegments(ROTARY, WHOLE)
    segments.acquire(prefix_of(source))
    assert num_mapped(source.memory) == 1
    begins, ends = [], []
    layers = [
        segments.segment(source.segment).tensors(layer, torch.empty(0), DIM)
        for layer in range(LAYERS)
    ]
    for layer in layers:
        for storage in (layer.keys.storage, layer.values.storage):
            begins.append(storage.data_ptr())
            ends.append(storage.data_ptr() + storage.nbytes)
    assert max(ends) - min(begins) <= source.memory.size_bytes
    # Kernels keep what they prepared for a plan as long as these are the same objects.
    assert len({id(rows.page_ids) for one in layers for rows in (one.keys, one.values)}) == 1


@pytest.mark.parametrize("rank", range(2))
def test_a_worker_maps_its_own_heads(seal: Seal, rank: int) -> None:
    """With tensor parallelism each worker attends to its share, scales too."""
    source = seal(19, at=5)
    heads = HeadShard(rank, 2, HEADS).heads
    segments = InPlaceSegments(ROTARY, heads)
    segments.acquire(prefix_of(source))
    tensors = segments.segment(source.segment).tensors(1, torch.empty(0), DIM)
    keys, values = segment_rows(tensors, 19)
    assert torch.equal(keys, source.exact_keys(1)[heads])
    assert torch.equal(values, source.exact_values(1)[heads])


# --- users ---------------------------------------------------------------------------------------
def test_compositions_share_a_segment_at_one_place(seal: Seal) -> None:
    """The same artifact at another offset is another segment; each goes with its last user."""
    one, two, moved = seal(19, seed=1), seal(9, seed=2), seal(19, seed=1, at=9)
    segments = InPlaceSegments(ROTARY, WHOLE)
    first, second = prefix_of(one, two), prefix_of(one, moved)
    segments.acquire(first)
    segments.acquire(second)
    assert len(segments) == 3
    segments.release(first)
    assert len(segments) == 2
    assert num_mapped(two.memory) == 0
    assert num_mapped(one.memory) == 1
    segments.release(second)
    assert len(segments) == 0
    assert num_mapped(one.memory) == num_mapped(moved.memory) == 0


def test_one_request_may_name_a_segment_twice(seal: Seal) -> None:
    """It is mapped once, and for as long as the request lives."""
    source = seal(19)
    segments = InPlaceSegments(ROTARY, WHOLE)
    twice, once = prefix_of(source, source), prefix_of(source)
    segments.acquire(twice)
    segments.acquire(once)
    assert len(segments) == 1
    segments.release(twice)
    assert len(segments) == 1
    segments.release(once)
    assert len(segments) == 0


def test_memory_that_is_gone_leaves_nothing_in_use(seal: Seal) -> None:
    """A prefix that cannot be mapped whole is not mapped at all; others keep theirs."""
    good, other, bad = seal(19, seed=1), seal(9, seed=2), seal(9, seed=3)
    segments = InPlaceSegments(ROTARY, WHOLE)
    segments.acquire(prefix_of(good))
    bad.memory.close()
    # Its descriptor's number may name the mapping of another by now.
    with pytest.raises(OSError, match=r"No such file|not the memory"):
        segments.acquire(prefix_of(good, other, bad))
    assert len(segments) == 1
    segments.release(prefix_of(good))
    assert len(segments) == 0


def test_other_memory_than_referenced_is_not_read(seal: Seal) -> None:
    """A descriptor that names something else by now raises, and is not attended to."""
    source = seal(19)
    wrong = tuple(
        replace(keys, memory=replace(keys.memory, inode=keys.memory.inode + 1))
        for keys in source.segment.keys
    )
    segments = InPlaceSegments(ROTARY, WHOLE)
    with pytest.raises(OSError, match="not the memory"):
        segments.acquire(InPlacePrefix((replace(source.segment, keys=wrong),)))
    assert len(segments) == 0


def test_memory_that_the_tier_gave_up_stays_readable(seal: Seal) -> None:
    """A request that is still in a step when its artifact is evicted reads what it mapped."""
    source = seal(19)
    segments = InPlaceSegments(ROTARY, WHOLE)
    segments.acquire(prefix_of(source))
    source.memory.close()
    tensors = segments.segment(source.segment).tensors(0, torch.empty(0), DIM)
    assert torch.equal(segment_rows(tensors, 19)[1], source.exact_values(0))


def _rows(whole: torch.Tensor) -> Rows:
    return lambda begin, end: whole[:, begin:end]


# --- steps ---------------------------------------------------------------------------------------
@dataclass
class Worker:
    """What a step needs: layers with caches, and the steps over them."""

    layers: list[FakeLayer]
    strides: CacheStrides
    in_place: InPlaceSegments
    steps: PackedSteps

    def fill(self, slots: Sequence[int], seed: int) -> None:
        """Random live keys and values at these slots of every layer."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            rows = torch.randn(2, len(slots), HEADS, DIM, generator=generator)
            layer.impl.do_kv_cache_update(
                layer, rows[0], rows[1], layer.kv_cache, torch.tensor(slots)
            )

    def write_packed(self, prefix: PackedPrefix, blocks: list[int], source: Source) -> None:
        """Write a packed prefix of one artifact into blocks."""
        for index, layer in enumerate(self.layers):
            writer = PackedWriter(self.strides.head_bytes(layer.kv_cache), blocks, 0, 64)
            keys, values = _rows(source.keys[index]), _rows(source.values[index])
            assert source.scales is not None
            write_prefix(
                writer,
                prefix,
                [keys].__getitem__,
                [values].__getitem__,
                [source.scales[index]].__getitem__,
            )

    def begin(
        self,
        request_ids: list[str],
        computed: list[int],
        scheduled: list[int],
        tables: list[list[int]],
    ) -> None:
        """Plan a step."""
        table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, ids in enumerate(tables):
            table[row, : len(ids)] = ids
        self.steps.begin(
            request_ids, np.array(computed, np.int32), np.array(scheduled, np.int32), table, CPU
        )


@pytest.fixture
def worker() -> Worker:
    """A worker over fake caches of float32."""
    layers = [
        fake_layer(Packed(), num_blocks=NUM_BLOCKS, heads=HEADS, block=BLOCK, dim=DIM)
        for _ in range(LAYERS)
    ]
    reader = CacheReader.probe(CacheLayer(layers[0]), BLOCK, NUM_BLOCKS)
    strides = reader.strides(layers[0].kv_cache)
    in_place, steps = InPlaceSegments(ROTARY, WHOLE), PackedSteps()
    steps.prepare(strides, ReferenceBackend(), in_place)
    return Worker(layers, strides, in_place, steps)


def packed_of(source: Source) -> PackedPrefix:
    """The layout of a prefix of one K16/V8 artifact in the worker's cache."""
    stored = PlainSegment(source.segment.num_tokens, 0, "BF16", "F8_E4M3", True)
    prefix = packed_prefix([stored], CacheGeometry(BLOCK, DIM, "F32"))
    assert prefix is not None
    return prefix


def test_a_batch_of_all_kinds_is_split(seal: Seal, worker: Worker) -> None:
    """In place, packed and plain requests in one step; readers of one place share its segment."""
    one, two, small = seal(19, seed=1), seal(9, seed=2, at=19), seal(60, seed=3)
    packed = packed_of(small)
    blocks = list(range(packed.num_blocks))
    prefixes: dict[str, PackedPrefix | InPlacePrefix] = {
        "a": prefix_of(one, two),
        "b": prefix_of(one),
        "p": packed,
    }
    worker.steps.note(prefixes, [])
    worker.begin(
        ["a", "plain", "p", "b"],
        computed=[5, 3, packed.num_slots, 0],
        scheduled=[1, 2, 1, 6],
        tables=[[20, 21], [22, 23], [*blocks, 19], [17, 18]],
    )
    step = worker.steps.current
    assert step is not None
    assert step.has_others
    assert step.rows.tolist() == [0, 3, 4, 5, 6, 7, 8, 9]
    assert step.plan.requests == (
        RequestShape(1, 6, (0, 1)),
        RequestShape(1, 1, (2,)),
        RequestShape(6, 6, (0,)),
    )
    assert step.block_table.tolist() == [[20, 21], [19, 0], [17, 18]]
    # Of those in place the platform's kernel reads no more than what it has to replace.
    assert step.ordinary_seq_lens.tolist() == [1, 5, 1, 6]
    ahead = worker.steps.num_positions_ahead(["a", "plain", "p", "b"])
    assert ahead == [28, 0, packed.num_positions - packed.num_slots, 19]


def test_a_segment_named_twice_is_read_twice(seal: Seal, worker: Worker) -> None:
    """By the one request; another that names it once shares the first reading."""
    source = seal(19)
    worker.steps.note({"a": prefix_of(source, source), "b": prefix_of(source)}, [])
    worker.begin(["a", "b"], computed=[0, 0], scheduled=[1, 1], tables=[[3], [4]])
    step = worker.steps.current
    assert step is not None
    assert [request.segments for request in step.plan.requests] == [(0, 1), (0,)]


@pytest.mark.parametrize("kernel", ["reference", "cpu", "native"])
def test_attention_in_place_is_attention(seal: Seal, worker: Worker, kernel: str) -> None:
    """Each query's answer is one softmax over stored and live tokens, in every layer.

    The oracle sees the artifacts' own tensors, not the mapping.
    """
    reason = available_backends(CPU)[kernel]
    if reason is not None:
        pytest.skip(f"needs the kernel {kernel}: {reason}")
    sources = [seal(19, seed=1), seal(33, seed=2, is_small=False, at=19), seal(60, seed=3)]
    one, two, small = sources
    packed = packed_of(small)
    blocks = [2, 9, 4, 12, 7, 14, 1, 15, 3, 16, 5, 6, 8, 10][: packed.num_blocks]
    worker.write_packed(packed, blocks, small)
    prefixes: dict[str, PackedPrefix | InPlacePrefix] = {
        "a": prefix_of(one, two),
        "b": prefix_of(one),
        "p": packed,
    }
    worker.steps.note(prefixes, [])
    worker.fill([17 * BLOCK + slot for slot in range(BLOCK * 7)], seed=5)
    worker.begin(
        ["a", "b", "p"],
        computed=[5, 0, packed.num_slots],
        scheduled=[1, 6, 2],
        tables=[[20, 21], [22, 18], [*blocks, 19]],
    )
    step = worker.steps.current
    assert step is not None
    backend = open_backend(kernel, CPU)
    queries = torch.randn(9, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(6))
    for index, layer in enumerate(worker.layers):
        live = worker.strides.live(layer.kv_cache, step.block_table)
        tensors = step.tensors(index, layer.kv_cache, worker.strides)
        found = backend.attend(step.plan, queries, tensors, live, scale=DIM**-0.5)
        exact = attend_dense(step.plan, queries, tensors, live, scale=DIM**-0.5)
        torch.testing.assert_close(found.output.double(), exact.output, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(found.lse.double(), exact.lse, atol=2e-5, rtol=1e-4)
        for source, part in zip(sources, tensors, strict=True):
            keys, values = segment_rows(part, source.segment.num_tokens)
            assert torch.equal(keys, source.exact_keys(index))
            assert torch.equal(values, source.exact_values(index))


def test_the_end_of_a_request_unmaps_its_memory(seal: Seal, worker: Worker) -> None:
    """Also in a step without a forward pass, and only of requests that are over."""
    source = seal(19)
    worker.steps.note({"a": prefix_of(source), "b": prefix_of(source)}, [])
    worker.steps.note({}, ["a"])
    assert num_mapped(source.memory) == 1
    worker.steps.note({}, ["b", "b", "never seen"])
    assert num_mapped(source.memory) == 0
    worker.begin(["a"], computed=[0], scheduled=[1], tables=[[3]])
    assert worker.steps.current is None


def test_a_request_that_resumes_is_one_user(seal: Seal, worker: Worker) -> None:
    """Preempted requests are told of once more; what they use stays mapped, once."""
    source = seal(19)
    for _ in range(3):
        worker.steps.note({"a": prefix_of(source)}, [])
    before = worker.in_place.segment(source.segment)
    worker.steps.note({"a": prefix_of(source)}, [])
    assert worker.in_place.segment(source.segment) is before
    worker.steps.note({}, ["a"])
    assert len(worker.in_place) == 0


def test_an_id_that_ends_and_comes_again_in_one_step(seal: Seal, worker: Worker) -> None:
    """The new request has its own prefix, and the old one's is given back."""
    old, new = seal(19, seed=1), seal(9, seed=2)
    worker.steps.note({"a": prefix_of(old)}, [])
    worker.steps.note({"a": prefix_of(new)}, ["a"])
    assert worker.steps.num_positions_ahead(["a"]) == [9]
    assert num_mapped(old.memory) == 0
    worker.steps.note({}, ["a"])
    assert len(worker.in_place) == 0


def test_readers_one_after_another_keep_the_mapping(seal: Seal, worker: Worker) -> None:
    """A request that comes in the step in which the last reader ends maps and moves nothing."""
    source = seal(19, at=7)
    worker.steps.note({"a": prefix_of(source)}, [])
    before = worker.in_place.segment(source.segment)
    worker.steps.note({"b": prefix_of(source)}, ["a"])
    assert worker.in_place.segment(source.segment) is before
