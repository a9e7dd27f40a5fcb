"""The Grafana dashboard asks for metrics and labels that there are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cartridge_engine_ext.activity import LABELS
from cartridge_proto import names
from cartridge_router.telemetry import Metrics

FILE = Path(__file__).parents[2] / "helm/cartridge-router/dashboard.json"
PANELS: list[dict[str, Any]] = json.loads(FILE.read_text())["panels"]
QUERIES = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
_GROUPING = re.compile(r"by \(([a-z_, ]+)\)")
_LEGEND = re.compile(r"{{([a-z_]+)}}")


def known_labels() -> dict[str, set[str]]:
    """Labels of each metric, without the suffixes that Prometheus knows."""
    gateway = {
        metric._name: set(metric._labelnames)
        for metric in vars(Metrics()).values()
        if hasattr(metric, "_labelnames")
    }
    return {**gateway, **{name: set(labels) for name, labels in LABELS.items()}}


def metrics_of(query: str) -> set[str]:
    """Names of metrics, without suffixes."""
    found = re.findall(r"cartridge_(?:router|engine)_[a-z_]+", query)
    return {re.sub("_(?:total|bucket|sum|count)$", "", name) for name in found}


@pytest.mark.parametrize(("title", "target"), QUERIES, ids=lambda value: str(value)[:30])
def test_each_query_can_be_answered(title: str, target: dict[str, Any]) -> None:
    """Its metrics exist, it groups by labels that they have, and its legend names those."""
    labels = known_labels()
    metrics = metrics_of(target["expr"])
    assert metrics
    assert metrics <= labels.keys(), title
    grouped = {
        label.strip() for match in _GROUPING.findall(target["expr"]) for label in match.split(",")
    }
    for metric in metrics:
        assert grouped - {"le"} <= labels[metric], title
    assert set(_LEGEND.findall(target["legendFormat"])) <= grouped
    is_histogram = "_bucket" in target["expr"]
    assert is_histogram == ("le" in grouped) == ("histogram_quantile" in target["expr"])


def test_every_metric_of_the_request_path_is_shown() -> None:
    """What an operator is woken by."""
    shown = {metric for _, target in QUERIES for metric in metrics_of(target["expr"])}
    wanted = {
        names.METRIC_REQUESTS,
        names.METRIC_TTFB_SECONDS,
        names.METRIC_OVERHEAD_SECONDS,
        names.METRIC_IN_FLIGHT,
        names.METRIC_QUEUED,
        names.METRIC_QUEUE_SECONDS,
        names.METRIC_REPLICA_HEALTHY,
        names.METRIC_UPSTREAM_RETRIES,
        names.METRIC_EJECTIONS,
        names.METRIC_BROKEN_ANSWERS,
        names.METRIC_MAP_MODE,
        names.METRIC_ENGINE_REQUESTS,
        names.METRIC_ENGINE_REFUSALS,
        names.METRIC_ENGINE_QUARANTINED,
    }
    assert wanted <= shown
