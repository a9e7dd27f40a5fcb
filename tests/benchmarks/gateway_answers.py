"""What the mock engines of `make bench-gateway` answer, and whether a client got just that.

Owns the bytes of both answers, in the shape of vLLM's. Refuses sockets.
"""

import json
from typing import Any, Final

MODEL: Final = "sample"
MAX_MODEL_LEN: Final = 131_072
NUM_CHUNKS: Final = 32
"""Events of a stream: one with the role, the rest with text; `[DONE]` comes on top."""
_WORDS: Final = [f" word{index:02}" for index in range(NUM_CHUNKS - 1)]
TEXT: Final = "".join(_WORDS)
_ID: Final = "chatcmpl-0123456789abcdef0123456789abcdef"


def _event(delta: dict[str, str], finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    payload = {
        "id": _ID,
        "object": "chat.completion.chunk",
        "created": 1_790_000_000,
        "model": MODEL,
        "choices": [choice],
    }
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


EVENTS: Final = [
    _event({"role": "assistant", "content": ""}, None),
    *(_event({"content": word}, None) for word in _WORDS[:-1]),
    _event({"content": _WORDS[-1]}, "stop"),
]
DONE: Final = b"data: [DONE]\n\n"
STREAM: Final = b"".join(EVENTS) + DONE

_MESSAGE: Final[dict[str, Any]] = {
    "role": "assistant",
    "content": TEXT,
    "refusal": None,
    "tool_calls": [],
}
JSON_BODY: Final = json.dumps(
    {
        "id": _ID,
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": MODEL,
        "choices": [{"index": 0, "message": _MESSAGE, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 500, "total_tokens": 532, "completion_tokens": 32},
    },
    separators=(",", ":"),
).encode()


def problem_with(status: int, body: bytes, *, is_stream: bool) -> str | None:
    """What is wrong with an answer; `None` if it says all that the engine said.

    Proxies that write answers anew are judged by the text, the finish and the end of the stream.
    """
    if status != 200:
        return f"status {status}: {body[:200]!r}"
    if body == (STREAM if is_stream else JSON_BODY):
        return None
    try:
        text, finish_reason = _said_in_stream(body) if is_stream else _said(json.loads(body))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return f"not readable ({error!r}): {body[:200]!r}"
    if (text, finish_reason) != (TEXT, "stop"):
        return f"another text, or cut off: {text[:100]!r}, {finish_reason}"
    return None


def _said(answer: Any) -> tuple[str, str | None]:
    choice = answer["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


def _said_in_stream(body: bytes) -> tuple[str, str | None]:
    lines = [line for line in body.splitlines() if line.startswith(b"data:")]
    if not lines or lines.pop().removeprefix(b"data:").strip() != b"[DONE]":
        raise ValueError("no [DONE] at the end")
    text, finish_reason = "", None
    for line in lines:
        for choice in json.loads(line.removeprefix(b"data:"))["choices"]:
            text += choice["delta"].get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
    return text, finish_reason
