"""Errors of the engine extension.

EngineExtensionError
├── ConfigurationError   the engine's flags or the extension's settings cannot work
├── Refusal              one request's virtual prefix is refused; carries the receipt's reason
└── SelfTestFailed       the boot oracle found a difference
"""

from cartridge_proto.residency import FailureReason


class EngineExtensionError(Exception):
    """Base of this package's errors."""


class ConfigurationError(EngineExtensionError):
    """The engine cannot start like this; the text lists every problem."""


class Refusal(EngineExtensionError):
    """A virtual prefix that cannot be served, and why."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class SelfTestFailed(EngineExtensionError):
    """The engine's answers with an injected prefix differ from those to the ordinary prompt."""
