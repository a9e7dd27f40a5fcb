"""What the Anthropic SDK for Python makes of a gateway's answers.

Owns calls of the SDK, one case each. Refuses to judge: it prints what it saw as JSON.
"""

import json
import sys
from typing import Any

import anthropic

MESSAGES: Any = [{"role": "user", "content": "When does it open?"}]
ASKED: Any = {"model": "sample", "max_tokens": 5, "messages": MESSAGES}


def client(url: str, **fields: Any) -> anthropic.Anthropic:
    """A client without retries."""
    return anthropic.Anthropic(base_url=url, **({"max_retries": 0} | fields))


def message(url: str) -> object:
    """One answer, whole."""
    answer = client(url).messages.create(**ASKED)
    return [answer.content[0].text, answer.stop_reason, answer.usage.output_tokens]


def stream(url: str) -> object:
    """One answer, piece by piece."""
    with client(url).messages.stream(**ASKED) as events:
        parts = list(events.text_stream)
        final = events.get_final_message()
    return [parts, final.stop_reason, final.usage.output_tokens]


def count_tokens(url: str) -> object:
    """How long a prompt is."""
    return client(url).messages.count_tokens(model="sample", messages=MESSAGES).input_tokens


def models(url: str) -> object:
    """Names in the list of models."""
    return [model.id for model in client(url).models.list()]


def error(url: str, fields: str, key: str = "") -> object:
    """What the SDK raises for a message with these fields."""
    more = {"api_key": key} if key else {}
    try:
        client(url, **more).messages.create(**(ASKED | json.loads(fields)))
    except anthropic.APIStatusError as raised:
        return {
            "class": type(raised).__name__,
            "status": raised.status_code,
            "body": raised.body,
            "retry_after": raised.response.headers.get("retry-after"),
        }
    return None


def broken_stream(url: str) -> object:
    """What the SDK raises when a stream breaks off."""
    num_seen = 0
    try:
        with client(url).messages.stream(**ASKED) as events:
            for _ in events:
                num_seen += 1
    except anthropic.APIError as raised:
        return {"class": type(raised).__name__, "body": raised.body, "num_seen": num_seen}
    return None


CASES: dict[str, Any] = {
    function.__name__: function
    for function in (message, stream, count_tokens, models, error, broken_stream)
}

if __name__ == "__main__":
    print(json.dumps(CASES[sys.argv[1]](*sys.argv[2:])))  # noqa: T201 - its answer
