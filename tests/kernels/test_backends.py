"""The choice of a kernel by name."""

import logging

import pytest
import torch

from cartridge_kernels import backends
from cartridge_kernels.backends import (
    AUTO,
    BackendUnavailable,
    available_backends,
    open_backend,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def test_unknown_name() -> None:
    """A name that no kernel has is refused with the names there are."""
    with pytest.raises(BackendUnavailable, match=r"'fast' is none of auto, .*triton.*flashinfer"):
        open_backend("fast", CPU)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_name_is_never_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was asked for by name and cannot run raises, and says what is missing."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailable, match=rf"attention backend {name}: .*(CUDA|installed)"):
        open_backend(name, CPU)


def test_a_name_that_can_run_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name any kernel is opened that can run, also one that `auto` would not take."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert open_backend("triton", CPU).name == "triton"
    assert open_backend("reference", CPU).name == "reference"


def test_all_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is listed, with the reason why it cannot run here or none."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = available_backends(CPU)
    assert found["reference"] is None
    assert found["triton"]
    assert found["flashinfer"]


def test_auto_takes_the_first_that_can_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` goes down its list; the log says what it took, and warns of what cannot run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for capability, name in (((9, 0), "triton"), ((8, 0), "reference")):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        caplog.clear()
        with caplog.at_level(logging.INFO, backends.logger.name):
            assert open_backend(AUTO, CUDA).name == name
        assert f"{name} on cuda" in caplog.text
        warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) == (name != "triton")
        assert all("triton cannot run: compute capability 8.0" in text for text in warned)


def test_auto_on_a_device_that_nothing_is_for() -> None:
    """Where no kernel is known for a device type, `auto` raises and names it."""
    with pytest.raises(BackendUnavailable, match="none runs on meta"):
        open_backend(AUTO, torch.device("meta"))


def test_a_missing_module_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose package is not installed cannot run; asking does not raise."""
    monkeypatch.setitem(backends._BACKENDS, "absent", ("no_such_package", "Backend"))
    assert "no_such_package" in (available_backends(CPU)["absent"] or "")
    with pytest.raises(BackendUnavailable, match="no_such_package"):
        open_backend("absent", CPU)
