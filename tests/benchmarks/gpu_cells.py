"""Batches of the GPU benchmark: tensors of some layers, and who computes their attention how.

Owns the shapes, the contenders and the bytes that each has to read. Refuses clocks and verdicts.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from cartridge_kernels.flashinfer_backend import WORKSPACE_BYTES, FlashInferBackend
from cartridge_kernels.plan import (
    LiveTensors,
    PagedRows,
    Plan,
    Representation,
    RequestShape,
    Segment,
    SegmentTensors,
)
from cartridge_kernels.triton_backend import Tiles, TritonBackend

PAGE_TOKENS = 64


@dataclass(frozen=True)
class Geometry:
    """Heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        """As rows spell it."""
        return f"{self.num_heads}x{self.num_kv_heads}x{self.head_dim}"


@dataclass(frozen=True)
class Cell:
    """One decoding step: request i reads the segments `seen[i % len(seen)]` and its live tokens."""

    geometry: Geometry
    batch: int
    segments: tuple[int, ...]
    seen: tuple[tuple[int, ...], ...] = ((0,),)
    num_live: int = 256

    @property
    def name(self) -> str:
        """As rows spell it."""
        tokens = "+".join(map(str, self.segments))
        return f"{self.geometry.name}/B{self.batch}/T{tokens}"

    @property
    def is_one_segment(self) -> bool:
        """Whether all requests read the same one segment, as stock cascades want it."""
        return len(self.segments) == 1

    def num_prefix(self, request: int) -> int:
        """Tokens of segments that a request reads."""
        return sum(self.segments[index] for index in self.seen[request % len(self.seen)])

    def plan(self, representation: Representation) -> Plan:
        """The step."""
        return Plan(
            tuple(Segment(length, 0, representation) for length in self.segments),
            tuple(
                RequestShape(1, self.num_live, self.seen[index % len(self.seen)])
                for index in range(self.batch)
            ),
        )

    def unshared_plan(self) -> Plan:
        """The same keys, each request with segments of its own: nothing is read together."""
        pairs = [
            (request, segment)
            for request in range(self.batch)
            for segment in self.seen[request % len(self.seen)]
        ]
        return Plan(
            tuple(Segment(self.segments[s], 0, Representation.FULL) for _, s in pairs),
            tuple(
                RequestShape(
                    1, self.num_live, tuple(i for i, (owner, _) in enumerate(pairs) if owner == r)
                )
                for r in range(self.batch)
            ),
        )

    @property
    def _head_numbers(self) -> int:
        return self.geometry.num_kv_heads * self.geometry.head_dim

    @property
    def _own_bytes(self) -> int:
        """Live keys and values, queries and answers."""
        live = self.batch * self.num_live * self._head_numbers * 4
        return live + self.batch * self.geometry.num_heads * self.geometry.head_dim * 6

    @property
    def full_bytes(self) -> int:
        """That one layer must read and write: shared segments once, in bfloat16."""
        return sum(self.segments) * self._head_numbers * 4 + self._own_bytes

    @property
    def k16v8_bytes(self) -> int:
        """With values of one byte."""
        return sum(self.segments) * self._head_numbers * 3 + self._own_bytes

    @property
    def copied_bytes(self) -> int:
        """With a copy for each request, in bfloat16."""
        tokens = sum(self.num_prefix(request) for request in range(self.batch))
        return tokens * self._head_numbers * 4 + self._own_bytes


@dataclass(frozen=True)
class Layer:
    """Tensors of one layer: a pool of pages for segments and live tokens; codes for segments."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    codes: torch.Tensor
    scale: torch.Tensor


class Batch:
    """A cell's tensors on a device. Pages are shuffled; all layers have the same ones."""

    def __init__(self, cell: Cell, num_layers: int, device: torch.device) -> None:
        self.cell = cell
        self.device = device
        self.scale = cell.geometry.head_dim**-0.5
        counts = [-(-length // PAGE_TOKENS) for length in cell.segments]
        num_blocks = -(-cell.num_live // PAGE_TOKENS)
        num_pages = sum(counts) + cell.batch * num_blocks
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(num_pages, generator=generator).to(device)
        self.segment_pages = [
            order[sum(counts[:index]) : sum(counts[: index + 1])] for index in range(len(counts))
        ]
        self.block_table = order[sum(counts) :].view(cell.batch, num_blocks).to(torch.int32)
        self.layers = [self._layer(num_pages, seed) for seed in range(num_layers)]

    def _layer(self, num_pages: int, seed: int) -> Layer:
        geometry = self.cell.geometry
        generator = torch.Generator(self.device).manual_seed(seed)
        pool = num_pages, geometry.num_kv_heads, PAGE_TOKENS, geometry.head_dim

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(
                *shape, generator=generator, device=self.device, dtype=torch.bfloat16
            )

        scale = 0.5 + torch.rand(
            geometry.num_kv_heads, geometry.head_dim, generator=generator, device=self.device
        )
        return Layer(
            randn(self.cell.batch, geometry.num_heads, geometry.head_dim),
            randn(*pool),
            randn(*pool),
            randn(*pool).to(torch.float8_e4m3fn),
            scale,
        )

    def live(self, layer: Layer) -> LiveTensors:
        """Live tokens as `attend` takes them."""
        return LiveTensors(layer.keys, layer.values, self.block_table)

    def segment(self, layer: Layer, index: int, representation: Representation) -> SegmentTensors:
        """One segment as `attend` takes it."""
        pages = self.segment_pages[index]
        keys = PagedRows(layer.keys, pages)
        if representation is Representation.FULL:
            return SegmentTensors(keys, PagedRows(layer.values, pages))
        return SegmentTensors(keys, PagedRows(layer.codes, pages), layer.scale)

    def segments(self, layer: Layer, representation: Representation) -> list[SegmentTensors]:
        """All segments as `attend` takes them."""
        return [
            self.segment(layer, index, representation) for index in range(len(self.segment_pages))
        ]

    def rows(self, layer: Layer, request: int, representation: Representation) -> torch.Tensor:
        """All that a request sees, [2, num_kv_heads, tokens, head_dim].

        In bfloat16; with K16/V8 in float32, dequantised.
        """
        cell = self.cell
        keys, values = [], []
        for index in cell.seen[request % len(cell.seen)]:
            pages, num_tokens = self.segment_pages[index], cell.segments[index]
            keys.append(layer.keys[pages].transpose(0, 1).flatten(1, 2)[:, :num_tokens])
            is_full = representation is Representation.FULL
            pool = layer.values if is_full else layer.codes.view(torch.uint8)
            found = pool[pages].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
            if not is_full:
                found = found.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
                found = found * layer.scale[:, None, :]
            values.append(found)
        live_keys, live_values = self.live(layer).gather(request, cell.num_live)
        dtype = values[0].dtype
        return torch.stack(
            [
                torch.cat([*keys, live_keys], dim=1).to(dtype),
                torch.cat([*values, live_values.to(dtype)], dim=1),
            ]
        )

    def oracle(self, layer: Layer, request: int, representation: Representation) -> torch.Tensor:
        """One request's answer in float64, [num_heads, head_dim]."""
        geometry = self.cell.geometry
        keys, values = self.rows(layer, request, representation).to(torch.float64)
        queries = layer.queries[request].to(torch.float64)
        grouped = queries.view(geometry.num_kv_heads, -1, geometry.head_dim)
        weights = torch.softmax(grouped @ keys.transpose(1, 2) * self.scale, dim=-1)
        found: torch.Tensor = weights @ values
        return found.view(geometry.num_heads, -1)

    @cached_property
    def copies(self) -> list[torch.Tensor]:
        """By layer: [2, batch, num_kv_heads, tokens, head_dim], all requests of one length."""
        lengths = {self.cell.num_prefix(request) for request in range(self.cell.batch)}
        assert len(lengths) == 1, "copies in one tensor are of one length"
        return [
            torch.stack(
                [
                    self.rows(layer, request, Representation.FULL)
                    for request in range(self.cell.batch)
                ],
                dim=1,
            )
            for layer in self.layers
        ]


@dataclass(frozen=True)
class Contender:
    """One way to compute a layer's attention.

    Attributes:
        run: from the number of a layer to outputs [batch, num_heads, head_dim].
        num_bytes: that it has to read for a layer.
    """

    name: str
    representation: Representation
    run: Callable[[int], torch.Tensor]
    num_bytes: int


def over_copies(batch: Batch, backend: SDPBackend | None) -> Contender:
    """Scaled dot product attention over a bfloat16 copy for each request.

    The heads of a group are rows of one query, so that no kernel reads a copy more than once.
    """
    geometry = batch.cell.geometry
    shape = (batch.cell.batch, geometry.num_kv_heads, -1, geometry.head_dim)

    def run(index: int) -> torch.Tensor:
        keys, values = batch.copies[index]
        queries = batch.layers[index].queries
        if backend is None:
            found = functional.scaled_dot_product_attention(queries.view(shape), keys, values)
        else:
            with sdpa_kernel(backend):
                found = functional.scaled_dot_product_attention(queries.view(shape), keys, values)
        return found.reshape(queries.shape)

    return Contender(copies_name(backend), Representation.FULL, run, batch.cell.copied_bytes)


def copies_name(backend: SDPBackend | None) -> str:
    """As rows spell it."""
    kind = "default" if backend is None else backend.name.removesuffix("_ATTENTION").lower()
    return f"copies/{kind}"


def ours(
    batch: Batch,
    representation: Representation,
    *,
    interpret: bool | None = None,
    tiles: Tiles | None = None,
    chunk_tokens: int | None = None,
) -> Contender:
    """The Triton programs."""
    plan = batch.cell.plan(representation)
    backend = TritonBackend(interpret=interpret, tiles=tiles, chunk_tokens=chunk_tokens)

    def run(index: int) -> torch.Tensor:
        layer = batch.layers[index]
        segments = batch.segments(layer, representation)
        return backend.attend(
            plan, layer.queries, segments, batch.live(layer), scale=batch.scale
        ).output

    cell = batch.cell
    num_bytes = cell.full_bytes if representation is Representation.FULL else cell.k16v8_bytes
    return Contender(f"triton/{representation}", representation, run, num_bytes)


def ours_unshared(batch: Batch, *, interpret: bool | None = None) -> Contender:
    """The same programs over the same pages, which each request reads for itself.

    That is what blocks shared by a prefix cache give.
    """
    plan = batch.cell.unshared_plan()
    cell = batch.cell
    patterns = [cell.seen[request % len(cell.seen)] for request in range(cell.batch)]
    order = [index for pattern in patterns for index in pattern]
    backend = TritonBackend(interpret=interpret)

    def run(index: int) -> torch.Tensor:
        layer = batch.layers[index]
        parts = [batch.segment(layer, each, Representation.FULL) for each in order]
        return backend.attend(
            plan, layer.queries, parts, batch.live(layer), scale=batch.scale
        ).output

    return Contender("triton/unshared", Representation.FULL, run, cell.copied_bytes)


def flashinfer_by_plan(batch: Batch) -> Contender:
    """Our backend over FlashInfer's wrappers."""
    plan = batch.cell.plan(Representation.FULL)
    backend = FlashInferBackend()

    def run(index: int) -> torch.Tensor:
        layer = batch.layers[index]
        segments = batch.segments(layer, Representation.FULL)
        return backend.attend(
            plan, layer.queries, segments, batch.live(layer), scale=batch.scale
        ).output

    return Contender("flashinfer/by-plan", Representation.FULL, run, batch.cell.full_bytes)


def flashinfer_cascade(batch: Batch) -> Contender:
    """FlashInfer's own cascade: one level for the segment, one for the live tokens."""
    flashinfer = importlib.import_module("flashinfer")
    cell, geometry = batch.cell, batch.cell.geometry
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=batch.device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "HND")

    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=batch.device)

    def last_page(num_tokens: int) -> int:
        return (num_tokens - 1) % PAGE_TOKENS + 1

    num_blocks = batch.block_table.shape[1]
    wrapper.plan(
        [numbers(0, cell.batch), numbers(*range(cell.batch + 1))],
        [
            numbers(0, len(batch.segment_pages[0])),
            numbers(*range(0, cell.batch * num_blocks + 1, num_blocks)),
        ],
        [batch.segment_pages[0].to(torch.int32), batch.block_table.flatten()],
        [numbers(last_page(cell.segments[0])), numbers(*[last_page(cell.num_live)] * cell.batch)],
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        PAGE_TOKENS,
        sm_scale=batch.scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )

    def run(index: int) -> torch.Tensor:
        layer = batch.layers[index]
        found: torch.Tensor = wrapper.run(layer.queries, (layer.keys, layer.values))
        return found

    return Contender("flashinfer/cascade", Representation.FULL, run, cell.full_bytes)


def contenders(batch: Batch, *, interpret: bool) -> dict[str, Callable[[], Contender]]:
    """What runs on a batch, by name; made only when its turn has come.

    All of a GPU's without `interpret`; with it those that any machine has.
    """
    found: dict[str, Callable[[], Contender]] = {
        "triton/k16v8": partial(ours, batch, Representation.K16V8, interpret=interpret or None),
        "triton/full": partial(ours, batch, Representation.FULL, interpret=interpret or None),
        "triton/unshared": partial(ours_unshared, batch, interpret=interpret or None),
    }
    if interpret:
        return {**found, "copies/default": partial(over_copies, batch, None)}
    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ):
        found[copies_name(backend)] = partial(over_copies, batch, backend)
    if importlib.util.find_spec("flashinfer") is not None:
        found["flashinfer/by-plan"] = partial(flashinfer_by_plan, batch)
        if batch.cell.is_one_segment:
            found["flashinfer/cascade"] = partial(flashinfer_cascade, batch)
    return found


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the exact tensor; infinite for NaN."""
    error = float((found.to(torch.float64) - exact).norm() / exact.norm())
    return math.inf if math.isnan(error) else error
