"""The engine that clients meet here answers in the shapes of vLLM's own types."""

import json
import sys
from typing import Any

import aiohttp

from tests.conformance.conftest import PROGRAMS, RunProgram
from tests.conformance.model_engine import MODEL
from tests.router.stub_engine import StubEngine

MESSAGES = [{"role": "user", "content": "When does it open?"}]
TOOLS = [{"type": "function", "function": {"name": "opening_hours", "parameters": {}}}]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}),
    ("/v1/chat/completions", {"messages": MESSAGES, **STREAM}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, **STREAM}),
    ("/v1/completions", {"prompt": "It opens"}),
    ("/v1/completions", {"prompt": "It opens", **STREAM}),
    ("/v1/responses", {"input": "When does it open?"}),
    ("/v1/embeddings", {"input": ["a"]}),
    ("/v1/embeddings", {"input": ["a"], "encoding_format": "base64"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "stream": True}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "It opens"}),
]


async def test_its_answers_are_of_vllm_s_types(run_program: RunProgram, engine: StubEngine) -> None:
    """Each whole answer and each event parses as vLLM's type, which has every member of it."""
    answers: list[tuple[str, bool, Any]] = []
    async with aiohttp.ClientSession(engine.url) as session:
        for path, fields in ASKED:
            async with session.post(path, json={"model": MODEL, **fields}) as response:
                said = await response.text()
            if response.content_type == "text/event-stream":
                answers += [(path, True, json.loads(data)) for data in events(said)]
            else:
                answers.append((path, False, json.loads(said)))
        refused = {"model": MODEL, "messages": MESSAGES, "temperature": 3}
        async with session.post("/v1/chat/completions", json=refused) as response:
            answers.append(("refusal", False, await response.json()))
    assert len(answers) > 30
    program = PROGRAMS / "vllm_shapes.py"
    printed = await run_program(sys.executable, program, sent=json.dumps(answers))
    assert json.loads(printed.splitlines()[-1]) == []


def events(text: str) -> list[str]:
    """The data of each event, but for the last word of OpenAI's streams."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line for line in lines if line != "[DONE]"]
