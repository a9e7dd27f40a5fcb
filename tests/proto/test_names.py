"""Wire names: spelled well, and no two things under one name."""

from collections import Counter

import pytest

from cartridge_proto import names

CONSTANTS = {name: value for name, value in vars(names).items() if name.isupper()}
GROUPS = ["HEADER_", "FIELD_", "REDIS_", "ENV_", "DOMAIN_", "METRIC_", "SPAN_", "ATTR_"]


@pytest.mark.parametrize("group", GROUPS)
def test_no_two_names_of_a_group_are_equal(group: str) -> None:
    """Within headers, fields, keys, metrics and so on each name stands for one thing."""
    values = [value for name, value in CONSTANTS.items() if name.startswith(group)]
    assert values
    assert [value for value, count in Counter(values).items() if count > 1] == []


def test_headers_are_lower_case_tokens() -> None:
    """Header names are lower case and free of separators that HTTP forbids."""
    for name, value in CONSTANTS.items():
        if name.startswith("HEADER_"):
            assert value == value.lower()
            assert set(value) <= set("abcdefghijklmnopqrstuvwxyz-"), name


def test_cartridge_headers_share_the_prefix_that_the_gateway_strips() -> None:
    """Every header but those that others have named starts with the common prefix."""
    own = {value for name, value in CONSTANTS.items() if name.startswith("HEADER_")}
    assert {value for value in own if not value.startswith(names.HEADER_PREFIX)} == {
        "api-key",
        "authorization",
        "www-authenticate",
        "x-api-key",
        "x-data-parallel-rank",
        "x-request-id",
        "x-session-id",
        "x-vllm-priority",
    }


def test_metrics_are_prometheus_names_without_the_counter_suffix() -> None:
    """Metric names carry the product prefix; the client library adds `_total` itself."""
    for name, value in CONSTANTS.items():
        if name.startswith("METRIC_"):
            assert value.startswith(("cartridge_router_", "cartridge_engine_", "cartridge_agent_"))
            assert not value.endswith("_total")


def test_redis_keys_of_two_replicas_never_meet() -> None:
    """Key formats keep replicas apart, and apart from the shared keys."""
    replicas = ["a", "b", "a:b", "residency", "changes"]
    keys = [key(replica) for key in (names.residency_key, names.lease_key) for replica in replicas]
    keys += [names.REDIS_REPLICAS, names.REDIS_RECEIPTS]
    assert len(set(keys)) == len(keys)


def test_no_domain_is_the_beginning_of_another() -> None:
    """Domains of hashes stay apart even where lengths are not encoded."""
    domains = [value for name, value in CONSTANTS.items() if name.startswith("DOMAIN_")]
    assert not [
        (one, other)
        for one in domains
        for other in domains
        if one is not other and other.startswith(one)
    ]
