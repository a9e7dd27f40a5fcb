"""How long a store may take.

Owns the limits of one question. Refuses to be endless: a server that sends a byte a second is
unavailable.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Patience:
    """How long a server may take: `connect_s`, no byte for `silence_s`, and all of a body.

    A body of n bytes must have come after `grace_s + n / min_bytes_per_s`.
    """

    connect_s: float = 5.0
    silence_s: float = 20.0
    grace_s: float = 30.0
    min_bytes_per_s: float = 64 << 10

    def limit_s(self, size_bytes: int) -> float:
        """Seconds that a body of this size may take."""
        return self.grace_s + size_bytes / self.min_bytes_per_s
