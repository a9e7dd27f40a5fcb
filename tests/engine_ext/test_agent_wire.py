"""The channel between engines and the node agent: messages, descriptors, and what ends it."""

import os
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_engine_ext import agent_wire as wire
from cartridge_proto.digest import sha256_digest
from cartridge_proto.residency import FailureReason, Tier
from tests.engine_ext.stored_artifacts import WAIT_S
from tests.engine_ext.waiting import until

DIGEST = sha256_digest(b"one")
Engine = wire.Channel[wire.EngineMessage]
"""The agent's end: it receives what engines say."""


def num_descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ends() -> Iterator[tuple[Engine, socket.socket]]:
    """The agent's end of a connection, and the bare socket at the other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel: Engine = wire.Channel(ours, wire.EngineMessage)
    yield channel, theirs
    channel.close()
    channel.join()
    theirs.close()


def test_messages_come_in_order_with_their_descriptors(
    ends: tuple[Engine, socket.socket],
) -> None:
    """What is posted arrives whole; the sender's descriptors are closed, the receiver's work."""
    channel, theirs = ends
    reading, writing = os.pipe()
    message = wire.Ready(1, DIGEST, [5], is_last=True, loaded_from=Tier.NVME)
    channel.post(message, [writing])
    channel.post(wire.Recall(2))
    other: wire.Channel[wire.AgentMessage] = wire.Channel(theirs, wire.AgentMessage)
    received, descriptors = other.receive(WAIT_S)
    assert received == message
    assert other.receive(WAIT_S) == (wire.Recall(2), [])
    os.write(descriptors[0], b"hello")
    os.close(descriptors[0])
    with open(reading, "rb") as file:
        assert file.read() == b"hello"  # to its end: nobody else holds the other side
    other.close()
    other.join()


@pytest.mark.parametrize(
    "packet",
    [
        b"\x00",
        b"\xc1" * 100,
        msgspec.msgpack.encode({"type": "Acquire"}),
        msgspec.msgpack.encode({"type": "Format"}),
        msgspec.msgpack.encode(wire.Recall(1)),
        msgspec.msgpack.encode(
            {"type": "Release", "request": 1, "surprise": True},
        ),
        msgspec.msgpack.encode(wire.Acquire(1, "sha256:short", 0, 0)),
        msgspec.msgpack.encode(wire.Acquire(-1, DIGEST, 0, 0)),
        msgspec.msgpack.encode(wire.Acquire(1, DIGEST, wire.MAX_DEADLINE_MS + 1, 0)),
        msgspec.msgpack.encode(wire.Acquire(1, DIGEST, 0, 1001)),
        msgspec.msgpack.encode(wire.Pin(1, DIGEST, "o" * 129, 0)),
    ],
)
def test_what_is_no_message_is_told_from_one(
    packet: bytes, ends: tuple[Engine, socket.socket]
) -> None:
    """Garbage, another end's messages, unknown fields and numbers out of range."""
    channel, theirs = ends
    theirs.send(packet)
    with pytest.raises(wire.Disconnected, match="not a message"):
        channel.receive(WAIT_S)


def test_an_oversized_packet_is_refused(ends: tuple[Engine, socket.socket]) -> None:
    """One byte more than the limit, and descriptors with it are closed."""
    channel, theirs = ends
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * wire.MAX_PACKET_BYTES)
    before = num_descriptors()
    socket.send_fds(theirs, [bytes(wire.MAX_PACKET_BYTES + 1)], [theirs.fileno()])
    with pytest.raises(wire.Disconnected, match=f"more than {wire.MAX_PACKET_BYTES} bytes"):
        channel.receive(WAIT_S)
    assert num_descriptors() == before


def test_too_many_descriptors_are_refused(ends: tuple[Engine, socket.socket]) -> None:
    """More than are taken end the connection, and none stays open."""
    channel, theirs = ends
    before = num_descriptors()
    many = [theirs.fileno()] * (wire.MAX_DESCRIPTORS + 8)
    socket.send_fds(theirs, [msgspec.msgpack.encode(wire.Release(1))], many)
    with pytest.raises(wire.Disconnected):
        channel.receive(WAIT_S)
    assert num_descriptors() == before


def test_silence_and_hanging_up_end_a_wait(ends: tuple[Engine, socket.socket]) -> None:
    """Each says what happened."""
    channel, theirs = ends
    with pytest.raises(wire.Disconnected, match=r"silent for 0\.01 s"):
        channel.receive(0.01)
    theirs.close()
    with pytest.raises(wire.Disconnected, match="closed by the other end"):
        channel.receive(WAIT_S)


def test_a_closed_channel_takes_no_descriptors(ends: tuple[Engine, socket.socket]) -> None:
    """What is posted too late is dropped, its descriptors closed."""
    channel, _ = ends
    channel.close()
    before = num_descriptors()
    channel.post(wire.Recall(1), [os.dup(0)])
    assert num_descriptors() == before


def test_a_peer_that_does_not_read_is_cut_off(
    ends: tuple[Engine, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Posting never waits; one message more than is kept ends the connection."""
    channel, theirs = ends
    reading, writing = os.pipe()
    for _ in range(2 * wire.MAX_UNSENT):
        channel.post(wire.Failed(1, FailureReason.INTERNAL, "x" * 2000), [os.dup(writing)])
        if channel._is_closed.is_set():
            break
    assert channel._is_closed.is_set()
    channel.join()
    theirs.close()
    os.close(writing)
    with open(reading, "rb") as file:
        assert file.read() == b""  # every duplicate was closed


def test_a_quiet_channel_gives_signs_of_life() -> None:
    """With nothing to say it says so."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    speaking: Engine = wire.Channel(ours, wire.EngineMessage, 0.01)
    hearing: wire.Channel[wire.AgentMessage] = wire.Channel(theirs, wire.AgentMessage)
    try:
        for _ in range(3):
            assert hearing.receive(WAIT_S) == (wire.Alive(), [])
    finally:
        for channel in (speaking, hearing):
            channel.close()
            channel.join()


def test_the_kernel_names_the_peer(ends: tuple[Engine, socket.socket]) -> None:
    """Process and user of the other end; here our own."""
    credentials = ends[0].credentials
    assert (credentials.pid, credentials.uid) == (os.getpid(), os.getuid())


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    """The decoder raises its own errors only."""
    decoder = msgspec.msgpack.Decoder(wire.EngineMessage)
    try:
        decoder.decode(data)
    except msgspec.DecodeError:
        return


def test_closing_wakes_a_receiver(ends: tuple[Engine, socket.socket]) -> None:
    """A thread that waits for a message learns of the end at once."""
    channel, _ = ends
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(wire.Disconnected):
            channel.receive(None)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    channel.close()
    assert ended.wait(WAIT_S)
    thread.join(WAIT_S)
    until(lambda: not thread.is_alive())
