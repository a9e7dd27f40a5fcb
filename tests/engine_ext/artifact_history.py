"""Histories of workers over one store folder, and the model that says which are possible.

Owns the events, the artifacts that may occur in them, and every rule. Refuses to look at a process,
a pool or a folder: what the model knows comes from the history and from the artifacts' makers.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final

import numpy

from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Manifest, manifest_digest
from tests.engine_ext.stored_artifacts import with_blob
from tests.proto.encoded_artifact import encoded
from tests.proto.sample_artifact import sample_artifact

NEVER: Final = 1 << 63
"""A time after all others, in nanoseconds of the machine's monotonic clock."""

NUM_NAMES, NUM_VERSIONS = 4, 6
ALIASES: Final = tuple(f"document-{number}@latest" for number in range(NUM_NAMES))
LARGE_TOKENS: Final = 10_000
"""More than one range of a fetch."""
SMALL_TOKENS: Final = 50


class Operation(StrEnum):
    """What a worker does."""

    PUBLISH = "publish"
    MOVE_ALIAS = "move_alias"
    DELETE = "delete"
    FETCH = "fetch"
    PREFETCH = "prefetch"
    EVICT_DRAM = "evict_dram"
    EVICT_NVME = "evict_nvme"
    PIN = "pin"
    UNPIN = "unpin"
    RESOLVE = "resolve"
    REQUEST = "request"


class Outcome(StrEnum):
    """How an operation ended."""

    OK = "ok"
    KEPT = "kept"
    """Not evicted: used, pinned, loading or not there."""
    ABSENT = "absent"
    FULL = "full"
    LATE = "late"
    UNAVAILABLE = "unavailable"
    CORRUPT = "corrupt"
    FAULT = "fault"
    """An error that nobody expects."""
    UNKNOWN = "unknown"
    """The worker was killed meanwhile."""


@dataclass(frozen=True)
class Made:
    """One artifact of the universe; `content` is a digest over the bytes of its tensors.

    `stored` is its only blob as stores have it, `decoded` as engines read it.
    """

    digest: Digest
    manifest: Manifest
    stored: bytes
    decoded: bytes
    content: str


@dataclass(frozen=True)
class Call:
    """One operation from its call to its return; times in ns of the machine's monotonic clock.

    `found` is what came out: the digest that an alias stood for, or the content that was read.
    """

    worker: int
    boot: int
    operation: Operation
    digest: str
    alias: str
    called_ns: int
    returned_ns: int
    outcome: Outcome
    found: str
    detail: str

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.alias, self.digest[:15])))
        return f"worker {self.worker}.{self.boot}: {self.operation} {what} -> {self.outcome}"


@dataclass(frozen=True)
class QuietState:
    """What a worker held at a moment in which no worker did anything."""

    worker: int
    boot: int
    pins: list[str]
    """Digests whose pin the worker was told to be there."""
    users: dict[str, int]
    pinned: list[str]
    dram: list[str]
    nvme: list[str]
    dram_rows: list[str]
    nvme_rows: list[str]
    pinned_rows: list[str]
    num_memories: int
    """Anonymous files that the process has open."""
    broken: str
    """An invariant of the pool that does not hold."""


@cache
def universe() -> tuple[Made, ...]:
    """All artifacts that may be published.

    Each two versions share their blob, the first two of two names are large, and those of every
    other name are encoded.
    """
    made = []
    for name in range(NUM_NAMES):
        for version in range(NUM_VERSIONS):
            num_tokens = LARGE_TOKENS if name < 2 and version < 2 else SMALL_TOKENS
            manifest, blob = sample_artifact(
                name=f"document-{name}",
                version=str(version),
                num_tokens=num_tokens,
                seed=1 + name * NUM_VERSIONS + version // 2,
            )
            if num_tokens == LARGE_TOKENS:
                manifest, blob = _with_noise(manifest, blob, seed=name)
            content = content_of(_hashes(manifest, blob))
            stored = blob
            if name % 2:
                manifest, stored = encoded(manifest, blob)
            digest = Digest(manifest_digest(manifest))
            made.append(Made(digest, manifest, stored, blob, content))
    return tuple(made)


@cache
def by_digest() -> Mapping[str, Made]:
    """The universe by artifact digest."""
    return {made.digest: made for made in universe()}


def content_of(hashes: Mapping[str, str]) -> str:
    """One digest over the sha256 of each tensor."""
    return hashlib.sha256(json.dumps(dict(hashes), sort_keys=True).encode()).hexdigest()


def _with_noise(manifest: Manifest, blob: bytes, seed: int) -> tuple[Manifest, bytes]:
    """The same tensors with numbers that do not compress to nothing."""
    begin = min(tensor.byte_range[0] for tensor in manifest.tensors.values())
    numbers = numpy.random.default_rng(seed).standard_normal((len(blob) - begin) // 4)
    noise = blob[:begin] + numbers.astype(numpy.float32).tobytes()
    return with_blob(manifest, noise), noise


def _hashes(manifest: Manifest, blob: bytes) -> dict[str, str]:
    return {
        name: hashlib.sha256(blob[slice(*tensor.byte_range)]).hexdigest()
        for name, tensor in manifest.tensors.items()
    }


# --- reading a history ---------------------------------------------------------------------------
def calls_of(
    lines: Iterable[str], deaths: Mapping[tuple[int, int], int]
) -> tuple[list[Call], list[QuietState]]:
    """The calls and quiet states of one or more histories.

    Args:
        lines: JSON, as workers write them: a line at each call and one at each return.
        deaths: when a boot of a worker was seen dead; an open call ended until then.
    """
    opened: dict[tuple[int, int, int], dict[str, Any]] = {}
    calls, quiet = [], []
    for line in lines:
        event = json.loads(line)
        kind = event.pop("kind")
        if kind == "quiet":
            quiet.append(QuietState(**event))
            continue
        key = (event["worker"], event["boot"], event["id"])
        if kind == "call":
            opened[key] = event
        else:
            calls.append(_call_of(opened.pop(key), event))
    for (worker, boot, _), event in opened.items():
        at_ns = deaths.get((worker, boot), NEVER)
        calls.append(_call_of(event, {"at": at_ns, "outcome": Outcome.UNKNOWN}))
    return sorted(calls, key=lambda call: call.called_ns), quiet


def _call_of(called: Mapping[str, Any], returned: Mapping[str, Any]) -> Call:
    return Call(
        worker=called["worker"],
        boot=called["boot"],
        operation=Operation(called["operation"]),
        digest=called["digest"],
        alias=called["alias"],
        called_ns=called["at"],
        returned_ns=returned["at"],
        outcome=Outcome(returned["outcome"]),
        found=returned.get("found", ""),
        detail=returned.get("detail", ""),
    )


# --- the model -----------------------------------------------------------------------------------
_USUAL: Final = {Outcome.OK, Outcome.UNKNOWN}
_EXPECTED: Final = {
    Operation.PUBLISH: _USUAL | {Outcome.ABSENT},
    Operation.MOVE_ALIAS: _USUAL | {Outcome.ABSENT},
    Operation.DELETE: _USUAL,
    Operation.FETCH: _USUAL | {Outcome.ABSENT, Outcome.FULL},
    Operation.PREFETCH: _USUAL | {Outcome.FULL},
    Operation.EVICT_DRAM: _USUAL | {Outcome.KEPT},
    Operation.EVICT_NVME: _USUAL | {Outcome.KEPT},
    Operation.PIN: _USUAL | {Outcome.ABSENT, Outcome.FULL},
    Operation.UNPIN: _USUAL,
    Operation.RESOLVE: _USUAL | {Outcome.ABSENT},
    Operation.REQUEST: _USUAL | {Outcome.ABSENT},
}
"""Outcomes that need no fault of a disk."""
_WRITES: Final = {Operation.PUBLISH, Operation.MOVE_ALIAS, Operation.EVICT_NVME}
"""What a failing disk may make unavailable: all else goes on, past the nvme folder."""


class HistoryModel:
    """Judges one history: `calls`. `failing` are the boots whose disk was made to fail."""

    def __init__(
        self,
        calls: Iterable[Call],
        quiet: Iterable[QuietState],
        failing: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.calls = list(calls)
        self._quiet = list(quiet)
        self._failing = set(failing)

    def problems(self) -> list[str]:
        """Everything that a correct machine could not have done; empty when all is well."""
        found = []
        for call in self.calls:
            found += [f"{call}: {problem}" for problem in self._problems_of(call)]
        for state in self._quiet:
            where = f"worker {state.worker}.{state.boot}, quiet"
            found += [f"{where}: {problem}" for problem in _problems_of_state(state)]
        return found

    def _problems_of(self, call: Call) -> Iterator[str]:
        expected = _EXPECTED[call.operation]
        if call.operation in _WRITES and (call.worker, call.boot) in self._failing:
            expected = expected | {Outcome.UNAVAILABLE}
        if call.outcome not in expected:
            yield f"not to be expected: {call.detail}"
        if call.operation is Operation.REQUEST and call.outcome is Outcome.OK:
            yield from self._problems_of_bytes(call)
        is_resolved = call.operation is Operation.RESOLVE and call.outcome is Outcome.OK
        if is_resolved and not self._may_stand_for(call):
            yield f"it did not stand for {call.found[:15]} then"
        if call.outcome is Outcome.ABSENT:
            yield from self._problems_of_absence(call)

    def _problems_of_bytes(self, call: Call) -> Iterator[str]:
        if call.found != by_digest()[call.digest].content:
            yield "other bytes than the artifact's"
        if not any(
            other.called_ns <= call.returned_ns for other in self._of(Operation.PUBLISH, call)
        ):
            yield "nobody had published it"

    def _may_stand_for(self, call: Call) -> bool:
        """Whether an alias stood for what was found at some moment of the call."""
        moves = [
            move
            for move in self.calls
            if move.operation is Operation.MOVE_ALIAS
            and move.alias == call.alias
            and move.outcome is not Outcome.ABSENT
        ]
        return any(
            move.digest == call.found
            and move.called_ns <= call.returned_ns
            and not any(
                # Only what surely took effect takes the alias away from an earlier move.
                later.outcome is Outcome.OK
                and later.called_ns > move.returned_ns
                and later.returned_ns < call.called_ns
                for later in moves
            )
            for move in moves
        )

    def _problems_of_absence(self, call: Call) -> Iterator[str]:
        if call.operation is Operation.PUBLISH:
            if not self._may_be_deleted_since(call, call):
                yield "nobody deleted its blob"
        elif call.operation is Operation.RESOLVE:
            if any(
                move.alias == call.alias
                and move.outcome is Outcome.OK
                and move.returned_ns < call.called_ns
                for move in self.calls
                if move.operation is Operation.MOVE_ALIAS
            ):
                yield "it was there"
        elif any(
            publish.outcome is Outcome.OK
            and publish.returned_ns < call.called_ns
            and not self._may_be_deleted_since(publish, call)
            for publish in self._of(Operation.PUBLISH, call)
        ):
            yield "it was there"

    def _may_be_deleted_since(self, publish: Call, call: Call) -> bool:
        """Whether a deletion of the artifact, or of one that shares its blob, may have hit it."""
        blob = _blob_of(call.digest)
        return any(
            other.operation is Operation.DELETE
            and _blob_of(other.digest) == blob
            and other.returned_ns > publish.called_ns
            and other.called_ns < call.returned_ns
            for other in self.calls
        )

    def _of(self, operation: Operation, call: Call) -> Iterator[Call]:
        return (
            other
            for other in self.calls
            if other.operation is operation and other.digest == call.digest
        )


def _blob_of(digest: str) -> str:
    return by_digest()[digest].manifest.payload[0].sha256


def _problems_of_state(state: QuietState) -> Iterator[str]:
    if state.broken:
        yield f"an invariant does not hold: {state.broken}"
    if state.pinned != state.pins:
        yield f"pins: {_short(state.pinned)} are there, {_short(state.pins)} were set"
    in_use = [digest for digest, count in state.users.items() if count]
    if in_use:
        yield f"uses that nobody ends: {_short(in_use)}"
    for tier, rows, held in (
        ("dram", state.dram_rows, state.dram),
        ("nvme", state.nvme_rows, state.nvme),
        ("pinned", state.pinned_rows, state.pinned),
    ):
        if rows != held:
            yield f"{tier}: rows of {_short(rows)}, bytes of {_short(held)}"
    if state.num_memories != len(state.dram):
        yield f"{state.num_memories} memories for {len(state.dram)} artifacts"


def _short(digests: Iterable[str]) -> str:
    return ", ".join(digest[:15] for digest in digests) or "nothing"


def blob_digest(made: Made) -> Digest:
    """Digest of an artifact's only blob, as it is stored."""
    return sha256_digest(made.stored)
