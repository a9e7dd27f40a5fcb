"""Server-sent events, parsed as the bytes arrive, each stamped with the time it was complete.

Owns the line and field rules of the format. Refuses clocks (the caller says what time it is),
meaning (see `stream_timing`) and events larger than a limit.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

import re
from dataclasses import dataclass

MAX_EVENT_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventTooLarge(ValueError):
    """An event that grew beyond the limit before it ended."""


@dataclass(frozen=True)
class SseEvent:
    """One event: its data lines joined, its type, and when its last byte came, in seconds."""

    data: str
    kind: str
    received_s: float


class SseParser:
    """Parses one stream. Any split of the same bytes gives the same events."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""
        self._is_at_start = True
        self._skips_lf = False
        self._data: list[str] = []
        self._kind = ""
        self._event_bytes = 0

    def feed(self, data: bytes, now_s: float) -> list[SseEvent]:
        """Take the next bytes, received at `now_s`; return the events they complete.

        Raises:
            EventTooLarge: the event under way is larger than the limit.
        """
        return [
            event for line in self._lines(data) if (event := self._take(line, now_s)) is not None
        ]

    def _lines(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes; what is left waits for more."""
        if not data:
            return []
        if self._skips_lf:
            data = data.removeprefix(b"\n")
        rest = self._rest + data
        if self._is_at_start:
            if len(rest) < len(_BOM) and _BOM.startswith(rest):
                self._rest = rest
                return []
            rest = rest.removeprefix(_BOM)
            self._is_at_start = False
        lines = []
        begin = 0
        for end in _LINE_END.finditer(rest):
            lines.append(rest[begin : end.start()])
            begin = end.end()
        # A CR ends its line at once; the LF of a pair may still come.
        self._skips_lf = begin == len(rest) and rest.endswith(b"\r")
        self._rest = rest[begin:]
        if len(self._rest) > self._max_event_bytes:
            raise EventTooLarge(f"an event of more than {self._max_event_bytes} bytes")
        return lines

    def _take(self, line: bytes, now_s: float) -> SseEvent | None:
        if not line:
            return self._dispatch(now_s)
        self._event_bytes += len(line)
        if self._event_bytes > self._max_event_bytes:
            raise EventTooLarge(f"an event of more than {self._max_event_bytes} bytes")
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._kind = value
        return None

    def _dispatch(self, now_s: float) -> SseEvent | None:
        data, kind = self._data, self._kind
        self._data, self._kind, self._event_bytes = [], "", 0
        if not data:
            return None
        return SseEvent("\n".join(data), kind or "message", now_s)
