"""Work of one key keeps its order; keys do not wait for one another."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import partial

import pytest

from cartridge_engine_ext.ordered_work import OrderedWork
from tests.engine_ext.stored_artifacts import WAIT_S
from tests.engine_ext.waiting import until


@pytest.fixture
def work() -> Iterator[OrderedWork]:
    """On two threads."""
    work = OrderedWork(2, "test")
    yield work
    work.stop()


def test_order_within_a_key(work: OrderedWork) -> None:
    """However many threads there are, one key's work runs one after another, as it came."""
    done: defaultdict[str, list[int]] = defaultdict(list)
    for number in range(50):
        for key in "abc":
            assert work.submit(key, partial(done[key].append, number))
    until(lambda: all(work.is_idle(key) for key in "abc"))
    assert done == {key: list(range(50)) for key in "abc"}


def test_a_key_that_waits_holds_no_other_back(work: OrderedWork) -> None:
    """Much work behind a slow piece takes one thread, not all."""
    gate, other = threading.Event(), threading.Event()
    for _ in range(10):
        work.submit("slow", lambda: gate.wait(WAIT_S))
    work.submit("quick", other.set)
    assert other.wait(WAIT_S)
    assert not work.is_idle("slow")
    gate.set()
    until(lambda: work.is_idle("slow"))


def test_what_fails_is_over(work: OrderedWork) -> None:
    """The next piece of its key runs."""
    done = threading.Event()
    work.submit("key", lambda: 1 // 0)
    work.submit("key", done.set)
    assert done.wait(WAIT_S)


def test_after_stop(work: OrderedWork) -> None:
    """Nothing is taken, and what has not begun never begins."""
    gate, late = threading.Event(), threading.Event()
    begun = threading.Event()

    def first() -> None:
        begun.set()
        gate.wait(WAIT_S)

    work.submit("key", first)
    work.submit("key", late.set)
    assert begun.wait(WAIT_S)
    work.stop()
    assert not work.submit("other", late.set)
    gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("test"):
            thread.join(WAIT_S)
    assert not late.is_set()
