"""`cartridge-router index suggest-cards|set-cards`: drafts by the model, and cards that change."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from cartridge_proto.manifest import ConventionKind
from cartridge_proto.stores import LocalStore
from cartridge_router.cli import run
from tests.router.stored_cartridges import put_cartridge
from tests.router.stub_engine import StartStub

DRAFT = {"title": "The Harbour", "aliases": ["harbour law"], "sentence": "Rules of 2031."}


def answering(text: str, status: int = 200) -> Any:
    """A model that says this, on either route."""

    async def answer(request: web.Request) -> web.Response:
        is_chat = request.path.endswith("/chat/completions")
        choice = {"message": {"content": text}} if is_chat else {"text": text}
        return web.json_response({"choices": [choice]}, status=status)

    return answer


def suggest(store: LocalStore, url: str, *more: str) -> int:
    """Run the command."""
    flags = ["--store", str(store.root), "--url", url, "--model", "sample"]
    return run(["index", "suggest-cards", *flags, *more])


async def test_each_cartridge_is_asked_for_its_own_card(
    store: LocalStore, start_stub: StartStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its Cartridge in front, on the route of its kind, in the shape of a card."""
    put_cartridge(store, "chat")
    put_cartridge(store, "text", convention=ConventionKind.DOCUMENT)
    stub = await start_stub(answering(json.dumps(DRAFT)))
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-the-test")
    out = tmp_path / "cards.yaml"
    assert await asyncio.to_thread(suggest, store, stub.url, "--out", str(out)) == 0
    paths = ["/v1/chat/completions", "/v1/completions"]
    assert [request.path for request in stub.requests] == paths
    bodies = [json.loads(body) for body in stub.bodies]
    assert [body["cartridge_ids"] for body in bodies] == [["chat@1"], ["text@1"]]
    assert all(body["response_format"]["type"] == "json_schema" for body in bodies)
    assert {r.headers["authorization"] for r in stub.requests} == {"Bearer secret-of-the-test"}
    assert yaml.safe_load(out.read_text()) == [
        {"cartridge": alias, **DRAFT, "language": "en"} for alias in ("chat@1", "text@1")
    ]


@pytest.mark.parametrize(
    ("text", "status", "problem"),
    [
        ("no JSON", 200, "the model answered no card"),
        ('{"title": "only"}', 200, "missing required field `aliases`"),
        ("{}", 404, "HTTP 404"),
    ],
)
async def test_what_is_no_card_is_said_and_left_out(
    store: LocalStore,
    start_stub: StartStub,
    capsys: pytest.CaptureFixture[str],
    text: str,
    status: int,
    problem: str,
) -> None:
    """By the Cartridge's name, with status 1; the others are drafted."""
    put_cartridge(store, "chat")
    stub = await start_stub(answering(text, status))
    assert await asyncio.to_thread(suggest, store, stub.url) == 1
    said = capsys.readouterr()
    assert problem in said.err
    assert said.err.startswith("chat@1: ")
    assert yaml.safe_load(said.out) == []


async def test_an_answer_that_is_no_json_is_no_draft(
    store: LocalStore, start_stub: StartStub, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a proxy's page with status 200; the drafts of the others are not lost."""

    async def answer(request: web.Request) -> web.Response:
        if len(stub.requests) == 1:
            return web.Response(text="<html>", content_type="text/html")
        return web.json_response({"choices": [{"message": {"content": json.dumps(DRAFT)}}]})

    put_cartridge(store, "a")
    put_cartridge(store, "b")
    stub = await start_stub(answer)
    assert await asyncio.to_thread(suggest, store, stub.url) == 1
    said = capsys.readouterr()
    assert said.err.startswith("a@1: no JSON was answered")
    assert [entry["cartridge"] for entry in yaml.safe_load(said.out)] == ["b@1"]


async def test_a_file_that_cannot_be_written_loses_no_draft(
    store: LocalStore, start_stub: StartStub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They are printed instead, with status 2."""
    put_cartridge(store, "chat")
    stub = await start_stub(answering(json.dumps(DRAFT)))
    out = tmp_path / "absent" / "cards.yaml"
    assert await asyncio.to_thread(suggest, store, stub.url, "--out", str(out)) == 2
    said = capsys.readouterr()
    assert "--out: " in said.err
    assert [entry["title"] for entry in yaml.safe_load(said.out)] == ["The Harbour"]


async def test_a_cartridge_that_is_not_there_is_said_before_any_is_drafted(
    store: LocalStore, start_stub: StartStub, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each draft takes its time."""
    put_cartridge(store, "chat")
    stub = await start_stub(answering(json.dumps(DRAFT)))
    named = ("--cartridge", "chat@1", "--cartridge", "absent@1")
    assert await asyncio.to_thread(suggest, store, stub.url, *named) == 2
    assert "absent@1" in capsys.readouterr().err
    assert stub.requests == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--url", "ftp://host"], "--url: 'ftp://host' is not http(s)://host:port"),
        (["--cartridge", "absent@1"], "--cartridge: not in the store: absent@1"),
        (["--store", "ftp://host"], "--store: unknown kind of store"),
    ],
)
def test_bad_flags_are_named(
    store: LocalStore, capsys: pytest.CaptureFixture[str], flags: list[str], problem: str
) -> None:
    """Status 2 and no traceback."""
    put_cartridge(store, "chat")
    assert suggest(store, "http://127.0.0.1:9", *flags) == 2
    assert problem in capsys.readouterr().err


def test_a_card_changes_and_nothing_else(store: LocalStore, tmp_path: Path) -> None:
    """The same tensors and text under the alias; a second time there is nothing to do."""
    before = put_cartridge(store, "chat")
    file = tmp_path / "cards.yaml"
    file.write_text(yaml.safe_dump([{"cartridge": "chat@1", **DRAFT, "language": "de"}]))
    assert run(["index", "set-cards", "--store", str(store.root), str(file)]) == 0
    digest = store.resolve("chat@1")
    after = store.verify(digest)
    assert (after.card.title, after.card.language) == ("The Harbour", "de")
    assert (after.tensors, after.payload, after.probe) == (
        before.tensors,
        before.payload,
        before.probe,
    )
    assert run(["index", "set-cards", "--store", str(store.root), str(file)]) == 0
    assert store.resolve("chat@1") == digest


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([{"cartridge": "chat@1", **DRAFT, "language": "?"}], "chat@1"),
        ([{"cartridge": "absent@1", **DRAFT}], "not in the store: absent@1"),
        ([{"cartridge": "chat@1", **DRAFT, "titel": "x"}], "unknown field `titel`"),
        ([{"cartridge": "chat@1", **DRAFT}] * 2, "chat@1 stands there twice"),
        ([{"cartridge": "chat@1", **DRAFT, "title": ""}], "length >= 1"),
        ("[", "cards.yaml"),
    ],
)
def test_a_wrong_file_changes_nothing(
    store: LocalStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    entries: Any,
    problem: str,
) -> None:
    """Not even the cards in it that are right."""
    put_cartridge(store, "other")
    put_cartridge(store, "chat")
    before = store.aliases()
    if isinstance(entries, list):
        entries = yaml.safe_dump([{"cartridge": "other@1", **DRAFT}, *entries])
    file = tmp_path / "cards.yaml"
    file.write_text(entries)
    assert run(["index", "set-cards", "--store", str(store.root), str(file)]) == 2
    assert problem in capsys.readouterr().err
    assert store.aliases() == before
