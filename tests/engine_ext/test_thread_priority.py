"""Loading threads give way; others keep their priority."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cartridge_engine_ext.thread_priority import LOADING_NICENESS, yield_to_serving


def niceness() -> int:
    """Of this thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_loading_thread_is_nicer() -> None:
    """The priority of one thread is lowered, not that of its process."""
    before = niceness()
    with ThreadPoolExecutor(1, initializer=yield_to_serving) as executor:
        assert executor.submit(niceness).result() == max(before, LOADING_NICENESS)
    assert niceness() == before


def test_where_it_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that refuses costs nothing but the courtesy."""
    asked: list[tuple[int, ...]] = []

    def refuse(*arguments: int) -> None:
        asked.append(arguments)
        raise PermissionError(1, "no")

    before = niceness()
    monkeypatch.setattr(os, "setpriority", refuse)
    yield_to_serving()
    assert asked == [(os.PRIO_PROCESS, threading.get_native_id(), LOADING_NICENESS)]
    assert niceness() == before
