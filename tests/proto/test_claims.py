"""What a message claims, against manifests that were verified."""

import msgspec
import pytest

from cartridge_proto.claims import FalseClaim, check_claims
from cartridge_proto.composition import (
    CompositionItem,
    CompositionMessage,
    OnMiss,
    claimed_request_id,
    claimed_scope,
    composition_digest,
    layout_offsets,
    model_fingerprint,
)
from cartridge_proto.manifest import Manifest, PositionLayout, manifest_digest
from cartridge_proto.residency import FailureReason
from tests.proto.sample_artifact import sample_artifact


def _two() -> list[Manifest]:
    return [sample_artifact(name=name)[0] for name in ("one", "other")]


def _message(manifests: list[Manifest], scope: str = "public") -> CompositionMessage:
    layout = PositionLayout.SEQUENTIAL
    lengths = [manifest.num_tokens for manifest in manifests]
    items = [
        CompositionItem(digest=manifest_digest(m), num_tokens=m.num_tokens, offset=offset)
        for m, offset in zip(manifests, layout_offsets(layout, lengths), strict=True)
    ]
    visibility = [True] * len(items)
    return CompositionMessage(
        v=1,
        request_id="claims",
        composition=composition_digest(
            scope=scope,
            layout=layout,
            items=items,
            visibility=visibility,
            fingerprint=model_fingerprint(manifests[0].model),
        ),
        scope=scope,
        layout=layout,
        items=items,
        visibility=visibility,
        deadline_ms=1000,
        on_miss=OnMiss.FAIL,
    )


def _by_digest(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {manifest_digest(manifest): manifest for manifest in manifests}


def test_true_claims_pass() -> None:
    """A message that agrees with its manifests is accepted."""
    manifests = _two()
    message = _message(manifests)
    check_claims(message, _by_digest(manifests))
    assert message.num_tokens == sum(manifest.num_tokens for manifest in manifests)


def test_wrong_length_is_named() -> None:
    """An item's length that is not the manifest's is refused with both numbers."""
    manifests = _two()
    message = _message(manifests)
    items = [message.items[0], msgspec.structs.replace(message.items[1], num_tokens=99)]
    with pytest.raises(FalseClaim, match=r"items\[1\].num_tokens: 99") as caught:
        check_claims(msgspec.structs.replace(message, items=items), _by_digest(manifests))
    assert caught.value.reason is FailureReason.INVALID_MESSAGE


def test_foreign_artifact_counts_as_absent() -> None:
    """An artifact that the scope may not read is refused in the words for an absent one."""
    manifest = sample_artifact(readers=["tenant-a"])[0]
    message = _message([manifest], scope="tenant-b")
    with pytest.raises(FalseClaim, match="is not in the store") as caught:
        check_claims(message, _by_digest([manifest]))
    assert caught.value.reason is FailureReason.UNKNOWN_ARTIFACT


def test_moved_keys_need_a_rope_that_can_be_moved() -> None:
    """A length-dependent rotary type is refused at an offset, and accepted at its own place."""
    manifests = [
        msgspec.structs.replace(m, rope=msgspec.structs.replace(m.rope, type="dynamic"))
        for m in _two()
    ]
    check_claims(_message(manifests[:1]), _by_digest(manifests))
    with pytest.raises(FalseClaim, match=r"items\[1\].offset: rope type dynamic") as caught:
        check_claims(_message(manifests), _by_digest(manifests))
    assert caught.value.reason is FailureReason.UNSUPPORTED


@pytest.mark.parametrize(
    "changes",
    [
        {"scope": "public2"},
        {"visibility": [True, False]},
        {"composition": "sha256:" + "0" * 64},
    ],
)
def test_identity_that_does_not_follow_is_refused(changes: dict[str, object]) -> None:
    """The identity is computed again from everything the message says."""
    manifests = _two()
    changed = msgspec.structs.replace(_message(manifests), **changes)
    with pytest.raises(FalseClaim, match="composition: ") as caught:
        check_claims(changed, _by_digest(manifests))
    assert caught.value.reason is FailureReason.INVALID_MESSAGE


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"request_id": "r-1"}, "r-1"),
        ({"request_id": "two words"}, "unknown"),
        ({"request_id": 7}, "unknown"),
        ({"request_id": "x" * 129}, "unknown"),
        ({}, "unknown"),
        (["junk"], "unknown"),
        (None, "unknown"),
    ],
)
def test_request_id_of_a_bad_message(value: object, expected: str) -> None:
    """A receipt names the request even when the rest of its message is bad."""
    assert claimed_request_id(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"scope": "acme:team-1"}, "acme:team-1"),
        ({"scope": "two words"}, None),
        ({"scope": ""}, None),
        ({"scope": 7}, None),
        ({"scope": "x" * 129}, None),
        ({}, None),
        (["junk"], None),
        (None, None),
    ],
)
def test_scope_of_a_bad_message(value: object, expected: str | None) -> None:
    """A receipt says whose the request was even when the rest of its message is bad."""
    assert claimed_scope(value) == expected
