"""Replicas from a file that people or programs rewrite while the gateway runs.

Owns noticing a change and reading what it brought. Refuses a file with any problem as a whole.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import yaml

from cartridge_proto.residency import ReplicaId
from cartridge_router.discovery import Channel
from cartridge_router.errors import ConfigurationError
from cartridge_router.roster import NamedReplica

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20

_State = tuple[int, ...] | None


class WatchedFile:
    """A YAML or JSON list of `{name, url}`, looked at every `poll_s` seconds.

    Each bad state of the file is one failure.
    """

    def __init__(
        self,
        file: Path,
        channel: Channel,
        *,
        poll_s: float,
    ) -> None:
        self._file = file
        self._poll_s = poll_s
        self._channel = channel
        self._seen: _State = ()

    async def run(self) -> None:
        """Look at the file until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(self._poll_s)

    async def _look(self) -> None:
        state = await asyncio.to_thread(_state_of, self._file)
        if state == self._seen:
            return
        # Noted before it is read: what is written while it is read shows at the next look.
        self._seen = state
        try:
            urls = await asyncio.to_thread(read_replicas, self._file)
        except ConfigurationError as error:
            for problem in error.problems:
                logger.error("the replicas stay as they are: %s", problem)  # noqa: TRY400
            self._channel.on_failed()
        else:
            self._channel.on_listed(urls)


def _state_of(file: Path) -> _State:
    """What tells one content from another without reading it; `None` without a file."""
    try:
        found = file.stat()
    except OSError:
        return None
    # The time of a change of mode, too: it may be readable now.
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def read_replicas(file: Path) -> dict[ReplicaId, str]:
    """Read and check a file of replicas: name -> base URL, in its order.

    Raises:
        ConfigurationError: with every problem of it.
    """
    entries = _parse(file)
    problems = []
    urls: dict[ReplicaId, str] = {}
    for index, entry in enumerate(entries):
        name = ReplicaId(entry.name)
        if name in urls:
            problems.append(f"{file}: [{index}].name: {name} is there before")
        urls[name] = entry.url
    if problems:
        raise ConfigurationError(problems)
    return urls


def _parse(file: Path) -> list[NamedReplica]:
    value = _read(file)
    validator = jsonschema.Draft202012Validator(msgspec.json.schema(list[NamedReplica]))
    errors = sorted(validator.iter_errors(value), key=lambda error: error.json_path)
    if errors:
        raise ConfigurationError(
            [f"{file}: {error.json_path}: {error.message[:200]}" for error in errors]
        )
    return msgspec.convert(value, list[NamedReplica])


def _read(file: Path) -> Any:
    """The value of the file; an empty one is none, as half a file that is being written may be."""
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigurationError([f"{file}: more than {MAX_FILE_BYTES} bytes"])
        return yaml.safe_load(data.decode("utf-8"))
    except OSError as error:
        raise ConfigurationError([f"{file}: {error.strerror}"]) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError([f"{file}: {error}"]) from error
