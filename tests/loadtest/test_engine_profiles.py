"""Profiles of engines: from files, with their errors, and from what was measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from cartridge_loadtest.engine_profiles import (
    FirstToken,
    InvalidProfile,
    fitted,
    read_profile,
    write_profile,
)
from cartridge_loadtest.replica_model import EngineProfile
from cartridge_policies.rates import TierRate
from cartridge_proto.residency import Tier

SLOW = replace(
    EngineProfile(),
    prefill_base_s=0.2,
    prefill_s_per_token=0.004,
    prefill_s_per_token2=1e-6,
    tiers={**EngineProfile().tiers, Tier.REMOTE: TierRate(0.1, 3e7)},
)


def test_a_profile_comes_out_as_it_went_in(tmp_path: Path) -> None:
    """Every field, tiers included."""
    write_profile(SLOW, tmp_path / "new" / "slow.json")
    assert read_profile(tmp_path / "new" / "slow.json") == SLOW


def test_what_is_not_named_is_as_in_the_default(tmp_path: Path) -> None:
    """A file may hold what was measured and nothing else."""
    file = tmp_path / "some.json"
    file.write_text(
        '{"prefill_base_s": 0.2, "tiers": {"remote": {"latency_s": 1, "bytes_per_s": 9}}}'
    )
    found = read_profile(file)
    assert (found.prefill_base_s, found.tiers[Tier.REMOTE]) == (0.2, TierRate(1, 9))
    assert found.tiers[Tier.DRAM] == EngineProfile().tiers[Tier.DRAM]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"prefill_bas_s": 1}', "prefill_bas_s: unknown"),
        ('{"prefill_base_s": "fast"}', "prefill_base_s"),
        ('{"prefill_base_s": -1}', "prefill_base_s: -1.0; at least 0"),
        ('{"kv_tokens": 0}', "kv_tokens: 0; at least 1"),
        ('{"tiers": {"tape": {"latency_s": 1, "bytes_per_s": 1}}}', "tape"),
        (
            '{"tiers": {"dram": {"latency_s": 1, "bytes_per_s": 0}}}',
            "tiers.dram: rates are above 0",
        ),
    ],
)
def test_what_is_no_profile_is_named(tmp_path: Path, text: str, problem: str) -> None:
    """With its file, the field and the limit."""
    file = tmp_path / "profile.json"
    file.write_text(text)
    with pytest.raises(InvalidProfile, match=problem) as refused:
        read_profile(file)
    assert str(file) in str(refused.value)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    """Not a traceback."""
    with pytest.raises(InvalidProfile, match=r"absent\.json"):
        read_profile(tmp_path / "absent.json")


def test_a_fit_finds_the_engine_again() -> None:
    """From first tokens of an engine that is known: it predicts others within a percent or two."""
    seen = [
        FirstToken(live, virtual, tier, size, _seconds(live, virtual, tier, size))
        for live in (8, 64, 320)
        for virtual in (0, 200, 700)
        for tier, size in ((Tier.HBM, 0), (Tier.REMOTE, 30_000_000), (Tier.REMOTE, 5_000_000))
    ] * 3
    found = fitted(EngineProfile(), seen)
    for live, virtual in ((16, 0), (150, 400)):
        assert found.prefill_s(live, virtual) == pytest.approx(
            SLOW.prefill_s(live, virtual), rel=0.02
        )
    assert found.rates.load_s(Tier.REMOTE, 15_000_000) == pytest.approx(0.6, rel=0.1)
    assert found.tiers[Tier.DRAM] == EngineProfile().tiers[Tier.DRAM]


def _seconds(live: int, virtual: int, tier: Tier, size: int) -> float:
    load_s = 0.0 if tier is Tier.HBM else 0.1 + size / 3e7
    return SLOW.prefill_s(live, virtual) + load_s
