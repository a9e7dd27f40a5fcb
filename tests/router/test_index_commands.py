"""`cartridge-router index build|calibrate`, and a gateway that goes on from what they keep."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cartridge_proto.manifest import ConventionKind
from cartridge_proto.stores import LocalStore
from cartridge_router.catalog import Catalog
from cartridge_router.cli import run
from cartridge_router.retrieval.embedders import OnnxEmbedder
from cartridge_router.shelves import Shelves
from tests.loadtest.replica_client import StartReplica
from tests.router.gateway_client import StartGateway, until_true
from tests.router.test_finding import (
    ASKS_LIBRARY,
    ASKS_NOTHING,
    ASKS_POOL,
    TEXTS,
    ask,
    found_in,
    has_index,
    put_document,
    start_town,
)


@pytest.fixture
def town(store: LocalStore) -> LocalStore:
    """A store with four papers."""
    for name in TEXTS:
        put_document(store, name)
    return store


def index(command: str, town: LocalStore, folder: Path, *more: str) -> int:
    """Run one of the commands."""
    flags = ["--store", str(town.root), "--index-dir", str(folder), "--json"]
    return run(["index", command, *flags, *more])


def labelled(file: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of labelled questions."""
    file.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return file


ROWS: list[dict[str, Any]] = [
    *({"question": f"{ASKS_LIBRARY} ({n})", "cartridges": ["library@1"]} for n in range(8)),
    *({"question": f"{ASKS_POOL} ({n})", "cartridges": ["pool"]} for n in range(8)),
    *({"question": f"Who won the match number {n}?", "cartridges": []} for n in range(8)),
]


def test_an_index_is_made_once_and_kept(
    town: LocalStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time no text is embedded; a Cartridge that came since is the only news."""
    folder = tmp_path / "indexes"
    assert index("build", town, folder) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["documents"], first["without_text"], first["calibration"]) == (4, 0, "defaults")
    embedded: list[str] = []

    class Counting:
        def __init__(self) -> None:
            self.inner = OnnxEmbedder()
            self.identity, self.dim = self.inner.identity, self.inner.dim

        def embed(self, texts: list[str]) -> Any:
            embedded.extend(texts)
            return self.inner.embed(texts)

    monkeypatch.setattr("cartridge_router.shelves.OnnxEmbedder", Counting)
    assert index("build", town, folder) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert embedded == []
    put_document(town, "pool", version="2", created_at="2099-01-01T00:00:00Z", is_text_kept=False)
    assert index("build", town, folder) == 0
    assert json.loads(capsys.readouterr().out)["without_text"] == 1
    # Its card is what it was, and without a text that is its only passage.
    assert embedded == []


def test_labelled_questions_are_learned_from(
    town: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index says so, and a later build keeps what was learned."""
    folder, file = tmp_path / "indexes", labelled(tmp_path / "questions.jsonl", ROWS)
    assert index("calibrate", town, folder, "--questions", str(file)) == 0
    learned = json.loads(capsys.readouterr().out)
    assert learned["calibration"] == "24 labelled questions"
    assert index("build", town, folder) == 0
    assert json.loads(capsys.readouterr().out) == learned


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"question": "x", "cartridges": ["nobody@1"]}], "'nobody@1' is not in the index"),
        (ROWS[:3], "3 questions; fewer than 20 teach nothing"),
        ([{"question": "x"}], "questions.jsonl:1: Object missing required field `cartridges`"),
    ],
)
def test_questions_that_teach_nothing_are_refused(
    town: LocalStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[dict[str, Any]],
    problem: str,
) -> None:
    """By line, name or count; the index stays as it was."""
    file = labelled(tmp_path / "questions.jsonl", rows)
    assert index("calibrate", town, tmp_path / "indexes", "--questions", str(file)) == 2
    assert problem in capsys.readouterr().err


def test_a_missing_file_is_named(
    town: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a traceback."""
    absent = tmp_path / "absent.jsonl"
    assert index("calibrate", town, tmp_path / "indexes", "--questions", str(absent)) == 2
    assert f"{absent}: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["build", "calibrate"])
def test_an_index_of_nothing_is_an_error(
    command: str, town: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenant that is misspelt, or the other kind of prompt: nobody would find anything in it."""
    folder = tmp_path / "indexes"
    assert index(command, town, folder, "--prompts", "text") == 2
    assert "--tenant: no Cartridge for prompts of kind text" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize("command", ["build", "calibrate"])
def test_a_folder_that_cannot_be_written_is_an_error(
    command: str, town: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was asked for is not there, and the status says so."""
    folder = tmp_path / "indexes"
    folder.write_bytes(b"a file")
    assert index(command, town, folder) == 2
    assert "--index-dir:" in capsys.readouterr().err


def test_a_damaged_index_is_made_anew(
    town: LocalStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was kept is believed only if it is what was written."""
    folder = tmp_path / "indexes"
    assert index("build", town, folder) == 0
    first = json.loads(capsys.readouterr().out)
    (vectors,) = folder.glob("*/versions/*/passages.npy")
    data = bytearray(vectors.read_bytes())
    data[-1] ^= 1
    vectors.write_bytes(data)
    assert index("build", town, folder) == 0
    assert json.loads(capsys.readouterr().out) == first


async def test_a_gateway_takes_what_was_learned_while_it_runs(
    start_replica: StartReplica,
    start_gateway: StartGateway,
    town: LocalStore,
    redis_url: str,
    tmp_path: Path,
) -> None:
    """Its index has another version then, and answers go on."""
    folder = tmp_path / "indexes"
    gateway = await start_town(
        start_replica, start_gateway, town, redis_url, selection={"index_dir": str(folder)}
    )
    await has_index(gateway)
    before = (await ask(gateway, ASKS_NOTHING)).headers["x-cartridge-selection"]
    file = labelled(tmp_path / "questions.jsonl", ROWS)
    arguments = ("calibrate", town, folder, "--questions", str(file))
    assert await in_thread(index, *arguments) == 0

    async def is_taken() -> bool:
        said = (await ask(gateway, ASKS_NOTHING)).headers["x-cartridge-selection"]
        return said.rpartition("index=")[2] != before.rpartition("index=")[2]

    await until_true(is_taken, "the calibration is taken")
    assert found_in(await ask(gateway, ASKS_LIBRARY)) == "library@1"


async def in_thread(function: Any, *arguments: Any) -> Any:
    """Commands block and run a loop of their own."""
    return await asyncio.to_thread(function, *arguments)


@pytest.mark.parametrize("tenant", ["../../etc", "a/b", "täglich", "x" * 200])
def test_a_tenant_s_name_never_leaves_the_folder(tmp_path: Path, tenant: str) -> None:
    """Whatever an operator calls a tenant, its index lies in the folder, and apart from others."""
    shelves = Shelves(Catalog(None, 1.0), embedder="minilm-int8", folder=tmp_path)
    shelves.make(tenant, ConventionKind.DOCUMENT, [])
    (made,) = tmp_path.iterdir()
    assert (made / "current").exists()
    shelves.make("other", ConventionKind.DOCUMENT, [])
    assert len(list(tmp_path.iterdir())) == 2
