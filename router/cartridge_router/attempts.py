"""The replicas of one request, one after the other, as long as another one may be tried.

Owns why the ones before did not answer. Refuses to go on without the retry budget's leave, and to
carry back-pressure through the whole fleet: after one replica that pushed back one more is asked.
"""

from collections.abc import Iterator, Sequence

from cartridge_proto.residency import ReplicaId
from cartridge_router.retry_budget import RetryBudget


class Attempts:
    """Iterates over replicas; each but the first comes after a `go_on` that said yes.

    Or after `pass_over` or `ask_next`.
    """

    def __init__(self, replicas: Sequence[ReplicaId], budget: RetryBudget) -> None:
        self.failures: list[str] = []
        self.has_unheard = False
        """Some replica has not said whether it has what is asked for."""
        self._replicas = replicas
        self._budget = budget
        self._has_been_pushed_back = False

    def __iter__(self) -> Iterator[ReplicaId]:
        return iter(self._replicas)

    def go_on(self, failure: str, *, is_push_back: bool = False) -> bool:
        """Note why the present replica does not answer; whether the next one may be asked."""
        self.failures.append(failure)
        self.has_unheard = True
        if len(self.failures) >= len(self._replicas):
            return False
        if is_push_back:
            if self._has_been_pushed_back:
                return False
            self._has_been_pushed_back = True
        return self._budget.take()

    def ask_next(self, answer: str) -> bool:
        """Note that the present replica has not what is asked for; the next one costs nothing."""
        self.failures.append(answer)
        return len(self.failures) < len(self._replicas)

    def pass_over(self, failure: str) -> None:
        """Note why the present replica is not asked at all; the next one costs nothing."""
        self.has_unheard = True
        self.failures.append(failure)
