"""The command line of a simulated replica.

Owns flags, their defaults and the one secret that comes from the environment. Refuses to start
anything.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cartridge_loadtest.simulated_engine import EngineSettings
from cartridge_proto.compatibility import EngineIdentity
from cartridge_proto.names import ENV_RESIDENCY_KEY
from cartridge_proto.redis_users import InvalidLogin, with_login
from cartridge_proto.residency import ReplicaId

_SECONDS = ("ttft_s", "prefill_s_per_token", "load_s", "itl_s", "lease_s")
_COUNTS = ("num_tokens", "dram_bytes", "max_model_len", "max_num_seqs")


@dataclass(frozen=True, kw_only=True)
class ReplicaArguments:
    """Where to listen, and what the engine behind it is."""

    host: str
    port: int
    engine: EngineSettings


def parse_arguments(argv: list[str] | None = None) -> ReplicaArguments:
    """Read the command line (`None`: this process's) and the residency key's variable.

    Ends the process with a message when a flag is wrong, as `argparse` does.
    """
    parser = _parser()
    given = parser.parse_args(argv)
    identity = None
    if given.identity is not None:
        try:
            identity = msgspec.json.decode(given.identity.read_bytes(), type=EngineIdentity)
        except (OSError, msgspec.DecodeError) as error:
            parser.error(f"--identity: {error}")
    key = os.environ.get(ENV_RESIDENCY_KEY)
    redis_url = given.redis_url
    if redis_url is not None:
        try:
            redis_url = with_login(redis_url, os.environ)
        except InvalidLogin as error:
            parser.error(f"--redis-url: {error}")
    engine = EngineSettings(
        model=given.model,
        replica=ReplicaId(given.replica_id),
        store=given.store,
        redis_url=redis_url,
        residency_key=key.encode() if key else None,
        identity=identity,
        control_address=given.control_address,
        advertise_url=given.advertise_url,
        **{name: getattr(given, name) for name in (*_SECONDS, *_COUNTS)},
    )
    return ReplicaArguments(host=given.host, port=given.port, engine=engine)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cartridge_loadtest.simulated_replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--model", required=True, help="the served model name")
    parser.add_argument("--store", help="folder or URL; without it Cartridges are ignored")
    parser.add_argument("--replica-id", default="sim-0")
    parser.add_argument("--redis-url", help="without it nothing is published")
    parser.add_argument("--identity", type=Path, help="JSON of an EngineIdentity")
    parser.add_argument("--control-address", help="published, not served")
    parser.add_argument("--advertise-url", help="published: where gateways reach this replica")
    defaults = EngineSettings(model="", replica=ReplicaId(""))
    for names, kind in ((_SECONDS, float), (_COUNTS, int)):
        for name in names:
            parser.add_argument(
                "--" + name.replace("_", "-"),
                type=kind,
                default=getattr(defaults, name),
                help="default: %(default)s",
            )
    return parser
