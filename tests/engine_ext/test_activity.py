"""Counts between two takings, with bounded labels; and their way to Prometheus."""

import functools
from typing import Any

import msgspec
import prometheus_client

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext.activity import LABELS, MAX_TENANTS, OTHER_TENANT, Activity
from cartridge_engine_ext.stats import ConnectorMetrics, ConnectorStats
from cartridge_proto import names
from cartridge_proto.digest import sha256_digest
from cartridge_proto.residency import (
    FailureReason,
    Receipt,
    ReceiptItem,
    ReceiptStatus,
    Tier,
)

ONE = sha256_digest(b"one")


def receipt(*tiers: Tier, reason: FailureReason | None = None) -> Receipt:
    """Of a request that read from these tiers."""
    return Receipt(
        replica="r",
        epoch="0" * 32,
        request_id="req-1",
        scope="public",
        status=ReceiptStatus.SERVED if reason is None else ReceiptStatus.FAILED,
        reason=reason,
        detail="",
        items=[ReceiptItem(digest=ONE, tier=tier) for tier in tiers],
        num_virtual_tokens=100,
        num_reused_tokens=0,
        num_loads=1,
        loaded_bytes=1000,
        load_s=0.25,
    )


def taken(activity: Activity) -> dict[str, dict[tuple[str, ...], float]]:
    """What is new, by name and labels."""
    found = activity.take()
    assert found is not None
    series: dict[str, dict[tuple[str, ...], float]] = {}
    for part in ("counts", "observed", "levels"):
        for name, labels, number in found[part]:
            series.setdefault(name, {})[tuple(labels)] = number
    return series


def test_a_served_request_counts_for_its_slowest_tier() -> None:
    """Requests, tokens, bytes and seconds; each is taken once."""
    activity = Activity()
    assert activity.take() is None
    activity.note_receipt(receipt(Tier.HBM, Tier.REMOTE, Tier.DRAM), "tenant-a")
    series = taken(activity)
    assert series[names.METRIC_ENGINE_REQUESTS] == {("remote", "tenant-a"): 1}
    assert series[names.METRIC_ENGINE_TOKENS] == {("remote", "tenant-a"): 100}
    assert series[names.METRIC_ENGINE_LOADED_BYTES] == {("tenant-a",): 1000}
    assert series[names.METRIC_ENGINE_LOAD_SECONDS] == {("remote",): 0.25}
    assert activity.take() is None


def test_a_refusal_counts_by_reason() -> None:
    """And for nothing else."""
    activity = Activity()
    activity.note_receipt(receipt(reason=FailureReason.DEADLINE), "tenant-a")
    assert taken(activity) == {names.METRIC_ENGINE_REFUSALS: {("deadline",): 1}}


def test_a_request_that_was_given_up_is_not_served() -> None:
    """It has a count of its own; the bytes that were written for it count."""
    activity = Activity()
    given_up = msgspec.structs.replace(receipt(Tier.DRAM), status=ReceiptStatus.ABANDONED)
    activity.note_receipt(given_up, "tenant-a")
    assert taken(activity) == {
        names.METRIC_ENGINE_ABANDONED: {("tenant-a",): 1},
        names.METRIC_ENGINE_LOADED_BYTES: {("tenant-a",): 1000},
    }


def test_tiers() -> None:
    """What comes and goes is counted, its bytes are a level, and its time is observed."""
    now_s = 100.0
    activity = Activity(clock=lambda: now_s)
    activity.note_entered(ONE, Tier.DRAM, 7)
    now_s = 160.0
    activity.note_left(ONE, Tier.DRAM, 7)
    series = taken(activity)
    assert series[names.METRIC_ENGINE_ENTERED] == series[names.METRIC_ENGINE_LEFT]
    assert series[names.METRIC_ENGINE_RESIDENT_BYTES] == {("dram",): 0}
    assert series[names.METRIC_ENGINE_RESIDENCY_SECONDS] == {("dram",): 60.0}


def test_tenants_beyond_the_bound_share_a_label() -> None:
    """However many tenants come, there are so many labels and one more."""
    activity = Activity()
    for index in range(MAX_TENANTS + 10):
        activity.note_receipt(receipt(Tier.DRAM), f"tenant-{index}")
    requests = taken(activity)[names.METRIC_ENGINE_REQUESTS]
    assert len(requests) == MAX_TENANTS + 1
    assert requests["dram", OTHER_TENANT] == 10


class FakeVllmConfig:
    """The part of vLLM's configuration that its base class reads."""

    kv_transfer_config = None


def test_everything_is_shown_beside_vllms_own() -> None:
    """Joined takings, with vLLM's labels first; counts add up, levels are the latest."""
    registry = prometheus_client.CollectorRegistry()
    activity = Activity()
    activity.note_entered(ONE, Tier.DRAM, 7)
    activity.note_receipt(receipt(Tier.DRAM), "t")
    first = ConnectorStats(data=activity.take() or {})
    activity.note_entered(ONE, Tier.HBM, 9)
    activity.note_receipt(receipt(Tier.DRAM), "t")
    activity.note_quarantined()
    activity.note_hint("cartridge.pin", "done")
    second = ConnectorStats(data=activity.take() or {})
    joined: Any = ConnectorStats(data={}).aggregate(first).aggregate(second)
    assert not joined.is_empty()
    assert joined.reduce()[names.METRIC_ENGINE_REQUESTS] == 2
    types: Any = {
        kind: functools.partial(kind, registry=registry)
        for kind in (
            prometheus_client.Counter,
            prometheus_client.Gauge,
            prometheus_client.Histogram,
        )
    }
    metrics = ConnectorMetrics(FakeVllmConfig(), types, ["engine"], {0: ["zero"]})
    metrics.observe(joined.to_dict(), 0)
    text = prometheus_client.generate_latest(registry).decode()
    for line in (
        'cartridge_engine_requests_total{engine="zero",tenant="t",tier="dram"} 2.0',
        'cartridge_engine_resident_bytes{engine="zero",tier="hbm"} 9.0',
        'cartridge_engine_load_seconds_count{engine="zero",tier="dram"} 2.0',
        'cartridge_engine_quarantined{engine="zero"} 1.0',
        'cartridge_engine_hints_total{action="cartridge.pin",engine="zero",outcome="done"} 1.0',
    ):
        assert line in text
    for name in LABELS:
        assert f"# HELP {name}" in text
    joined.reset()
    assert joined.is_empty()
