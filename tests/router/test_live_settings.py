"""Settings that change while the gateway runs: what is taken, what is refused, and by what."""

import asyncio
import dataclasses
import json
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml

from cartridge_router.app import running_gateway
from cartridge_router.live_settings import NEEDS_RESTART, SettingsSource
from cartridge_router.settings import Settings, load_settings
from tests.router.gateway_client import CHAT, Gateway, until_true
from tests.router.gateway_process import running_process
from tests.router.keys_files import ACME_KEY, replace_file, write_keys
from tests.router.stub_engine import StartStub, answer_ok

BODY = json.dumps({"model": "sample", "messages": []}).encode()


@dataclasses.dataclass
class Live:
    """A gateway whose settings are in a file."""

    gateway: Gateway
    file: Path
    source: SettingsSource

    def write(self, **fields: Any) -> None:
        """Replace the file, and have it read at once."""
        replace_file(self.file, yaml.safe_dump(fields))
        self.source.asked.set()

    async def has_failed(self, times: int = 1) -> None:
        """Wait until so many changes were not taken."""
        await self.gateway.has_metric(
            "cartridge_router_reload_failures_total", times, what="settings"
        )

    async def replicas(self) -> list[str]:
        """Those that are healthy."""
        found: list[str] = (await self.gateway.get("/ready")).json["replicas"]["healthy"]
        return found

    async def has_replicas(self, *names: str) -> None:
        """Wait until exactly these are healthy."""

        async def is_so() -> bool:
            return sorted(await self.replicas()) == sorted(names)

        await until_true(is_so, f"the replicas are {names}")


@asynccontextmanager
async def running(
    session: aiohttp.ClientSession, folder: Path, **fields: Any
) -> AsyncIterator[Live]:
    """A gateway with these settings in its file."""
    file = folder / "router.yaml"
    replace_file(file, yaml.safe_dump(fields))
    source = await asyncio.to_thread(
        SettingsSource, file, lambda: load_settings(file, {}, {"port": 0})
    )
    settings = await asyncio.to_thread(source.load)
    async with running_gateway(settings, None, source=source) as url:
        yield Live(Gateway(session, url), file, source)


async def test_a_changed_file_is_in_force_without_a_restart(
    session: aiohttp.ClientSession, start_stub: StartStub, tmp_path: Path
) -> None:
    """Replicas, limits and placement of the new file hold for the next request."""
    stubs = [await start_stub(answer_ok) for _ in range(2)]
    named = [f"r{index}={stub.url}" for index, stub in enumerate(stubs)]
    quick = {"fleet": {"probe_interval_s": 0.05}}
    async with running(session, tmp_path, replicas=named[:1], **quick) as live:
        await live.has_replicas("r0")
        reply = await live.gateway.post_bytes(CHAT, BODY)
        assert (reply.status, reply.headers["x-cartridge-decision"]) == (
            200,
            "fallback-load; map=fallback",
        )
        live.write(
            replicas=named,
            max_body_bytes=100,
            placement={"policy": "round_robin"},
            **quick,
        )
        await live.has_replicas("r0", "r1")
        reply = await live.gateway.post_bytes(CHAT, BODY)
        assert reply.headers["x-cartridge-decision"].startswith("round-robin")
        assert (await live.gateway.post_bytes(CHAT, BODY + b" " * 100)).status == 413
        live.write(replicas=named[1:], **quick)
        await live.has_replicas("r1")
        assert (await live.gateway.post_bytes(CHAT, BODY + b" " * 100)).status == 200
        assert await live.gateway.metric("cartridge_router_reload_failures_total") == 0


async def test_a_bad_file_is_refused_with_every_problem_and_the_old_one_stays(
    session: aiohttp.ClientSession,
    start_stub: StartStub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing of it is taken, not even what is right in it; a good one after it is."""
    stub = await start_stub(answer_ok)
    good = {"replicas": [f"r0={stub.url}"], "fleet": {"probe_interval_s": 0.05}}
    async with running(session, tmp_path, **good) as live:
        await live.has_replicas("r0")
        live.write(max_body_bytes=10, replicas=["nonsense"], placement={"policy": "best"}, nap=1)
        await live.has_failed()
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert len(told) == 3
        for text, named in zip(sorted(told), ("nap", "placement.policy", "replicas"), strict=True):
            assert named in text
        assert (await live.gateway.post_bytes(CHAT, BODY)).status == 200
        replace_file(live.file, "a: [")
        live.source.asked.set()
        await live.has_failed(2)
        live.write(**good, max_body_bytes=10)

        async def is_in_force() -> bool:
            return (await live.gateway.post_bytes(CHAT, BODY)).status == 413

        await until_true(is_in_force, "the good file is in force")


async def test_what_needs_a_restart_is_refused_whole(
    session: aiohttp.ClientSession,
    start_stub: StartStub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each such setting is named, without its value, which could be a secret."""
    stub = await start_stub(answer_ok)
    good = {"replicas": [f"r0={stub.url}"], "fleet": {"probe_interval_s": 0.05}}
    async with running(session, tmp_path, **good) as live:
        await live.has_replicas("r0")
        secret = "redis://:hunter2@127.0.0.1:1/0"
        live.write(**good, max_body_bytes=10, redis_url=secret, tenant="other")
        await live.has_failed()
        told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert [text.partition(": ")[2] for text in told] == [
            "redis_url: changes with a restart only",
            "tenant: changes with a restart only",
        ]
        assert "hunter2" not in caplog.text
        assert (await live.gateway.post_bytes(CHAT, BODY)).status == 200


async def test_settings_that_do_not_go_with_the_keys_file_are_refused(
    session: aiohttp.ClientSession, start_stub: StartStub, tmp_path: Path
) -> None:
    """A tenant that both list would have two sets of limits; keys go on to be good."""
    stub = await start_stub(answer_ok)
    keys = write_keys(tmp_path / "keys.yaml")
    common = {"replicas": [f"r0={stub.url}"], "fleet": {"probe_interval_s": 0.05}}
    async with running(session, tmp_path, **common, tenants={"keys_file": keys}) as live:
        await live.has_replicas("r0")
        acme = live.gateway.as_caller(ACME_KEY)
        listed = {"acme": {"limits": {"requests_per_minute": 1}}}
        live.write(**common, max_body_bytes=10, tenants={"keys_file": keys, "listed": listed})
        await live.has_failed()
        assert (await acme.post_bytes(CHAT, BODY)).status == 200
        # The other way round: limits of those that the file lists without any of their own.
        limits = {"requests_in_flight": 3, "requests_per_minute": 1000}
        live.write(**common, tenants={"keys_file": keys, "default_limits": limits})

        async def is_in_force() -> bool:
            reply = await acme.post_bytes(CHAT, BODY)
            return reply.headers.get("x-ratelimit-limit-requests") == "1000"

        await until_true(is_in_force, "the new limits are in force")


async def test_a_change_before_the_first_look_is_not_missed(
    session: aiohttp.ClientSession, start_stub: StartStub, tmp_path: Path
) -> None:
    """The file may be replaced while the gateway starts."""
    stub = await start_stub(answer_ok)
    file = tmp_path / "router.yaml"
    good = {"replicas": [f"r0={stub.url}"], "fleet": {"probe_interval_s": 0.05}}
    replace_file(file, yaml.safe_dump(good))
    source = await asyncio.to_thread(
        SettingsSource, file, lambda: load_settings(file, {}, {"port": 0})
    )
    settings = await asyncio.to_thread(source.load)
    replace_file(file, yaml.safe_dump({**good, "max_body_bytes": 10}))
    async with running_gateway(settings, None, source=source) as url:
        live = Live(Gateway(session, url), file, source)

        async def is_in_force() -> bool:
            return (await live.gateway.post_bytes(CHAT, BODY)).status == 413

        await until_true(is_in_force, "the newer file is in force")


async def test_a_process_looks_at_its_file_and_obeys_sighup(
    session: aiohttp.ClientSession, start_stub: StartStub, tmp_path: Path
) -> None:
    """By itself within some seconds, at once when it is told to; it goes on either way."""
    stubs = [await start_stub(answer_ok) for _ in range(2)]
    file = tmp_path / "router.yaml"

    def write(*names: str) -> None:
        replicas = [f"{name}={stub.url}" for name, stub in zip(names, stubs, strict=False)]
        replace_file(
            file, yaml.safe_dump({"replicas": replicas, "fleet": {"probe_interval_s": 0.05}})
        )

    write("a")
    environment = {"CARTRIDGE_ROUTER_CONFIG": str(file)}
    async with running_process(session, environment=environment) as process:
        live = Live(process.gateway, file, SettingsSource(None, Settings))
        await live.has_replicas("a")
        write("a", "b")
        await live.has_replicas("a", "b")
        write("b")
        process.send(signal.SIGHUP)
        await live.has_replicas("b")
        process.send(signal.SIGTERM)
        assert await process.ended() == 0


def leaves(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Names of all settings."""
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from leaves(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_what_needs_a_restart_is_what_there_is() -> None:
    """No name in the list is misspelt: it would be taken, and change nothing."""
    assert set(leaves(Settings)) >= NEEDS_RESTART
