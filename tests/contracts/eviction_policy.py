"""What every eviction policy keeps, whatever it values.

Owns the behaviour suite of the interface `EvictionPolicy`. Refuses to know any policy: a test
module runs the suite over those it has.
"""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from cartridge_engine_ext.eviction import EvictionPolicy
from cartridge_proto.digest import Digest, sha256_digest

DIGESTS = [sha256_digest(bytes([number])) for number in range(6)]
SIZES = {digest: (number + 1) << 20 for number, digest in enumerate(DIGESTS)}

digests = st.sampled_from(DIGESTS)
events = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), digests, st.just(0.0)),
        st.tuples(st.just("forget"), digests, st.just(0.0)),
        st.tuples(st.just("evict"), digests, st.just(0.0)),
        st.tuples(st.just("expect"), digests, st.floats(0, 100)),
    ),
    max_size=60,
)


def replay(policy: EvictionPolicy, history: list[tuple[str, Digest, float]]) -> list[Digest]:
    """Tell a policy what happened; returns what is in the tier at the end."""
    resident: dict[Digest, None] = {}
    for event, digest, at_s in history:
        if event == "touch":
            resident[digest] = None
            policy.touch(digest, SIZES[digest])
        elif event == "expect":
            policy.expect(digest, at_s)
        elif digest in resident:
            del resident[digest]
            policy.forget(digest, is_evicted=event == "evict")
    return list(resident)


def order(policy: EvictionPolicy, resident: list[Digest], now_s: float = 0.0) -> list[Digest]:
    """What leaves first, first."""
    return sorted(resident, key=lambda digest: policy.rank(digest, now_s))


class EvictionPolicyContract:
    """Subclass and parametrise `make`, which makes a fresh policy."""

    @given(history=events, now_s=st.floats(0, 100))
    def test_every_resident_has_a_rank_of_its_own(
        self,
        make: Callable[[], EvictionPolicy],
        history: list[tuple[str, Digest, float]],
        now_s: float,
    ) -> None:
        """After any history the order of what is in the tier has no ties."""
        policy = make()
        ranks = [policy.rank(digest, now_s) for digest in replay(policy, history)]
        assert len(set(ranks)) == len(ranks)

    @given(history=events, now_s=st.floats(0, 100))
    def test_equal_histories_give_equal_orders(
        self,
        make: Callable[[], EvictionPolicy],
        history: list[tuple[str, Digest, float]],
        now_s: float,
    ) -> None:
        """No clock and no randomness inside; asking changes no answer."""
        one, two = make(), make()
        resident = replay(one, history)
        replay(two, history)
        assert order(one, resident, now_s) == order(two, resident, now_s)
        assert order(one, resident, now_s) == order(two, resident, now_s)

    @given(history=events, digest=digests)
    def test_a_use_never_lowers_a_rank(
        self,
        make: Callable[[], EvictionPolicy],
        history: list[tuple[str, Digest, float]],
        digest: Digest,
    ) -> None:
        """What was just used leaves no earlier than it would have."""
        policy = make()
        resident = replay(policy, history)
        if digest not in resident:
            return
        before = order(policy, resident).index(digest)
        policy.touch(digest, SIZES[digest])
        assert order(policy, resident).index(digest) >= before

    @given(history=events, digest=digests)
    def test_room_without_victims_is_always_worth_it(
        self,
        make: Callable[[], EvictionPolicy],
        history: list[tuple[str, Digest, float]],
        digest: Digest,
    ) -> None:
        """A prefetch into free room is admitted."""
        policy = make()
        replay(policy, history)
        assert policy.admits(digest, SIZES[digest], [], 0.0)

    @given(history=events)
    def test_what_left_is_not_remembered_as_used(
        self,
        make: Callable[[], EvictionPolicy],
        history: list[tuple[str, Digest, float]],
    ) -> None:
        """Of equal size and without hints, what came back once is not above what was used since."""
        policy = make()
        history = [event for event in history if event[0] != "expect"]
        for digest in replay(policy, history):
            policy.forget(digest, is_evicted=False)
        first, second = DIGESTS[:2]
        policy.touch(first, 1 << 20)
        policy.touch(second, 1 << 20)
        policy.touch(second, 1 << 20)
        assert order(policy, [first, second]) == [first, second]
