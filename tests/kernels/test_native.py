"""The C kernel for CPUs, against one softmax in float64; how it is built, when it is refused."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from cartridge_kernels import native
from cartridge_kernels.backends import BackendUnavailable, available_backends, open_backend
from cartridge_kernels.native import (
    VARIANTS,
    BuildError,
    NativeBackend,
    build,
    library_path,
    taken_variant,
)
from cartridge_kernels.reference import attend_dense
from tests.contracts.attention_backend import AttentionBackendContract, assert_close
from tests.kernels.attention_cases import (
    K16V8,
    AttentionCase,
    Geometry,
    SegmentCase,
    as_vllm_lays_out,
    make_inputs,
)

CPU = torch.device("cpu")
can_build = pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")


def variant_of(name: str) -> NativeBackend:
    """The kernel for one instruction set; skips, naming what this CPU has not."""
    build()
    backend = NativeBackend(name)
    reason = backend.unavailable_reason(CPU)
    if reason is not None:
        pytest.skip(reason)
    return backend


@can_build
@pytest.mark.parametrize("variant", VARIANTS)
class TestNative(AttentionBackendContract):
    """The contract, for each instruction set."""

    @pytest.fixture
    def backend(self, variant: str) -> NativeBackend:
        """The kernel under test."""
        return variant_of(variant)


WIDE = Geometry(6, 2, 128, 128)
LONG = [SegmentCase(300, K16V8, page_tokens=128), SegmentCase(140, page_tokens=16, first_row=5)]


@can_build
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("readers", [1, 2, 5, 18])
def test_widths_of_models(variant: str, query_dtype: torch.dtype, readers: int) -> None:
    """Few rows and many, over several tiles: what is read in place, copied or multiplied in pairs.

    Queries that are not bfloat16 numbers lose nothing either.
    """
    case = AttentionCase(
        "wide",
        [(1, 129, (0, 1)), *[(1, 7, (1, 0))] * (readers - 1)],
        LONG,
        WIDE,
        block_size=64,
        query_dtype=query_dtype,
        live_dtype=torch.bfloat16,
    )
    backend = variant_of(variant)
    for inputs in (make_inputs(case), as_vllm_lays_out(make_inputs(case, seed=1))):
        arguments = (inputs.plan, inputs.queries, inputs.segments, inputs.live)
        found = backend.attend(*arguments, scale=inputs.scale)
        exact = attend_dense(*arguments, scale=inputs.scale)
        assert_close(found, exact, output=5e-6, lse=2e-5)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without a library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_says_how_to_build_it(empty_cache: Path) -> None:
    """Not built is a reason with a command; serving compiles nothing."""
    with pytest.raises(BackendUnavailable, match=r"not built: run python -m cartridge_kernels"):
        open_backend("native", CPU)
    assert list(empty_cache.iterdir()) == []


def test_auto_takes_torch_where_it_is_not_built(empty_cache: Path) -> None:
    """The choice goes on to the next kernel, and what is missing can be asked for."""
    assert open_backend("auto", CPU).name == "cpu"
    reasons = available_backends(CPU)
    assert reasons["cpu"] is None
    assert "not built" in str(reasons["native"])


@can_build
def test_the_command_builds_it_where_it_is_looked_for(empty_cache: Path) -> None:
    """All variants are made, the path of the best that this CPU has is printed; `auto` takes it."""
    done = subprocess.run(
        [sys.executable, "-m", "cartridge_kernels.native"],
        capture_output=True,
        text=True,
        check=True,
    )
    paths = {library_path(variant) for variant in VARIANTS}
    assert Path(done.stdout.strip()) == library_path(taken_variant())
    assert {file for file in empty_cache.rglob("*") if file.is_file()} <= paths
    assert library_path("avx2").exists()
    assert open_backend("auto", CPU).name == "native"


def test_no_compiler_is_no_failure(
    empty_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says so and succeeds: other kernels do the same."""
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.delenv("CC", raising=False)
    assert native.main() == 0
    assert "no C compiler" in capsys.readouterr().out
    assert not list(empty_cache.rglob("*.so"))


@can_build
def test_a_cache_that_cannot_be_written_is_no_failure(
    empty_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Set-up goes on: the command names the path and succeeds."""
    (empty_cache / "cartridge-router").write_bytes(b"")
    assert native.main() == 0
    assert str(empty_cache / "cartridge-router") in capsys.readouterr().out


@can_build
def test_a_source_that_does_not_compile(empty_cache: Path) -> None:
    """The compiler's words come back, and nothing stays behind."""
    with (
        patch.object(native, "_source", return_value=b"this is not C"),
        pytest.raises(BuildError, match=r"failed: .*error"),
    ):
        build()
    assert list((empty_cache / "cartridge-router" / "kernels").iterdir()) == []


def test_another_source_is_another_library(empty_cache: Path) -> None:
    """A library of an older version is never taken for this one."""
    before = library_path("avx2")
    assert library_path("avx512") != before
    with patch.object(native, "_source", return_value=b"int x;"):
        assert library_path("avx2") != before
    with patch.object(native, "FLAGS", ("-O0",)):
        assert library_path("avx2") != before


def test_a_library_that_others_can_write_is_refused(empty_cache: Path) -> None:
    """Code of anybody would run in the engine: it is not even loaded."""
    for variant in VARIANTS:
        library_path(variant).parent.mkdir(parents=True, exist_ok=True)
        library_path(variant).write_bytes(b"")
        library_path(variant).chmod(0o777)
        assert "can be written by others" in str(NativeBackend(variant).unavailable_reason(CPU))
    assert "can be written by others" in str(NativeBackend().unavailable_reason(CPU))


@can_build
def test_a_compiler_that_knows_less(empty_cache: Path) -> None:
    """What it cannot compile is left out, and AVX2 serves."""
    with patch.dict(native.VARIANTS, avx512=("-mno-such",), avx512bf16=("-mno-such",)):
        assert build() == library_path("avx2")
        assert taken_variant() == "avx2"
        assert NativeBackend().unavailable_reason(CPU) is None
        assert "not built" in str(NativeBackend("avx512").unavailable_reason(CPU))


def test_what_is_no_library_is_a_reason(empty_cache: Path) -> None:
    """A broken file is refused by name, not by a crash."""
    path = library_path("avx2")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    path.chmod(0o755)
    assert str(path) in str(NativeBackend().unavailable_reason(CPU))


def test_a_cache_that_cannot_be_looked_into_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` goes on to the next kernel where the cache folder is none or another user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x" * 300)
    assert "too long" in str(NativeBackend().unavailable_reason(CPU))
    assert open_backend("auto", CPU).name == "cpu"

    def nobodys() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobodys)
    assert "set XDG_CACHE_HOME" in str(NativeBackend().unavailable_reason(CPU))
    assert open_backend("auto", CPU).name == "cpu"
    assert native.main() == 0


def test_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another CPU nor another kind of device can run it, nor is it built there."""
    assert "device cuda" in str(NativeBackend().unavailable_reason(torch.device("cuda")))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert NativeBackend().unavailable_reason(CPU) == "CPU is aarch64, x86-64 wanted"
    with pytest.raises(BuildError, match="aarch64"):
        build()


@can_build
def test_a_cpu_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself asks the CPU; what it lacks is a reason, and less may do."""
    build()

    class Old:
        """A library on an old CPU."""

        @staticmethod
        def cartridge_cpu_suits() -> int:
            """Whether it suits."""
            return 0

    real = native._loaded
    monkeypatch.setattr(
        native, "_loaded", lambda path: Old if "avx512" in path.name else real(path)
    )
    assert taken_variant() == "avx2"
    reason = NativeBackend("avx512bf16").unavailable_reason(CPU)
    assert reason == "CPU has no AVX-512 with BW, DQ, VL and BF16"
    monkeypatch.setattr(native, "_loaded", lambda path: Old)
    assert NativeBackend().unavailable_reason(CPU) == "CPU has no AVX2, FMA and F16C"
