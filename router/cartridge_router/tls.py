"""TLS towards clients and towards engines, and the key that engines ask for.

Owns certificates, keys and their renewal: new files are taken for new connections, bad ones are
not, and running connections go on. Refuses versions before 1.2.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from cartridge_router.errors import ConfigurationError
from cartridge_router.settings import EngineSettings, TlsSettings
from cartridge_router.watching import FileWatch

logger = logging.getLogger(__name__)

REFRESH_S = 2.0
"""How often the files are looked at."""


class Renewed:
    """Something made of files, made anew when they change.

    Args:
        what: for messages.
        watch: the files, looked at before they were first read: no change goes unseen.
        renew: reads the files; raises `ConfigurationError` and changes nothing when it cannot.
        on_failure: called each time that new files are not taken.
    """

    def __init__(
        self,
        what: str,
        watch: FileWatch,
        renew: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._what = what
        self._watch = watch
        self._renew = renew
        self._on_failure = on_failure

    async def run(self) -> None:
        """Look at the files until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            if await asyncio.to_thread(self._watch.has_changed):
                await asyncio.to_thread(self._take)

    def _take(self) -> None:
        """Take the files as they are now; what cannot be taken stays as it was."""
        try:
            self._renew()
        except ConfigurationError as error:
            logger.error("%s: the changed files are not taken: %s", self._what, error)  # noqa: TRY400
            self._on_failure()
        else:
            logger.info("%s: taken anew from changed files", self._what)


class ServerTls:
    """What the listener shows to clients, and asks of them.

    Raises:
        ConfigurationError: naming the setting whose file cannot be used.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self.watch = FileWatch(
            _paths(settings.cert_file, settings.key_file, settings.client_ca_file)
        )
        self._present = self._read()
        # The listener keeps the context that it was given; each handshake takes certificates and
        # authorities of the present one. What OpenSSL does not take from there is set on both.
        self.context = self._read()
        self.context.sni_callback = self._choose

    def renew(self) -> None:
        """Read the files for connections to come.

        Raises:
            ConfigurationError: as when it was made; then nothing has changed.
        """
        self._present = self._read()

    def _read(self) -> ssl.SSLContext:
        settings = self._settings
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_certificate(context, "tls", settings.cert_file or "", settings.key_file)
        if settings.client_ca_file is not None:
            _load_authorities(context, "tls.client_ca_file", settings.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
            # A session that is resumed is not verified again: an authority that is no longer
            # believed would let its clients in. Without tickets TLS 1.3 resumes none.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        return context

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext
    ) -> None:
        connection.context = self._present


class EngineLogin:
    """What engines are shown: a client certificate, a key; and which of them are believed.

    Raises:
        ConfigurationError: naming the setting whose file cannot be used.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.watch = FileWatch(
            _paths(settings.ca_file, settings.cert_file, settings.key_file, settings.api_key_file)
        )
        self.context, self.headers = self._read()

    def renew(self) -> None:
        """Read the files for connections and requests to come.

        Raises:
            ConfigurationError: as when it was made; then nothing has changed.
        """
        self.context, self.headers = self._read()

    def _read(self) -> tuple[ssl.SSLContext, dict[str, str]]:
        settings, headers = self._settings, {}
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if settings.ca_file is not None:
            _load_authorities(context, "engines.ca_file", settings.ca_file)
        if settings.cert_file is not None:
            _load_certificate(context, "engines", settings.cert_file, settings.key_file)
        if settings.api_key_file is not None:
            headers["Authorization"] = f"Bearer {_read_key(Path(settings.api_key_file))}"
        return context, headers


def _paths(*names: str | None) -> list[Path]:
    return [Path(name) for name in names if name is not None]


def _load_certificate(
    context: ssl.SSLContext, section: str, cert_file: str, key_file: str | None
) -> None:
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigurationError([f"{section}.cert_file, key_file: {error}"]) from error


def _load_authorities(context: ssl.SSLContext, name: str, file: str) -> None:
    try:
        context.load_verify_locations(file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError([f"{name}: {error}"]) from error


def _no_password() -> str:
    """OpenSSL would ask for one on the terminal."""
    raise ValueError("the key is encrypted, and nobody is there to give its password")


def _read_key(file: Path) -> str:
    try:
        key = file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError([f"engines.api_key_file: {error}"]) from error
    if not key or not key.isprintable() or " " in key:
        raise ConfigurationError(["engines.api_key_file: no key, or one with spaces in it"])
    return key
