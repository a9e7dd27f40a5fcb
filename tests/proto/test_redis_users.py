"""Users of Redis as text: what each may do, which passwords there are, how a login enters a URL."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import ConnectionPool

from cartridge_proto.names import (
    ENV_REDIS_PASSWORD,
    ENV_REDIS_PASSWORD_FILE,
    ENV_REDIS_USERNAME,
    REDIS_USER_ADMIN,
    REDIS_USER_GATEWAY,
)
from cartridge_proto.redis_users import (
    InvalidLogin,
    command_lines,
    engine_user,
    file_lines,
    fleet_users,
    gateway_user,
    with_login,
)

PASSWORD = "a-password-of-the-tests"
OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"


def test_the_manual_shows_the_rules_as_they_are() -> None:
    """Each line of a fleet of one engine stands in docs/operating.md, with `…` for passwords."""
    lines = command_lines(fleet_users(["engine-0"], {}))
    text = OPERATING.read_text("utf-8")
    for line in lines:
        words = [">…" if word.startswith(">") else word for word in line.split()]
        assert " ".join(words) in text


def test_a_fleet_has_an_admin_a_gateway_and_its_engines() -> None:
    """Every password is another, and the default user ends with the last command."""
    users = fleet_users(["r0", "r1"], {})
    names = [REDIS_USER_ADMIN, REDIS_USER_GATEWAY, "cartridge-engine-r0", "cartridge-engine-r1"]
    assert [user.name for user in users] == names
    assert len({user.password for user in users}) == 4
    assert command_lines(users)[-1] == "ACL SETUSER default reset"
    assert file_lines(users)[0] == "user default reset"
    assert all(
        " reset on >" in line for line in [*command_lines(users)[:-1], *file_lines(users)[1:]]
    )


def test_passwords_come_from_the_environment() -> None:
    """By role, with the signs of a replica's name that a variable cannot have as `_`."""
    found = fleet_users(
        ["r.0", "r1"],
        {
            "CARTRIDGE_REDIS_PASSWORD_GATEWAY": PASSWORD,
            "CARTRIDGE_REDIS_PASSWORD_ENGINE_R_0": PASSWORD + "-of-r.0",
        },
    )
    _, gateway, first, second = found
    assert (gateway.password, first.password) == (PASSWORD, PASSWORD + "-of-r.0")
    assert second.password not in {gateway.password, first.password}


def test_two_engines_never_share_a_password() -> None:
    """Names that mean one variable are refused, and so is a name that is given twice."""
    for replicas in (["r.0", "r-0"], ["r0", "r0"]):
        with pytest.raises(InvalidLogin, match=r"CARTRIDGE_REDIS_PASSWORD_ENGINE_R_?0"):
            fleet_users(replicas, {})


@pytest.mark.parametrize("replica", ["", "a b", "r*", "r?", "r[0]", "r0\n", "a" * 129, "changes"])
def test_a_replica_is_a_name_and_no_pattern(replica: str) -> None:
    """Nothing gets into a rule that a server would read as more than one key."""
    with pytest.raises(InvalidLogin, match="not a name that a replica can have"):
        engine_user(replica, PASSWORD)


@pytest.mark.parametrize(
    ("password", "reason"),
    [
        ("short", "5 characters; 16 to 256"),
        ("a" * 257, "257 characters"),
        ("sixteen and more", "visible ASCII"),
        ("sixteen\nand+more", "visible ASCII"),
        ('sixteen-and-"more"', "visible ASCII"),
        ("sixteen-and-'more'", "visible ASCII"),
        ("sixteen-and-\\more", "visible ASCII"),
        ("sixteen-and-märz!", "visible ASCII"),
    ],
)
def test_a_password_that_could_be_misread_is_refused(password: str, reason: str) -> None:
    """The text says why and never repeats it."""
    with pytest.raises(InvalidLogin, match=reason) as refused:
        gateway_user(password)
    assert password not in str(refused.value)


# --- logins --------------------------------------------------------------------------------------
@given(
    st.text("!#$%&()*+,-./0:;<=>?@A[]^_`a{|}~", min_size=1), st.sampled_from(["r0", "a:b", "x.y"])
)
def test_a_login_comes_out_as_it_went_in(password: str, replica: str) -> None:
    """Whatever signs it has: clients of Redis read the same user and password."""
    user = engine_user(replica, (password * 16)[:256])
    url = with_login("redis://host:6379/3", user.environment)
    found = ConnectionPool.from_url(url).connection_kwargs
    assert (found["username"], found["password"]) == (user.name, user.password)
    assert (found["host"], found["port"], found["db"]) == ("host", 6379, 3)


def test_a_url_with_a_login_of_its_own_keeps_it() -> None:
    """The environment never logs anybody in as somebody else."""
    environment = gateway_user(PASSWORD).environment
    assert with_login("redis://me:mine@host/0", environment) == "redis://me:mine@host/0"
    assert with_login("redis://host/0", {}) == "redis://host/0"
    assert with_login("unix:///run/redis", environment).startswith("unix://cartridge-gateway:a-")


def test_a_password_may_lie_in_a_file(tmp_path: Path) -> None:
    """As Secrets are mounted; a final newline is not part of it."""
    file = tmp_path / "password"
    environment = {ENV_REDIS_USERNAME: "me", ENV_REDIS_PASSWORD_FILE: str(file)}
    with pytest.raises(InvalidLogin, match=r"PASSWORD_FILE: .* cannot be read"):
        with_login("redis://host/0", environment)
    file.write_text("secret\n")
    assert with_login("redis://host/0", environment) == "redis://me:secret@host/0"
    direct = environment | {ENV_REDIS_PASSWORD: "other"}
    assert with_login("redis://host/0", direct) == "redis://me:other@host/0"


def test_a_user_needs_a_password() -> None:
    """Half a login is an error, not an attempt as the default user."""
    with pytest.raises(InvalidLogin, match=ENV_REDIS_PASSWORD):
        with_login("redis://host/0", {ENV_REDIS_USERNAME: "me"})
    assert with_login("redis://host", {ENV_REDIS_PASSWORD: "p"}) == "redis://:p@host"
