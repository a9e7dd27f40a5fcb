"""What a request may ask for beside its Cartridge: as with the ordinary prompt, or refused.

`docs/compatibility.md` names these tests.
"""

import json
from typing import Any

import pytest
import torch

from cartridge_proto.names import FIELD_CARTRIDGE_IDS
from cartridge_router.demo.stack import MODEL_NAME
from tests.integration.fleet import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    LIVE_PROMPT,
    TOLERANCE,
    DenseReference,
    Fleet,
    document_tokens,
)

pytestmark = pytest.mark.engine

DOCUMENT = document_tokens(BLOCK_SIZE + 9, seed=600)
NAME = "features"


@pytest.fixture(scope="module")
def cartridge(fleet: Fleet) -> str:
    """One Cartridge for all tests here."""
    fleet.put(NAME, DOCUMENT)
    return f"{NAME}@1"


def choices(
    fleet: Fleet, prompt: Any, cartridge_ids: list[str], **extra: Any
) -> list[dict[str, Any]]:
    """Choices of a greedy completion."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        FIELD_CARTRIDGE_IDS: cartridge_ids,
        **extra,
    }
    response = fleet.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def expect_equal(ordinary: list[dict[str, Any]], injected: list[dict[str, Any]]) -> None:
    """The same tokens with the same logprobs, choice by choice."""
    assert len(ordinary) == len(injected)
    for one, other in zip(ordinary, injected, strict=True):
        assert one["token_ids"] == other["token_ids"]
        pairs = zip(
            one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True
        )
        assert max(abs(a - b) for a, b in pairs) <= TOLERANCE


FEATURES: dict[str, dict[str, Any]] = {
    "several choices": {"n": 3, "temperature": 0.8, "seed": 11},
    "sampling with a seed": {"temperature": 1.0, "top_p": 0.9, "top_k": 20, "seed": 5},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 1.5},
    "logit bias": {"logit_bias": {"260": 4.0}},
    "allowed tokens": {"allowed_token_ids": list(range(200, 900))},
    "bad words": {"bad_words": [" the"]},
    "minimum length": {"ignore_eos": False, "min_tokens": 8},
    "alternatives": {"logprobs": 5},
    "one of a list": {"structured_outputs": {"choice": ["harbour", "lighthouse"]}},
    "a regular expression": {"structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}"}},
}


@pytest.mark.parametrize("extra", FEATURES.values(), ids=FEATURES)
def test_a_feature_works_as_with_the_ordinary_prompt(
    fleet: Fleet, cartridge: str, extra: dict[str, Any]
) -> None:
    """Same tokens and logprobs as when the document stands in the prompt."""
    ordinary = choices(fleet, DOCUMENT + LIVE_PROMPT, [], **extra)
    injected = choices(fleet, LIVE_PROMPT, [cartridge], **extra)
    expect_equal(ordinary, injected)
    if extra.get("n"):
        assert len({tuple(choice["token_ids"]) for choice in injected}) > 1, "choices must differ"


def test_a_json_schema_binds_the_chat_answer(fleet: Fleet, cartridge: str) -> None:
    """Structured output through the OpenAI field, behind a Cartridge, is valid and equal."""
    schema = {
        "type": "object",
        "properties": {"open": {"type": "boolean"}},
        "required": ["open"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "hours", "schema": schema}}
    extra = {"response_format": form, "max_tokens": 20, "ignore_eos": False}
    ordinary = choices(fleet, DOCUMENT + LIVE_PROMPT, [], **extra)
    injected = choices(fleet, LIVE_PROMPT, [cartridge], **extra)
    expect_equal(ordinary, injected)
    assert isinstance(json.loads(injected[0]["text"])["open"], bool)


def test_several_prompts_each_get_the_prefix(fleet: Fleet, cartridge: str) -> None:
    """A list of prompts in one request: each is answered behind the Cartridge."""
    live = [LIVE_PROMPT, LIVE_PROMPT[:4]]
    ordinary = choices(fleet, [DOCUMENT + prompt for prompt in live], [])
    expect_equal(ordinary, choices(fleet, live, [cartridge]))


def test_a_live_prompt_in_chunks(fleet: Fleet, cartridge: str) -> None:
    """A live prompt longer than a step is prefilled in chunks behind the virtual prefix."""
    live = document_tokens(CHUNK_TOKENS * 2 + 30, seed=601)
    ordinary = choices(fleet, DOCUMENT + live, [])
    expect_equal(ordinary, choices(fleet, live, [cartridge]))


def test_a_repetition_penalty_counts_live_tokens_only(
    fleet: Fleet, cartridge: str, dense_reference: DenseReference
) -> None:
    """Virtual positions have no token ids: the penalty sees what the client sent, and the answer.

    The ordinary prompt would be punished for the document's words too, so the reference here is
    computed by hand.
    """
    penalty = 8.0
    (choice,) = choices(fleet, LIVE_PROMPT, [cartridge], repetition_penalty=penalty, max_tokens=1)
    logits = dense_reference.logits([DOCUMENT], LIVE_PROMPT)
    punished = logits.clone()
    seen = torch.tensor(LIVE_PROMPT)
    punished[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    assert choice["token_ids"] == [int(punished.argmax())]
    of_all = logits.clone()
    seen = torch.tensor(DOCUMENT + LIVE_PROMPT)
    of_all[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    (ordinary,) = choices(
        fleet, DOCUMENT + LIVE_PROMPT, [], repetition_penalty=penalty, max_tokens=1
    )
    assert ordinary["token_ids"] == [int(of_all.argmax())]


def test_beam_search_is_refused(fleet: Fleet, cartridge: str) -> None:
    """VLLM starts beams as requests of their own, without the prefix: never silently."""
    body = {
        "model": MODEL_NAME,
        "prompt": LIVE_PROMPT,
        "use_beam_search": True,
        "n": 2,
        "max_tokens": 4,
        FIELD_CARTRIDGE_IDS: [cartridge],
    }
    response = fleet.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "use_beam_search"
