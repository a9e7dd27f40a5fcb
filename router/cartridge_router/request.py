"""What the gateway reads of a request, and what it writes into the body that goes to an engine.

Owns the fields the gateway knows. Refuses to know any other: they pass as bytes.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from cartridge_proto.composition import CompositionMessage, cache_salt
from cartridge_proto.digest import Digest
from cartridge_proto.names import (
    FIELD_ADD_SPECIAL_TOKENS,
    FIELD_CACHE_SALT,
    FIELD_CARTRIDGE_IDS,
    FIELD_CARTRIDGES,
    FIELD_CHAT_TEMPLATE,
    FIELD_CHAT_TEMPLATE_KWARGS,
    FIELD_EC_TRANSFER_PARAMS,
    FIELD_KV_HINTS,
    FIELD_KV_TRANSFER_PARAMS,
    FIELD_PREVIOUS_RESPONSE,
    FIELD_PRIORITY,
    FIELD_PROMPT,
    FIELD_PROMPT_EMBEDS,
    FIELD_REQUEST_ID,
    HEADER_CARTRIDGE_IDS,
    TEMPLATE_SWITCH,
)
from cartridge_router.body import InvalidBody, JsonBody
from cartridge_router.errors import InvalidRequest

MAX_CARTRIDGES = 16
MAX_CARTRIDGE_ID_CHARS = 257
BYTES_PER_TOKEN = 4
"""Rough length of a token in a JSON body, for the prefill estimate."""
MAX_ESTIMATE_TOKENS = 1 << 53
MAX_CHOICES = 128

_TAKEN_OUT = (
    FIELD_KV_TRANSFER_PARAMS,
    FIELD_EC_TRANSFER_PARAMS,
    FIELD_CACHE_SALT,
    FIELD_KV_HINTS,
    FIELD_REQUEST_ID,
    FIELD_PRIORITY,
)
"""Say how an engine works; without them it answers the same question."""
_REFUSED = (FIELD_PROMPT_EMBEDS, FIELD_CHAT_TEMPLATE)
"""Say what the model reads; without them it would answer another question."""
_LIST_OF = re.compile(rb'\[[ \t\r\n]*(["\[])')
"""A list of texts or of lists."""
_FORM = "multipart/form-data"
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,200})"|([^\s;,"]{1,200}))', re.IGNORECASE)
_PART_NAME = re.compile(rb'content-disposition:[^\r\n]*?[; ]name="([^"\r\n]*)"', re.IGNORECASE)
MAX_FORM_PARTS = 100
MAX_PART_HEAD_BYTES = 4096
"""Of a form's part, and of a text in it."""


class Route(StrEnum):
    """Routes by what the gateway does with them."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    """Passed as others are; its clients read Anthropic's errors."""
    OTHER = "other"
    """Anything else: passed to a replica of the model, without Cartridges."""


_PREFILLED: Final = frozenset({Route.CHAT, Route.COMPLETIONS, Route.RESPONSES, Route.MESSAGES})
_MEDIA: Final = (b"base64", b"_audio", b"_embeds")
"""What stands beside bytes that are no text, in data URLs and in parts of each API."""


class _Fields(msgspec.Struct):
    model: str
    cartridge_ids: list[str] | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    use_beam_search: bool | None = None
    max_tokens: float | None = None
    max_completion_tokens: float | None = None
    max_output_tokens: float | None = None
    n: float | None = None


_FIELDS_DECODER: Final = msgspec.json.Decoder(_Fields)
_FIELD_LITERALS: Final = {name: b'"%s":' % name.encode() for name in _Fields.__struct_fields__}


@dataclass(frozen=True)
class ParsedRequest:
    """One request. `cartridge_ids` is `None` when the client said nothing, `()` for "none"."""

    route: Route
    body: JsonBody | bytes
    """Bytes where it is no JSON object, as on some other routes: they pass as they are."""
    model: str
    """Empty without a JSON body, if that names none; any replica will do."""
    cartridge_ids: tuple[str, ...] | None
    num_live_tokens: int
    """Estimate from the body's size."""
    num_output_tokens: int
    """Longest answer that the request allows; 0 where it sets no limit."""
    num_choices: int = 1
    """Answers that are asked for (`n`)."""
    is_streamed: bool = False
    """Asks for events: its first token can be seen."""
    replaced: Mapping[str, bytes] | None = None
    """Members of the body that go to an engine with another value."""
    can_take_prefix: bool = True
    """False where it wants what a prefix without token ids cannot give."""

    @property
    def num_tokens(self) -> int:
        """What the request may take of a tenant's minute, estimated."""
        return self.num_live_tokens + self.num_output_tokens


def parse_request(
    route: Route,
    data: bytes,
    headers: Mapping[str, str],
    *,
    is_trusted: bool = False,
    needs_body: bool = True,
) -> ParsedRequest:
    """Read the fields the gateway knows, and refuse those that this client may not send.

    Raises:
        InvalidRequest: naming the field and, for limits, the limit.
    """
    content_type = headers.get("content-type", "")
    is_bare = not (data or needs_body)
    if route is Route.OTHER and (is_bare or content_type.startswith(_FORM)):
        return ParsedRequest(
            route=route,
            body=data,
            model=_form_field(data, content_type, "model"),
            cartridge_ids=None,
            num_live_tokens=0,
            num_output_tokens=0,
        )
    try:
        body = JsonBody(data)
    except InvalidBody as error:
        raise InvalidRequest(f"the body is {error}") from error
    if not is_trusted:
        _refuse_own_reading(body)
    present = [
        literal + body.members[name].value
        for name, literal in _FIELD_LITERALS.items()
        if name in body.members
    ]
    try:
        fields = _FIELDS_DECODER.decode(b"{" + b",".join(present) + b"}")
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error
    cartridge_ids = _cartridge_ids(fields.cartridge_ids, headers.get(HEADER_CARTRIDGE_IDS))
    hindrance = _hindrance_to_prefix(fields)
    if cartridge_ids and hindrance is not None:
        raise hindrance
    return ParsedRequest(
        route=route,
        body=body,
        model=fields.model,
        cartridge_ids=cartridge_ids,
        num_live_tokens=len(data) // BYTES_PER_TOKEN,
        num_output_tokens=_num_output_tokens(fields, body),
        num_choices=int(min(max(1.0, fields.n or 1.0), MAX_CHOICES)),
        is_streamed="stream" in body.members and body.members["stream"].value == b"true",
        can_take_prefix=hindrance is None,
    )


def has_known_length(request: ParsedRequest) -> bool:
    """Whether the size of its body says about how many tokens are prefilled.

    Images and sounds are many bytes and few tokens, and not on all routes anything is prefilled.
    """
    return request.route in _PREFILLED and not any(
        mark in request.body.data for mark in _MEDIA if isinstance(request.body, JsonBody)
    )


def previous_response_id(request: ParsedRequest) -> str | None:
    """The stored response that a new one goes on from; `None` without one.

    Raises:
        InvalidRequest: it is no text.
    """
    if isinstance(request.body, bytes):
        return None
    member = request.body.members.get(FIELD_PREVIOUS_RESPONSE)
    if member is None:
        return None
    try:
        return msgspec.json.decode(member.value, type=str | None)
    except msgspec.ValidationError as error:
        text = f"{FIELD_PREVIOUS_RESPONSE}: {error}"
        raise InvalidRequest(text, param=FIELD_PREVIOUS_RESPONSE) from error


def _form_field(data: bytes, content_type: str, name: str) -> str:
    """A text field of a form (audio comes in one); empty when there is none.

    Looks at the heads of parts only: a file of many megabytes is passed over, not parsed.
    """
    match = _BOUNDARY.search(content_type)
    if match is None:
        return ""
    delimiter = b"--" + (match[1] or match[2]).encode("utf-8", "surrogateescape")
    begin = data.find(delimiter)
    for _ in range(MAX_FORM_PARTS):
        head_begin = begin + len(delimiter)
        head_end = data.find(b"\r\n\r\n", head_begin, head_begin + MAX_PART_HEAD_BYTES)
        if begin < 0 or head_end < 0:
            break
        end = data.find(b"\r\n" + delimiter, head_end)
        named = _PART_NAME.search(data, head_begin, head_end)
        if named is not None and named[1] == name.encode() and head_end < end:
            return data[head_end + 4 : min(end, head_end + MAX_PART_HEAD_BYTES)].decode(
                "utf-8", "replace"
            )
        begin = end + 2 if end >= 0 else end
    return ""


def _refuse_own_reading(body: JsonBody) -> None:
    for name in _REFUSED:
        if name in body.members and body.members[name].value != b"null":
            raise InvalidRequest(f"{name} is taken from trusted tenants only", param=name)


def _num_output_tokens(fields: _Fields, body: JsonBody) -> int:
    limits = (fields.max_tokens, fields.max_completion_tokens, fields.max_output_tokens)
    longest = max((limit for limit in limits if limit is not None), default=0.0)
    num_answers = max(1.0, fields.n or 1.0) * _num_prompts(body)
    return math.ceil(min(max(0.0, longest * num_answers), MAX_ESTIMATE_TOKENS))


def _num_prompts(body: JsonBody) -> int:
    """How many prompts a completion has: a list of texts or of lists of token ids has many."""
    prompt = body.members.get(FIELD_PROMPT)
    kind = None if prompt is None else _LIST_OF.match(prompt.value)
    if prompt is None or kind is None:
        return 1
    if kind[1] == b"[":
        # Lists of ids have no other brackets in them.
        return prompt.value.count(b"[") - 1
    try:
        return len(msgspec.json.decode(prompt.value, type=list[str]))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{FIELD_PROMPT}: {error}", param=FIELD_PROMPT) from error


def _cartridge_ids(field: list[str] | None, header: str | None) -> tuple[str, ...] | None:
    if field is None and header is not None:
        field = [part.strip() for part in header.split(",") if part.strip()]
    if field is None:
        return None
    if len(field) > MAX_CARTRIDGES:
        raise InvalidRequest(
            f"{FIELD_CARTRIDGE_IDS}: {len(field)} given; the limit is {MAX_CARTRIDGES}",
            param=FIELD_CARTRIDGE_IDS,
        )
    for cartridge_id in field:
        if len(cartridge_id) > MAX_CARTRIDGE_ID_CHARS:
            raise InvalidRequest(
                f"{FIELD_CARTRIDGE_IDS}: an id of {len(cartridge_id)} characters; the limit is "
                f"{MAX_CARTRIDGE_ID_CHARS}",
                param=FIELD_CARTRIDGE_IDS,
            )
    return tuple(field)


def _hindrance_to_prefix(fields: _Fields) -> InvalidRequest | None:
    """What needs token ids of the prefix, or would silently leave the prefix out."""
    if fields.prompt_logprobs is not None:
        return InvalidRequest(
            "prompt_logprobs cannot be given with Cartridges: their positions have no tokens",
            param="prompt_logprobs",
        )
    if fields.echo:
        return InvalidRequest(
            "echo cannot be given with Cartridges: their positions have no text", param="echo"
        )
    if fields.use_beam_search:
        return InvalidRequest(
            "use_beam_search cannot be given with Cartridges: vLLM starts each beam as a request "
            "without its prefix",
            param="use_beam_search",
        )
    return None


def engine_body(
    request: ParsedRequest,
    message: CompositionMessage | None,
    *,
    is_trusted: bool,
    salt: str | None = None,
) -> bytes:
    """The bytes that go to an engine.

    `cartridge_ids` is always taken out; engine-internal fields are, unless the client is trusted.
    With a composition the gateway's own fields are put in, whoever sent them. `salt`: for a request
    without one, unless a trusted client has sent its own; `None` = none is put in.
    """
    if isinstance(request.body, bytes):
        return request.body
    remove = [FIELD_CARTRIDGE_IDS, *(() if is_trusted else _TAKEN_OUT)]
    if message is None:
        sent = request.body.members.get(FIELD_CACHE_SALT) if is_trusted else None
        if salt is None or (sent is not None and sent.value != b"null"):
            return request.body.edited(remove=remove, replace=request.replaced)
        add = {FIELD_CACHE_SALT: msgspec.json.encode(salt)}
        return request.body.edited(remove=remove, add=add, replace=request.replaced)
    add = {
        FIELD_KV_TRANSFER_PARAMS: msgspec.json.encode({FIELD_CARTRIDGES: message}),
        FIELD_CACHE_SALT: msgspec.json.encode(cache_salt(Digest(message.composition))),
    }
    if request.route is not Route.COMPLETIONS:
        add[FIELD_CHAT_TEMPLATE_KWARGS] = _template_kwargs(request.body)
    else:
        # A BOS in the middle of the sequence would change the answer.
        add[FIELD_ADD_SPECIAL_TOKENS] = b"false"
    return request.body.edited(remove=remove, add=add)


def _template_kwargs(body: JsonBody) -> bytes:
    present = body.members.get(FIELD_CHAT_TEMPLATE_KWARGS)
    if present is None or present.value == b"null":
        return msgspec.json.encode({TEMPLATE_SWITCH: True})
    try:
        return JsonBody(present.value).edited(add={TEMPLATE_SWITCH: b"true"})
    except InvalidBody as error:
        raise InvalidRequest(
            f"{FIELD_CHAT_TEMPLATE_KWARGS}: {error}", param=FIELD_CHAT_TEMPLATE_KWARGS
        ) from error
