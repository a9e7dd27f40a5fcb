"""Compositions: an ordered set of artifacts, where each stands, and one identity for all of it.

Owns the message a gateway sends to an engine, the position layouts and the identity that becomes
`cache_salt`. Refuses to know manifests' stores, blocks or tensors.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from cartridge_proto.digest import END, Digest, DigestText, length_prefixed, sha256_digest
from cartridge_proto.manifest import MAX_TOKENS, ModelIdentity, PositionLayout
from cartridge_proto.names import DOMAIN_COMPOSITION, DOMAIN_FINGERPRINT

MAX_ITEMS = 64

RequestIdText = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,128}" + END)]
ScopeText = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}" + END)]
TokenCount = Annotated[int, msgspec.Meta(gt=0, le=MAX_TOKENS)]
TokenOffset = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class OnMiss(StrEnum):
    """What an engine does when an artifact cannot be had before the deadline."""

    FAIL = "fail"
    PREFILL = "prefill"
    DROP = "drop"


TraceParent = Annotated[
    str, msgspec.Meta(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}" + END)
]


class CompositionItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One artifact at its place: `offset` is the position of its first token."""

    digest: DigestText
    num_tokens: TokenCount
    offset: TokenOffset


class CompositionMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_transfer_params.cartridges`: what a gateway asks an engine to put before a prompt.

    `visibility[i]` says whether live tokens may read item i; one that they may not is as if it were
    not there, but for the identity. `deadline_ms` bounds the load.
    `traceparent` links the engine's spans to a trace (W3C Trace Context); no part of identity.
    """

    v: Literal[1]
    request_id: RequestIdText
    composition: DigestText
    scope: ScopeText
    layout: PositionLayout
    items: Annotated[list[CompositionItem], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    visibility: Annotated[list[bool], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
    deadline_ms: Annotated[int, msgspec.Meta(gt=0, le=3_600_000)]
    on_miss: OnMiss
    traceparent: TraceParent | None = None

    @property
    def num_tokens(self) -> int:
        """Virtual length: positions that stand before the first live token."""
        return sum(item.num_tokens for item in self.visible_items)

    @property
    def visible_items(self) -> list[CompositionItem]:
        """Those that live tokens may read, in order; at least one."""
        return [item for item, seen in zip(self.items, self.visibility, strict=True) if seen]


class InvalidComposition(ValueError):
    """A message that breaks docs/spec/virtual-prefix-v1.md; the text names the field."""


def decode_message(value: object) -> CompositionMessage:
    """Check a parsed JSON value and return the message.

    Raises:
        InvalidComposition: naming the field.
    """
    try:
        message = msgspec.convert(value, CompositionMessage)
    except msgspec.ValidationError as error:
        raise InvalidComposition(str(error)) from error
    if len(message.visibility) != len(message.items):
        raise InvalidComposition(
            f"visibility: {len(message.visibility)} entries for {len(message.items)} items"
        )
    if not any(message.visibility):
        raise InvalidComposition("visibility: hides every item; leave the message out instead")
    lengths = [
        item.num_tokens if seen else 0
        for item, seen in zip(message.items, message.visibility, strict=True)
    ]
    offsets = layout_offsets(message.layout, lengths)
    given = [item.offset for item in message.items]
    if given != offsets:
        raise InvalidComposition(
            f"items.offset: {given}; layout {message.layout} places them at {offsets}"
        )
    return message


def claimed_request_id(value: object) -> str:
    """The request id of a parsed JSON value that may be no valid message; `unknown` without one."""
    claimed = value.get("request_id") if isinstance(value, dict) else None
    try:
        return msgspec.convert(claimed, RequestIdText)
    except msgspec.ValidationError:
        return "unknown"


def claimed_scope(value: object) -> str | None:
    """The scope of a parsed JSON value that may be no valid message; `None` without one."""
    claimed = value.get("scope") if isinstance(value, dict) else None
    try:
        return msgspec.convert(claimed, ScopeText)
    except msgspec.ValidationError:
        return None


def layout_offsets(layout: PositionLayout, lengths: Sequence[int]) -> list[int]:
    """Position of each artifact's first token; one that is hidden has length 0.

    `shared_local`: all start at 0. `sequential`: each starts where the one before ends.
    `end_aligned`: all end at the position before the first live token.
    """
    total = sum(lengths)
    if layout is PositionLayout.SHARED_LOCAL:
        return [0 for _ in lengths]
    if layout is PositionLayout.END_ALIGNED:
        return [total - length for length in lengths]
    return [sum(lengths[:index]) for index in range(len(lengths))]


def model_fingerprint(model: ModelIdentity) -> Digest:
    """One digest for everything in a model identity that changes KV or token ids."""
    adapter = model.adapter
    return sha256_digest(
        length_prefixed(
            DOMAIN_FINGERPRINT,
            [
                text.encode()
                for text in (
                    model.architecture,
                    model.config_digest,
                    model.tokenizer_digest,
                    model.weights_digest or "",
                    adapter.digest if adapter else "",
                )
            ],
        )
    )


def composition_digest(
    *,
    scope: str,
    layout: PositionLayout,
    items: Sequence[CompositionItem],
    visibility: Sequence[bool],
    fingerprint: Digest,
) -> Digest:
    """Identity of a request's prefix: two requests share KV if and only if this is equal."""
    parts = [scope, layout.value, fingerprint, str(len(items))]
    for item, is_visible in zip(items, visibility, strict=True):
        parts += [item.digest, str(item.num_tokens), str(item.offset), str(int(is_visible))]
    return sha256_digest(length_prefixed(DOMAIN_COMPOSITION, [part.encode() for part in parts]))


def cache_salt(composition: Digest) -> str:
    """The composition identity as vLLM's `cache_salt`: 64 hex characters."""
    return composition.removeprefix("sha256:")
