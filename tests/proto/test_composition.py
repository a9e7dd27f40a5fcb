"""Compositions: the message, the position layouts and the identity."""

from typing import Any, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.composition import (
    MAX_ITEMS,
    CompositionItem,
    CompositionMessage,
    InvalidComposition,
    OnMiss,
    cache_salt,
    composition_digest,
    decode_message,
    layout_offsets,
    model_fingerprint,
)
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import MAX_TOKENS, Adapter, ModelIdentity, PositionLayout
from tests.proto.sample_artifact import sample_artifact

A, B, C = (sha256_digest(letter) for letter in (b"a", b"b", b"c"))
lengths_lists = st.lists(st.integers(1, 5000), min_size=1, max_size=8)


def item(digest: Digest, num_tokens: int, offset: int) -> CompositionItem:
    """One item of a composition."""
    return CompositionItem(digest=digest, num_tokens=num_tokens, offset=offset)


def message_fields(**changes: Any) -> dict[str, Any]:
    """The fields of a valid message for two artifacts, some of them changed."""
    return {
        "v": 1,
        "request_id": "req-1",
        "composition": sha256_digest(b"composition"),
        "scope": "public",
        "layout": "sequential",
        "items": [
            {"digest": A, "num_tokens": 5, "offset": 0},
            {"digest": B, "num_tokens": 7, "offset": 5},
        ],
        "visibility": [True, True],
        "deadline_ms": 1000,
        "on_miss": "fail",
        **changes,
    }


# --- layouts -------------------------------------------------------------------------------------
@given(lengths_lists)
def test_sequential_artifacts_follow_each_other_without_a_gap(lengths: list[int]) -> None:
    """The first starts at 0 and each starts where the one before ends."""
    offsets = layout_offsets(PositionLayout.SEQUENTIAL, lengths)
    ends = [offset + length for offset, length in zip(offsets, lengths, strict=True)]
    assert offsets == [0, *ends[:-1]]
    assert ends[-1] == sum(lengths)


@given(lengths_lists)
def test_shared_local_artifacts_all_start_at_zero(lengths: list[int]) -> None:
    """No artifact is moved."""
    assert layout_offsets(PositionLayout.SHARED_LOCAL, lengths) == [0] * len(lengths)


@given(lengths_lists)
def test_end_aligned_artifacts_all_end_before_the_first_live_token(lengths: list[int]) -> None:
    """All end at the virtual length, and none starts before position 0."""
    offsets = layout_offsets(PositionLayout.END_ALIGNED, lengths)
    ends = {offset + length for offset, length in zip(offsets, lengths, strict=True)}
    assert ends == {sum(lengths)}
    assert min(offsets) >= 0


@given(st.sampled_from(PositionLayout), st.integers(1, MAX_TOKENS))
def test_one_artifact_alone_starts_at_zero_in_every_layout(
    layout: PositionLayout, length: int
) -> None:
    """Layouts differ only for two or more artifacts."""
    assert layout_offsets(layout, [length]) == [0]


# --- message -------------------------------------------------------------------------------------
def test_a_valid_message_is_decoded_with_its_virtual_length() -> None:
    """The message is returned typed, and its virtual length is the sum of its items."""
    message = decode_message(message_fields())
    assert message.items == [item(A, 5, 0), item(B, 7, 5)]
    assert message.on_miss is OnMiss.FAIL
    assert message.num_tokens == 12


@given(
    st.sampled_from(PositionLayout),
    st.lists(st.integers(1, 60_000), min_size=1, max_size=MAX_ITEMS),
)
def test_a_message_survives_json(layout: PositionLayout, lengths: list[int]) -> None:
    """A message with laid-out items is read back equal from its JSON."""
    offsets = layout_offsets(layout, lengths)
    message = CompositionMessage(
        v=1,
        request_id="r",
        composition=A,
        scope="tenant:1",
        layout=layout,
        items=[item(B, n, p) for n, p in zip(lengths, offsets, strict=True)],
        visibility=[True] * len(lengths),
        deadline_ms=1,
        on_miss=OnMiss.FAIL,
    )
    assert decode_message(msgspec.json.decode(msgspec.json.encode(message))) == message


@pytest.mark.parametrize("missing", sorted(message_fields()))
def test_every_field_of_the_message_is_required(missing: str) -> None:
    """A message without a field is refused by the name of that field."""
    fields = message_fields()
    del fields[missing]
    with pytest.raises(InvalidComposition, match=missing):
        decode_message(fields)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"v": 2}, r"\$.v"),
        ({"extra": 1}, "extra"),
        ({"request_id": ""}, r"\$.request_id"),
        ({"request_id": "a b"}, r"\$.request_id"),
        ({"request_id": "a\n"}, r"\$.request_id"),
        ({"request_id": "a" * 129}, r"\{1,128\}.*\$.request_id"),
        ({"composition": A + "\n"}, r"\$.composition"),
        ({"composition": cache_salt(A)}, r"\$.composition"),
        ({"scope": "a/b"}, r"\$.scope"),
        ({"layout": "random"}, r"\$.layout"),
        ({"items": []}, r"\$.items"),
        ({"items": [{"digest": A, "num_tokens": 1, "offset": 0}] * 65}, r"length <= 64.*items"),
        ({"items": [{"digest": A, "num_tokens": 0, "offset": 0}]}, r"\$.items\[0\].num_tokens"),
        (
            {"items": [{"digest": A, "num_tokens": MAX_TOKENS + 1, "offset": 0}]},
            rf"<= {MAX_TOKENS}.*num_tokens",
        ),
        ({"items": [{"digest": A, "num_tokens": 1, "offset": -1}]}, r">= 0.*offset"),
        ({"items": [{"digest": A, "num_tokens": True, "offset": 0}]}, "num_tokens"),
        ({"items": [{"digest": A, "num_tokens": 1, "offset": 0, "path": "/"}]}, "path"),
        ({"visibility": []}, r"\$.visibility"),
        ({"visibility": [1, 1]}, r"\$.visibility"),
        ({"visibility": [True]}, "visibility: 1 entries for 2 items"),
        ({"deadline_ms": 0}, r"\$.deadline_ms"),
        ({"deadline_ms": 3_600_001}, r"<= 3600000.*deadline_ms"),
        ({"on_miss": "guess"}, r"\$.on_miss"),
        ({"layout": "shared_local"}, r"items.offset: \[0, 5\]; layout shared_local.*\[0, 0\]"),
        ({"layout": "end_aligned"}, r"items.offset: .* places them at \[7, 5\]"),
    ],
)
def test_a_broken_message_is_refused_by_field(changes: dict[str, Any], reason: str) -> None:
    """The text names the field and, for sizes, the limit."""
    with pytest.raises(InvalidComposition, match=reason):
        decode_message(message_fields(**changes))


@pytest.mark.parametrize("value", [None, [], "text", 1])
def test_a_message_that_is_no_object_is_refused(value: object) -> None:
    """Only an object can be a message."""
    with pytest.raises(InvalidComposition, match="object"):
        decode_message(value)


# --- identity ------------------------------------------------------------------------------------
class IdentityInputs(TypedDict):
    """The inputs of `composition_digest`."""

    scope: str
    layout: PositionLayout
    items: list[CompositionItem]
    visibility: list[bool]
    fingerprint: Digest


BASE: IdentityInputs = {
    "scope": "tenant-a",
    "layout": PositionLayout.SEQUENTIAL,
    "items": [item(A, 5, 0), item(B, 7, 5)],
    "visibility": [True, True],
    "fingerprint": C,
}


@pytest.mark.parametrize(
    "changed",
    [
        BASE | {"scope": "tenant-b"},
        BASE | {"layout": PositionLayout.SHARED_LOCAL},
        BASE | {"layout": PositionLayout.END_ALIGNED},
        BASE | {"fingerprint": A},
        BASE | {"visibility": [False, True]},
        BASE | {"visibility": [True, False]},
        BASE | {"items": [item(C, 5, 0), item(B, 7, 5)]},
        BASE | {"items": [item(A, 5, 0), item(C, 7, 5)]},
        BASE | {"items": [item(A, 6, 0), item(B, 7, 5)]},
        BASE | {"items": [item(A, 5, 0), item(B, 8, 5)]},
        BASE | {"items": [item(A, 5, 1), item(B, 7, 5)]},
        BASE | {"items": [item(A, 5, 0), item(B, 7, 6)]},
        BASE | {"items": [item(B, 7, 5), item(A, 5, 0)]},
        BASE | {"items": [item(A, 5, 0)], "visibility": [True]},
        BASE | {"items": [*BASE["items"], item(C, 1, 12)], "visibility": [True] * 3},
    ],
)
def test_each_input_changes_the_composition(changed: IdentityInputs) -> None:
    """Scope, layout, fingerprint, order, and each item's four facts are all in the identity."""
    assert composition_digest(**changed) != composition_digest(**BASE)


@given(lengths_lists, lengths_lists, st.sampled_from(PositionLayout))
def test_compositions_are_equal_only_for_equal_lengths(
    left: list[int], right: list[int], layout: PositionLayout
) -> None:
    """No two lists of lengths share an identity, whatever their digits look like side by side."""

    def identity(lengths: list[int]) -> Digest:
        offsets = layout_offsets(layout, lengths)
        items = [item(A, n, p) for n, p in zip(lengths, offsets, strict=True)]
        return composition_digest(
            scope="s", layout=layout, items=items, visibility=[True] * len(items), fingerprint=C
        )

    assert (identity(left) == identity(right)) == (left == right)


def test_a_visibility_of_another_length_has_no_identity() -> None:
    """Items and visibility must pair up."""
    with pytest.raises(ValueError, match="zip"):
        composition_digest(**BASE | {"visibility": [True]})


def test_cache_salt_is_the_hex_of_the_composition() -> None:
    """The salt is the digest without its prefix."""
    assert cache_salt(A) == A.split(":")[1]


MODEL = sample_artifact()[0].model


@pytest.mark.parametrize(
    "changed",
    [
        {"architecture": "OtherForCausalLM"},
        {"config_digest": A},
        {"tokenizer_digest": A},
        {"weights_digest": A},
        {"weights_digest": None},
        {"adapter": Adapter(name="lora", digest=A)},
    ],
)
def test_each_part_of_the_model_changes_the_fingerprint(changed: dict[str, Any]) -> None:
    """Everything that changes KV or token ids is in the fingerprint."""
    other = msgspec.structs.replace(MODEL, **changed)
    assert model_fingerprint(other) != model_fingerprint(MODEL)


def test_names_of_model_and_adapter_are_outside_the_fingerprint() -> None:
    """The same weights under another name share KV."""
    with_adapter = msgspec.structs.replace(MODEL, adapter=Adapter(name="one", digest=A))
    renamed = msgspec.structs.replace(
        with_adapter, name="other", adapter=Adapter(name="two", digest=A)
    )
    assert model_fingerprint(renamed) == model_fingerprint(with_adapter)


def test_weights_and_adapter_cannot_be_taken_for_each_other() -> None:
    """The same digest as weights and as adapter gives two fingerprints."""

    def fingerprint(weights: Digest | None, adapter: Digest | None) -> Digest:
        return model_fingerprint(
            ModelIdentity(
                architecture="X",
                name="x",
                config_digest=B,
                tokenizer_digest=C,
                weights_digest=weights,
                adapter=Adapter(name="l", digest=adapter) if adapter else None,
            )
        )

    assert fingerprint(A, None) != fingerprint(None, A)
