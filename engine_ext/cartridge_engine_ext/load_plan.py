"""What the scheduler half tells the worker half for one step, and what comes back.

Owns the small frozen messages between the two processes of an engine. Refuses live objects:
everything here pickles.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cartridge_engine_ext.layout_probe import Captured
from cartridge_engine_ext.packed_layout import PackedPrefix
from cartridge_engine_ext.stored_segments import InPlacePrefix, Segment


@dataclass(frozen=True)
class Load:
    """Write virtual positions [start, stop) of a request into its blocks.

    Of a packed prefix these are slots, whole blocks of them.
    """

    request_id: str
    segments: tuple[Segment, ...]
    start: int
    stop: int
    block_ids: tuple[int, ...]
    packed: PackedPrefix | None = None


@dataclass(frozen=True)
class Capture:
    """Read positions [0, num_tokens) of a request back after this step's forward pass."""

    request_id: str
    num_tokens: int
    block_ids: tuple[int, ...]


@dataclass
class LoadPlan(KVConnectorMetadata):
    """All of one step.

    `failures` are requests whose load is reported as failed. `prefixes` are the packed prefixes of
    requests that got their blocks in this step, and those that are read in place.
    """

    loads: list[Load] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    prefixes: dict[str, PackedPrefix | InPlacePrefix] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadResult:
    """One finished load: bytes written to the KV cache and seconds; `error` when it failed."""

    size_bytes: int
    write_s: float
    """From the step that began it, so with the time that loads before it took."""
    error: str | None


@dataclass
class LoadReport(KVConnectorWorkerMetadata):
    """What workers did in one step, by request; read-backs also by tensor-parallel rank."""

    results: dict[str, LoadResult] = field(default_factory=dict)
    captured: dict[str, dict[int, Captured]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LoadReport":
        """Join reports of several workers: a load failed if it failed on any."""
        assert isinstance(other, LoadReport)  # noqa: S101 - vLLM pairs reports of one connector
        results = dict(self.results)
        for request_id, theirs in other.results.items():
            ours = results.get(request_id)
            results[request_id] = theirs if ours is None else joined(ours, theirs)
        captured = dict(self.captured)
        for request_id, by_rank in other.captured.items():
            captured[request_id] = {**captured.get(request_id, {}), **by_rank}
        return LoadReport(results, captured)


def joined(one: LoadResult, other: LoadResult) -> LoadResult:
    """One load as two workers saw it, each with its own heads."""
    return LoadResult(
        one.size_bytes + other.size_bytes,
        max(one.write_s, other.write_s),
        one.error or other.error,
    )
