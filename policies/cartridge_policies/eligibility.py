"""Which replicas can take a request at all, and why the others cannot.

Owns the hard limits. Refuses to rank.
"""

from cartridge_policies.types import ClusterView, Refusal, RefusalKind, ReplicaView


def eligible(view: ClusterView) -> tuple[ReplicaView, ...] | Refusal:
    """Replicas without a refusal and below their limit; or which of the two stood in the way."""
    able = [replica for replica in view.replicas if replica.refusal is None]
    if not able:
        return Refusal(
            RefusalKind.NO_ELIGIBLE,
            {replica.replica: replica.refusal or "" for replica in view.replicas},
        )
    free = [replica for replica in able if not _is_full(replica)]
    if not free:
        reasons = {
            replica.replica: replica.refusal or f"{replica.num_in_flight} requests in flight"
            for replica in view.replicas
        }
        return Refusal(RefusalKind.SATURATED, reasons)
    return tuple(free)


def _is_full(replica: ReplicaView) -> bool:
    return replica.max_in_flight is not None and replica.num_in_flight >= replica.max_in_flight
