"""What a request asks, as text to look for documents with.

Owns where each API keeps the words of its user. Refuses to look anything up.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from cartridge_router.body import JsonBody
from cartridge_router.request import ParsedRequest, Route

MAX_CHARACTERS: Final = 4000
"""Of the last turn."""
MAX_EARLIER_CHARACTERS: Final = 400
"""Of the turn before, which a short one is read with."""
FEW_WORDS: Final = 6
"""A turn of so many or fewer ("And in winter?") says little on its own."""


class _Part(msgspec.Struct):
    type: str = ""
    text: str = ""


class _Turn(msgspec.Struct):
    role: str = ""
    content: str | list[_Part] | None = None


_FIELDS: Final = {
    Route.CHAT: "messages",
    Route.MESSAGES: "messages",
    Route.RESPONSES: "input",
    Route.COMPLETIONS: "prompt",
}
_TURNS: Final = msgspec.json.Decoder(str | list[_Turn])
_TEXTS: Final = frozenset({"text", "input_text"})


def question_of(request: ParsedRequest) -> str:
    """The last turn of the user, with the one before it if it is short; empty if there is none."""
    field = _FIELDS.get(request.route)
    if field is None or not isinstance(request.body, JsonBody):
        return ""
    member = request.body.members.get(field)
    if member is None:
        return ""
    try:
        turns = _TURNS.decode(member.value)
    except msgspec.DecodeError:
        # Not what this API takes, or token ids: the engine says so, or there are no words.
        return ""
    if isinstance(turns, str):
        return turns[-MAX_CHARACTERS:].strip()
    return _joined([_text_of(turn) for turn in turns if turn.role in ("user", "")])


def _text_of(turn: _Turn) -> str:
    if isinstance(turn.content, str):
        return turn.content.strip()
    parts = turn.content or ()
    return "\n".join(part.text for part in parts if part.type in _TEXTS).strip()


def _joined(said: Sequence[str]) -> str:
    texts = [text for text in said if text]
    if not texts:
        return ""
    last = texts[-1][-MAX_CHARACTERS:]
    if len(texts) > 1 and len(last.split()) <= FEW_WORDS:
        return f"{texts[-2][-MAX_EARLIER_CHARACTERS:]}\n{last}"
    return last
