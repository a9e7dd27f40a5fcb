"""The extension's settings: defaults, and every problem in one message."""

from pathlib import Path

import pytest

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.settings import (
    DEFAULT_DRAM_BYTES,
    parse_settings,
    redis_url_with_login,
    residency_key_from_environment,
)
from cartridge_proto.names import ENV_REDIS_PASSWORD, ENV_REDIS_USERNAME, ENV_RESIDENCY_KEY

URL = "http://127.0.0.1:8001"


def problems(config: dict[str, object]) -> str:
    """The message about settings that must be refused."""
    with pytest.raises(ConfigurationError) as caught:
        parse_settings(config)
    return str(caught.value)


def test_store_and_address_are_enough(tmp_path: Path) -> None:
    """Everything else has a default; the replica is called by its address."""
    settings = parse_settings({"store": str(tmp_path), "self_url": URL})
    assert settings.replica == "127.0.0.1:8001"
    assert (settings.dram_bytes, settings.num_loaders) == (DEFAULT_DRAM_BYTES, 2)
    assert (settings.lease_s, settings.with_weights_digest) == (6.0, True)
    optional = (settings.redis_url, settings.control_address, settings.api_key, settings.model_dir)
    assert optional == (None, None, None, None)
    assert settings.advertise_url is None


def test_every_setting_can_be_set(tmp_path: Path) -> None:
    """What an operator writes is what the extension gets."""
    config: dict[str, object] = {
        "store": str(tmp_path),
        "self_url": "https://engine-0.engines:8001",
        "replica_id": "engine-0",
        "advertise_url": "http://10.0.0.7:8001",
        "api_key": "key",
        "redis_url": "redis://redis:6379",
        "control_address": "0.0.0.0:9001",
        "control_token_file": "/run/token",
        "control_tls_cert": "/run/tls.crt",
        "control_tls_key": "/run/tls.key",
        "control_tls_client_ca": "/run/ca.crt",
        "dram_bytes": 1,
        "pinned_bytes": 1,
        "eviction_policy": "gdsf",
        "nvme_dir": "/var/cache/cartridges",
        "nvme_bytes": 1 << 30,
        "agent_socket": "unix:/run/agent.sock",
        "num_loaders": 1,
        "lease_s": 1,
        "with_weights_digest": False,
        "segment_kernel": "native",
        "attend_in_place": True,
        "moved_keys_bytes": 0,
        "model_dir": "/models/m",
    }
    settings = parse_settings(config)
    assert {name: getattr(settings, name) for name in config} == config
    assert settings.replica == "engine-0"


@pytest.mark.parametrize("store", ["s3://bucket/store", "oci://host/store", "redis://host"])
def test_a_store_may_be_a_url(store: str) -> None:
    """It is not asked yet."""
    assert parse_settings({"store": store, "self_url": URL}).store == store


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("store", "/does/not/exist", "store: /does/not/exist is not a folder"),
        ("store", "ftp://host/x", "store: unknown kind of store ftp://; allowed are a folder"),
        ("store", "oci://maker:secret@host/x", "store: oci://: an account in a store URL"),
        ("nvme_dir", "nvme", "nvme_dir: nvme is not an absolute path"),
        ("nvme_bytes", 0, "nvme_bytes: 0 must be above 0"),
        ("pinned_bytes", (4 << 30) + 1, "pinned_bytes: 4294967297 must be from 0 to dram_bytes"),
        ("agent_socket", "/run/agent.sock", "agent_socket: '/run/agent.sock'; unix:/path"),
        ("pinned_bytes", -1, "pinned_bytes: -1 must be from 0"),
        ("eviction_policy", "fifo", "eviction_policy: Invalid enum value 'fifo'"),
        ("advertise_url", "engine:8001", "advertise_url: 'engine:8001' is not http(s)://host:port"),
        ("advertise_url", "http://e:1/v1", "advertise_url: 'http://e:1/v1' is not"),
        ("dram_bytes", 0, "dram_bytes: 0 must be above 0"),
        ("moved_keys_bytes", -1, "moved_keys_bytes: -1 must be at least 0"),
        ("attend_in_place", "yes", "attend_in_place: Expected `bool`, got `str`"),
        ("segment_kernel", 1, "segment_kernel: Expected `str`, got `int`"),
        ("num_loaders", -1, "num_loaders: -1 must be above 0"),
        ("lease_s", 0.5, "lease_s: 0.5 must be from 1 to 3600"),
        ("lease_s", float("nan"), "lease_s: nan"),
        ("lease_s", float("inf"), "lease_s: inf"),
        ("self_url", "127.0.0.1:8001", "self_url: '127.0.0.1:8001' is no http URL"),
        ("self_url", "ftp://host", "self_url: 'ftp://host' is no http URL"),
        ("replica_id", "a b", "replica_id: 'a b' has other signs"),
        ("replica_id", "a\n", "replica_id: 'a\\n' has other signs"),
        ("replica_id", "a" * 129, "replica_id: "),
        ("replica_id", "changes", "replica_id: 'changes' is taken"),
        ("num_loaders", "two", "num_loaders: Expected `int`, got `str`"),
        ("with_weights_digest", 1, "with_weights_digest: Expected `bool`, got `int`"),
        ("drambytes", 1, "drambytes: there is no such setting"),
    ],
)
def test_a_bad_value_is_named(name: str, value: object, text: str, tmp_path: Path) -> None:
    """The message starts with where it was set, and names the setting and its value."""
    message = problems({"store": str(tmp_path), "self_url": URL, name: value})
    assert message.startswith("kv_connector_extra_config: ")
    assert text in message


def test_a_missing_setting_is_named() -> None:
    """Both settings without a default are asked for at once."""
    message = problems({})
    assert "store: must be set" in message
    assert "self_url: must be set" in message


def test_every_problem_is_in_one_message(tmp_path: Path) -> None:
    """Wrong types, unknown names and bad values are reported together."""
    message = problems(
        {
            "store": str(tmp_path / "absent"),
            "self_url": 5,
            "dram_bytes": "4 GiB",
            "lease_s": 0,
            "unknown": True,
        }
    )
    for name in ("store", "self_url", "dram_bytes", "lease_s", "unknown"):
        assert f"{name}: " in message


def test_the_signing_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key never stands in the flags; an absent or empty one means unsigned records."""
    monkeypatch.delenv(ENV_RESIDENCY_KEY, raising=False)
    assert residency_key_from_environment() is None
    monkeypatch.setenv(ENV_RESIDENCY_KEY, "")
    assert residency_key_from_environment() is None
    monkeypatch.setenv(ENV_RESIDENCY_KEY, "sécret")
    assert residency_key_from_environment() == "sécret".encode()


def test_a_login_at_redis_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag shows the password; half a login stops the start."""
    monkeypatch.setenv(ENV_REDIS_USERNAME, "cartridge-engine-r0")
    monkeypatch.delenv(ENV_REDIS_PASSWORD, raising=False)
    with pytest.raises(ConfigurationError, match="redis_url: CARTRIDGE_ROUTER_REDIS_USERNAME"):
        redis_url_with_login("redis://host/0")
    monkeypatch.setenv(ENV_REDIS_PASSWORD, "secret")
    assert redis_url_with_login("redis://host/0") == "redis://cartridge-engine-r0:secret@host/0"
