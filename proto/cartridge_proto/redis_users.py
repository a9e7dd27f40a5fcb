"""Who may do what in Redis: a user for each role, with the commands and keys that it needs.

Owns the users' names, their permissions, and how a login gets into a URL. Refuses to ask a server:
it makes text. Needs Redis 7 or Valkey, for permissions that name commands and keys together.

Engines write what is theirs and sign it; gateways read, and tell one another their loads on one
channel. So one key of signatures is enough: what a gateway that leaked it could forge, it could not
write, but for loads, which cost time and no more.

Source: https://valkey.io/topics/acl/ (rules, selectors).
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

from cartridge_proto.names import (
    ENV_REDIS_PASSWORD,
    ENV_REDIS_PASSWORD_FILE,
    ENV_REDIS_USER_PASSWORD_PREFIX,
    ENV_REDIS_USERNAME,
    REDIS_CHANGES,
    REDIS_LOADS,
    REDIS_RECEIPTS,
    REDIS_REPLICAS,
    REDIS_USER_ADMIN,
    REDIS_USER_GATEWAY,
    lease_key,
    redis_user_of_engine,
    residency_key,
)

MIN_PASSWORD_CHARACTERS: Final = 16
MAX_PASSWORD_CHARACTERS: Final = 256

_CONNECTING: Final = "+ping +select +client|setinfo"
"""What clients say to any server."""
_REPLICA: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PASSWORD: Final = re.compile(r"[!#-&(-\[\]-~]*")
"""Visible ASCII without quotes and backslashes, which shells and ACL files read otherwise."""


class InvalidLogin(ValueError):
    """A name or a password that cannot be used; the text names the limit, never the password."""


@dataclass(frozen=True)
class RedisUser:
    """One user: name, password and what it may do, as ACL rules."""

    name: str
    password: str
    permissions: str

    def __post_init__(self) -> None:
        length = len(self.password)
        if not MIN_PASSWORD_CHARACTERS <= length <= MAX_PASSWORD_CHARACTERS:
            raise InvalidLogin(
                f"password of {self.name}: {length} characters; {MIN_PASSWORD_CHARACTERS} to "
                f"{MAX_PASSWORD_CHARACTERS}"
            )
        if _PASSWORD.fullmatch(self.password) is None:
            raise InvalidLogin(
                f"password of {self.name}: only visible ASCII without quotes and backslashes"
            )

    @property
    def rules(self) -> str:
        """Everything that `ACL SETUSER name` is followed by."""
        return f"reset on >{self.password} {self.permissions}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a gateway or an engine logs in as this user."""
        return {ENV_REDIS_USERNAME: self.name, ENV_REDIS_PASSWORD: self.password}


def admin_user(password: str) -> RedisUser:
    """For people: everything."""
    return RedisUser(REDIS_USER_ADMIN, password, "~* &* +@all")


def gateway_user(password: str) -> RedisUser:
    """Reads what all engines say, writes nothing, and talks with other gateways."""
    keys = [REDIS_REPLICAS, lease_key("*"), residency_key("*"), REDIS_RECEIPTS]
    commands = "+smembers +mget +hgetall +xread +xrevrange +publish +subscribe +unsubscribe"
    allowed = " ".join([*(f"%R~{key}" for key in keys), f"&{REDIS_LOADS}"])
    return RedisUser(REDIS_USER_GATEWAY, password, f"-@all {_CONNECTING} {commands} {allowed}")


def engine_user(replica: str, password: str) -> RedisUser:
    """Writes rows and lease of one replica, adds to the streams, and says that it is there.

    It could still take another replica out of the set of all, which that one mends with its next
    heartbeat, and shorten the streams, which gateways mend by reading the rows.

    Raises:
        InvalidLogin: `replica` is no name of a replica.
    """
    if _REPLICA.fullmatch(replica) is None or residency_key(replica) == REDIS_CHANGES:
        raise InvalidLogin(f"replica {replica[:80]!r}: not a name that a replica can have")
    own = (
        f"+multi +exec +get +set +del +hset +hdel +hlen "
        f"%RW~{lease_key(replica)} %RW~{residency_key(replica)}"
    )
    streams = f"(-@all +xadd %W~{REDIS_CHANGES} %W~{REDIS_RECEIPTS})"
    replicas = f"(-@all +sadd +srem %W~{REDIS_REPLICAS})"
    permissions = f"-@all {_CONNECTING} {own} {streams} {replicas}"
    return RedisUser(redis_user_of_engine(replica), password, permissions)


def fleet_users(replicas: Sequence[str], environment: Mapping[str, str]) -> list[RedisUser]:
    """All users of a fleet, with passwords from the environment, or random ones.

    Raises:
        InvalidLogin: a name or a password is not possible, or one password would be that of two.
    """
    passwords: dict[str, str] = {}
    for role in ("admin", "gateway", *(f"engine-{replica}" for replica in replicas)):
        variable = ENV_REDIS_USER_PASSWORD_PREFIX + re.sub(r"[^A-Z0-9]", "_", role.upper())
        if variable in passwords:
            raise InvalidLogin(f"two users have their password in {variable}")
        passwords[variable] = environment.get(variable) or secrets.token_urlsafe()
    admin, gateway, *engines = passwords.values()
    named = zip(replicas, engines, strict=True)
    return [
        admin_user(admin),
        gateway_user(gateway),
        *(engine_user(replica, password) for replica, password in named),
    ]


def command_lines(users: Iterable[RedisUser]) -> list[str]:
    """For a client that is logged in as the default user; the last line takes that one away."""
    return [f"ACL SETUSER {user.name} {user.rules}" for user in users] + [
        "ACL SETUSER default reset"
    ]


def file_lines(users: Iterable[RedisUser]) -> list[str]:
    """For the server's `aclfile`, which keeps users over a restart."""
    return ["user default reset", *(f"user {user.name} {user.rules}" for user in users)]


def with_login(url: str, environment: Mapping[str, str]) -> str:
    """A Redis URL with the user and the password of the environment.

    What the URL itself says wins, so that nobody is logged in as somebody else.

    Raises:
        InvalidLogin: a user without a password, or a password file that cannot be read.
    """
    parts = urlsplit(url)
    name, password = environment.get(ENV_REDIS_USERNAME, ""), _password_of(environment)
    if "@" in parts.netloc or not (name or password):
        return url
    if not password:
        raise InvalidLogin(
            f"{ENV_REDIS_USERNAME} is set, and neither {ENV_REDIS_PASSWORD} nor …_FILE"
        )
    login = f"{quote(name, safe='')}:{quote(password, safe='')}@"
    return urlunsplit(parts._replace(netloc=login + parts.netloc))


def _password_of(environment: Mapping[str, str]) -> str:
    password = environment.get(ENV_REDIS_PASSWORD, "")
    file = environment.get(ENV_REDIS_PASSWORD_FILE, "")
    if password or not file:
        return password
    try:
        return Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidLogin(f"{ENV_REDIS_PASSWORD_FILE}: {file} cannot be read") from error
