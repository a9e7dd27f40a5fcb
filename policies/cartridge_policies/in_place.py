"""Seconds of a segment that is read where it lies, against one that is loaded into HBM first.

Owns the two sums, as named terms that add up, and the number of steps at which they are equal.
Refuses to price room: what else HBM would hold is the caller's to weigh.

Source: FastDecode (arXiv 2403.11421) moves queries to the memory of hosts and outputs back; NEO
(arXiv 2411.01142) hides that behind other requests' work on the GPU.
"""

import math
from dataclasses import dataclass

from cartridge_policies.types import CostTerm


@dataclass(frozen=True)
class Machine:
    """Rates of one engine's machine, bytes a second.

    Where the model itself runs on the host, its memory is "HBM": both rates are one, nothing hops,
    and nothing is moved.
    """

    host_bytes_per_s: float
    """At which attention over host memory reads keys and values."""
    link_bytes_per_s: float
    """From the tier into HBM, with all that is done to bytes on the way."""
    hbm_bytes_per_s: float
    """At which attention over HBM reads them."""
    hop_s: float = 0.0
    """For each layer: time that queries and answers wait on their way, whatever their size."""


@dataclass(frozen=True)
class SegmentInDram:
    """Keys and values of all layers."""

    num_tokens: int
    bytes_per_token: float
    """In the tier."""
    resident_bytes_per_token: float
    """In HBM; more where values are dequantised on the way."""

    @property
    def size_bytes(self) -> float:
        """In the tier."""
        return self.num_tokens * self.bytes_per_token

    @property
    def resident_bytes(self) -> float:
        """In HBM."""
        return self.num_tokens * self.resident_bytes_per_token


@dataclass(frozen=True)
class Usage:
    """What requests do with a segment.

    Attributes:
        num_steps: of one request, that attend to it; the first is that of its live prompt.
        num_requests_per_load: how many it serves from HBM before it is evicted there, at least 1.
        num_layers: of the model.
        moved_bytes: queries, outputs and sums of one request in one layer and step.
        hidden_share: part of the work in place that other requests' work covers, 0 to 1.
    """

    num_steps: float
    num_requests_per_load: float
    num_layers: int
    moved_bytes: float
    hidden_share: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Seconds of one request each way; the terms of a way add up to it."""

    in_place: tuple[CostTerm, ...]
    loaded: tuple[CostTerm, ...]
    break_even_steps: float
    """In place is sooner below so many steps; infinite where it is at any number."""

    @property
    def in_place_s(self) -> float:
        """All of it."""
        return sum(term.seconds for term in self.in_place)

    @property
    def loaded_s(self) -> float:
        """All of it."""
        return sum(term.seconds for term in self.loaded)


def compare(segment: SegmentInDram, machine: Machine, usage: Usage) -> Comparison:
    """What one request costs in place and loaded.

    Terms in place: `attend`, `move`; loaded: `load`, its share of one, and `read`.
    """
    shown = 1.0 - usage.hidden_share
    attend_s = shown * segment.size_bytes / machine.host_bytes_per_s
    hop_s = machine.hop_s + usage.moved_bytes / machine.link_bytes_per_s
    move_s = shown * usage.num_layers * hop_s
    load_s = segment.size_bytes / machine.link_bytes_per_s / usage.num_requests_per_load
    read_s = segment.resident_bytes / machine.hbm_bytes_per_s
    extra_s = attend_s + move_s - read_s
    steps = usage.num_steps
    return Comparison(
        in_place=(CostTerm("attend", steps * attend_s), CostTerm("move", steps * move_s)),
        loaded=(CostTerm("load", load_s), CostTerm("read", steps * read_s)),
        break_even_steps=load_s / extra_s if extra_s > 0 else math.inf,
    )
