"""`make bench-kernels`: attention over shared segments on a CPU, beside what reads them apart.

Owns the measurements and their targets. Refuses wall clock and other runs' figures: one thread, CPU
time, contenders in turn, ratios of medians. Several layers are read in turn, and 64 MiB of other
numbers before each contender: an engine's weights leave nothing in the CPU's caches either, and no
contender finds there what the one before it read.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from cartridge_kernels.backends import open_backend
from cartridge_kernels.plan import (
    LiveTensors,
    PagedRows,
    Plan,
    Representation,
    RequestShape,
    Segment,
    SegmentTensors,
)
from cartridge_kernels.reference import attend_dense
from cartridge_kernels.scaled_values import dequantise_values, quantise_values
from tests.benchmarks.rows import Row, report

NUM_LIVE = 128
BLOCK_SIZE = 128
NUM_LAYERS = 4
BATCHES = (1, 2, 4, 8, 16, 32)
LENGTHS = (512, 2048, 8192)
BATCH, LENGTH = 16, 2048
CPU = torch.device("cpu")
FULL, K16V8 = Representation.FULL, Representation.K16V8
COPIES, SHARED, TORCH, NATIVE = "SDPA on copies", "vLLM shared", "cpu", "native"


@dataclass(frozen=True)
class Geometry:
    """Heads of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


SMOLLM = Geometry("smollm2-135m", 9, 3, 64)
LLAMA = Geometry("llama-3.2-3b", 24, 8, 128)


@dataclass(frozen=True)
class Step:
    """A decode step over some layers: what each contender reads, and how many bytes of it."""

    contenders: dict[str, Callable[[], object]]
    bytes_once: int
    """Of a layer: keys and values of the segment once, those of live tokens."""


def main(arguments: Sequence[str]) -> int:
    """Measure everything; 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="make bench-kernels", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/kernels.json"))
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    bandwidth = read_bandwidth()
    rows = [Row("read bandwidth", bandwidth / 1e9, "GB/s", None, None, "sum of 256 MiB")]
    for geometry in (SMOLLM, LLAMA):
        for representation in (K16V8, FULL):
            rows += shared_by_all(geometry, representation, given.repeats, bandwidth)
            rows += one_request(geometry, representation, given.repeats)
    rows += sweep(given.repeats)
    return report(rows, given.out)


# --- figures -------------------------------------------------------------------------------------
def shared_by_all(
    geometry: Geometry, representation: Representation, repeats: int, bandwidth: float
) -> list[Row]:
    """A batch that shares one segment, over what reads it for each request."""
    step = make_step(geometry, representation, BATCH, LENGTH)
    found = medians_ms(step.contenders, repeats)
    prefix = f"{geometry.name}/{representation.value}/batch {BATCH}"
    rows = [
        at_least(f"{prefix}/{name} over {base}", found[base] / found[name], target, found, base)
        for name, base, target in (
            (TORCH, COPIES, 2.0),
            (NATIVE, COPIES, 3.0),
            (TORCH, SHARED, 1.5),
            (NATIVE, SHARED, 1.5),
        )
    ]
    floor_ms = step.bytes_once / bandwidth * 1e3
    against = f"{step.bytes_once / 1e6:.2f} MB once: {floor_ms:.2f} ms"
    share = floor_ms / found[NATIVE]
    return [*rows, Row(f"{prefix}/floor of bytes in native", share, "of 1", None, None, against)]


def one_request(geometry: Geometry, representation: Representation, repeats: int) -> list[Row]:
    """A request alone, over plain SDPA on everything it sees behind one another."""
    step = make_step(geometry, representation, 1, LENGTH)
    found = medians_ms(step.contenders, 2 * repeats)
    prefix = f"{geometry.name}/{representation.value}/one request"
    return [
        at_least(
            f"{prefix}/{name} over plain SDPA", found[COPIES] / found[name], 0.9, found, COPIES
        )
        for name in (NATIVE, TORCH)
    ]


def at_least(name: str, ratio: float, target: float, found: dict[str, float], base: str) -> Row:
    """A row with a target."""
    against = f"{base}: {found[base]:.2f} ms a layer"
    return Row(name, ratio, "x", f">= {target}", ratio >= target, against)


def sweep(repeats: int) -> list[Row]:
    """Batches and lengths: where sharing begins to pay."""
    rows = []
    for length in LENGTHS:
        for batch in BATCHES:
            step = make_step(SMOLLM, K16V8, batch, length)
            found = medians_ms(step.contenders, max(3, repeats // 2))
            against = f"{COPIES} {found[COPIES]:.2f} ms, {SHARED} {found[SHARED]:.2f} ms a layer"
            prefix = f"sweep/{length} tokens/batch {batch}"
            rows += [
                Row(
                    f"{prefix}/{name} over {base}",
                    found[base] / found[name],
                    "x",
                    None,
                    None,
                    against,
                )
                for name, base in ((TORCH, COPIES), (NATIVE, COPIES), (NATIVE, SHARED))
            ]
    return rows


# --- measuring -----------------------------------------------------------------------------------
def medians_ms(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """CPU milliseconds of a layer; contenders take turns, each with cold caches."""
    others = torch.ones(1 << 24)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            others.sum()
            started_s = time.process_time()
            run()
            if turn:
                seconds[name].append(time.process_time() - started_s)
    return {name: statistics.median(found) / NUM_LAYERS * 1e3 for name, found in seconds.items()}


def read_bandwidth() -> float:
    """Bytes per second of a sum over more than the caches hold."""
    numbers = torch.ones(1 << 26)
    seconds = []
    for _ in range(5):
        started_s = time.process_time()
        numbers.sum()
        seconds.append(time.process_time() - started_s)
    return numbers.nbytes / min(seconds)


# --- contenders ----------------------------------------------------------------------------------
def make_step(geometry: Geometry, representation: Representation, batch: int, length: int) -> Step:
    """One decode step; every contender is held to the float64 answer first."""
    generator = torch.Generator().manual_seed(0)
    plan = Plan(
        (Segment(length, 0, representation),),
        tuple(RequestShape(1, NUM_LIVE, (0,)) for _ in range(batch)),
    )
    table = torch.randperm(batch, generator=generator).to(torch.int32)[:, None]
    page_ids = torch.randperm(length // BLOCK_SIZE, generator=generator)
    layers = [
        Layer(geometry, representation, batch, length, table, page_ids, generator)
        for _ in range(NUM_LAYERS)
    ]
    contenders: dict[str, Callable[[], object]] = {}
    for name in (TORCH, NATIVE):
        backend = open_backend(name, CPU)

        def attend(layer: Layer, backend=backend) -> torch.Tensor:  # type: ignore[no-untyped-def]
            found: torch.Tensor = backend.attend(
                plan, layer.queries, [layer.segment], layer.live, scale=geometry.head_dim**-0.5
            ).output
            return found

        contenders[name] = each_layer(attend, layers, plan, 1e-5)
    # bfloat16 products and weights.
    contenders[COPIES] = each_layer(Layer.attend_copies, layers, plan, 1e-2)
    contenders[SHARED] = each_layer(Layer.attend_vllm, layers, plan, 1e-2)
    segment, cache = layers[0].segment, layers[0].live
    stored = [segment.keys.storage, segment.values.storage, cache.keys, cache.values]
    return Step(contenders, sum(tensor.nbytes for tensor in stored))


def each_layer(
    attend: "Callable[[Layer], torch.Tensor]", layers: "list[Layer]", plan: Plan, tolerance: float
) -> Callable[[], object]:
    """One layer after the other; the first was exact to this relative error."""
    layer = layers[0]
    exact = attend_dense(
        plan, layer.queries, [layer.segment], layer.live, scale=layer.geometry.head_dim**-0.5
    ).output
    found = attend(layer).reshape(exact.shape)
    error = float((found.double() - exact).norm() / exact.norm())
    if not error <= tolerance:
        raise RuntimeError(f"relative error {error:.2e}, at most {tolerance:.0e}")
    return lambda: [attend(layer) for layer in layers]


class Layer:
    """Tensors of one layer for every contender: the same numbers, in bfloat16 or K16/V8."""

    def __init__(
        self,
        geometry: Geometry,
        representation: Representation,
        batch: int,
        length: int,
        table: torch.Tensor,
        page_ids: torch.Tensor,
        generator: torch.Generator,
    ) -> None:
        self.geometry, self.batch = geometry, batch
        heads, kv_heads, dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        keys, values = random(kv_heads, length, dim), random(kv_heads, length, dim)
        stored, scale = values, None
        if representation is K16V8:
            # What others read is the same numbers, as near as bfloat16 allows.
            stored, scale = quantise_values(values, by_channel=True)
            values = dequantise_values(stored, scale).to(torch.bfloat16)
        self.segment = SegmentTensors(paged(keys, page_ids), paged(stored, page_ids), scale)
        self.queries = random(batch, heads, dim)
        # As vLLM lays out its cache on a CPU: keys of a block, transposed, then its values.
        num_shared = length // BLOCK_SIZE
        cache = random(batch + num_shared, kv_heads, 2 * BLOCK_SIZE, dim)
        in_blocks = kv_heads, num_shared, BLOCK_SIZE, dim
        self._key_cache, self._value_cache = cache.chunk(2, dim=2)
        transposed = cache.as_strided(self._key_cache.shape, (*cache.stride()[:2], 1, BLOCK_SIZE))
        shared = slice(batch, None)
        transposed[shared] = keys.view(in_blocks).transpose(0, 1)
        self._value_cache[shared] = values.view(in_blocks).transpose(0, 1)
        self.live = LiveTensors(transposed[:batch], self._value_cache[:batch], table)
        self._table = torch.cat(
            [torch.arange(batch, batch + num_shared).int().expand(batch, -1), table], dim=1
        )
        own = [self.live.gather(request, NUM_LIVE) for request in range(batch)]
        self._own_keys, self._own_values = (
            torch.stack([torch.cat([part, one[index]], dim=1) for one in own])
            for index, part in enumerate((keys, values))
        )
        # The queries of a group as rows: the fastest way to ask SDPA for one query per request.
        self._grouped = self.queries.view(batch, kv_heads, heads // kv_heads, dim)
        self._output = torch.empty(batch, heads, dim, dtype=torch.bfloat16)
        self._starts = torch.arange(batch + 1, dtype=torch.int32)
        self._lengths = torch.full((batch,), length + NUM_LIVE, dtype=torch.int32)
        self._schedule = vllm_schedule(geometry, self._lengths, self._starts)

    def attend_copies(self) -> torch.Tensor:
        """SDPA over keys and values of each request, which were copied there before."""
        return F.scaled_dot_product_attention(self._grouped, self._own_keys, self._own_values)

    def attend_vllm(self) -> torch.Tensor:
        """The engine's own kernel; all requests' tables name the same blocks."""
        operations()[0].cpu_attention_with_kv_cache(
            query=self.queries,
            key_cache=self._key_cache,
            value_cache=self._value_cache,
            output=self._output,
            query_start_loc=self._starts,
            seq_lens=self._lengths,
            scale=self.geometry.head_dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._table,
            softcap=0.0,
            scheduler_metadata=self._schedule,
            s_aux=None,
        )
        return self._output


def paged(rows: torch.Tensor, page_ids: torch.Tensor) -> PagedRows:
    """Rows on pages in shuffled order."""
    storage = torch.empty(
        page_ids.shape[0], rows.shape[0], BLOCK_SIZE, rows.shape[2], dtype=rows.dtype
    )
    # e4m3 has no indexing of its own.
    by_page = rows.view(torch.uint8).view(rows.shape[0], -1, BLOCK_SIZE, rows[0, 0].nbytes)
    storage.view(torch.uint8)[page_ids] = by_page.transpose(0, 1)
    return PagedRows(storage, page_ids)


@functools.cache
def operations() -> tuple[Any, Any]:
    """Operations of vLLM, and its choice of a kernel; loading them takes seconds."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm._custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return vllm._custom_ops, _get_attn_isa


def vllm_schedule(geometry: Geometry, lengths: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """What vLLM makes once for each step."""
    ops, choose_isa = operations()
    found: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=lengths.shape[0],
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        seq_lens=lengths,
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=choose_isa(torch.bfloat16, BLOCK_SIZE, geometry.head_dim),
        enable_kv_split=True,
    )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
