"""The wrapped template: equal when off, exactly what follows the system turn when on, or refused.

Everything is rendered by transformers, as engines do it, with small tokenizers made in memory.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from cartridge_engine_ext.chat_template import (
    Message,
    Render,
    check_wrapped,
    renderer_of,
    system_turn,
    tokenize_verbatim,
    wrap_chat_template,
)
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto.names import TEMPLATE_SWITCH

BOS = "<|begin_of_text|>"

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Of SmolLM2-135M-Instruct: a default system turn, no BOS."""

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Llama 3: BOS before the first message, no default system turn."""

MULTILINE = """
{%- macro turn(role, text) -%}
    {{- '<|' + role + '|>' + text + '\\n' -}}
{%- endmacro -%}
{{- bos_token }}
{%- set ns = namespace(system='Be kind. Today is ' + strftime_now('%Y') + '.') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- turn('system', ns.system) }}
{%- if tools is not none %}
    {{- turn('tools', tools | tojson) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{%- endif %}
  {{ '  ' }}
    {{- turn(message.role, message.content) }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('<think>' if enable_thinking is defined and enable_thinking else '') }}
{%- endif %}
"""
"""A macro, a namespace, a default system turn with a date, a switch of its own, BOS, newlines."""

TOOLS_IN_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ '[S]' + messages[0].content }}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ '[/S]' }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ '[' + m.role + ']' + m.content }}{% endfor %}"
)
"""Lists the tools inside the system turn."""

TOOLS_IN_USER = (
    "{% for m in messages %}{{ '[' + m.role + ']' }}{% if tools and m.role == 'user' %}"
    "{{ tools | tojson }}{% endif %}{{ m.content }}{% endfor %}"
)
"""Lists the tools inside user turns."""

FOLDED = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n' "
    "%}{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
    "{% endif %}{% for m in rest %}{{ '<turn>' + m.role + '\n' }}{% if loop.first %}{{ first }}"
    "{% endif %}{{ m.content + '</turn>' }}{% endfor %}"
)
"""Puts the system message into the first user turn, as Gemma does."""

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must be first') }}{% endif %}{{ '<' + m.role + '>' + m.content }}"
    "{% endfor %}"
)
"""Allows no second system message."""

GOOD = {"smollm2": SMOLLM2, "llama3": LLAMA3, "multiline": MULTILINE}

DOCUMENT: Message = {"role": "system", "content": "The harbour opened in 1902."}
TOOL = {
    "type": "function",
    "function": {"name": "tide", "description": "Tide.", "parameters": {"type": "object"}},
}


def tokenizer_of(
    template: str, *, merges: Sequence[tuple[str, str]] = (), special: Sequence[str] = ()
) -> Any:
    """A tokenizer over single characters with a chat template; `merges` join pairs of them."""
    signs = [chr(code) for code in (10, *range(32, 127))]
    vocabulary = {text: index for index, text in enumerate([*signs, *map("".join, merges)])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=list(merges)))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS)
    fast.add_special_tokens({"additional_special_tokens": list(special)})
    fast.chat_template = template
    return fast


def render_of(template: str) -> Render:
    """Renders like an engine whose model has this template."""
    return renderer_of(tokenizer_of(template))


def on(**kwargs: Any) -> dict[str, Any]:
    """Template arguments with the switch set."""
    return {TEMPLATE_SWITCH: True, **kwargs}


texts = st.text(
    st.characters(codec="ascii", exclude_categories=["Cc"]) | st.just("\n"), max_size=20
)
conversations = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts}),
    min_size=1,
    max_size=4,
)


# --- templates that work -------------------------------------------------------------------------
@pytest.mark.parametrize("template", GOOD.values(), ids=GOOD)
def test_a_good_template_passes_its_check(template: str) -> None:
    """Wrapping is proved on sample conversations, down to the tokens."""
    tokenizer = tokenizer_of(template)
    check_wrapped(
        renderer_of(tokenizer), tokenize_verbatim(tokenizer), wrap_chat_template(template)
    )


@pytest.mark.parametrize("template", [*GOOD.values(), TOOLS_IN_SYSTEM, FOLDED])
@given(conversation=conversations, has_system=st.booleans(), generate=st.booleans())
def test_switched_off_nothing_changes(
    template: str, conversation: list[Message], has_system: bool, generate: bool
) -> None:
    """Without the switch, or with it off, every prompt is the original's."""
    render, wrapped = render_of(template), wrap_chat_template(template)
    messages = [DOCUMENT, *conversation] if has_system else conversation
    for kwargs in ({}, {"tools": [TOOL]}, {"enable_thinking": True}):
        original = render(None, messages, generate, kwargs)
        assert render(wrapped, messages, generate, kwargs) == original
        assert render(wrapped, messages, generate, {**kwargs, TEMPLATE_SWITCH: False}) == original


@pytest.mark.parametrize("template", GOOD.values(), ids=GOOD)
@given(conversation=conversations, generate=st.booleans())
def test_switched_on_the_live_prompt_completes_the_system_turn(
    template: str, conversation: list[Message], generate: bool
) -> None:
    """The Cartridge's text and the live prompt together are the ordinary prompt, BOS only once."""
    render, wrapped = render_of(template), wrap_chat_template(template)
    head = system_turn(render, DOCUMENT["content"])
    live = render(wrapped, conversation, generate, on())
    assert head + live == render(None, [DOCUMENT, *conversation], generate, {})
    assert BOS not in live


@pytest.mark.parametrize("template", GOOD.values(), ids=GOOD)
@pytest.mark.parametrize("before", ["", "\n", "  ", "\n  \n"], ids=repr)
@pytest.mark.parametrize("after", ["", "\n", "\n\n", "  ", "\n  "], ids=repr)
def test_space_around_a_template_is_kept(template: str, before: str, after: str) -> None:
    """Files often end in a newline: the wrapped template renders it as transformers would."""
    spaced = before + template + after
    render, wrapped = render_of(spaced), wrap_chat_template(spaced)
    conversation = [DOCUMENT, {"role": "user", "content": "When?"}]
    original = render(None, conversation, True, {})
    assert render(wrapped, conversation, True, {}) == original


def test_arguments_of_the_template_itself_still_work() -> None:
    """With the switch on, other template arguments reach the original."""
    render, wrapped = render_of(MULTILINE), wrap_chat_template(MULTILINE)
    question: list[Message] = [{"role": "user", "content": "When?"}]
    assert render(wrapped, question, True, on(enable_thinking=True)).endswith("<think>")
    assert not render(wrapped, question, True, on()).endswith("<think>")


@pytest.mark.parametrize("template", [SMOLLM2, LLAMA3], ids=["smollm2", "llama3"])
def test_a_second_system_message_stays(template: str) -> None:
    """The client's own system message follows the Cartridge as a later turn."""
    render, wrapped = render_of(template), wrap_chat_template(template)
    own: Message = {"role": "system", "content": "Answer in one word."}
    conversation = [own, {"role": "user", "content": "When?"}]
    live = render(wrapped, conversation, True, on())
    assert live.count("Answer in one word.") == 1
    assert live.index("Answer in one word.") < live.index("When?")
    whole = render(None, [DOCUMENT, *conversation], True, {})
    assert system_turn(render, DOCUMENT["content"]) + live == whole


def test_no_default_system_turn_follows_a_cartridge() -> None:
    """A template that invents a system turn does not do so after a Cartridge's."""
    question: list[Message] = [{"role": "user", "content": "When?"}]
    render = render_of(SMOLLM2)
    assert "You are a helpful" in render(None, question, True, {})
    live = render(wrap_chat_template(SMOLLM2), question, True, on())
    assert live == "<|im_start|>user\nWhen?<|im_end|>\n<|im_start|>assistant\n"


def test_a_system_turn_holds_bos_and_content() -> None:
    """What a Cartridge stands for begins with BOS where the template has one."""
    assert system_turn(render_of(LLAMA3), "A text.") == (
        f"{BOS}<|start_header_id|>system<|end_header_id|>\n\nA text.<|eot_id|>"
    )


# --- templates that cannot work ------------------------------------------------------------------
def test_tools_in_the_system_turn_raise() -> None:
    """A request whose tools would vanish with the system turn is an error, not a silent loss."""
    render, wrapped = render_of(TOOLS_IN_SYSTEM), wrap_chat_template(TOOLS_IN_SYSTEM)
    question: list[Message] = [{"role": "user", "content": "When?"}]
    assert render(wrapped, question, True, on()) == "[user]When?"
    with pytest.raises(TemplateError, match="puts tools into the system turn"):
        render(wrapped, question, True, on(tools=[TOOL]))


def test_tools_after_the_system_turn_are_kept() -> None:
    """A template that lists tools in the first user turn still lists them."""
    render, wrapped = render_of(TOOLS_IN_USER), wrap_chat_template(TOOLS_IN_USER)
    question: list[Message] = [{"role": "user", "content": "When?"}]
    live = render(wrapped, question, True, on(tools=[TOOL]))
    assert '"tide"' in live
    assert live.endswith("When?")


def test_a_folded_system_message_is_refused() -> None:
    """A system message that becomes part of the first user turn cannot be a Cartridge's."""
    tokenizer = tokenizer_of(FOLDED)
    render = renderer_of(tokenizer)
    with pytest.raises(ConfigurationError, match="no system turn that stands on its own"):
        system_turn(render, "A text.")
    with pytest.raises(ConfigurationError, match="no system turn that stands on its own"):
        check_wrapped(render, tokenize_verbatim(tokenizer), wrap_chat_template(FOLDED))


def test_a_template_without_later_system_messages_says_so() -> None:
    """The template's own error about a client's second system message reaches the client."""
    render, wrapped = render_of(STRICT), wrap_chat_template(STRICT)
    question: Message = {"role": "user", "content": "When?"}
    assert render(wrapped, [question], False, on()) == "<user>When?"
    with pytest.raises(TemplateError, match="system must be first"):
        render(wrapped, [DOCUMENT, question], False, on())


def test_a_wrapping_of_another_template_is_refused() -> None:
    """The check notices a wrapped template that renders ordinary prompts differently."""
    tokenizer = tokenizer_of(SMOLLM2)
    with pytest.raises(ConfigurationError, match="changes ordinary prompts"):
        check_wrapped(
            renderer_of(tokenizer), tokenize_verbatim(tokenizer), wrap_chat_template(LLAMA3)
        )


def test_a_template_without_the_switch_is_refused() -> None:
    """The check notices that the original, not wrapped at all, gives the wrong live prompt."""
    tokenizer = tokenizer_of(SMOLLM2)
    with pytest.raises(ConfigurationError, match="changes the live prompt"):
        check_wrapped(renderer_of(tokenizer), tokenize_verbatim(tokenizer), SMOLLM2)


def test_a_tokenizer_that_joins_across_the_boundary_is_refused() -> None:
    """Equal text is not enough: the last sign of the turn must not join the first live one."""
    joining = tokenizer_of(SMOLLM2, merges=[("\n", "<")])
    with pytest.raises(ConfigurationError, match="joins the end of the system turn"):
        check_wrapped(renderer_of(joining), tokenize_verbatim(joining), wrap_chat_template(SMOLLM2))
    split = tokenizer_of(SMOLLM2, merges=[("\n", "<")], special=["<|im_start|>", "<|im_end|>"])
    check_wrapped(renderer_of(split), tokenize_verbatim(split), wrap_chat_template(SMOLLM2))
