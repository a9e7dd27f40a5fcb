"""The engine's side of a node agent: shared loads, giving back, distrust, and life without it."""

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cartridge_engine_ext import agent_wire as wire
from cartridge_engine_ext.agent import AgentOptions, NodeAgent
from cartridge_engine_ext.agent_pool import AgentPool
from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_engine_ext.dram_tier import Artifact
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.sealed_memory import SealedMemory, map_memory
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import encode_manifest
from cartridge_proto.residency import FailureReason, Tier
from tests.engine_ext.stored_artifacts import (
    WAIT_S,
    ObservedStore,
    put_artifact,
    put_sample,
)
from tests.engine_ext.test_artifact_pool import with_nan
from tests.engine_ext.waiting import until
from tests.proto.sample_artifact import engine_of, sample_artifact

MANIFEST, BLOB = sample_artifact()
SIZE = len(BLOB)
ENGINE = engine_of(MANIFEST)
NUM_STEPS = 800


def long_deadline() -> float:
    """A load deadline that no passing test reaches."""
    return time.monotonic() + WAIT_S


@dataclass
class Machine:
    """A store, the socket of its agent, and engines that announce what they can use."""

    folder: Path
    store: ObservedStore
    stack: ExitStack
    announced: list[str] = field(default_factory=list)
    pinned: list[tuple[Digest, bool]] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        """Where the agent listens."""
        return self.folder / "agent.sock"

    def start_agent(self, capacity_bytes: int = 1 << 20) -> NodeAgent:
        """An agent in this process."""
        options = AgentOptions(
            listen=f"unix:{self.socket}", store="given", dram_bytes=capacity_bytes
        )
        agent = NodeAgent(options, opener=lambda _: self.store)
        self.stack.callback(agent.stop)
        return agent

    def start_engine(self, name: str = "engine-0", engine: EngineIdentity = ENGINE) -> AgentPool:
        """An engine's pool; it falls back to one of its own."""
        own = ArtifactPool(store=self.store, engine=engine, capacity_bytes=1 << 20, num_loaders=1)
        pool = AgentPool(
            path=self.socket,
            name=name,
            engine=engine,
            own=own,
            on_ready=lambda digest, _: self.announced.append(f"{name} ready {digest}"),
            on_evict=lambda digest: self.announced.append(f"{name} evict {digest}"),
            on_pin=lambda digest, is_pinned: self.pinned.append((digest, is_pinned)),
        )
        self.stack.callback(pool.close)
        return pool


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine without an agent."""
    store = ObservedStore(tmp_path / "store")
    with ExitStack() as stack:
        yield Machine(tmp_path, store, stack)
        store.gate.set()


def hold(pool: AgentPool, digest: Digest) -> Artifact:
    """Acquire and wait."""
    pool.acquire(digest, long_deadline())
    return pool.wait(digest, WAIT_S)[0]


def use(pool: AgentPool, digest: Digest) -> Artifact:
    """Acquire, wait and release."""
    artifact = hold(pool, digest)
    pool.release(digest)
    return artifact


def inode_of(artifact: Artifact) -> int:
    """Which memory an artifact of one blob is."""
    (memory,) = artifact.memories.values()
    return memory.reference.inode


# --- sharing -------------------------------------------------------------------------------------
def test_engines_share_one_load_and_one_memory(machine: Machine) -> None:
    """Two that ask at once cause one read, and map the same memory by descriptors of their own."""
    agent = machine.start_agent()
    one, two = machine.start_engine("one"), machine.start_engine("two")
    digest, _ = put_sample(machine.store)
    machine.store.gate.clear()
    for pool in (one, two):
        assert pool.acquire(digest, long_deadline()) is False
    machine.store.gate.set()
    first, second = (pool.wait(digest, WAIT_S)[0] for pool in (one, two))
    assert machine.store.reads.total() == 1
    assert inode_of(first) == inode_of(second) == inode_of(agent.pool.residents()[0][0])
    assert agent.pool.used_bytes == SIZE
    agent.service.check_invariants()


def test_the_bytes_come_from_where_the_agent_had_them(machine: Machine) -> None:
    """Remote for who caused the load, dram for who found it in the agent's memory."""
    machine.start_agent()
    one, two = machine.start_engine("one"), machine.start_engine("two")
    digest, _ = put_sample(machine.store)
    assert use(one, digest).loaded_from is Tier.REMOTE
    assert use(two, digest).loaded_from is Tier.DRAM


def test_a_restarted_engine_is_warm_at_once(machine: Machine) -> None:
    """What the agent holds is taken over, verified and announced before anybody asks."""
    machine.start_agent()
    digest, _ = put_sample(machine.store)
    before = machine.start_engine("before")
    use(before, digest)
    before.close()
    after = machine.start_engine("after")
    until(lambda: f"after ready {digest}" in machine.announced)
    until(lambda: bool(after.residents()))
    assert after.acquire(digest, long_deadline()) is True
    assert machine.store.reads.total() == 1


def test_holds_end_with_the_connection(machine: Machine) -> None:
    """An engine that closes in the middle of everything leaves no use behind."""
    agent = machine.start_agent()
    (used, _), (loading, _) = put_sample(machine.store, seed=1), put_sample(machine.store, seed=2)
    pool = machine.start_engine()
    hold(pool, used)
    machine.store.gate.clear()
    pool.acquire(loading, long_deadline())
    until(lambda: agent.pool.holding(loading) is not None)
    pool.close()
    until(lambda: agent.service.num_engines == 0)
    machine.store.gate.set()
    until(lambda: {h.num_users for h in agent.pool.holdings()} == {0})
    agent.service.check_invariants()
    agent.pool.check_invariants()


def test_a_load_that_no_engine_wants_any_more_is_dropped(machine: Machine) -> None:
    """Releasing before the agent has begun takes the load out of its line."""
    agent = machine.start_agent()
    pool = machine.start_engine()
    digests = [put_sample(machine.store, seed=seed)[0] for seed in (1, 2, 3)]
    machine.store.gate.clear()
    for digest in digests:
        pool.acquire(digest, long_deadline())
    for _ in range(2):
        assert machine.store.reading.acquire(timeout=WAIT_S)
    until(lambda: len(agent.pool.holdings()) == 3)
    pool.release(digests[2])
    until(lambda: agent.pool.holding(digests[2]) is None)
    assert pool.holding(digests[2]) is None
    machine.store.gate.set()
    for digest in digests[:2]:
        pool.wait(digest, WAIT_S)


def test_a_prefetch_outlives_a_request_for_it(machine: Machine) -> None:
    """A request that comes and goes while a prefetch is under way does not end it."""
    machine.start_agent()
    pool = machine.start_engine()
    digest, _ = put_sample(machine.store)
    machine.store.gate.clear()
    pool.prefetch(digest, long_deadline())
    pool.acquire(digest, long_deadline())
    pool.release(digest)
    assert pool.holding(digest) is not None
    machine.store.gate.set()
    until(lambda: bool(pool.residents()))
    assert machine.announced == [f"engine-0 ready {digest}"]


# --- giving back ---------------------------------------------------------------------------------
def test_idle_artifacts_are_given_back_when_room_is_needed(machine: Machine) -> None:
    """What no request uses is recalled, coldest first, withdrawn, and really freed."""
    agent = machine.start_agent(capacity_bytes=2 * SIZE)
    pool = machine.start_engine()
    one, two, three = (put_sample(machine.store, seed=seed)[0] for seed in (1, 2, 3))
    for digest in (one, two, one, three):
        use(pool, digest)
    until(lambda: f"engine-0 evict {two}" in machine.announced)
    assert {artifact.digest for artifact, _ in pool.residents()} == {one, three}
    assert {artifact.digest for artifact, _ in agent.pool.residents()} == {one, three}
    assert agent.pool.used_bytes == 2 * SIZE


def test_what_a_request_uses_is_not_given_back(machine: Machine) -> None:
    """With everything in use a load waits; the first release lets it go on."""
    machine.start_agent(capacity_bytes=SIZE)
    pool, other = machine.start_engine("one"), machine.start_engine("two")
    used, wanted = (put_sample(machine.store, seed=seed)[0] for seed in (1, 2))
    artifact = hold(pool, used)
    other.acquire(wanted, long_deadline())
    with pytest.raises(Refusal) as caught:
        other.wait(wanted, 0.05)
    assert caught.value.reason is FailureReason.DEADLINE
    assert pool.poll(used) is artifact
    pool.release(used)
    assert other.wait(wanted, WAIT_S)[0].digest == wanted
    until(lambda: pool.residents() == [])


def test_an_artifact_that_is_given_back_can_be_asked_for_again(machine: Machine) -> None:
    """Two engines and room for one artifact each way: all requests are served in the end."""
    agent = machine.start_agent(capacity_bytes=SIZE)
    pools = [machine.start_engine("one"), machine.start_engine("two")]
    digests = [put_sample(machine.store, seed=seed)[0] for seed in (1, 2)]
    for turn in range(8):
        artifact = use(pools[turn % 2], digests[turn // 2 % 2])
        assert artifact.digest == digests[turn // 2 % 2]
        agent.pool.check_invariants()
        agent.service.check_invariants()


def test_an_eviction_is_for_the_whole_machine(machine: Machine) -> None:
    """What one engine drops leaves the agent and the engines that kept it idle."""
    agent = machine.start_agent()
    one, two = machine.start_engine("one"), machine.start_engine("two")
    digest, _ = put_sample(machine.store)
    use(one, digest)
    use(two, digest)
    until(lambda: not any(hold.is_busy for *_, hold in agent.service._holds_on(digest)))
    assert one.evict(digest) is None
    until(lambda: agent.pool.holding(digest) is None)
    assert two.residents() == []


def test_pins_are_for_all_engines(machine: Machine) -> None:
    """What one engine pinned is not recalled from it, nor dropped for another one's load."""
    agent = machine.start_agent(capacity_bytes=2 * SIZE)
    one, two = machine.start_engine("one"), machine.start_engine("two")
    digests = [put_sample(machine.store, seed=seed)[0] for seed in range(1, 5)]
    one.pin(digests[0], "operator", WAIT_S)
    for digest in digests[1:]:
        use(two, digest)
    holding = agent.pool.holding(digests[0])
    assert holding is not None
    assert holding.pinned_by == ("operator",)
    assert two.unpin(digests[0], "operator")
    assert agent.pool.holding(digests[0]) is not None


def test_an_unpin_waits_for_the_pin_that_it_ends(machine: Machine) -> None:
    """One that comes while its pin still loads leaves no pin behind; other pins do not wait."""
    agent = machine.start_agent()
    digest, other = (put_sample(machine.store, seed=seed)[0] for seed in (1, 2))
    machine.store.gate.clear()
    answers = msgspec.msgpack.Decoder(wire.AgentMessage)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(machine.socket))

        def done() -> int:
            while True:
                message = answers.decode(connection.recv(wire.MAX_PACKET_BYTES))
                if isinstance(message, wire.Done):
                    return message.request

        for message in (
            wire.Hello(wire.PROTOCOL_VERSION, "bare"),
            wire.Pin(1, digest, "operator", 30_000),
            wire.Unpin(2, digest, "operator"),
            wire.Unpin(3, other, "operator"),
        ):
            connection.send(msgspec.msgpack.encode(message))
        assert done() == 3
        machine.store.gate.set()
        assert [done(), done()] == [1, 2]
    holding = agent.pool.holding(digest)
    assert holding is not None
    assert holding.pinned_by == ()


def test_pins_are_announced_and_end_with_the_agent(machine: Machine) -> None:
    """First pin, last unpin, and the loss of the agent that kept it; then the memory is free."""
    agent = machine.start_agent()
    pool = machine.start_engine()
    one, two = (put_sample(machine.store, seed=seed)[0] for seed in (1, 2))
    for owner in ("a", "b"):
        pool.pin(one, owner, WAIT_S)
    assert machine.pinned == [(one, True)]
    for owner in ("a", "b"):
        assert pool.unpin(one, owner)
    assert machine.pinned == [(one, True), (one, False)]
    pool.pin(two, "a", WAIT_S)
    agent.stop()
    until(lambda: machine.pinned[2:] == [(two, True), (two, False)])
    assert pool.evict(two) is None


def test_a_pin_that_ends_while_it_is_answered_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent said yes and went away before the engine had noted it: nobody believes in it."""
    agent = machine.start_agent()
    pool = machine.start_engine()
    digest, _ = put_sample(machine.store)
    ask = pool._question

    def ask_and_lose(*question: Any) -> wire.Done:
        done = ask(*question)
        agent.stop()
        until(lambda: not pool.is_linked)
        return done

    monkeypatch.setattr(pool, "_question", ask_and_lose)
    with pytest.raises(Refusal) as caught:
        pool.pin(digest, "operator", WAIT_S)
    assert caught.value.reason is FailureReason.NOT_READY
    assert machine.pinned == []
    monkeypatch.undo()
    assert pool.evict(digest) is None


def test_a_pin_in_a_new_agent_is_the_new_agents(machine: Machine) -> None:
    """Of what the engine holds of an earlier one: pinned in the new one, and ends with that."""
    first = machine.start_agent()
    pool = machine.start_engine()
    digest, _ = put_sample(machine.store)
    hold(pool, digest)
    first.stop()
    until(lambda: not pool.is_linked)
    second = machine.start_agent()
    until(lambda: pool.is_linked)
    pool.pin(digest, "operator", WAIT_S)
    assert machine.pinned == [(digest, True)]
    holding = second.pool.holding(digest)
    assert holding is not None
    assert holding.pinned_by == ("operator",)
    pool.release(digest)
    until(lambda: pool.holding(digest) is None)
    use(pool, digest)
    assert machine.pinned == [(digest, True)] * 2  # with the row that came anew
    assert pool.evict(digest) == "pinned by operator"
    second.stop()
    until(lambda: machine.pinned[2:] == [(digest, False)])


# --- life without the agent ----------------------------------------------------------------------
def test_an_agents_death_loses_nothing_that_is_held(machine: Machine) -> None:
    """Used and idle artifacts stay readable; what is new is loaded by the engine itself."""
    agent = machine.start_agent()
    pool = machine.start_engine()
    used, idle, new = (put_sample(machine.store, seed=seed)[0] for seed in (1, 2, 3))
    artifact = hold(pool, used)
    use(pool, idle)
    agent.stop()
    until(lambda: not pool.is_linked)
    (memory,) = artifact.memories.values()
    with map_memory(memory.reference) as mapping:
        assert sha256_digest(mapping[:]) == artifact.manifest.payload[0].sha256
    assert pool.acquire(idle, long_deadline()) is True
    assert hold(pool, new).digest == new
    assert [a.digest for a, _ in pool._own.residents()] == [new]
    pool.check_invariants()


def test_a_load_in_the_middle_of_which_the_agent_dies_goes_on(machine: Machine) -> None:
    """The engine's own pool takes over, for each of those who wait."""
    agent = machine.start_agent()
    pool = machine.start_engine()
    digest, _ = put_sample(machine.store)
    machine.store.gate.clear()
    for _ in range(3):
        pool.acquire(digest, long_deadline())
    assert machine.store.reading.acquire(timeout=WAIT_S)
    stopping = threading.Thread(target=agent.stop)
    stopping.start()
    until(lambda: not pool.is_linked)
    machine.store.gate.set()
    assert pool.wait(digest, WAIT_S)[0].digest == digest
    stopping.join(WAIT_S)
    for _ in range(3):
        pool.release(digest)
    assert [(a.digest, users) for a, users in pool.residents()] == [(digest, 0)]


def test_an_agent_that_comes_back_is_used_again(machine: Machine) -> None:
    """Reconnecting is in the background; what was idle of the old one is dropped, used stays."""
    agent = machine.start_agent()
    pool = machine.start_engine()
    used, idle, new = (put_sample(machine.store, seed=seed)[0] for seed in (1, 2, 3))
    artifact = hold(pool, used)
    use(pool, idle)
    agent.stop()
    until(lambda: not pool.is_linked)
    again = machine.start_agent()
    until(lambda: pool.is_linked)
    until(lambda: f"engine-0 evict {idle}" in machine.announced)
    assert pool.poll(used) is artifact
    use(pool, new)
    assert again.pool.holding(new) is not None
    pool.release(used)
    until(lambda: f"engine-0 evict {used}" in machine.announced)
    pool.check_invariants()


def test_an_agent_may_come_after_the_engine(machine: Machine) -> None:
    """What the engine's own pool has is served from there; new artifacts come from the agent."""
    pool = machine.start_engine()
    early, late = (put_sample(machine.store, seed=seed)[0] for seed in (1, 2))
    use(pool, early)
    agent = machine.start_agent()
    until(lambda: pool.is_linked)
    assert pool.acquire(early, long_deadline()) is True
    use(pool, late)
    assert [a.digest for a, _ in agent.pool.residents()] == [late]


# --- compatibility is the engine's matter --------------------------------------------------------
def test_an_artifact_that_does_not_fit_is_refused_by_the_engine(machine: Machine) -> None:
    """The agent loads it; each engine says for itself that it cannot serve it, and why."""
    agent = machine.start_agent()
    rope = msgspec.structs.replace(ENGINE.rope, theta=5000.0)
    other = machine.start_engine("other", msgspec.structs.replace(ENGINE, rope=rope))
    fitting = machine.start_engine("fitting")
    digest, _ = put_sample(machine.store)
    other.acquire(digest, long_deadline())
    with pytest.raises(Refusal, match=r"rope\.theta") as caught:
        other.wait(digest, WAIT_S)
    assert caught.value.reason is FailureReason.INCOMPATIBLE
    other.release(digest)
    assert use(fitting, digest).digest == digest
    assert other.residents() == []
    agent.service.check_invariants()
    assert other.num_distrusted == 0


def test_numbers_that_are_none_are_found_by_the_engine(machine: Machine) -> None:
    """The agent knows bytes only; the engine looks at the tensors, and its own pool refuses."""
    machine.start_agent()
    pool = machine.start_engine()
    digest = put_artifact(machine.store, *with_nan(MANIFEST, BLOB))
    pool.acquire(digest, long_deadline())
    with pytest.raises(Refusal, match=r"layers\.1\.v") as caught:
        pool.wait(digest, WAIT_S)
    assert caught.value.reason is FailureReason.CORRUPT_ARTIFACT


# --- an agent that is wrong ----------------------------------------------------------------------
def sealed(data: bytes) -> SealedMemory:
    """Sealed memory with these bytes."""

    def fill(buffer: memoryview) -> None:
        buffer[:] = data

    return SealedMemory(len(data), fill)


class LyingAgent:
    """Answers every acquire with what it was told to, over the real protocol."""

    def __init__(self, path: Path, answer: Callable[["LyingAgent", wire.Acquire], None]) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._answer = answer
        self.channel: wire.Channel[wire.EngineMessage] | None = None
        self.said: list[wire.EngineMessage] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        self.channel = wire.Channel(connection, wire.EngineMessage, 0.1)
        self.channel.receive(WAIT_S)
        self.channel.post(wire.Welcome(wire.PROTOCOL_VERSION, "lies", 1 << 20, 1 << 19, []))
        try:
            while True:
                message, _ = self.channel.receive(None)
                self.said.append(message)
                if isinstance(message, wire.Acquire):
                    self._answer(self, message)
        except wire.Disconnected:
            return

    def send(self, message: wire.Acquire, memories: list[SealedMemory], **changes: object) -> None:
        """Answer an acquire with this memory."""
        ready = wire.Ready(
            request=message.request,
            digest=message.digest,
            sizes_bytes=[memory.size_bytes for memory in memories],
            is_last=True,
            loaded_from=Tier.DRAM,
        )
        ready = msgspec.structs.replace(ready, **changes)
        assert self.channel is not None
        self.channel.post(ready, [memory.duplicate() for memory in memories])

    def stop(self) -> None:
        """Hang up."""
        if self.channel is not None:
            self.channel.close()
            self.channel.join()
        self._listener.close()


@contextmanager
def lied_to(
    machine: Machine, answer: Callable[[LyingAgent, wire.Acquire], None]
) -> Iterator[tuple[AgentPool, LyingAgent]]:
    """An engine whose agent is a liar."""
    agent = LyingAgent(machine.socket, answer)
    try:
        yield machine.start_engine(), agent
    finally:
        agent.stop()
        machine.socket.unlink()


def flipped(data: bytes) -> bytes:
    """The bytes with one bit changed in the last one."""
    return data[:-1] + bytes([data[-1] ^ 1])


def wrong_bytes(agent: LyingAgent, message: wire.Acquire) -> None:
    """One bit of the blob differs."""
    agent.send(message, [sealed(encode_manifest(MANIFEST)), sealed(flipped(BLOB))])


def wrong_manifest(agent: LyingAgent, message: wire.Acquire) -> None:
    """The manifest of another artifact, with its blob."""
    manifest, blob = sample_artifact(seed=9)
    agent.send(message, [sealed(encode_manifest(manifest)), sealed(blob)])


def missing_blob(agent: LyingAgent, message: wire.Acquire) -> None:
    """The manifest alone."""
    agent.send(message, [sealed(encode_manifest(MANIFEST))])


def nothing_at_all(agent: LyingAgent, message: wire.Acquire) -> None:
    """No memory."""
    agent.send(message, [])


def wrong_size(agent: LyingAgent, message: wire.Acquire) -> None:
    """Memory of another size than is said."""
    memories = [sealed(encode_manifest(MANIFEST)), sealed(BLOB)]
    agent.send(message, memories, sizes_bytes=[memories[0].size_bytes, SIZE + 1])


def wrong_digest(agent: LyingAgent, message: wire.Acquire) -> None:
    """An answer for another artifact."""
    memories = [sealed(encode_manifest(MANIFEST)), sealed(BLOB)]
    agent.send(message, memories, digest=sha256_digest(b"other"))


def fewer_descriptors(agent: LyingAgent, message: wire.Acquire) -> None:
    """Two sizes and one descriptor."""
    memories = [sealed(encode_manifest(MANIFEST))]
    agent.send(message, memories, sizes_bytes=[memories[0].size_bytes, SIZE])


def unsealed(agent: LyingAgent, message: wire.Acquire) -> None:
    """Memory that the agent could change after the check."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, BLOB)
    manifest = sealed(encode_manifest(MANIFEST))
    sizes = [manifest.size_bytes, SIZE]
    assert agent.channel is not None
    agent.channel.post(
        wire.Ready(message.request, message.digest, sizes, is_last=True, loaded_from=Tier.DRAM),
        [manifest.duplicate(), descriptor],
    )


LIES = [
    wrong_bytes,
    wrong_manifest,
    missing_blob,
    nothing_at_all,
    wrong_size,
    wrong_digest,
    fewer_descriptors,
    unsealed,
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_what_the_agent_says_is_checked(
    lie: Callable[[LyingAgent, wire.Acquire], None], machine: Machine
) -> None:
    """The lie is counted, its memory is closed, and the engine loads the artifact itself."""
    digest, _ = put_sample(machine.store)
    with lied_to(machine, lie) as (pool, agent):
        assert hold(pool, digest).manifest == MANIFEST
        assert pool.num_distrusted == 1
        assert machine.store.reads.total() == 1
        until(lambda: any(isinstance(message, wire.Release) for message in agent.said))
        pool.release(digest)
        pool.check_invariants()


def test_an_agent_that_tells_the_truth_over_this_protocol_is_believed(machine: Machine) -> None:
    """The control of the test above: the same sender with the right bytes, in two parts."""

    def truth(agent: LyingAgent, message: wire.Acquire) -> None:
        agent.send(message, [sealed(encode_manifest(MANIFEST))], is_last=False)
        agent.send(message, [sealed(BLOB)])

    digest, _ = put_sample(machine.store)
    with lied_to(machine, truth) as (pool, _):
        assert hold(pool, digest).loaded_from is Tier.DRAM
        assert (pool.num_distrusted, machine.store.reads.total()) == (0, 0)


def garbage(agent: LyingAgent, message: wire.Acquire) -> None:
    """No message at all."""
    assert agent.channel is not None
    agent.channel._socket.send(b"\xc1garbage")


def second_welcome(agent: LyingAgent, message: wire.Acquire) -> None:
    """A message that does not belong here."""
    assert agent.channel is not None
    agent.channel.post(wire.Welcome(wire.PROTOCOL_VERSION, "again", 0, 0, []))


@pytest.mark.parametrize("fault", [garbage, second_welcome], ids=lambda fault: fault.__name__)
def test_an_agent_that_breaks_the_protocol_is_away(
    fault: Callable[[LyingAgent, wire.Acquire], None], machine: Machine
) -> None:
    """The connection ends, and what was asked for is loaded by the engine itself."""
    digest, _ = put_sample(machine.store)
    with lied_to(machine, fault) as (pool, _):
        assert hold(pool, digest).manifest == MANIFEST
        assert not pool.is_linked


def test_an_agent_that_is_silent_is_away(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process keeps its socket open: without a sign of life it is given up."""
    monkeypatch.setattr(wire, "SILENCE_S", 0.3)

    def stop_talking(agent: LyingAgent, message: wire.Acquire) -> None:
        assert agent.channel is not None
        agent.channel._sign_of_life_s = None

    digest, _ = put_sample(machine.store)
    with lied_to(machine, stop_talking) as (pool, _):
        assert pool.is_linked
        assert hold(pool, digest).manifest == MANIFEST


def test_an_unasked_answer_changes_nothing(machine: Machine) -> None:
    """Memory for a request that nobody made, or has given up, is closed."""

    def twice(agent: LyingAgent, message: wire.Acquire) -> None:
        memories = [sealed(encode_manifest(MANIFEST)), sealed(BLOB)]
        agent.send(message, memories, request=message.request + 1000)
        agent.send(message, memories)
        agent.send(message, memories)
        for memory in memories:
            memory.close()

    digest, _ = put_sample(machine.store)
    with lied_to(machine, twice) as (pool, _):
        before = len(os.listdir("/proc/self/fd"))
        assert hold(pool, digest).manifest == MANIFEST
        # What stays open is the one blob that is held.
        until(lambda: len(os.listdir("/proc/self/fd")) == before + 1)


# --- any order -----------------------------------------------------------------------------------
def one_step(pool: AgentPool, digests: list[Digest], source: random.Random) -> None:
    """One random action on one engine; what is used is looked at."""
    digest = source.choice(digests)
    match source.randrange(8):
        case 0:
            pool.prefetch(digest, time.monotonic() + 0.05)
        case 1:
            pool.evict(digest)
        case 2:
            pool.pin(digest, "operator", 1.0)
            pool.unpin(digest, "operator")
        case 3:
            pool.acquire(digest, time.monotonic() + 0.05)
            pool.release(digest)
        case _:
            pool.acquire(digest, time.monotonic() + 1.0)
            try:
                artifact, _ = pool.wait(digest, WAIT_S)
                (memory,) = artifact.memories.values()
                with map_memory(memory.reference) as mapping:
                    assert sha256_digest(mapping[:]) == artifact.manifest.payload[0].sha256
            finally:
                pool.release(digest)


def restarted(machine: Machine, agent: NodeAgent) -> NodeAgent:
    """Another agent in the place of one, with all engines connected."""
    agent.pool.check_invariants()
    agent.service.check_invariants()
    capacity_bytes, num_engines = agent.pool.capacity_bytes, agent.service.num_engines
    agent.stop()
    again = machine.start_agent(capacity_bytes)
    until(lambda: again.service.num_engines == num_engines)
    return again


def test_engines_in_any_order_keep_the_invariants(machine: Machine) -> None:
    """Three engines, six threads, little room, and an agent that is restarted under them.

    Every use finds the right bytes; in the end the agent counts no use but idle holds.
    """
    digests = [put_sample(machine.store, num_tokens=n, seed=n)[0] for n in range(1, 7)]
    capacity_bytes = 2 * sample_artifact(num_tokens=6)[0].payload_bytes
    agent = machine.start_agent(capacity_bytes)
    pools = [machine.start_engine(name) for name in ("one", "two", "three")]
    errors: list[BaseException] = []
    allowed = {FailureReason.CAPACITY, FailureReason.DEADLINE, FailureReason.NOT_READY}

    def work(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(NUM_STEPS):
            try:
                one_step(pools[seed % 3], digests, source)
            except Refusal as refusal:
                if refusal.reason not in allowed:
                    errors.append(refusal)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        agent = restarted(machine, agent)
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert [pool.num_distrusted for pool in pools] == [0, 0, 0]
    for pool in pools:
        assert not any(holding.num_users for holding in pool.holdings())
        pool.check_invariants()
        pool.close()
    until(lambda: agent.service.num_engines == 0)
    until(lambda: all(h.num_users == 0 for h in agent.pool.holdings()))
    agent.pool.check_invariants()
