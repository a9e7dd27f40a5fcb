"""Which replica keeps a response, and whose it is: bounds, tenants, and ids in first bytes."""

import pytest

from cartridge_proto.residency import ReplicaId
from cartridge_router.response_book import MAX_HEAD_BYTES, MAX_ID_CHARS, HeadReader, ResponseBook

R0, R1 = ReplicaId("r0"), ReplicaId("r1")


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


def book_of(max_known: int = 10, keep_s: float = 60.0, clock: Clock | None = None) -> ResponseBook:
    """An empty book."""
    return ResponseBook(max_known=max_known, keep_s=keep_s, now_s=clock or Clock())


def test_only_its_tenant_finds_a_response() -> None:
    """For others it is as one that is not known."""
    book = book_of()
    book.note("resp_1", "acme", R1)
    assert book.find("resp_1", "acme") == R1
    assert book.find("resp_1", "beta") is book.find("resp_2", "beta") is None


def test_who_made_a_response_stays_its_maker() -> None:
    """An id that comes again from another tenant changes nothing; from its own it moves."""
    book = book_of()
    book.note("resp_1", "acme", R0)
    book.note("resp_1", "beta", R1)
    assert (book.find("resp_1", "acme"), book.find("resp_1", "beta")) == (R0, None)
    book.note("resp_1", "acme", R1)
    assert (book.find("resp_1", "acme"), len(book)) == (R1, 1)


def test_a_response_is_known_for_a_while() -> None:
    """Then it is forgotten, and its place is free; seen again, its time begins again."""
    clock = Clock()
    book = book_of(clock=clock)
    book.note("old", "acme", R0)
    book.note("seen-again", "acme", R0)
    clock.now_s += 59
    assert book.find("old", "acme") == R0
    book.note("seen-again", "acme", R0)
    clock.now_s += 1
    assert book.find("old", "acme") is None
    book.note("new", "beta", R0)
    assert (book.find("seen-again", "acme"), len(book)) == (R0, 2)
    clock.now_s += 61
    book.note("old", "beta", R1)
    assert (book.find("old", "beta"), len(book)) == (R1, 1)


def test_the_oldest_makes_room() -> None:
    """There are never more than the bound."""
    book = book_of(max_known=3)
    for number in range(5):
        book.note(f"resp_{number}", "acme", R0)
    known = [number for number in range(5) if book.find(f"resp_{number}", "acme")]
    assert (known, len(book)) == ([2, 3, 4], 3)


def test_a_tenant_that_makes_many_pushes_out_its_own() -> None:
    """Those of others stay known."""
    book = book_of(max_known=10)
    book.note("of-beta", "beta", R1)
    for number in range(1000):
        book.note(f"resp_{number}", "acme", R0)
    assert (book.find("of-beta", "beta"), len(book)) == (R1, 10)


def test_a_smaller_bound_holds_from_the_next_response_on() -> None:
    """As after a change of the settings."""
    book = book_of(max_known=10)
    for number in range(10):
        book.note(f"resp_{number}", "acme", R0)
    book.configure(max_known=2, keep_s=60.0)
    book.note("new", "acme", R0)
    assert (len(book), book.find("new", "acme")) == (2, R0)


def read(*pieces: bytes, is_stream: bool) -> list[str]:
    """The ids that are found in an answer that comes in pieces."""
    found: list[str] = []
    reader = HeadReader(is_stream=is_stream, on_id=found.append)
    for piece in pieces:
        if not reader.is_done:
            reader.take(piece)
    return found


BODY = b'{"id":"resp_1","created_at":1,"output":[{"id":"msg_2"}]}'
VLLM = b'event: response.created\ndata: {"response":{"id":"resp_1","x":{}},"type":"y"}\n\n'
OPENAI = (
    b': hello\n\nid: 3\nevent: response.created\r\ndata: {"type":"response.created",'
    b'"sequence_number":0,"response":{"object":"response","id":"resp_1"'
)


@pytest.mark.parametrize(
    ("answer", "is_stream"),
    [
        (BODY, False),
        (b' {\n  "object": "response",\n  "id": "resp_1",\n  "store": true}', False),
        (VLLM, True),
        (OPENAI, True),
    ],
)
@pytest.mark.parametrize("size", [1, 7, MAX_HEAD_BYTES])
def test_the_id_is_read_from_the_first_bytes(answer: bytes, is_stream: bool, size: int) -> None:
    """However they are cut, once, as vLLM and OpenAI write them."""
    pieces = [answer[begin : begin + size] for begin in range(0, len(answer), size)]
    assert read(*pieces, is_stream=is_stream) == ["resp_1"]


@pytest.mark.parametrize(
    ("answer", "is_stream"),
    [
        (b'{"metadata":{"id":"resp_stolen"},"id":"resp_1"}', False),
        (b'{"instructions":"\\"id\\":\\"resp_stolen\\"","id":"resp_1"}', False),
        (b'{"input":[],"id":"resp_1"}', False),
        (b'[{"id":"resp_1"}]', False),
        (b'{"id":""}', False),
        (b'{"id":"resp\\u005f1"}', False),
        (b'{"id":"' + b"x" * (MAX_ID_CHARS + 1) + b'"}', False),
        (b'{"error":{"id":"resp_1"}}', False),
        (b'data: {"id":"resp_1"}\n\n', True),
        (b'data: {"item":{"response":{"id":"resp_1"}}}\n\n', True),
        (b'data: {"response":{"metadata":{"id":"resp_stolen"},"id":"resp_1"}}\n\n', True),
        (b"data: [DONE]\n\n", True),
        (b": " + b"x" * MAX_HEAD_BYTES + b"\n" + VLLM, True),
    ],
)
def test_what_a_client_may_have_sent_is_no_id(answer: bytes, is_stream: bool) -> None:
    """Behind anything but plain members of the engine's own nothing is looked for."""
    assert read(answer, is_stream=is_stream) == []
