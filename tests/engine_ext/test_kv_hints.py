"""KV hints: read strictly, run beside the request, and never more than advice."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from vllm.v1.kv_hints.protocol import KvHintAction, KvHintsEnvelope

from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_engine_ext.hbm_census import HbmCensus
from cartridge_engine_ext.kv_hints import (
    HINT_OWNER,
    MAX_ACTIONS,
    PROTOCOL_VERSION,
    HintOutcome,
    KvHints,
)
from cartridge_engine_ext.residency_ledger import ResidencyLedger
from cartridge_proto.digest import Digest, sha256_digest
from tests.engine_ext.fake_blocks import FakeBlockPool
from tests.engine_ext.stored_artifacts import ObservedStore, put_sample
from tests.engine_ext.waiting import until
from tests.proto.sample_artifact import engine_of, sample_artifact

COMPOSITION = sha256_digest(b"composition")


class Around:
    """Hints over a real pool and census."""

    def __init__(self, folder: Path) -> None:
        self.outcomes: list[tuple[str, HintOutcome]] = []
        self.store = ObservedStore(folder)
        self.pool = ArtifactPool(
            store=self.store,
            engine=engine_of(sample_artifact()[0]),
            capacity_bytes=1 << 20,
            num_loaders=1,
        )
        self.blocks = FakeBlockPool()
        self.census = HbmCensus(
            ResidencyLedger(),
            group_ids=[0],
            block_bytes=1,
            pinned_fraction=1.0,
            longest_request_blocks=0,
        )
        self.census.bind(self.blocks)
        self.hints = KvHints(
            dram=self.pool,
            census=self.census,
            on_outcome=lambda action, outcome: self.outcomes.append((action, outcome)),
        )
        self.artifact = put_sample(ObservedStore(folder))[0]

    def take(self, action: str, version: str = "1.0", **payload: Any) -> HintOutcome:
        """One action; returns what became of it."""
        num_before = len(self.outcomes)
        self.hints.take(envelope([(action, version, payload)]))
        until(lambda: len(self.outcomes) > num_before)
        return self.outcomes[-1][1]

    def is_ready(self, digest: Digest) -> bool:
        """Whether the pool holds an artifact."""
        holding = self.pool.holding(digest)
        return holding is not None and holding.is_ready


@pytest.fixture
def around(tmp_path: Path) -> Iterator[Around]:
    """Hints, and what they act on."""
    around = Around(tmp_path)
    yield around
    around.hints.stop()
    around.pool.close()


def envelope(actions: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """As it comes with a request."""
    return {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [
            {"action_id": "a", "action_type": name, "action_version": version, "payload": payload}
            for name, version, payload in actions
        ],
    }


def test_prefetch(around: Around) -> None:
    """The artifact comes to dram; nobody waits for it."""
    outcome = around.take("cartridge.prefetch", digest=around.artifact, expected_in_ms=100)
    assert outcome is HintOutcome.DONE
    until(lambda: around.is_ready(around.artifact))


def test_pin_unpin_evict(around: Around) -> None:
    """A pin brings and keeps it; unpinned it can be dropped."""
    assert around.take("cartridge.pin", digest=around.artifact) is HintOutcome.DONE
    holding = around.pool.holding(around.artifact)
    assert holding is not None
    assert holding.pinned_by == (HINT_OWNER,)
    around.take("cartridge.evict", digest=around.artifact)
    assert around.is_ready(around.artifact)
    assert around.take("cartridge.unpin", digest=around.artifact) is HintOutcome.DONE
    around.take("cartridge.evict", digest=around.artifact)
    assert not around.is_ready(around.artifact)


@pytest.mark.parametrize(
    ("names", "pinned_by"),
    [(["pin", "unpin"], ()), (["unpin", "pin"], (HINT_OWNER,)), (["pin", "unpin", "evict"], None)],
)
def test_hints_of_one_digest_keep_their_order(
    names: list[str], pinned_by: tuple[str, ...] | None, around: Around
) -> None:
    """What comes while a pin waits for its load waits behind it; other digests go on."""
    other, _ = put_sample(around.store, seed=2)
    around.store.gate.clear()
    actions = [(f"cartridge.{name}", "1.0", {"digest": around.artifact}) for name in names]
    around.hints.take(envelope(actions))
    around.take("cartridge.prefetch", digest=other)
    around.store.gate.set()
    until(lambda: len(around.outcomes) == len(names) + 1)
    ended = [action for action, _ in around.outcomes if action != "cartridge.prefetch"]
    assert ended == [action for action, *_ in actions]
    holding = around.pool.holding(around.artifact)
    assert (holding.pinned_by if holding is not None else None) == pinned_by


def test_pin_in_hbm(around: Around) -> None:
    """A composition is pinned as soon as it is whole, and let go again."""
    assert around.take("cartridge.pin", digest=COMPOSITION, tier="hbm") is HintOutcome.DONE
    around.census.enter(COMPOSITION, [b"1", b"2"], [])
    around.blocks.hold([b"1", b"2"])
    around.census.update()
    around.census.update()
    assert around.census.num_pinned_blocks == 2
    assert around.take("cartridge.unpin", digest=COMPOSITION, tier="hbm") is HintOutcome.DONE
    around.census.update()
    assert around.census.num_pinned_blocks == 0


def test_what_cannot_be_had_is_refused(around: Around) -> None:
    """An artifact that no store has is counted, and nothing is raised."""
    absent = sha256_digest(b"absent")
    assert around.take("cartridge.pin", digest=absent, deadline_ms=100) is HintOutcome.REFUSED


@pytest.mark.parametrize(
    ("action", "version"),
    [("kv.fetch", "1.0"), ("cartridge.prefetch", "2.0"), ("cartridge.levitate", "1.0")],
)
def test_actions_of_others_are_left_alone(around: Around, action: str, version: str) -> None:
    """Another connector's, a later version's, or unknown: counted under one name."""
    assert around.take(action, version, digest=around.artifact) is HintOutcome.UNKNOWN
    assert around.outcomes == [("other", HintOutcome.UNKNOWN)]


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"digest": "harbour@1"},
        {"digest": COMPOSITION, "deadline_ms": 0},
        {"digest": COMPOSITION, "deadline_ms": 600_001},
        {"digest": COMPOSITION, "priority": 101},
        {"digest": COMPOSITION, "colour": "red"},
        [],
    ],
)
def test_a_wrong_payload_is_counted(around: Around, payload: Any) -> None:
    """Every field is checked; nothing is started."""
    around.hints.take(envelope([("cartridge.prefetch", "1.0", payload)]))
    assert around.outcomes == [("cartridge.prefetch", HintOutcome.INVALID)]
    assert around.pool.holdings() == []


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "text",
        [],
        {},
        {"protocol_version": "0.1", "message_id": "m"},
        {"protocol_version": "0.1", "message_id": "m", "actions": [{}]},
        {"protocol_version": "0.1", "message_id": "m", "actions": "prefetch"},
        envelope([("cartridge.evict", "1.0", {"digest": COMPOSITION})] * (MAX_ACTIONS + 1)),
    ],
)
def test_what_is_no_envelope_is_counted(around: Around, value: Any) -> None:
    """Any JSON may come; it is one invalid hint."""
    around.hints.take(value)
    assert around.outcomes == [("other", HintOutcome.INVALID)]


def test_after_stop_hints_are_dropped(around: Around) -> None:
    """An engine that ends starts nothing more."""
    around.hints.stop()
    assert around.take("cartridge.prefetch", digest=around.artifact) is HintOutcome.DROPPED


def test_the_envelope_is_vllms(around: Around) -> None:
    """What vLLM's own type writes is read, so that its HTTP field can carry the same."""
    action = KvHintAction("a", "cartridge.prefetch", "1.0", {"digest": around.artifact})
    hints = KvHintsEnvelope(PROTOCOL_VERSION, "m", [action])
    around.hints.take(msgspec.to_builtins(hints))
    until(lambda: around.is_ready(around.artifact))
