"""What a tier holds: the least recently used goes first, what is used never.

Owns sizes, uses and the order of eviction. Refuses to load anything, and to know the unit.
"""

from collections import OrderedDict

from cartridge_proto.digest import Digest


class BoundedTier:
    """Entries by digest. What is in use may exceed the capacity, what is not never does."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.used = 0
        self._sizes: OrderedDict[Digest, int] = OrderedDict()
        self._uses: dict[Digest, int] = {}

    def __contains__(self, digest: object) -> bool:
        return digest in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def put(self, digest: Digest, size: int) -> list[Digest]:
        """Take in, or touch; returns what had to go, the entry itself if it is too large."""
        if digest not in self._sizes:
            self._sizes[digest] = size
            self.used += size
        self._sizes.move_to_end(digest)
        return self.make_room(0)

    def force(self, digest: Digest, size: int) -> None:
        """Take in what has no room; whoever does so pins it at once."""
        self._sizes[digest] = size
        self.used += size

    def touch(self, digest: Digest) -> None:
        """It was used now."""
        self._sizes.move_to_end(digest)

    def pin(self, digest: Digest) -> None:
        """One more uses it, which is there."""
        self._uses[digest] = self._uses.get(digest, 0) + 1

    def unpin(self, digest: Digest) -> None:
        """One less."""
        left = self._uses[digest] - 1
        if left:
            self._uses[digest] = left
        else:
            del self._uses[digest]

    def make_room(self, size: int) -> list[Digest]:
        """Evict until so much is free, or nothing is left that may go; returns what went."""
        over = self.used + size - self.capacity
        gone = list[Digest]()
        if over <= 0:
            return gone
        for digest, held in self._sizes.items():
            if digest not in self._uses:
                gone.append(digest)
                over -= held
                if over <= 0:
                    break
        for digest in gone:
            self.used -= self._sizes.pop(digest)
        return gone

    def drop(self, digest: Digest) -> bool:
        """Let one go that is not in use; whether it was there."""
        if digest not in self._sizes or digest in self._uses:
            return False
        self.used -= self._sizes.pop(digest)
        return True

    def clear(self) -> None:
        """Everything is lost."""
        self._sizes.clear()
        self._uses.clear()
        self.used = 0
