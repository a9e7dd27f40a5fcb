"""Which Cartridges a request gets, in which order and layout.

Owns the resolution of names to manifests and the rules for joining them. Refuses to know replicas
or load.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from cartridge_policies.types import ArtifactDemand
from cartridge_proto.composition import (
    CompositionItem,
    CompositionMessage,
    OnMiss,
    composition_digest,
    layout_offsets,
    model_fingerprint,
)
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import (
    CompositionClass,
    ConventionKind,
    ModelIdentity,
    PositionLayout,
)
from cartridge_proto.names import FIELD_CARTRIDGE_IDS
from cartridge_router.catalog import Cartridge, Catalog
from cartridge_router.dialects import DIALECTS
from cartridge_router.errors import IncompatibleCartridge, InvalidRequest, UnknownCartridge
from cartridge_router.request import ParsedRequest, Route

MAX_FOUND: Final = 4096
"""Sets that are kept until the catalog is read again."""


class SelectedBy(StrEnum):
    """How the set was found."""

    EXPLICIT = "explicit"
    SEMANTIC = "semantic"
    NONE = "none"


ModelKey = tuple[str, str, str, str]
"""Architecture, digests of configuration, tokenizer and weights ("" where they are not known)."""


def model_key(model: ModelIdentity) -> ModelKey:
    """What tells whether an artifact may serve with a model, adapters left aside."""
    return (
        model.architecture,
        model.config_digest,
        model.tokenizer_digest,
        model.weights_digest or "",
    )


def is_of_one_model(one: ModelKey, other: ModelKey) -> bool:
    """Whether two are the same, as far as both are known."""
    return one[:3] == other[:3] and (one[3] == other[3] or "" in (one[3], other[3]))


@dataclass(frozen=True)
class Selection:
    """An ordered set of Cartridges for a tenant's scope, where each stands, and how it was found.

    `composition` is the identity of the set in that scope; `None` for no Cartridges.
    """

    cartridges: tuple[Cartridge, ...]
    layout: PositionLayout
    how: SelectedBy
    scope: str
    is_certified: bool = True
    """False when isolated artifacts are joined because the operator allows it."""
    basis: str = ""
    """Of a search: how sure it is, and in which index it looked."""

    @property
    def told(self) -> str:
        """How the set was found, for the client."""
        return "; ".join(part for part in (self.how.value, self.basis) if part)

    @property
    def num_tokens(self) -> int:
        """Virtual length."""
        return sum(cartridge.manifest.num_tokens for cartridge in self.cartridges)

    @cached_property
    def demands(self) -> tuple[ArtifactDemand, ...]:
        """What placement knows of them."""
        return tuple(
            ArtifactDemand(c.digest, c.manifest.payload_bytes, c.manifest.num_tokens)
            for c in self.cartridges
        )

    @cached_property
    def composition(self) -> Digest | None:
        """Identity of the request's prefix; travels as its cache salt."""
        if not self.cartridges:
            return None
        return composition_digest(
            scope=self.scope,
            layout=self.layout,
            items=self._items,
            visibility=[True] * len(self.cartridges),
            fingerprint=model_fingerprint(self.cartridges[0].manifest.model),
        )

    @property
    def _items(self) -> list[CompositionItem]:
        lengths = [cartridge.manifest.num_tokens for cartridge in self.cartridges]
        offsets = layout_offsets(self.layout, lengths)
        return [
            CompositionItem(digest=cartridge.digest, num_tokens=length, offset=offset)
            for cartridge, length, offset in zip(self.cartridges, lengths, offsets, strict=True)
        ]

    def message(
        self, *, request_id: str, deadline_ms: int, traceparent: str | None = None
    ) -> CompositionMessage | None:
        """What an engine is told; `None` for no Cartridges."""
        if self.composition is None:
            return None
        return CompositionMessage(
            v=1,
            request_id=request_id,
            composition=self.composition,
            scope=self.scope,
            layout=self.layout,
            items=self._items,
            visibility=[True] * len(self.cartridges),
            deadline_ms=deadline_ms,
            on_miss=OnMiss.FAIL,
            traceparent=traceparent,
        )


NO_CARTRIDGES = Selection((), PositionLayout.SEQUENTIAL, SelectedBy.NONE, scope="")


class Selector:
    """Resolves what a request names."""

    def __init__(self, catalog: Catalog, *, allow_uncertified_composition: bool) -> None:
        self._catalog = catalog
        self.allow_uncertified_composition = allow_uncertified_composition
        self._found: dict[Hashable, Selection] = {}
        self._edition = catalog.edition

    def select(self, request: ParsedRequest, tenant: str) -> Selection:
        """The Cartridges of a request, in the order given.

        Raises:
            UnknownCartridge: a name that this tenant has no Cartridge for.
            IncompatibleCartridge: they do not fit the route or one another; names the field.
            InvalidRequest: the route takes none, or one is named twice.
        """
        if not request.cartridge_ids:
            return NO_CARTRIDGES
        convention = DIALECTS[request.route].convention
        if convention is None:
            routes = ", ".join(route for route, dialect in DIALECTS.items() if dialect.convention)
            raise InvalidRequest(
                f"{FIELD_CARTRIDGE_IDS} works on {routes}", param=FIELD_CARTRIDGE_IDS
            )
        if self._edition is not self._catalog.edition or len(self._found) > MAX_FOUND:
            self._found, self._edition = {}, self._catalog.edition
        key = (tenant, request.cartridge_ids, convention, self.allow_uncertified_composition)
        selection = self._found.get(key)
        if selection is None:
            selection = self._join(request.cartridge_ids, convention, request.route, tenant)
            self._found[key] = selection
        return selection

    def _join(
        self, cartridge_ids: Sequence[str], convention: ConventionKind, route: Route, tenant: str
    ) -> Selection:
        found = tuple(self._find(name, tenant) for name in cartridge_ids)
        digests = [cartridge.digest for cartridge in found]
        if len(set(digests)) != len(digests):
            raise InvalidRequest(
                f"{FIELD_CARTRIDGE_IDS}: the same Cartridge twice", param=FIELD_CARTRIDGE_IDS
            )
        _check_convention(found, convention, route)
        _check_same_model(found)
        is_certified = self._check_joinable(found)
        return Selection(
            found,
            found[0].manifest.composition.position_layout,
            SelectedBy.EXPLICIT,
            tenant,
            is_certified,
        )

    def join_found(self, found: Sequence[Cartridge], tenant: str, basis: str) -> Selection:
        """A set that a search found, or of one that cannot be joined its first Cartridge."""
        while found:
            try:
                _check_same_model(tuple(found))
                is_certified = self._check_joinable(tuple(found))
            except IncompatibleCartridge:
                found = found[: len(found) - 1]
                continue
            return Selection(
                tuple(found),
                found[0].manifest.composition.position_layout,
                SelectedBy.SEMANTIC,
                tenant,
                is_certified,
                basis,
            )
        return NO_CARTRIDGES

    def _find(self, name: str, tenant: str) -> Cartridge:
        cartridge = self._catalog.find(name, tenant)
        if cartridge is None:
            raise UnknownCartridge(f"no Cartridge {name!r}", param=FIELD_CARTRIDGE_IDS)
        return cartridge

    def _check_joinable(self, found: tuple[Cartridge, ...]) -> bool:
        """Whether the set is certified.

        Raises:
            IncompatibleCartridge: it is not, and the operator does not allow that.
        """
        if len(found) == 1:
            return True
        parts = [cartridge.manifest.composition for cartridge in found]
        if len({part.position_layout for part in parts}) > 1:
            raise _conflict("composition.position_layout", [part.position_layout for part in parts])
        if len({part.set_id for part in parts}) > 1:
            raise _conflict("composition.set_id", [str(part.set_id) for part in parts])
        if parts[0].composition_class is CompositionClass.JOINT:
            largest = min(part.max_set_size or 1 for part in parts)
            if len(found) > largest:
                raise _conflict("composition.max_set_size", [str(largest)])
            return True
        if not self.allow_uncertified_composition:
            raise IncompatibleCartridge(
                "composition.class: isolated Cartridges are not joined unless the operator sets "
                "cartridges.allow_uncertified_composition",
                param=FIELD_CARTRIDGE_IDS,
            )
        return False


def _check_convention(found: tuple[Cartridge, ...], wanted: ConventionKind, route: Route) -> None:
    for cartridge in found:
        kind = cartridge.manifest.prompt_convention.kind
        if kind is not wanted:
            raise IncompatibleCartridge(
                f"prompt_convention.kind: {cartridge.manifest.alias} is a {kind}; {route} takes "
                f"{wanted}",
                param=FIELD_CARTRIDGE_IDS,
            )


def _check_same_model(found: tuple[Cartridge, ...]) -> None:
    models = [cartridge.manifest.model for cartridge in found]
    for field in models[0].__struct_fields__:
        values = [getattr(model, field) for model in models]
        if field == "adapter":
            # Their names are labels, as the model's.
            values = [None if adapter is None else adapter.digest for adapter in values]
        if field != "name" and any(value != values[0] for value in values):
            raise _conflict(f"model.{field}", [str(value) for value in values])


def _conflict(field: str, values: list[str]) -> IncompatibleCartridge:
    return IncompatibleCartridge(
        f"{field}: the Cartridges do not go together ({', '.join(values)})",
        param=FIELD_CARTRIDGE_IDS,
    )
