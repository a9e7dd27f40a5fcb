"""Attention on an x86-64 CPU by a small C library, compiled when the package is installed.

One source becomes a library for each instruction set, and a process takes the first that its CPU
has.

Owns the build (`python -m cartridge_kernels.native`), the choice of library and every check before
pointers cross. Refuses to compile while serving, a library that others could have written, and
page ids outside of the tensor they index.
"""

import ctypes
import functools
import hashlib
import importlib.resources
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from cartridge_kernels.plan import (
    Attended,
    InvalidPlan,
    LiveTensors,
    Plan,
    SegmentTensors,
    check_page_ids,
    check_tensors,
)

FLAGS: Final = ("-O3", "-std=c11", "-mavx2", "-mfma", "-mf16c", "-shared", "-fPIC")
_AVX512: Final = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
VARIANTS: Final = {
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": (),
}
"""Flags of each library beside `FLAGS`; the best first."""
_INSTRUCTIONS: Final = {
    "avx512bf16": "AVX-512 with BW, DQ, VL and BF16",
    "avx512": "AVX-512 with BW, DQ and VL",
    "avx2": "AVX2, FMA and F16C",
}
_BUILD_COMMAND: Final = "python -m cartridge_kernels.native"
_TYPES: Final = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
}
_LOG2_E: Final = 1.4426950408889634


class BuildError(Exception):
    """The library cannot be made here; the text says why."""


class _Storage(ctypes.Structure):
    """As in csrc/segment_attention.c."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
        ("page_rows", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class _Part(ctypes.Structure):
    """As in csrc/segment_attention.c."""

    _fields_ = (
        ("keys", ctypes.c_int64),
        ("values", ctypes.c_int64),
        ("key_pages", ctypes.c_void_p),
        ("value_pages", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("first_key", ctypes.c_int64),
        ("first_value", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("is_causal", ctypes.c_int64),
        ("first_seen", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
        ("scale_kind", ctypes.c_int64),
    )


class NativeBackend:
    """See the module; float32 results, whatever the inputs. One thread, without the GIL."""

    name = "native"

    def __init__(self, variant: str | None = None) -> None:
        """The best variant that this CPU has, or the one that is named."""
        self._variant = variant
        self._prepared: _Prepared | None = None
        self._library: ctypes.CDLL | None = None

    def unavailable_reason(self, device: torch.device) -> str | None:
        """What is missing: another kind of device, the library, or instructions of this CPU."""
        if device.type != "cpu":
            return f"device {device.type}, cpu wanted"
        if platform.machine() not in ("x86_64", "AMD64"):
            return f"CPU is {platform.machine()}, x86-64 wanted"
        try:
            _load(self._variant)
        except BuildError as error:
            return str(error)
        return None

    def attend(
        self,
        plan: Plan,
        queries: torch.Tensor,
        segments: Sequence[SegmentTensors],
        live: LiveTensors,
        *,
        scale: float,
    ) -> Attended:
        """See `cartridge_kernels.reference.attend`."""
        check_tensors(plan, queries, segments, live)
        if queries.device.type != "cpu":
            raise InvalidPlan(f"queries: on {queries.device}; cpu wanted")
        prepared = self._prepared
        if prepared is None or not prepared.is_for(plan, segments, live):
            prepared = self._prepared = _Prepared(plan, segments, live)
        storages, kept = prepared.point_at(segments, live)
        asked = queries.detach().to(torch.float32).contiguous()
        rows, heads, dim = asked.shape
        value_dim = live.values.shape[3]
        output = torch.empty(rows, heads, value_dim)
        lse, totals = torch.empty(rows, heads), torch.empty(rows, heads)
        if self._library is None:
            self._library = _load(self._variant)
        if self._library.cartridge_attend(
            storages,
            prepared.parts,
            len(prepared.parts),
            asked.data_ptr(),
            rows,
            heads,
            live.keys.shape[1],
            dim,
            value_dim,
            scale * _LOG2_E,
            output.data_ptr(),
            lse.data_ptr(),
            totals.data_ptr(),
        ):
            raise MemoryError("attention: no memory for a part's sums")
        # Pointers are into these until here.
        del kept
        return Attended(output, lse)


class _Prepared:
    """What a plan, its page ids and its block table say, as C reads it; once for all layers."""

    def __init__(self, plan: Plan, segments: Sequence[SegmentTensors], live: LiveTensors) -> None:
        check_page_ids(plan, segments, live)
        self._plan, self._table, self._block_size = plan, live.block_table, live.keys.shape[2]
        self._num_pages = _num_pages(segments, live)
        self._page_ids = [(s.keys.page_ids, s.values.page_ids) for s in segments]
        # Pointers of parts are into these.
        self._kept: list[torch.Tensor] = []
        parts: list[_Part] = []
        table = live.block_table.to("cpu", torch.int64)
        for index, request in enumerate(plan.requests):
            if not request.num_live:
                continue
            pages = self._keep(table[index, : -(-request.num_live // self._block_size)])
            parts.append(
                _Part(
                    keys=0,
                    values=1,
                    key_pages=pages,
                    value_pages=pages,
                    rows=self._keep(torch.arange(*plan.row_starts[index : index + 2])),
                    num_tokens=request.num_live,
                    num_rows=request.num_queries,
                    is_causal=1,
                    first_seen=request.num_live - request.num_queries,
                )
            )
        of_segment: list[int | None] = []
        for index, (readers, tensors) in enumerate(zip(plan.readers, segments, strict=True)):
            of_segment.append(len(parts) if readers else None)
            if readers:
                parts.append(self._segment_part(plan, index, tensors))
        self.parts = (_Part * len(parts))(*parts)
        self._of_segment = of_segment
        self._storages = (_Storage * (2 + 2 * len(segments)))()

    def _keep(self, ids: torch.Tensor) -> int:
        # A copy: what is read is what was checked, also where the caller's change in place.
        self._kept.append(ids.to("cpu", torch.int64, copy=True).contiguous())
        return self._kept[-1].data_ptr()

    def _segment_part(self, plan: Plan, index: int, tensors: SegmentTensors) -> _Part:
        rows = [
            row
            for request in plan.readers[index]
            for row in range(*plan.row_starts[request : request + 2])
        ]
        return _Part(
            keys=2 + 2 * index,
            values=3 + 2 * index,
            key_pages=self._keep(tensors.keys.page_ids),
            value_pages=self._keep(tensors.values.page_ids),
            rows=self._keep(torch.tensor(rows)),
            num_tokens=plan.segments[index].num_tokens,
            num_rows=len(rows),
        )

    def is_for(self, plan: Plan, segments: Sequence[SegmentTensors], live: LiveTensors) -> bool:
        return (
            self._plan is plan
            and self._table is live.block_table
            and self._block_size == live.keys.shape[2]
            # Ids were checked against these.
            and self._num_pages == _num_pages(segments, live)
            and all(
                tensors.keys.page_ids is keys and tensors.values.page_ids is values
                for tensors, (keys, values) in zip(segments, self._page_ids, strict=True)
            )
        )

    def point_at(
        self, segments: Sequence[SegmentTensors], live: LiveTensors
    ) -> tuple[ctypes.Array[_Storage], list[torch.Tensor]]:
        """Storages of one layer, and what has to live as long as they are read."""
        for storage, tensor in zip(self._storages, _tensors(segments, live), strict=True):
            _describe(storage, tensor)
        kept: list[torch.Tensor] = []
        for segment, part_index in zip(segments, self._of_segment, strict=True):
            if part_index is None:
                continue
            part = self.parts[part_index]
            part.first_key, part.first_value = segment.keys.first_row, segment.values.first_row
            if segment.value_scale is None:
                part.scale, part.scale_kind = None, 0
            else:
                kept.append(segment.value_scale.detach().to("cpu").contiguous())
                part.scale, part.scale_kind = kept[-1].data_ptr(), kept[-1].dim()
        return self._storages, kept


def _tensors(segments: Sequence[SegmentTensors], live: LiveTensors) -> list[torch.Tensor]:
    """In the order of the storages that parts name."""
    of_segments = [rows.storage for s in segments for rows in (s.keys, s.values)]
    return [live.keys, live.values, *of_segments]


def _num_pages(segments: Sequence[SegmentTensors], live: LiveTensors) -> list[int]:
    return [tensor.shape[0] for tensor in _tensors(segments, live)]


def _describe(storage: _Storage, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise InvalidPlan(f"keys or values on {tensor.device}; cpu wanted")
    size = tensor.element_size()
    storage.data = tensor.data_ptr()
    storage.page_rows, storage.dtype = tensor.shape[2], _TYPES[tensor.dtype]
    storage.page_stride, storage.head_stride, storage.row_stride, storage.column_stride = (
        stride * size for stride in tensor.stride()
    )


# --- the library ---------------------------------------------------------------------------------
def library_path(variant: str) -> Path:
    """Where the library of this source and these flags lies, made or not.

    Raises:
        BuildError: the user has no home.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise BuildError(f"no cache folder: {error} set XDG_CACHE_HOME") from error
    flags = FLAGS + VARIANTS[variant]
    digest = hashlib.sha256(repr(flags).encode() + _source()).hexdigest()[:16]
    return folder / "cartridge-router" / "kernels" / f"segment_attention-{variant}-{digest}.so"


def build() -> Path:
    """Compile the libraries that are not there; the path of the one that this CPU takes.

    All of them, because what is installed here may run on another machine. A compiler may be too
    old for all but AVX2.

    Raises:
        BuildError: there is no compiler, it fails, or this CPU is another kind.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"CPU is {platform.machine()}, x86-64 wanted")
    for variant in VARIANTS:
        path = library_path(variant)
        if path.exists():
            continue
        compiler = find_compiler()
        if compiler is None:
            raise BuildError("no C compiler: none of " + ", ".join(_compilers()))
        failure = _compile(compiler, FLAGS + VARIANTS[variant], path)
        if failure and not VARIANTS[variant]:
            raise BuildError(f"{compiler} failed: {failure[-500:]}")
    _load(None)
    return library_path(taken_variant())


def _compile(compiler: str, flags: Sequence[str], path: Path) -> str:
    """Put the library there; what the compiler says where it fails."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        source, made = Path(work, "segment_attention.c"), Path(work, "made.so")
        source.write_bytes(_source())
        done = subprocess.run(  # noqa: S603
            [compiler, *flags, "-o", str(made), str(source), "-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return done.stderr.strip() or "no reason given"
        made.chmod(0o755)
        made.replace(path)
    return ""


def taken_variant() -> str:
    """The best variant that is built and that this CPU has.

    Raises:
        BuildError: there is none.
    """
    reasons = []
    for variant in VARIANTS:
        try:
            _load(variant)
        except BuildError as error:
            reasons.append(error)
        else:
            return variant
    # The least that is wanted says most.
    raise reasons[-1]


def find_compiler() -> str | None:
    """`CC`, or one of the usual names; `None` where there is none."""
    return next(filter(None, map(shutil.which, _compilers())), None)


def _compilers() -> list[str]:
    return [*filter(None, [os.environ.get("CC")]), "cc", "gcc", "clang"]


def _source() -> bytes:
    return (
        importlib.resources.files("cartridge_kernels")
        .joinpath("csrc", "segment_attention.c")
        .read_bytes()
    )


@functools.cache
def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.cartridge_cpu_suits.restype = ctypes.c_int
    library.cartridge_attend.restype = ctypes.c_int
    library.cartridge_attend.argtypes = [
        *(ctypes.POINTER(_Storage), ctypes.POINTER(_Part), ctypes.c_int64, ctypes.c_void_p),
        *([ctypes.c_int64] * 5),
        ctypes.c_float,
        *([ctypes.c_void_p] * 3),
    ]
    return library


def _load(variant: str | None) -> ctypes.CDLL:
    if variant is None:
        variant = taken_variant()
    path = library_path(variant)
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise BuildError(f"not built: run {_BUILD_COMMAND} ({path} is not there)") from error
    except OSError as error:
        raise BuildError(str(error)) from error
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise BuildError(f"{path} can be written by others")
    try:
        library = _loaded(path)
    except OSError as error:
        raise BuildError(f"{path}: {error}") from error
    if not library.cartridge_cpu_suits():
        raise BuildError(f"CPU has no {_INSTRUCTIONS[variant]}")
    return library


def main() -> int:
    """Build, and say where; 0 also where it cannot, because other kernels do the same."""
    try:
        sys.stdout.write(f"{build()}\n")
    except (BuildError, OSError) as error:
        sys.stdout.write(f"attention kernel `native` not built: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
