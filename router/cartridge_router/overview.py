"""What an operator sees of a running gateway: replicas, tiers, hot Cartridges, the last decisions.

Owns the shape of `/admin/state` and its bounds. Refuses to change anything, and to keep what it
shows.
"""

import heapq
import itertools
import time
from collections import Counter
from typing import Any, Final

from cartridge_policies.types import Candidate
from cartridge_proto.residency import ReplicaId
from cartridge_router.api import Services
from cartridge_router.decisions import HOT_WINDOW_S, LoggedRequest
from cartridge_router.fleet import Fleet, Replica
from cartridge_router.roster import Listed

MAX_REPLICAS: Final = 80
MAX_CARTRIDGES: Final = 200
MAX_MODELS: Final = 4
"""Of one replica."""
MAX_NAMED: Final = 8
"""Cartridges of one decision."""
MAX_TEXT: Final = 80
"""Characters of a name that an engine or a Cartridge's maker chose."""


class Overview:
    """The present state of one gateway. For use from its event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._started_s = time.monotonic()

    def state(self) -> dict[str, Any]:
        """Everything, bounded; costs some milliseconds in a large fleet."""
        services = self._services
        replicas = all_replicas(services.fleet)
        shown = replicas[:MAX_REPLICAS]
        present = services.fleet.replicas
        return {
            "object": "gateway.state",
            "at_s": time.time(),
            "uptime_s": time.monotonic() - self._started_s,
            "is_draining": services.drain.is_begun,
            "policy": services.settings.placement.policy,
            "map": {"mode": services.residency.mode.value, "age_s": services.residency.age_s},
            "totals": {
                "requests": self._num_requests(),
                "in_flight": sum(r.num_in_flight for r in present + services.fleet.leaving),
                "queued": sum(services.admission.num_queued.values()),
            },
            "replicas": {
                "data": [row | self._registered(row) for row in shown],
                "left_out": len(replicas) - len(shown),
            },
            "cartridges": self._cartridges(
                [row["name"] for row in shown if row["status"] == "present"]
            ),
            "decisions": {"data": [_decision(r) for r in services.decisions.requests]},
        }

    def _num_requests(self) -> dict[str, int]:
        """Requests so far by the class of their status."""
        classes: Counter[str] = Counter()
        for family in self._services.metrics.requests.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    classes[f"{sample.labels['status'][:1]}xx"] += int(sample.value)
        return dict(sorted(classes.items()))

    def _registered(self, row: dict[str, Any]) -> dict[str, Any]:
        """What the map and the probes know of a replica, and its models cut short."""
        name = ReplicaId(row["name"])
        residency, replica = self._services.residency, self._services.fleet.find(name)
        registration = residency.registration(name)
        used_bytes = residency.used_bytes(name)
        models = [model[:MAX_TEXT] for model in row["models"][:MAX_MODELS]]
        return {
            "models": models,
            "models_left_out": len(row["models"]) - len(models),
            "is_registered": registration is not None,
            "is_draining": registration is not None and registration.is_draining,
            "handover": self._handover(name),
            "engine_version": registration.engine_version if registration is not None else None,
            "has_extension": replica.has_extension if replica is not None else None,
            "used_bytes": (
                None if used_bytes is None else {tier.value: n for tier, n in used_bytes.items()}
            ),
        }

    def _handover(self, name: ReplicaId) -> dict[str, int] | None:
        """Hot artifacts of a replica that leaves, and how many of them others have."""
        copies = self._services.copies
        found = None if copies is None else copies.handovers.get(name)
        if found is None:
            return None
        return {"num_hot": found.num_hot, "num_elsewhere": found.num_elsewhere}

    def _cartridges(self, replicas: list[str]) -> dict[str, Any]:
        """The hottest Cartridges, then others; the tiers of each in the order of the replicas."""
        catalog, residency = self._services.catalog, self._services.residency
        counts = self._services.decisions.hot.counts
        every = dict.fromkeys(catalog.aliases.values())
        hot = heapq.nlargest(MAX_CARTRIDGES, counts.items(), key=lambda pair: pair[1])
        wanted = dict.fromkeys(digest for digest, _ in hot if digest in every)
        wanted |= dict.fromkeys(itertools.islice(every, MAX_CARTRIDGES))
        found = [(d, catalog.manifest(d)) for d in itertools.islice(wanted, MAX_CARTRIDGES)]
        known = [(digest, manifest) for digest, manifest in found if manifest is not None]
        tiers = [residency.tiers(ReplicaId(name), [d for d, _ in known]) for name in replicas]
        data = [
            {
                "alias": manifest.alias,
                "title": manifest.card.title[:MAX_TEXT],
                "digest": digest,
                "num_tokens": manifest.num_tokens,
                "size_bytes": manifest.payload_bytes,
                "num_requests": counts[digest],
                "tiers": [t[digest].value if digest in t else None for t in tiers],
            }
            for digest, manifest in known
        ]
        return {
            "data": data,
            "replicas": replicas,
            "left_out": len(every) - len(data),
            "window_s": HOT_WINDOW_S,
        }


def all_replicas(fleet: Fleet) -> list[dict[str, Any]]:
    """Replicas that get requests, those that leave, those that were taken out."""
    rows = [replica_row(fleet, replica) for replica in fleet.replicas + fleet.leaving]
    return rows + [_taken_out(name, listed) for name, listed in fleet.taken_out.items()]


def replica_row(fleet: Fleet, replica: Replica) -> dict[str, Any]:
    """One replica, as operators see it."""
    is_present = fleet.find(replica.replica) is replica
    is_leaving = replica in fleet.leaving
    return {
        "object": "replica",
        "name": replica.replica,
        "url": replica.url,
        "source": replica.source.value,
        "status": "present" if is_present else "leaving" if is_leaving else "gone",
        "is_healthy": replica.is_healthy,
        "left_alone": fleet.outliers.reason_against(replica.replica) if is_present else None,
        "num_in_flight": replica.num_in_flight,
        "models": sorted(replica.models),
    }


def _taken_out(name: ReplicaId, listed: Listed) -> dict[str, Any]:
    return {
        "object": "replica",
        "name": name,
        "url": listed.url,
        "source": listed.source.value,
        "status": "taken_out",
        "is_healthy": None,
        "left_alone": None,
        "num_in_flight": 0,
        "models": [],
    }


def _decision(logged: LoggedRequest) -> dict[str, Any]:
    first_s, ended_s = logged.first_byte_s, logged.ended_s
    return {
        "request_id": logged.request_id,
        "at_s": logged.at_s,
        "route": logged.route,
        "model": logged.model,
        "tenant": logged.tenant,
        "cartridges": list(logged.cartridges[:MAX_NAMED]),
        "cartridges_left_out": max(0, len(logged.cartridges) - MAX_NAMED),
        "selected_by": logged.selected_by,
        "replica": logged.replica,
        "reason": logged.reason,
        "map_mode": logged.map_mode.value if logged.map_mode is not None else None,
        "map_age_s": logged.map_age_s,
        "candidates": [_candidate(c) for c in logged.candidates],
        "candidates_left_out": logged.num_candidates - len(logged.candidates),
        "status": logged.status,
        "problem": logged.problem,
        "num_retries": logged.num_retries,
        "queued_s": logged.queued_s,
        "first_byte_s": None if first_s is None else first_s - logged.started_s,
        "total_s": None if ended_s is None else ended_s - logged.started_s,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "replica": candidate.replica,
        "total_s": candidate.total_s,
        "terms": {term.name: term.seconds for term in candidate.terms},
        "tiers": [tier.value for tier in candidate.tiers[:MAX_NAMED]],
    }
