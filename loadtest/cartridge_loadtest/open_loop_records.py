"""What an open-loop run is asked to send, and what came of each request: lines of JSON.

Owns the two kinds of lines. Refuses to make plans, to send, and to judge.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is sent when it is due, whatever became of those before it."""

    due_s: float
    """After the first moment of the run."""
    cartridges: list[str] = []
    """Their ids, in order; none: a plain request."""
    num_question_words: int = 1
    max_answer_tokens: int = 16
    session: str | None = None


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one; all times count from when it was due, not from when it was sent."""

    index: int
    """Place in the plan, from 0."""
    due_s: float
    late_s: float
    """From due to sent: the fault of the generator, and part of every time below."""
    cartridges: list[str]
    session: str | None = None
    status: int | None = None
    """Of HTTP; `None`: no answer began."""
    error: str | None = None
    """`None` for a complete stream; only that has the times of chunks."""
    ttft_s: float | None = None
    itl_s: list[float] = []
    tpot_s: float | None = None
    total_s: float
    replica: str | None = None
    tier: str | None = None
    """Where the gateway believed the Cartridges to be, the slowest of them."""
    decision: str | None = None
    terms_s: dict[str, float] = {}
    """Cost terms of the replica that was asked, as the gateway predicted them."""


Line = TypeVar("Line", PlannedRequest, RequestRecord)


def write_lines(file: Path, lines: Iterable[PlannedRequest | RequestRecord]) -> None:
    """One JSON object a line."""
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def read_lines(file: Path, kind: type[Line]) -> list[Line]:
    """All lines of a file.

    Raises:
        msgspec.DecodeError: one is not what it should be.
    """
    decoder = msgspec.json.Decoder(kind)
    return [decoder.decode(line) for line in file.read_bytes().splitlines() if line]
