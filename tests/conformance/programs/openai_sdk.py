"""What the OpenAI SDK for Python makes of a gateway's answers.

Owns calls of the SDK, one case each. Refuses to judge: it prints what it saw as JSON.
"""

import asyncio
import json
import sys
import time
from typing import Any

import openai

MESSAGES: Any = [{"role": "user", "content": "When does it open?"}]
MODEL = "sample"


def client(url: str, **fields: Any) -> openai.OpenAI:
    """A client without retries."""
    return openai.OpenAI(base_url=f"{url}/v1", **({"max_retries": 0} | fields))


def chat(url: str) -> object:
    """One answer, whole."""
    answer = client(url).chat.completions.create(model=MODEL, messages=MESSAGES)
    usage = answer.usage
    assert usage is not None
    return {
        "text": answer.choices[0].message.content,
        "finish_reason": answer.choices[0].finish_reason,
        "total_tokens": usage.total_tokens,
    }


def stream(url: str) -> object:
    """One answer, chunk by chunk, with usage at the end."""
    chunks = client(url).chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    parts, usage = [], None
    for chunk in chunks:
        parts += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        usage = chunk.usage or usage
    assert usage is not None
    return {"parts": parts, "total_tokens": usage.total_tokens}


def asynchronous(url: str) -> object:
    """The same by the asynchronous client: twenty at once."""

    async def ask_all() -> object:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", max_retries=0) as asker:

            async def ask() -> str:
                chunks = await asker.chat.completions.create(
                    model=MODEL, messages=MESSAGES, stream=True
                )
                return "".join(
                    [c.choices[0].delta.content or "" async for c in chunks if c.choices]
                )

            return await asyncio.gather(*(ask() for _ in range(20)))

    return asyncio.run(ask_all())


def tools(url: str) -> object:
    """A call of a tool, whole and in a stream."""
    tool: Any = {"type": "function", "function": {"name": "opening_hours", "parameters": {}}}
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": [tool]}
    calls = client(url).chat.completions.create(**asked).choices[0].message.tool_calls
    with client(url).chat.completions.stream(**asked) as events:
        streamed = events.get_final_completion().choices[0].message.tool_calls
    assert calls is not None
    assert streamed is not None
    pairs: list[Any] = [(calls[0], streamed[0])]
    return [[call.function.name, json.loads(call.function.arguments)] for call in pairs[0]]


def raw(url: str, *cartridge_ids: str) -> object:
    """Headers of an answer, with Cartridges named in the SDK's way to add fields."""
    got = client(url).chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, extra_body={"cartridge_ids": list(cartridge_ids)}
    )
    text = got.parse().choices[0].message.content
    return {"headers": dict(got.headers.items()), "request_id": got.request_id, "text": text}


def cartridge_stream(url: str, cartridge_id: str) -> object:
    """A stream of an answer with a Cartridge."""
    chunks = client(url).chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, extra_body={"cartridge_ids": [cartridge_id]}
    )
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def completions(url: str) -> object:
    """A completion, whole and in a stream."""
    whole = client(url).completions.create(model=MODEL, prompt="It opens", max_tokens=3)
    parts = client(url).completions.create(model=MODEL, prompt="It opens", stream=True)
    return [whole.choices[0].text, "".join(p.choices[0].text for p in parts if p.choices)]


def responses(url: str) -> object:
    """A response, whole and in a stream."""
    whole = client(url).responses.create(model=MODEL, input="When does it open?")
    with client(url).responses.stream(model=MODEL, input="When does it open?") as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    return {"whole": whole.output_text, "streamed": final.output_text, "kinds": kinds}


def embeddings(url: str) -> object:
    """Vectors, which the SDK asks for in base64 and decodes."""
    found = client(url).embeddings.create(model=MODEL, input=["a", "b"])
    return [entry.embedding for entry in found.data]


def models(url: str) -> object:
    """The list of models and one of them."""
    return [
        [model.id for model in client(url).models.list()],
        client(url).models.retrieve(MODEL).id,
    ]


def error(url: str, fields: str, key: str = "", timeout_s: str = "30") -> object:
    """What the SDK raises for a chat with these fields."""
    more = {"api_key": key} if key else {}
    asked: Any = {"model": MODEL, "messages": MESSAGES} | json.loads(fields)
    try:
        client(url, timeout=float(timeout_s), **more).chat.completions.create(**asked)
    except openai.APIStatusError as raised:
        return {
            "class": type(raised).__name__,
            "status": raised.status_code,
            "code": raised.code,
            "type": raised.type,
            "param": raised.param,
            "message": raised.message,
            "request_id": raised.request_id,
            "retry_after": raised.response.headers.get("retry-after"),
        }
    except openai.APIError as raised:
        return {"class": type(raised).__name__}
    return None


def broken_stream(url: str) -> object:
    """What the SDK raises when a stream breaks off."""
    num_seen = 0
    try:
        for _ in client(url).chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
            num_seen += 1
    except openai.APIError as raised:
        return {"class": type(raised).__name__, "message": raised.message, "num_seen": num_seen}
    return None


def retried(url: str) -> object:
    """An answer that comes after one refusal, and how long the SDK waited for it."""
    begin_s = time.monotonic()
    answer = client(url, max_retries=1).chat.completions.create(model=MODEL, messages=MESSAGES)
    return {
        "text": answer.choices[0].message.content,
        "waited_s": time.monotonic() - begin_s,
    }


CASES: dict[str, Any] = {
    function.__name__: function
    for function in (chat, stream, asynchronous, tools, raw, cartridge_stream, completions)
} | {
    function.__name__: function
    for function in (responses, embeddings, models, error, broken_stream, retried)
}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](*sys.argv[2:])))  # noqa: T201 - its answer
