"""The log: text for people or JSON for machines, each line with the request that it is about.

Owns the format and the request's id. Refuses keys, prompts and answers: nobody may log them.
"""

import logging
from contextvars import ContextVar
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError
from pythonjsonlogger.json import JsonFormatter

from cartridge_router.settings import LogFormat, LogSettings

REQUEST_ID: Final[ContextVar[str | None]] = ContextVar("request_id", default=None)
"""The gateway's id of the request that the present task serves."""

_TEXT = "%(asctime)s %(levelname)s %(name)s%(about)s: %(message)s"
_FIELDS = ("asctime", "levelname", "name", "message", "request_id")


class _AboutRequest(logging.Filter):
    """Puts the request's id into each record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; it is always logged."""
        request_id = REQUEST_ID.get()
        record.request_id = request_id
        record.about = "" if request_id is None else f" [{request_id}]"
        return True


class _WithoutReceivedBytes(logging.Filter):
    """Keeps what a client sent out of the log: of bytes that are no HTTP only the fault is told."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; it is always logged."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.exc_info = None
            record.msg = f"{record.msg}: {type(error).__name__}"
        return True


server_logger = logging.getLogger("cartridge_router.http")
"""What aiohttp's servers have to say."""
server_logger.addFilter(_WithoutReceivedBytes())


def log_handler(settings: LogSettings) -> logging.Handler:
    """Writes to stderr as the settings say."""
    handler = logging.StreamHandler()
    handler.addFilter(_AboutRequest())
    if settings.format is LogFormat.JSON:
        named = {"asctime": "time", "levelname": "level", "name": "logger"}
        handler.setFormatter(
            JsonFormatter(" ".join(f"%({name})s" for name in _FIELDS), rename_fields=named)
        )
    else:
        handler.setFormatter(logging.Formatter(_TEXT))
    return handler


def configure_logging(settings: LogSettings) -> None:
    """Send what all loggers of this process say to one handler."""
    logging.basicConfig(level=settings.level.upper(), handlers=[log_handler(settings)], force=True)
