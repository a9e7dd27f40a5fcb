"""Doubles for tests of the gateway and of what is built on it.

Owns doubles that are passed in where the real thing is. Refuses to patch anything.
"""


class FakeClock:
    """A monotonic clock that stands still until it is told to advance. Seconds."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The present, in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
