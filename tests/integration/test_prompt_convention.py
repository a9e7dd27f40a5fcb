"""Chats with a Cartridge: the same token sequence as the ordinary prompt, down to the ids."""

import json

import openai
import pytest

from cartridge_engine_ext.build import Source
from cartridge_proto import names
from cartridge_proto.manifest import DEFAULT_INSTRUCTION
from cartridge_router.demo.stack import MODEL_NAME
from tests.integration.fleet import TOLERANCE, Fleet

pytestmark = pytest.mark.engine

DOCUMENT = (
    "The Zephyr-9 turbine was commissioned in Lindholm in 1987. It has eleven blades and is "
    "painted orange. Its chief engineer was Marta Quill."
)
QUESTION = {"role": "user", "content": "When was the Zephyr-9 turbine commissioned?"}
SYSTEM_TURN = {"role": "system", "content": DEFAULT_INSTRUCTION.format(document=DOCUMENT)}


@pytest.fixture(scope="module")
def cartridge(fleet: Fleet) -> str:
    """A chat Cartridge of the document."""
    built = fleet.builder.build(Source(text=DOCUMENT, name="zephyr"))
    fleet.wait_for_catalog(built.manifest.alias, built.digest)
    return built.manifest.alias


def _prefix_ids(fleet: Fleet) -> tuple[int, ...]:
    turn = fleet.tokenizer.apply_chat_template([SYSTEM_TURN], tokenize=False)
    return tuple(fleet.tokenizer(turn, add_special_tokens=False)["input_ids"])


def test_chat_is_the_same_token_sequence(fleet: Fleet, cartridge: str) -> None:
    """The Cartridge's tokens and the live tokens are together the ordinary prompt's."""
    ordinary = fleet.chat([SYSTEM_TURN, QUESTION])
    injected = fleet.chat([QUESTION], [cartridge])
    assert ordinary.prompt_token_ids == _prefix_ids(fleet) + injected.prompt_token_ids
    assert ordinary.difference(injected) <= TOLERANCE


def test_clients_own_system_message_stays_as_a_later_turn(fleet: Fleet, cartridge: str) -> None:
    """A system message of the client follows the Cartridge's system turn."""
    own = {"role": "system", "content": "Answer in one word."}
    ordinary = fleet.chat([SYSTEM_TURN, own, QUESTION])
    injected = fleet.chat([own, QUESTION], [cartridge])
    assert ordinary.prompt_token_ids == _prefix_ids(fleet) + injected.prompt_token_ids
    assert ordinary.difference(injected) <= TOLERANCE


def test_plain_chat_keeps_the_models_own_default_system_turn(fleet: Fleet) -> None:
    """Without a Cartridge the wrapped template renders what the model's own template does."""
    plain = fleet.chat([QUESTION])
    text = fleet.tokenizer.apply_chat_template(
        [QUESTION], add_generation_prompt=True, tokenize=False
    )
    assert (
        list(plain.prompt_token_ids) == fleet.tokenizer(text, add_special_tokens=False)["input_ids"]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_official_client_gets_the_answer(fleet: Fleet, cartridge: str, *, stream: bool) -> None:
    """The openai SDK uses a Cartridge through `extra_body`, streaming and not."""
    client = openai.OpenAI(base_url=f"{fleet.gateway_url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": QUESTION["content"]}],
        temperature=0,
        max_tokens=24,
        stream=stream,
        extra_body={names.FIELD_CARTRIDGE_IDS: [cartridge]},
    )
    if isinstance(answer, openai.Stream):
        pieces = [chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices]
        assert len(pieces) > 2, "it did not stream"
        text = "".join(pieces)
    else:
        text = answer.choices[0].message.content or ""
    assert "1987" in text


def test_chat_cartridge_on_completions_is_refused(fleet: Fleet, cartridge: str) -> None:
    """A system turn does not go before raw text: 409 naming the field."""
    body = {"model": MODEL_NAME, "prompt": "x", names.FIELD_CARTRIDGE_IDS: [cartridge]}
    response = fleet.post("/v1/completions", body)
    assert response.status_code == 409, response.text
    assert "prompt_convention.kind" in json.loads(response.text)["error"]["message"]
