"""What the gateway reads of a request, and the limits it keeps."""

from typing import Any

import msgspec
import pytest

from cartridge_router.errors import InvalidRequest
from cartridge_router.request import (
    MAX_CARTRIDGE_ID_CHARS,
    MAX_CARTRIDGES,
    ParsedRequest,
    Route,
    engine_body,
    parse_request,
)


def parsed(headers: dict[str, str] | None = None, **fields: Any) -> ParsedRequest:
    """A chat request with these fields beside its model."""
    data = msgspec.json.encode({"model": "m", **fields})
    return parse_request(Route.CHAT, data, headers or {})


@pytest.mark.parametrize(
    ("field", "header", "expected"),
    [
        (None, None, None),
        ([], None, ()),
        (["a@1", "b@2"], None, ("a@1", "b@2")),
        (None, "a@1", ("a@1",)),
        (None, " a@1 ,, b@2 ", ("a@1", "b@2")),
        (None, "", ()),
        ([], "a@1", ()),
        (["a@1"], "b@1", ("a@1",)),
    ],
)
def test_ids_come_from_the_field_else_from_the_header(
    field: list[str] | None, header: str | None, expected: tuple[str, ...] | None
) -> None:
    """Nothing said is `None`, nothing wanted is empty, and order is kept."""
    headers = {} if header is None else {"x-cartridge-ids": header}
    fields: dict[str, Any] = {} if field is None else {"cartridge_ids": field}
    assert parsed(headers, **fields).cartridge_ids == expected


def test_a_null_field_says_nothing() -> None:
    """`null` is like an absent field, as for every optional OpenAI field."""
    assert parsed(cartridge_ids=None).cartridge_ids is None


def test_more_cartridges_than_the_limit_are_refused_with_it() -> None:
    """The limit passes, one more names the limit; the header counts alike."""
    names = [f"a{index}@1" for index in range(MAX_CARTRIDGES)]
    assert parsed(cartridge_ids=names).cartridge_ids == tuple(names)
    too_many = [*names, "b@1"]
    requests: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({}, {"cartridge_ids": too_many}),
        ({"x-cartridge-ids": ",".join(too_many)}, {}),
    ]
    for headers, fields in requests:
        with pytest.raises(InvalidRequest, match="17 given; the limit is 16") as info:
            parsed(headers, **fields)
        assert info.value.param == "cartridge_ids"


def test_an_id_longer_than_the_limit_is_refused_with_it() -> None:
    """The longest alias passes; a longer text is not even looked up."""
    longest = "a" * MAX_CARTRIDGE_ID_CHARS
    assert parsed(cartridge_ids=[longest]).cartridge_ids == (longest,)
    with pytest.raises(InvalidRequest, match=str(MAX_CARTRIDGE_ID_CHARS)):
        parsed(cartridge_ids=[longest + "a"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt_logprobs", 0), ("prompt_logprobs", 5), ("echo", True), ("use_beam_search", True)],
)
def test_what_reads_prompt_positions_is_refused_only_with_cartridges(
    field: str, value: Any
) -> None:
    """Virtual positions have neither tokens nor text; plain requests may ask."""
    assert parsed(**{field: value}).model == "m"
    assert parsed(cartridge_ids=[], **{field: value}).model == "m"
    with pytest.raises(InvalidRequest, match=field) as info:
        parsed(cartridge_ids=["a@1"], **{field: value})
    assert info.value.param == field


def test_echo_that_is_off_is_no_obstacle() -> None:
    """`echo: false` asks for nothing."""
    assert parsed(cartridge_ids=["a@1"], echo=False, prompt_logprobs=None).cartridge_ids


@pytest.mark.parametrize(
    "data", [b'{"model":null}', b'{"model":1}', b"{}", b'{"model":"m","echo":"yes"}']
)
def test_known_fields_of_another_type_are_refused(data: bytes) -> None:
    """The message says which field."""
    with pytest.raises(InvalidRequest, match=r"model|echo"):
        parse_request(Route.CHAT, data, {})


def test_the_estimate_of_live_tokens_follows_the_size_of_the_body() -> None:
    """A longer body is predicted to take longer to prefill."""
    short, long = parsed(prompt="x"), parsed(prompt="x" * 4000)
    assert long.num_live_tokens - short.num_live_tokens == pytest.approx(1000, abs=1)


@pytest.mark.parametrize("kwargs", ["null", "{}", '{ "a" : 1e400 }'])
def test_without_a_composition_template_arguments_are_not_touched(kwargs: str) -> None:
    """Only `cartridge_ids` and engine fields are ever taken out of a plain request."""
    data = b'{"model":"m","chat_template_kwargs":' + kwargs.encode() + b"}"
    request = parse_request(Route.CHAT, data, {})
    assert engine_body(request, None, is_trusted=False) == data
