"""Edits to JSON bodies: what is added is there, what is removed is gone, the rest is untouched."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_router.body import InvalidBody, JsonBody

SPACES = st.text(alphabet=" \t\n\r", max_size=3)
NUMBERS = st.sampled_from(
    ["0", "-0", "1e400", "-1E+2", "1.50", "123456789012345678901234567890", "1e-400"]
)


def spelled(text: str, style: int) -> str:
    """A JSON string, in one of three spellings of the same text."""
    if style == 0:
        return json.dumps(text)
    if style == 1:
        return json.dumps(text, ensure_ascii=False)
    units = text.encode("utf-16-be")
    pairs = (units[index : index + 2] for index in range(0, len(units), 2))
    return '"' + "".join(f"\\u{int.from_bytes(pair):04X}" for pair in pairs) + '"'


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
STRINGS = st.builds(spelled, TEXTS, st.integers(0, 2))


def containers(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Arrays and objects of spelled values, with odd space; names may repeat below the top."""
    members = st.builds(lambda *p: "".join(p), SPACES, STRINGS, SPACES, st.just(":"), SPACES, inner)
    objects = st.builds(
        lambda m, s: "{" + ",".join(m) + s + "}", st.lists(members, max_size=3), SPACES
    )
    items = st.builds(lambda *p: "".join(p), SPACES, inner, SPACES)
    arrays = st.builds(
        lambda i, s: "[" + (",".join(i) if i else s) + "]", st.lists(items, max_size=3), SPACES
    )
    return objects | arrays


VALUES = st.recursive(
    st.sampled_from(["null", "true", "false"]) | NUMBERS | STRINGS, containers, max_leaves=6
)


@st.composite
def bodies(draw: st.DrawFn) -> str:
    """Text of an object whose top-level names are distinct, oddly spaced and oddly spelled."""
    names = draw(st.lists(TEXTS, unique=True, max_size=6))
    members = [
        draw(SPACES)
        + spelled(name, draw(st.integers(0, 2)))
        + draw(SPACES)
        + ":"
        + draw(SPACES)
        + draw(VALUES)
        + draw(SPACES)
        for name in names
    ]
    inside = ",".join(members) or draw(SPACES)
    return draw(SPACES) + "{" + inside + "}" + draw(SPACES)


def loads(data: bytes) -> dict[str, Any]:
    """Parse with numbers as they are spelled, so that 1e400 stays itself."""
    value = json.loads(data, parse_int=str, parse_float=str)
    assert isinstance(value, dict)
    return value


ADDED = st.dictionaries(TEXTS, st.sampled_from([b"1", b"null", b'{"a":[1]}', b'"x"']), max_size=3)


@given(text=bodies())
def test_without_an_edit_the_bytes_are_the_same(text: str) -> None:
    """Nothing to remove that is there, nothing to add: the very same bytes."""
    data = text.encode()
    assert JsonBody(data).edited(remove=["\x00 not there"]) == data


@given(text=bodies(), added=ADDED, seed=st.randoms(use_true_random=False))
def test_an_edited_body_parses_to_what_was_asked_for(
    text: str, added: dict[str, bytes], seed: Any
) -> None:
    """Removed names are gone, added ones hold their value, the others and their order stay."""
    data = text.encode()
    body = JsonBody(data)
    removed = [name for name in body.members if seed.random() < 0.5]
    edited = body.edited(remove=removed, add=added)
    expected = {
        name: value
        for name, value in loads(data).items()
        if name not in removed and name not in added
    }
    expected |= {name: json.loads(value, parse_int=str) for name, value in added.items()}
    assert list(loads(edited).items()) == list(expected.items())


@given(text=bodies(), added=ADDED)
def test_what_was_added_can_be_taken_out_again(text: str, added: dict[str, bytes]) -> None:
    """Adding new names and removing them gives back the original bytes."""
    data = text.encode()
    new = {name + "\x00new": value for name, value in added.items()}
    edited = JsonBody(data).edited(add=new)
    assert JsonBody(edited).edited(remove=new) == data


@given(text=bodies(), seed=st.randoms(use_true_random=False), replaced=ADDED)
def test_a_replaced_member_stays_where_it_is(
    text: str, seed: Any, replaced: dict[str, bytes]
) -> None:
    """With its name as it was spelled, the bytes around it untouched; a new one comes last."""
    body = JsonBody(text.encode())
    for name in body.members:
        if seed.random() < 0.5:
            replaced[name] = b'"other"'
    edited = body.edited(replace=replaced)
    found = JsonBody(edited)
    new = [name for name in replaced if name not in body.members]
    assert list(found.members) == [*body.members, *new]
    for name, member in found.members.items():
        kept = None if name in replaced else body.members[name].value
        assert member.value == (replaced[name] if kept is None else kept)
    # Put back, nothing is left of it.
    before = {name: body.members[name].value for name in replaced if name in body.members}
    assert found.edited(remove=new, replace=before) == body.data


@given(text=bodies(), seed=st.randoms(use_true_random=False))
def test_bytes_of_kept_members_are_untouched(text: str, seed: Any) -> None:
    """Each kept member is in the result as it was spelled, in the same order."""
    body = JsonBody(text.encode())
    removed = {name for name in body.members if seed.random() < 0.5}
    edited = body.edited(remove=removed)
    position = 0
    for name, member in body.members.items():
        if name not in removed:
            piece = body.data[member.begin : member.end]
            found = edited.find(piece, position)
            assert found >= 0, f"{name!r} was changed or moved"
            position = found + len(piece)


@given(text=bodies())
def test_members_are_found_by_their_real_name(text: str) -> None:
    """Names are unescaped, and each value is where the member says."""
    data = text.encode()
    body = JsonBody(data)
    assert list(body.members) == list(loads(data))
    for member in body.members.values():
        assert data[member.begin : member.end].endswith(member.value)
        json.loads(member.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":1}',
        '{"a":1,"a":12}',
        '{"a":12,"a":1}',
        '{"a":1,"\\u0061":2}',
        '{"\\u0061":1,"a":1}',
        '{"a":{},"b":2,"a":{}}',
        '{"a":"x","b":1,"a":"x,"}',
        '{"":1,"":1}',
        '{"a":[1 ], "a":[1]}',
    ],
)
def test_a_name_twice_is_refused(text: str) -> None:
    """Two parsers could read it differently, whether escaped or not, equal or not."""
    with pytest.raises(InvalidBody, match="twice"):
        JsonBody(text.encode())


@given(text=bodies(), value=VALUES, seed=st.randoms(use_true_random=False))
def test_any_member_repeated_anywhere_is_refused(text: str, value: str, seed: Any) -> None:
    """A copy of a name, however spelled and wherever it stands, is found."""
    body = JsonBody(text.encode())
    if not body.members:
        return
    name = seed.choice(list(body.members))
    copy = f"{spelled(name, seed.randrange(3))}:{value}".encode()
    member = body.members[seed.choice(list(body.members))]
    before, after = body.data[: member.begin], body.data[member.begin :]
    with pytest.raises(InvalidBody, match="twice"):
        JsonBody(before + copy + b"," + after)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"1", "not a JSON object"),
        (b"{} {}", "not a JSON object"),
        (b"\xef\xbb\xbf{}", "not a JSON object"),
        (b'{"a":NaN}', "not a JSON object"),
        (b'{"a":1,}', "not a JSON object"),
        (b"{'a':1}", "not a JSON object"),
        (b'{"a":"\\ud800"}', "not a JSON object"),
        (b'{"a":"\xff"}', "not UTF-8 at byte 6"),
        (b'{"a":"\xed\xa0\x80"}', "not UTF-8 at byte 6"),
        (b'{"\xc0\x80":1}', "not UTF-8 at byte 2"),
        (b'{"a":' + b"[" * 1_000_000, "nested too deep"),
        (b'{"a":' * 1_000_000, "nested too deep"),
    ],
)
def test_what_is_no_object_is_refused_with_the_place(data: bytes, part: str) -> None:
    """Other JSON, other encodings and depth bombs are told apart."""
    with pytest.raises(InvalidBody, match=part):
        JsonBody(data)


@pytest.mark.timeout(60)
def test_many_members_are_edited_in_linear_time() -> None:
    """A hundred thousand members: quadratic work would hold the event loop for minutes."""
    count = 100_000
    data = b"{" + b",".join(b'"%d":0' % index for index in range(count)) + b"}"
    edited = JsonBody(data).edited(remove=["0"], add={"new": b"1"})
    assert edited == data.replace(b'"0":0,', b"", 1)[:-1] + b',"new":1}'
