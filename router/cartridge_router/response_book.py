"""Which replica keeps a stored response, and which tenant made it.

Owns what this process has learned of that, bounded in number and in time, and how an id is read
from the beginning of an answer. Refuses to ask anybody who may know more.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cartridge_proto.residency import ReplicaId

MAX_ID_CHARS: Final = 256
MAX_HEAD_BYTES: Final = 4096
"""Of an answer, in which its id must have come; engines put it first."""

_SCALARS: Final = rb'(?:"[a-z_]+"\s*:\s*(?:"[^"\\]*"|[0-9.]+|true|false|null)\s*,\s*)*'
_ID: Final = rb'"id"\s*:\s*"([!#-\[\]-~]{1,%d})"' % MAX_ID_CHARS
_BODY: Final = re.compile(rb"\s*\{\s*" + _SCALARS + _ID)
_EVENT: Final = re.compile(
    rb"(?:(?::|event:|id:|retry:)[^\r\n]*\r?\n|\r?\n)*data:\s*\{\s*"
    + _SCALARS
    + rb'"response"\s*:\s*\{\s*'
    + _SCALARS
    + _ID
)
"""Whatever stands before the id is of the engine's making: nothing that a client sent can be taken
for one. An escaped id is none: no engine makes such."""


class HeadReader:
    """Reads the id of a new response from the first bytes of its answer, as they pass.

    Args:
        is_stream: of events.
        on_id: called with it, once.
    """

    def __init__(self, *, is_stream: bool, on_id: Callable[[str], None]) -> None:
        self._pattern = _EVENT if is_stream else _BODY
        self._on_id = on_id
        self._head = b""
        self.is_done = False
        """There is no need to look at more."""

    def take(self, data: bytes) -> None:
        """Look at the next bytes."""
        self._head += data[: MAX_HEAD_BYTES - len(self._head)]
        match = self._pattern.match(self._head)
        self.is_done = match is not None or len(self._head) >= MAX_HEAD_BYTES
        if match is not None:
            self._on_id(match[1].decode("ascii"))


@dataclass(frozen=True, slots=True)
class _Entry:
    tenant: str
    replica: ReplicaId
    until_s: float


class ResponseBook:
    """Ids of responses, oldest first. For use from one event loop.

    Args:
        max_known: more push out the oldest; of a tenant with more than its share, its own.
        keep_s: how long one is known.
        now_s: a clock that never goes back.
    """

    def __init__(
        self, *, max_known: int, keep_s: float, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._now_s = now_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._of_tenant: dict[str, OrderedDict[str, None]] = {}
        self.configure(max_known=max_known, keep_s=keep_s)

    def __len__(self) -> int:
        return len(self._entries)

    def configure(self, *, max_known: int, keep_s: float) -> None:
        """Keep by other bounds what comes from now on."""
        self._max_known = max_known
        self._keep_s = keep_s

    def note(self, response_id: str, tenant: str, replica: ReplicaId) -> None:
        """Keep where a response of a tenant is; one of another tenant keeps its maker."""
        now_s = self._now_s()
        known = self._entries.get(response_id)
        if known is not None:
            if known.tenant != tenant and now_s < known.until_s:
                return
            self._drop(response_id)
        self._make_room(tenant, now_s)
        self._entries[response_id] = _Entry(tenant, replica, now_s + self._keep_s)
        self._of_tenant.setdefault(tenant, OrderedDict())[response_id] = None

    def find(self, response_id: str, tenant: str) -> ReplicaId | None:
        """The replica that keeps it; `None` for what is not known, or another tenant's."""
        entry = self._entries.get(response_id)
        if entry is None or entry.tenant != tenant or self._now_s() >= entry.until_s:
            return None
        return entry.replica

    def _make_room(self, tenant: str, now_s: float) -> None:
        while self._entries:
            oldest = next(iter(self._entries))
            if now_s < self._entries[oldest].until_s:
                break
            self._drop(oldest)
        while len(self._entries) >= self._max_known:
            own = self._of_tenant.get(tenant, OrderedDict())
            share = self._max_known // len(self._of_tenant)
            self._drop(next(iter(own if len(own) > share else self._entries)))

    def _drop(self, response_id: str) -> None:
        entry = self._entries.pop(response_id)
        own = self._of_tenant[entry.tenant]
        del own[response_id]
        if not own:
            del self._of_tenant[entry.tenant]
