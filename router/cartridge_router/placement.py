"""Which replica a request goes to: builds the view, asks the policy, says why.

Owns the translation of fleet, map and selection into a policy's view. Refuses weights, thresholds
and retries of its own.
"""

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from cartridge_policies import POLICIES
from cartridge_policies.history import RouteHistory
from cartridge_policies.loads import Rows
from cartridge_policies.never_worse import Comparison, NeverWorse, fallback_demand
from cartridge_policies.rates import ReplicaRates
from cartridge_policies.types import (
    ClusterView,
    Decision,
    Demand,
    MapMode,
    Refusal,
    RefusalKind,
)
from cartridge_proto.compatibility import incompatibilities
from cartridge_proto.names import FIELD_CARTRIDGE_IDS
from cartridge_proto.residency import ReplicaId
from cartridge_router.errors import (
    AllReplicasSaturated,
    CartridgeNotServed,
    ContextTooLong,
    IncompatibleCartridge,
    NoEligibleReplica,
    ResponseUnavailable,
    RouterError,
    UnknownModel,
)
from cartridge_router.fleet import Fleet, Replica, ServedModel
from cartridge_router.request import ParsedRequest
from cartridge_router.residency_map import ResidencyMap
from cartridge_router.selection import NO_CARTRIDGES, ModelKey, Selection, model_key
from cartridge_router.settings import PlacementSettings

MAX_KINDS: Final = 10_000
"""Of requests, by model and Cartridges, for which is kept who can take them."""
SOONER: Final = "sooner"
"""Why texts stand in where the Cartridges could be had too."""


MISSES: Final = (IncompatibleCartridge, ContextTooLong, NoEligibleReplica, CartridgeNotServed)
"""Why Cartridges cannot be had; the request may do without them."""


@dataclass(frozen=True)
class StandIn:
    """Texts in the place of Cartridges: how many tokens they are, and whether they are there.

    Those that were not read yet are compared with, and not taken.
    """

    num_tokens: int
    is_ready: bool


@dataclass(frozen=True)
class Instead:
    """What a request does without the Cartridges that it was to have."""

    kind: str
    """`text` or `drop`."""
    why: str
    """A code of an error, or `sooner`."""
    details: str

    @property
    def told(self) -> str:
        """For the client."""
        return f"fallback-{self.kind} ({self.details})"


@dataclass(frozen=True)
class Placement:
    """A decision, and what the client is told of it."""

    demand: Demand
    decision: Decision
    mode: MapMode
    map_age_s: float | None
    is_certified: bool
    has_holder: bool = False
    """One replica has what the request is about: nobody was chosen."""
    instead: Instead | None = None
    """What it does without Cartridges; `None`: it has them, or needs none."""
    comparison: Comparison | None = None
    """With the Cartridges and with their texts, where both could be."""

    @property
    def replica(self) -> ReplicaId:
        """The chosen replica."""
        return self.decision.best.replica

    @property
    def reason(self) -> str:
        """One word on why, and whether the composition is certified."""
        mode = "" if self.mode is MapMode.EXACT else f"; map={self.mode}"
        why = "stored" if self.has_holder else self.decision.reason
        if self.instead is not None:
            why = f"{self.instead.told}; {why}"
        return why + mode + ("" if self.is_certified else "; uncertified")


@dataclass(frozen=True)
class _Steering:
    """How a request wants to be placed."""

    policy: str | None
    session: str | None
    must_ask_all: bool
    holder: ReplicaId | None


class _Hindrance(Exception):
    """Why one replica cannot take a request.

    `error` is the answer if no replica can ever take it; `None` for what passes (a replica that is
    away, or not registered yet).
    """

    def __init__(self, text: str, error: type[RouterError] | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.error = error


@dataclass(frozen=True)
class _Able:
    """Who can take requests of one kind, until something changes."""

    edition: object
    num_replicas: int
    rows: Rows
    hindrances: Mapping[ReplicaId, _Hindrance]
    refusals: Mapping[ReplicaId, str]


class Placer:
    """Places requests with the policy of the settings, or one that a request names."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        residency: ResidencyMap,
        settings: PlacementSettings,
        never_worse: NeverWorse | None = None,
    ) -> None:
        self._fleet = fleet
        self._map = residency
        self._history = RouteHistory()
        self._never_worse = never_worse or NeverWorse(settings.prediction_spread)
        self._tick = 0
        self._policies = {name: policy() for name, policy in POLICIES.items()}
        self._able: dict[Hashable, _Able] = {}
        self.configure(settings)

    def configure(self, settings: PlacementSettings) -> None:
        """Place by other settings from now on."""
        rates = ReplicaRates(
            queue_s_per_request=settings.queue_s_per_request,
            prefill_base_s=settings.prefill_base_s,
            prefill_s_per_token=settings.prefill_s_per_token,
        )
        if rates != self._fleet.rates:
            self._fleet.set_rates(rates)
        self._default = settings.policy
        self._never_worse.queue_share = settings.text_queue_share

    def place(
        self,
        request: ParsedRequest,
        selection: Selection,
        *,
        policy: str | None = None,
        session: str | None = None,
        must_ask_all: bool = False,
        holder: ReplicaId | None = None,
        stand_in: StandIn | None = None,
    ) -> Placement:
        """Choose a replica; with `must_ask_all` also those that are better left alone.

        `stand_in`: texts that may take the place of the Cartridges. They do if they are there, and
        the first token is predicted sooner by them, or the Cartridges cannot be had.

        `policy`: a key of `POLICIES`; `None` = that of the settings. `session`: what requests of
        one conversation share. `holder`: the only one that will do, as it keeps what the request
        is about.

        Raises:
            UnknownModel: no replica serves the model.
            IncompatibleCartridge: no replica of the model has what the Cartridge needs.
            ContextTooLong: the Cartridges fill the context of every replica of the model.
            NoEligibleReplica: none is able now, and one that is away may be.
            AllReplicasSaturated: all that are able are at their limit.
            ResponseUnavailable: the holder is away.
        """
        if holder is not None:
            self._check_present(holder)
        steering = _Steering(policy, session, must_ask_all, holder)
        placement = self._weigh(request, selection, steering, stand_in)
        self._tick += 1
        self._history.record(placement.replica, placement.demand, time.monotonic())
        return placement

    def prefers_text(
        self,
        request: ParsedRequest,
        selection: Selection,
        *,
        policy: str | None,
        session: str | None,
        num_text_tokens: int,
    ) -> bool:
        """Whether `place` would, as things are, take texts of so many tokens."""
        steering = _Steering(policy, session, must_ask_all=False, holder=None)
        try:
            stand_in = StandIn(num_text_tokens, is_ready=True)
            placement = self._weigh(request, selection, steering, stand_in)
        except RouterError:
            return False
        return placement.instead is not None

    def context_limit(self, model: str) -> int | None:
        """Tokens that every replica of a model has room for; `None` where none says."""
        served = (
            replica.models.get(model) for replica in self._fleet.replicas if replica.is_healthy
        )
        limits = (each.max_model_len for each in served if each is not None)
        return min((limit for limit in limits if limit is not None), default=None)

    def _weigh(
        self,
        request: ParsedRequest,
        selection: Selection,
        steering: "_Steering",
        stand_in: StandIn | None,
    ) -> Placement:
        """Decide with the Cartridges and, if they may stand in, with their texts."""
        demand = demand_of(request, selection, steering.session)
        if stand_in is None or not selection.cartridges:
            return self._decide(request, selection, demand, steering)
        missed: RouterError | None = None
        try:
            attached = self._decide(request, selection, demand, steering)
        except (*MISSES, AllReplicasSaturated) as error:
            if not stand_in.is_ready:
                raise
            missed = error
        try:
            other = fallback_demand(demand, stand_in.num_tokens)
            text = self._decide(request, NO_CARTRIDGES, other, steering)
        except RouterError:
            if missed is not None:
                raise missed from None
            return attached
        if missed is not None:
            return replace(text, instead=Instead("text", missed.code, missed.code))
        compared = self._never_worse.compare(attached.decision, text.decision)
        if compared.is_attached or not stand_in.is_ready:
            return replace(attached, comparison=compared)
        details = (
            f"predicted {compared.fallback_s:.3f} s, with Cartridges {compared.attached_s:.3f} s"
        )
        return replace(text, instead=Instead("text", SOONER, details), comparison=compared)

    def _decide(
        self,
        request: ParsedRequest,
        selection: Selection,
        demand: Demand,
        steering: "_Steering",
    ) -> Placement:
        """What the policy says, of replicas that are able."""
        holder = steering.holder
        able = self._find_able(request, selection, holder)
        rows, refusals = able.rows, able.refusals
        if not steering.must_ask_all and holder is None:
            against = self._outliers(able)
            if against:
                refusals = {**refusals, **against}
                names = (self._fleet.loads.name(row) for row in rows.tolist())
                rows = self._fleet.loads.rows(name for name in names if name not in against)
        mode, age_s = self._map.mode, self._map.age_s
        view = ClusterView(
            loads=self._fleet.loads,
            rows=rows,
            residency=self._map,
            history=self._history,
            mode=mode,
            # Both decisions on a request have one tick: else twins would not take turns.
            tick=self._tick,
            now_s=time.monotonic(),
            refusals=refusals,
            max_in_flight=self._fleet.max_in_flight,
        )
        decision = self._policies[steering.policy or self._default].decide(demand, view)
        if isinstance(decision, Refusal):
            raise self._error(request, decision, able)
        return Placement(demand, decision, mode, age_s, selection.is_certified, holder is not None)

    def _check_present(self, holder: ReplicaId) -> None:
        replica = self._fleet.find(holder)
        if replica is None or not replica.is_healthy:
            # It may come back with what it keeps.
            raise ResponseUnavailable(f"the replica that keeps the response, {holder}, is away")

    def _find_able(
        self, request: ParsedRequest, selection: Selection, holder: ReplicaId | None
    ) -> _Able:
        """Who can take requests for this model with these Cartridges: looked up, mostly."""
        edition = (self._fleet.edition, self._map.edition, self._map.mode)
        key = (request.model, selection.composition, holder)
        known = self._able.get(key)
        if known is not None and known.edition == edition:
            return known
        replicas = [each for each in self._fleet.replicas if holder in (None, each.replica)]
        hindrances: dict[ReplicaId, _Hindrance] = {}
        for replica in replicas:
            try:
                self._check(replica, request, selection)
            except _Hindrance as hindrance:
                # What is kept must not hold the frames, and with them the request.
                hindrances[replica.replica] = hindrance.with_traceback(None)
        names = (replica.replica for replica in replicas)
        able = _Able(
            edition=edition,
            num_replicas=len(replicas),
            rows=self._fleet.loads.rows(name for name in names if name not in hindrances),
            hindrances=hindrances,
            refusals={name: hindrance.text for name, hindrance in hindrances.items()},
        )
        if len(able.rows):
            # Clients can name any number of models that nobody serves.
            if len(self._able) >= MAX_KINDS:
                self._able.clear()
            self._able[key] = able
        return able

    def forget(self, replica: ReplicaId) -> None:
        """A replica is gone."""
        self._history.forget(replica)

    def models_of(self, model: str) -> frozenset[ModelKey]:
        """What Cartridges for a model must be made of, by the engines that serve it."""
        registrations = (
            self._map.registration(replica.replica)
            for replica in self._fleet.replicas
            if replica.is_healthy and replica.serves(model)
        )
        return frozenset(model_key(each.engine.model) for each in registrations if each is not None)

    def _outliers(self, able: _Able) -> dict[ReplicaId, str]:
        """Replicas to leave alone, and why, while there are others that are able."""
        against = {
            name: reason
            for name, reason in self._fleet.outliers.reasons().items()
            if name not in able.hindrances
        }
        return against if len(against) < len(able.rows) else {}

    def _check(self, replica: Replica, request: ParsedRequest, selection: Selection) -> None:
        if not replica.serves(request.model):
            raise _Hindrance(f"does not serve {request.model}", UnknownModel)
        if not replica.is_healthy:
            raise _Hindrance("unhealthy")
        if not selection.cartridges:
            return
        served = replica.models.get(request.model)
        if served is not None:
            _check_adapter(request.model, served, selection)
        registration = self._map.registration(replica.replica)
        if registration is None:
            self._check_unregistered(replica)
        else:
            if registration.is_draining:
                raise _Hindrance("is being drained")
            for cartridge in selection.cartridges:
                mismatches = incompatibilities(cartridge.manifest, registration.engine)
                if mismatches:
                    text = f"{cartridge.manifest.alias}: {mismatches[0]}"
                    raise _Hindrance(text, IncompatibleCartridge)
        limit = served.max_model_len if served is not None else None
        if limit is not None and selection.num_tokens + 1 >= limit:
            raise _Hindrance(
                f"the Cartridges have {selection.num_tokens} tokens; the context of "
                f"{request.model} holds {limit}, prompt and answer included",
                ContextTooLong,
            )

    def _check_unregistered(self, replica: Replica) -> None:
        """A replica without a lease: away from the fleet, or there is no map to say so."""
        if self._map.mode is not MapMode.FALLBACK:
            raise _Hindrance("not registered: no lease in the residency map")
        if not replica.has_extension:
            raise _Hindrance("not known to have the Cartridge extension")

    def _error(
        self,
        request: ParsedRequest,
        refusal: Refusal,
        able: _Able,
    ) -> RouterError:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusal.reasons.items())
        if refusal.kind is RefusalKind.SATURATED:
            return AllReplicasSaturated(f"all replicas are busy ({reasons})")
        lasting = [h for h in able.hindrances.values() if h.error is not None]
        if len(lasting) == able.num_replicas:
            for hindrance in lasting:
                if hindrance.error is not None and hindrance.error is not UnknownModel:
                    return hindrance.error(hindrance.text, param=FIELD_CARTRIDGE_IDS)
            if lasting:
                return UnknownModel(f"no replica serves the model {request.model!r}", param="model")
        return NoEligibleReplica(f"no replica can serve this request ({reasons or 'none is set'})")


def demand_of(request: ParsedRequest, selection: Selection, session: str | None) -> Demand:
    """What a request needs of a replica."""
    return Demand(
        model=request.model,
        artifacts=selection.demands,
        num_live_tokens=request.num_live_tokens,
        composition=selection.composition,
        session=session,
    )


def _check_adapter(model: str, served: ServedModel, selection: Selection) -> None:
    """An adapter takes Cartridges of an adapter; of which one, the engine checks by its files."""
    for cartridge in selection.cartridges:
        made_with = cartridge.manifest.model.adapter
        if (made_with is None) is not (served.parent is None):
            needed = "none" if made_with is None else f"{made_with.name} ({made_with.digest})"
            found = "a base model" if served.parent is None else f"an adapter of {served.parent}"
            alias = cartridge.manifest.alias
            raise _Hindrance(
                f"{alias}: model.adapter: artifact has {needed}, {model} is {found}",
                IncompatibleCartridge,
            )
