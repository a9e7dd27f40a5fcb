"""Canonical JSON: one spelling out, and nothing ambiguous in."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.canonical_json import MAX_DEPTH, decode_strict, encode_canonical

LIMIT = 1 << 16


def _has_canonical_form(number: float) -> bool:
    return not (abs(number) >= 2**53 and number.is_integer())


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.floats(allow_nan=False, allow_infinity=False).filter(_has_canonical_form)
    | st.text(st.characters(codec="utf-8"), max_size=8)
)
keys = st.text(st.characters(codec="utf-8"), max_size=6)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_a_value_survives_encoding_and_strict_decoding(value: Any) -> None:
    """What is encoded is read back equal, and encodes to the same bytes again."""
    data = encode_canonical(value)
    again = decode_strict(data, max_bytes=LIMIT)
    assert again == value
    assert encode_canonical(again) == data


@given(st.dictionaries(keys, scalars, max_size=8), st.randoms(use_true_random=False))
def test_key_order_does_not_matter(value: dict[str, Any], shuffler: random.Random) -> None:
    """Two dicts that differ in insertion order have the same canonical bytes."""
    items = list(value.items())
    shuffler.shuffle(items)
    assert encode_canonical(dict(items)) == encode_canonical(value)


@given(values)
def test_space_and_escapes_of_the_input_do_not_matter(value: Any) -> None:
    """Canonical bytes are the same after a detour through another JSON writer."""
    detour = json.dumps(value, indent=3, ensure_ascii=True).encode()
    again = decode_strict(detour, max_bytes=LIMIT)
    assert encode_canonical(again) == encode_canonical(value)


def test_keys_are_sorted_by_utf16_code_units() -> None:
    """Order is that of RFC 8785: an astral character sorts before U+E000."""
    data = encode_canonical({"\ue000": 1, "\U0001f600": 2, "a": 3})
    assert data.decode() == '{"a":3,"\U0001f600":2,"\ue000":1}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**53 + 1, "\ud800", {"\udfff": 1}])
def test_values_without_a_canonical_form_are_refused(value: object) -> None:
    """NaN, infinity, integers beyond a double and lone surrogates have no canonical bytes."""
    with pytest.raises(ValueError, match="no canonical JSON form"):
        encode_canonical(value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a":1,"a":1}', "duplicate keys: 'a'"),
        (b'{"x":{"b":1,"c":2,"b":3}}', "duplicate keys: 'b'"),
        (b"NaN", "NaN is not JSON"),
        (b"[Infinity]", "Infinity is not JSON"),
        (b"-Infinity", "-Infinity is not JSON"),
        (b"1e400", "beyond a double"),
        (rb'"\ud800"', "lone surrogate"),
        (rb'{"\uDFFF":1}', "lone surrogate"),
        (b"\xff", "not UTF-8"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"1 2", "not JSON"),
        (b"\xef\xbb\xbf1", "not JSON"),
        (b"[" * 100_000, "nested deeper than 64"),
    ],
)
def test_input_that_two_parsers_may_read_differently_is_refused(data: bytes, reason: str) -> None:
    """Each ambiguity is refused with its own reason."""
    with pytest.raises(ValueError, match=reason):
        decode_strict(data, max_bytes=1 << 20)


def test_a_surrogate_pair_is_text() -> None:
    """Two escapes that form one character are accepted."""
    assert decode_strict(rb'"\ud83d\ude00"', max_bytes=LIMIT) == "\U0001f600"


def test_nesting_is_accepted_up_to_the_limit_and_not_beyond() -> None:
    """64 levels pass, 65 are refused, and the text names the limit."""
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert decode_strict(deepest, max_bytes=LIMIT) is not None
    with pytest.raises(ValueError, match=f"nested deeper than {MAX_DEPTH} levels"):
        decode_strict(b"[" + deepest + b"]", max_bytes=LIMIT)


def test_the_size_limit_is_inclusive_and_named() -> None:
    """Bytes up to the limit pass; one more is refused with both numbers."""
    assert decode_strict(b"12345678", max_bytes=8) == 12345678
    with pytest.raises(ValueError, match="9 bytes of JSON; the limit is 8"):
        decode_strict(b"123456789", max_bytes=8)


def test_a_flood_of_duplicate_keys_gives_a_short_message() -> None:
    """The message names a few repeated keys however many there are."""
    pairs = b",".join(b'"k%d":0' % (index % 40_000) for index in range(80_000))
    with pytest.raises(ValueError, match="duplicate keys") as caught:
        decode_strict(b"{" + pairs + b"}", max_bytes=1 << 20)
    assert len(str(caught.value)) < 800


@given(st.binary(max_size=64))
def test_any_bytes_give_a_value_or_a_value_error(data: bytes) -> None:
    """No input raises anything but ValueError."""
    try:
        value = decode_strict(data, max_bytes=64)
    except ValueError:
        return
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
