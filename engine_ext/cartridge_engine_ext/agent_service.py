"""The node agent's side of its socket: engines hold artifacts of one pool by their connections.

Owns the listening socket, who may connect, and what each connection holds. Refuses other users of
the machine, and knows neither engines' identities nor tensors. A hold ends with its connection.
"""

import contextlib
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cartridge_engine_ext import agent_wire as wire
from cartridge_engine_ext.dram_pool import DramPool
from cartridge_engine_ext.dram_tier import Artifact
from cartridge_engine_ext.errors import ConfigurationError, Refusal
from cartridge_engine_ext.ordered_work import OrderedWork
from cartridge_engine_ext.sealed_memory import SealedMemory
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import encode_manifest
from cartridge_proto.residency import FailureReason, Tier

logger = logging.getLogger(__name__)

MAX_ENGINES = 64
MAX_HOLDS = 4096
"""Of one connection."""
HELLO_TIMEOUT_S = 5.0
NUM_SLOW_THREADS = 4
_MAX_DETAIL = 2000


@dataclass
class _Hold:
    """One artifact that one engine holds, or waits for; one use of the pool."""

    digest: Digest
    was_ready: bool = False
    is_answered: bool = False
    is_busy: bool = True
    is_recalled: bool = False


@dataclass(eq=False)
class _Engine:
    """One connection."""

    channel: wire.Channel[wire.EngineMessage]
    credentials: wire.Credentials
    name: str = ""
    holds: dict[int, _Hold] = field(default_factory=dict)
    """By the number of the request that made it."""


class AgentService:
    """Serves one pool at a Unix socket until `stop`.

    Make the pool with this object's `on_ready`, `on_failed` and `on_shortage`, then `start`.

    Args:
        path: of the socket; made with mode 0600, and replaced when nobody listens at it.
        boot: names this start of the agent.
        allowed_uids: users that may connect; default: this process's own.
    """

    def __init__(
        self, path: Path, *, boot: str, allowed_uids: Collection[int] | None = None
    ) -> None:
        self._path = path
        self._boot = boot
        self._allowed_uids = frozenset({os.getuid()} if allowed_uids is None else allowed_uids)
        self._lock = threading.RLock()
        self._given_back = threading.Condition(self._lock)
        self._engines: set[_Engine] = set()
        self._threads: set[threading.Thread] = set()
        self._pool: DramPool | None = None
        self._slow = OrderedWork(NUM_SLOW_THREADS, "agent-slow")
        self._is_stopping = False
        self.num_refused = 0
        """Connections that were refused or ended for what they said."""
        self._listener = _listen(path)
        self._acceptor = threading.Thread(target=self._accept_all, name="agent-accept", daemon=True)

    def start(self, pool: DramPool) -> None:
        """Take engines from now on."""
        self._pool = pool
        self._acceptor.start()

    def stop(self) -> None:
        """End all connections and remove the socket; what engines hold stays theirs."""
        with self._lock:
            self._is_stopping = True
            engines = list(self._engines)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for engine in engines:
            engine.channel.close()
        for thread in [self._acceptor, *self._threads]:
            if thread.is_alive():
                thread.join(wire.SILENCE_S)
        self._slow.stop()

    @property
    def num_engines(self) -> int:
        """Connections now."""
        with self._lock:
            return len(self._engines)

    def check_invariants(self) -> None:
        """For tests: what is ready has as many users as there are holds on it."""
        with self._lock:
            for holding in self._the_pool.holdings():
                num_holds = len(self._holds_on(holding.digest))
                assert holding.num_users >= num_holds, holding  # noqa: S101
            assert len(self._engines) <= MAX_ENGINES  # noqa: S101

    # --- what the pool tells ---------------------------------------------------------------------
    def on_ready(self, digest: Digest, size_bytes: int) -> None:
        """An artifact can be used."""
        self._answer_all(digest)

    def on_failed(self, digest: Digest, reason: FailureReason) -> None:
        """A load has failed."""
        self._answer_all(digest)

    def on_shortage(self) -> None:
        """A load waits for room: ask for the coldest artifacts that no request uses."""
        with self._lock:
            missing_bytes, used = self._the_pool.shortage()
            for holding in used:
                if missing_bytes <= 0:
                    return
                found = self._holds_on(holding.digest)
                if holding.num_users != len(found) or any(hold.is_busy for *_, hold in found):
                    continue
                missing_bytes -= holding.size_bytes or 0
                self._recall(found)

    def take_back(self, digest: Digest, timeout_s: float) -> None:
        """Ask for an artifact that engines hold idle, and wait until they have given it back.

        What a request uses is not asked for.
        """
        with self._lock:
            found = self._holds_on(digest)
            if any(hold.is_busy for *_, hold in found):
                return
            self._recall(found)
            self._given_back.wait_for(lambda: not self._holds_on(digest), timeout_s)

    def _recall(self, found: "list[tuple[_Engine, int, _Hold]]") -> None:
        """Called with the lock held."""
        for engine, request, hold in found:
            if not hold.is_recalled:
                hold.is_recalled = True
                engine.channel.post(wire.Recall(request))

    def _holds_on(self, digest: Digest) -> list[tuple[_Engine, int, _Hold]]:
        """All holds on an artifact. Called with the lock held."""
        return [
            (engine, request, hold)
            for engine in self._engines
            for request, hold in engine.holds.items()
            if hold.digest == digest
        ]

    @property
    def _the_pool(self) -> DramPool:
        assert self._pool is not None, "not started"  # noqa: S101
        return self._pool

    # --- connections -----------------------------------------------------------------------------
    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._is_stopping:
                    return
                # Out of descriptors: engines go on with what they have, and try again.
                logger.exception("an engine could not be let in")
                threading.Event().wait(wire.SIGN_OF_LIFE_S)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="agent-engine", daemon=True
            )
            with self._lock:
                self._threads = {other for other in self._threads if other.is_alive()} | {thread}
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection, from its first message to its end."""
        channel: wire.Channel[wire.EngineMessage] = wire.Channel(
            connection, wire.EngineMessage, wire.SIGN_OF_LIFE_S
        )
        engine = _Engine(channel, channel.credentials)
        try:
            self._let_in(engine)
            while True:
                message, descriptors = channel.receive(None)
                for descriptor in descriptors:
                    os.close(descriptor)
                self._take(engine, message)
        except wire.Disconnected as end:
            logger.info("engine %s (pid %d): %s", engine.name, engine.credentials.pid, end)
        except Exception:
            logger.exception("engine %s (pid %d)", engine.name, engine.credentials.pid)
        finally:
            self._let_go(engine)
            channel.close()
            channel.join()

    def _let_in(self, engine: _Engine) -> None:
        if engine.credentials.uid not in self._allowed_uids:
            self._refuse(f"user {engine.credentials.uid} may not connect")
        hello, descriptors = engine.channel.receive(HELLO_TIMEOUT_S)
        for descriptor in descriptors:
            os.close(descriptor)
        if not isinstance(hello, wire.Hello) or hello.version != wire.PROTOCOL_VERSION:
            self._refuse(f"the first message is {hello}")
        assert isinstance(hello, wire.Hello)  # noqa: S101
        engine.name = hello.engine
        with self._lock:
            if self._is_stopping or len(self._engines) >= MAX_ENGINES:
                self._refuse(f"{MAX_ENGINES} engines are connected")
            self._engines.add(engine)
            residents = [artifact.digest for artifact, _ in self._the_pool.residents()]
            engine.channel.post(
                wire.Welcome(
                    version=wire.PROTOCOL_VERSION,
                    boot=self._boot,
                    capacity_bytes=self._the_pool.capacity_bytes,
                    pinned_bytes=self._the_pool.pinned_bytes,
                    residents=list(residents[-wire.MAX_RESIDENTS :]),
                )
            )
        logger.info("engine %s (pid %d) connected", engine.name, engine.credentials.pid)

    def _refuse(self, why: str) -> None:
        self.num_refused += 1
        raise wire.Disconnected(why)

    def _let_go(self, engine: _Engine) -> None:
        """End all holds of a connection."""
        with self._lock:
            self._engines.discard(engine)
            holds, engine.holds = list(engine.holds.values()), {}
        for hold in holds:
            self._the_pool.release(hold.digest)
        with self._lock:
            self._given_back.notify_all()

    # --- messages --------------------------------------------------------------------------------
    def _take(self, engine: _Engine, message: wire.EngineMessage) -> None:
        match message:
            case wire.Acquire():
                self._acquire(engine, message)
            case wire.Release(request):
                self._release(engine, request)
            case wire.Use(request, is_busy):
                self._note_use(engine, request, is_busy=is_busy)
            case wire.Expect(digest, in_ms):
                at_s = time.monotonic() + in_ms / 1000
                self._the_pool.expect(wire.as_digest(digest), at_s)
            case wire.Pin(request, digest, owner, deadline_ms):
                pin = _pinning(self._the_pool, wire.as_digest(digest), owner, deadline_ms / 1000)
                self._slow.submit((digest, owner), partial(_answer, engine.channel, request, pin))
            case wire.Unpin(request, digest, owner):
                unpin = partial(
                    _answer,
                    engine.channel,
                    request,
                    _unpinning(self._the_pool, wire.as_digest(digest), owner),
                )
                if self._slow.is_idle((digest, owner)):
                    unpin()  # waits for nothing
                else:
                    # Behind the pin that it ends.
                    self._slow.submit((digest, owner), unpin)
            case wire.Evict(digest):
                # May wait for other engines, and for what this one is about to say.
                self._slow.submit(digest, partial(self._the_pool.evict, wire.as_digest(digest)))
            case wire.Hello():
                self._refuse("a second hello")

    def _acquire(self, engine: _Engine, message: wire.Acquire) -> None:
        digest, request = wire.as_digest(message.digest), message.request
        deadline_s = time.monotonic() + message.deadline_ms / 1000
        with self._lock:
            hold = engine.holds.get(request)
            if hold is not None:
                # Only hurried: one hold is one use, however often it was asked for.
                if hold.digest == digest and not hold.is_answered:
                    self._the_pool.acquire(digest, deadline_s, message.priority)
                    self._the_pool.release(digest)
                return
            if len(engine.holds) >= MAX_HOLDS:
                detail = f"holds: the limit is {MAX_HOLDS} for each engine"
                engine.channel.post(wire.Failed(request, FailureReason.CAPACITY, detail))
                return
            # Under the lock: a hold that is seen is a use that is counted.
            is_ready = self._the_pool.acquire(digest, deadline_s, message.priority)
            engine.holds[request] = _Hold(digest, was_ready=is_ready)
        if is_ready:
            self._answer_all(digest)

    def _release(self, engine: _Engine, request: int) -> None:
        with self._lock:
            hold = engine.holds.pop(request, None)
            if hold is not None:
                self._the_pool.release(hold.digest)
                self._given_back.notify_all()

    def _note_use(self, engine: _Engine, request: int, *, is_busy: bool) -> None:
        with self._lock:
            hold = engine.holds.get(request)
            if hold is None:
                return
            hold.is_busy = is_busy
            if is_busy:
                # The pool's policy sees every use, also of what the engine held all along.
                self._the_pool.acquire(hold.digest, time.monotonic())
                self._the_pool.release(hold.digest)
        self.on_shortage()

    def _answer_all(self, digest: Digest) -> None:
        """Tell every engine that waits for an artifact how its load has ended."""
        num_failed = 0
        with self._lock:
            for engine, request, hold in self._holds_on(digest):
                if hold.is_answered:
                    continue
                try:
                    artifact = self._the_pool.poll(digest)
                    if artifact is None:
                        continue  # loading anew: that load answers
                    # Under the lock: while the hold is there, the artifact is not closed.
                    tier = Tier.DRAM if hold.was_ready else artifact.loaded_from
                    _send(engine.channel, request, artifact, tier)
                    hold.is_answered = True
                except Refusal as refusal:
                    del engine.holds[request]
                    num_failed += 1
                    detail = refusal.detail[:_MAX_DETAIL]
                    engine.channel.post(wire.Failed(request, refusal.reason, detail))
        for _ in range(num_failed):
            self._the_pool.release(digest)


def _send(
    channel: wire.Channel[wire.EngineMessage], request: int, artifact: Artifact, tier: Tier
) -> None:
    """Send an artifact's memory.

    Raises:
        Refusal: this process has no descriptor or memory left for it.
    """
    data = encode_manifest(artifact.manifest)

    def fill(buffer: memoryview) -> None:
        buffer[:] = data

    duplicates: list[int] = []
    try:
        manifest = SealedMemory(len(data), fill)
        try:
            blobs = [artifact.memories[blob.sha256] for blob in artifact.manifest.payload]
            memories = [manifest, *blobs]
            for memory in memories:
                duplicates.append(memory.duplicate())  # noqa: PERF401 - closed when one fails
        finally:
            manifest.close()
    except OSError as error:
        for descriptor in duplicates:
            os.close(descriptor)
        raise Refusal(FailureReason.INTERNAL, f"handing over: {error.strerror}") from error
    for begin in range(0, len(memories), wire.MAX_DESCRIPTORS):
        end = begin + wire.MAX_DESCRIPTORS
        message = wire.Ready(
            request=request,
            digest=artifact.digest,
            sizes_bytes=[memory.size_bytes for memory in memories[begin:end]],
            is_last=end >= len(memories),
            loaded_from=tier,
        )
        channel.post(message, duplicates[begin:end])


def _pinning(
    pool: DramPool, digest: Digest, owner: str, timeout_s: float
) -> Callable[[], Refusal | None]:
    def pin() -> Refusal | None:
        try:
            pool.pin(digest, owner, timeout_s)
        except Refusal as refusal:
            return refusal
        return None

    return pin


def _unpinning(pool: DramPool, digest: Digest, owner: str) -> Callable[[], Refusal | None]:
    def unpin() -> Refusal | None:
        if pool.unpin(digest, owner):
            return None
        return Refusal(FailureReason.INVALID_MESSAGE, f"not pinned by {owner}")

    return unpin


def _answer(
    channel: wire.Channel[wire.EngineMessage], request: int, action: Callable[[], Refusal | None]
) -> None:
    try:
        refusal = action()
    except Exception as error:
        logger.exception("a pin failed")
        refusal = Refusal(FailureReason.INTERNAL, f"{type(error).__name__}: {error}")
    reason = None if refusal is None else refusal.reason
    detail = "" if refusal is None else refusal.detail[:_MAX_DETAIL]
    channel.post(wire.Done(request, reason, detail))


def _listen(path: Path) -> socket.socket:
    """A socket of mode 0600 at a path.

    Raises:
        ConfigurationError: somebody listens there, or something else is there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigurationError(f"listen: {path} is there, and is not a socket")
            if _is_answered(path):
                raise ConfigurationError(f"listen: another agent listens at {path}")
            path.unlink()
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(MAX_ENGINES)
    except OSError as error:
        listener.close()
        raise ConfigurationError(f"listen: {path}: {error.strerror or error}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(wire.SILENCE_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
