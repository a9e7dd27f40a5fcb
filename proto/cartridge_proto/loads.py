"""What gateways tell one another: the requests that each has on each replica.

Owns the records on the wire. Refuses times of day: what is told is as of its arrival.
"""

from typing import Annotated, Final

import msgspec

from cartridge_proto.digest import DigestText
from cartridge_proto.residency import EpochText, NonNegative, ReplicaText, Seconds, Sequence, Tier

MAX_REPLICAS_TOLD: Final = 64
"""In one message."""
MAX_LOADING_TOLD: Final = 32
"""Artifacts for each replica."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As those of residency: frozen and closed."""


class ReplicaLoad(_Record, frozen=True, kw_only=True):
    """Requests of one gateway on one replica: counts, predicted seconds, tokens and bytes."""

    replica: ReplicaText
    num_in_flight: NonNegative
    num_pending: NonNegative
    """Of them those whose first token has not come."""
    pending_s: Seconds
    """Predicted work before those first tokens."""
    pending_tokens: NonNegative
    context_tokens: NonNegative
    pending_bytes: dict[Tier, NonNegative]
    """On the way from each tier."""
    due_s: Annotated[dict[DigestText, Seconds], msgspec.Meta(max_length=MAX_LOADING_TOLD)]
    """Artifacts that are being brought, and in how many seconds they should be there."""


class GatewayLoads(_Record, frozen=True, kw_only=True):
    """Some replicas whose bookings have changed; those of others stay as they were told.

    `gateway` is random for each process; `seq` grows with each of its messages.
    """

    gateway: EpochText
    seq: Sequence
    loads: Annotated[list[ReplicaLoad], msgspec.Meta(max_length=MAX_REPLICAS_TOLD)]
