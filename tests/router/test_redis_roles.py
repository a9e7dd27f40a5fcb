"""Users of Redis on a real server: each role can do all that it needs, and nothing else."""

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import redis

from cartridge_engine_ext.residency_publisher import ResidencyPublisher, new_epoch
from cartridge_proto import names
from cartridge_proto.digest import sha256_digest
from cartridge_proto.redis_users import with_login
from cartridge_proto.residency import Receipt, ReplicaId, Tier
from cartridge_router.cli import run
from cartridge_router.demo.stack import ClosedRedis, running_redis
from cartridge_router.residency_map import RedisReader, ResidencyMap
from cartridge_router.settings import ResidencySettings
from cartridge_router.shared_loads import SharedLoads
from tests.loadtest.cartridge_requests import until
from tests.proto.sample_artifact import engine_of, sample_artifact
from tests.router.fleets import fleet_of
from tests.router.sample_receipts import receipt_of

R0, R1 = ReplicaId("r0"), ReplicaId("r1")
A, B = sha256_digest(b"a"), sha256_digest(b"b")

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClosedRedis]:
    """The demo's server, with users for two engines."""
    with running_redis(tmp_path_factory.mktemp("redis"), [R0, R1]) as running:
        yield running


def denials(closed: ClosedRedis) -> list[tuple[str, str]]:
    """What the server refused so far: who, and which command or key."""
    with redis.Redis.from_url(closed.admin_url, decode_responses=True) as client:
        found: Any = client.acl_log()
    return [(row["username"], row["object"]) for row in found]


def start_publisher(closed: ClosedRedis, replica: ReplicaId) -> ResidencyPublisher:
    """The publisher of engines, logged in as one of them."""
    environment = closed.engine_environment(replica)
    publisher = ResidencyPublisher(
        redis_url=with_login(closed.url, environment),
        replica=replica,
        epoch=new_epoch(),
        key=environment[names.ENV_RESIDENCY_KEY].encode(),
        engine=engine_of(sample_artifact()[0]),
        engine_version="1",
        lease_s=1.0,
    )
    publisher.start()
    return publisher


async def test_gateways_talk_with_one_another(
    closed: ClosedRedis, session: aiohttp.ClientSession
) -> None:
    """With a gateway's login they tell and hear loads; nothing is refused."""
    with redis.Redis.from_url(closed.admin_url) as client:
        client.acl_log_reset()
    environment = closed.gateway_environment
    both = [fleet_of(session, {R0: "http://127.0.0.1:1"}) for _ in range(2)]
    rejected: list[str] = []
    tasks = [
        asyncio.create_task(
            SharedLoads(
                url=with_login(closed.url, environment),
                key=environment[names.ENV_RESIDENCY_KEY].encode(),
                fleet=fleet,
                is_on=True,
                on_rejected=rejected.append,
            ).run()
        )
        for fleet in both
    ]
    first, second = (fleet.find(R0) for fleet in both)
    assert first is not None
    assert second is not None
    try:
        with both[0].in_flight(first):
            await until(lambda: second.row.others.num_in_flight == 1, "it is heard of")
        await until(lambda: second.row.others.num_in_flight == 0, "and of its end")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert (denials(closed), rejected) == ([], [])


async def test_each_role_can_do_what_it_needs(closed: ClosedRedis) -> None:
    """Engines publish, renew, drain and leave; a gateway sees all of it; nothing is refused."""
    with redis.Redis.from_url(closed.admin_url) as client:
        client.acl_log_reset()
    environment = closed.gateway_environment
    rejected: list[str] = []
    receipts: list[Receipt] = []
    residency = ResidencyMap(
        key=environment[names.ENV_RESIDENCY_KEY].encode(),
        settings=ResidencySettings(stale_after_s=3.0, fallback_after_s=30.0),
        on_rejected=rejected.append,
    )
    reader = RedisReader(
        url=with_login(closed.url, environment), residency=residency, on_receipt=receipts.append
    )
    task = asyncio.create_task(reader.run())
    first, second = (start_publisher(closed, replica) for replica in (R0, R1))
    try:
        first.put(A, Tier.DRAM, 1)
        second.put(B, Tier.NVME, 1)
        await until(lambda: residency.tiers(R0, [A, B]) == {A: Tier.DRAM}, "the first is seen")
        await until(lambda: residency.tiers(R1, [A, B]) == {B: Tier.NVME}, "and the second")
        first.put(B, Tier.DRAM, 1)
        first.withdraw(A)
        first.publish_receipt(receipt_of("one"))
        first.set_draining(is_draining=True)
        await until(lambda: residency.tiers(R0, [A, B]) == {B: Tier.DRAM}, "changes are seen")
        await until(lambda: [r.request_id for r in receipts] == ["one"], "receipts are seen")

        def is_draining() -> bool:
            found = residency.registration(R0)
            return found is not None and found.is_draining

        await until(is_draining, "the registration is renewed")
        with redis.Redis.from_url(closed.admin_url) as client:
            client.flushall()
            await until(lambda: client.exists(names.residency_key(R0)) == 1, "published anew")
        await asyncio.to_thread(first.stop)
        await until(lambda: residency.registration(R0) is None, "the first has left")
        assert residency.registration(R1) is not None
    finally:
        await asyncio.to_thread(first.stop)
        await asyncio.to_thread(second.stop)
        task.cancel()
        await asyncio.wait([task])
    assert (denials(closed), rejected) == ([], [])


LEASE, ROWS = names.lease_key("r1"), names.residency_key("r1")
EVERYBODY_ELSES = [
    "FLUSHALL",
    "FLUSHDB",
    "KEYS *",
    "SCAN 0",
    "CONFIG GET *",
    "CONFIG SET maxmemory 1",
    "ACL LIST",
    "ACL SETUSER default on nopass allkeys allcommands",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
    "SHUTDOWN NOSAVE",
    "MONITOR",
    "EVAL return(1) 0",
    "PUBLISH channel message",
    "SUBSCRIBE channel",
    "SAVE",
    "GET other",
    "SET other value",
    f"DUMP {ROWS}",
    f"RENAME {LEASE} other",
    f"XTRIM {names.REDIS_RECEIPTS} MAXLEN 0",
    f"DEL {names.REDIS_RECEIPTS}",
    f"DEL {names.REDIS_CHANGES}",
    f"DEL {names.REDIS_REPLICAS}",
    f"SET {names.REDIS_RECEIPTS} value",
]
"""What nobody but the admin may do."""


def assert_refused(closed: ClosedRedis, environment: dict[str, str], command: str) -> None:
    """The server answers a user's command with a refusal."""
    url = with_login(closed.url, environment)
    with redis.Redis.from_url(url) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split())


@pytest.mark.parametrize(
    "command",
    [
        *EVERYBODY_ELSES,
        f"SET {LEASE} value",
        f"DEL {LEASE}",
        f"EXPIRE {LEASE} 1000",
        f"HSET {ROWS} field value",
        f"HDEL {ROWS} field",
        f"DEL {ROWS}",
        f"SADD {names.REDIS_REPLICAS} r2",
        f"SREM {names.REDIS_REPLICAS} r1",
        f"XADD {names.REDIS_CHANGES} * e value",
        f"XADD {names.REDIS_RECEIPTS} * e value",
    ],
)
def test_a_gateway_writes_nothing(closed: ClosedRedis, command: str) -> None:
    """No row, lease, change or receipt, and nothing that is not of this fleet's."""
    assert_refused(closed, closed.gateway_environment, command)


@pytest.mark.parametrize(
    "command",
    [
        *EVERYBODY_ELSES,
        f"SET {LEASE} value",
        f"GET {LEASE}",
        f"DEL {LEASE}",
        f"HSET {ROWS} field value",
        f"HDEL {ROWS} field",
        f"HLEN {ROWS}",
        f"DEL {ROWS}",
        f"DEL {names.lease_key('r0')} {LEASE}",
        f"HGETALL {names.residency_key('r0')}",
        f"SMEMBERS {names.REDIS_REPLICAS}",
        f"XREAD STREAMS {names.REDIS_RECEIPTS} 0",
        f"XRANGE {names.REDIS_CHANGES} - +",
        f"XDEL {names.REDIS_CHANGES} 0-1",
        f"PUBLISH {names.REDIS_LOADS} message",
        f"SUBSCRIBE {names.REDIS_LOADS}",
    ],
)
def test_an_engine_touches_its_own_rows_only(closed: ClosedRedis, command: str) -> None:
    """Not those of another, and of what is shared it adds to, but reads and removes nothing."""
    assert_refused(closed, closed.engine_environment("r0"), command)


def test_nobody_comes_in_without_a_login(closed: ClosedRedis) -> None:
    """The default user is off, and another's password does not help."""
    with redis.Redis.from_url(closed.url) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    mixed = closed.engine_environment("r0") | {
        names.ENV_REDIS_PASSWORD: closed.engines["r1"].password
    }
    url = with_login(closed.url, mixed)
    with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_the_printed_lines_close_a_server(
    redis_tcp_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said to an open server as they are, they let the roles in and everybody else out."""
    password = "the-admin-of-this-test"
    monkeypatch.setenv("CARTRIDGE_REDIS_PASSWORD_ADMIN", password)
    assert run(["redis-acl", "--replica", "r0", "--replica", "r1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    with redis.Redis.from_url(redis_tcp_url) as client:
        for line in lines:
            assert client.execute_command(*line.split())
    with redis.Redis.from_url(redis_tcp_url) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    login = {names.ENV_REDIS_USERNAME: "cartridge-admin", names.ENV_REDIS_PASSWORD: password}
    with redis.Redis.from_url(with_login(redis_tcp_url, login)) as client:
        found: Any = client.acl_users()
    assert set(found) == {
        "default",
        "cartridge-admin",
        "cartridge-gateway",
        "cartridge-engine-r0",
        "cartridge-engine-r1",
    }


def test_a_bad_replica_is_an_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, the name on stderr, and no line for anybody."""
    assert run(["redis-acl", "--replica", "r*"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "'r*': not a name" in said.err
