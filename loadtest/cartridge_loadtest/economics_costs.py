"""What Cartridges cost: prices, the fleet, the model, builds, prefill and links; from a YAML file.

Owns names, units, defaults and limits of everything that the economics report multiplies. Refuses
unknown keys, and reports every problem in one message.
"""

import math
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import jsonschema
import msgspec
import yaml

from cartridge_policies.rates import ReplicaRates, TierRate
from cartridge_proto.residency import Tier

GIB: Final = 1 << 30
SECONDS_PER_HOUR: Final = 3_600.0
SECONDS_PER_DAY: Final = 86_400.0
SECONDS_PER_MONTH: Final = 730 * SECONDS_PER_HOUR
"""A twelfth of a year of 365 days, as clouds bill."""
_GB: Final = 1e9
_ELEMENT_BYTES: Final = 2
"""Of a key, of a value that is not quantised, and of both in the engine's cache."""

Usd = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Gib = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class CostsError(Exception):
    """The costs cannot be used; `problems` lists all of them."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: frozen and closed."""


class Prices(_Section, frozen=True, kw_only=True):
    """Money. All defaults are assumptions, of the order of public list prices; put your own."""

    gpu_usd_per_hour: Usd = 2.5
    """One GPU with its share of the machine, DRAM excepted. Assumption: an H100, rented."""
    dram_usd_per_gib_month: Usd = 3.0
    """Assumption: what a GiB more costs between instances that differ in memory."""
    nvme_usd_per_gib_month: Usd = 0.08
    """Assumption: as network disks; disks that come with the machine are cheaper."""
    object_usd_per_gib_month: Usd = 0.023
    """Assumption: standard class of object storage."""
    transfer_usd_per_gib: Usd = 0.0
    """Each GiB that is read from the store. Assumption: store and engines in one region."""
    hbm_value_share: Share = 0.5
    """Of a replica's price, what all of its KV room is worth to other requests. Assumption."""
    load_gpu_share: Share = 1.0
    """Of a replica, what idles while a Cartridge is read. Assumption: all; an upper bound, since
    engines load in the background."""


class Fleet(_Section, frozen=True, kw_only=True):
    """Where Cartridges can be kept. Rooms are those of the simulator's profile (docs/simulator.md).

    `…_copies`: on how many replicas one is kept; 1 is what placement by residency needs.
    """

    num_replicas: Count = 8
    gpus_per_replica: Count = 1
    hbm_kv_gib_per_replica: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 55.0
    """KV room: 450,000 tokens of 128 KiB."""
    hbm_share: Share = 0.25
    """Of the KV room, what Cartridges may hold: the engines' `hbm_pinned_fraction`."""
    dram_gib_per_replica: Gib = 186.0
    """For Cartridges: 200 GB."""
    nvme_gib_per_replica: Gib = 1_863.0
    """For Cartridges: 2 TB."""
    hbm_copies: Count = 1
    dram_copies: Count = 1
    nvme_copies: Count = 1


class Values(StrEnum):
    """How values are stored; keys have 16 bits."""

    FULL = "full"
    """K16/V16."""
    E4M3 = "e4m3"
    """K16/V8."""


class ModelShape(_Section, frozen=True, kw_only=True):
    """Bytes of a token. Default: 8B parameters with 8 KV heads, as in the simulator."""

    num_layers: Count = 32
    num_kv_heads: Count = 8
    head_dim_k: Count = 128
    head_dim_v: Count = 128
    values: Values = Values.FULL
    """As `cartridge build --values`. Scales, 4 bytes for each head or channel of a layer, are left
    out."""

    @property
    def stored_bytes_per_token(self) -> int:
        """In the store, on disks, in memory and on links."""
        value_bytes = _ELEMENT_BYTES if self.values is Values.FULL else 1
        return self._heads * (self.head_dim_k * _ELEMENT_BYTES + self.head_dim_v * value_bytes)

    @property
    def hbm_bytes_per_token(self) -> int:
        """In the engine's cache, which holds values dequantised."""
        return self._heads * (self.head_dim_k + self.head_dim_v) * _ELEMENT_BYTES

    @property
    def _heads(self) -> int:
        return self.num_layers * self.num_kv_heads


class BuildKind(StrEnum):
    """How Cartridges are made."""

    PREFILL = "prefill"
    TRAINED = "trained"


class Build(_Section, frozen=True, kw_only=True):
    """What it costs to have one."""

    kind: BuildKind = BuildKind.PREFILL
    """`prefill`: one prefill of the source, by the rates below."""
    gpu_hours_per_cartridge: Annotated[float, msgspec.Meta(ge=0, le=1_000_000)] = 0.5
    """Of trained ones only. Assumption; take your own training logs."""
    source_tokens_per_token: Annotated[float, msgspec.Meta(ge=1, le=1_000_000)] = 1.0
    """How many tokens of the document one position stands for. 1 = an ordinary prefill."""


class Inference(_Section, frozen=True, kw_only=True):
    """Seconds of a replica. Source: the simulator's profile of an H100 (docs/simulator.md).

    Prefill of m tokens behind P takes `prefill_base_s + prefill_s_per_token * m +
    prefill_s_per_token2 * ((P + m)**2 - P**2)`.
    """

    prefill_base_s: Seconds = 0.03
    prefill_s_per_token: Seconds = 0.0002
    prefill_s_per_token2: Seconds = 1e-9
    decode_s_per_context_token: Seconds = 4e-8
    """What each token of context adds to each token of the answer."""
    prefix_cache_hit_share: Share = 0.0
    """Of requests in plain text, for how many the engine's own prefix cache has the document.
    Assumption: none; a measured share makes savings smaller."""


class Link(_Section, frozen=True, kw_only=True):
    """How fast a tier gives bytes."""

    latency_s: Seconds
    gb_per_s: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
    """10^9 bytes a second."""
    s_per_chunk: Seconds = 0.0
    """Of each 16 MiB."""

    @property
    def rate(self) -> TierRate:
        """As placement policies have it."""
        return TierRate(self.latency_s, self.gb_per_s * _GB, self.s_per_chunk)


class Links(_Section, frozen=True, kw_only=True):
    """To the tiers. Source: links as sold (docs/simulator.md); HBM needs none."""

    dram: Link = Link(latency_s=0.0005, gb_per_s=20.0)
    nvme: Link = Link(latency_s=0.002, gb_per_s=5.0)
    remote: Link = Link(latency_s=0.02, gb_per_s=3.0, s_per_chunk=0.001)
    """25 GbE."""


class Costs(_Section, frozen=True, kw_only=True):
    """The whole file; everything has a default."""

    horizon_days: Annotated[float, msgspec.Meta(gt=0, le=36_500)] | None = None
    """The demand of the trace goes on at its rate for so long; absent = the trace's own time."""
    prices: Prices = Prices()
    fleet: Fleet = Fleet()
    model: ModelShape = ModelShape()
    build: Build = Build()
    inference: Inference = Inference()
    links: Links = Links()

    @property
    def rates(self) -> ReplicaRates:
        """What a placement policy would predict with."""
        inference, links = self.inference, self.links
        return ReplicaRates(
            prefill_base_s=inference.prefill_base_s,
            prefill_s_per_token=inference.prefill_s_per_token,
            prefill_s_per_token2=inference.prefill_s_per_token2,
            decode_s_per_context_token=inference.decode_s_per_context_token,
            tiers={
                Tier.HBM: TierRate(0.0, math.inf),
                Tier.DRAM: links.dram.rate,
                Tier.NVME: links.nvme.rate,
                Tier.REMOTE: links.remote.rate,
            },
        )

    @property
    def replica_usd_per_s(self) -> float:
        """Price of a second of a replica."""
        return self.prices.gpu_usd_per_hour * self.fleet.gpus_per_replica / SECONDS_PER_HOUR

    @property
    def usd_per_byte_s(self) -> dict[Tier, float]:
        """Price of keeping a byte for a second. HBM: the part of the replica that it takes."""
        prices, fleet = self.prices, self.fleet
        kv_bytes = fleet.hbm_kv_gib_per_replica * GIB
        byte_months = GIB * SECONDS_PER_MONTH
        return {
            Tier.HBM: self.replica_usd_per_s * prices.hbm_value_share / kv_bytes,
            Tier.DRAM: prices.dram_usd_per_gib_month / byte_months,
            Tier.NVME: prices.nvme_usd_per_gib_month / byte_months,
            Tier.REMOTE: prices.object_usd_per_gib_month / byte_months,
        }

    @property
    def room_bytes_per_replica(self) -> dict[Tier, float]:
        """Of the tiers that have a bound, what one replica has for Cartridges."""
        fleet = self.fleet
        return {
            Tier.HBM: fleet.hbm_kv_gib_per_replica * fleet.hbm_share * GIB,
            Tier.DRAM: fleet.dram_gib_per_replica * GIB,
            Tier.NVME: fleet.nvme_gib_per_replica * GIB,
        }

    @property
    def copies(self) -> dict[Tier, int]:
        """On how many replicas one is kept; the store has it once."""
        fleet = self.fleet
        return {
            Tier.HBM: fleet.hbm_copies,
            Tier.DRAM: fleet.dram_copies,
            Tier.NVME: fleet.nvme_copies,
            Tier.REMOTE: 1,
        }


def read_costs(file: Path | None) -> Costs:
    """Defaults, then the file.

    Raises:
        CostsError: with every problem.
    """
    if file is None:
        return Costs()
    try:
        data = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise CostsError([f"{file}: {error.strerror or error}"]) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise CostsError([f"{file}: {' '.join(str(error).split())}"]) from error
    return costs_of({} if data is None else data)


def costs_of(data: object) -> Costs:
    """Check and convert.

    Raises:
        CostsError: with every problem.
    """
    data = _with_numbers(data)
    errors = sorted(_validator().iter_errors(data), key=lambda error: error.json_path)
    problems = [f"{_place(error.json_path)}: {_message(error)[:200]}" for error in errors]
    problems += [f"{place}: not a finite number" for place in _not_finite(data, "")]
    if problems:
        raise CostsError(problems)
    costs = msgspec.convert(data, Costs)
    for tier in ("hbm", "dram", "nvme"):
        copies = getattr(costs.fleet, f"{tier}_copies")
        if copies > costs.fleet.num_replicas:
            limit = costs.fleet.num_replicas
            problems.append(f"fleet.{tier}_copies: {copies} is more than num_replicas, {limit}")
    if problems:
        raise CostsError(problems)
    return costs


@cache
def _validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(msgspec.json.schema(Costs))


def _place(json_path: str) -> str:
    return json_path.removeprefix("$").removeprefix(".") or "costs"


def _message(error: jsonschema.ValidationError) -> str:
    """What is wrong with a value that may be absent: its own limit, not that it is given."""
    if error.validator != "anyOf":
        return error.message
    return " or ".join(
        each.message for each in error.context or () if each.validator_value != "null"
    )


def _with_numbers(data: object) -> object:
    """YAML 1.1 reads 1e-9 as a text; no text of ours looks like a number. 8.0 is a count too."""
    if isinstance(data, dict):
        return {name: _with_numbers(value) for name, value in data.items()}
    if isinstance(data, str):
        try:
            data = float(data)
        except ValueError:
            return data
    return int(data) if isinstance(data, float) and data.is_integer() else data


def _not_finite(data: Any, place: str) -> list[str]:
    if isinstance(data, dict):
        return [
            found
            for name, value in data.items()
            for found in _not_finite(value, f"{place}.{name}" if place else str(name))
        ]
    return [place] if isinstance(data, float) and not math.isfinite(data) else []
