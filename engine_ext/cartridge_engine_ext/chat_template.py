"""The prompt convention `system_turn`: who renders which part of a chat.

Owns the wrapped chat template that engines serve and the split between a Cartridge's system turn
and the live prompt. Refuses templates in which a system turn is not a plain beginning.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto.names import TEMPLATE_SWITCH

Message = dict[str, str]
Render = Callable[[str | None, Sequence[Message], bool, dict[str, Any]], str]
"""(template or None for the model's own, messages, add_generation_prompt, kwargs) -> text."""

_SAMPLES: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "When was it built?"},),
    (
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "When was it built?"},
    ),
    (
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": " Two\nlines "},
    ),
)

_HEAD = "{%- set cartridge_marker = [{'role': 'system', 'content': 'x'}] -%}"


def wrap_chat_template(original: str) -> str:
    """A template that renders like `original`, or, switched on, without BOS and system turn.

    Switched on, the text is what follows the system turn when the conversation is rendered with
    one in front. A system message of the client stays, as a later turn.
    """
    call = "cartridge_original({messages}, {generate}, {tools})"
    head = call.format(messages="cartridge_marker", generate="false", tools="tools")
    bare_head = call.format(messages="cartridge_marker", generate="false", tools="none")
    whole = call.format(
        messages="cartridge_marker + messages", generate="add_generation_prompt", tools="tools"
    )
    plain = call.format(messages="messages", generate="add_generation_prompt", tools="tools")
    return (
        # Engines render with trim_blocks and lstrip_blocks. The newline is the one that the macro's
        # tag takes away, the sign + keeps spaces before its end, and a last newline of the original
        # is one that Jinja would have dropped.
        "{% macro cartridge_original(messages, add_generation_prompt, tools) %}\n"
        + original.removesuffix("\n").removesuffix("\r")
        + "{%+ endmacro %}"
        + f"{{%- if {TEMPLATE_SWITCH} is defined and {TEMPLATE_SWITCH} -%}}"
        + _HEAD
        + f"{{%- set cartridge_head = {head} -%}}"
        + f"{{%- set cartridge_whole = {whole} -%}}"
        + f"{{%- if cartridge_head != {bare_head} -%}}"
        + "{{- raise_exception('this chat template puts tools into the system turn, which a "
        + "Cartridge replaces') -}}{%- endif -%}"
        + "{%- if not cartridge_whole.startswith(cartridge_head) -%}"
        + "{{- raise_exception('this chat template has no separate system turn') -}}{%- endif -%}"
        + "{{- cartridge_whole[cartridge_head|length:] -}}"
        + f"{{%- else -%}}{{{{- {plain} -}}}}{{%- endif -%}}"
    )


def system_turn(render: Render, content: str) -> str:
    """The text of a system turn with this content, BOS and special tokens included.

    Raises:
        ConfigurationError: the template has no separate system turn.
    """
    turn = [{"role": "system", "content": content}]
    head = render(None, turn, False, {})
    whole = render(None, [*turn, *_SAMPLES[0]], True, {})
    if not head or content.strip() not in head or not whole.startswith(head):
        raise ConfigurationError(
            "the chat template has no system turn that stands on its own before the conversation; "
            "use the document convention with /v1/completions"
        )
    return head


def check_wrapped(render: Render, tokenize: Callable[[str], list[int]], wrapped: str) -> None:
    """Prove a wrapped template on sample conversations, down to the token ids.

    Raises:
        ConfigurationError: switched off it renders differently, or switched on the Cartridge's
            tokens and the live tokens are not the tokens of the whole.
    """
    for sample in _SAMPLES:
        if render(wrapped, sample, True, {}) != render(None, sample, True, {}):
            raise ConfigurationError("the wrapped chat template changes ordinary prompts")
        head = system_turn(render, "A document.")
        live = render(wrapped, sample, True, {TEMPLATE_SWITCH: True})
        whole = render(None, [{"role": "system", "content": "A document."}, *sample], True, {})
        if head + live != whole:
            raise ConfigurationError("the wrapped chat template changes the live prompt")
        if tokenize(head) + tokenize(live) != tokenize(whole):
            raise ConfigurationError(
                "the tokenizer joins the end of the system turn with what follows"
            )


def renderer_of(tokenizer: Any) -> Render:
    """Render with a transformers tokenizer."""

    def render(
        template: str | None,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
    ) -> str:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **kwargs,
        )
        return text

    return render


def tokenize_verbatim(tokenizer: Any) -> Callable[[str], list[int]]:
    """Token ids of a text that already holds its special tokens."""
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])
