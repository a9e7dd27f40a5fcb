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
from cartridge_router.watching import FileWatch

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20


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

    async def run(self) -> None:
        """Read the file, and again whenever it has changed, until cancelled."""
        watch = await asyncio.to_thread(FileWatch, [self._file])
        await self._take()
        while True:
            await asyncio.sleep(self._poll_s)
            # What is written while it is read shows at the next look.
            if await asyncio.to_thread(watch.has_changed):
                await self._take()

    async def _take(self) -> None:
        try:
            urls = await asyncio.to_thread(read_replicas, self._file)
        except ConfigurationError as error:
            for problem in error.problems:
                logger.error("the replicas stay as they are: %s", problem)  # noqa: TRY400
            self._channel.on_failed()
        else:
            self._channel.on_listed(urls)


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
