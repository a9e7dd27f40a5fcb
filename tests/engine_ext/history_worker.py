"""Worker processes of the history test, each with its reader, and the nursery that forks them.

Owns what a worker does and writes down. Refuses to judge: that is the model's. A worker is an
engine without vLLM: tiers and a ledger; its reader is what a worker of vLLM is to an engine.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, TextIO

from cartridge_engine_ext.artifact_pool import Artifact, ArtifactPool
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.nvme_source import NvmeSource
from cartridge_engine_ext.nvme_tier import DiskFailed, NvmeTier, TierFull
from cartridge_engine_ext.residency_ledger import ResidencyLedger
from cartridge_engine_ext.sealed_memory import MemoryReference, SealedMemory, map_memory
from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.names import ENV_FAILPOINT
from cartridge_proto.residency import FailureReason, Tier
from cartridge_proto.stores import (
    CorruptStore,
    LocalStore,
    NotInStore,
    StoreError,
    StoreUnavailable,
)
from tests.engine_ext.artifact_history import (
    ALIASES,
    Made,
    Operation,
    Outcome,
    QuietState,
    blob_digest,
    content_of,
    universe,
)
from tests.engine_ext.waiting import until
from tests.proto.sample_artifact import engine_of

DEADLINE_S = 20.0
"""Of each load; reached only when something is stuck."""
_LARGE, _SMALL = (len(universe()[index].decoded) for index in (0, -1))
DRAM_BYTES = _LARGE + max(made.manifest.loading_bytes for made in universe()) + 3 * _SMALL
"""Room for one large artifact that is pinned, one that is decoded, and a few small ones."""
NVME_BYTES = _LARGE + 8 * _SMALL
"""The large blob and two thirds of the small ones."""


class Fault(StrEnum):
    """What a mutant does wrong; the model has to see it."""

    NONE = "none"
    SWAPPED_MEMORY = "swapped_memory"
    """A request reads the memory of another artifact, once."""
    UNCHECKED_BYTES = "unchecked_bytes"
    """The store gives other blobs, and the pool does not verify."""
    STALE_ALIAS = "stale_alias"
    """An alias is looked up once and then remembered."""
    LOST_ALIAS = "lost_alias"
    """An alias is not found although it is there."""
    KEPT_PIN = "kept_pin"
    """No pin ends."""
    KEPT_USE = "kept_use"
    """One use never ends."""
    UNTOLD_EVICTION = "untold_eviction"
    """The ledger does not hear of what leaves the dram tier."""
    FALSE_NAME = "false_name"
    """Other bytes are written under a digest into the shared folder."""


@dataclass(frozen=True)
class Birth:
    """What a worker is started with."""

    folder: str
    worker: int
    boot: int
    seed: int
    failpoint: str = ""
    fault: Fault = Fault.NONE

    @property
    def root(self) -> Path:
        """The test's folder: `store`, `nvme`, `history`, and the controller's socket `s`."""
        return Path(self.folder)


class ForgetfulStore(LocalStore):
    """A mutant: remembers aliases, or does not find them."""

    def __init__(self, root: Path, fault: Fault) -> None:
        super().__init__(root)
        self._fault = fault
        self._remembered: dict[str, bytes] = {}

    def _read_alias(self, alias: str) -> bytes:
        if self._fault is Fault.LOST_ALIAS:
            raise NotInStore(alias)
        if self._fault is Fault.STALE_ALIAS and alias in self._remembered:
            return self._remembered[alias]
        return self._remembered.setdefault(alias, super()._read_alias(alias))


class UncheckedPool(ArtifactPool):
    """A mutant: takes any blob of the right size, and verifies nothing."""

    def _read(self, entry: Any, manifest: Manifest) -> Artifact:
        (blob,) = manifest.payload
        others = [made.decoded for made in universe() if blob_digest(made) != blob.sha256]
        other = next((data for data in others if len(data) == blob.decoded_bytes), None)

        def fill(buffer: memoryview) -> None:
            buffer[:] = other or bytes(blob.decoded_bytes)

        memory = SealedMemory(blob.decoded_bytes, fill)
        return Artifact(entry.digest, manifest, {blob.sha256: memory})


class History:
    """The file of one boot: a line before each operation and one after it."""

    def __init__(self, folder: Path, worker: int, boot: int) -> None:
        self._who = {"worker": worker, "boot": boot}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(folder / f"{worker}-{boot}.jsonl", flags, 0o644)
        self._num_calls = 0

    def note(self, kind: str, **fields: Any) -> None:
        """A line; one write, so that a kill leaves all of it or nothing."""
        event = {"kind": kind, **self._who, **fields}
        os.write(self._descriptor, json.dumps(event).encode() + b"\n")

    def close(self) -> None:
        """Give the file back."""
        os.close(self._descriptor)

    @contextlib.contextmanager
    def call(
        self, operation: Operation, *, digest: str = "", alias: str = ""
    ) -> Iterator[dict[str, Any]]:
        """One operation: the block puts what came out into the dictionary it is given."""
        self._num_calls += 1
        number = self._num_calls
        self.note(
            "call",
            id=number,
            operation=operation,
            digest=digest,
            alias=alias,
            at=time.monotonic_ns(),
        )
        result: dict[str, Any] = {"outcome": Outcome.OK}
        try:
            yield result
        except Exception as error:
            result = {"outcome": outcome_of(error), "detail": repr(error)[:300]}
        self.note("return", id=number, at=time.monotonic_ns(), **result)


def outcome_of(error: Exception) -> Outcome:
    """What an error of the tiers or of the store is to a history."""
    if isinstance(error, Refusal):
        return {
            FailureReason.UNKNOWN_ARTIFACT: Outcome.ABSENT,
            FailureReason.CORRUPT_ARTIFACT: Outcome.CORRUPT,
            FailureReason.CAPACITY: Outcome.FULL,
            FailureReason.DEADLINE: Outcome.LATE,
            FailureReason.NOT_READY: Outcome.UNAVAILABLE,
        }.get(error.reason, Outcome.FAULT)
    kinds: list[tuple[type[StoreError], Outcome]] = [
        (NotInStore, Outcome.ABSENT),
        (CorruptStore, Outcome.CORRUPT),
        (TierFull, Outcome.FULL),
        (DiskFailed, Outcome.UNAVAILABLE),
        (StoreUnavailable, Outcome.UNAVAILABLE),
    ]
    return next((outcome for kind, outcome in kinds if isinstance(error, kind)), Outcome.FAULT)


# --- publishing ----------------------------------------------------------------------------------
def publish(history: History, store: LocalStore, made: Made) -> None:
    """Store an artifact."""
    with history.call(Operation.PUBLISH, digest=made.digest):
        store.put_blob(made.stored)
        store.put_manifest(made.manifest)


def move_alias(history: History, store: LocalStore, alias: str, made: Made) -> None:
    """Let an alias stand for an artifact."""
    with history.call(Operation.MOVE_ALIAS, digest=made.digest, alias=alias):
        store.set_alias(alias, made.digest)


# --- the reader ----------------------------------------------------------------------------------
def _run_reader(channel: socket.socket) -> NoReturn:
    """Read sealed memory of the worker, tensor by tensor, until the worker is gone."""
    with contextlib.suppress(OSError), channel, channel.makefile("rw") as lines:
        for line in lines:
            asked = json.loads(line)
            with map_memory(MemoryReference(**asked["reference"])) as mapping:
                hashes = {
                    name: hashlib.sha256(mapping[begin:end]).hexdigest()
                    for name, (begin, end) in asked["ranges"].items()
                }
            lines.write(json.dumps(hashes) + "\n")
            lines.flush()
    os._exit(0)


def _fork_reader() -> TextIO:
    """The reader of this process; forked before there is any thread."""
    own, other = socket.socketpair()
    if os.fork() == 0:
        own.close()
        _run_reader(other)
    other.close()
    with own:
        return own.makefile("rw")


# --- the worker ----------------------------------------------------------------------------------
class Worker:
    """Tiers and a ledger over the shared folders, and the operations on them."""

    def __init__(self, birth: Birth, reader: TextIO) -> None:
        self._birth = birth
        self._fault = birth.fault
        self._reader = reader
        self._history = History(birth.root / "history", birth.worker, birth.boot)
        self._store: LocalStore = LocalStore(birth.root / "store")
        if birth.fault in {Fault.STALE_ALIAS, Fault.LOST_ALIAS}:
            self._store = ForgetfulStore(self._store.root, birth.fault)
        self._ledger = ResidencyLedger()
        self._nvme = NvmeTier(
            store=self._store,
            root=birth.root / "nvme",
            capacity_bytes=NVME_BYTES,
            num_parallel=2,
            range_bytes=1 << 20,
            on_ready=lambda digest, size: self._ledger.enter(digest, Tier.NVME, size),
            on_evict=lambda digest: self._ledger.leave(digest, Tier.NVME),
        )
        self._source = NvmeSource(self._store, self._nvme)
        kind = UncheckedPool if birth.fault is Fault.UNCHECKED_BYTES else ArtifactPool
        self._pool = kind(
            store=self._source,
            engine=engine_of(universe()[0].manifest),
            capacity_bytes=DRAM_BYTES,
            num_loaders=2,
            on_ready=lambda digest, size: self._ledger.enter(digest, Tier.DRAM, size),
            on_evict=self._note_evicted,
            on_pin=lambda digest, is_pinned: self._ledger.set_pinned(
                digest, Tier.DRAM, is_pinned=is_pinned
            ),
        )
        self._pins: set[Digest] = set()
        self._random = random.Random(f"{birth.seed}/{birth.worker}/{birth.boot}")
        self._is_mutated = False
        publishing = [self._publish, self._move_alias, self._delete]
        moving = [self._fetch, self._prefetch, self._evict_dram, self._evict_nvme]
        using = [self._request, self._request_by_alias]
        self._operations: list[Callable[[Made], None]] = [
            *publishing,
            *[self._publish] * 2,
            *moving,
            *(self._pin, self._unpin),
            *using * 6,
        ]

    # --- what the controller asks for ------------------------------------------------------------
    def run(self, num_operations: int) -> None:
        """Random operations on random artifacts."""
        for _ in range(num_operations):
            self._random.choice(self._operations)(self._random.choice(universe()))

    def settle(self) -> None:
        """Wait until nothing is loading any more."""
        until(lambda: all(holding.is_ready for holding in self._pool.holdings()))

    def tell_state(self) -> None:
        """Write down what is held; nobody does anything meanwhile."""
        self._nvme.refresh()
        broken = ""
        try:
            self._pool.check_invariants()
        except AssertionError as error:
            broken = repr(error)
        holdings = self._pool.holdings()
        rows = [row.digest for row in self._ledger.rows()]
        state = QuietState(
            worker=self._birth.worker,
            boot=self._birth.boot,
            pins=sorted(self._pins),
            users={holding.digest: holding.num_users for holding in holdings},
            pinned=sorted(holding.digest for holding in holdings if holding.pinned_by),
            dram=sorted(artifact.digest for artifact, _ in self._pool.residents()),
            nvme=sorted(resident.digest for resident in self._nvme.residents()),
            dram_rows=sorted(row for row in rows if Tier.DRAM in self._ledger.tiers(row)),
            nvme_rows=sorted(row for row in rows if Tier.NVME in self._ledger.tiers(row)),
            pinned_rows=sorted(row.digest for row in self._ledger.rows() if row.is_pinned),
            num_memories=_num_memories(),
            broken=broken,
        )
        self._history.note("quiet", **asdict(state))
        self._write_false_name(universe()[-1])

    def close(self) -> None:
        """Give everything back, but for what a kill would leave."""
        self._pool.close()
        self._nvme.close()
        self._history.close()

    # --- operations ------------------------------------------------------------------------------
    def _publish(self, made: Made) -> None:
        publish(self._history, self._store, made)

    def _move_alias(self, made: Made) -> None:
        move_alias(self._history, self._store, self._random.choice(ALIASES), made)

    def _delete(self, made: Made) -> None:
        """Take an artifact out of the store, and its blob if no other manifest there has it."""
        with self._history.call(Operation.DELETE, digest=made.digest):
            self._store.manifest_path(made.digest).unlink(missing_ok=True)
            wanted = set()
            for digest in self._store.manifest_digests():
                with contextlib.suppress(NotInStore):
                    manifest = self._store.read_manifest(digest)
                    wanted |= {blob.sha256 for blob in manifest.payload}
            for blob in made.manifest.payload:
                if blob.sha256 not in wanted:
                    self._store.blob_path(parse_digest(blob.sha256)).unlink(missing_ok=True)

    def _fetch(self, made: Made) -> None:
        with self._history.call(Operation.FETCH, digest=made.digest):
            self._source.fetch(made.digest, _deadline_s())
            self._write_false_name(made)

    def _write_false_name(self, made: Made) -> None:
        if self._fault is Fault.FALSE_NAME:
            name = blob_digest(made).removeprefix("sha256:")
            path = self._nvme.root / "blobs" / "sha256" / name
            path.write_bytes(bytes(len(made.stored)))

    def _prefetch(self, made: Made) -> None:
        with self._history.call(Operation.PREFETCH, digest=made.digest):
            self._pool.prefetch(made.digest, time.monotonic() + 1.0, self._random.choice([0, 5]))

    def _evict_dram(self, made: Made) -> None:
        with self._history.call(Operation.EVICT_DRAM, digest=made.digest) as result:
            if self._pool.evict(made.digest) is not None:
                result["outcome"] = Outcome.KEPT

    def _evict_nvme(self, made: Made) -> None:
        with self._history.call(Operation.EVICT_NVME, digest=made.digest) as result:
            if self._nvme.evict(made.digest) is not None:
                result["outcome"] = Outcome.KEPT

    def _pin(self, made: Made) -> None:
        with self._history.call(Operation.PIN, digest=made.digest):
            self._pool.pin(made.digest, "history", DEADLINE_S)
            self._pins.add(made.digest)

    def _unpin(self, made: Made) -> None:
        digest = self._random.choice(sorted(self._pins)) if self._pins else made.digest
        with self._history.call(Operation.UNPIN, digest=digest):
            if self._fault is not Fault.KEPT_PIN:
                self._pool.unpin(digest, "history")
            self._pins.discard(digest)

    def _request_by_alias(self, _: Made) -> None:
        alias = self._random.choice(ALIASES)
        digest = None
        with self._history.call(Operation.RESOLVE, alias=alias) as result:
            digest = result["found"] = self._store.resolve(alias)
        if digest is not None:
            self._request_digest(digest)

    def _request(self, made: Made) -> None:
        self._request_digest(made.digest)

    def _request_digest(self, digest: Digest) -> None:
        """Use an artifact; it is evicted, deleted or told apart from others meanwhile."""
        with self._history.call(Operation.REQUEST, digest=digest) as result:
            self._pool.acquire(digest, _deadline_s())
            try:
                self._disturb(digest)
                artifact, _ = self._pool.wait(digest, DEADLINE_S)
                self._disturb(digest)
                result["found"] = self._read(self._swapped(artifact))
            finally:
                if self._fault is Fault.KEPT_USE and not self._is_mutated:
                    self._is_mutated = True
                else:
                    self._pool.release(digest)

    def _disturb(self, digest: Digest) -> None:
        made = next(made for made in universe() if made.digest == digest)
        nothing: Callable[[Made], None] = lambda made: None  # noqa: E731 - one of a list
        choices = [self._evict_dram, self._evict_nvme, self._delete, self._publish]
        self._random.choice([*choices, *[nothing] * 16])(made)

    def _swapped(self, artifact: Artifact) -> Artifact:
        if self._fault is not Fault.SWAPPED_MEMORY or self._is_mutated:
            return artifact
        residents = [other for other, _ in self._pool.residents()]
        for other in residents:
            if other.manifest.payload != artifact.manifest.payload:
                self._is_mutated = True
                return other
        return artifact

    def _read(self, artifact: Artifact) -> str:
        """Let the reader hash all tensors of an artifact."""
        hashes: dict[str, str] = {}
        for digest, memory in artifact.memories.items():
            ranges = {
                name: tensor.byte_range
                for name, tensor in artifact.manifest.tensors.items()
                if tensor.blob == digest
            }
            asked = {"reference": asdict(memory.reference), "ranges": ranges}
            self._reader.write(json.dumps(asked) + "\n")
            self._reader.flush()
            hashes |= json.loads(self._reader.readline())
        return content_of(hashes)

    def _note_evicted(self, digest: Digest) -> None:
        if self._fault is not Fault.UNTOLD_EVICTION:
            self._ledger.leave(digest, Tier.DRAM)


def _deadline_s() -> float:
    return time.monotonic() + DEADLINE_S


def _num_memories() -> int:
    """How many anonymous files this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:cartridge" in os.readlink(f"/proc/self/fd/{name}")
    return found


# --- processes -----------------------------------------------------------------------------------
def _run_worker(birth: Birth) -> None:
    """Connect to the controller, and do what it says until it hangs up."""
    reader = _fork_reader()
    if birth.failpoint:
        os.environ[ENV_FAILPOINT] = birth.failpoint
    worker = Worker(birth, reader)
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(str(birth.root / "s"))
        with channel.makefile("rw") as lines:
            _say(lines, {"worker": birth.worker, "boot": birth.boot})
            for line in lines:
                _obey(worker, json.loads(line))
                _say(lines, {"is_done": True})
    worker.close()


def _obey(worker: Worker, asked: dict[str, Any]) -> None:
    if asked["do"] == "run":
        worker.run(asked["num_operations"])
    elif asked["do"] == "settle":
        worker.settle()
    else:
        worker.tell_state()


def _say(lines: TextIO, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def main() -> None:
    """The nursery: forks a worker for each line of stdin, and says its process id.

    Forking spares each worker the seconds in which torch is imported.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for the dead
    for line in sys.stdin:
        fields = json.loads(line)
        birth = Birth(**fields | {"fault": Fault(fields["fault"])})
        process = os.fork()
        if process == 0:
            try:
                _run_worker(birth)
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.write(1, f"{process}\n".encode())


if __name__ == "__main__":
    main()
