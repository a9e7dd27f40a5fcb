"""Which replicas there are: what each source lists, merged into one name, one address.

Owns the last list of each source, who wins a name, and what an operator has taken out. Refuses to
know whether a replica is well, and to read any source.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from cartridge_proto.residency import BaseUrlText, ReplicaId, ReplicaText

logger = logging.getLogger(__name__)


class NamedReplica(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica as people and programs write it down."""

    name: ReplicaText
    url: BaseUrlText


class Source(StrEnum):
    """Who lists replicas. Where two list one name, the one that stands first here is believed."""

    OPERATOR = "operator"
    """Added at run time."""
    SETTINGS = "settings"
    FILE = "file"
    KUBERNETES = "kubernetes"
    DNS = "dns"
    REGISTRATION = "registration"


@dataclass(frozen=True, order=True)
class Listed:
    """Where a replica answers, and who says so."""

    url: str
    source: Source


class OperatorChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What operators have changed: replicas they added, by name, and names they took out."""

    added: dict[ReplicaId, str]
    taken_out: list[ReplicaId]


class Roster:
    """The lists of all sources of one fleet. For use from one event loop."""

    def __init__(self) -> None:
        self._lists: dict[Source, dict[ReplicaId, str]] = {source: {} for source in Source}
        self._taken_out: set[ReplicaId] = set()
        self._conflicts: set[tuple[ReplicaId, Listed, Listed]] = set()

    def replace(self, source: Source, urls: Mapping[ReplicaId, str]) -> None:
        """Take in what a source lists now, in its order.

        What was taken out stays out for as long as some source lists its name.
        """
        self._lists[source] = dict(urls)
        self._taken_out &= {name for names in self._lists.values() for name in names}
        self._warn_of_conflicts()

    def add(self, name: ReplicaId, url: str) -> None:
        """Take in one that an operator adds; it wins, also over having been taken out."""
        self._taken_out.discard(name)
        self.replace(Source.OPERATOR, {**self._lists[Source.OPERATOR], name: url})

    def take_out(self, name: ReplicaId) -> None:
        """Leave out a name, whoever lists it."""
        self._taken_out.add(name)
        kept = {each: url for each, url in self._lists[Source.OPERATOR].items() if each != name}
        self.replace(Source.OPERATOR, kept)

    @property
    def changes(self) -> OperatorChanges:
        """All that operators have changed and that still counts."""
        return OperatorChanges(
            added=dict(self._lists[Source.OPERATOR]), taken_out=sorted(self._taken_out)
        )

    def follow(self, changes: OperatorChanges) -> None:
        """Take over what operators have changed elsewhere, in place of what they changed here."""
        self._taken_out = set(changes.taken_out)
        self.replace(Source.OPERATOR, changes.added)

    @property
    def present(self) -> dict[ReplicaId, Listed]:
        """All but those taken out, in the order of the sources and of their lists."""
        merged = self._merged()
        return {name: listed for name, listed in merged.items() if name not in self._taken_out}

    @property
    def taken_out(self) -> dict[ReplicaId, Listed]:
        """What would be there, had an operator not taken it out."""
        return {name: listed for name, listed in self._merged().items() if name in self._taken_out}

    def _merged(self) -> dict[ReplicaId, Listed]:
        merged: dict[ReplicaId, Listed] = {}
        for source, urls in self._lists.items():
            for name, url in urls.items():
                merged.setdefault(name, Listed(url, source))
        return merged

    def _warn_of_conflicts(self) -> None:
        """Say once of each name with two addresses which one is used."""
        merged = self._merged()
        found = {
            (name, merged[name], Listed(url, source))
            for source, urls in self._lists.items()
            for name, url in urls.items()
            if url != merged[name].url
        }
        for name, used, other in sorted(found - self._conflicts):
            logger.warning(
                "replica %s: %s of %s is used, not %s of %s",
                *(name, used.url, used.source, other.url, other.source),
            )
        self._conflicts = found
