"""What a composition message claims, checked against manifests that were verified.

Owns the checks that every engine makes before it serves a message. Refuses to read a store: the
manifests are given.
"""

from collections.abc import Mapping

from cartridge_proto.compatibility import immovable_types
from cartridge_proto.composition import (
    CompositionMessage,
    composition_digest,
    model_fingerprint,
)
from cartridge_proto.manifest import Manifest
from cartridge_proto.residency import FailureReason


class FalseClaim(ValueError):
    """A message that does not agree with its artifacts; `reason` is the receipt's."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def check_claims(message: CompositionMessage, manifests: Mapping[str, Manifest]) -> None:
    """Check lengths, access, relocation and the identity of a message.

    Args:
        message: from `decode_message`, so its offsets are those of its layout.
        manifests: verified manifests by artifact digest, one for each visible item.

    Raises:
        FalseClaim: naming the first thing that does not agree.
    """
    for index, item in enumerate(message.items):
        if not message.visibility[index]:
            continue
        manifest = manifests[item.digest]
        if manifest.num_tokens != item.num_tokens:
            raise FalseClaim(
                FailureReason.INVALID_MESSAGE,
                f"items[{index}].num_tokens: {item.num_tokens}; manifest has {manifest.num_tokens}",
            )
        if not manifest.is_readable_by(message.scope):
            # The same words as for an artifact that does not exist.
            raise FalseClaim(FailureReason.UNKNOWN_ARTIFACT, f"{item.digest} is not in the store")
        is_moved = item.offset != manifest.rope.first_position
        if is_moved and (immovable := immovable_types(manifest.rope)):
            raise FalseClaim(
                FailureReason.UNSUPPORTED,
                f"items[{index}].offset: rope type {', '.join(immovable)} cannot be moved",
            )
    expected = composition_digest(
        scope=message.scope,
        layout=message.layout,
        items=message.items,
        visibility=message.visibility,
        fingerprint=model_fingerprint(manifests[message.visible_items[0].digest].model),
    )
    if expected != message.composition:
        raise FalseClaim(
            FailureReason.INVALID_MESSAGE, f"composition: {message.composition} is not {expected}"
        )
