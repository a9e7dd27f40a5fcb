"""OpenAI request and response bodies in the shapes that vLLM's API server gives them.

Owns parsing, error bodies, whole answers, stream chunks and made-up logprobs. Refuses I/O, clocks
and any knowledge of Cartridges beyond the two fields that carry them.

Source: vLLM 0.32, entrypoints/openai/{chat_completion,completion}/{protocol,serving}.py
"""

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from cartridge_proto.names import FIELD_CARTRIDGES

DONE = b"data: [DONE]\n\n"


class Endpoint(StrEnum):
    """The two generating endpoints, by path."""

    CHAT = "/v1/chat/completions"
    TEXT = "/v1/completions"


class RequestRefused(Exception):
    """A request the API server answers with an error of its own; `body` is the JSON to send."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, kind, message, param)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What the simulation reads from a body; everything else is ignored."""

    endpoint: Endpoint
    model: str | None
    is_streaming: bool
    includes_usage: bool
    num_live_tokens: int
    """Prompt length: words of the texts, or the number of token ids."""
    max_tokens: int | None
    num_top_logprobs: int | None
    """`None` when no logprobs were asked for."""
    reads_prompt_logits: bool
    """`prompt_logprobs` or `echo`: would read logits of virtual positions."""
    cartridges: object
    """`kv_transfer_params.cartridges` as parsed JSON; `None` when absent."""
    cache_salt: str | None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: Any = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None


def parse_request(endpoint: Endpoint, data: bytes) -> GenerationRequest:
    """Read a request body.

    Raises:
        RequestRefused: 400, when it is not JSON, a field has the wrong type, or the prompt is
            missing.
    """
    try:
        body = msgspec.json.decode(data, type=_Body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestRefused(400, "BadRequestError", f"{error}") from error
    if endpoint is Endpoint.CHAT:
        if not body.messages:
            raise RequestRefused(400, "BadRequestError", "Field required", "messages")
        num_live_tokens = sum(_num_words(message.get("content")) for message in body.messages)
        num_top = (body.top_logprobs or 0) if body.logprobs else None
    else:
        if not isinstance(body.prompt, str | list):
            raise RequestRefused(400, "BadRequestError", "A text or a list is required", "prompt")
        num_live_tokens = _num_words(body.prompt)
        # `logprobs: 0` asks for the chosen token's own logprob; `false` is what 0 also equals.
        num_top = None if body.logprobs is None or body.logprobs is False else int(body.logprobs)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise RequestRefused(
            400, "BadRequestError", f"max_tokens must be at least 1, got {max_tokens}", "max_tokens"
        )
    return GenerationRequest(
        endpoint=endpoint,
        model=body.model,
        is_streaming=bool(body.stream),
        includes_usage=bool(body.stream_options and body.stream_options.include_usage),
        num_live_tokens=num_live_tokens,
        max_tokens=max_tokens,
        num_top_logprobs=num_top,
        reads_prompt_logits=body.prompt_logprobs is not None or bool(body.echo),
        cartridges=(body.kv_transfer_params or {}).get(FIELD_CARTRIDGES),
        cache_salt=body.cache_salt,
    )


def _num_words(content: object) -> int:
    """Words in a text, a list of text parts or a list of texts; token ids count one each."""
    match content:
        case str():
            return len(content.split())
        case {"text": str(text)}:
            return len(text.split())
        case list():
            return sum(_num_words(part) for part in content)
        case int():
            return 1
        case _:
            return 0


def error_body(status: int, kind: str, message: str, param: str | None = None) -> dict[str, Any]:
    """An OpenAI error as vLLM spells it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def internal_error_body() -> dict[str, Any]:
    """What vLLM answers when a request finished with an error, a failed KV load included."""
    return error_body(500, "InternalServerError", "Internal server error")


def models_body(model: str, max_model_len: int, created: int) -> dict[str, Any]:
    """`GET /v1/models`; `created` in seconds since the epoch."""
    card = {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": model,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }
    return {"object": "list", "data": [card]}


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def split_text(text: str, max_pieces: int) -> list[str]:
    """Cut a text into at most `max_pieces` non-empty pieces of nearly equal length."""
    count = max(1, min(max_pieces, len(text)))
    edges = [index * len(text) // count for index in range(count + 1)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One finished generation: `pieces` stand for tokens. Renders itself as vLLM would."""

    request: GenerationRequest
    answer_id: str
    """As in vLLM, the endpoint's prefix and the request id."""
    created: int
    """Seconds since the epoch."""
    model: str
    pieces: Sequence[str]
    kv_transfer_params: dict[str, Any] | None

    def whole_body(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        text = "".join(self.pieces)
        choice: dict[str, Any] = {"index": 0, "logprobs": self._logprobs(0, len(self.pieces))}
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {
            "id": self.answer_id,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice | {"finish_reason": "stop", "stop_reason": None}],
            "usage": self._usage(),
            "kv_transfer_params": self.kv_transfer_params,
        }

    def content_event(self, index: int) -> bytes:
        """The chunk that carries piece `index`; the last one carries the finish reason too."""
        is_last = index == len(self.pieces) - 1
        choice: dict[str, Any] = {"index": 0}
        if self._is_chat:
            choice["delta"] = {"content": self.pieces[index]}
        else:
            choice["text"] = self.pieces[index]
        choice["logprobs"] = self._logprobs(index, index + 1)
        choice["finish_reason"] = "stop" if is_last else None
        if is_last:
            choice["stop_reason"] = None
        return self._chunk_event([choice])

    def usage_event(self) -> bytes:
        """The last chunk before `[DONE]` when `stream_options.include_usage` is set."""
        return self._chunk_event([], usage=self._usage())

    @property
    def _is_chat(self) -> bool:
        return self.request.endpoint is Endpoint.CHAT

    def _usage(self) -> dict[str, Any]:
        num_prompt, num_completion = self.request.num_live_tokens, len(self.pieces)
        return {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_completion,
            "completion_tokens": num_completion,
        }

    def _chunk_event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return chunk_event(
            self.request.endpoint, self.answer_id, self.created, self.model, choices, **more
        )

    def _logprobs(self, begin: int, end: int) -> dict[str, Any] | None:
        num_top = self.request.num_top_logprobs
        if num_top is None:
            return None
        pieces = self.pieces[begin:end]
        if self._is_chat:
            return {"content": [_chat_logprob(piece, num_top) for piece in pieces]}
        offsets = [sum(map(len, self.pieces[:index])) for index in range(begin, end)]
        return {
            "text_offset": offsets,
            "token_logprobs": [made_up_logprob(piece) for piece in pieces],
            "tokens": list(pieces),
            "top_logprobs": [dict(_ranked(piece, max(1, num_top))) for piece in pieces],
        }


def chunk_event(
    endpoint: Endpoint,
    answer_id: str,
    created: int,
    model: str,
    choices: list[dict[str, Any]],
    **more: Any,
) -> bytes:
    """One chunk of a stream; `created` in seconds since the epoch."""
    is_chat = endpoint is Endpoint.CHAT
    return event(
        {
            "id": answer_id,
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": created,
            "model": model,
            "choices": choices,
            **more,
        }
    )


def role_event(answer_id: str, created: int, model: str) -> bytes:
    """The first chunk of a chat stream, which says who speaks and nothing else."""
    choice = {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    return chunk_event(Endpoint.CHAT, answer_id, created, model, [choice])


def made_up_logprob(piece: str) -> float:
    """A natural-log probability between -1 and -0.01 that depends on the text alone."""
    return -0.01 * (1 + zlib.crc32(piece.encode()) % 100)


def _ranked(piece: str, count: int) -> list[tuple[str, float]]:
    """The piece and made-up alternatives, most likely first."""
    best = made_up_logprob(piece)
    return [(piece if rank == 0 else f"{piece}~{rank}", best - rank) for rank in range(count)]


def _chat_logprob(piece: str, num_top: int) -> dict[str, Any]:
    def entry(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    return entry(piece, made_up_logprob(piece)) | {
        "top_logprobs": [entry(token, logprob) for token, logprob in _ranked(piece, num_top)]
    }
