"""Which replica a request goes to: builds the view, asks the policy, says why.

Owns the translation of fleet, map and selection into a policy's view. Refuses weights, thresholds
and retries of its own.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from cartridge_policies import POLICIES
from cartridge_policies.cost import CostPriors
from cartridge_policies.types import (
    ArtifactDemand,
    ClusterView,
    Decision,
    Demand,
    MapMode,
    Refusal,
    RefusalKind,
    ReplicaView,
)
from cartridge_proto.compatibility import incompatibilities
from cartridge_proto.digest import Digest
from cartridge_proto.names import FIELD_CARTRIDGE_IDS
from cartridge_proto.residency import TIERS_FASTEST_FIRST, ReplicaId, Tier
from cartridge_router.errors import (
    AllReplicasSaturated,
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
from cartridge_router.selection import Selection
from cartridge_router.settings import PlacementSettings


@dataclass(frozen=True)
class Placement:
    """A decision, and what the client is told of it."""

    decision: Decision
    mode: MapMode
    map_age_s: float | None
    is_certified: bool
    has_holder: bool = False
    """One replica has what the request is about: nobody was chosen."""

    @property
    def replica(self) -> ReplicaId:
        """The chosen replica."""
        return self.decision.best.replica

    @property
    def tiers(self) -> dict[ReplicaId, Tier]:
        """Slowest tier that each candidate reads a Cartridge from; empty without any."""
        return {
            candidate.replica: max(candidate.tiers, key=TIERS_FASTEST_FIRST.index)
            for candidate in self.decision.ranking
            if candidate.tiers
        }

    @property
    def reason(self) -> str:
        """One word on why, and whether the composition is certified."""
        mode = "" if self.mode is MapMode.EXACT else f"; map={self.mode}"
        why = "stored" if self.has_holder else self.decision.reason
        return why + mode + ("" if self.is_certified else "; uncertified")


class _Hindrance(Exception):
    """Why one replica cannot take a request.

    `error` is the answer if no replica can ever take it; `None` for what passes (a replica that is
    away, or not registered yet).
    """

    def __init__(self, text: str, error: type[RouterError] | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.error = error


class Placer:
    """Places requests with the policy of the settings, or one that a request names."""

    def __init__(
        self, *, fleet: Fleet, residency: ResidencyMap, settings: PlacementSettings
    ) -> None:
        self._fleet = fleet
        self._map = residency
        self._ticks = itertools.count()
        self.configure(settings)

    def configure(self, settings: PlacementSettings) -> None:
        """Place by other settings from now on."""
        priors = CostPriors(
            queue_s_per_request=settings.queue_s_per_request,
            prefill_base_s=settings.prefill_base_s,
            prefill_s_per_token=settings.prefill_s_per_token,
        )
        self._default = settings.policy
        self._policies = {name: policy(priors) for name, policy in POLICIES.items()}

    def place(
        self,
        request: ParsedRequest,
        selection: Selection,
        *,
        policy: str | None = None,
        must_ask_all: bool = False,
        holder: ReplicaId | None = None,
    ) -> Placement:
        """Choose a replica; with `must_ask_all` also those that are better left alone.

        `policy`: a key of `POLICIES`; `None` = that of the settings. `holder`: the only one that
        will do, as it keeps what the request is about.

        Raises:
            UnknownModel: no replica serves the model.
            IncompatibleCartridge: no replica of the model has what the Cartridge needs.
            ContextTooLong: the Cartridges fill the context of every replica of the model.
            NoEligibleReplica: none is able now, and one that is away may be.
            AllReplicasSaturated: all that are able are at their limit.
            ResponseUnavailable: the holder is away.
        """
        replicas = self._fleet.replicas if holder is None else [self._present(holder)]
        hindrances: dict[ReplicaId, _Hindrance] = {}
        for replica in replicas:
            try:
                self._check(replica, request, selection)
            except _Hindrance as hindrance:
                hindrances[replica.replica] = hindrance
        refusals = {name: hindrance.text for name, hindrance in hindrances.items()}
        if not must_ask_all and holder is None:
            refusals |= self._outliers(refusals)
        views = [
            self._view(replica, selection, refusals.get(replica.replica)) for replica in replicas
        ]
        demand = Demand(
            model=request.model,
            artifacts=tuple(
                ArtifactDemand(c.digest, c.manifest.payload_bytes, c.manifest.num_tokens)
                for c in selection.cartridges
            ),
            num_live_tokens=request.num_live_tokens,
        )
        mode, age_s = self._map.mode, self._map.age_s
        view = ClusterView(tuple(views), mode, next(self._ticks))
        decision = self._policies[policy or self._default].decide(demand, view)
        if isinstance(decision, Refusal):
            raise self._error(request, decision, hindrances, len(replicas))
        return Placement(decision, mode, age_s, selection.is_certified, holder is not None)

    def _present(self, holder: ReplicaId) -> Replica:
        replica = self._fleet.find(holder)
        if replica is None or not replica.is_healthy:
            # It may come back with what it keeps.
            raise ResponseUnavailable(f"the replica that keeps the response, {holder}, is away")
        return replica

    def _outliers(self, refusals: Mapping[ReplicaId, str]) -> dict[ReplicaId, str]:
        """Replicas to leave alone, and why, while there are others that are able."""
        able = [r.replica for r in self._fleet.replicas if r.replica not in refusals]
        found = {name: self._fleet.outliers.reason_against(name) for name in able}
        against = {name: reason for name, reason in found.items() if reason is not None}
        return against if len(against) < len(able) else {}

    def _view(self, replica: Replica, selection: Selection, refusal: str | None) -> ReplicaView:
        return ReplicaView(
            replica=replica.replica,
            num_in_flight=replica.num_in_flight,
            max_in_flight=self._fleet.max_in_flight,
            tiers=self._tiers(replica.replica, selection),
            refusal=refusal,
        )

    def _tiers(self, replica: ReplicaId, selection: Selection) -> dict[Digest, Tier]:
        """Where each Cartridge is; all in HBM where the whole prefix is."""
        digests = [cartridge.digest for cartridge in selection.cartridges]
        composition = selection.composition
        if composition is not None and self._map.tiers(replica, [composition]):
            return dict.fromkeys(digests, Tier.HBM)
        return self._map.tiers(replica, digests)

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
        hindrances: Mapping[ReplicaId, _Hindrance],
        num_replicas: int,
    ) -> RouterError:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusal.reasons.items())
        if refusal.kind is RefusalKind.SATURATED:
            return AllReplicasSaturated(f"all replicas are busy ({reasons})")
        lasting = [h for h in hindrances.values() if h.error is not None]
        if len(lasting) == num_replicas:
            for hindrance in lasting:
                if hindrance.error is not None and hindrance.error is not UnknownModel:
                    return hindrance.error(hindrance.text, param=FIELD_CARTRIDGE_IDS)
            if lasting:
                return UnknownModel(f"no replica serves the model {request.model!r}", param="model")
        return NoEligibleReplica(f"no replica can serve this request ({reasons or 'none is set'})")


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
