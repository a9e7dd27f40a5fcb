"""The pool itself: the loaders' line, pins, prefetches, sources, and any order of operations."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from cartridge_engine_ext.dram_pool import MAX_OWNERS, MAX_PREFETCHES, DramPool
from cartridge_engine_ext.dram_tier import Artifact, ArtifactReader, DramTier
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.eviction import (
    EVICTION_POLICIES,
    EvictionPolicy,
    EvictionPolicyName,
    GreedyDualSizeFrequency,
    NextAccess,
)
from cartridge_engine_ext.folder_locks import DeadlinePassed
from cartridge_engine_ext.sealed_memory import SealedMemory
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.residency import FailureReason, Tier
from cartridge_proto.stores import LocalStore, StoreUnavailable
from tests.engine_ext.pool_machine import PoolMachine, indexes
from tests.engine_ext.stored_artifacts import (
    WAIT_S,
    ObservedStore,
    blob_path,
    flip_bit,
    put_sample,
)
from tests.engine_ext.waiting import until
from tests.proto.sample_artifact import sample_artifact

MANIFEST, BLOB = sample_artifact()
SIZE = len(BLOB)


def long_deadline() -> float:
    """A load deadline that no passing test reaches."""
    return time.monotonic() + WAIT_S


@contextmanager
def pool_over(
    source: ArtifactReader,
    *,
    capacity_bytes: int = 1 << 20,
    num_loaders: int = 1,
    pinned_bytes: int | None = None,
    policy: EvictionPolicy | None = None,
    on_evict: Callable[[Digest], None] = lambda digest: None,
    on_pin: Callable[[Digest, bool], None] = lambda digest, is_pinned: None,
    on_shortage: Callable[[], None] = lambda: None,
) -> Iterator[DramPool]:
    """A pool that is checked and closed at the end."""
    pool = DramPool(
        source=source,
        capacity_bytes=capacity_bytes,
        num_loaders=num_loaders,
        pinned_bytes=pinned_bytes,
        policy=policy,
        on_evict=on_evict,
        on_pin=on_pin,
        on_shortage=on_shortage,
    )
    try:
        yield pool
        pool.check_invariants()
    finally:
        pool.close()


def use(pool: DramTier, digest: Digest) -> Artifact:
    """Acquire, wait and release."""
    hold(pool, digest)
    pool.release(digest)
    return next(artifact for artifact, _ in pool.residents() if artifact.digest == digest)


def hold(pool: DramTier, digest: Digest) -> Artifact:
    """Acquire and wait."""
    pool.acquire(digest, long_deadline())
    return pool.wait(digest, WAIT_S)[0]


def refusal_of(action: Callable[[], object]) -> Refusal:
    """The refusal that an action must raise."""
    with pytest.raises(Refusal) as caught:
        action()
    return caught.value


def is_ready(pool: DramTier, digest: Digest) -> bool:
    """Whether an artifact is there."""
    holding = pool.holding(digest)
    return holding is not None and holding.is_ready


def is_at_rest(pool: DramPool, digest: Digest) -> bool:
    """Whether an artifact's load, if there was one, has come to its end."""
    entry = pool._entries.get(digest)
    return entry is None or entry.done.is_set()


def put_samples(store: LocalStore, count: int) -> list[Digest]:
    """Samples of equal size."""
    return [put_sample(store, seed=seed)[0] for seed in range(1, count + 1)]


# --- the loaders' line ---------------------------------------------------------------------------
def test_loads_that_wait_for_room_hold_no_loader(tmp_path: Path) -> None:
    """With one loader and two loads waiting for room, a small artifact still loads."""
    store = LocalStore(tmp_path)
    held, *large = put_samples(store, 3)
    small, manifest = put_sample(store, num_tokens=1)
    capacity_bytes = SIZE + manifest.payload_bytes
    with pool_over(store, capacity_bytes=capacity_bytes) as pool:
        hold(pool, held)
        for digest in large:
            pool.acquire(digest, long_deadline())
        assert hold(pool, small).digest == small
        assert [pool.poll(digest) for digest in large] == [None, None]
        pool.release(held)
        assert pool.wait(large[0], WAIT_S)[0].digest == large[0]


def test_requests_go_before_prefetches_and_those_by_priority(tmp_path: Path) -> None:
    """Of what is queued the highest priority loads first, then what came first."""
    store = ObservedStore(tmp_path)
    first, low, high, request, later = put_samples(store, 5)
    order = []
    store.gate.clear()
    with pool_over(store) as pool:
        pool._on_ready = lambda digest, _: order.append(digest)
        pool.acquire(first, long_deadline())
        assert store.reading.acquire(timeout=WAIT_S)
        pool.prefetch(low, long_deadline(), 1)
        pool.prefetch(high, long_deadline(), 7)
        pool.acquire(request, long_deadline())
        pool.acquire(later, long_deadline())
        store.gate.set()
        until(lambda: is_ready(pool, low))
        assert order == [first, request, later, high, low]


def test_a_prefetch_takes_no_room_that_a_request_waits_for(tmp_path: Path) -> None:
    """Free room that is too small for a waiting request is not given to what may come later."""
    store = LocalStore(tmp_path)
    held, wanted = put_samples(store, 2)
    small, manifest = put_sample(store, num_tokens=1)
    shortages = threading.Semaphore(0)
    capacity_bytes = SIZE + manifest.payload_bytes
    with pool_over(store, capacity_bytes=capacity_bytes, on_shortage=shortages.release) as pool:
        hold(pool, held)
        pool.acquire(wanted, long_deadline())
        assert shortages.acquire(timeout=WAIT_S)
        pool.prefetch(small, long_deadline(), 5)
        assert shortages.acquire(timeout=WAIT_S)
        assert not is_ready(pool, small)
        pool.release(held)
        pool.wait(wanted, WAIT_S)
        until(lambda: is_ready(pool, small))


def test_a_shared_load_has_the_latest_deadline_of_all_who_want_it(tmp_path: Path) -> None:
    """A wait for room that one user would have given up goes on for the other."""
    store = LocalStore(tmp_path)
    held, wanted = put_samples(store, 2)
    with pool_over(store, capacity_bytes=SIZE) as pool:
        hold(pool, held)
        pool.acquire(wanted, long_deadline())
        pool.acquire(wanted, time.monotonic())
        pool.release(wanted)
        assert pool.poll(wanted) is None
        pool.release(held)
        assert pool.wait(wanted, WAIT_S)[0].digest == wanted


def test_a_shared_load_that_was_a_prefetch_becomes_a_requests(tmp_path: Path) -> None:
    """A request for what is queued as a prefetch moves it to the front."""
    store = ObservedStore(tmp_path)
    first, other, shared = put_samples(store, 3)
    order = []
    store.gate.clear()
    with pool_over(store) as pool:
        pool._on_ready = lambda digest, _: order.append(digest)
        pool.acquire(first, long_deadline())
        assert store.reading.acquire(timeout=WAIT_S)
        pool.prefetch(other, long_deadline(), 100)
        pool.prefetch(shared, long_deadline(), 1)
        pool.acquire(shared, long_deadline())
        store.gate.set()
        until(lambda: is_ready(pool, other))
        assert order == [first, shared, other]


def test_a_load_that_nobody_wants_any_more_is_dropped(tmp_path: Path) -> None:
    """What has not begun when its last user leaves is never read; the others go on."""
    store = ObservedStore(tmp_path)
    first, dropped, kept = put_samples(store, 3)
    store.gate.clear()
    with pool_over(store) as pool:
        pool.acquire(first, long_deadline())
        assert store.reading.acquire(timeout=WAIT_S)
        pool.acquire(dropped, long_deadline())
        pool.acquire(kept, long_deadline())
        pool.release(dropped)
        assert pool.holding(dropped) is None
        store.gate.set()
        pool.wait(kept, WAIT_S)
        assert store.reads.total() == 2


def test_a_wait_for_room_ends_with_its_last_user(tmp_path: Path) -> None:
    """A load that waits for room leaves the line when nobody wants it."""
    store = LocalStore(tmp_path)
    held, wanted = put_samples(store, 2)
    with pool_over(store, capacity_bytes=SIZE) as pool:
        hold(pool, held)
        pool.acquire(wanted, long_deadline())
        until(lambda: pool.shortage()[0] > 0)
        pool.release(wanted)
        assert pool.holding(wanted) is None
        assert pool.shortage() == (0, [])


def test_a_prefetch_is_given_up_at_its_deadline(tmp_path: Path) -> None:
    """A prefetch that finds no room in its time is forgotten."""
    store = LocalStore(tmp_path)
    held, wanted = put_samples(store, 2)
    with pool_over(store, capacity_bytes=SIZE) as pool:
        hold(pool, held)
        pool.prefetch(wanted, time.monotonic() + 0.05)
        assert pool.holding(wanted) is not None
        until(lambda: pool.holding(wanted) is None)
        assert is_ready(pool, held)
        assert pool.used_bytes == SIZE


def test_prefetches_under_way_are_bounded(tmp_path: Path) -> None:
    """One more than the limit is refused with the limit, and requests still come in."""
    store = ObservedStore(tmp_path)
    digest = put_samples(store, 1)[0]
    store.gate.clear()
    with pool_over(store) as pool:
        pool.prefetch(digest, long_deadline())
        assert store.reading.acquire(timeout=WAIT_S)
        for number in range(MAX_PREFETCHES - 1):
            pool.prefetch(sha256_digest(b"%d" % number), long_deadline())
        refusal = refusal_of(lambda: pool.prefetch(sha256_digest(b"more"), long_deadline()))
        assert refusal.reason is FailureReason.CAPACITY
        assert str(MAX_PREFETCHES) in refusal.detail
        assert pool.acquire(digest, long_deadline()) is False
        store.gate.set()
        pool.wait(digest, WAIT_S)


def test_the_shortage_names_what_could_be_given_back(tmp_path: Path) -> None:
    """Missing bytes of the first load in line, and what is used but not pinned, coldest first."""
    store = LocalStore(tmp_path)
    one, two, pinned, wanted = put_samples(store, 4)
    with pool_over(store, capacity_bytes=3 * SIZE) as pool:
        for digest in (two, one, pinned):
            hold(pool, digest)
        pool.pin(pinned, "operator", WAIT_S)
        assert pool.shortage() == (0, [])
        pool.acquire(wanted, long_deadline())
        until(lambda: pool.shortage()[0] == SIZE)
        assert [holding.digest for holding in pool.shortage()[1]] == [two, one]
        pool.release(one)
        pool.wait(wanted, WAIT_S)


# --- pins ----------------------------------------------------------------------------------------
def test_a_pinned_artifact_outlives_every_eviction(tmp_path: Path) -> None:
    """Neither room for others nor `evict` takes it, until the owner unpins it."""
    store = LocalStore(tmp_path)
    pinned, *others = put_samples(store, 4)
    with pool_over(store, capacity_bytes=2 * SIZE) as pool:
        assert pool.pin(pinned, "operator", WAIT_S)[0].digest == pinned
        for digest in others:
            use(pool, digest)
        assert is_ready(pool, pinned)
        assert pool.evict(pinned) == "pinned by operator"
        assert pool.unpin(pinned, "operator")
        assert pool.evict(pinned) is None


def test_a_pin_belongs_to_its_owner(tmp_path: Path) -> None:
    """Another owner's unpin changes nothing; pinning twice is pinning once; the last one counts."""
    digest = put_samples(store := LocalStore(tmp_path), 1)[0]
    changes: list[tuple[Digest, bool]] = []
    with pool_over(store, on_pin=lambda *row: changes.append(row)) as pool:
        for owner in ("one", "one", "two"):
            pool.pin(digest, owner, WAIT_S)
        holding = pool.holding(digest)
        assert holding is not None
        assert holding.pinned_by == ("one", "two")
        assert not pool.unpin(digest, "three")
        assert pool.unpin(digest, "one")
        assert not pool.unpin(digest, "one")
        assert changes == [(digest, True)]
        assert pool.unpin(digest, "two")
        assert changes == [(digest, True), (digest, False)]
        assert not pool.unpin(sha256_digest(b"absent"), "two")


def test_pins_have_a_budget(tmp_path: Path) -> None:
    """What would pass it is refused with the numbers, stays loaded, and can be evicted."""
    one, two = put_samples(store := LocalStore(tmp_path), 2)
    with pool_over(store, pinned_bytes=2 * SIZE - 1) as pool:
        pool.pin(one, "operator", WAIT_S)
        refusal = refusal_of(lambda: pool.pin(two, "operator", WAIT_S))
        assert refusal.reason is FailureReason.CAPACITY
        assert f"the limit of {2 * SIZE - 1}" in refusal.detail
        assert pool.evict(two) is None
        pool.pin(one, "another", WAIT_S)


def test_half_of_the_tier_may_be_pinned_by_default(tmp_path: Path) -> None:
    """Unless it is set, the budget of pins is half of the capacity."""
    with pool_over(LocalStore(tmp_path), capacity_bytes=101) as pool:
        assert pool.pinned_bytes == 50


def test_owners_of_one_artifact_are_bounded(tmp_path: Path) -> None:
    """One owner more than the limit is refused."""
    digest = put_samples(store := LocalStore(tmp_path), 1)[0]
    with pool_over(store) as pool:
        for number in range(MAX_OWNERS):
            pool.pin(digest, f"owner-{number}", WAIT_S)
        refusal = refusal_of(lambda: pool.pin(digest, "one more", WAIT_S))
        assert (refusal.reason, str(MAX_OWNERS) in refusal.detail) == (FailureReason.CAPACITY, True)


def test_what_cannot_be_loaded_cannot_be_pinned(tmp_path: Path) -> None:
    """The refusal is the load's, and nothing stays behind."""
    with pool_over(LocalStore(tmp_path)) as pool:
        refusal = refusal_of(lambda: pool.pin(sha256_digest(b"absent"), "operator", WAIT_S))
        assert refusal.reason is FailureReason.UNKNOWN_ARTIFACT
        assert pool.holdings() == []


# --- policies ------------------------------------------------------------------------------------
def test_a_poor_prefetch_takes_no_room_by_value(tmp_path: Path) -> None:
    """Priority 0 is refused room of what is worth more; a higher priority takes it."""
    often, once = put_samples(store := LocalStore(tmp_path), 2)
    with pool_over(store, capacity_bytes=SIZE, policy=GreedyDualSizeFrequency()) as pool:
        for _ in range(3):
            use(pool, often)
        pool.acquire(once, long_deadline(), 0)
        refusal = refusal_of(lambda: pool.wait(once, WAIT_S))
        pool.release(once)
        assert refusal.reason is FailureReason.CAPACITY
        assert "priority: 0" in refusal.detail
        pool.prefetch(once, long_deadline(), 1)
        until(lambda: is_ready(pool, once))
        assert not is_ready(pool, often)


def test_hints_reach_the_policy(tmp_path: Path) -> None:
    """What is expected soon stays, though it was used longest ago."""
    soon, other, new = put_samples(store := LocalStore(tmp_path), 3)
    with pool_over(store, capacity_bytes=2 * SIZE, policy=NextAccess()) as pool:
        use(pool, soon)
        use(pool, other)
        pool.expect(soon, time.monotonic() + WAIT_S)
        use(pool, new)
        assert is_ready(pool, soon)
        assert not is_ready(pool, other)


# --- sources -------------------------------------------------------------------------------------
class NearSource(LocalStore):
    """A store that finds some artifacts near, and notes what it was asked to bring."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.near: set[Digest] = set()
        self.fetched: list[Digest] = []
        self.error: Exception | None = None

    def fetch(self, digest: Digest, deadline_s: float) -> Tier:
        """Say where it was."""
        self.fetched.append(digest)
        if self.error is not None:
            raise self.error
        return Tier.NVME if digest in self.near else Tier.REMOTE


def test_an_artifact_knows_where_its_bytes_came_from(tmp_path: Path) -> None:
    """The source says for each load whether it was near; a plain store is remote."""
    near, far = put_samples(source := NearSource(tmp_path), 2)
    source.near.add(near)
    with pool_over(source) as pool:
        assert (use(pool, near).loaded_from, use(pool, far).loaded_from) == (Tier.NVME, Tier.REMOTE)
        assert source.fetched == [near, far]
    with pool_over(LocalStore(tmp_path)) as pool:
        assert use(pool, near).loaded_from is Tier.REMOTE


def test_a_source_that_is_past_the_deadline_says_so(tmp_path: Path) -> None:
    """What did not come in time is no fault of the store."""
    digest = put_samples(source := NearSource(tmp_path), 1)[0]
    source.error = DeadlinePassed("another process is fetching")
    with pool_over(source) as pool:
        refusal = refusal_of(lambda: hold(pool, digest))
        pool.release(digest)
        assert refusal.reason is FailureReason.DEADLINE


def test_a_store_that_is_away_is_not_a_corrupt_one(tmp_path: Path) -> None:
    """The load fails as not ready, with the store's words, and is tried again."""
    digest = put_samples(source := NearSource(tmp_path), 1)[0]
    source.error = StoreUnavailable("connection refused")
    with pool_over(source) as pool:
        refusal = refusal_of(lambda: hold(pool, digest))
        pool.release(digest)
        assert refusal.reason is FailureReason.NOT_READY
        assert "connection refused" in refusal.detail
        source.error = None
        assert use(pool, digest).digest == digest


# --- adopting ------------------------------------------------------------------------------------
def adoptable(name: bytes) -> Artifact:
    """An artifact that no store has."""

    def fill(buffer: memoryview) -> None:
        buffer[:] = BLOB

    return Artifact(sha256_digest(name), MANIFEST, {sha256_digest(BLOB): SealedMemory(SIZE, fill)})


def test_adopted_bytes_count(tmp_path: Path) -> None:
    """Adopting evicts what is idle, and is refused, its memory closed, when all is in use."""
    digest = put_samples(store := LocalStore(tmp_path), 1)[0]
    gone: list[Digest] = []
    with pool_over(store, capacity_bytes=SIZE, on_evict=gone.append) as pool:
        use(pool, digest)
        adopted = adoptable(b"one")
        pool.adopt(adopted)
        assert (gone, pool.used_bytes) == ([digest], SIZE)
        pool.acquire(adopted.digest, long_deadline())
        other = adoptable(b"two")
        assert refusal_of(lambda: pool.adopt(other)).reason is FailureReason.CAPACITY
        assert all(memory.is_closed for memory in other.memories.values())


def test_what_is_here_is_not_adopted_twice(tmp_path: Path) -> None:
    """The first one stays, and the memory of the second is closed."""
    with pool_over(LocalStore(tmp_path)) as pool:
        first, second = adoptable(b"one"), adoptable(b"one")
        pool.adopt(first)
        pool.adopt(second)
        assert pool.residents() == [(first, 0)]
        assert all(memory.is_closed for memory in second.memories.values())


def test_an_error_in_what_follows_a_load_changes_nothing(tmp_path: Path) -> None:
    """A failing announcement leaves the artifact usable and the loader alive."""
    one, two = put_samples(store := LocalStore(tmp_path), 2)

    def fail(*_: object) -> None:
        raise RuntimeError("nobody listens")

    with pool_over(store, capacity_bytes=SIZE, on_evict=fail) as pool:
        pool._on_ready = fail
        assert use(pool, one).digest == one
        assert use(pool, two).digest == two


# --- any order of operations ---------------------------------------------------------------------
class DramPoolMachine(PoolMachine):
    """With prefetches, pins and hints, under each policy.

    The model does not know a policy's order: it checks that whatever left was idle and unpinned.
    """

    @initialize(num_fitting=st.integers(1, 5), name=st.sampled_from(list(EVICTION_POLICIES)))
    def open(self, num_fitting: int, name: EvictionPolicyName) -> None:
        """A pool of two loaders."""
        self.choose_capacity(num_fitting)
        self.pool = DramPool(
            source=self.store,
            capacity_bytes=self.capacity,
            num_loaders=2,
            policy=EVICTION_POLICIES[name](),
            on_ready=self.on_ready,
            on_evict=self.on_evict,
        )

    @rule(index=indexes, priority=st.integers(0, 2))
    def prefetch(self, index: int, priority: int) -> None:
        """Start a load without a user; it comes, or it leaves no trace."""
        digest = self.digests[index]
        if digest in self.failed:
            return
        could_fit = self.can_fit(digest)
        self.pool.prefetch(digest, time.monotonic() + 0.02, priority)
        until(lambda: is_at_rest(self.pool, digest))
        self.settle()
        if digest not in self.users and is_ready(self.pool, digest):
            assert could_fit
            assert not self.is_damaged[digest]
            self.users[digest] = 0

    @rule(index=indexes, owner=st.sampled_from(["a", "b"]))
    def pin(self, index: int, owner: str) -> None:
        """Pin what is resident; the budget is half of the tier."""
        digest = self.digests[index]
        if digest not in self.users:
            return
        pinned = {d for d, owners in self.pins.items() if owners} | {digest}
        fits = sum(map(self.size, pinned)) <= self.capacity // 2 or bool(self.pins.get(digest))
        if fits:
            self.pool.pin(digest, owner, WAIT_S)
            self.pins.setdefault(digest, set()).add(owner)
        else:
            refusal = refusal_of(lambda: self.pool.pin(digest, owner, WAIT_S))
            assert "pinned_bytes" in refusal.detail

    @rule(index=indexes, owner=st.sampled_from(["a", "b"]))
    def unpin(self, index: int, owner: str) -> None:
        """Unpin, pinned or not."""
        digest = self.digests[index]
        owners = self.pins.get(digest, set())
        assert self.pool.unpin(digest, owner) == (owner in owners)
        owners.discard(owner)

    @rule(index=indexes, in_s=st.floats(-1, 100))
    def expect(self, index: int, in_s: float) -> None:
        """Give a hint."""
        self.pool.expect(self.digests[index], time.monotonic() + in_s)


def test_any_order_of_operations_keeps_the_invariants() -> None:
    """Use, prefetch, pin, evict, hint, damage and repair in any order agree with a model."""
    run_state_machine_as_test(
        DramPoolMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )


def use_once(pool: DramTier, digest: Digest, deadline_s: float) -> None:
    """Acquire, look at the memory, release."""
    pool.acquire(digest, deadline_s)
    try:
        artifact, _ = pool.wait(digest, WAIT_S)
        assert not any(memory.is_closed for memory in artifact.memories.values())
    finally:
        pool.release(digest)


def step(pool: DramTier, digests: list[Digest], source: random.Random, owner: str) -> None:
    """One random action."""
    digest = source.choice(digests)
    deadline_s = time.monotonic() + source.random() / 50
    match source.randrange(6):
        case 0:
            pool.prefetch(digest, deadline_s, source.randrange(3))
        case 1:
            pool.pin(digest, owner, WAIT_S)
            pool.unpin(digest, owner)
        case 2:
            pool.evict(digest)
        case _:
            use_once(pool, digest, deadline_s)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_threads_in_any_order_keep_the_invariants(name: EvictionPolicyName, tmp_path: Path) -> None:
    """Six threads use, prefetch, pin and evict at once; in the end only pins hold anything."""
    store = LocalStore(tmp_path)
    samples = [put_sample(store, num_tokens=tokens, seed=tokens) for tokens in range(1, 9)]
    digests = [digest for digest, _ in samples]
    capacity_bytes = max(manifest.payload_bytes for _, manifest in samples) * 2
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(60):
            try:
                step(pool, digests, source, f"owner-{seed}")
            except Refusal as refusal:
                if refusal.reason not in {FailureReason.CAPACITY, FailureReason.DEADLINE}:
                    errors.append(refusal)
            except BaseException as error:
                errors.append(error)
            pool.check_invariants()

    with pool_over(
        store, capacity_bytes=capacity_bytes, num_loaders=3, policy=EVICTION_POLICIES[name]()
    ) as pool:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert errors == []
        until(lambda: all(holding.is_ready for holding in pool.holdings()))
        assert not any(holding.num_users or holding.pinned_by for holding in pool.holdings())


def test_bytes_are_hashed_on_every_load(tmp_path: Path) -> None:
    """What was whole once is looked at again when it is read again, and refused."""
    store = ObservedStore(tmp_path)
    digest, manifest = put_sample(store)
    with pool_over(store) as pool:
        use(pool, digest)
        assert pool.evict(digest) is None
        use(pool, digest)
        assert pool.evict(digest) is None
        flip_bit(blob_path(store, manifest))
        assert refusal_of(lambda: use(pool, digest)).reason is FailureReason.CORRUPT_ARTIFACT


def test_the_inside_of_an_artifact_is_looked_at_once(tmp_path: Path) -> None:
    """Header, tensors and numbers follow from bytes that are hashed: no second look."""
    store = ObservedStore(tmp_path)
    digest, _ = put_sample(store)
    looked_at: list[str] = []
    pool = DramPool(
        source=store,
        capacity_bytes=1 << 20,
        num_loaders=1,
        check=lambda manifest, blob, buffer: looked_at.append(blob),
    )
    for _ in range(3):
        use(pool, digest)
        assert pool.evict(digest) is None
    pool.close()
    assert len(looked_at) == 1


def test_a_request_that_comes_while_a_prefetch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the decision and its end a request may come: it is loaded, not refused."""
    often, once = put_samples(store := LocalStore(tmp_path), 2)
    with pool_over(store, capacity_bytes=SIZE, policy=GreedyDualSizeFrequency()) as pool:
        for _ in range(3):
            use(pool, often)
        fail = pool._fail
        refused: list[str] = []

        def come_between(entry: Any, refusal: Refusal) -> None:
            refused.append(refusal.detail)
            pool.acquire(once, long_deadline())
            fail(entry, refusal)

        monkeypatch.setattr(pool, "_fail", come_between)
        pool.prefetch(once, long_deadline(), 0)
        until(lambda: bool(refused))
        assert pool.wait(once, WAIT_S)[0].digest == once
        assert ["priority: 0" in detail for detail in refused] == [True]
        pool.release(once)
