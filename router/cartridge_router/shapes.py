"""Shapes of what the gateway's own routes read and answer, and of its errors.

Owns the members of each. Refuses what engines take and answer: those members pass unseen.
"""

from typing import Annotated, Literal

import msgspec

from cartridge_policies.types import MapMode
from cartridge_proto import names
from cartridge_proto.composition import OnMiss
from cartridge_proto.manifest import ConventionKind, Kind, PositionLayout
from cartridge_proto.residency import Tier
from cartridge_router.request import MAX_CARTRIDGE_ID_CHARS, MAX_CARTRIDGES
from cartridge_router.roster import Source
from cartridge_router.selection import SelectedBy


class Shape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exactly these members."""


class CartridgeFields(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway reads of a body that generates; every other member passes to the engine."""

    model: str
    cartridge_ids: (
        Annotated[
            list[Annotated[str, msgspec.Meta(max_length=MAX_CARTRIDGE_ID_CHARS)]],
            msgspec.Meta(
                max_length=MAX_CARTRIDGES,
                description="Aliases or digests of Cartridges, in order; `[]` for none. Before the "
                f"header `{names.HEADER_CARTRIDGE_IDS}`.",
            ),
        ]
        | None
    ) = None
    prompt_logprobs: Annotated[
        int | None, msgspec.Meta(description="Refused together with Cartridges.")
    ] = None
    echo: Annotated[
        bool | None, msgspec.Meta(description="`true` is refused together with Cartridges.")
    ] = None
    use_beam_search: Annotated[
        bool | None, msgspec.Meta(description="`true` is refused together with Cartridges.")
    ] = None
    max_tokens: float | None = None
    max_completion_tokens: float | None = None
    max_output_tokens: float | None = None
    n: float | None = None


class EngineFields(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway reads of any other body."""

    model: str


class ErrorDetail(Shape, frozen=True, kw_only=True):
    """`code`: a word of the gateway, or the status as a number where an engine refused."""

    message: str
    type: str
    param: str | None
    code: str | int | None


class Error(Shape, frozen=True, kw_only=True):
    """An error as clients of OpenAI's API read it."""

    error: ErrorDetail


class AnthropicDetail(Shape, frozen=True, kw_only=True):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(Shape, frozen=True, kw_only=True):
    """An error as clients of Anthropic's API read it."""

    type: Literal["error"]
    error: AnthropicDetail


class Model(Shape, frozen=True, kw_only=True):
    """A model or an adapter that a healthy replica serves."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None
    parent: str | msgspec.UnsetType = msgspec.UNSET
    """Model that an adapter belongs to."""


class Models(Shape, frozen=True, kw_only=True):
    """Each model once."""

    object: Literal["list"]
    data: list[Model]


class Holder(Shape, frozen=True, kw_only=True):
    """A replica that holds an artifact, at its fastest tier."""

    replica: str
    tier: Tier


class Cartridge(Shape, frozen=True, kw_only=True):
    """A Cartridge that the caller may use, and where it is ready."""

    object: Literal["cartridge"]
    id: str
    digest: str
    kind: Kind
    model: str
    num_tokens: int
    size_bytes: int
    prompt_convention: ConventionKind
    title: str
    sentence: str
    residency: list[Holder]


class Cartridges(Shape, frozen=True, kw_only=True):
    """Cartridges that the caller may use."""

    object: Literal["list"]
    data: list[Cartridge]


class Selected(Shape, frozen=True, kw_only=True):
    """One Cartridge of a selection."""

    alias: str
    digest: str


class ExplainedSelection(Shape, frozen=True, kw_only=True):
    """Which Cartridges a request would use, and why."""

    how: SelectedBy
    basis: str
    """Of a search: how it ended, how sure it is, and in which index it looked."""
    cartridges: list[Selected]
    num_tokens: int
    layout: PositionLayout
    is_certified: bool


class ExplainedCandidate(Shape, frozen=True, kw_only=True):
    """A replica, and the predicted seconds to its first token; the terms add up to the total."""

    replica: str
    total_s: float
    terms: dict[str, float]
    tiers: list[Tier]


class ExplainedPlacement(Shape, frozen=True, kw_only=True):
    """Which replica would be asked, and why; candidates best first."""

    replica: str
    decision: str
    map_mode: MapMode
    map_age_s: float | None
    candidates: list[ExplainedCandidate]


class ExplainedFallback(Shape, frozen=True, kw_only=True):
    """What the request does without its Cartridges, and what was predicted both ways.

    Seconds to the first token; null where texts may not stand in.
    """

    on_miss: OnMiss
    instead: str | None
    """Null: it has its Cartridges, or needs none."""
    with_cartridges_s: float | None
    with_text_s: float | None
    margin: float | None
    """Share that the Cartridges must save."""


class Explanation(Shape, frozen=True, kw_only=True):
    """What a request would do."""

    object: Literal["cartridge.explanation"]
    selection: ExplainedSelection
    placement: ExplainedPlacement
    fallback: ExplainedFallback


class Health(Shape, frozen=True, kw_only=True):
    """The process works."""

    status: Literal["ok"]


class KnownReplicas(Shape, frozen=True, kw_only=True):
    """Replicas that answer probes, and those of them that registered."""

    healthy: list[str]
    registered: list[str]


class MapState(Shape, frozen=True, kw_only=True):
    """How far the residency map can be believed."""

    mode: MapMode
    age_s: float | None


class Readiness(Shape, frozen=True, kw_only=True):
    """Whether requests are to come here."""

    status: Literal["ready", "no healthy replica", "draining"]
    replicas: KnownReplicas
    residency: MapState


class ReplicaEntry(Shape, frozen=True, kw_only=True):
    """A replica as operators see it; `is_healthy` is not known of one that was taken out."""

    object: Literal["replica"]
    name: str
    url: str
    source: Source
    status: Literal["present", "leaving", "gone", "taken_out"]
    is_healthy: bool | None
    left_alone: str | None
    num_in_flight: int
    models: list[str]


class Replicas(Shape, frozen=True, kw_only=True):
    """All replicas of a fleet."""

    object: Literal["list"]
    data: list[ReplicaEntry]
