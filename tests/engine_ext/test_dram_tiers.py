"""Every dram tier keeps the contract: an engine's own, and a node agent's, there or away."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cartridge_engine_ext.agent import AgentOptions, NodeAgent
from cartridge_engine_ext.agent_pool import AgentPool
from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_engine_ext.dram_tier import DramTier
from tests.contracts.dram_tier import SIZE, DramTierContract
from tests.engine_ext.stored_artifacts import ObservedStore
from tests.proto.sample_artifact import engine_of, sample_artifact

ENGINE = engine_of(sample_artifact()[0])
CAPACITY = 3 * SIZE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObservedStore]:
    """A store that counts reads and can hold them."""
    store = ObservedStore(tmp_path / "store")
    yield store
    store.gate.set()


def own_pool(store: ObservedStore) -> ArtifactPool:
    """The engine's own tier."""
    return ArtifactPool(store=store, engine=ENGINE, capacity_bytes=CAPACITY, num_loaders=2)


class TestOwnPool(DramTierContract):
    """The pool inside an engine."""

    @pytest.fixture
    def tier(self, store: ObservedStore) -> Iterator[DramTier]:
        """An empty pool."""
        pool = own_pool(store)
        yield pool
        pool.check_invariants()
        store.gate.set()
        pool.close()


class TestAgent(DramTierContract):
    """An engine beside its node agent."""

    @pytest.fixture
    def tier(self, store: ObservedStore, tmp_path: Path) -> Iterator[DramTier]:
        """A pool that is connected to an empty agent."""
        socket = tmp_path / "agent.sock"
        options = AgentOptions(listen=f"unix:{socket}", store="given", dram_bytes=CAPACITY)
        agent = NodeAgent(options, opener=lambda _: store)
        pool = AgentPool(path=socket, name="engine-0", engine=ENGINE, own=own_pool(store))
        assert pool.is_linked
        yield pool
        pool.check_invariants()
        agent.service.check_invariants()
        agent.pool.check_invariants()
        store.gate.set()
        pool.close()
        agent.stop()


class TestAgentAway(DramTierContract):
    """An engine whose node agent never came."""

    @pytest.fixture
    def tier(self, store: ObservedStore, tmp_path: Path) -> Iterator[DramTier]:
        """A pool that has found no agent."""
        pool = AgentPool(
            path=tmp_path / "absent.sock", name="engine-0", engine=ENGINE, own=own_pool(store)
        )
        assert not pool.is_linked
        yield pool
        pool.check_invariants()
        store.gate.set()
        pool.close()
