"""Profiles of engines in files, and from what was measured on an engine.

Owns the file's form and the fit. Refuses to measure: the caller brings first tokens and loads.
"""

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cartridge_loadtest.replica_model import EngineProfile
from cartridge_policies.estimation import RateEstimate
from cartridge_proto.residency import Tier


class InvalidProfile(ValueError):
    """A file is no profile; the text names the file and what is wrong."""


class FirstToken(NamedTuple):
    """Of a request that ran alone: tokens, what it had to load first, and seconds."""

    num_live_tokens: int
    num_virtual_tokens: int
    tier: Tier | None
    """Where the slowest Cartridge came from; `None` without any."""
    loaded_bytes: int
    seconds: float


def read_profile(file: Path) -> EngineProfile:
    """A profile from JSON; what it does not name is as in the default.

    Raises:
        InvalidProfile: the file cannot be read, or a field is unknown or out of its range.
    """
    known = {field.name for field in fields(EngineProfile)}
    try:
        value: Any = msgspec.json.decode(file.read_bytes())
        unknown = sorted(value.keys() - known) if isinstance(value, dict) else []
        if unknown:
            raise InvalidProfile(f"{file}: {unknown[0]}: unknown; known are {', '.join(known)}")
        profile = msgspec.convert(value, EngineProfile)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidProfile(f"{file}: {error}") from error
    tiers = {**EngineProfile().tiers, **profile.tiers}
    for name in known - {"tiers"}:
        number = getattr(profile, name)
        least = 1 if isinstance(number, int) and name != "nvme_bytes" else 0
        if number < least:
            raise InvalidProfile(f"{file}: {name}: {number}; at least {least}")
    for tier, rate in tiers.items():
        if rate.bytes_per_s <= 0 or rate.latency_s < 0 or rate.s_per_chunk < 0:
            raise InvalidProfile(f"{file}: tiers.{tier}: rates are above 0, times at least 0")
    return replace(profile, tiers=tiers)


def write_profile(profile: EngineProfile, file: Path) -> None:
    """As `read_profile` reads it; what is in HBM takes no time, and is left out."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tiers = dict(profile.tiers)
    del tiers[Tier.HBM]
    data = msgspec.json.format(msgspec.json.encode(replace(profile, tiers=tiers)), indent=1)
    file.write_bytes(data + b"\n")


def fitted(prior: EngineProfile, seen: Iterable[FirstToken]) -> EngineProfile:
    """A profile by what was measured: least squares over relative errors, as gateways learn.

    Prefill by what had nothing to load; a tier by what is left of the others without prefill.
    """
    seen = list(seen)
    estimate = RateEstimate(prior.rates)
    for one in seen:
        if one.tier in (None, Tier.HBM):
            estimate.note_prefill(one.num_live_tokens, one.num_virtual_tokens, one.seconds)
    rates = estimate.rates
    for one in seen:
        if one.tier not in (None, Tier.HBM):
            prefill_s = rates.prefill_s(one.num_live_tokens, one.num_virtual_tokens)
            load_s = max(0.0, one.seconds - prefill_s)
            estimate.note_load(one.tier, one.loaded_bytes, load_s)
    rates = estimate.rates
    return replace(
        prior,
        prefill_base_s=rates.prefill_base_s,
        prefill_s_per_token=rates.prefill_s_per_token,
        prefill_s_per_token2=rates.prefill_s_per_token2,
        tiers=dict(rates.tiers),
    )
