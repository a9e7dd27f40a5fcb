"""The command `cartridge-router loadtest`, also `python -m cartridge_loadtest`.

Owns its arguments. Refuses to import Locust, numpy or matplotlib before it runs, so that `--help`
works without them.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cartridge_proto.names import ENV_LOADTEST_API_KEY

if TYPE_CHECKING:
    from cartridge_loadtest.load_run import LoadTest


@dataclass(frozen=True)
class LoadTestCommand:
    """`loadtest`."""

    help: str = "send a load, open loop, to a simulated fleet or a running one; report and judge"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        add = parser.add_argument_group("fleet").add_argument
        add("--host", help="URL of a running gateway (or engine); default: a fleet is started")
        add("--num-replicas", type=_count, default=8, help="simulated ones; default: %(default)s")
        add("--num-cartridges", type=_count, default=40, help="made up; default: %(default)s")
        add("--policy", help="placement of the started gateway; default: the gateway's")
        add("--redis-url", help="for the started fleet; default: a server of its own")
        add(
            "--fault",
            action="append",
            default=[],
            metavar="REPLICA=JSON",
            help='after a quarter of the run, for example sim-3={"hang":true}',
        )
        add("--stay", action="store_true", help="leave the fleet running until Ctrl-C")

        add = parser.add_argument_group("load").add_argument
        add("--duration-s", type=float, default=60.0, help="default: %(default)s")
        add("--rate", type=float, default=20.0, help="requests a second; default: %(default)s")
        add("--arrivals", choices=["poisson", "bursty"], default="poisson")
        add("--trace", type=Path, help="Mooncake's format: arrivals, lengths, what is shared")
        add("--cartridges", help="ids by commas, sets joined by +; default: all of the fleet")
        add("--model-name", help="default: the first that the fleet serves")
        add("--zipf", type=float, default=1.0, help="slope of popularity; default: %(default)s")
        add("--plain-ratio", type=float, default=0.1, help="requests without any; %(default)s")
        add("--question-words", type=_count, default=40, help="median; default: %(default)s")
        add("--answer-tokens", type=_count, default=16, help="at most; default: %(default)s")
        add("--sessions", type=int, default=4, help="conversations for each Cartridge; %(default)s")
        add("--seed", type=int, default=0)
        add("--drain-s", type=float, default=30.0, help="patience at the end; %(default)s")

        add = parser.add_argument_group("result").add_argument
        add("--targets", type=Path, help="TOML; default: the one of this package")
        add("--out", type=Path, default=Path("build/loadtest"), help="default: %(default)s")

    def run(self, args: argparse.Namespace) -> int:
        """Run; 0 when all targets are reached, 1 when not, 2 when there is nothing to judge."""
        from cartridge_loadtest.children import LoadTestFailed
        from cartridge_loadtest.load_run import run_load_test
        from cartridge_loadtest.targets import InvalidTargets
        from cartridge_loadtest.workloads import TraceError

        try:
            return run_load_test(_load_test(args))
        except (InvalidTargets, LoadTestFailed, OSError, TraceError, ValueError) as error:
            sys.stderr.write(f"error: {error}\n")
            return 2


loadtest = LoadTestCommand()


def _load_test(args: argparse.Namespace) -> "LoadTest":
    from cartridge_loadtest.load_run import LoadTest
    from cartridge_loadtest.request_plan import ArrivalLaw, PlanSettings
    from cartridge_loadtest.started_fleet import FleetPlan
    from cartridge_loadtest.targets import DEFAULT_FILE

    return LoadTest(
        plan=PlanSettings(
            duration_s=args.duration_s,
            rate_per_s=args.rate,
            choices=(),
            arrivals=ArrivalLaw(args.arrivals),
            zipf_slope=args.zipf,
            plain_ratio=args.plain_ratio,
            question_words=args.question_words,
            answer_tokens=args.answer_tokens,
            sessions_per_choice=args.sessions,
            seed=args.seed,
        ),
        fleet=FleetPlan(
            num_replicas=args.num_replicas,
            num_cartridges=args.num_cartridges,
            redis_url=args.redis_url,
            policy=args.policy,
        ),
        host=args.host,
        model=args.model_name,
        cartridges=(
            None
            if args.cartridges is None
            else tuple(part.strip() for part in args.cartridges.split(",") if part.strip())
        ),
        trace=args.trace,
        faults=_faults(args),
        targets=args.targets or DEFAULT_FILE,
        out=args.out,
        drain_s=args.drain_s,
        must_stay=args.stay,
        api_key=os.environ.get(ENV_LOADTEST_API_KEY),
    )


def _faults(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """Replica and fault of each `--fault`.

    Raises:
        ValueError: no such replica is started.
    """
    started = [] if args.host else [f"sim-{index}" for index in range(args.num_replicas)]
    faults = []
    for text in args.fault:
        replica, _, fault = text.partition("=")
        if replica not in started:
            raise ValueError(f"--fault: {replica!r} is none of the replicas that are started")
        faults.append((replica, fault))
    return tuple(faults)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main(arguments: list[str] | None = None) -> int:
    """Run the command; `None`: with the arguments of this process."""
    parser = argparse.ArgumentParser(prog="python -m cartridge_loadtest", description=loadtest.help)
    loadtest.configure(parser)
    return loadtest.run(parser.parse_args(arguments))
