"""`cartridge-router top`: what a terminal shows of a gateway, and how it ends."""

import asyncio
import contextlib
import io
import json
import os
import pty
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rich.console import Console

from cartridge_router.cli import run
from cartridge_router.errors import NotDone
from cartridge_router.operator_client import OperatorClient
from cartridge_router.top import view_of, watch
from tests.router.staged_fleet import TITLES, staged_fleet

Capture = pytest.CaptureFixture[str]
ESCAPES = "\x1b]0;owned\x07\x1b[2J[red]m"
"""What would name the terminal's window and clear it, and what rich reads as markup."""


async def command(*arguments: str) -> int:
    """Run `top` in a thread; returns the exit status."""
    return await asyncio.to_thread(run, ["top", *arguments])


async def test_it_prints_once_into_a_pipe(
    tmp_path: Path, session: aiohttp.ClientSession, capsys: Capture
) -> None:
    """Replicas, tiers and the last decisions with their terms; `--json` gives the state itself."""
    async with staged_fleet(tmp_path, session) as fleet:
        await fleet.ask("crane-manual")
        for flags in (["--once"], []):
            assert await command("--admin", fleet.admin, *flags) == 0
            said = capsys.readouterr().out
            for part in ("map exact", "engine-3", "healthy", "registered", "hbm 0.8 GiB", "2xx 1"):
                assert part in said
            for part in ("crane-manual@1", "engine-2 hbm", "resident", "queue 0 ms + load 0 ms"):
                assert part in said
            assert "\x1b" not in said
        assert await command("--admin", fleet.admin, "--json") == 0
        state = json.loads(capsys.readouterr().out)
        assert state["decisions"]["data"][0]["replica"] == "engine-2"


async def test_names_from_elsewhere_do_nothing_to_a_terminal(
    tmp_path: Path, session: aiohttp.ClientSession, capsys: Capture
) -> None:
    """Neither escape sequences nor markup; in `replicas list` too."""
    async with staged_fleet(tmp_path, session, titles=TITLES, model=ESCAPES) as fleet:
        assert await fleet.ask("tide-tables", model=ESCAPES) == 200
        assert await fleet.ask(model=f"{ESCAPES}2") == 404
        await command("--admin", fleet.admin)
        said = capsys.readouterr().out
        await asyncio.to_thread(run, ["replicas", "list", "--admin", fleet.admin])
        listed = capsys.readouterr().out
        for text in (said, listed):
            assert "]0;owned" in text
            assert "[red]m" in text
            assert not {"\x1b", "\x07"} & set(text)


class OneAnswer(OperatorClient):
    """Answers once, then fails, then is interrupted as by Ctrl-C."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_of_old = state
        self.num_asked = 0

    def state(self) -> dict[str, Any]:
        """The one answer, or what happens after it."""
        self.num_asked += 1
        if self.num_asked == 1:
            return self.state_of_old
        if self.num_asked == 2:
            raise NotDone("http://127.0.0.1:1: refused")
        raise KeyboardInterrupt


STATE: dict[str, Any] = {
    "uptime_s": 12.0,
    "is_draining": True,
    "policy": "cartridge_aware",
    "map": {"mode": "fallback", "age_s": None},
    "totals": {"requests": {"2xx": 1}, "in_flight": 0, "queued": 0},
    "replicas": {"data": [], "left_out": 3},
    "cartridges": {"data": [], "replicas": [], "left_out": 5, "window_s": 300.0},
    "decisions": {"data": []},
}


def test_it_goes_on_while_the_gateway_is_away_and_ends_with_ctrl_c() -> None:
    """What was said last stays, with since when; the terminal is given back as it was."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, height=40)
    client = OneAnswer(STATE)
    pauses: list[float] = []
    watch(client, console, interval_s=2.5, pause=pauses.append)
    said = screen.getvalue()
    assert "stale since" in said
    assert "127.0.0.1:1: refused" in said
    assert (client.num_asked, pauses) == (3, [2.5, 2.5])
    # To the alternate screen, and back from it.
    assert said.index("\x1b[?1049h") < said.index("map") < said.index("\x1b[?1049l")


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """SIGINT as a terminal has it: a shell lets what runs in its background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_interrupts")
async def test_ctrl_c_in_a_terminal_is_no_failure(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    """The process ends with status 0, without a traceback, on its own screen until then."""
    async with staged_fleet(tmp_path, session) as fleet:
        ours, its = pty.openpty()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cartridge_router", "top", "--admin", fleet.admin),
            env={**os.environ, "TERM": "xterm"},
            stdin=its,
            stdout=its,
            stderr=its,
        )
        os.close(its)
        said = b""
        try:
            async with asyncio.timeout(30):
                while b"engine-3" not in said:
                    said += await asyncio.to_thread(os.read, ours, 65_536)
                process.send_signal(signal.SIGINT)
                # Until the terminal is closed by its last user, which Linux tells by an error.
                with contextlib.suppress(OSError):
                    while piece := await asyncio.to_thread(os.read, ours, 65_536):
                        said += piece
                assert await process.wait() == 0
        finally:
            os.close(ours)
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert b"\x1b[?1049l" in said
        assert b"Traceback" not in said


def test_what_is_not_shown_is_counted() -> None:
    """Of replicas and Cartridges; a map that was never read is said to be so."""
    out = io.StringIO()
    Console(file=out, width=120).print(view_of(STATE, num_rows=3))
    for part in ("3 more", "5 more", "fallback never read", "draining"):
        assert part in out.getvalue()


def test_it_says_when_nobody_answers(capsys: Capture) -> None:
    """Status 1, with the address."""
    assert run(["top", "--admin", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1: ConnectionRefused" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "nan", "soon", "-1", "1e9"])
def test_an_interval_is_bounded(text: str, capsys: Capture) -> None:
    """Status 2 and the bounds, or that it is no number."""
    with pytest.raises(SystemExit):
        run(["top", "--admin", "http://127.0.0.1:1", "--interval", text])
    assert "--interval" in capsys.readouterr().err
