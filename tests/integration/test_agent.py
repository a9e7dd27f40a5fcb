"""A real engine whose dram tier is a real node agent: kills on both sides cost time, no answer."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from cartridge_proto.v1 import control_pb2, control_pb2_grpc
from cartridge_router.demo.stack import Process, Stack, running_stack
from tests.engine_ext.waiting import until
from tests.integration.fleet import Fleet
from tests.integration.tiny_fleet import (
    ARTIFACT_BYTES,
    drop_prefix_cache,
    expect_ordinary,
    put_documents,
    rows,
    running_tiny_fleet,
    tier_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NAME = "agent"
NUM_DOCUMENTS = 4


@dataclass(frozen=True)
class Node:
    """A machine with an agent and one engine, which has no nvme folder: dram or the store."""

    fleet: Fleet
    stack: Stack
    agent: Process
    control_address: str

    def agent_holds(self) -> set[str]:
        """Digests that the agent has in memory."""
        with grpc.insecure_channel(self.control_address) as channel:
            stub = control_pb2_grpc.CartridgeControlStub(channel)
            described = stub.Describe(control_pb2.DescribeRequest(), timeout=10)
        return {row.digest for row in described.residents}

    def digest(self, index: int) -> str:
        """Of one of the documents."""
        return str(self.fleet.store.resolve(f"{NAME}-{index}@1"))

    def blob(self, index: int) -> Path:
        """File of the only blob of a document in the store."""
        store = self.fleet.store
        manifest = store.read_manifest(store.resolve(f"{NAME}-{index}@1"))
        stem = manifest.payload[0].sha256.removeprefix("sha256:")
        return store.root / "blobs" / "sha256" / stem


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """The agent first, then the engine."""
    work = tmp_path_factory.mktemp("node")
    (work / "store").mkdir()
    socket, control = work / "agent.sock", work / "control.sock"
    command = [sys.executable, "-m", "cartridge_router", "agent", "--listen", f"unix:{socket}"]
    command += ["--store", str(work / "store"), "--dram-bytes", str(8 * ARTIFACT_BYTES)]
    command += ["--control-address", f"unix:{control}"]
    with running_stack(work / "agent-logs") as stack:
        agent = stack.start("agent", command, {"OMP_NUM_THREADS": "1"})
        stack.wait_for("the agent", lambda: socket.exists() and control.exists())
        with running_tiny_fleet(work, agent_socket=f"unix:{socket}", nvme_dir=None) as fleet:
            put_documents(fleet, NAME, NUM_DOCUMENTS)
            yield Node(fleet, stack, agent, f"unix:{control}")


def test_what_the_agent_holds_answers_as_the_prompt(node: Node) -> None:
    """Loaded by the agent, answered like the ordinary prompt, and held there once for all."""
    assert tier_of(expect_ordinary(node.fleet, NAME, 0)) == "remote"
    assert node.digest(0) in node.agent_holds()
    drop_prefix_cache(node.fleet)
    assert tier_of(expect_ordinary(node.fleet, NAME, 0)) == "dram"
    assert rows(node.fleet)[node.digest(0)].tier == "dram"


def test_a_restarted_engine_is_warm_at_once(node: Node) -> None:
    """Kill -9 and the same again: its first Cartridge comes from the agent; no store is read."""
    fleet = node.fleet
    expect_ordinary(fleet, NAME, 0)
    expect_ordinary(fleet, NAME, 1)
    held = {node.digest(0), node.digest(1)}
    assert held <= node.agent_holds()
    epochs = {row.epoch for row in rows(fleet).values()}
    fleet.stop_engine(fleet.engine)
    assert held <= node.agent_holds()
    # Without its blob the store could not serve it.
    blob = node.blob(1)
    hidden = blob.with_name(f".hidden-{blob.name}")
    blob.rename(hidden)
    try:
        fleet.start_engine()

        def is_back() -> bool:
            """It has registered, and says that it holds what the agent has, unasked."""
            found = rows(fleet)
            ready = fleet.client.get(f"{fleet.gateway_url}/ready").json()["replicas"]
            return (
                {row.epoch for row in found.values()}.isdisjoint(epochs)
                and all(digest in found and found[digest].tier == "dram" for digest in held)
                and bool(ready["registered"] and ready["healthy"])
            )

        node.stack.wait_for("the engine is back", is_back)
        assert tier_of(expect_ordinary(fleet, NAME, 1)) == "dram"
    finally:
        hidden.rename(blob)


def test_without_the_agent_the_engine_loads_itself(node: Node) -> None:
    """Kill -9 of the agent: what was held is served still, and what was not comes from the store.

    The last test of this file: the agent is gone afterwards.
    """
    fleet = node.fleet
    expect_ordinary(fleet, NAME, 0)
    node.stack.end(node.agent)
    drop_prefix_cache(fleet)
    assert tier_of(expect_ordinary(fleet, NAME, 0)) == "dram"
    for index in (2, 3):
        assert tier_of(expect_ordinary(fleet, NAME, index)) == "remote"
    drop_prefix_cache(fleet)
    assert tier_of(expect_ordinary(fleet, NAME, 3)) == "dram"
    until(lambda: node.digest(3) in rows(fleet))
    assert rows(fleet)[node.digest(3)].tier == "dram"
