"""Replicas from a file: what it says is what there is, and a bad one changes nothing."""

import asyncio
import json
from pathlib import Path

import pytest
import yaml

from cartridge_router.discovery.watched_file import MAX_FILE_BYTES, WatchedFile, read_replicas
from cartridge_router.errors import ConfigurationError
from cartridge_router.settings import FleetSettings
from tests.loadtest.cartridge_requests import until
from tests.router.discovery.listening import Listening, running
from tests.router.gateway_client import StartGateway, quick_gateway, until_true
from tests.router.keys_files import replace_file
from tests.router.stub_engine import StartStub, answer_ok

TWO = {"a": "http://127.0.0.1:1", "b": "https://engine.example"}


def written(urls: dict[str, str]) -> str:
    """The text of a file."""
    return yaml.safe_dump([{"name": name, "url": url} for name, url in urls.items()])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Not there yet."""
    return tmp_path / "replicas.yaml"


def watched(file: Path, listening: Listening) -> WatchedFile:
    """Looked at all the time."""
    return WatchedFile(file, listening.channel, poll_s=0.01)


async def test_a_file_is_read_again_when_it_changes(file: Path) -> None:
    """By rename or in place, YAML or JSON; not when it stays the same."""
    replace_file(file, written(TWO))
    listening = Listening()
    async with running(watched(file, listening).run):
        await until(lambda: listening.lists == [TWO], "read")
        replace_file(file, json.dumps([{"name": "c", "url": "http://[::1]:8001"}]))
        await until(lambda: len(listening.lists) == 2, "read again")
        assert listening.num_failures == 0
        # What is written in place may be seen, and refused, before it is there.
        await asyncio.to_thread(file.write_text, "[]")
        await until(lambda: len(listening.lists) == 3, "read once more")
    assert listening.lists == [TWO, {"c": "http://[::1]:8001"}, {}]


async def test_a_bad_file_changes_nothing_and_says_everything(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each problem is logged and the file counted once, until it has changed."""
    replace_file(file, written(TWO))
    listening = Listening()
    async with running(watched(file, listening).run):
        await until(lambda: len(listening.lists) == 1, "read")
        replace_file(file, '[{name: "a b", url: "ftp://x"}, {name: c, port: 1}]')
        await until(lambda: listening.num_failures == 1, "refused")
        told = "\n".join(record.getMessage() for record in caplog.records)
        for part in ("$[0].name: 'a b'", "$[0].url: 'ftp://x'", "$[1]: 'url'", "'port' was unex"):
            assert part in told
        await asyncio.to_thread(file.unlink)
        await until(lambda: listening.num_failures == 2, "gone")
        assert listening.lists == [TWO]
        replace_file(file, written({"c": "http://c:1"}))
        await until(lambda: len(listening.lists) == 2, "good again")
    assert listening.num_failures == 2


async def test_a_file_may_come_later(file: Path) -> None:
    """Its absence is a failure, once; then it is read."""
    listening = Listening()
    async with running(watched(file, listening).run):
        await until(lambda: listening.num_failures == 1, "absent")
        replace_file(file, written(TWO))
        await until(lambda: listening.lists == [TWO], "read")
    assert listening.num_failures == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "None is not of type 'array'"),
        ("# half written", "None is not of type 'array'"),
        ("a: http://a:1", "is not of type 'array'"),
        ("[", "while parsing"),
        ("\ud800", "utf-8"),
        ("[{name: a, url: 'http://a:1'}, {name: a, url: 'http://b:1'}]", "[1].name: a is there"),
        ("[{name: a, url: 'http://user:secret@a:1'}]", "url: "),
        ("[{name: a, url: 'http://a:1/v1'}]", "url: "),
        ("#" * MAX_FILE_BYTES + "\n", "more than"),
    ],
    ids=["empty", "comment", "mapping", "yaml", "utf-8", "twice", "login", "path", "large"],
)
def test_what_is_no_list_of_replicas_is_refused(file: Path, text: str, part: str) -> None:
    """With what is wrong, and where."""
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigurationError) as caught:
        read_replicas(file)
    assert part in caught.value.problems[0]
    assert str(file) in caught.value.problems[0]


async def test_a_gateway_follows_its_file(
    file: Path, start_stub: StartStub, start_gateway: StartGateway
) -> None:
    """Requests go to the replicas of the file, and to none that it no longer lists."""
    stubs = [await start_stub(answer_ok) for _ in range(2)]
    replace_file(file, written({"r0": stubs[0].url}))
    fleet = FleetSettings(probe_interval_s=0.05, file=str(file), file_poll_s=0.02)
    gateway = await start_gateway(quick_gateway(fleet=fleet))

    async def serve(*names: str) -> None:
        async def is_so() -> bool:
            healthy: list[str] = (await gateway.get("/ready")).json["replicas"]["healthy"]
            return healthy == list(names)

        await until_true(is_so, f"{names} are healthy")

    await serve("r0")
    assert (await gateway.ask()).headers["x-cartridge-replica"] == "r0"
    replace_file(file, written({"r0": stubs[0].url, "r1": stubs[1].url}))
    await serve("r0", "r1")
    replace_file(file, written({"r1": stubs[1].url}))
    await serve("r1")
    assert {(await gateway.ask()).headers["x-cartridge-replica"] for _ in range(4)} == {"r1"}
    replace_file(file, "{")
    name = "cartridge_router_discovery_failures_total"
    await gateway.has_metric(name, 1, source="file")
    assert (await gateway.ask()).status == 200
    assert await gateway.metric("cartridge_router_replicas", source="file") == 1
    assert await gateway.metric("cartridge_router_replica_healthy", replica="r0") == 0
