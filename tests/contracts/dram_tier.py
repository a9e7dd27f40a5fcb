"""What every dram tier keeps, whether it lives in the engine or in a node agent.

Owns the behaviour suite of the interface `DramTier`. Refuses to know an implementation: a test
module gives it a fixture `tier` and the `store` behind it.
"""

import time

import msgspec
import pytest

from cartridge_engine_ext.dram_tier import DramTier
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.sealed_memory import map_memory
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.residency import FailureReason
from tests.engine_ext.stored_artifacts import (
    WAIT_S,
    ObservedStore,
    blob_path,
    flip_bit,
    put_artifact,
    put_sample,
)
from tests.engine_ext.waiting import until
from tests.proto.encoded_artifact import (
    encoded,
    encoded_sample,
    encoding_of,
    with_stored_blob,
)
from tests.proto.sample_artifact import sample_artifact

ABSENT = sha256_digest(b"absent")
BLOB = sample_artifact()[1]
SIZE = len(BLOB)


def long_deadline() -> float:
    """A load deadline that no passing test reaches."""
    return time.monotonic() + WAIT_S


class DramTierContract:
    """Subclass with fixtures `store` and `tier`; the tier holds three samples, pins half."""

    def test_an_acquired_artifact_is_the_stored_one(
        self, store: ObservedStore, tier: DramTier
    ) -> None:
        """Not ready at first, then its exact bytes; a second user finds it ready."""
        digest, manifest = put_sample(store)
        assert tier.acquire(digest, long_deadline()) is False
        artifact, load_s = tier.wait(digest, WAIT_S)
        assert (artifact.digest, artifact.manifest) == (digest, manifest)
        with map_memory(artifact.memories[manifest.payload[0].sha256].reference) as mapping:
            assert mapping[:] == BLOB
        assert load_s > 0
        assert tier.poll(digest) is artifact
        assert tier.acquire(digest, long_deadline()) is True
        assert [(a.digest, users) for a, users in tier.residents()] == [(digest, 2)]
        holding = tier.holding(digest)
        assert holding is not None
        assert (holding.is_ready, holding.size_bytes, holding.num_users) == (True, SIZE, 2)

    def test_what_was_used_is_kept(self, store: ObservedStore, tier: DramTier) -> None:
        """After its last use an artifact is ready for the next one, without another read."""
        digest, _ = put_sample(store)
        for expected in (False, True):
            assert tier.acquire(digest, long_deadline()) is expected
            tier.wait(digest, WAIT_S)
            tier.release(digest)
        assert store.reads.total() == 1

    def test_a_failed_load_says_why_and_is_tried_again(
        self, store: ObservedStore, tier: DramTier
    ) -> None:
        """Unknown and corrupt are told apart; after a repair the next acquire loads."""
        digest, manifest = put_sample(store)
        flip_bit(blob_path(store, manifest))
        for asked, reason in (
            (ABSENT, FailureReason.UNKNOWN_ARTIFACT),
            (digest, FailureReason.CORRUPT_ARTIFACT),
        ):
            tier.acquire(asked, long_deadline())
            with pytest.raises(Refusal) as caught:
                tier.wait(asked, WAIT_S)
            assert caught.value.reason is reason
            with pytest.raises(Refusal):
                tier.poll(asked)
            tier.release(asked)
            assert tier.holding(asked) is None
        flip_bit(blob_path(store, manifest))
        tier.acquire(digest, long_deadline())
        assert tier.wait(digest, WAIT_S)[0].digest == digest

    def test_an_encoded_artifact_is_kept_decoded(
        self, store: ObservedStore, tier: DramTier
    ) -> None:
        """Readers see the safetensors file, and its size is what counts."""
        manifest, stored = encoded_sample()
        digest = put_artifact(store, manifest, stored)
        assert len(stored) < SIZE
        tier.acquire(digest, long_deadline())
        artifact, _ = tier.wait(digest, WAIT_S)
        with map_memory(artifact.memories[manifest.payload[0].sha256].reference) as mapping:
            assert mapping[:] == BLOB
        holding = tier.holding(digest)
        assert holding is not None
        assert holding.size_bytes == artifact.size_bytes == SIZE
        assert tier.used_bytes >= SIZE

    def test_what_decodes_to_something_else_is_corrupt(
        self, store: ObservedStore, tier: DramTier
    ) -> None:
        """Right stored bytes of a blob whose decoded digest is another are refused."""
        manifest, stored = encoded_sample()
        [blob] = manifest.payload
        encoding = msgspec.structs.replace(encoding_of(blob), sha256=sha256_digest(b"other"))
        wrong = msgspec.structs.replace(blob, encoding=encoding)
        digest = put_artifact(store, with_stored_blob(manifest, wrong), stored)
        tier.acquire(digest, long_deadline())
        with pytest.raises(Refusal, match="decoded bytes hash to") as caught:
            tier.wait(digest, WAIT_S)
        assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT

    def test_what_nobody_acquired_cannot_be_polled(self, tier: DramTier) -> None:
        """Polling and waiting start no load, and releasing ends nothing."""
        tier.release(ABSENT)
        with pytest.raises(Refusal, match="was not acquired"):
            tier.poll(ABSENT)
        with pytest.raises(Refusal):
            tier.wait(ABSENT, 0.0)
        assert tier.holdings() == []

    def test_a_wait_has_an_end(self, store: ObservedStore, tier: DramTier) -> None:
        """A load that takes longer is past its deadline, and goes on."""
        digest, _ = put_sample(store)
        store.gate.clear()
        tier.acquire(digest, long_deadline())
        assert store.reading.acquire(timeout=WAIT_S)
        with pytest.raises(Refusal) as caught:
            tier.wait(digest, 0.01)
        assert caught.value.reason is FailureReason.DEADLINE
        assert tier.poll(digest) is None
        assert tier.evict(digest) == "loading"
        store.gate.set()
        assert tier.wait(digest, WAIT_S)[0].digest == digest

    def test_room_is_made_by_what_nobody_uses(self, store: ObservedStore, tier: DramTier) -> None:
        """More artifacts than fit, one after the other: each is loaded, the used one stays."""
        used, *others = (put_sample(store, seed=seed)[0] for seed in range(1, 7))
        tier.acquire(used, long_deadline())
        artifact, _ = tier.wait(used, WAIT_S)
        for digest in others:
            tier.acquire(digest, long_deadline())
            tier.wait(digest, WAIT_S)
            tier.release(digest)
        assert tier.poll(used) is artifact
        assert tier.used_bytes <= tier.capacity_bytes

    def test_an_artifact_larger_than_the_tier_is_refused(
        self, store: ObservedStore, tier: DramTier
    ) -> None:
        """No room will ever do; the refusal has the number, with the bytes that are decoded."""
        large, blob = sample_artifact(num_tokens=200)
        for manifest, stored in ((large, blob), encoded(large, blob)):
            digest = put_artifact(store, manifest, stored)
            tier.acquire(digest, long_deadline())
            with pytest.raises(Refusal, match=str(manifest.loading_bytes)) as caught:
                tier.wait(digest, WAIT_S)
            assert caught.value.reason is FailureReason.CAPACITY

    def test_an_idle_artifact_can_be_evicted(self, store: ObservedStore, tier: DramTier) -> None:
        """Not while it is used; then it is gone, and the next acquire reads it again."""
        digest, _ = put_sample(store)
        tier.acquire(digest, long_deadline())
        tier.wait(digest, WAIT_S)
        assert tier.evict(digest) == "in use by 1 requests"
        tier.release(digest)
        assert tier.evict(digest) is None
        assert tier.evict(digest) == "not resident"
        assert tier.acquire(digest, long_deadline()) is False
        tier.wait(digest, WAIT_S)

    def test_pins_keep_and_have_a_budget(self, store: ObservedStore, tier: DramTier) -> None:
        """A pinned artifact survives others; a second one passes the budget; unpinning ends it."""
        pinned, *others = (put_sample(store, seed=seed)[0] for seed in range(1, 7))
        assert tier.pin(pinned, "operator", WAIT_S)[0].digest == pinned
        assert tier.evict(pinned) == "pinned by operator"
        with pytest.raises(Refusal, match="pinned_bytes") as caught:
            tier.pin(others[0], "operator", WAIT_S)
        assert caught.value.reason is FailureReason.CAPACITY
        for digest in others:
            tier.acquire(digest, long_deadline())
            tier.wait(digest, WAIT_S)
            tier.release(digest)
        before = store.reads[sample_blob(1)]
        tier.acquire(pinned, long_deadline())
        tier.wait(pinned, WAIT_S)
        tier.release(pinned)
        assert store.reads[sample_blob(1)] == before == 1
        assert not tier.unpin(pinned, "another")
        assert tier.unpin(pinned, "operator")
        assert not tier.unpin(pinned, "operator")

    def test_a_prefetched_artifact_comes_without_a_user(
        self, store: ObservedStore, tier: DramTier
    ) -> None:
        """It is ready for the first acquire; hints change nothing of what is served."""
        digest, _ = put_sample(store)
        tier.expect(digest, long_deadline())
        tier.prefetch(digest, long_deadline())
        until(lambda: [a.digest for a, _ in tier.residents()] == [digest])
        assert tier.acquire(digest, long_deadline()) is True

    def test_a_closed_tier_refuses(self, store: ObservedStore, tier: DramTier) -> None:
        """After `close` an acquire fails instead of never being ready."""
        digest, _ = put_sample(store)
        tier.close()
        assert tier.acquire(digest, long_deadline()) is False
        with pytest.raises(Refusal, match="closed"):
            tier.wait(digest, WAIT_S)


def sample_blob(seed: int) -> Digest:
    """Digest of the blob of a seed's sample."""
    return Digest(sample_artifact(seed=seed)[0].payload[0].sha256)
