"""The worker half of the connector: writes verified keys and values into vLLM's blocks.

Owns the write through the backend's own cache writer, or of packed bytes past it, on a thread of
its own beside the forward passes, and the read-back of the self-test. Refuses to choose anything:
slots, segments and failures come from the scheduler half.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from cartridge_engine_ext.artifact_pool import tensor_view
from cartridge_engine_ext.cache_layer import CacheLayer, layer_index
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.in_place import InPlaceSegments
from cartridge_engine_ext.layout_probe import CacheReader, Captured
from cartridge_engine_ext.load_plan import (
    Capture,
    Load,
    LoadPlan,
    LoadReport,
    LoadResult,
)
from cartridge_engine_ext.moved_keys import MovedKeys
from cartridge_engine_ext.packed_layout import PackedPrefix
from cartridge_engine_ext.packed_steps import STEPS, CacheStrides
from cartridge_engine_ext.packed_writer import PackedWriter, Rows, write_prefix
from cartridge_engine_ext.rotary import RotaryEmbedding
from cartridge_engine_ext.sealed_memory import map_memory
from cartridge_engine_ext.stored_segments import Segment, TensorReference
from cartridge_engine_ext.thread_priority import yield_to_serving
from cartridge_engine_ext.virtual_prefix import SegmentRows, rows_of_range, slot_range
from cartridge_kernels.backends import BackendUnavailable, open_backend
from cartridge_kernels.scaled_values import dequantise_values
from cartridge_proto.manifest import Geometry, LayerKind

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 1024
"""Positions that are moved, cast and written at a time."""


@dataclass(frozen=True)
class HeadShard:
    """Which KV heads one of `size` tensor-parallel workers keeps.

    With fewer heads than workers each head is kept by several of them, as vLLM's own weights are.
    """

    rank: int
    size: int
    num_kv_heads: int

    @property
    def heads(self) -> slice:
        """Heads of this worker among all `num_kv_heads`."""
        if self.num_kv_heads < self.size:
            head = self.rank * self.num_kv_heads // self.size
            return slice(head, head + 1)
        count = self.num_kv_heads // self.size
        return slice(self.rank * count, (self.rank + 1) * count)


def all_heads(by_rank: dict[int, Captured], num_kv_heads: int) -> Captured:
    """Read-backs of all workers as one, with every head once and in order."""
    size = len(by_rank)
    parts: list[Captured] = []
    num_found = 0
    for rank in sorted(by_rank):
        heads = HeadShard(rank, size, num_kv_heads).heads
        if heads.start == num_found:  # else another worker with the same head came before
            parts.append(by_rank[rank])
            num_found = heads.stop
    return [
        (torch.cat([key for key, _ in layer]), torch.cat([value for _, value in layer]))
        for layer in zip(*parts, strict=True)
    ]


class WorkerSide:
    """One per worker process; called by vLLM's model runner on its thread only."""

    def __init__(
        self,
        *,
        attention_layers: dict[str, Any],
        rotary: Sequence[RotaryEmbedding],
        geometry: Geometry,
        block_size: int,
        num_cache_blocks: int,
        shard: HeadShard,
        segment_kernel: str | None = None,
        moved_keys_bytes: int = 0,
    ) -> None:
        self._rotary = rotary
        self._moved = MovedKeys(rotary, moved_keys_bytes)
        self._segment_kernel = segment_kernel
        self._strides: CacheStrides | None = None
        self._attention_layers = attention_layers
        self._geometry = geometry
        self._block_size = block_size
        self._num_cache_blocks = num_cache_blocks
        self._shard = shard
        self._layers: list[CacheLayer] = []
        self._reader: CacheReader | None = None
        self._captured: dict[str, dict[int, Captured]] = {}
        self._key_staging, self._value_staging = _Staging(), _Staging()
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="cartridge-writer", initializer=yield_to_serving
        )
        self._lock = threading.Lock()
        self._results: dict[str, LoadResult] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn the layers that have a KV cache, in model order.

        Raises:
            ConfigurationError: a cache belongs to no numbered attention layer, or the layers are
                not what the model's files say.
        """
        indexed: dict[int, CacheLayer] = {}
        for name in kv_caches:
            layer = self._attention_layers.get(name)
            try:
                index = layer_index(name)
            except ValueError:
                index = None
            if index is None or not hasattr(layer, "num_kv_heads"):
                raise ConfigurationError(f"KV cache {name} belongs to no numbered attention layer")
            if index in indexed:
                raise ConfigurationError(f"KV cache {name} is the second one of its layer")
            indexed[index] = CacheLayer(layer)
        if sorted(indexed) != list(range(self._geometry.num_layers)):
            raise ConfigurationError(
                f"geometry.num_layers: {self._geometry.num_layers} by the model's files; layers "
                f"with a KV cache: {sorted(indexed)}"
            )
        self._layers = [indexed[index] for index in sorted(indexed)]
        self._check_geometry()
        # Nothing uses the cache yet, so a block may be written to find the layout out.
        self._reader = CacheReader.probe(self._layers[0], self._block_size, self._num_cache_blocks)
        if self._segment_kernel is not None:
            self._prepare_packed(self._segment_kernel)

    def _prepare_packed(self, kernel: str) -> None:
        """Make the model thread ready for packed prefixes."""
        cache = self._layers[0].cache
        assert self._reader is not None  # noqa: S101 - the caller has just made it
        self._strides = self._reader.strides(cache)
        try:
            kernel_here = open_backend(kernel, cache.device)
        except BackendUnavailable as error:
            raise ConfigurationError(f"segment_kernel: {error}") from error
        STEPS.prepare(self._strides, kernel_here, InPlaceSegments(self._rotary, self._shard.heads))

    def _check_geometry(self) -> None:
        """Compare vLLM's layers with what was read from the model's files."""
        geometry, heads = self._geometry, self._shard.heads
        for layer, kind in zip(self._layers, geometry.layer_kinds, strict=True):
            expected = (
                kind is LayerKind.LATENT,
                kind is LayerKind.SLIDING,
                heads.stop - heads.start,
                geometry.head_dim_k,
                0 if geometry.has_latents else geometry.head_dim_v,
            )
            found = (
                layer.has_latents,
                layer.has_window,
                layer.num_kv_heads,
                layer.key_dim,
                layer.value_dim,
            )
            if found != expected:
                raise ConfigurationError(
                    "geometry: by the model's files a layer has (latents, window, KV heads, key "
                    f"width, value width) {expected}, in vLLM {found}"
                )

    def start_load(self, plan: LoadPlan) -> None:
        """Begin every load of this step; forward passes of other requests go on meanwhile."""
        with self._lock:
            self._finished.update(plan.failures)
            self._failed.update(plan.failures)
        planned_s = time.monotonic()
        for load in plan.loads:
            self._executor.submit(self._run, load, planned_s)

    def finish_step(self, plan: LoadPlan) -> None:
        """Read back what the self-test asked for; the forward pass has run."""
        for capture in plan.captures:
            self._captured[capture.request_id] = {self._shard.rank: self._read_back(capture)}

    def take_transfers(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those of them that failed."""
        with self._lock:
            taken = self._finished, self._failed
            self._finished, self._failed = set(), set()
        return taken

    def take_report(self) -> LoadReport | None:
        """What was done since the last call; `None` when nothing was."""
        with self._lock:
            results, self._results = self._results, {}
        captured, self._captured = self._captured, {}
        return LoadReport(results, captured) if results or captured else None

    def stop(self) -> None:
        """Wait for the load that is being written, and give up the rest."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    # --- on the writing thread -------------------------------------------------------------------
    def _run(self, load: Load, planned_s: float) -> None:
        """Write one load. One that fails fails its request only."""
        error = None
        try:
            size_bytes = self._write(load)
        except Exception as caught:
            logger.exception("request %s: virtual prefix not written", load.request_id)
            error, size_bytes = f"{type(caught).__name__}: {caught}", 0
        result = LoadResult(size_bytes, time.monotonic() - planned_s, error)
        with self._lock:
            # The result first: vLLM asks what has ended, then for the report, in that order.
            self._results[load.request_id] = result
            self._finished.add(load.request_id)
            if error is not None:
                self._failed.add(load.request_id)

    def _write(self, load: Load) -> int:
        if load.packed is not None:
            return self._write_packed(load, load.packed)
        slots = torch.tensor(
            slot_range(load.block_ids, load.start, load.stop, self._block_size),
            dtype=torch.int64,
            device=self._layers[0].cache.device,
        )
        lengths = [segment.num_tokens for segment in load.segments]
        chunks = [
            (
                begin - load.start,
                rows_of_range(lengths, begin, min(begin + CHUNK_TOKENS, load.stop)),
            )
            for begin in range(load.start, load.stop, CHUNK_TOKENS)
        ]
        size_bytes = 0
        with _Mappings() as mappings, _beside_forward_passes(slots.device):
            for index, layer in enumerate(self._layers):
                for place, rows in chunks:
                    key, value = self._stage(load, index, rows, mappings)
                    layer.write(key, value, slots[place : place + len(key)])
                    size_bytes += key.nbytes + value.nbytes
        return size_bytes

    def _write_packed(self, load: Load, prefix: PackedPrefix) -> int:
        strides = self._strides
        assert strides is not None  # noqa: S101 - none is planned for an engine without them
        blocks, first = load.block_ids[: prefix.num_blocks], load.start // self._block_size
        size_bytes = 0
        with _Mappings() as mappings, _beside_forward_passes(self._layers[0].cache.device):
            for index, layer in enumerate(self._layers):
                parts = _LayerParts(load.segments, index, self._shard.heads, mappings, self._moved)
                memory = strides.head_bytes(layer.cache)
                writer = PackedWriter(memory, blocks, first, CHUNK_TOKENS)
                size_bytes += write_prefix(writer, prefix, parts.keys, parts.values, parts.scales)
        return size_bytes

    def _stage(
        self, load: Load, layer: int, rows: Sequence[SegmentRows], mappings: "_Mappings"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some positions of a layer, [num_tokens, num_kv_heads, head_dim].

        In the cache's dtype and place; overwritten by the next call.
        """
        heads = self._shard.heads
        parts = []
        for part in rows:
            segment = load.segments[part.index]
            key = self._moved.rows(
                segment.digest,
                layer,
                segment.num_positions,
                mappings.tensor(segment.keys[layer])[heads],
                part.begin,
                part.end,
            )
            value = key[..., :0]
            if segment.values:
                value = mappings.tensor(segment.values[layer])[heads, part.begin : part.end]
            if segment.value_scales:
                scale = mappings.tensor(segment.value_scales[layer])[heads]
                value = dequantise_values(value, scale)
            parts.append((key, value))
        cache = self._layers[layer].cache
        return (
            self._key_staging.fill([key for key, _ in parts], cache),
            self._value_staging.fill([value for _, value in parts], cache),
        )

    def _read_back(self, capture: Capture) -> Captured:
        assert self._reader is not None  # noqa: S101 - vLLM registers caches before any step
        return [
            self._reader.read(layer.cache, capture.block_ids, capture.num_tokens)
            for layer in self._layers
        ]


@dataclass(frozen=True)
class _LayerParts:
    """What the segments of a load bring for one layer, in the order of the composition."""

    segments: Sequence[Segment]
    layer: int
    heads: slice
    mappings: "_Mappings"
    moved: MovedKeys

    def keys(self, index: int) -> Rows:
        """Keys of a segment, moved to where they belong."""
        segment = self.segments[index]
        stored = self.mappings.tensor(segment.keys[self.layer])[self.heads]
        return lambda begin, end: self.moved.rows(
            segment.digest, self.layer, segment.num_positions, stored, begin, end
        )

    def values(self, index: int) -> Rows:
        """Values of a segment as they are stored."""
        stored = self.mappings.tensor(self.segments[index].values[self.layer])[self.heads]
        return lambda begin, end: stored[:, begin:end]

    def scales(self, index: int) -> torch.Tensor:
        """Scales of a segment's values, [num_kv_heads] or [num_kv_heads, head_dim]."""
        return self.mappings.tensor(self.segments[index].value_scales[self.layer])[self.heads]


class _Staging:
    """Memory that rows pass through on their way to the cache: allocated once, written often."""

    def __init__(self) -> None:
        self._rows = torch.empty(0)

    def fill(self, parts: Sequence[torch.Tensor], cache: torch.Tensor) -> torch.Tensor:
        """Parts [num_kv_heads, num_tokens, head_dim] behind one another, token by token.

        Raises:
            ValueError: the cache's dtype has no number for some of them.
        """
        num_heads, _, head_dim = parts[0].shape
        wanted = (CHUNK_TOKENS, num_heads, head_dim)
        if self._rows.shape != wanted or self._rows.dtype != cache.dtype:
            self._rows = torch.empty(wanted, dtype=cache.dtype, device=cache.device)
        end = 0
        for part in parts:
            begin, end = end, end + part.shape[1]
            rows = self._rows[begin:end]
            rows.copy_(part.transpose(0, 1))
            if part.dtype != cache.dtype and not bool(rows.isfinite().all()):
                raise ValueError(f"{part.dtype} keys or values do not fit {cache.dtype}")
        return self._rows[:end]


@contextlib.contextmanager
def _beside_forward_passes(device: torch.device) -> Iterator[None]:
    """On a GPU: a stream of its own, whose work is done when the block ends."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has no types for it
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        # Also after a failure: what is queued must not be written once the blocks are given back.
        stream.synchronize()


class _Mappings:
    """Sealed memories mapped for the time of one write."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], memoryview] = {}

    def __enter__(self) -> "_Mappings":
        return self

    def __exit__(self, *exc_info: object) -> None:
        # Tensors over a mapping keep it alive; it goes with the last of them.
        self._buffers.clear()

    def tensor(self, reference: TensorReference) -> torch.Tensor:
        """The referenced tensor, without a copy."""
        memory = reference.memory
        key = (memory.descriptor, memory.inode)
        if key not in self._buffers:
            self._buffers[key] = memoryview(map_memory(memory))
        return tensor_view(
            self._buffers[key], reference.dtype, reference.shape, reference.begin, reference.end
        )
