"""Which replicas get no new requests for a while: they fail, push back, or do not answer probes.

Owns failures in a row, ejections and their end. Refuses to eject more than half of the fleet, and
to be more than advice: a replica that nobody else can stand in for is used all the same.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from cartridge_proto.residency import ReplicaId
from cartridge_router.settings import FleetSettings

MAX_EJECTION_FACTOR = 10
"""A replica that is ejected again and again stays away so many times the first time at most."""
MAX_BUSY_S = 30.0
"""Longest time that a replica's own Retry-After is believed."""


@dataclass
class _Record:
    num_failures: int = 0
    num_ejections: int = 0
    ejected_until_s: float = float("-inf")
    busy_until_s: float = float("-inf")
    asked_s: float | None = None
    """Since when probes are sent that it has not answered."""


class Outliers:
    """Of one fleet, whose replicas are added and removed by whoever owns them.

    What a request or a probe tells of a replica that was removed meanwhile says nothing.

    Args:
        settings: `num_request_failures`, `ejection_s` and `suspect_after_s` of them.
        clock: seconds that never go back.
    """

    def __init__(
        self, settings: FleetSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self._records: dict[ReplicaId, _Record] = {}
        self._clock = clock

    def add(self, replica: ReplicaId) -> None:
        """A replica joins the fleet, with a clean record."""
        self._records[replica] = _Record()

    def remove(self, replica: ReplicaId) -> None:
        """It leaves the fleet, and what was known of it is forgotten."""
        del self._records[replica]

    def note_success(self, replica: ReplicaId) -> None:
        """It answered."""
        record = self._records.get(replica)
        if record is None:
            return
        record.num_failures = 0
        if record.num_ejections and self._clock() >= record.ejected_until_s:
            record.num_ejections -= 1

    def note_failure(self, replica: ReplicaId) -> bool:
        """It broke off, answered that it cannot, or was too slow; returns whether that ejects it.

        One failure is enough for a replica that has come back from an ejection and answered
        nothing since.
        """
        record, now_s = self._records.get(replica), self._clock()
        if record is None:
            return False
        record.num_failures += 1
        is_enough = record.num_failures >= self.settings.num_request_failures
        if not is_enough or now_s < record.ejected_until_s:
            return False
        num_away = sum(other.ejected_until_s > now_s for other in self._records.values())
        if 2 * (num_away + 1) > len(self._records):
            return False
        record.num_ejections = min(record.num_ejections + 1, MAX_EJECTION_FACTOR)
        record.ejected_until_s = now_s + self.settings.ejection_s * record.num_ejections
        return True

    def note_busy(self, replica: ReplicaId, retry_after_s: float) -> None:
        """It asked to be left alone for so long."""
        if (record := self._records.get(replica)) is not None:
            record.busy_until_s = self._clock() + min(retry_after_s, MAX_BUSY_S)

    def note_asked(self, replica: ReplicaId) -> None:
        """A probe is sent."""
        record = self._records.get(replica)
        if record is not None and record.asked_s is None:
            record.asked_s = self._clock()

    def note_answered(self, replica: ReplicaId) -> None:
        """A probe was answered."""
        if (record := self._records.get(replica)) is not None:
            record.asked_s = None

    def reasons(self) -> dict[ReplicaId, str]:
        """Those that others should be asked before, and why."""
        found = {name: self.reason_against(name) for name in self._records}
        return {name: reason for name, reason in found.items() if reason is not None}

    def reason_against(self, replica: ReplicaId) -> str | None:
        """Why others should be asked first; `None` for nothing."""
        record, now_s = self._records[replica], self._clock()
        if now_s < record.ejected_until_s:
            return f"ejected after {record.num_failures} failures in a row"
        if now_s < record.busy_until_s:
            return "asked to be left alone (Retry-After)"
        if record.asked_s is not None and now_s - record.asked_s > self.settings.suspect_after_s:
            return "does not answer its probes"
        return None
