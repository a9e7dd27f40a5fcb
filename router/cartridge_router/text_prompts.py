"""The same request with the texts of its Cartridges in the prompt, for when they cannot be had.

Owns where the texts go in each API, and how many tokens they are thought to be. Refuses to change
another byte, and prompts that are not made of text.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from cartridge_proto.manifest import DensePositions, Kind, Manifest
from cartridge_proto.names import (
    FIELD_CONTENT,
    FIELD_INSTRUCTIONS,
    FIELD_MESSAGES,
    FIELD_PROMPT,
    FIELD_ROLE,
    FIELD_SYSTEM,
)
from cartridge_router.body import InvalidBody, JsonBody
from cartridge_router.request import BYTES_PER_TOKEN, ParsedRequest, Route

SEPARATOR: Final = "\n\n"
"""Between texts, and before a system message that the client sent."""
_DOCUMENT: Final = "{document}"
_BEGIN_OF_LIST: Final = re.compile(rb"[ \t\n\r]*\[[ \t\n\r]*")
_MESSAGES: Final = msgspec.json.Decoder(list[msgspec.Raw])
_FIELD: Final = {
    Route.COMPLETIONS: FIELD_PROMPT,
    Route.CHAT: FIELD_MESSAGES,
    Route.RESPONSES: FIELD_INSTRUCTIONS,
    Route.MESSAGES: FIELD_SYSTEM,
}


def num_text_tokens(manifest: Manifest, text: str | None) -> int:
    """About how many tokens a text is; at least so many, where it has not been read (`None`).

    A prefill of the whole document has one position for each token of it, all that stands around
    it included. Of others the virtual length says less than there is.
    """
    is_whole = manifest.kind is Kind.PREFILL and isinstance(manifest.positions, DensePositions)
    if is_whole or text is None:
        return manifest.num_tokens
    return max(manifest.num_tokens, len(text.encode()) // BYTES_PER_TOKEN)


def with_text_tokens(request: ParsedRequest, num_tokens: int) -> ParsedRequest:
    """A request of which more has to be prefilled."""
    return dataclasses.replace(request, num_live_tokens=request.num_live_tokens + num_tokens)


def can_take_texts(request: ParsedRequest) -> bool:
    """Whether its prompt is made of text, so that more can be put in front."""
    return _put(request, " ", "") is not None


def with_texts(
    request: ParsedRequest, texts: Sequence[str], instruction: str
) -> ParsedRequest | None:
    """The request with texts where its API has what stands before all else.

    A text goes in front of the prompt of a completion as it is; into a system message by way of
    `instruction`, which has `{document}` in it. `None`: the prompt is token ids, or several, or
    nothing that the API takes.
    """
    framed = [instruction.replace(_DOCUMENT, text) for text in texts]
    replaced = _put(request, SEPARATOR.join(framed), SEPARATOR.join(texts))
    if replaced is None:
        return None
    return dataclasses.replace(request, replaced={_FIELD[request.route]: replaced})


def _put(request: ParsedRequest, system: str, bare: str) -> bytes | None:
    field = _FIELD.get(request.route)
    if field is None or not isinstance(request.body, JsonBody):
        return None
    member = request.body.members.get(field)
    value = None if member is None or member.value == b"null" else member.value
    if request.route is Route.COMPLETIONS:
        # Whatever stands between text and prompt, as a blank line, is the client's to send.
        return None if value is None else _before_string(bare, value)
    if request.route is Route.CHAT:
        return None if value is None else _before_messages(system, value)
    if value is None:
        return msgspec.json.encode(system)
    return _before_content(system, value)


def _before_string(text: str, value: bytes) -> bytes | None:
    """A string with a text in front, its own bytes as they were."""
    return msgspec.json.encode(text)[:-1] + value[1:] if value.startswith(b'"') else None


def _before_content(text: str, value: bytes) -> bytes | None:
    """A message's content, a string or a list of parts, with a text in front."""
    if value.startswith(b'"'):
        return _before_string(text + SEPARATOR, value)
    if not value.startswith(b"["):
        return None
    return _before_first(msgspec.json.encode({"type": "text", "text": text}), value)


def _before_messages(text: str, value: bytes) -> bytes | None:
    """A chat that begins with a text as its system message, or with the client's behind it."""
    try:
        messages = _MESSAGES.decode(value)
        if not messages:
            return None
        first = bytes(messages[0])
        message = JsonBody(first)
    except (msgspec.DecodeError, InvalidBody):
        # The engine says what is wrong with it.
        return None
    role, content = message.members.get(FIELD_ROLE), message.members.get(FIELD_CONTENT)
    if role is None:
        return None
    if msgspec.json.decode(role.value) != "system":
        turn = msgspec.json.encode({FIELD_ROLE: "system", FIELD_CONTENT: text})
        return _before_first(turn, value)
    merged = None if content is None else _before_content(text, content.value)
    begin = _BEGIN_OF_LIST.match(value)
    if merged is None or begin is None:
        return None
    rest = value[begin.end() + len(first) :]
    return value[: begin.end()] + message.edited(replace={FIELD_CONTENT: merged}) + rest


def _before_first(element: bytes, value: bytes) -> bytes | None:
    """A list with one more element in front; `None` for an empty one."""
    begin = _BEGIN_OF_LIST.match(value)
    if begin is None or value[begin.end() :].startswith(b"]"):
        return None
    return value[: begin.end()] + element + b"," + value[begin.end() :]
