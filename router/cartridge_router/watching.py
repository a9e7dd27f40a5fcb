"""Files that operators replace while the gateway runs: certificates, keys, settings.

Owns the question whether one has changed. Refuses to read them.
"""

from collections.abc import Iterable
from pathlib import Path


class FileWatch:
    """Some files, looked at now and then. Making one blocks, as each look does.

    A rename over a file is a change, and so is its absence.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.files = tuple(files)
        self._states = self._look()

    def has_changed(self) -> bool:
        """Whether any file is another one than at the last call."""
        before, self._states = self._states, self._look()
        return self._states != before

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_state_of(file) for file in self.files]


def _state_of(file: Path) -> tuple[int, ...] | None:
    """What tells one content of a file from another without reading it; `None` without a file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
