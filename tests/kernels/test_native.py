"""The C kernel for CPUs, against one softmax in float64; how it is built, when it is refused."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from cartridge_kernels import native
from cartridge_kernels.backends import BackendUnavailable, available_backends, open_backend
from cartridge_kernels.native import BuildError, NativeBackend, build, library_path
from tests.contracts.attention_backend import AttentionBackendContract

CPU = torch.device("cpu")
can_build = pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")


@can_build
class TestNative(AttentionBackendContract):
    """The contract."""

    @pytest.fixture
    def backend(self) -> NativeBackend:
        """The kernel under test."""
        build()
        return NativeBackend()


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
    """`python -m cartridge_kernels.native` prints the path; then `auto` takes it."""
    done = subprocess.run(
        [sys.executable, "-m", "cartridge_kernels.native"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()) == library_path()
    assert library_path().is_relative_to(empty_cache)
    assert [file.name for file in library_path().parent.iterdir()] == [library_path().name]
    assert open_backend("auto", CPU).name == "native"


def test_no_compiler_is_no_failure(
    empty_cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command says so and succeeds: other kernels do the same."""
    monkeypatch.setenv("PATH", str(empty_cache))
    monkeypatch.delenv("CC", raising=False)
    assert native.main() == 0
    assert "no C compiler" in capsys.readouterr().out
    assert not library_path().exists()


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
    before = library_path()
    with patch.object(native, "_source", return_value=b"int x;"):
        assert library_path() != before
    with patch.object(native, "FLAGS", ("-O0",)):
        assert library_path() != before


@can_build
def test_a_library_that_others_can_write_is_refused(empty_cache: Path) -> None:
    """Code of anybody would run in the engine."""
    build().chmod(0o777)
    assert "can be written by others" in str(NativeBackend().unavailable_reason(CPU))


def test_what_is_no_library_is_a_reason(empty_cache: Path) -> None:
    """A broken file is refused by name, not by a crash."""
    path = library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    path.chmod(0o755)
    assert str(path) in str(NativeBackend().unavailable_reason(CPU))


def test_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another CPU nor another kind of device can run it, nor is it built there."""
    assert "device cuda" in str(NativeBackend().unavailable_reason(torch.device("cuda")))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert NativeBackend().unavailable_reason(CPU) == "CPU is aarch64, x86-64 wanted"
    with pytest.raises(BuildError, match="aarch64"):
        build()


@can_build
def test_a_cpu_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself asks the CPU; what it lacks is a reason."""
    build()

    class Old:
        """A library on an old CPU."""

        @staticmethod
        def cartridge_cpu_suits() -> int:
            """Whether it suits."""
            return 0

    monkeypatch.setattr(native, "_loaded", lambda path: Old)
    assert NativeBackend().unavailable_reason(CPU) == "CPU has no AVX2, FMA and F16C"
