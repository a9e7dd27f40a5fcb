"""Digests: their one spelling, and an encoding that cannot collide."""

import hashlib
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.digest import DigestText, length_prefixed, parse_digest, sha256_digest

GOOD = "sha256:" + "0123456789abcdef" * 4
BAD = [
    "",
    "sha256:",
    GOOD.upper(),
    GOOD.removeprefix("sha256:"),
    GOOD[:-1],
    GOOD + "0",
    GOOD + "\n",
    " " + GOOD,
    GOOD.replace("sha256", "sha512"),
    "sha256:../../../../etc/passwd",
    GOOD[:-1] + "\u0660",
]


def test_parse_digest_returns_the_text_of_a_well_spelled_digest() -> None:
    """A digest in the one spelling is returned as it is."""
    assert parse_digest(GOOD) == GOOD


@pytest.mark.parametrize("text", BAD)
def test_parse_digest_refuses_every_other_spelling(text: str) -> None:
    """Another algorithm, case, length or a final newline is refused."""
    with pytest.raises(ValueError, match="not a sha256 digest"):
        parse_digest(text)


@pytest.mark.parametrize("text", BAD)
def test_wire_structs_refuse_what_parse_digest_refuses(text: str) -> None:
    """The pattern on the wire and the function agree, a final newline included."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(text, DigestText)


def test_a_refused_digest_is_quoted_at_most_80_characters_long() -> None:
    """A hostile digest cannot flood a log line."""
    with pytest.raises(ValueError, match="not a sha256 digest") as caught:
        parse_digest("x" * 100_000)
    assert len(str(caught.value)) < 120


@given(st.binary())
def test_sha256_digest_is_the_hash_in_its_spelling(data: bytes) -> None:
    """The digest is SHA-256 in hex behind its prefix, for any kind of buffer."""
    expected = "sha256:" + hashlib.sha256(data).hexdigest()
    assert sha256_digest(data) == sha256_digest(memoryview(data)) == expected
    assert parse_digest(expected) == expected


parts_lists = st.lists(st.binary(max_size=12), max_size=6)


@given(parts_lists, parts_lists)
def test_different_lists_have_different_encodings(left: list[bytes], right: list[bytes]) -> None:
    """Two lists have the same encoding only if they are the same list."""
    same = length_prefixed(b"domain", left) == length_prefixed(b"domain", right)
    assert same == (left == right)


@given(parts_lists, st.data())
def test_moving_a_boundary_between_parts_changes_the_encoding(
    parts: list[bytes], data: st.DataObject
) -> None:
    """The same bytes cut at other places give another encoding."""
    joined = b"".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(joined)), max_size=6).map(sorted))
    edges = [0, *cuts, len(joined)]
    recut = [joined[a:b] for a, b in itertools.pairwise(edges)]
    same = length_prefixed(b"domain", parts) == length_prefixed(b"domain", recut)
    assert same == (parts == recut)


@given(st.binary(max_size=12), st.binary(max_size=12), parts_lists)
def test_domains_separate(left: bytes, right: bytes, parts: list[bytes]) -> None:
    """The same parts in two domains have different encodings."""
    assert (length_prefixed(left, parts) == length_prefixed(right, parts)) == (left == right)


def test_the_encoding_is_eight_bytes_of_length_before_each_part() -> None:
    """The encoding is the one that docs/spec/virtual-prefix-v1.md writes down."""
    assert length_prefixed(b"ab", [b"", b"c"]).hex() == (
        "0000000000000002" + "6162" + "0000000000000000" + "0000000000000001" + "63"
    )
