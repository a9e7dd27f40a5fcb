"""Imports: each module stands alone, and the gateway stays light."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cartridge_proto import names

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "cartridge_proto": ROOT / "proto",
    "cartridge_policies": ROOT / "policies",
    "cartridge_kernels": ROOT / "kernels",
    "cartridge_engine_ext": ROOT / "engine_ext",
    "cartridge_router": ROOT / "router",
    "cartridge_loadtest": ROOT / "loadtest",
}
FOLDERS = {"engine_ext", "kernels", "loadtest", "policies", "proto", "router"}
NEED_VLLM = {
    f"cartridge_engine_ext.{name}"
    for name in (
        *("connector", "load_plan", "packed_worker", "plugin", "scheduler_side"),
        *("segment_attention", "stats", "worker_side"),
    )
}
SKIPPED = NEED_VLLM | {
    *("cartridge_loadtest.locustfile", "cartridge_loadtest.open_loop_locustfile"),
    *("cartridge_loadtest.__main__", "cartridge_router.__main__"),
}
"""Locust patches the interpreter; `__main__` is run by the tests of the command."""
OTHERS = {
    "cartridge_engine_ext": ["grpc", "redis", "torch"],
    "cartridge_kernels": ["torch"],
    "cartridge_router": [
        "aiohttp.web",
        "jwt",
        "kubernetes.client",
        "limits.aio",
        "openai",
        "opentelemetry.trace",
        "redis.asyncio",
        "rich",
    ],
}
"""Slow packages that are not ours: imported once, before each of our modules is tried."""


def modules_of(package: str) -> list[str]:
    """Names of all modules of a package."""
    root = PACKAGES[package]
    files = sorted((root / package).rglob("*.py"))
    dotted = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in dotted]


def sources() -> list[Path]:
    """All Python files that people write."""
    folders = [*PACKAGES.values(), ROOT / "tests"]
    return [file for folder in folders for file in folder.rglob("*.py") if "_pb2" not in file.name]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_module_imports_alone(package: str) -> None:
    """In a process that has imported nothing else of ours, and without a warning."""
    modules = [name for name in modules_of(package) if name not in SKIPPED]
    assert modules
    # A fork that has none of our modules is as fresh as an interpreter, and much quicker to have.
    script = f"""
import importlib, os, sys, traceback
for name in {OTHERS.get(package, [])!r}:
    importlib.import_module(name)
for name in {modules!r}:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        print("cannot be imported alone:", name)
        sys.exit(1)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gateway_loads_nothing_heavy() -> None:
    """Importing the whole gateway brings in neither torch nor vllm nor transformers."""
    script = (
        "import sys, cartridge_router.app, cartridge_router.cli, cartridge_router.serving\n"
        "print(sorted({'torch', 'vllm', 'transformers', 'faiss', 'kubernetes', "
        "'cartridge_engine_ext', 'cartridge_kernels', 'cartridge_loadtest'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_nothing_imports_a_bare_folder_name() -> None:
    """`router`, `proto` and the like are other people's import names."""
    found = []
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported = [node.module or ""]
            found += [(file.name, name) for name in imported if name.split(".")[0] in FOLDERS]
    assert found == []


def test_every_wire_name_is_used() -> None:
    """A name in `names.py` that nothing reads or writes is a promise that nobody keeps."""
    texts = [file.read_text("utf-8") for file in sources() if file.name != "names.py"]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    declared = [name for name in vars(names) if not name.startswith("_") and name != "Final"]
    assert len(declared) > 30
    assert [name for name in declared if name not in words] == []


def test_the_class_that_operators_name_is_there() -> None:
    """The connector's public path resolves, without importing vLLM."""
    spec = importlib.util.find_spec(names.CONNECTOR_MODULE)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert names.CONNECTOR_CLASS in classes


def test_every_module_says_what_it_owns() -> None:
    """Each module begins with a docstring."""
    silent = [
        str(file.relative_to(ROOT))
        for file in sources()
        if ast.get_docstring(ast.parse(file.read_text("utf-8"))) is None
    ]
    assert silent == []


def test_no_file_of_ours_is_read_with_pickle() -> None:
    """Stored bytes are safetensors and JSON: what can run code while it is read is not imported."""
    forbidden = re.compile(
        r"^\s*(?:import|from) (?:pickle|marshal|shelve|joblib)\b|torch\.load\(", re.M
    )
    files = [file for file in sources() if ROOT / "tests" not in file.parents]
    assert files
    assert [file for file in files if forbidden.search(file.read_text("utf-8"))] == []
