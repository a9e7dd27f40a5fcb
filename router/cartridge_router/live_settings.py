"""The settings in force, and how they change while the gateway runs.

Owns when their file is read again (it has changed, or SIGHUP) and what needs a restart instead.
Refuses half a change: where there is any problem, everything stays as it was.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from cartridge_router.errors import ConfigurationError
from cartridge_router.settings import Settings
from cartridge_router.watching import FileWatch

logger = logging.getLogger(__name__)

LOOK_S: Final = 2.0
"""How often the file is looked at."""
NEEDS_RESTART: Final = frozenset(
    {"host", "port", "redis_url", "store", "tenant", "workers"}
    | {"telemetry.otlp_endpoint", "clients.keep_alive_s", "forwarding.client"}
    | {f"tls.{name}" for name in ("cert_file", "key_file", "client_ca_file")}
    | {f"engines.{name}" for name in ("ca_file", "cert_file", "key_file", "api_key_file")}
    | {f"replication.{name}" for name in ("enabled", "rate_window_s", "token_file")}
    | {f"replication.{name}" for name in ("ca_file", "cert_file", "key_file")}
    | {f"admin.{name}" for name in ("host", "port", "token_file")}
    | {f"fleet.{name}" for name in ("file", "file_poll_s", "dns", "dns_refresh_s")}
    | {"placement.prediction_spread"}
    | {
        "fleet.from_registrations",
        "selection.embedder",
        "selection.index_dir",
        "selection.reranker",
    }
    | {
        f"fleet.kubernetes.{name}"
        for name in ("service", "namespace", "port_name", "scheme", "kubeconfig")
    }
    | {f"tenants.{name}" for name in ("keys_file", "jwks_url")}
)
"""What connections, listeners, tasks and the identity of KV are made of."""


class SettingsSource:
    """Where the settings came from, and come from again. Make it before they are read; blocks.

    Setting `asked` has them read at once.

    Args:
        file: `None` = there is none.
        load: reads all sources; blocks.
    """

    def __init__(self, file: Path | None, load: Callable[[], Settings]) -> None:
        # Before the first reading: what changes between that and the first look is not missed.
        self.watch = FileWatch([file] if file else [])
        self.load = load
        self.asked = asyncio.Event()


class LiveSettings:
    """The settings that are in force; replaced whole."""

    def __init__(self, settings: Settings) -> None:
        self.present = settings

    async def follow(
        self,
        source: SettingsSource,
        apply: Callable[[Settings], None],
        on_failed: Callable[[], None],
    ) -> None:
        """Take what the source has whenever it changes, until cancelled.

        Args:
            source: where from.
            apply: has everything go by new settings, or raises `ConfigurationError` and changes
                nothing.
            on_failed: called each time that they are not taken.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await source.asked.wait()
            is_asked = source.asked.is_set()
            source.asked.clear()
            # Looked at in any case: what was asked for need not be taken twice.
            if await asyncio.to_thread(source.watch.has_changed) or is_asked:
                await self._take(source, apply, on_failed)

    async def _take(
        self,
        source: SettingsSource,
        apply: Callable[[Settings], None],
        on_failed: Callable[[], None],
    ) -> None:
        try:
            new = await asyncio.to_thread(source.load)
            changed = list(_differences(self.present, new))
            fixed = [name for name in changed if name in NEEDS_RESTART]
            if fixed:
                raise ConfigurationError([f"{name}: changes with a restart only" for name in fixed])
            apply(new)
        except ConfigurationError as error:
            for problem in error.problems:
                logger.error("the settings stay as they are: %s", problem)  # noqa: TRY400
            on_failed()
        else:
            self.present = new
            logger.info("settings: %s", f"{', '.join(changed)} changed" if changed else "unchanged")


def _differences(old: msgspec.Struct, new: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    """Names of all settings that differ, with those of their sections before them."""
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, msgspec.Struct) and type(before) is type(after):
            yield from _differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield prefix + name
