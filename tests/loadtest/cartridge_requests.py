"""Bodies as a gateway would send them to an engine, for tests of the simulated replica.

Owns the composition of sample artifacts. Refuses to send anything.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from cartridge_proto.composition import (
    CompositionItem,
    CompositionMessage,
    OnMiss,
    cache_salt,
    composition_digest,
    layout_offsets,
    model_fingerprint,
)
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest, PositionLayout, manifest_digest


def chat_body(**fields: Any) -> dict[str, Any]:
    """A plain chat request."""
    return {"model": "sample", "messages": [{"role": "user", "content": "When does it open?"}]} | (
        fields
    )


def message_for(
    *manifests: Manifest, layout: PositionLayout = PositionLayout.SEQUENTIAL
) -> CompositionMessage:
    """The message that composes the artifacts in this order."""
    offsets = layout_offsets(layout, [manifest.num_tokens for manifest in manifests])
    items = [
        CompositionItem(
            digest=manifest_digest(manifest), num_tokens=manifest.num_tokens, offset=offset
        )
        for manifest, offset in zip(manifests, offsets, strict=True)
    ]
    visibility = [True for _ in items]
    return CompositionMessage(
        v=1,
        request_id="req-1",
        composition=composition_digest(
            scope="public",
            layout=layout,
            items=items,
            visibility=visibility,
            fingerprint=model_fingerprint(manifests[0].model),
        ),
        scope="public",
        layout=layout,
        items=items,
        visibility=visibility,
        deadline_ms=20_000,
        on_miss=OnMiss.FAIL,
    )


def fields_for(message: CompositionMessage) -> dict[str, Any]:
    """The two body fields that carry a message."""
    return {
        "kv_transfer_params": {"cartridges": msgspec.to_builtins(message)},
        "cache_salt": cache_salt(Digest(message.composition)),
    }


async def until(is_true: Callable[[], bool], what: str) -> None:
    """Wait for a condition; fails after 10 seconds, saying what did not happen."""
    try:
        async with asyncio.timeout(10):
            while not is_true():  # noqa: ASYNC110 - the condition lives in another process or task
                await asyncio.sleep(0.01)
    except TimeoutError as error:
        raise AssertionError(f"did not happen: {what}") from error
