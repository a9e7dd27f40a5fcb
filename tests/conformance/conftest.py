"""Gateways in front of engines, and client programs as processes of their own.

Owns where clients are installed and how one is run. Refuses to judge what they saw.
"""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cartridge_router.app import running_gateway
from cartridge_router.settings import Settings, TenantSettings
from tests.conformance.model_engine import answer
from tests.router.gateway_client import quick_gateway
from tests.router.keys_files import ACME_KEY, write_keys
from tests.router.stub_engine import Handler, StubEngine

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
CLIENTS = ROOT / "build" / "clients-venv" / "bin"
NODE = ROOT / "build" / "clients-node"
"""`.ci/clients` makes both."""
TIME_LIMIT_S = 120

StartUrl = Callable[[Settings], Awaitable[str]]
RunProgram = Callable[..., Coroutine[Any, Any, str]]
See = Callable[..., Coroutine[Any, Any, Any]]
StartEngine = Callable[..., Awaitable[StubEngine]]


@pytest.fixture
async def start_url() -> AsyncIterator[StartUrl]:
    """Start a listening gateway in this process; returns its URL."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(settings: Settings) -> str:
            return await stack.enter_async_context(running_gateway(settings, None))

        yield start


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Start an engine that answers as vLLM does, or as the given handler does."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(handler: Handler = answer) -> StubEngine:
            engine = StubEngine(handler)
            await engine.start()
            stack.push_async_callback(engine.stop)
            return engine

        yield start


@pytest.fixture
async def engine(start_engine: StartEngine) -> StubEngine:
    """An engine that answers as vLLM does."""
    return await start_engine()


@pytest.fixture
async def gateway(start_url: StartUrl, engine: StubEngine, tmp_path: Path) -> str:
    """A gateway that asks for keys, over one such engine."""
    keys = write_keys(tmp_path / "keys.yaml")
    return await start_url(quick_gateway(engine.url, tenants=TenantSettings(keys_file=keys)))


@pytest.fixture
def run_program(tmp_path: Path) -> RunProgram:
    """Run a program to its end in an empty home; returns what it printed, its errors if it failed.

    It fails the test by a status other than the expected one. Nothing of this machine's own
    settings reaches it, and no hub is asked for models.
    """
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "LANGSMITH_TRACING": "false",
        "OPENAI_API_KEY": ACME_KEY,
        "ANTHROPIC_API_KEY": ACME_KEY,
    }

    async def run(*command: str | Path, status: int = 0, sent: str = "", **extra: str) -> str:
        assert shutil.which(command[0]), f"{command[0]} is missing: run .ci/clients"
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment | extra,
            cwd=tmp_path,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                printed, said = await process.communicate(sent.encode())
        except TimeoutError as error:
            raise AssertionError(f"{command} did not end") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        told = printed.decode(errors="replace") + said.decode(errors="replace")
        assert process.returncode == status, told[-8000:]
        return told if status else printed.decode()

    return run


@pytest.fixture
def see(run_program: RunProgram) -> See:
    """Run one case of a Python program of this folder; returns what it saw, as JSON."""

    async def run(program: str, case: str, *arguments: str, **extra: str) -> Any:
        python, file = CLIENTS / "python", PROGRAMS / f"{program}.py"
        return json.loads(await run_program(python, file, case, *arguments, **extra))

    return run
