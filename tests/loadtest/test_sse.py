"""The event-stream parser: field rules, line ends, stamps, and indifference to how bytes arrive."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_loadtest.sse import EventTooLarge, SseEvent, SseParser

FIELDS = [b"data: a", b"data:b", b"data:", b"data", b"event: error", b": ping", b"retry: 1"]
BYTES = [b"\n", b"\r", b"\r\n", b"\n\n", b"\xc3\xa9", b"\xe2\x82\xac", b"\xef\xbb\xbf", b"\xff"]
PIECES = st.sampled_from([*FIELDS, *BYTES])
STREAMS = st.lists(PIECES, max_size=24).map(b"".join)


def parsed(data: bytes) -> list[tuple[str, str]]:
    """Data and type of all events of a stream that comes whole."""
    return [(event.data, event.kind) for event in SseParser().feed(data, 0.0)]


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data: x\n\n", [("x", "message")]),
        (b"data:x\r\n\r\n", [("x", "message")]),
        (b"data:x\r\r", [("x", "message")]),
        (b"data:  two spaces\n\n", [(" two spaces", "message")]),
        (b"data: a\ndata: b\n\n", [("a\nb", "message")]),
        (b"data\n\n", [("", "message")]),
        (b"event: error\ndata: x\n\n", [("x", "error")]),
        (b"event: error\n\ndata: x\n\n", [("x", "message")]),
        (b": comment\nid: 1\nretry: 2\n\n", []),
        (b"\xef\xbb\xbfdata: x\n\n", [("x", "message")]),
        (b"data: x\n", []),
        (b"data: \xe2\x82\xac\n\n", [("\N{EURO SIGN}", "message")]),
        (b"data: \xff\n\n", [("\N{REPLACEMENT CHARACTER}", "message")]),
    ],
)
def test_fields_follow_the_standard(data: bytes, events: list[tuple[str, str]]) -> None:
    """Each rule of the event-stream format gives the events the standard says."""
    assert parsed(data) == events


@given(data=STREAMS, cuts=st.lists(st.integers(0, 120), max_size=8))
def test_any_split_gives_the_same_events(data: bytes, cuts: list[int]) -> None:
    """Where the bytes are cut changes no event."""
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parser = SseParser()
    events: list[SseEvent] = []
    for now_s, (begin, end) in enumerate(pairwise(edges)):
        events += parser.feed(data[begin:end], float(now_s))
    assert [(event.data, event.kind) for event in events] == parsed(data)
    stamps = [event.received_s for event in events]
    assert stamps == sorted(stamps)


@given(data=STREAMS)
def test_single_bytes_give_the_same_events(data: bytes) -> None:
    """A stream that trickles in byte by byte, with empty reads between, parses the same."""
    parser = SseParser()
    events: list[SseEvent] = []
    for value in data:
        events += parser.feed(bytes([value]), 0.0) + parser.feed(b"", 0.0)
    assert [(event.data, event.kind) for event in events] == parsed(data)


def test_an_event_is_stamped_when_it_is_complete() -> None:
    """The time is that of the bytes that ended the event, not that began it."""
    parser = SseParser()
    assert parser.feed(b"data: a", 1.0) == []
    assert parser.feed(b"\n", 2.0) == []
    assert parser.feed(b"\ndata: b\n\n", 3.0) == [
        SseEvent("a", "message", 3.0),
        SseEvent("b", "message", 3.0),
    ]


@pytest.mark.parametrize("data", [b"data: " + b"x" * 100, b"data: 12345\n" * 10, b"data: x\n" * 99])
def test_an_event_without_end_is_refused(data: bytes) -> None:
    """Neither one long line nor many short ones can grow beyond the limit."""
    with pytest.raises(EventTooLarge, match="64 bytes"):
        SseParser(max_event_bytes=64).feed(data, 0.0)


def test_the_limit_is_for_one_event_and_not_for_the_stream() -> None:
    """Many small events pass under a small limit."""
    parser = SseParser(max_event_bytes=16)
    assert len(parser.feed(b"data: x\n\n" * 1000, 0.0)) == 1000
