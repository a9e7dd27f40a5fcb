"""What was sent where: the guess at caches that gateways without a residency map make.

Owns, for each replica, the artifacts of the requests that it was given lately, oldest first.
Refuses to know what became of them; that is the point of comparison.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from cartridge_policies.loads import Floats
from cartridge_policies.types import Demand
from cartridge_proto.residency import ReplicaId

if TYPE_CHECKING:
    from cartridge_proto.digest import Digest

MAX_TOKENS: Final = 8 << 20
"""Of one replica that are remembered: about the 32 MiB of text that vLLM's router keeps."""
MAX_AGE_S: Final = 120.0
"""How long one is remembered without being sent again."""


class RouteHistory:
    """Artifacts by replica, as an approximate prefix index has them."""

    def __init__(self) -> None:
        self._sent: dict[ReplicaId, OrderedDict[Digest, tuple[float, int]]] = {}
        self._num_tokens: dict[ReplicaId, int] = {}

    def record(self, replica: ReplicaId, demand: Demand, now_s: float) -> None:
        """A request goes to a replica."""
        sent = self._sent.setdefault(replica, OrderedDict())
        for artifact in demand.artifacts:
            if artifact.digest in sent:
                del sent[artifact.digest]
            else:
                self._add(replica, artifact.num_tokens)
            sent[artifact.digest] = (now_s, artifact.num_tokens)
        while sent:
            digest, (used_s, num_tokens) = next(iter(sent.items()))
            if now_s - used_s <= MAX_AGE_S and self._num_tokens[replica] <= MAX_TOKENS:
                break
            del sent[digest]
            self._add(replica, -num_tokens)

    def _add(self, replica: ReplicaId, num_tokens: int) -> None:
        self._num_tokens[replica] = self._num_tokens.get(replica, 0) + num_tokens

    def forget(self, replica: ReplicaId) -> None:
        """A replica has left."""
        self._sent.pop(replica, None)
        self._num_tokens.pop(replica, None)

    def matched_tokens(self, demand: Demand, replicas: Iterable[ReplicaId], now_s: float) -> Floats:
        """Tokens of the longest prefix that each replica was given lately."""
        return np.array([self._matched(demand, replica, now_s) for replica in replicas], float)

    def _matched(self, demand: Demand, replica: ReplicaId, now_s: float) -> int:
        matched = 0
        sent = self._sent.get(replica)
        if sent is None:
            return matched
        for artifact in demand.artifacts:
            used = sent.get(artifact.digest)
            if used is None or now_s - used[0] > MAX_AGE_S:
                break
            matched += artifact.num_tokens
        return matched

    def num_tokens(self, replicas: Iterable[ReplicaId]) -> Floats:
        """Tokens that are remembered of each replica: the size of its tree."""
        return np.array([self._num_tokens.get(replica, 0) for replica in replicas], float)
