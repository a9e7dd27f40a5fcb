"""Requests over time for the fleet simulator: public traces, and generated ones.

Owns the Mooncake trace format and the mapping of traces to Cartridges. Refuses to hide what is
generated: a workload says in words what is real about it. Everything random comes from a seed.
"""

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from cartridge_policies.types import ArtifactDemand
from cartridge_proto.digest import Digest, sha256_digest

BLOCK_TOKENS: Final = 512
"""Of one `hash_id`."""
KV_BYTES_PER_TOKEN: Final = 131_072
"""8B parameters, bf16: 32 layers x 8 heads x 128 x 2 x 2 bytes."""

Arrivals = NDArray[np.float64]
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class TraceError(Exception):
    """A trace cannot be read; the message names the file and the line."""


class TraceRow(msgspec.Struct, frozen=True):
    """One row of a Mooncake trace: milliseconds, tokens, ids of prefix-chained blocks."""

    timestamp: _Natural
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: _Natural
    hash_ids: list[int]


@dataclass(frozen=True)
class FleetRequest:
    """One request of a workload."""

    arrival_s: float
    cartridges: tuple[ArtifactDemand, ...]
    num_live_tokens: int
    num_output_tokens: int
    session: str | None = None
    is_streamed: bool = True
    """If not, the gateway sees the first token with the last."""

    @cached_property
    def num_virtual_tokens(self) -> int:
        """Of all Cartridges."""
        return sum(cartridge.num_tokens for cartridge in self.cartridges)

    @property
    def num_context_tokens(self) -> int:
        """What a step reads when the answer begins."""
        return self.num_virtual_tokens + self.num_live_tokens

    @property
    def num_own_tokens(self) -> int:
        """KV room that it shares with nobody."""
        return self.num_live_tokens + self.num_output_tokens

    @cached_property
    def prefix(self) -> Digest | None:
        """Identity of its whole virtual prefix: that of the Cartridge, or of the set."""
        if not self.cartridges:
            return None
        if len(self.cartridges) == 1:
            return self.cartridges[0].digest
        return sha256_digest("|".join(each.digest for each in self.cartridges).encode())


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival."""

    name: str
    about: str
    """What is real about it, in one sentence."""
    requests: tuple[FleetRequest, ...]
    is_cartridge_heavy: bool = False
    """Most tokens of most requests are those of shared Cartridges."""

    @property
    def virtual_share(self) -> float:
        """Of all prompt tokens, those that Cartridges replace."""
        virtual = sum(request.num_virtual_tokens for request in self.requests)
        return virtual / max(1, sum(request.num_context_tokens for request in self.requests))


def cartridge(name: str, num_tokens: int) -> ArtifactDemand:
    """An artifact of so many tokens, by a name."""
    return ArtifactDemand(sha256_digest(name.encode()), num_tokens * KV_BYTES_PER_TOKEN, num_tokens)


def names_of(workload: str, keys: Iterable[int]) -> dict[Digest, str]:
    """Names of Cartridges by digest. Keys: heads of a trace, or places in a library."""
    names = [f"{workload}/{key}" for key in keys]
    return {sha256_digest(name.encode()): name for name in names}


# --- Mooncake ------------------------------------------------------------------------------------
def read_trace(source: Path) -> list[TraceRow]:
    """All rows of a trace, gzipped or not.

    Raises:
        TraceError: the file cannot be read, or a line is no row.
    """
    decoder = msgspec.json.Decoder(TraceRow)
    rows = list[TraceRow]()
    try:
        with _open(source) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(decoder, line, f"{source}, line {number}"))
    except OSError as error:
        raise TraceError(f"{source}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{source}: {error}") from error
    return rows


def _row(decoder: msgspec.json.Decoder[TraceRow], line: bytes, place: str) -> TraceRow:
    try:
        return decoder.decode(line)
    # Text that is no UTF-8 is a ValueError of its own.
    except (msgspec.DecodeError, ValueError) as error:
        raise TraceError(f"{place}: {error}") from error


def write_trace(rows: Iterable[TraceRow]) -> bytes:
    """The same bytes that Mooncake's own files have."""
    return b"".join(
        msgspec.json.encode(row).replace(b",", b", ").replace(b":", b": ") + b"\n" for row in rows
    )


def _open(source: Path) -> IO[bytes]:
    data = source.read_bytes()
    return io.BytesIO(gzip.decompress(data) if source.suffix == ".gz" else data)


def from_mooncake(
    rows: Sequence[TraceRow], *, name: str, seed: int | None, limit: int | None = None
) -> Workload:
    """Each head that comes more than once is a Cartridge of the run that all its requests share.

    The head is the first block that not all requests have. A head that comes once is a prompt that
    nobody would have made a Cartridge of: it is live as a whole. Equal timestamps are spread over
    the time until the next one, unless `seed` is `None`. Rows may come in any order.
    """
    rows = sorted(rows, key=lambda row: row.timestamp)
    num_common = len(_common_prefix([row.hash_ids for row in rows]))
    shared = dict[int, list[int]]()
    counts = Counter[int]()
    for row in rows:
        if len(row.hash_ids) > num_common:
            head = row.hash_ids[num_common]
            counts[head] += 1
            run = shared.setdefault(head, row.hash_ids)
            shared[head] = _common_prefix([run, row.hash_ids])
    arrivals = np.array([row.timestamp / 1000 for row in rows])
    if seed is not None:
        arrivals = spread_ties(arrivals, seed)
    requests = list[FleetRequest]()
    for row, arrival_s in list(zip(rows, arrivals.tolist(), strict=True))[:limit]:
        held = tuple[ArtifactDemand, ...]()
        if len(row.hash_ids) > num_common and counts[head := row.hash_ids[num_common]] > 1:
            # A run that is the whole prompt leaves the last token to be computed.
            num_tokens = min(len(shared[head]) * BLOCK_TOKENS, row.input_length - 1)
            if num_tokens == len(shared[head]) * BLOCK_TOKENS:
                held = (cartridge(f"{name}/{head}", num_tokens),)
        num_virtual = held[0].num_tokens if held else 0
        requests.append(
            FleetRequest(arrival_s, held, row.input_length - num_virtual, row.output_length)
        )
    return Workload(name, "arrivals, lengths and prefixes of Mooncake's trace", tuple(requests))


def _common_prefix(lists: Sequence[Sequence[int]]) -> list[int]:
    common = list(lists[0]) if lists else []
    for each in lists:
        length = 0
        for one, other in zip(common, each, strict=False):
            if one != other:
                break
            length += 1
        del common[length:]
        if not common:
            break
    return common


def spread_ties(times_s: Arrivals, seed: int) -> Arrivals:
    """Requests of one timestamp come at random before the next timestamp (or within a second)."""
    chance = np.random.default_rng(seed)
    distinct, places = np.unique(times_s, return_inverse=True)
    gaps = np.append(np.diff(distinct), 1.0)
    spread: Arrivals = np.sort(times_s + gaps[places] * chance.random(len(times_s)))
    return spread


# --- Azure ---------------------------------------------------------------------------------------
def from_azure(
    source: Path, *, name: str, seed: int, num_cartridges: int = 200, limit: int | None = None
) -> Workload:
    """Arrivals and lengths of Azure's trace; which Cartridge each uses is drawn from a Zipf law.

    The trace does not say what prompts share. Three of four requests get a Cartridge beside their
    own context.
    """
    with _open(source) as data:
        rows = list(csv.DictReader(io.TextIOWrapper(data, "utf-8")))[:limit]
    # Seven digits of seconds; Python reads six.
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    arrivals = spread_ties(np.array(times) - min(times), seed)
    chance = np.random.default_rng(seed + 1)
    library = _library(name, num_cartridges, chance)
    chosen = chance.choice(num_cartridges, size=len(rows), p=zipf(num_cartridges, 1.0))
    has_one = chance.random(len(rows)) < 0.75
    requests = [
        FleetRequest(
            arrival_s,
            (library[which],) if has else (),
            max(1, int(row["ContextTokens"])),
            max(1, int(row["GeneratedTokens"])),
        )
        for row, arrival_s, which, has in zip(
            rows, arrivals.tolist(), chosen.tolist(), has_one.tolist(), strict=True
        )
    ]
    about = "arrivals and lengths of Azure's trace; Cartridges drawn from a Zipf law (generated)"
    return Workload(name, about, tuple(requests))


def zipf(count: int, slope: float) -> Arrivals:
    """Probabilities of ranks 1 to `count`."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -slope
    probabilities: Arrivals = weights / weights.sum()
    return probabilities


def _library(name: str, count: int, chance: np.random.Generator) -> list[ArtifactDemand]:
    """Cartridges of 1k to 16k tokens, in whole blocks."""
    blocks = np.clip(np.exp(chance.normal(2.1, 0.6, count)), 2, 32).astype(int)
    return [
        cartridge(f"{name}/{index}", int(size) * BLOCK_TOKENS) for index, size in enumerate(blocks)
    ]


# --- generated -----------------------------------------------------------------------------------
def generated_zipf(
    num_requests: int,
    *,
    seed: int,
    name: str = "zipf",
    num_cartridges: int = 400,
    slope: float = 1.0,
    max_cartridges: int = 3,
) -> Workload:
    """Poisson arrivals; one to three documents of a Zipf law, short questions, medium answers."""
    chance = np.random.default_rng(seed)
    library = _library(name, num_cartridges, chance)
    arrivals = np.cumsum(chance.exponential(1.0, num_requests)).tolist()
    counts = chance.choice(np.arange(1, max_cartridges + 1), num_requests, p=_few(max_cartridges))
    popularity = zipf(num_cartridges, slope)
    live = np.clip(chance.lognormal(5.5, 0.8, num_requests), 16, 8_000).astype(int).tolist()
    answers = np.clip(chance.lognormal(4.5, 0.8, num_requests), 1, 2_000).astype(int).tolist()
    drawn = chance.choice(num_cartridges, (num_requests, max_cartridges), p=popularity)
    requests = []
    for index, arrival_s in enumerate(arrivals):
        # In the order of the library: a set has one order.
        chosen = sorted(set(drawn[index, : counts[index]].tolist()))
        requests.append(
            FleetRequest(
                arrival_s, tuple(library[each] for each in chosen), live[index], answers[index]
            )
        )
    return Workload(name, "generated: Poisson, Zipf 1.0", tuple(requests), is_cartridge_heavy=True)


def _few(most: int) -> list[float]:
    """One is likelier than two, and two than three."""
    weights = [0.5**count for count in range(most)]
    return [weight / sum(weights) for weight in weights]


def generated_bursts(num_requests: int, *, seed: int, name: str = "bursty") -> Workload:
    """As Zipf, but in bursts of which each is about few documents, as when news breaks.

    Interarrival times are those of a gamma law of shape 0.05 (coefficient of variation 4.5).
    """
    chance = np.random.default_rng(seed + 17)
    calm = generated_zipf(num_requests, seed=seed, name=name, max_cartridges=1)
    gaps = chance.gamma(0.05, 20.0, num_requests)
    arrivals = np.cumsum(gaps).tolist()
    requests = list[FleetRequest]()
    topic = calm.requests[0].cartridges
    for request, gap_s, arrival_s in zip(calm.requests, gaps.tolist(), arrivals, strict=True):
        if gap_s > 1.0:
            topic = request.cartridges
        is_about_it = chance.random() < 0.5
        chosen = topic if is_about_it else request.cartridges
        requests.append(replace(request, arrival_s=arrival_s, cartridges=chosen))
    about = "generated: bursts, half of each about one document"
    return Workload(name, about, tuple(requests), is_cartridge_heavy=True)


def generated_tool_agent(num_requests: int, *, seed: int, name: str = "tool-agent") -> Workload:
    """Few very hot, long, fixed heads of 6,144 and 2,560 tokens; short turns, short answers.

    The shape of the mixed Mooncake trace: one in ten has no head of these.
    """
    chance = np.random.default_rng(seed)
    heads = [cartridge(f"{name}/{index}", 6_144 if index % 2 == 0 else 2_560) for index in range(8)]
    arrivals = np.cumsum(chance.exponential(1.0, num_requests)).tolist()
    chosen = chance.choice(len(heads), num_requests, p=zipf(len(heads), 0.8)).tolist()
    has_head = (chance.random(num_requests) < 0.9).tolist()
    live = np.clip(chance.lognormal(5.3, 0.9, num_requests), 16, 6_000).astype(int).tolist()
    answers = chance.integers(3, 50, num_requests, endpoint=True).tolist()
    requests = tuple(
        FleetRequest(arrival_s, (heads[which],) if has else (), tokens, answer)
        for arrival_s, which, has, tokens, answer in zip(
            arrivals, chosen, has_head, live, answers, strict=True
        )
    )
    about = "generated: eight hot heads of 6,144 and 2,560 tokens, 3 to 50 tokens of answer"
    return Workload(name, about, requests, is_cartridge_heavy=True)


# --- time ----------------------------------------------------------------------------------------
def scaled(workload: Workload, span_s: float) -> Workload:
    """The same requests in so many seconds; the shape of the arrivals stays."""
    first_s = workload.requests[0].arrival_s
    factor = span_s / max(1e-9, workload.requests[-1].arrival_s - first_s)
    requests = tuple(
        replace(request, arrival_s=(request.arrival_s - first_s) * factor)
        for request in workload.requests
    )
    return replace(workload, requests=requests)
