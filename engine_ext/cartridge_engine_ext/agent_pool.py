"""The dram tier of an engine beside a node agent: the agent's memory, or its own without one.

Owns what this engine holds of the agent, verifies it once, and keeps it while it is idle until the
agent wants it back. Refuses to trust the agent (bytes, digests, seals, fitness are checked here)
and to wait for it: while it is away, artifacts are loaded by the engine's own pool.
"""

import contextlib
import hashlib
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path

from cartridge_engine_ext import agent_wire as wire
from cartridge_engine_ext.artifact_pool import check_finite, refuse_unfit
from cartridge_engine_ext.dram_pool import MAX_PREFETCHES
from cartridge_engine_ext.dram_tier import (
    OPPORTUNISTIC,
    REQUEST_PRIORITY,
    Artifact,
    DramTier,
    Holding,
)
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.sealed_memory import ReceivedMemory, SealedMemory, map_memory
from cartridge_engine_ext.thread_priority import yield_to_serving
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import InvalidManifest, Manifest, decode_manifest
from cartridge_proto.residency import FailureReason, Tier
from cartridge_proto.safetensors_header import InvalidPayload, check_blob

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
RETRY_S = 0.25
MAX_RETRY_S = 2.0
WARM_DEADLINE_S = 60.0


class _State(Enum):
    ASKED = auto()
    """The agent was asked."""
    ARRIVED = auto()
    """Its memory is here, and is being verified."""
    READY = auto()
    FAILED = auto()
    OWN = auto()
    """The engine's own pool has it or loads it."""


@dataclass(eq=False)
class _Link:
    """One connection to an agent."""

    channel: wire.Channel[wire.AgentMessage]
    welcome: wire.Welcome
    answers: dict[int, "Future[wire.Done]"] = field(default_factory=dict)
    pins: defaultdict[Digest, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Owners of the pins that this engine asked for over it; they end with it."""


@dataclass(eq=False)
class _Held:
    """One artifact that this engine uses, or keeps."""

    digest: Digest
    state: _State
    request: int
    link: _Link | None
    deadline_s: float
    priority: int
    asked_s: float
    num_users: int = 0
    memories: list[SealedMemory] = field(default_factory=list)
    loaded_from: Tier = Tier.DRAM
    artifact: Artifact | None = None
    failure: Refusal | None = None
    load_s: float = 0.0
    is_recalled: bool = False
    is_prefetch: bool = False


class Distrust(Exception):
    """The agent sent something that is not the artifact."""


class AgentPool:
    """A `DramTier` over the agent at `path`, and over `own` while the agent is away.

    Give `on_ready`, `on_evict` and `on_pin` to both pools alike: an artifact may be in both for a
    while. Closes `own` with itself.
    """

    def __init__(
        self,
        *,
        path: Path,
        name: str,
        engine: EngineIdentity,
        own: DramTier,
        num_verifiers: int = 2,
        on_ready: Callable[[Digest, int], None] = lambda digest, size_bytes: None,
        on_evict: Callable[[Digest], None] = lambda digest: None,
        on_pin: Callable[[Digest, bool], None] = lambda digest, is_pinned: None,
    ) -> None:
        self._path = path
        self._name = name
        self._engine = engine
        self._own = own
        self._on_ready = on_ready
        self._on_evict = on_evict
        self._on_pin = on_pin
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._pin_lock = threading.Lock()
        self._told_pinned: set[Digest] = set()
        self._held: OrderedDict[Digest, _Held] = OrderedDict()
        self._link: _Link | None = None
        self._requests = itertools.count(1)
        self._was_tried = False
        self._is_closed = False
        self.num_distrusted = 0
        """Artifacts of the agent that were not what they should be."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._verifiers = [
            threading.Thread(target=self._run_work, name=f"agent-verifier-{n}", daemon=True)
            for n in range(num_verifiers)
        ]
        self._linker = threading.Thread(target=self._run_links, name="agent-link", daemon=True)
        for thread in [*self._verifiers, self._linker]:
            thread.start()
        with self._lock:
            self._changed.wait_for(lambda: self._was_tried, CONNECT_TIMEOUT_S)

    # --- bounds ----------------------------------------------------------------------------------
    @property
    def is_linked(self) -> bool:
        """Whether an agent is there."""
        with self._lock:
            return self._link is not None

    @property
    def capacity_bytes(self) -> int:
        """The agent's and the own bound."""
        with self._lock:
            agents = self._link.welcome.capacity_bytes if self._link is not None else 0
        return agents + self._own.capacity_bytes

    @property
    def pinned_bytes(self) -> int:
        """The agent's and the own bound of pins."""
        with self._lock:
            agents = self._link.welcome.pinned_bytes if self._link is not None else 0
        return agents + self._own.pinned_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that this engine holds of the agent, and its own."""
        with self._lock:
            ours = sum(
                held.artifact.size_bytes
                for held in self._held.values()
                if held.artifact is not None
            )
        return ours + self._own.used_bytes

    # --- use -------------------------------------------------------------------------------------
    def acquire(self, digest: Digest, deadline_s: float, priority: int = REQUEST_PRIORITY) -> bool:
        """Use an artifact until `release`; returns whether it was ready already."""
        with self._lock:
            held = self._held.get(digest)
            if held is None or held.state is _State.FAILED:
                num_users = held.num_users if held is not None else 0
                held = self._ask(digest, deadline_s, priority, num_users)
            elif held.state is _State.ASKED and (
                deadline_s > held.deadline_s or priority > held.priority
            ):
                held.deadline_s = max(held.deadline_s, deadline_s)
                held.priority = max(held.priority, priority)
                self._post_acquire(held)
            held.num_users += 1
            self._held.move_to_end(digest)
            if held.state is _State.OWN:
                return self._own.acquire(digest, deadline_s, priority)
            if held.state is _State.READY and held.num_users == 1:
                self._post(held, wire.Use(held.request, is_busy=True))
            return held.state is _State.READY

    def release(self, digest: Digest) -> None:
        """End one use."""
        with self._lock:
            held = self._held.get(digest)
            if held is None or held.num_users == 0:
                return
            held.num_users -= 1
            if held.state is _State.OWN:
                self._own.release(digest)
            if held.num_users:
                return
            if held.state is _State.READY:
                self._rest(held)
            elif held.state in (_State.OWN, _State.FAILED):
                del self._held[digest]
            elif held.state is _State.ASKED and not held.is_prefetch:
                self._forget(held)

    def poll(self, digest: Digest) -> Artifact | None:
        """The artifact when it is ready, `None` while it comes.

        Raises:
            Refusal: it cannot be had, or nobody asked for it.
        """
        with self._lock:
            held = self._held.get(digest)
            if held is None:
                raise Refusal(FailureReason.INTERNAL, f"{digest} was not acquired")
            if held.failure is not None:
                raise held.failure
            if held.state is not _State.OWN:
                return held.artifact if held.state is _State.READY else None
        return self._own.poll(digest)

    def wait(self, digest: Digest, timeout_s: float) -> tuple[Artifact, float]:
        """Block until an acquired artifact is ready; also its load time in seconds.

        Raises:
            Refusal: it cannot be had, or not in time.
        """
        end_s = time.monotonic() + timeout_s
        late = Refusal(FailureReason.DEADLINE, f"{digest} was not loaded in {timeout_s:.3f} s")
        with self._lock:
            held = self._held.get(digest)
            if held is None:
                raise late
            if not self._changed.wait_for(
                lambda: held.state not in (_State.ASKED, _State.ARRIVED), timeout_s
            ):
                raise late
            if held.failure is not None:
                raise held.failure
            if held.artifact is not None:
                return held.artifact, held.load_s
        return self._own.wait(digest, max(0.0, end_s - time.monotonic()))

    def prefetch(self, digest: Digest, deadline_s: float, priority: int = OPPORTUNISTIC) -> None:
        """Bring an artifact that nobody uses yet, and keep it verified.

        Raises:
            Refusal: too many are under way.
        """
        with self._lock:
            if digest in self._held:
                self._held[digest].is_prefetch = True
                return
            if self._is_own(digest):
                return
            if self._link is not None:
                num_coming = sum(1 for held in self._held.values() if held.state is _State.ASKED)
                if num_coming >= MAX_PREFETCHES:
                    raise Refusal(
                        FailureReason.CAPACITY,
                        f"prefetches: the limit is {MAX_PREFETCHES} at a time",
                    )
                self._ask(digest, deadline_s, priority, 0).is_prefetch = True
                return
        self._own.prefetch(digest, deadline_s, priority)

    def expect(self, digest: Digest, at_s: float) -> None:
        """A hint for eviction, passed on to both pools."""
        in_ms = int(max(0.0, at_s - time.monotonic()) * 1000)
        with self._lock:
            if self._link is not None and in_ms <= 86_400_000:
                self._link.channel.post(wire.Expect(digest, in_ms))
        self._own.expect(digest, at_s)

    def adopt(self, artifact: Artifact) -> None:
        """Take in an artifact of this engine alone; it stays in its own pool.

        Raises:
            Refusal: there is no room for it.
        """
        self._own.adopt(artifact)

    # --- control ---------------------------------------------------------------------------------
    def pin(
        self, digest: Digest, owner: str, timeout_s: float, priority: int = REQUEST_PRIORITY
    ) -> tuple[Artifact, float]:
        """Load an artifact, and keep it in the agent's memory until `owner` unpins it.

        A pin is the agent's: it is for all engines of the machine, and ends with the agent. What is
        in the own pool is pinned there.

        Raises:
            Refusal: it cannot be had in time, a limit of pins is reached, or the agent went away.
        """
        end_s = time.monotonic() + timeout_s
        self.acquire(digest, end_s, priority)
        try:
            artifact, load_s = self.wait(digest, timeout_s)
            with self._lock:
                held, link = self._held.get(digest), self._link
            if held is None:
                raise _closed()
            left_s = max(0.0, end_s - time.monotonic())
            if held.state is _State.OWN:
                self._own.pin(digest, owner, left_s, priority)
            else:
                self._pin_there(link, digest, owner, left_s)
        finally:
            self.release(digest)
        return artifact, load_s

    def _pin_there(self, link: _Link | None, digest: Digest, owner: str, timeout_s: float) -> None:
        """Pin an artifact in the agent at the other end of a link."""
        deadline_ms = _milliseconds(timeout_s)
        done = self._question(
            link, lambda request: wire.Pin(request, digest, owner, deadline_ms), timeout_s
        )
        if done.reason is not None:
            raise Refusal(done.reason, done.detail)
        with self._lock:
            if link is None or link is not self._link:
                # It was made, and has ended with the link: who asked must know.
                raise _away()
            link.pins[digest].add(owner)
        self._tell_pin(digest)

    def unpin(self, digest: Digest, owner: str) -> bool:
        """End an owner's pin, in the agent or here; returns whether there was one."""
        with self._lock:
            link = self._link
            if link is not None:
                _discard(link.pins, digest, owner)
        self._tell_pin(digest)
        was_ours = self._own.unpin(digest, owner)
        try:
            done = self._question(
                link, lambda request: wire.Unpin(request, digest, owner), CONNECT_TIMEOUT_S
            )
        except Refusal:
            return was_ours
        return was_ours or done.reason is None

    def evict(self, digest: Digest) -> str | None:
        """Give an artifact back, and let the agent drop it if no request of any engine uses it."""
        with self._lock:
            held = self._held.get(digest)
            if held is None or held.state is _State.OWN:
                return self._own.evict(digest)
            if held.state in (_State.ASKED, _State.ARRIVED):
                return "loading"
            if held.state is _State.FAILED:
                return "not resident"
            if held.num_users:
                return f"in use by {held.num_users} requests"
            if owners := self._pinned_by(digest):
                return f"pinned by {', '.join(owners)}"
            del self._held[digest]
        self._dispose(held, wire.Evict(digest))
        return None

    def residents(self) -> list[tuple[Artifact, int]]:
        """Ready artifacts here and of the agent, and how many use each."""
        with self._lock:
            ours = [
                (held.artifact, held.num_users)
                for held in self._held.values()
                if held.artifact is not None and held.state is _State.READY
            ]
        return ours + self._own.residents()

    def holding(self, digest: Digest) -> Holding | None:
        """What is known of one artifact."""
        with self._lock:
            held = self._held.get(digest)
            if held is not None and held.state not in (_State.OWN, _State.FAILED):
                return self._as_holding(held)
        return self._own.holding(digest)

    def holdings(self) -> list[Holding]:
        """All that this engine holds or waits for."""
        with self._lock:
            ours = [
                self._as_holding(held)
                for held in self._held.values()
                if held.state not in (_State.OWN, _State.FAILED)
            ]
        return ours + self._own.holdings()

    def close(self) -> None:
        """Give everything back; the agent keeps its bytes for other engines."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._link is not None:
                self._link.channel.close()
            self._changed.notify_all()
        self._linker.join()
        for _ in self._verifiers:
            self._work.put(None)
        for verifier in self._verifiers:
            verifier.join()
        with self._lock:
            held_all, self._held = list(self._held.values()), OrderedDict()
            for held in held_all:
                if held.state in (_State.ASKED, _State.ARRIVED):
                    held.state, held.failure = _State.FAILED, _closed()
                for memory in held.memories:
                    memory.close()
            self._changed.notify_all()
        self._own.close()

    def check_invariants(self) -> None:
        """For tests: states and what belongs to them agree."""
        with self._lock:
            for digest, held in self._held.items():
                assert held.digest == digest  # noqa: S101
                assert held.num_users >= 0  # noqa: S101
                assert (held.state is _State.READY) == (held.artifact is not None)  # noqa: S101
                assert (held.state is _State.FAILED) == (held.failure is not None)  # noqa: S101
                if held.state in (_State.OWN, _State.FAILED):
                    assert held.num_users > 0  # noqa: S101

    # --- asking the agent ------------------------------------------------------------------------
    def _ask(self, digest: Digest, deadline_s: float, priority: int, num_users: int) -> _Held:
        """A new entry: of the agent, or of the own pool. Called with the lock held."""
        link = None if self._is_own(digest) else self._link
        held = _Held(
            digest=digest,
            state=_State.OWN if link is None else _State.ASKED,
            request=next(self._requests),
            link=link,
            deadline_s=deadline_s,
            priority=priority,
            asked_s=time.monotonic(),
            num_users=num_users,
        )
        self._held[digest] = held
        if link is not None:
            self._post_acquire(held)
        for _ in range(num_users if link is None else 0):
            self._own.acquire(digest, deadline_s, priority)
        return held

    def _is_own(self, digest: Digest) -> bool:
        """Whether the own pool has an artifact ready."""
        own = self._own.holding(digest)
        return own is not None and own.is_ready

    def _post_acquire(self, held: _Held) -> None:
        left_ms = _milliseconds(held.deadline_s - time.monotonic())
        self._post(held, wire.Acquire(held.request, held.digest, left_ms, held.priority))

    def _post(self, held: _Held, message: wire.EngineMessage) -> None:
        """Send over the connection by which an artifact is held, if that is still there."""
        if held.link is not None:
            held.link.channel.post(message)

    def _question(
        self,
        link: _Link | None,
        make: Callable[[int], wire.Pin | wire.Unpin],
        timeout_s: float,
    ) -> wire.Done:
        """Ask over a link, and wait for the answer.

        Raises:
            Refusal: it is gone, or no answer in time.
        """
        answer: Future[wire.Done] = Future()
        with self._lock:
            request = next(self._requests)
            if link is None or link is not self._link:
                raise _away()
            link.answers[request] = answer
            link.channel.post(make(request))
        try:
            return answer.result(timeout_s)
        except FutureTimeoutError:
            raise Refusal(
                FailureReason.DEADLINE, f"the node agent did not answer in {timeout_s:.3f} s"
            ) from None
        finally:
            with self._lock:
                link.answers.pop(request, None)

    # --- pins ------------------------------------------------------------------------------------
    def _pinned_by(self, digest: Digest) -> tuple[str, ...]:
        """Owners of pins in the agent, sorted. Called with the lock held."""
        return tuple(sorted(self._link.pins.get(digest, ()))) if self._link is not None else ()

    def _tell_pin(self, digest: Digest) -> None:
        """Announce whether an artifact is pinned in the agent, if that is news."""
        with self._pin_lock:
            with self._lock:
                is_pinned = bool(self._pinned_by(digest))
            if is_pinned == (digest in self._told_pinned):
                return
            (self._told_pinned.add if is_pinned else self._told_pinned.discard)(digest)
            self._on_pin(digest, is_pinned)

    def _tell_pin_again(self, digest: Digest) -> None:
        """Announce the pin of an artifact that was announced anew."""
        with self._pin_lock:
            if digest in self._told_pinned:
                self._on_pin(digest, True)

    # --- what is held ----------------------------------------------------------------------------
    def _as_holding(self, held: _Held) -> Holding:
        """Called with the lock held."""
        return Holding(
            digest=held.digest,
            is_ready=held.state is _State.READY,
            size_bytes=held.artifact.size_bytes if held.artifact is not None else None,
            num_users=held.num_users,
            pinned_by=self._pinned_by(held.digest),
        )

    def _rest(self, held: _Held) -> None:
        """The last use has ended. Called with the lock held."""
        is_orphan = held.link is not self._link and self._link is not None
        if not held.is_recalled and not is_orphan:
            self._post(held, wire.Use(held.request, is_busy=False))
            return
        self._let_go(held)

    def _dispose(self, held: _Held, last: wire.EngineMessage | None = None) -> None:
        """Withdraw, close, and give back what is no longer in `_held`."""
        if held.artifact is not None:
            try:
                self._on_evict(held.digest)
            except Exception:
                logger.exception("artifact %s: what precedes its end failed", held.digest)
        for memory in held.memories:
            memory.close()
        self._post(held, wire.Release(held.request))
        if last is not None:
            self._post(held, last)

    def _forget(self, held: _Held) -> None:
        """Nobody waits for what was asked for. Called with the lock held."""
        del self._held[held.digest]
        for memory in held.memories:
            memory.close()
        self._post(held, wire.Release(held.request))

    def _load_here(self, held: _Held) -> None:
        """Let the own pool load what the agent did not bring. Called with the lock held."""
        for memory in held.memories:
            memory.close()
        held.memories, held.link = [], None
        if held.num_users == 0:
            del self._held[held.digest]
            return
        held.state = _State.OWN
        for _ in range(held.num_users):
            self._own.acquire(held.digest, held.deadline_s, held.priority)
        self._changed.notify_all()

    def _fail(self, held: _Held, refusal: Refusal) -> None:
        """Called with the lock held."""
        for memory in held.memories:
            memory.close()
        held.memories, held.link = [], None
        held.state, held.failure = _State.FAILED, refusal
        if held.num_users == 0:
            del self._held[held.digest]
        self._changed.notify_all()

    # --- the connection --------------------------------------------------------------------------
    def _run_links(self) -> None:
        retry_s = RETRY_S
        while not self._is_closed:
            try:
                link = self._connect()
            except (OSError, wire.Disconnected) as error:
                if not self._was_tried or retry_s == RETRY_S:
                    logger.warning("node agent at %s: %s", self._path, error)
                with self._lock:
                    self._was_tried = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._is_closed, retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
                continue
            retry_s = RETRY_S
            try:
                self._take_up(link)
                while True:
                    message, descriptors = link.channel.receive(wire.SILENCE_S)
                    self._take(link, message, descriptors)
            except wire.Disconnected as error:
                logger.warning("node agent at %s: %s", self._path, error)
            finally:
                self._lose(link)

    def _connect(self) -> _Link:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(str(self._path))
            connection.setblocking(True)
        except BaseException:
            connection.close()
            raise
        channel: wire.Channel[wire.AgentMessage] = wire.Channel(connection, wire.AgentMessage)
        try:
            channel.post(wire.Hello(wire.PROTOCOL_VERSION, self._name))
            welcome, descriptors = channel.receive(wire.SILENCE_S)
            _close_all(descriptors)
            if not isinstance(welcome, wire.Welcome) or welcome.version != wire.PROTOCOL_VERSION:
                raise wire.Disconnected("not greeted as expected")
        except BaseException:
            channel.close()
            channel.join()
            raise
        return _Link(channel, welcome)

    def _take_up(self, link: _Link) -> None:
        """Use a connection, drop what is left of the one before, and get warm."""
        with self._lock:
            if self._is_closed:
                raise wire.Disconnected("closing")
            self._link = link
            self._was_tried = True
            for held in list(self._held.values()):
                if held.state is _State.READY and held.num_users == 0:
                    self._let_go(held)
            deadline_s = time.monotonic() + WARM_DEADLINE_S
            for text in link.welcome.residents:
                digest = wire.as_digest(text)
                if digest not in self._held and not self._is_own(digest):
                    self._ask(digest, deadline_s, OPPORTUNISTIC, 0).is_prefetch = True
            self._changed.notify_all()

    def _lose(self, link: _Link) -> None:
        """A connection has ended: what was under way is loaded here, what is held stays."""
        link.channel.close()
        with self._lock:
            if self._link is link:
                self._link = None
            for held in list(self._held.values()):
                if held.link is link and held.state is _State.ASKED and not self._is_closed:
                    self._load_here(held)
            for digest in link.pins:
                self._work.put(partial(self._tell_pin, digest))
            for answer in link.answers.values():
                answer.set_exception(_away())
            link.answers.clear()
            self._changed.notify_all()
        link.channel.join()

    def _take(self, link: _Link, message: wire.AgentMessage, descriptors: list[int]) -> None:
        match message:
            case wire.Ready():
                self._receive(link, message, descriptors)
                return
            case wire.Failed(request, reason, detail):
                with self._lock:
                    held = self._asked(link, request)
                    if held is not None and reason is FailureReason.NOT_READY:
                        self._load_here(held)
                    elif held is not None:
                        self._fail(held, Refusal(reason, detail))
            case wire.Recall(request):
                self._give_back(link, request)
            case wire.Done(request):
                with self._lock:
                    answer = link.answers.pop(request, None)
                if answer is not None:
                    answer.set_result(message)
            case wire.Welcome():
                _close_all(descriptors)
                raise wire.Disconnected("a second welcome")
            case wire.Alive():
                pass
        _close_all(descriptors)

    def _asked(self, link: _Link, request: int) -> _Held | None:
        """What waits for an answer to a request. Called with the lock held."""
        for held in self._held.values():
            if held.request == request and held.link is link and held.state is _State.ASKED:
                return held
        return None

    def _give_back(self, link: _Link, request: int) -> None:
        with self._lock:
            for held in self._held.values():
                if held.link is link and held.request == request:
                    break
            else:
                return
            held.is_recalled = True
            if held.state is _State.READY and held.num_users == 0:
                self._let_go(held)

    def _let_go(self, held: _Held) -> None:
        """Give an idle artifact back, off this thread. Called with the lock held."""
        del self._held[held.digest]
        self._work.put(partial(self._dispose, held))

    def _receive(self, link: _Link, message: wire.Ready, descriptors: list[int]) -> None:
        """Take over the memory of an artifact; what nobody waits for is closed."""
        with self._lock:
            held = self._asked(link, message.request)
            if held is None:
                _close_all(descriptors)
                return
            try:
                held.memories += _received(descriptors, message.sizes_bytes)
                if message.digest != held.digest:
                    raise Distrust(f"{message.digest} instead of {held.digest}")
            except (OSError, Distrust) as error:
                self._distrust(held, error)
                return
            if message.is_last:
                held.state = _State.ARRIVED
                held.loaded_from = message.loaded_from
                self._work.put(partial(self._verify, held))

    def _distrust(self, held: _Held, why: Exception) -> None:
        """Called with the lock held."""
        logger.error("node agent: artifact %s is not what it should be: %s", held.digest, why)
        self.num_distrusted += 1
        self._post(held, wire.Release(held.request))
        self._load_here(held)

    # --- verifying -------------------------------------------------------------------------------
    def _run_work(self) -> None:
        yield_to_serving()
        while True:
            work = self._work.get()
            if work is None:
                return
            try:
                work()
            except Exception:
                logger.exception("node agent")

    def _verify(self, held: _Held) -> None:
        """Check the memory that arrived, and announce it."""
        try:
            artifact = _verified(held.digest, held.memories, held.loaded_from, self._engine)
        except Refusal as refusal:
            with self._lock:
                self._post(held, wire.Release(held.request))
                self._fail(held, refusal)
            return
        except (Distrust, OSError) as error:
            with self._lock:
                self._distrust(held, error)
            return
        try:
            self._on_ready(held.digest, artifact.size_bytes)
        except Exception:
            logger.exception("artifact %s: what follows its load failed", held.digest)
        self._tell_pin_again(held.digest)
        with self._lock:
            held.load_s = time.monotonic() - held.asked_s
            held.memories = list(artifact.memories.values())
            held.artifact, held.state = artifact, _State.READY
            if held.num_users == 0:
                self._rest(held)
            self._changed.notify_all()


def _verified(
    digest: Digest, memories: list[SealedMemory], loaded_from: Tier, engine: EngineIdentity
) -> Artifact:
    """The artifact in sealed memory whose seals were checked; the manifest's memory is closed.

    Raises:
        Distrust: it is not the artifact of that digest.
        Refusal: it is, and this engine cannot serve it.
    """
    if not memories:
        raise Distrust("no memory")
    manifest = _read_manifest(digest, memories[0])
    refuse_unfit(manifest, engine)
    blobs = memories[1:]
    sizes_bytes = [blob.decoded_bytes for blob in manifest.payload]
    if sizes_bytes != [memory.size_bytes for memory in blobs]:
        raise Distrust("the memory does not have the sizes of its payload")
    for blob, memory in zip(manifest.payload, blobs, strict=True):
        with map_memory(memory.reference) as mapping, memoryview(mapping) as view:
            found = "sha256:" + hashlib.sha256(view).hexdigest()
            if found != blob.decoded_sha256:
                raise Distrust(f"blob {blob.sha256}: its memory hashes to {found}")
            try:
                check_blob(manifest, blob.sha256, view)
                check_finite(manifest, blob.sha256, view)
            except InvalidPayload as error:
                raise Distrust(f"blob {blob.sha256}: {error}") from error
    memories[0].close()
    by_digest = {blob.sha256: memory for blob, memory in zip(manifest.payload, blobs, strict=True)}
    return Artifact(digest, manifest, by_digest, loaded_from)


def _read_manifest(digest: Digest, memory: SealedMemory) -> Manifest:
    with map_memory(memory.reference) as mapping:
        data = mapping[:]
    if sha256_digest(data) != digest:
        raise Distrust(f"the manifest hashes to {sha256_digest(data)}")
    try:
        return decode_manifest(data)
    except InvalidManifest as error:
        raise Distrust(f"manifest: {error}") from error


def _received(descriptors: list[int], sizes_bytes: list[int]) -> list[SealedMemory]:
    """Take over descriptors; on an error all of them are closed."""
    if len(descriptors) != len(sizes_bytes):
        _close_all(descriptors)
        raise Distrust(f"{len(descriptors)} descriptors for {len(sizes_bytes)} sizes")
    memories: list[SealedMemory] = []
    for index, (descriptor, size_bytes) in enumerate(zip(descriptors, sizes_bytes, strict=True)):
        try:
            memories.append(ReceivedMemory(descriptor, size_bytes))
        except BaseException:
            for memory in memories:
                memory.close()
            _close_all(descriptors[index + 1 :])
            raise
    return memories


def _discard(pins: dict[Digest, set[str]], digest: Digest, owner: str) -> None:
    owners = pins.get(digest, set())
    owners.discard(owner)
    if not owners:
        pins.pop(digest, None)


def _milliseconds(seconds: float) -> int:
    return min(wire.MAX_DEADLINE_MS, max(0, int(seconds * 1000)))


def _away() -> Refusal:
    return Refusal(FailureReason.NOT_READY, "the node agent is away")


def _closed() -> Refusal:
    return Refusal(FailureReason.NOT_READY, "the dram tier was closed")


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
