"""The wheel: built from this tree, it holds the packages and what they need, and nothing else."""

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "cartridge_engine_ext",
    "cartridge_kernels",
    "cartridge_loadtest",
    "cartridge_policies",
    "cartridge_proto",
    "cartridge_router",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_it_holds_our_packages_only(wheel: zipfile.ZipFile) -> None:
    """No tests, no folders of the tree, nothing that was built."""
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert len(tops) == len(PACKAGES) + 1
    assert [name for name in wheel.namelist() if "__pycache__" in name or "/." in name] == []


def test_it_holds_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    """What is in the tree is in the wheel, `py.typed` and generated code included."""
    expected = {
        str(file.relative_to(folder))
        for folder in ROOT.iterdir()
        for package in PACKAGES
        for file in (folder / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert expected - set(wheel.namelist()) == set()
    for package in PACKAGES:
        assert f"{package}/py.typed" in wheel.namelist()


def test_it_holds_the_demo_documents(wheel: zipfile.ZipFile) -> None:
    """The demo works from the wheel alone."""
    documents = {file.name for file in (ROOT / "examples" / "documents").iterdir()}
    assert "questions.json" in documents
    prefix = "cartridge_router/demo/documents/"
    shipped = {name.removeprefix(prefix) for name in wheel.namelist() if name.startswith(prefix)}
    assert shipped == documents


def test_its_entry_points_resolve(wheel: zipfile.ZipFile) -> None:
    """The command and the commands that need torch point at what is in the wheel."""
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(wheel.read(name).decode())
    assert dict(parser["console_scripts"]) == {"cartridge-router": "cartridge_router.__main__:main"}
    commands = dict(parser["cartridge_router.commands"])
    assert set(commands) == {
        *("agent", "cartridge.build", "cartridge.quantize", "model.prepare"),
        *("chat-template.wrap", "loadtest", "economics"),
    }
    for target in [*commands.values(), "cartridge_router.__main__:main"]:
        module, _, attribute = target.partition(":")
        source = wheel.read(module.replace(".", "/") + ".py").decode()
        assert f"{attribute} = " in source or f"def {attribute}(" in source
