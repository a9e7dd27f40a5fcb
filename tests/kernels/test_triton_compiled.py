"""The Triton programs, compiled for an H100 or H200 without one: how they load keys and values.

Owns the check that tiles come in loads of 16 bytes, ahead of their use. One missing hint in the
source makes them loads of single numbers: still right, several times slower.
"""

import re
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cartridge_kernels import triton_backend
from cartridge_kernels.triton_backend import Tiles, TritonBackend, kernels
from tests.kernels.attention_cases import K16V8 as K16V8_VALUES
from tests.kernels.attention_cases import AttentionCase, SegmentCase, make_inputs

ARGUMENTS = {
    "queries": "*bf16",
    "query_row_stride": "i32",
    "query_head_stride": "i32",
    "items": "*i32",
    "sources": "*i64",
    "pages": "*i32",
    "slot_rows": "*i32",
    "outputs": "*fp32",
    "lses": "*fp32",
    "score_scale": "fp32",
}
FULL = (tl.bfloat16, tl.bfloat16, 0)
K16V8 = (tl.bfloat16, tl.float8e4nv, 1)


def tile_sizes(head_dim: int) -> dict[str, int]:
    """Of 16 rows of four heads."""
    return Tiles().constants(group=4, key_dim=head_dim, value_dim=head_dim, rows_per_item=16)


def compiled(kinds: tuple[Any, ...], head_dim: int, *, is_aligned: bool = True) -> dict[str, str]:
    """Texts of the stages of compilation of the partial program for compute capability 9.0."""
    program = kernels(interpret=False).partial_kernel
    constants = {
        "KINDS": kinds,
        "NUM_KINDS": len(kinds),
        "PAGE_TOKENS": 0,
        "ALIGNED": is_aligned,
        "UPCAST": False,
        **tile_sizes(head_dim),
    }
    signature = {**ARGUMENTS, **dict.fromkeys(constants, "constexpr")}
    aligned = [name for name in ARGUMENTS if name != "score_scale"]
    attributes = {(program.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(program, signature, constants, attributes)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=Tiles().options)
    return {stage: text for stage, text in found.asm.items() if isinstance(text, str)}


def copied_tiles(ttgir: str) -> Counter[str]:
    """Types of the two-dimensional tiles that are copied asynchronously, and how often."""
    return Counter(
        re.findall(r"ttg\.async_copy_global_to_local .*: tensor<\d+x\d+x!tt\.ptr<(\w+)>", ttgir)
    )


def loaded_tiles(ttgir: str) -> Counter[str]:
    """Types of the two-dimensional tiles that are loaded into registers, and how often."""
    return Counter(re.findall(r"tt\.load .*: tensor<\d+x\d+x!tt\.ptr<(\w+)>", ttgir))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("kinds", "copies"),
    [
        ((FULL,), {"bf16": 4}),
        ((K16V8,), {"bf16": 2, "f8E4M3FN": 2}),
        ((K16V8, FULL), {"bf16": 6, "f8E4M3FN": 2}),
    ],
    ids=["full", "k16v8", "both"],
)
def test_tiles_come_16_bytes_at_a_time(
    kinds: tuple[Any, ...], head_dim: int, copies: dict[str, int]
) -> None:
    """Keys and values are copied ahead of their use, 16 bytes a copy, none number by number."""
    texts = compiled(kinds, head_dim)
    # Once before the loop and once in it, for each of keys and values.
    assert copied_tiles(texts["ttgir"]) == copies
    # Queries alone.
    assert loaded_tiles(texts["ttgir"]) == {"bf16": len(kinds)}
    # Numbers of pages are copied ahead too, 4 bytes each; everything else is 16.
    widths = Counter(re.findall(r"cp\.async\.c[ag]\.shared\.global .*?, (0x\w+)", texts["ptx"]))
    assert set(widths) == {"0x4", "0x10"}
    num_threads = 32 * Tiles().num_warps
    numbers_per_thread = tile_sizes(head_dim)["BLOCK_N"] * head_dim // num_threads
    bytes_per_thread = numbers_per_thread * (2 * copies["bf16"] + copies.get("f8E4M3FN", 0))
    assert widths["0x10"] * 16 == bytes_per_thread
    assert not re.search(r"ld\.global[.\w:]*\.[bsuf](8|16)\b", texts["ptx"])


@pytest.mark.parametrize(
    "kind",
    [
        (tl.float16, tl.float16, 0),
        (tl.float16, tl.float8e4nv, 2),
        (tl.float32, tl.float32, 0),
        (tl.float32, tl.float8e4nv, 1),
    ],
    ids=str,
)
def test_other_types_compile(kind: tuple[Any, ...]) -> None:
    """Every pair of types that a segment may have gives a program, with tiles copied ahead."""
    assert sum(copied_tiles(compiled((kind,), 64)["ttgir"]).values()) == 4


def test_merging_compiles() -> None:
    """The second launch is a program for the same GPU."""
    program = kernels(interpret=False).merge_kernel
    pointers = ["slot_outputs", "slot_lses", "row_slots", "row_starts", "outputs", "lses"]
    types = ["*fp32", "*fp32", "*i32", "*i32", "*fp32", "*fp32"]
    constants = {"VALUE_DIM": 128, "BLOCK_V": 128, "BLOCK_SLOTS": 16}
    signature = {
        **dict(zip(pointers, types, strict=True)),
        **dict.fromkeys(constants, "constexpr"),
    }
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    found = triton.compile(
        ASTSource(program, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options={"enable_fp_fusion": True},
    )
    assert re.search(r"ld\.global[.\w:]*\.v4\.b32", found.asm["ptx"])


class UnreachableGpu:
    """A driver for which Triton compiles, and which launches nothing."""

    def get_current_target(self) -> GPUTarget:
        """An H100 or H200."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Its own."""
        return 0


class CompiledOnly:
    """Stands for a program: compiles what a launch would, from a launch's arguments."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return partial(self.program.warmup, grid=grid)


@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_launches_compile_as_they_are_made(
    monkeypatch: pytest.MonkeyPatch, query_dtype: torch.dtype
) -> None:
    """Two launches with the very arguments of a call give two programs for a GPU."""
    monkeypatch.setattr(triton.runtime.driver, "_active", UnreachableGpu())
    found = kernels(interpret=False)
    launches = SimpleNamespace(**vars(found))
    launches.partial_kernel = CompiledOnly(found.partial_kernel)
    launches.merge_kernel = CompiledOnly(found.merge_kernel)
    monkeypatch.setattr(triton_backend, "kernels", lambda *, interpret: launches)
    inputs = make_inputs(
        AttentionCase(
            "batch",
            [(1, 14, (0, 1)), (4, 4, (0,))],
            [SegmentCase(40, K16V8_VALUES), SegmentCase(24)],
            query_dtype=query_dtype,
            live_dtype=torch.bfloat16,
        )
    )
    backend = TritonBackend(interpret=False)
    backend.attend(inputs.plan, inputs.queries, inputs.segments, inputs.live, scale=inputs.scale)
    # Two segments and two live parts over two KV heads; five rows of four heads.
    assert launches.partial_kernel.grids == [(4, 2)]
    assert launches.merge_kernel.grids == [(5, 4)]


def test_the_check_finds_loads_of_single_numbers() -> None:
    """Without the hints, which rows that are not aligned forbid, it would fail."""
    texts = compiled((FULL,), 128, is_aligned=False)
    assert copied_tiles(texts["ttgir"]) == {}
    assert re.search(r"ld\.global[.\w:]*\.b16\b", texts["ptx"])
