"""What engines and the node agent say to each other over one Unix socket, and how.

Owns the messages, their limits, and a channel that sends and receives them together with the
descriptors of sealed memory. Refuses what is oversized, unknown or out of range by ending the
connection.

Source: unix(7): SOCK_SEQPACKET keeps message boundaries, SCM_RIGHTS hands descriptors over,
SO_PEERCRED names who is at the other end.
"""

import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from cartridge_proto.digest import Digest, DigestText
from cartridge_proto.residency import FailureReason, Tier

PROTOCOL_VERSION: Final = 1
MAX_PACKET_BYTES: Final = 64 << 10
MAX_DESCRIPTORS: Final = 128
"""In one packet; the kernel takes up to 253 (SCM_MAX_FD)."""
MAX_RESIDENTS: Final = 512
"""Digests that a welcome lists."""
MAX_DEADLINE_MS: Final = 600_000
SIGN_OF_LIFE_S: Final = 1.0
"""The agent says something at least this often."""
SILENCE_S: Final = 5.0
"""An agent that is silent for so long is away; a peer that takes nothing for so long is cut off."""
MAX_UNSENT: Final = 10_000
"""Messages for a peer that does not read; one more, and it is cut off."""

RequestNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=MAX_DEADLINE_MS)]
Priority = Annotated[int, msgspec.Meta(ge=0, le=1000)]
OwnerText = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
NonNegative = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages: frozen, closed, told apart by their names."""


# --- engine to agent -----------------------------------------------------------------------------
class Hello(_Message, frozen=True):
    """The first message; `engine` is a name for logs."""

    version: int
    engine: Annotated[str, msgspec.Meta(max_length=128)]


class Acquire(_Message, frozen=True):
    """Hold an artifact, and send its memory. The number names the hold from then on.

    A later one of the same number only hurries it.
    """

    request: RequestNumber
    digest: DigestText
    deadline_ms: Milliseconds
    priority: Priority


class Release(_Message, frozen=True):
    """End a hold; the engine has closed its descriptors."""

    request: RequestNumber


class Use(_Message, frozen=True):
    """Whether a request of the engine uses what it holds; idle holds can be recalled."""

    request: RequestNumber
    is_busy: bool


class Expect(_Message, frozen=True):
    """A hint: an artifact will be wanted in so many milliseconds."""

    digest: DigestText
    in_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)]


class Pin(_Message, frozen=True):
    """Pin an artifact; answered by `Done`."""

    request: RequestNumber
    digest: DigestText
    owner: OwnerText
    deadline_ms: Milliseconds


class Unpin(_Message, frozen=True):
    """End an owner's pin; answered by `Done`."""

    request: RequestNumber
    digest: DigestText
    owner: OwnerText


class Evict(_Message, frozen=True):
    """Drop an artifact if no request of any engine uses it; not answered."""

    digest: DigestText


EngineMessage = Hello | Acquire | Release | Use | Expect | Pin | Unpin | Evict


# --- agent to engine -----------------------------------------------------------------------------
class Welcome(_Message, frozen=True):
    """The first answer: the agent's boot, its bounds, and what is ready."""

    version: int
    boot: Annotated[str, msgspec.Meta(max_length=64)]
    capacity_bytes: NonNegative
    pinned_bytes: NonNegative
    residents: Annotated[list[DigestText], msgspec.Meta(max_length=MAX_RESIDENTS)]


class Ready(_Message, frozen=True):
    """Memory of an acquired artifact: the manifest first, then its blobs in the manifest's order.

    One descriptor comes with each size. An artifact of many blobs takes several of these.
    """

    request: RequestNumber
    digest: DigestText
    sizes_bytes: Annotated[list[NonNegative], msgspec.Meta(max_length=MAX_DESCRIPTORS)]
    is_last: bool
    loaded_from: Tier


class Failed(_Message, frozen=True):
    """An acquired artifact cannot be had; the hold has ended."""

    request: RequestNumber
    reason: FailureReason
    detail: Annotated[str, msgspec.Meta(max_length=2048)]


class Done(_Message, frozen=True):
    """The end of a pin or an unpin; `reason` is `None` when it was done."""

    request: RequestNumber
    reason: FailureReason | None
    detail: Annotated[str, msgspec.Meta(max_length=2048)]


class Recall(_Message, frozen=True):
    """Room is needed: end a hold as soon as no request uses it."""

    request: RequestNumber


class Alive(_Message, frozen=True):
    """Nothing new."""


AgentMessage = Welcome | Ready | Failed | Done | Recall | Alive

MessageT = TypeVar("MessageT")


class Disconnected(Exception):
    """The other end is gone, is silent, or broke the protocol; the text says which."""


@dataclass(frozen=True)
class Credentials:
    """Who is at the other end, as the kernel says."""

    pid: int
    uid: int
    gid: int


class Channel(Generic[MessageT]):
    """One end of a connection that receives `MessageT`. Takes over the socket.

    `post` never waits: a thread of its own sends. `receive` is for one thread. With
    `sign_of_life_s` the channel says `Alive` when it has said nothing for so long.
    """

    def __init__(
        self, connection: socket.socket, expected: Any, sign_of_life_s: float | None = None
    ) -> None:
        self._socket = connection
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(expected)
        self._sign_of_life_s = sign_of_life_s
        self._unsent: queue.Queue[tuple[bytes, Sequence[int]] | None] = queue.Queue(MAX_UNSENT)
        seconds, microseconds = int(SILENCE_S), int(SILENCE_S % 1 * 1e6)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, microseconds)
        )
        self._is_closed = threading.Event()
        self._sender = threading.Thread(target=self._send_all, name="agent-sender", daemon=True)
        self._sender.start()

    @property
    def credentials(self) -> Credentials:
        """Who connected."""
        size = struct.calcsize("3i")
        return Credentials(
            *struct.unpack(
                "3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            )
        )

    def post(self, message: EngineMessage | AgentMessage, descriptors: Sequence[int] = ()) -> None:
        """Send soon, in order. Takes over the descriptors: they are closed once they are sent."""
        packet = msgspec.msgpack.encode(message)
        try:
            if self._is_closed.is_set():
                raise queue.Full
            self._unsent.put_nowait((packet, descriptors))
        except queue.Full:
            _close_all(descriptors)
            self.close()

    def receive(self, timeout_s: float | None) -> tuple[MessageT, list[int]]:
        """Wait for a message; the caller closes the descriptors that came with it.

        Raises:
            Disconnected: the other end is gone, silent, or said what this end does not take.
        """
        try:
            _set_receive_timeout(self._socket, timeout_s)
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, MAX_PACKET_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError as error:
            raise Disconnected(f"silent for {timeout_s} s") from error
        except OSError as error:
            raise Disconnected(str(error)) from error
        try:
            if not data:
                raise Disconnected("closed by the other end")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise Disconnected(f"a packet of more than {MAX_PACKET_BYTES} bytes")
            return self._decoder.decode(data), descriptors
        except msgspec.DecodeError as error:
            _close_all(descriptors)
            raise Disconnected(f"not a message: {error}") from error
        except BaseException:
            _close_all(descriptors)
            raise

    def close(self) -> None:
        """End the connection; both ends notice. Idempotent; does not wait."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(queue.Full):
            self._unsent.put_nowait(None)

    def join(self) -> None:
        """After `close`: wait for the sender, and give the socket back."""
        self._sender.join(SILENCE_S)
        self._socket.close()

    def _send_all(self) -> None:
        alive = msgspec.msgpack.encode(Alive())
        while not self._is_closed.is_set():
            try:
                unsent = self._unsent.get(timeout=self._sign_of_life_s)
            except queue.Empty:
                unsent = (alive, ())
            if unsent is None:
                break
            packet, descriptors = unsent
            try:
                socket.send_fds(self._socket, [packet], descriptors)
            except OSError:
                self.close()
            finally:
                _close_all(descriptors)
        while True:
            try:
                left = self._unsent.get_nowait()
            except queue.Empty:
                return
            if left is not None:
                _close_all(left[1])


def as_digest(text: str) -> Digest:
    """The digest in a decoded message, whose spelling was checked with it."""
    return Digest(text)


def _set_receive_timeout(connection: socket.socket, timeout_s: float | None) -> None:
    seconds = timeout_s or 0.0
    option = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, option)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
