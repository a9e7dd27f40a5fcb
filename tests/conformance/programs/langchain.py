"""What langchain-openai makes of a gateway's answers.

Owns calls of the library, one case each. Refuses to judge: it prints what it saw as JSON.
"""

import asyncio
import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI, OpenAIEmbeddings

QUESTION = "When does it open?"


def chat(url: str, **fields: Any) -> Any:
    """A model without retries."""
    return ChatOpenAI(base_url=f"{url}/v1", model="sample", max_retries=0, **fields)


def invoke(url: str) -> object:
    """One answer, whole."""
    answer = chat(url).invoke(QUESTION)
    return [answer.content, answer.usage_metadata["total_tokens"]]


def stream(url: str) -> object:
    """One answer, piece by piece, with the usage."""
    chunks = list(chat(url, stream_usage=True).stream(QUESTION))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    parts = [chunk.content for chunk in chunks if chunk.content]
    return [parts, total.usage_metadata["total_tokens"]]


def astream(url: str) -> object:
    """The same asynchronously, eight at once."""

    async def ask() -> str:
        return "".join([chunk.content async for chunk in chat(url).astream(QUESTION)])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask() for _ in range(8)))

    return asyncio.run(ask_all())


def tools(url: str) -> object:
    """A call of a bound tool."""

    def opening_hours(place: str) -> str:
        """When a place opens."""
        return place

    answer = chat(url).bind_tools([opening_hours]).invoke(QUESTION)
    return [[call["name"], call["args"]] for call in answer.tool_calls]


def responses(url: str) -> object:
    """The answer over `/v1/responses`."""
    return chat(url, use_responses_api=True).invoke(QUESTION).text


def cartridge(url: str, cartridge_id: str) -> object:
    """The answer with a Cartridge."""
    return chat(url, extra_body={"cartridge_ids": [cartridge_id]}).invoke(QUESTION).content


def embeddings(url: str) -> object:
    """Vectors of texts, sent as texts."""
    model: Any = OpenAIEmbeddings(
        base_url=f"{url}/v1", model="sample", check_embedding_ctx_length=False
    )
    return [*model.embed_documents(["a", "b"]), model.embed_query("c")]


CASES: dict[str, Any] = {
    function.__name__: function
    for function in (invoke, stream, astream, tools, responses, cartridge, embeddings)
}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](*sys.argv[2:])))  # noqa: T201 - its answer
