"""Redis, store and engine go wrong under a running engine: time is lost, answers are not."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cartridge_proto import names
from cartridge_proto.digest import parse_digest
from tests.engine_ext.waiting import until
from tests.integration.fleet import Fleet
from tests.integration.tiny_fleet import (
    drop_prefix_cache,
    expect_ordinary,
    put_documents,
    rows,
    running_tiny_fleet,
    tier_of,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

NAME = "fault"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """An engine of this module's own: it is killed here."""
    with running_tiny_fleet(tmp_path_factory.mktemp("faults")) as fleet:
        put_documents(fleet, NAME, 5)
        yield fleet


def server_of(fleet: Fleet) -> int:
    """Process id of the Redis-protocol server."""
    with redis.Redis.from_url(fleet.redis_url) as client:
        pid: int = client.info("server")["process_id"]
    return pid


# --- Redis ---------------------------------------------------------------------------------------
def test_a_stopped_redis_stops_nothing(faulty: Fleet) -> None:
    """While Redis hangs requests are answered right; afterwards the map is true again."""
    expect_ordinary(faulty, NAME, 0)
    pid = server_of(faulty)
    os.kill(pid, signal.SIGSTOP)
    try:
        for index in (1, 2, 0):
            expect_ordinary(faulty, NAME, index)
    finally:
        os.kill(pid, signal.SIGCONT)
    digest = str(faulty.store.resolve(f"{NAME}-0@1"))
    until(lambda: digest in rows(faulty))


def test_flushall_is_mended(faulty: Fleet) -> None:
    """Whoever empties Redis loses the map for the time of a heartbeat."""
    expect_ordinary(faulty, NAME, 0)
    before = set(rows(faulty))
    assert before
    with redis.Redis.from_url(faulty.redis_url) as client:
        client.flushall()
    until(lambda: set(rows(faulty)) >= before)
    expect_ordinary(faulty, NAME, 0)


def test_an_old_snapshot_is_mended(faulty: Fleet) -> None:
    """Rows of the past come back with a restored snapshot; the engine's next write voids them."""
    expect_ordinary(faulty, NAME, 0)
    key = names.residency_key("replica-0")
    with redis.Redis.from_url(faulty.redis_url) as client:
        snapshot = client.dump(key)
        expect_ordinary(faulty, NAME, 3)
        expect_ordinary(faulty, NAME, 4)
        client.restore(key, 0, snapshot, replace=True)
    # What came since is missing in the snapshot: a request that is sent by it is served all the
    # same, and the rows are whole again after the next change.
    for index in (3, 4, 0, 1):
        expect_ordinary(faulty, NAME, index)
    digest = str(faulty.store.resolve(f"{NAME}-1@1"))
    until(lambda: digest in rows(faulty))


@pytest.mark.parametrize("key", [names.residency_key("replica-0"), names.REDIS_CHANGES])
def test_wrong_types_in_redis_stop_nothing(faulty: Fleet, key: str) -> None:
    """A key of another type under the name of ours: requests go on, and it is mended when gone."""
    with redis.Redis.from_url(faulty.redis_url) as client:
        client.delete(key)
        client.set(key, "text")
        for index in (2, 0):
            expect_ordinary(faulty, NAME, index)
        client.delete(key)
    digest = str(faulty.store.resolve(f"{NAME}-0@1"))
    until(lambda: digest in rows(faulty))


# --- the store -----------------------------------------------------------------------------------
def test_a_damaged_file_of_the_nvme_folder_is_fetched_again(faulty: Fleet) -> None:
    """A bit flipped on the local disk is noticed, and the store's bytes are served."""
    expect_ordinary(faulty, NAME, 0)
    manifest = faulty.store.read_manifest(faulty.store.resolve(f"{NAME}-0@1"))
    nvme = Path(faulty.store.root.parent / "nvme")
    name = parse_digest(manifest.payload[0].sha256).removeprefix("sha256:")
    expect_ordinary(faulty, NAME, 1)
    expect_ordinary(faulty, NAME, 2)  # the first is out of dram now
    path = nvme / "blobs" / "sha256" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    drop_prefix_cache(faulty)
    expect_ordinary(faulty, NAME, 0)


# --- the engine ----------------------------------------------------------------------------------
def test_a_restarted_engine_is_warm_from_nvme(faulty: Fleet) -> None:
    """Kill -9 and the same again: old rows are void at once, the folder is found, probes known."""
    expect_ordinary(faulty, NAME, 0)
    epochs = {row.epoch for row in rows(faulty).values()}
    assert len(epochs) == 1
    faulty.stop_engine(faulty.engine)
    faulty.start_engine()

    def is_back() -> bool:
        found = rows(faulty)
        return bool(found) and {row.epoch for row in found.values()}.isdisjoint(epochs)

    for _ in range(20):
        try:
            until(is_back)
            break
        except AssertionError:
            continue
    assert is_back()
    # Before anything was asked: what the folder holds is known, nothing else is claimed.
    assert {row.tier for row in rows(faulty).values()} == {"nvme"}

    def is_registered() -> bool:
        ready = faulty.client.get(f"{faulty.gateway_url}/ready").json()
        return bool(ready["replicas"]["registered"] and ready["replicas"]["healthy"])

    until(is_registered)
    digests = {str(digest): alias for alias, digest in faulty.store.aliases().items()}
    index = int(digests[min(rows(faulty))].removeprefix(f"{NAME}-").removesuffix("@1"))
    receipt = expect_ordinary(faulty, NAME, index)
    assert tier_of(receipt) == "nvme"
    # Its verdict was kept: no probe has written its blocks before it.
    assert receipt["num_reused_tokens"] == 0
