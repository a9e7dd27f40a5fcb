"""What vLLM's own types make of answers.

Owns which type an answer must have. Refuses to judge: it prints, as JSON, what those types do not
have of what is read from standard input.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensResponse,
    AnthropicMessagesResponse,
    AnthropicStreamEvent,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.pooling.embed.protocol import EmbeddingResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import TokenizeResponse

WHOLE: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionResponse,
    "/v1/completions": CompletionResponse,
    "/v1/responses": ResponsesResponse,
    "/v1/embeddings": EmbeddingResponse,
    "/v1/messages": AnthropicMessagesResponse,
    "/v1/messages/count_tokens": AnthropicCountTokensResponse,
    "/tokenize": TokenizeResponse,
    "refusal": ErrorResponse,
}
STREAMED: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionStreamResponse,
    "/v1/completions": CompletionStreamResponse,
    "/v1/messages": AnthropicStreamEvent,
}


def unknown(value: Any, sent: Any, where: str) -> Iterator[str]:
    """Members that were sent, and that the types behind a parsed value do not have."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        aliases = {field.alias: name for name, field in fields.items() if field.alias}
        for name, part in sent.items():
            known = aliases.get(name, name)
            if known not in fields:
                yield f"{where}.{name}"
            else:
                yield from unknown(getattr(value, known), part, f"{where}.{name}")
    elif isinstance(value, list):
        for index, (part, sent_part) in enumerate(zip(value, sent, strict=True)):
            yield from unknown(part, sent_part, f"{where}[{index}]")


def main() -> None:
    """Read `[[path, is_streamed, answer], …]`; print what is wrong with each."""
    problems: list[str] = []
    for path, is_streamed, answer in json.load(sys.stdin):
        shape = (STREAMED if is_streamed else WHOLE)[path]
        problems += unknown(shape.model_validate(answer), answer, path)
    print(json.dumps(problems))  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
