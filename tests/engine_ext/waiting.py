"""Waits for a condition that another thread or process brings about."""

import threading
from collections.abc import Callable

from tests.engine_ext.stored_artifacts import WAIT_S

_POLL_S = 0.01


def until(condition: Callable[[], bool]) -> None:
    """Return as soon as a condition holds; fail when it does not in time."""
    never = threading.Event()
    for _ in range(int(WAIT_S / _POLL_S)):
        if condition():
            return
        never.wait(_POLL_S)
    raise AssertionError(f"did not come true within {WAIT_S} s: {condition.__qualname__}")
