"""The command `llm`, run against a listening gateway."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import yaml

from tests.conformance.conftest import CLIENTS, RunProgram
from tests.conformance.model_engine import MODEL, SAID
from tests.router.keys_files import ACME_KEY
from tests.router.stub_engine import StubEngine

Llm = Callable[..., Awaitable[str]]


@pytest.fixture
async def llm(run_program: RunProgram, gateway: str, tmp_path: Path) -> Llm:
    """The command, told of two models of the gateway, one of which nothing serves."""
    folder = tmp_path / "llm"
    folder.mkdir()
    entries = [
        {
            "model_id": model_id,
            "model_name": name,
            "api_base": f"{gateway}/v1",
            "api_key_name": "gateway",
        }
        for model_id, name in [("served", MODEL), ("absent", "absent")]
    ]
    (folder / "extra-openai-models.yaml").write_text(yaml.safe_dump(entries))

    async def run(*arguments: str, status: int = 0) -> str:
        told = await run_program(
            CLIENTS / "llm", *arguments, status=status, LLM_USER_PATH=str(folder)
        )
        return told.strip()

    await run("keys", "set", "gateway", "--value", ACME_KEY)
    return run


async def test_prompts(llm: Llm, engine: StubEngine) -> None:
    """`llm` lists the model and answers, streaming and not, and goes on with a conversation."""
    assert "served" in await llm("models", "list")
    assert await llm("-m", "served", "When does it open?") == SAID
    assert b'"stream":true' in engine.bodies[-1].replace(b" ", b"")
    assert await llm("-m", "served", "--no-stream", "-c", "And when does it close?") == SAID
    assert b"When does it open?" in engine.bodies[-1]


async def test_a_refusal(llm: Llm) -> None:
    """What the gateway refuses, `llm` says in its one line of error."""
    assert await llm("-m", "absent", "hello", status=1) == (
        "Error: Error code: 404 - no replica serves the model 'absent'"
    )
