"""Settings: where values come from, which wins, and every problem in one message."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from cartridge_policies import POLICIES
from cartridge_router.errors import ConfigurationError
from cartridge_router.settings import Settings, load_settings, residency_key, settings_schema


def problems_of(
    file: Path | None = None,
    environment: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
) -> list[str]:
    """The problems that loading reports."""
    with pytest.raises(ConfigurationError) as info:
        load_settings(file, environment or {}, flags or {})
    assert str(info.value) == "; ".join(info.value.problems)
    return info.value.problems


def written(tmp_path: Path, value: object) -> Path:
    """A settings file."""
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(value))
    return path


def test_nothing_given_is_the_defaults() -> None:
    """No file, no environment, no flag."""
    assert load_settings(None, {}, {}) == Settings()


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    """A file of comments only changes nothing."""
    path = tmp_path / "settings.yaml"
    path.write_text("# nothing\n")
    assert load_settings(path, {}, {}) == Settings()


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    """Key by key, also within a section."""
    file = written(
        tmp_path,
        {
            "host": "file",
            "port": 1,
            "tenant": "file",
            "placement": {"policy": "round_robin", "prefill_base_s": 1.5, "max_in_flight": 3},
        },
    )
    environment = {
        "CARTRIDGE_ROUTER_HOST": "environment",
        "CARTRIDGE_ROUTER_PORT": "2",
        "CARTRIDGE_ROUTER_PLACEMENT__POLICY": "least_loaded",
        "CARTRIDGE_ROUTER_PLACEMENT__MAX_IN_FLIGHT": "",
        "OTHER": "ignored",
    }
    flags = {"host": "flag", "port": None, "store": None}
    settings = load_settings(file, environment, flags)
    assert (settings.host, settings.port, settings.tenant) == ("flag", 2, "file")
    assert settings.placement.policy == "least_loaded"
    assert settings.placement.prefill_base_s == 1.5
    assert settings.placement.max_in_flight is None
    assert settings.placement.prefill_s_per_token == Settings().placement.prefill_s_per_token


def test_every_kind_of_value_can_come_from_the_environment(tmp_path: Path) -> None:
    """Lists, numbers, booleans and texts that look like numbers."""
    settings = load_settings(
        None,
        {
            "CARTRIDGE_ROUTER_REPLICAS": "http://a:1, r1=http://b:2,",
            "CARTRIDGE_ROUTER_TRUST_CLIENT_FIELDS": "true",
            "CARTRIDGE_ROUTER_TENANT": "123",
            "CARTRIDGE_ROUTER_STORE": str(tmp_path),
            "CARTRIDGE_ROUTER_REDIS_URL": "redis://localhost:6379/0",
            "CARTRIDGE_ROUTER_FORWARDING__CONNECT_TIMEOUT_S": "0.5",
            "CARTRIDGE_ROUTER_FORWARDING__MAX_ATTEMPTS": "7",
            "CARTRIDGE_ROUTER_CONFIG": "/not/a/setting",
            "CARTRIDGE_ROUTER_RESIDENCY_KEY": "not a setting either",
            "CARTRIDGE_ROUTER_CONTROL_TOKEN": "nor is this one",
            "CARTRIDGE_ROUTER_ADMIN_TOKEN": "nor this one",
        },
        {},
    )
    assert settings.replica_urls() == {"a:1": "http://a:1", "r1": "http://b:2"}
    assert settings.trust_client_fields is True
    assert (settings.tenant, settings.store) == ("123", str(tmp_path))
    assert settings.redis_url == "redis://localhost:6379/0"
    assert settings.forwarding.connect_timeout_s == 0.5
    assert settings.forwarding.max_attempts == 7


def test_every_problem_of_every_source_is_listed_at_once(tmp_path: Path) -> None:
    """Whoever fixes a file sees all that is wrong with it, and where."""
    file = written(
        tmp_path,
        {
            "prot": 8000,
            "port": 70000,
            "placement": {"policy": "fastest", "queue_s_per_request": -1},
            "forwarding": {"connect_timeout_s": 0},
            "residency": {"stale_after_s": 10, "fallback_after_s": 5},
            "replicas": ["ftp://x", "http://ok:1"],
        },
    )
    environment = {
        "CARTRIDGE_ROUTER_FLEET__NUM_FAILURES": "many",
        "CARTRIDGE_ROUTER_CARTRIDGES": "{",
        "CARTRIDGE_ROUTER_STORE": str(tmp_path / "absent"),
    }
    text = "\n".join(problems_of(file, environment))
    for part in (
        "'prot' was unexpected",
        "port: 70000",
        "placement.queue_s_per_request: -1",
        "forwarding.connect_timeout_s: 0",
        "fleet.num_failures: 'many'",
        "CARTRIDGE_ROUTER_CARTRIDGES: ",
        "placement.policy: 'fastest'",
        "residency.fallback_after_s",
        "'ftp://x'",
        "absent is not a folder",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ({"unknown": 1}, "unknown"),
        ({"placement": {"unknown": 1}}, "placement: "),
        ({"placement": "round_robin"}, "placement: 'round_robin'"),
        ({"port": "8000"}, "port: '8000'"),
        ({"replicas": "http://a:1"}, "replicas: "),
        ({1: 2}, "1"),
        ([1], "not a mapping"),
        ("text", "not a mapping"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, value: object, part: str) -> None:
    """Unknown keys and wrong types are errors with their path."""
    (problem,) = problems_of(written(tmp_path, value))
    assert part in problem


@pytest.mark.parametrize("data", [b"a: [", b"\xff\xfe\x00", b"a: !!python/object:x {}"])
def test_a_file_that_is_no_yaml_is_a_problem(tmp_path: Path, data: bytes) -> None:
    """The file is named; tags are never executed."""
    path = tmp_path / "settings.yaml"
    path.write_bytes(data)
    (problem,) = problems_of(path)
    assert problem.startswith(str(path))


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    """A file that was asked for and is not there stops the start."""
    (problem,) = problems_of(tmp_path / "absent.yaml")
    assert "absent.yaml" in problem


def test_a_section_given_as_a_value_and_as_members_is_a_problem() -> None:
    """`…_PLACEMENT=x` beside `…_PLACEMENT__POLICY=y` is reported, not a crash."""
    problems = problems_of(
        environment={
            "CARTRIDGE_ROUTER_PLACEMENT": "x",
            "CARTRIDGE_ROUTER_PLACEMENT__POLICY": "round_robin",
        }
    )
    assert any("PLACEMENT" in problem.upper() for problem in problems)


def test_an_unknown_variable_with_the_prefix_is_a_problem() -> None:
    """A misspelt name does not pass in silence."""
    (problem,) = problems_of(environment={"CARTRIDGE_ROUTER_PROT": "1"})
    assert "prot" in problem


def test_an_unknown_policy_is_answered_with_the_known_ones() -> None:
    """All policies that exist are listed."""
    (problem,) = problems_of(flags={"placement": {"policy": "fastest"}})
    assert problem.startswith("placement.policy: 'fastest'")
    for name in POLICIES:
        assert name in problem


@pytest.mark.parametrize(
    "text",
    ["a:1", "ftp://a:1", "http://", "http://a:1/v1", "http://a b", "x y=http://a:1", "=http://a:1"],
)
def test_a_replica_that_is_no_base_url_is_named(text: str) -> None:
    """Paths, other schemes and odd names are refused with the text that was given."""
    (problem,) = problems_of(flags={"replicas": [text, "http://ok:1"]})
    assert repr(text) in problem


def test_two_replicas_of_one_name_are_a_problem() -> None:
    """By an explicit name, or by the same address twice."""
    for replicas in (["r=http://a:1", "r=http://b:1"], ["http://a:1", "http://a:1/"]):
        (problem,) = problems_of(flags={"replicas": replicas})
        assert "same name" in problem


def test_replicas_keep_their_order_and_lose_a_final_slash() -> None:
    """`https` and IPv6 addresses are fine."""
    settings = load_settings(
        None, {}, {"replicas": ["z=https://h:1/", " http://[::1]:8001 ", "a=http://h:3"]}
    )
    assert settings.replica_urls() == {
        "z": "https://h:1",
        "[::1]:8001": "http://[::1]:8001",
        "a": "http://h:3",
    }
    assert list(settings.replica_urls()) == ["z", "[::1]:8001", "a"]


def test_the_schema_is_valid_and_closed() -> None:
    """It is a draft 2020-12 schema; the defaults pass it, and it knows no other key."""
    schema = json.loads(json.dumps(settings_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert list(validator.iter_errors(msgspec.to_builtins(Settings()))) == []
    assert list(validator.iter_errors({"other": 1})) != []
    sections = [definition for definition in schema["$defs"].values() if "properties" in definition]
    assert len(sections) >= 6
    assert all(section["additionalProperties"] is False for section in sections)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"tenants": {"tenant_claim": "sub"}}, "tenants: without keys_file or jwks_url"),
        ({"tenants": {"listed": {"acme": {}}}}, "tenants: without keys_file or jwks_url"),
        (
            {"tenants": {"keys_file": "f"}, "trust_client_fields": True},
            "trust_client_fields: with tenants.* each tenant has is_trusted",
        ),
        ({"tenants": {"keys_file": "f", "issuer": "i"}}, "tenants.issuer: goes with"),
        ({"tenants": {"keys_file": "f", "allow_unlisted": True}}, "tenants.allow_unlisted: is for"),
        ({"tenants": {"keys_file": "f", "listed": {"a b": {}}}}, "tenants.listed: 'a b'"),
        ({"tenant": "a b"}, "tenant: 'a b'"),
        ({"tenant": "a\n"}, "tenant, tenants.listed: a name ends with a line break"),
        ({"tenants": {"jwks_url": "https://h", "issuer": "i"}}, "tenants.audience: goes with"),
        *(
            ({"tenants": {"jwks_url": url, "issuer": "i", "audience": "a"}}, "tenants.jwks_url: ")
            for url in ("http://h/x", "h", "https://", "ftp://h", "https://u:pw@h", "https://[")
        ),
    ],
)
def test_settings_of_tenants_that_do_not_go_together_are_named(
    flags: dict[str, Any], part: str
) -> None:
    """Nothing of them is left unused in silence, and no account is repeated."""
    (problem,) = problems_of(flags=flags)
    assert problem.startswith(part)
    assert "pw" not in problem


def test_tenants_may_come_from_the_environment() -> None:
    """Texts are texts."""
    environment = {
        "CARTRIDGE_ROUTER_TENANTS__KEYS_FILE": "1",
        "CARTRIDGE_ROUTER_TENANTS__JWKS_URL": "http://localhost:1/jwks",
        "CARTRIDGE_ROUTER_TENANTS__ISSUER": "2",
        "CARTRIDGE_ROUTER_TENANTS__AUDIENCE": "3",
        "CARTRIDGE_ROUTER_TENANTS__DEFAULT_LIMITS__TOKENS_PER_MINUTE": "4",
    }
    tenants = load_settings(None, environment, {}).tenants
    assert (tenants.keys_file, tenants.issuer, tenants.audience) == ("1", "2", "3")
    assert tenants.default_limits.tokens_per_minute == 4
    assert tenants.is_on


def test_the_residency_key_comes_from_its_own_variable() -> None:
    """A secret has no place in a settings file; an empty one is none."""
    variable = "CARTRIDGE_ROUTER_RESIDENCY_KEY"
    assert residency_key({variable: "secret"}) == b"secret"
    assert residency_key({variable: ""}) is None
    assert residency_key({}) is None


def test_a_login_of_the_environment_enters_the_url_of_redis(tmp_path: Path) -> None:
    """As user and password; half a login is a problem like others, and no other key is read."""
    login = {
        "CARTRIDGE_ROUTER_REDIS_USERNAME": "cartridge-gateway",
        "CARTRIDGE_ROUTER_REDIS_PASSWORD": "p/w",
    }
    settings = load_settings(None, login, {"redis_url": "redis://host:6379/0"})
    assert settings.redis_url == "redis://cartridge-gateway:p%2Fw@host:6379/0"
    assert load_settings(None, login, {}).redis_url is None
    missing = {"CARTRIDGE_ROUTER_REDIS_PASSWORD_FILE": str(tmp_path / "absent")}
    (problem,) = problems_of(environment=missing, flags={"redis_url": "redis://host"})
    assert problem.startswith("redis_url: CARTRIDGE_ROUTER_REDIS_PASSWORD_FILE: ")


@pytest.mark.parametrize(
    "url", ["engines:8001", "http://engines", "http://engines:8001/", "ftp://e:1", "http://:1"]
)
def test_a_dns_name_has_a_scheme_and_a_port(tmp_path: Path, url: str) -> None:
    """What is behind it is not guessed."""
    (problem,) = problems_of(written(tmp_path, {"fleet": {"dns": url}}))
    assert problem.startswith("fleet.dns: ")


def test_registrations_come_through_redis(tmp_path: Path) -> None:
    """Without its address there are none."""
    file = written(tmp_path, {"fleet": {"from_registrations": True}})
    assert problems_of(file) == ["fleet.from_registrations: needs redis_url"]
    load_settings(file, {"CARTRIDGE_ROUTER_REDIS_URL": "redis://localhost"}, {})


def test_a_service_is_in_a_namespace(tmp_path: Path) -> None:
    """Which one is not guessed; names that look like numbers are names."""
    file = written(tmp_path, {"fleet": {"kubernetes": {"service": "engines"}}})
    assert problems_of(file) == ["fleet.kubernetes.namespace: must be set with a service"]
    environment = {"CARTRIDGE_ROUTER_FLEET__KUBERNETES__NAMESPACE": "007"}
    assert load_settings(file, environment, {}).fleet.kubernetes.namespace == "007"
