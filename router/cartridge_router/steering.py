"""Headers by which a client steers one request: its priority, its deadline, who places it.

Owns their spelling, ranges and defaults. Refuses to say who may use them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cartridge_policies import POLICIES
from cartridge_proto.composition import OnMiss
from cartridge_proto.names import (
    HEADER_DEADLINE_MS,
    HEADER_EXPLAIN,
    HEADER_ON_MISS,
    HEADER_POLICY,
    HEADER_PRIORITY,
    HEADER_SESSION,
)
from cartridge_router.errors import InvalidRequest
from cartridge_router.settings import MAX_PRIORITY, MIN_PRIORITY

MAX_DEADLINE_MS: Final = 86_400_000
MAX_SESSION_CHARS: Final = 256
"""More of a session's name tells nothing apart."""

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,9}")
ON_MISS: Final = tuple(each.value for each in OnMiss)
YES: Final = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True)
class Steering:
    """What one request asks for, beside its answer."""

    priority: int = 0
    """Higher goes first where requests wait for room."""
    deadline_s: float | None = None
    """Seconds from its coming until the first byte of its answer; `None` without a limit."""
    policy: str | None = None
    """Placement policy; `None` = that of the settings."""
    session: str | None = None
    """What requests of one conversation share, for policies that keep them together."""
    on_miss: OnMiss | None = None
    """What to do where the Cartridges cannot be had; `None` = what the settings say."""
    is_explained: bool = False
    """Whether the answer tells the costs of all candidates."""


_DEFAULT: Final = Steering()


def read_steering(headers: Mapping[str, str], max_priority: int = MAX_PRIORITY) -> Steering:
    """What the headers of a request ask for; `max_priority` is the most that its tenant may.

    Raises:
        InvalidRequest: naming the header and what it takes.
    """
    sent = [headers.get(name) for name in _READ]
    if all(text is None for text in sent):
        return _DEFAULT
    priority, deadline, policy, explain, session, on_miss = sent
    if policy is not None and policy not in POLICIES:
        raise _refused(HEADER_POLICY, f"one of {', '.join(sorted(POLICIES))}")
    if explain is not None and explain not in YES:
        raise _refused(HEADER_EXPLAIN, f"one of {', '.join(YES)}")
    if on_miss is not None and on_miss not in ON_MISS:
        raise _refused(HEADER_ON_MISS, f"one of {', '.join(ON_MISS)}")
    deadline_ms = _integer(HEADER_DEADLINE_MS, deadline, 1, MAX_DEADLINE_MS)
    return Steering(
        priority=_integer(HEADER_PRIORITY, priority, MIN_PRIORITY, max_priority) or 0,
        deadline_s=None if deadline_ms is None else deadline_ms / 1000,
        policy=policy,
        session=session[:MAX_SESSION_CHARS] if session else None,
        on_miss=None if on_miss is None else OnMiss(on_miss),
        is_explained=explain is not None and YES[explain],
    )


_READ: Final = (
    *(HEADER_PRIORITY, HEADER_DEADLINE_MS, HEADER_POLICY, HEADER_EXPLAIN),
    *(HEADER_SESSION, HEADER_ON_MISS),
)


def _integer(name: str, text: str | None, low: int, high: int) -> int | None:
    if text is None:
        return None
    if _INTEGER.fullmatch(text) is None or not low <= int(text) <= high:
        raise _refused(name, f"an integer from {low} to {high}")
    return int(text)


def _refused(name: str, takes: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: must be {takes}", param=name)
