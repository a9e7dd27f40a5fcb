"""Eviction policies: the contract of all, and what each one values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_engine_ext.eviction import (
    EVICTION_POLICIES,
    MAX_EXPECTED,
    MAX_TIMES,
    GreedyDualSizeFrequency,
    LeastRecentlyUsed,
    NextAccess,
)
from cartridge_proto.digest import sha256_digest
from tests.contracts.eviction_policy import DIGESTS, EvictionPolicyContract, order

MIB = 1 << 20
ONE, TWO, THREE = DIGESTS[:3]


@pytest.mark.parametrize("make", EVICTION_POLICIES.values(), ids=list(EVICTION_POLICIES))
class TestEvictionPolicies(EvictionPolicyContract):
    """The suite, run over all of `EVICTION_POLICIES`."""


def test_least_recently_used_goes_by_the_last_use_alone() -> None:
    """Sizes, counts and hints change nothing."""
    policy = LeastRecentlyUsed()
    for digest, size_bytes in ((TWO, MIB), (TWO, MIB), (ONE, 100 * MIB), (THREE, MIB)):
        policy.touch(digest, size_bytes)
    policy.expect(TWO, 1.0)
    assert order(policy, [ONE, TWO, THREE]) == [TWO, ONE, THREE]
    assert policy.admits(sha256_digest(b"new"), MIB, [ONE, TWO, THREE], 0.0)


def test_gdsf_keeps_what_is_small_and_what_is_used_often() -> None:
    """Per byte a large artifact is cheaper to load again; three uses outweigh recency."""
    policy = GreedyDualSizeFrequency()
    for _ in range(3):
        policy.touch(ONE, 16 * MIB)
    policy.touch(TWO, MIB)
    policy.touch(THREE, 16 * MIB)
    assert order(policy, [ONE, TWO, THREE]) == [THREE, ONE, TWO]


def test_gdsf_lets_old_value_age() -> None:
    """Each eviction raises the floor, so that what was used often long ago leaves at last."""
    policy = GreedyDualSizeFrequency()
    for _ in range(5):
        policy.touch(ONE, MIB)
    newcomers = [sha256_digest(b"newcomer %d" % number) for number in range(10)]
    for newcomer in newcomers:
        policy.touch(newcomer, MIB)
        if order(policy, [ONE, newcomer])[0] == ONE:
            break
        policy.forget(newcomer, is_evicted=True)
    else:
        raise AssertionError("five old uses were never outlived")


def test_gdsf_does_not_trade_value_for_a_one_off() -> None:
    """A prefetch is worth one use: it takes room from what was used once, not from more."""
    policy = GreedyDualSizeFrequency()
    policy.touch(ONE, MIB)
    policy.touch(TWO, MIB)
    policy.touch(TWO, MIB)
    assert policy.admits(THREE, MIB, [ONE], 0.0)
    assert not policy.admits(THREE, MIB, [ONE, TWO], 0.0)


def test_next_access_takes_the_latest_first_after_those_without_a_hint() -> None:
    """Unknown counts as later than all that is known, by last use; then the latest hint."""
    policy = NextAccess()
    unknown = DIGESTS[3:5]
    for digest in (ONE, TWO, THREE, *unknown):
        policy.touch(digest, MIB)
    policy.expect(ONE, 10.0)
    policy.expect(TWO, 30.0)
    policy.expect(THREE, 20.0)
    resident = [ONE, TWO, THREE, *unknown]
    assert order(policy, resident) == [*unknown, TWO, THREE, ONE]
    assert order(policy, resident, now_s=15.0) == [ONE, *unknown, TWO, THREE]


def test_next_access_admits_what_is_expected_before_its_victims() -> None:
    """Nothing that is expected leaves for a prefetch that is expected later, or not at all."""
    policy = NextAccess()
    policy.touch(ONE, MIB)
    policy.touch(TWO, MIB)
    policy.expect(TWO, 20.0)
    assert policy.admits(THREE, MIB, [ONE], 0.0)
    assert not policy.admits(THREE, MIB, [ONE, TWO], 0.0)
    policy.expect(THREE, 30.0)
    assert not policy.admits(THREE, MIB, [TWO], 0.0)
    policy.expect(THREE, 10.0)
    assert policy.admits(THREE, MIB, [TWO], 0.0)


@given(times=st.lists(st.floats(0, 1000), max_size=3 * MAX_TIMES))
def test_hints_are_bounded_and_the_earliest_are_kept(times: list[float]) -> None:
    """Of more hints than are kept the earliest count; each passes with its time."""
    policy = NextAccess()
    policy.touch(ONE, MIB)
    for at_s in times:
        policy.expect(ONE, at_s)
    kept = sorted(times)[:MAX_TIMES]
    for now_s in kept:
        assert policy.rank(ONE, now_s)[:2] == (1.0, -now_s)
    assert policy.rank(ONE, 1001.0)[0] == 0.0


def test_hints_for_many_artifacts_are_bounded() -> None:
    """The artifact whose hints are oldest loses them."""
    policy = NextAccess()
    for number in range(MAX_EXPECTED + 1):
        policy.expect(sha256_digest(b"%d" % number), 10.0)
    assert policy.rank(sha256_digest(b"0"), 0.0)[0] == 0.0
    assert policy.rank(sha256_digest(b"1"), 0.0)[0] == 1.0
