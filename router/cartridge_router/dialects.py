"""What differs between the APIs that generate: prompts, streams, errors.

Owns one table. Refuses everything that is the same for all of them.
"""

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cartridge_proto.manifest import ConventionKind
from cartridge_router.errors import RouterError
from cartridge_router.request import Route

_FAILURE: Final = re.compile(rb'(?:^|\n)(?:event: ?(?:error|response\.failed)|data: ?\{"error")')
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True)
class Dialect:
    """One API.

    `operation`: what OpenTelemetry's conventions for GenAI call it.
    `convention`: what a Cartridge must stand for in its prompts; `None` = it takes none.
    `num_openers`: events of a stream that come before anything is known of the answer.
    """

    operation: str
    convention: ConventionKind | None = None
    num_openers: int = 0
    is_anthropic: bool = False

    def has_failed(self, first: bytes) -> bool:
        """Whether the first events of a stream say that there will be no answer."""
        # What most streams have nothing of is seen much faster than what the pattern wants.
        is_possible = b'"error"' in first or b"event:" in first
        return is_possible and _FAILURE.search(first) is not None

    def error_body(self, error: RouterError) -> bytes:
        """An error as this API's clients read it."""
        return msgspec.json.encode(self._error(error))

    def error_event(self, error: RouterError) -> bytes:
        """The same as an event that may come after any other bytes of a stream."""
        name = b"event: error\n" if self.is_anthropic else b""
        return b"\n\n" + name + b"data: " + self.error_body(error) + b"\n\n"

    def _error(self, error: RouterError) -> dict[str, Any]:
        if self.is_anthropic:
            kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": error.message}}
        return {
            "error": {
                "message": error.message,
                "type": error.openai_type,
                "param": error.param,
                "code": error.code,
            }
        }


DIALECTS: Final = {
    # The role, before the first token.
    Route.CHAT: Dialect("chat", ConventionKind.SYSTEM_TURN, num_openers=1),
    Route.COMPLETIONS: Dialect("text_completion", ConventionKind.DOCUMENT),
    # `response.created` and `response.in_progress`.
    Route.RESPONSES: Dialect("chat", ConventionKind.SYSTEM_TURN, num_openers=2),
    # `message_start`.
    Route.MESSAGES: Dialect("chat", ConventionKind.SYSTEM_TURN, num_openers=1, is_anthropic=True),
    Route.COUNT_TOKENS: Dialect("other", is_anthropic=True),
    Route.OTHER: Dialect("other"),
}
