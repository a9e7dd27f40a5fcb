"""The node agent as a process: kills on both sides, strangers, garbage, and its command."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import grpc
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cartridge_engine_ext import agent_wire as wire
from cartridge_engine_ext.agent import AgentOptions, NodeAgent, check_options
from cartridge_engine_ext.agent_pool import AgentPool
from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_engine_ext.errors import ConfigurationError, Refusal
from cartridge_engine_ext.sealed_memory import map_memory
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.residency import FailureReason
from cartridge_proto.stores import LocalStore
from cartridge_proto.v1 import control_pb2, control_pb2_grpc
from tests.engine_ext.stored_artifacts import WAIT_S, blob_path, put_sample
from tests.engine_ext.waiting import until
from tests.proto.sample_artifact import engine_of, sample_artifact

MANIFEST, BLOB = sample_artifact()
SIZE = len(BLOB)
ENGINE = engine_of(MANIFEST)
CAPACITY = 3 * SIZE

ENGINE_PROCESS = """
import sys, time
from pathlib import Path
from cartridge_engine_ext.agent_pool import AgentPool
from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_proto.stores import LocalStore
from tests.proto.sample_artifact import engine_of, sample_artifact
path, store, *digests = sys.argv[1:]
engine = engine_of(sample_artifact()[0])
own = ArtifactPool(store=LocalStore(Path(store)), engine=engine, capacity_bytes=1, num_loaders=1)
pool = AgentPool(path=Path(path), name="engine-process", engine=engine, own=own)
for digest in digests:
    pool.acquire(digest, time.monotonic() + 30)
    pool.wait(digest, 30)
print("holding", flush=True)
sys.stdin.read()
"""


def long_deadline() -> float:
    """A load deadline that no passing test reaches."""
    return time.monotonic() + WAIT_S


def first_line(stream: IO[str] | None) -> str:
    """What a process says first."""
    assert stream is not None
    return stream.readline().strip()


@dataclass
class Node:
    """A machine: a store, and the processes that a test starts on it."""

    folder: Path
    store: LocalStore
    stack: ExitStack

    @property
    def socket(self) -> Path:
        """Where the agent listens."""
        return self.folder / "agent.sock"

    @property
    def control_address(self) -> str:
        """Where the agent is controlled."""
        return f"unix:{self.folder}/control.sock"

    def start(self, arguments: list[str], **environment: str) -> "subprocess.Popen[str]":
        """A process that ends with the test."""
        # The tests' own folder, and whatever this process runs from.
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment,
        )
        self.stack.callback(end, process)
        return process

    def start_agent(self, *more: str, **environment: str) -> "subprocess.Popen[str]":
        """`cartridge-router agent`, ready."""
        arguments = [f"--listen=unix:{self.socket}", f"--store={self.store.root}"]
        process = self.start(
            ["-m", "cartridge_router", "agent", *arguments, f"--dram-bytes={CAPACITY}", *more],
            **environment,
        )
        line = first_line(process.stdout)
        assert line.startswith(f"serving engines at unix:{self.socket}"), end(process)
        return process

    def start_engine_process(self, *digests: Digest) -> "subprocess.Popen[str]":
        """A process that holds artifacts."""
        arguments = [str(self.socket), str(self.store.root), *digests]
        process = self.start(["-c", ENGINE_PROCESS, *arguments])
        assert first_line(process.stdout) == "holding", end(process)
        return process

    def start_pool(self) -> AgentPool:
        """An engine in this process."""
        own = ArtifactPool(store=self.store, engine=ENGINE, capacity_bytes=CAPACITY, num_loaders=1)
        pool = AgentPool(path=self.socket, name="here", engine=ENGINE, own=own)
        self.stack.callback(pool.close)
        assert pool.is_linked
        return pool

    def describe(self) -> control_pb2.DescribeResponse:
        """What the agent says of itself."""
        with grpc.insecure_channel(self.control_address) as channel:
            stub = control_pb2_grpc.CartridgeControlStub(channel)
            return stub.Describe(control_pb2.DescribeRequest(), timeout=WAIT_S)

    def users(self) -> dict[str, int]:
        """How many uses the agent counts of each artifact."""
        return {row.digest: row.num_users for row in self.describe().residents}


def end(process: "subprocess.Popen[str]") -> str:
    """Kill a process that still runs; what it said on stderr."""
    if process.stdout is None or process.stdout.closed:
        return ""
    process.kill()
    return process.communicate()[1]


def kill(process: "subprocess.Popen[str]") -> None:
    """Kill -9, and see it gone."""
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_S)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A machine on which nothing runs yet."""
    with ExitStack() as stack:
        yield Node(tmp_path, LocalStore(tmp_path / "store"), stack)


# --- kills ---------------------------------------------------------------------------------------
def test_a_killed_engine_leaves_its_bytes_and_no_hold(node: Node) -> None:
    """SIGKILL: its uses are gone, the bytes are there for the next one, nothing is read again."""
    node.start_agent("--control-address", node.control_address)
    digests = [put_sample(node.store, seed=seed)[0] for seed in (1, 2)]
    engine = node.start_engine_process(*digests)
    assert node.users() == dict.fromkeys(digests, 1)
    kill(engine)
    until(lambda: node.users() == dict.fromkeys(digests, 0))
    assert node.describe().dram_used_bytes == 2 * SIZE
    for number in range(1, 3):
        blob_path(node.store, sample_artifact(seed=number)[0]).unlink()
    pool = node.start_pool()
    for digest in digests:
        pool.acquire(digest, long_deadline())
        assert pool.wait(digest, WAIT_S)[0].digest == digest


def test_a_killed_agent_takes_nothing_that_is_held(node: Node) -> None:
    """SIGKILL: held bytes are readable, new ones are loaded here, a new agent is taken up."""
    agent = node.start_agent()
    pool = node.start_pool()
    held, new, newer = (put_sample(node.store, seed=seed)[0] for seed in (1, 2, 3))
    pool.acquire(held, long_deadline())
    artifact, _ = pool.wait(held, WAIT_S)
    kill(agent)
    until(lambda: not pool.is_linked)
    (memory,) = artifact.memories.values()
    with map_memory(memory.reference) as mapping:
        assert sha256_digest(mapping[:]) == artifact.manifest.payload[0].sha256
    pool.acquire(new, long_deadline())
    assert pool.wait(new, WAIT_S)[0].digest == new
    assert pool._own.holding(new) is not None
    node.start_agent()
    until(lambda: pool.is_linked)
    pool.acquire(newer, long_deadline())
    pool.wait(newer, WAIT_S)
    assert pool._own.holding(newer) is None
    pool.check_invariants()


def test_a_stopped_agent_is_given_up(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP: without a sign of life its engines load for themselves."""
    monkeypatch.setattr(wire, "SILENCE_S", 2 * wire.SIGN_OF_LIFE_S)
    agent = node.start_agent()
    pool = node.start_pool()
    digest, _ = put_sample(node.store)
    agent.send_signal(signal.SIGSTOP)
    pool.acquire(digest, long_deadline())
    assert pool.wait(digest, WAIT_S)[0].digest == digest
    assert pool._own.holding(digest) is not None
    agent.send_signal(signal.SIGCONT)


def test_memory_is_bounded_over_engines(node: Node) -> None:
    """Two engines want more than fits: the agent never holds more, and serves both."""
    node.start_agent("--control-address", node.control_address)
    pools = [node.start_pool(), node.start_pool()]
    digests = [put_sample(node.store, seed=seed)[0] for seed in range(1, 8)]
    for digest in digests:
        for pool in pools:
            pool.acquire(digest, long_deadline())
            assert pool.wait(digest, WAIT_S)[0].digest == digest
            pool.release(digest)
        assert node.describe().dram_used_bytes <= CAPACITY
    assert [pool.num_distrusted for pool in pools] == [0, 0]


# --- who may connect -----------------------------------------------------------------------------
def connect(path: Path) -> socket.socket:
    """A bare connection."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(WAIT_S)
    connection.connect(str(path))
    return connection


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other end ends the connection."""
    try:
        while connection.recv(wire.MAX_PACKET_BYTES):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.fixture
def agent(node: Node) -> Iterator[NodeAgent]:
    """An agent in this process."""
    options = AgentOptions(
        listen=f"unix:{node.socket}", store=str(node.store.root), dram_bytes=CAPACITY
    )
    agent = NodeAgent(options)
    yield agent
    agent.service.check_invariants()
    agent.pool.check_invariants()
    agent.stop()


def test_the_socket_is_for_its_owner_only(agent: NodeAgent, node: Node) -> None:
    """Mode 0600, and gone when the agent has stopped."""
    assert node.socket.stat().st_mode & 0o777 == 0o600
    agent.stop()
    assert not node.socket.exists()


def test_a_stranger_is_refused(node: Node) -> None:
    """A user that is not allowed is hung up on before anything is said, whatever the mode."""
    options = AgentOptions(
        listen=f"unix:{node.socket}",
        store=str(node.store.root),
        dram_bytes=CAPACITY,
        allowed_uids=frozenset({os.getuid() + 1}),
    )
    agent = NodeAgent(options)
    try:
        with connect(node.socket) as connection:
            with suppress(BrokenPipeError):  # the agent does not wait for a word
                connection.send(
                    msgspec.msgpack.encode(wire.Hello(wire.PROTOCOL_VERSION, "stranger"))
                )
            assert is_hung_up(connection)
        until(lambda: agent.service.num_refused == 1)
        assert agent.service.num_engines == 0
    finally:
        agent.stop()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_of_the_machine_is_refused(node: Node) -> None:
    """A real process of another user: by the mode of the socket, and by the kernel's word."""
    script = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    connection.connect(sys.argv[1])
except PermissionError:
    sys.exit(7)
sys.exit(8 if connection.recv(1000) == b"" else 0)
"""
    # Not pytest's folder: others may not enter that one.
    folder = Path(node.stack.enter_context(TemporaryDirectory()))
    folder.chmod(0o755)
    path = folder / "agent.sock"
    options = AgentOptions(listen=f"unix:{path}", store=str(folder), dram_bytes=CAPACITY)
    agent = NodeAgent(options)

    def status() -> int:
        arguments = [sys.executable, "-c", script, str(path)]
        return subprocess.run(arguments, timeout=WAIT_S, check=False).returncode

    try:
        assert status() == 7
        path.chmod(0o666)
        assert status() == 8
        assert agent.service.num_engines == 0
    finally:
        agent.stop()


def welcome(path: Path) -> socket.socket:
    """A bare connection that was let in."""
    connection = connect(path)
    connection.send(msgspec.msgpack.encode(wire.Hello(wire.PROTOCOL_VERSION, "bare")))
    greeting = msgspec.msgpack.decode(connection.recv(wire.MAX_PACKET_BYTES), type=wire.Welcome)
    assert greeting.capacity_bytes == CAPACITY
    return connection


FAULTS: dict[str, Callable[[socket.socket], object]] = {
    "garbage": lambda connection: connection.send(os.urandom(100)),
    "oversized": lambda connection: connection.send(bytes(wire.MAX_PACKET_BYTES + 1)),
    "the agent's own words": lambda connection: connection.send(
        msgspec.msgpack.encode(wire.Recall(1))
    ),
    "a second hello": lambda connection: connection.send(
        msgspec.msgpack.encode(wire.Hello(wire.PROTOCOL_VERSION, "again"))
    ),
    "not a digest": lambda connection: connection.send(
        msgspec.msgpack.encode(wire.Acquire(1, "sha256:..", 0, 0))
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_who_breaks_the_protocol_loses_the_connection_only(
    fault: str, agent: NodeAgent, node: Node
) -> None:
    """Its holds end with it; others, and the bytes, are untouched."""
    digest, _ = put_sample(node.store)
    pool = node.start_pool()
    pool.acquire(digest, long_deadline())
    artifact, _ = pool.wait(digest, WAIT_S)
    with welcome(node.socket) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * wire.MAX_PACKET_BYTES)
        connection.send(msgspec.msgpack.encode(wire.Acquire(1, digest, 1000, 0)))
        until(lambda: [h.num_users for h in agent.pool.holdings()] == [2])
        FAULTS[fault](connection)
        assert is_hung_up(connection)
    until(lambda: [h.num_users for h in agent.pool.holdings()] == [1])
    assert agent.service.num_engines == 1
    assert pool.poll(digest) is artifact


@pytest.mark.parametrize(
    "first",
    [
        wire.Hello(wire.PROTOCOL_VERSION + 1, "from the future"),
        wire.Acquire(1, sha256_digest(b"one"), 0, 0),
    ],
    ids=["other version", "no hello"],
)
def test_who_does_not_say_hello_is_not_let_in(
    first: wire.EngineMessage, agent: NodeAgent, node: Node
) -> None:
    """Another version, or something else first: hung up on, and nothing is loaded."""
    with connect(node.socket) as connection:
        connection.send(msgspec.msgpack.encode(first))
        assert is_hung_up(connection)
    assert agent.pool.holdings() == []


def test_messages_about_nothing_change_nothing(agent: NodeAgent, node: Node) -> None:
    """Releases and uses of holds that are not there, and artifacts that nobody has."""
    absent = sha256_digest(b"absent")
    with welcome(node.socket) as connection:
        for message in (
            wire.Release(99),
            wire.Use(99, is_busy=True),
            wire.Expect(absent, 1000),
            wire.Evict(absent),
            wire.Unpin(5, absent, "nobody"),
        ):
            connection.send(msgspec.msgpack.encode(message))
        decoder = msgspec.msgpack.Decoder(wire.AgentMessage)
        until(lambda: isinstance(decoder.decode(connection.recv(wire.MAX_PACKET_BYTES)), wire.Done))
        assert agent.pool.holdings() == []


# --- the command ---------------------------------------------------------------------------------
def test_the_agent_is_controlled_like_an_engine(node: Node) -> None:
    """What is about bytes is there; it has no model, and no requests to drain."""
    process = node.start_agent("--control-address", node.control_address, "--name=node-7")
    digest, _ = put_sample(node.store)
    with grpc.insecure_channel(node.control_address) as channel:
        stub = control_pb2_grpc.CartridgeControlStub(channel)
        events = stub.Watch(control_pb2.WatchRequest(), timeout=WAIT_S)
        assert next(events).synced
        stub.Prefetch(control_pb2.PrefetchRequest(digest=digest), timeout=WAIT_S)
        assert next(events).resident.tier == control_pb2.TIER_DRAM
        pin = control_pb2.PinRequest(digest=digest, owner="me", tier=control_pb2.TIER_DRAM)
        assert stub.Pin(pin, timeout=WAIT_S).resident.pinned
        assert next(events).resident.pinned
        found = stub.Lookup(control_pb2.LookupRequest(digests=[digest]), timeout=WAIT_S)
        assert found.residents[0].pinned_by == ["me"]
        evict = stub.Evict(control_pb2.EvictRequest(digest=digest), timeout=WAIT_S)
        assert evict.reason == "pinned by me"
        described = stub.Describe(control_pb2.DescribeRequest(), timeout=WAIT_S)
        assert (described.replica, described.ready, described.engine_json) == ("node-7", True, b"")
        with pytest.raises(grpc.RpcError) as caught:
            stub.Drain(control_pb2.DrainRequest(), timeout=WAIT_S)
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        events.cancel()
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0
    assert not node.socket.exists()


def test_what_engines_hold_idle_can_be_evicted(agent: NodeAgent, node: Node) -> None:
    """They are asked to give it back; what a request uses stays."""
    digest, _ = put_sample(node.store)
    pools = [node.start_pool(), node.start_pool()]
    for pool in pools:
        pool.acquire(digest, long_deadline())
        pool.wait(digest, WAIT_S)
    pools[0].release(digest)
    assert agent.pool.evict(digest) == "in use by 2 requests"
    assert pools[0].acquire(digest, long_deadline()) is True
    for pool in pools:
        pool.release(digest)
    until(lambda: agent.pool.evict(digest) is None)
    until(lambda: [pool.residents() for pool in pools] == [[], []])
    assert agent.pool.used_bytes == 0


def test_the_agent_keeps_artifacts_on_a_local_disk_too(node: Node) -> None:
    """With an nvme folder, bytes that left memory come from there; a restart finds them."""
    nvme = ["--nvme-dir", str(node.folder / "nvme"), "--nvme-bytes", str(1 << 20)]
    digest, manifest = put_sample(node.store)
    for expected in ("remote", "nvme"):
        agent = node.start_agent(*nvme)
        pool = node.start_pool()
        pool.acquire(digest, long_deadline())
        assert pool.wait(digest, WAIT_S)[0].loaded_from == expected
        pool.close()
        kill(agent)
        blob_path(node.store, manifest).unlink(missing_ok=True)


def metrics_of(address: str) -> dict[tuple[str, ...], float]:
    """All numbers at an address, by name and values of labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name.removeprefix("cartridge_agent_"), *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
            if not sample.name.endswith("_created")
        }


def test_metrics_tell_what_the_agent_holds(node: Node) -> None:
    """Bytes and artifacts by tier, loads by result, evictions, engines; every series from 0 on."""
    options = AgentOptions(
        listen=f"unix:{node.socket}",
        store=str(node.store.root),
        dram_bytes=2 * SIZE,
        nvme_dir=node.folder / "nvme",
        nvme_bytes=1 << 20,
        metrics_port=0,
    )
    agent = NodeAgent(options)
    node.stack.callback(agent.stop)
    assert agent.metrics is not None
    address = agent.metrics.address
    before = metrics_of(address)
    assert before["dram_capacity_bytes",] == 2 * SIZE
    assert {value for key, value in before.items() if key[-1] in ("dram", "nvme")} == {0}
    assert {key[1] for key in before if key[0] == "loads_total"} == {"loaded", *FailureReason}
    pool = node.start_pool()
    for seed in (1, 2, 3):
        digest, _ = put_sample(node.store, seed=seed)
        pool.acquire(digest, long_deadline())
        pool.wait(digest, WAIT_S)
        pool.release(digest)
    absent = sha256_digest(b"absent")
    pool.acquire(absent, long_deadline())
    with pytest.raises(Refusal):
        pool.wait(absent, WAIT_S)
    found = metrics_of(address)
    assert found["engines",] == 1
    assert found["loads_total", "loaded"] == 3
    assert found["loads_total", "unknown_artifact"] == 1
    assert found["resident_artifacts", "dram"] == 2
    assert found["resident_bytes", "dram"] == found["dram_used_bytes",] == 2 * SIZE
    assert found["evictions_total", "dram"] == 1
    assert found["resident_artifacts", "nvme"] == 3
    assert found["evictions_total", "nvme"] == 0
    pool.close()
    until(lambda: metrics_of(address)["engines",] == 0)


def test_metrics_are_off_or_at_one_port(node: Node) -> None:
    """On loopback unless said; the line that says so has the port; a taken one is named."""
    process = node.start(
        [
            *("-m", "cartridge_router", "agent", f"--listen=unix:{node.socket}"),
            *(f"--store={node.store.root}", "--dram-bytes=1000", "--metrics-port=0"),
        ]
    )
    line = first_line(process.stdout)
    _, _, address = line.partition(", metrics at ")
    assert address.startswith("127.0.0.1:")
    assert metrics_of(address)["engines",] == 0
    options = AgentOptions(
        listen=f"unix:{node.folder}/other.sock",
        store=str(node.store.root),
        dram_bytes=1000,
        metrics_port=int(address.rpartition(":")[2]),
    )
    with pytest.raises(ConfigurationError, match=f"metrics_port: {address}: Address already"):
        NodeAgent(options)
    agent = NodeAgent(replace(options, metrics_port=None))
    assert agent.metrics is None
    agent.stop()


def test_the_agent_needs_no_torch() -> None:
    """Its modules import without torch and vLLM."""
    script = (
        "import sys, cartridge_engine_ext.agent; print({'torch', 'vllm'} & set(sys.modules) or '')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=WAIT_S, capture_output=True, text=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"listen": "/run/agent.sock"}, "listen: '/run/agent.sock'; unix:/path"),
        ({"listen": "unix:agent.sock"}, "listen: "),
        ({"listen": "unix:/" + "x" * 108}, "at most 107 bytes"),
        ({"dram_bytes": 0}, "dram_bytes: 0 must be above 0"),
        ({"num_loaders": 0}, "num_loaders: 0 must be above 0"),
        ({"pinned_bytes": 101}, "pinned_bytes: 101 must be from 0 to dram_bytes"),
        ({"nvme_dir": Path("/nvme")}, "nvme_dir and nvme_bytes: both or neither"),
        ({"nvme_dir": Path("/nvme"), "nvme_bytes": 0}, "nvme_bytes: 0 must be above 0"),
        ({"metrics_port": 65536}, "metrics_port: 65536 must be from 0 to 65535"),
    ],
)
def test_bad_options_are_named(changes: dict[str, object], text: str) -> None:
    """Each by its name, with its bound."""
    values = {"listen": "unix:/run/agent.sock", "store": "/store", "dram_bytes": 100} | changes
    with pytest.raises(ConfigurationError) as caught:
        check_options(AgentOptions(**values))  # type: ignore[arg-type]
    assert text in str(caught.value)


def test_an_agent_that_cannot_start_says_why(node: Node) -> None:
    """No traceback: an unknown kind of store, a folder that is not there, a taken socket."""
    node.start_agent()
    other = node.folder / "file"
    other.write_text("not a socket")
    for listen, store, text in (
        (node.socket, "/store", "another agent listens"),
        (other, "/store", "is not a socket"),
        (node.folder / "absent" / "agent.sock", "/store", "No such file"),
        (node.folder / "new.sock", "ftp://store", "store: unknown kind of store ftp://"),
    ):
        process = node.start(
            [
                "-m",
                "cartridge_router",
                "agent",
                f"--listen=unix:{listen}",
                f"--store={store}",
                "--dram-bytes=1000",
            ]
        )
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 1
        assert text in errors
        assert "Traceback" not in errors


def test_a_socket_that_was_left_behind_is_replaced(node: Node) -> None:
    """After kill -9 the next agent takes the path over."""
    kill(node.start_agent())
    assert node.socket.exists()
    node.start_agent()
    assert node.start_pool().is_linked
