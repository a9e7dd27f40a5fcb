"""Where texts go in a request, and that nothing else of it changes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.manifest import Kind, RetainedPositions
from cartridge_router.request import ParsedRequest, Route, engine_body, parse_request
from cartridge_router.text_prompts import can_take_texts, num_text_tokens, with_texts
from tests.proto.sample_artifact import sample_artifact

ODD = 'Say "no" \\ to\n\ttabs, \u0000 and 🚢; <{document}> é\u2028'
FRAME = "Read this: {document} End."
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def parsed(route: Route, body: bytes) -> ParsedRequest:
    """As a handler reads it."""
    return parse_request(route, body, {})


def sent(route: Route, body: bytes, *texts: str, instruction: str = FRAME) -> bytes | None:
    """What an engine gets; `None` where texts cannot stand in."""
    request = parsed(route, body)
    changed = with_texts(request, texts, instruction)
    assert can_take_texts(request) is (changed is not None)
    return None if changed is None else engine_body(changed, None, is_trusted=False)


def test_a_completion_begins_with_the_text() -> None:
    """In front of the prompt, whose own spelling and place stay."""
    body = b'{ "n":1.0 ,"prompt" : "\\u0041\\/b", "model":"m","x":[1,  2]}'
    assert sent(Route.COMPLETIONS, body, 'T"') == (
        b'{ "n":1.0 ,"prompt" : "T\\"\\u0041\\/b", "model":"m","x":[1,  2]}'
    )
    assert sent(Route.COMPLETIONS, b'{"model":"m","prompt":"p"}', "A", "B") == (
        b'{"model":"m","prompt":"A\\n\\nBp"}'
    )


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (Route.COMPLETIONS, b'{"model":"m","prompt":[1,2]}'),
        (Route.COMPLETIONS, b'{"model":"m","prompt":["a"]}'),
        (Route.COMPLETIONS, b'{"model":"m","prompt":null}'),
        (Route.COMPLETIONS, b'{"model":"m"}'),
        (Route.CHAT, b'{"model":"m"}'),
        (Route.CHAT, b'{"model":"m","messages":[]}'),
        (Route.CHAT, b'{"model":"m","messages":"x"}'),
        (Route.CHAT, b'{"model":"m","messages":[1]}'),
        (Route.CHAT, b'{"model":"m","messages":[{"content":"x"}]}'),
        (Route.CHAT, b'{"model":"m","messages":[{"role":"system"}]}'),
        (Route.CHAT, b'{"model":"m","messages":[{"role":"system","content":null}]}'),
        (Route.CHAT, b'{"model":"m","messages":[{"role":"system","content":[]}]}'),
        (Route.CHAT, b'{"model":"m","messages":[{"role":"user","role":"system"}]}'),
        (Route.RESPONSES, b'{"model":"m","input":"x","instructions":7}'),
        (Route.OTHER, b'{"model":"m","input":"x"}'),
    ],
)
def test_what_is_no_text_takes_none(route: Route, body: bytes) -> None:
    """Token ids, several prompts, and what the engine will refuse: there is no other way."""
    assert sent(route, body, "T") is None


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (
            b'[ {"role":"user","content":"q"}]',
            b'[ {"role":"system","content":"Read this: T End."},{"role":"user","content":"q"}]',
        ),
        (
            b'[{"name":"n", "role" : "system","content":"own\\u0021" } ,{"role":"user"}]',
            b'[{"name":"n", "role" : "system","content":"Read this: T End.\\n\\nown\\u0021" } '
            b',{"role":"user"}]',
        ),
        (
            b'[{"role":"system","content":[ {"type":"text","text":"own"}]},{"role":"user"}]',
            b'[{"role":"system","content":[ {"type":"text","text":"Read this: T End."},'
            b'{"type":"text","text":"own"}]},{"role":"user"}]',
        ),
    ],
)
def test_a_chat_begins_with_the_text_as_its_system_message(
    messages: bytes, expected: bytes
) -> None:
    """A message in front, or in front of what the client's own first one says."""
    body = b'{"temperature":0.50,"messages": %s ,"model":"m"}'
    assert sent(Route.CHAT, body % messages, "T") == body % expected


def test_several_texts_stand_in_their_order() -> None:
    """Each by way of the instruction."""
    body = b'{"model":"m","messages":[{"role":"user","content":"q"}]}'
    found = sent(Route.CHAT, body, "A", "B")
    assert found is not None
    system = json.loads(found)["messages"][0]
    assert system == {"role": "system", "content": "Read this: A End.\n\nRead this: B End."}


@pytest.mark.parametrize(
    ("route", "field"), [(Route.RESPONSES, "instructions"), (Route.MESSAGES, "system")]
)
def test_other_apis_have_a_field_for_it(route: Route, field: str) -> None:
    """Absent, null, a text or (Anthropic) parts: the text is there, and first."""
    framed = "Read this: T End."
    cases: list[tuple[Any, Any]] = [
        (None, framed),
        ("own", f"{framed}\n\nown"),
        (
            [{"type": "text", "text": "own"}],
            [{"type": "text", "text": framed}, {"type": "text", "text": "own"}],
        ),
    ]
    for own, expected in cases:
        body = {"model": "m", "input": "x", field: own}
        found = sent(route, json.dumps(body).encode(), "T")
        assert found is not None
        assert json.loads(found) == body | {field: expected}
    found = sent(route, b'{"model":"m","input":"x"}', "T")
    assert found == b'{"model":"m","input":"x","%s":"Read this: T End."}' % field.encode()


@given(text=TEXTS, own=TEXTS, has_ascii=st.booleans())
def test_any_text_arrives_as_it_is(text: str, own: str, has_ascii: bool) -> None:
    """Quotes, escapes, control characters and scripts, in the text and in the client's own."""
    for each in (text, ODD):
        for route, fields in (
            (Route.COMPLETIONS, {"prompt": own}),
            (Route.CHAT, {"messages": [{"role": "system", "content": own}, {"role": "user"}]}),
        ):
            body = {"model": "m", "z": 1, **fields}
            found = sent(route, json.dumps(body, ensure_ascii=has_ascii).encode(), each)
            assert found is not None
            expected: dict[str, Any] = {"prompt": each + own}
            if route is Route.CHAT:
                content = f"{FRAME.replace('{document}', each)}\n\n{own}"
                expected = {"messages": [{"role": "system", "content": content}, {"role": "user"}]}
            assert json.loads(found) == body | expected


def test_a_salt_and_taken_out_fields_are_as_in_any_plain_request() -> None:
    """Fields for the engine go, the tenant's salt comes, the text is there."""
    body = b'{"model":"m","cartridge_ids":["a"],"cache_salt":"x","prompt":"p","priority":1}'
    changed = with_texts(parsed(Route.COMPLETIONS, body), ["T"], FRAME)
    assert changed is not None
    found = engine_body(changed, None, is_trusted=False, salt="s")
    assert json.loads(found) == {"model": "m", "prompt": "Tp", "cache_salt": "s"}


def test_the_number_of_tokens_is_known_or_guessed() -> None:
    """A whole prefill has one position for each; of a smaller one the text says more, once read."""
    whole, _ = sample_artifact(num_tokens=5)
    assert [num_text_tokens(whole, text) for text in (None, "x" * 400)] == [5, 5]
    for changes in ({"positions": RetainedPositions(retained=[0, 2, 4, 6, 8])}, {}):
        smaller = _replaced(whole, kind=Kind.TRANSFORMED, **changes)
        assert [num_text_tokens(smaller, text) for text in (None, "x" * 400)] == [5, 100]


def _replaced(manifest: Any, **changes: Any) -> Any:
    return type(manifest)(
        **{name: getattr(manifest, name) for name in manifest.__struct_fields__} | changes
    )
