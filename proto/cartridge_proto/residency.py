"""Residency: which replica holds which artifact, at which tier, as of which boot.

Owns the records engines publish and gateways mirror. Refuses to know Redis (see `codec` for bytes
and `names` for keys). Carries the address of a replica only where its operator has it advertised.
"""

from enum import StrEnum
from typing import Annotated, NewType

import msgspec

from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.composition import RequestIdText, ScopeText
from cartridge_proto.digest import END, DigestText

ReplicaId = NewType("ReplicaId", str)
Epoch = NewType("Epoch", str)

ReplicaText = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}" + END)]
EpochText = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}" + END)]
BaseUrlText = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?" + END,
        max_length=256,
    ),
]
"""Where a server answers, without a path, a login, or a slash at the end."""
Sequence = Annotated[int, msgspec.Meta(ge=0)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Tier(StrEnum):
    """Where bytes are, fastest first."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"
    REMOTE = "remote"


TIERS_FASTEST_FIRST = tuple(Tier)


class ResidencyState(StrEnum):
    """Whether the bytes can be used."""

    LOADING = "loading"
    READY = "ready"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records on the wire: frozen and closed."""


class ResidencyRecord(_Record, frozen=True, kw_only=True):
    """One artifact on one replica. `seq` grows by one with each change of that boot."""

    replica: ReplicaText
    epoch: EpochText
    digest: DigestText
    tier: Tier
    state: ResidencyState
    size_bytes: NonNegative
    is_pinned: bool
    seq: Sequence


class ResidencyChange(_Record, frozen=True, kw_only=True):
    """One entry of the stream of changes; `record` is `None` when the artifact was withdrawn."""

    replica: ReplicaText
    epoch: EpochText
    digest: DigestText
    seq: Sequence
    record: ResidencyRecord | None


class Registration(_Record, frozen=True, kw_only=True):
    """What a live replica says of itself; the value of its lease.

    `seq` is the sequence number of its last change, so that a reader notices a gap.
    """

    replica: ReplicaText
    epoch: EpochText
    seq: Sequence
    engine: EngineIdentity
    engine_version: Annotated[str, msgspec.Meta(max_length=64)]
    control_address: Annotated[str, msgspec.Meta(max_length=256)] | None
    is_draining: bool = False
    """Takes no new requests with Cartridges."""
    url: BaseUrlText | None = None
    """Where its API server answers, for gateways that are set to take replicas from here."""


class ReceiptStatus(StrEnum):
    """How a request that used Cartridges ended for the virtual prefix."""

    SERVED = "served"
    FAILED = "failed"
    ABANDONED = "abandoned"
    """Given up by its client before the prefix was whole."""


class FailureReason(StrEnum):
    """Why an engine refused or failed a virtual prefix."""

    INVALID_MESSAGE = "invalid_message"
    UNKNOWN_ARTIFACT = "unknown_artifact"
    CORRUPT_ARTIFACT = "corrupt_artifact"
    INCOMPATIBLE = "incompatible"
    QUARANTINED = "quarantined"
    """It answered its own probe otherwise than its reference, on this engine build."""
    CONTEXT_LENGTH = "context_length"
    UNSUPPORTED = "unsupported"
    DEADLINE = "deadline"
    CAPACITY = "capacity"
    NOT_READY = "not_ready"
    INTERNAL = "internal"


class ReceiptItem(_Record, frozen=True, kw_only=True):
    """Where one artifact was when the request came."""

    digest: DigestText
    tier: Tier


class Receipt(_Record, frozen=True, kw_only=True):
    """What an engine did for one request. Times in seconds, sizes in bytes and tokens."""

    replica: ReplicaText
    epoch: EpochText
    request_id: RequestIdText
    status: ReceiptStatus
    reason: FailureReason | None
    detail: Annotated[str, msgspec.Meta(max_length=2048)]
    items: list[ReceiptItem]
    num_virtual_tokens: NonNegative
    num_reused_tokens: NonNegative
    """Virtual tokens that vLLM's prefix cache already held."""
    num_loads: NonNegative
    """Times KV was written: 0 when the prefix cache held all, 1 more when preemption lost it."""
    loaded_bytes: NonNegative
    load_s: Seconds
    """Seconds that the request waited for its prefix: from its arrival, or from the loss of its
    blocks, for bytes, checks and probes, for another request's load of the same prefix, and until
    its own was written. 0 when nothing had to come; a wait for the scheduler alone is not in it.
    """
    scope: ScopeText | None = None
    """Tenant that the message named; `None` when it named none that can be."""
