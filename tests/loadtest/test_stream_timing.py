"""Times of a streamed answer: what counts as content, as the end and as a failure."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_loadtest.stream_timing import StreamFailed, StreamTimer, StreamTiming

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
CONTENT = {"choices": [{"index": 0, "delta": {"content": "hi"}}]}
TEXT = {"choices": [{"index": 0, "text": "hi"}]}
USAGE = {"choices": [], "usage": {"total_tokens": 3}}
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def sse(*bodies: object) -> bytes:
    """Bodies as events."""
    return b"".join(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies)


DONE = b"data: [DONE]\n\n"


def test_times_are_those_of_content_chunks() -> None:
    """The role, empty and usage chunks count neither for TTFT nor for ITL."""
    timer = StreamTimer(10.0)
    for data, now_s in (
        (sse(ROLE), 11.0),
        (sse(CONTENT), 12.0),
        (sse(CONTENT), 14.0),
        (sse(FINISH), 15.0),
        (sse(CONTENT, USAGE) + DONE, 17.0),
    ):
        timer.feed(data, now_s)
    assert timer.finish() == StreamTiming(ttft_s=2.0, itl_s=[2.0, 3.0], total_s=7.0)


def test_text_completions_are_timed_too() -> None:
    """Chunks of `/v1/completions` carry their text in another place."""
    timer = StreamTimer(0.0)
    timer.feed(sse(TEXT), 1.0)
    timer.feed(DONE, 2.0)
    assert timer.finish() == StreamTiming(ttft_s=1.0, itl_s=[], total_s=2.0)


def test_an_answer_without_content_has_no_ttft() -> None:
    """Unknown is `None`, never 0."""
    timer = StreamTimer(0.0)
    timer.feed(sse(ROLE) + DONE, 1.0)
    assert timer.finish().ttft_s is None


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (sse({"error": {"message": "Internal server error", "code": 500}}), "Internal server"),
        (sse({"error": "no"}), "no"),
        (b"data: {\n\n", "not JSON"),
        (sse([1]), "not a chunk"),
        (sse({"detail": "x"}), "not a chunk"),
        (DONE + sse(CONTENT), "after [DONE]"),
        (b"data: " + b"x" * (1 << 21), "more than"),
    ],
)
def test_what_is_no_good_stream_fails(data: bytes, part: str) -> None:
    """Error events, other things than chunks and events after the end are failures by name."""
    with pytest.raises(StreamFailed, match=part.replace("[", r"\[")):
        StreamTimer(0.0).feed(data, 1.0)


@pytest.mark.parametrize("data", [b"", sse(ROLE, CONTENT), sse(CONTENT) + DONE[:-1]])
def test_a_stream_without_done_fails(data: bytes) -> None:
    """A stream cut short, however cleanly, is a failure."""
    timer = StreamTimer(0.0)
    timer.feed(data, 1.0)
    with pytest.raises(StreamFailed, match=r"without \[DONE\]"):
        timer.finish()


@given(gaps_s=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=20))
def test_ttft_and_gaps_add_up_to_the_last_content(gaps_s: list[float]) -> None:
    """TTFT plus all gaps is the time of the last content chunk."""
    timer = StreamTimer(0.0)
    now_s = 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        timer.feed(sse(CONTENT), now_s)
    timer.feed(DONE, now_s)
    timing = timer.finish()
    assert timing.ttft_s is not None
    # Sums of differences of doubles: one rounding for each of at most 21 terms.
    assert timing.ttft_s + sum(timing.itl_s) == pytest.approx(now_s, abs=1e-12)
    assert len(timing.itl_s) == len(gaps_s) - 1
