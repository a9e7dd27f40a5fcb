"""What a streamed OpenAI answer says about speed: TTFT, ITL and whether it ended well.

Owns the meaning of chunks: content, `[DONE]`, errors. Refuses clocks and sockets: the caller feeds
bytes with the time at which they came.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import msgspec

from cartridge_loadtest.sse import EventTooLarge, SseParser


class StreamFailed(Exception):
    """A stream that carried an error, was not what it should be, or ended without `[DONE]`."""


@dataclass(frozen=True, kw_only=True)
class StreamTiming:
    """Times of one complete stream, in seconds."""

    ttft_s: float | None
    """Request sent to first content chunk; `None` when there was no content."""
    itl_s: list[float]
    """Gaps between consecutive content chunks."""
    total_s: float
    """Request sent to `[DONE]`."""

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between content chunks; `None` when there are less than two."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None


class StreamTimer:
    """Times one stream from `sent_s` on: when its request was sent, or was due."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._parser = SseParser()
        self._content_s: list[float] = []
        self._done_s: float | None = None

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes that were received at `now_s`.

        Raises:
            StreamFailed: an error event, or something that is no chunk.
        """
        try:
            events = self._parser.feed(data, now_s)
        except EventTooLarge as error:
            raise StreamFailed(str(error)) from error
        for event in events:
            if self._done_s is not None:
                raise StreamFailed("an event after [DONE]")
            if event.data == "[DONE]":
                self._done_s = event.received_s
            elif _has_content(event.data):
                self._content_s.append(event.received_s)

    def finish(self) -> StreamTiming:
        """The times, once the stream has ended.

        Raises:
            StreamFailed: it ended without `[DONE]`.
        """
        if self._done_s is None:
            raise StreamFailed(f"ended without [DONE] after {len(self._content_s)} content chunks")
        return StreamTiming(
            ttft_s=self._content_s[0] - self._sent_s if self._content_s else None,
            itl_s=[later - earlier for earlier, later in itertools.pairwise(self._content_s)],
            total_s=self._done_s - self._sent_s,
        )


def _has_content(data: str) -> bool:
    """Whether a chunk carries text of the answer; the role and usage chunks do not."""
    try:
        chunk = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise StreamFailed(f"a chunk that is not JSON: {data[:80]!r}") from error
    match chunk:
        case {"error": error}:
            raise StreamFailed(f"error event: {_message_of(error)}")
        case {"choices": [{"delta": {"content": str(text)}}, *_]}:
            return bool(text)
        case {"choices": [{"text": str(text)}, *_]}:
            return bool(text)
        case {"choices": list()}:
            return False
        case _:
            raise StreamFailed(f"not a chunk: {data[:80]!r}")


def _message_of(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
