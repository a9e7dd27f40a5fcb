"""Answers shaped as vLLM 0.32 shapes them, for clients that read every field.

Owns JSON and events of the routes that clients ask. Refuses to know a model: it says the same words
over and over, as many as the request allows.
"""

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from aiohttp import web

MODEL: Final = "sample"
WORDS: Final = ("It", " opens", " at", " seven", ".")
"""What is said, one token each; longer answers begin again."""
SAID: Final = "".join(WORDS)
CREATED: Final = 1_760_000_000
VECTOR: Final = (0.5, -0.25, 0.125)
PROMPT_TOKENS: Final = 7
TOOL_ARGUMENTS: Final = ('{"place": ', '"harbour"}')

Body = dict[str, Any]
Event = tuple[str | None, Body]
"""The name of an event, and its data."""


async def answer(request: web.Request) -> web.StreamResponse:
    """What vLLM would answer, on any of the routes known here; 404 elsewhere."""
    route = _ROUTES.get(request.path)
    if route is None:
        return web.json_response({"detail": "Not Found"}, status=404)
    body: Body = json.loads(await request.read())
    if not 0 <= (body.get("temperature") or 0) <= 2:
        return _refusal("temperature must be in [0, 2]", is_anthropic=route is _message)
    found = route(body)
    if isinstance(found, dict):
        return web.json_response(found)
    ends = route in (_chat, _completion)
    return await _stream(request, found, has_done=ends)


def _refusal(text: str, *, is_anthropic: bool) -> web.Response:
    if is_anthropic:
        error = {"type": "BadRequestError", "message": text}
        return web.json_response({"type": "error", "error": error}, status=400)
    fields = {"message": text, "type": "BadRequestError", "param": None, "code": 400}
    return web.json_response({"error": fields}, status=400)


async def _stream(
    request: web.Request, events: Iterable[Event], *, has_done: bool
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for name, data in events:
        head = f"event: {name}\n" if name is not None else ""
        await response.write(f"{head}data: {json.dumps(data)}\n\n".encode())
    if has_done:
        await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _words(body: Body) -> list[str]:
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    limit = limit or body.get("max_output_tokens") or len(WORDS)
    return list(itertools.islice(itertools.cycle(WORDS), limit))


def _usage(num_output_tokens: int) -> Body:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "total_tokens": PROMPT_TOKENS + num_output_tokens,
        "completion_tokens": num_output_tokens,
        "prompt_tokens_details": None,
    }


def _streamed(body: Body, head: Body, choices: list[Body], num_tokens: int) -> Iterable[Event]:
    """Chunks with one choice each, and one with the usage if that is asked for."""
    options = body.get("stream_options") or {}
    for number, choice in enumerate(choices):
        chunk = {
            **head,
            "choices": [{"index": 0, "logprobs": None, "finish_reason": None} | choice],
        }
        if options.get("continuous_usage_stats"):
            chunk["usage"] = _usage(number)
        yield None, chunk
    if options.get("include_usage"):
        yield None, {**head, "choices": [], "usage": _usage(num_tokens)}


# --- OpenAI: chat and completions ----------------------------------------------------------------
def _chat(body: Body) -> Body | Iterable[Event]:
    tools = body.get("tools") or []
    head = {"id": "chatcmpl-sample", "created": CREATED, "model": body["model"]}
    name = tools[0]["function"]["name"] if tools else None
    words = list(TOOL_ARGUMENTS) if tools else _words(body)
    if body.get("stream"):
        head["object"] = "chat.completion.chunk"
        deltas = [_tool_delta(name, part, n) for n, part in enumerate(words)]
        if name is None:
            deltas = [{"content": word} for word in words]
        choices: list[Body] = [{"delta": {"role": "assistant", "content": ""}}]
        choices += [{"delta": delta} for delta in deltas]
        choices[-1] |= {"finish_reason": "tool_calls" if tools else "stop", "stop_reason": None}
        return _streamed(body, head, choices, len(words))
    call = {
        "id": "chatcmpl-tool-sample",
        "type": "function",
        "function": {"name": name, "arguments": "".join(words)},
    }
    message = {
        "role": "assistant",
        "content": None if tools else "".join(words),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [call] if tools else [],
        "reasoning": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": "tool_calls" if tools else "stop",
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
    }
    return {**head, "object": "chat.completion", **_rest([choice], len(words))}


def _tool_delta(name: str | None, part: str, number: int) -> Body:
    function: Body = {"arguments": part}
    call: Body = {"index": 0, "function": function}
    if number == 0:
        function["name"] = name
        call |= {"id": "chatcmpl-tool-sample", "type": "function"}
    return {"tool_calls": [call]}


def _rest(choices: list[Body], num_tokens: int) -> Body:
    return {
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": "vllm-0.32.0",
        "usage": _usage(num_tokens),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _completion(body: Body) -> Body | Iterable[Event]:
    head = {"id": "cmpl-sample", "object": "text_completion", "created": CREATED}
    head |= {"model": body["model"]}
    words = _words(body)
    if body.get("stream"):
        choices: list[Body] = [{"text": word} for word in words]
        choices[-1] |= {"finish_reason": "stop", "stop_reason": None}
        return _streamed(body, head, choices, len(words))
    choice = {
        "index": 0,
        "text": "".join(words),
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "routed_experts": None,
    }
    return head | _rest([choice], len(words))


# --- OpenAI: responses, embeddings, tokens -------------------------------------------------------
def _responses(body: Body) -> Body | Iterable[Event]:
    words = _words(body)
    item = {
        "id": "msg_sample",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_output_text("".join(words))],
        "phase": None,
    }
    done = _response(body, [item], "completed", len(words))
    if not body.get("stream"):
        return done
    return _numbered(_response_events(body, words, item, done))


def _output_text(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _response_events(body: Body, words: list[str], item: Body, done: Body) -> Iterable[Event]:
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    begun = _response(body, [], "in_progress", None)
    text = "".join(words)
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    begun_item = {**item, "status": "in_progress", "content": []}
    yield "response.output_item.added", {"output_index": 0, "item": begun_item}
    yield "response.content_part.added", {**place, "part": _output_text("")}
    for word in words:
        yield "response.output_text.delta", {**place, "delta": word, "logprobs": []}
    yield "response.output_text.done", {**place, "text": text, "logprobs": []}
    yield "response.content_part.done", {**place, "part": _output_text(text)}
    yield "response.output_item.done", {"output_index": 0, "item": item}
    yield "response.completed", {"response": done}


def _numbered(events: Iterable[Event]) -> Iterable[Event]:
    for number, (name, data) in enumerate(events):
        yield name, {**data, "type": name, "sequence_number": number}


def _response(body: Body, output: list[Body], status: str, num_tokens: int | None) -> Body:
    usage = None
    if num_tokens is not None:
        usage = {
            "input_tokens": PROMPT_TOKENS,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": PROMPT_TOKENS + num_tokens,
        }
    return {
        "id": "resp_sample",
        "created_at": CREATED,
        "incomplete_details": None,
        "instructions": None,
        "metadata": None,
        "model": body["model"],
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "background": False,
        "max_output_tokens": 4096,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": None,
        "service_tier": "auto",
        "status": status,
        "text": None,
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": usage,
        "user": None,
        "presence_penalty": None,
        "frequency_penalty": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }


def _embeddings(body: Body) -> Body:
    texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
    data = [
        {"index": index, "object": "embedding", "embedding": _vector(body)}
        for index in range(len(texts))
    ]
    usage = _usage(0) | {"completion_tokens": 0}
    return {
        "id": "embd-sample",
        "object": "list",
        "created": CREATED,
        "model": body["model"],
        "data": data,
        "usage": usage,
    }


def _vector(body: Body) -> list[float] | str:
    if body.get("encoding_format") == "base64":
        # The three numbers as little-endian float32.
        return "AAAAPwAAgL4AAAA+"
    return list(VECTOR)


def _tokenize(body: Body) -> Body:
    return {"count": 2, "max_model_len": 4096, "tokens": [1, 2], "token_strs": None}


# --- Anthropic -----------------------------------------------------------------------------------
def _message(body: Body) -> Body | Iterable[Event]:
    words = _words(body)[: len(WORDS)]
    head = {"id": "msg_sample", "type": "message", "role": "assistant", "model": body["model"]}
    if body.get("stream"):
        return _message_events(head, words)
    return {
        **head,
        "content": [{"type": "text", "text": "".join(words)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": PROMPT_TOKENS, "output_tokens": len(words)},
    }


def _message_events(head: Body, words: list[str]) -> Iterable[Event]:
    usage = {"input_tokens": PROMPT_TOKENS, "output_tokens": 0}
    begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    events: list[Body] = [
        {"type": "message_start", "message": begun},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": ""},
        },
    ]
    for word in words:
        delta = {"type": "text_delta", "text": word}
        events.append({"type": "content_block_delta", "index": 0, "delta": delta})
    events.append({"type": "content_block_stop", "index": 0})
    events.append(
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"input_tokens": PROMPT_TOKENS, "output_tokens": len(words)},
        }
    )
    events.append({"type": "message_stop"})
    for event in events:
        yield event["type"], event


def _count_tokens(body: Body) -> Body:
    return {"input_tokens": PROMPT_TOKENS}


_ROUTES: Final[dict[str, Callable[[Body], Body | Iterable[Event]]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _responses,
    "/v1/embeddings": _embeddings,
    "/v1/messages": _message,
    "/v1/messages/count_tokens": _count_tokens,
    "/tokenize": _tokenize,
}
