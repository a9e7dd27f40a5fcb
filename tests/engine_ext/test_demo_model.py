"""The demo's model folder: it appears whole, and never in place of something else."""

from pathlib import Path

import pytest

from cartridge_engine_ext import demo_model
from cartridge_engine_ext.demo_model import prepare_demo_model


@pytest.fixture(autouse=True)
def convert_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion takes a minute; here it writes one file."""

    def convert(_: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(demo_model, "_convert", convert)


def test_the_folder_may_be_there_and_empty(tmp_path: Path) -> None:
    """A folder that was made for the model is filled."""
    target = tmp_path / "model"
    target.mkdir()
    assert prepare_demo_model(target) == target
    assert (target / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_with_something_else_is_an_error(tmp_path: Path) -> None:
    """Nothing is overwritten, and a folder without a model is not called one."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="not empty"):
        prepare_demo_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
