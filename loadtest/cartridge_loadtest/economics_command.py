"""The command `cartridge-router economics`.

Owns its arguments and output. Refuses to import numpy or matplotlib before it runs, so that
`--help` works without them.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cartridge_loadtest.workloads import Workload
    from cartridge_proto.digest import Digest

GENERATED: Final = ("zipf", "bursty", "tool-agent")
MAX_REQUESTS: Final = 1_000_000


@dataclass(frozen=True)
class EconomicsCommand:
    """`economics`."""

    help: str = "which Cartridges pay, from how many uses on, and what to keep where"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        add = parser.add_argument
        source = parser.add_mutually_exclusive_group(required=True)
        source.add_argument("--trace", type=Path, help="Mooncake trace (JSONL, may be gzipped)")
        source.add_argument("--generate", choices=GENERATED, help="a workload of no trace")
        add("--requests", type=_count, default=5_000, help="of a generated one; default: 5000")
        add("--seed", type=int, default=0, help="of a generated one; default: 0")
        add("--costs", type=Path, help="file (YAML) of prices, fleet, model, …; default: built in")
        add("--top", type=_count, default=20, help="Cartridges in the table; default: 20")
        add("--json", action="store_true", help="print everything as JSON instead of the table")
        add("--out", type=Path, help="folder for report.json, index.html and plots (PNG)")

    def run(self, args: argparse.Namespace) -> int:
        """Weigh and print; 0 also where nothing pays."""
        import msgspec

        from cartridge_loadtest.economics import NothingToWeigh
        from cartridge_loadtest.economics_costs import CostsError, read_costs
        from cartridge_loadtest.economics_report import document, table
        from cartridge_loadtest.workloads import TraceError

        try:
            costs = read_costs(args.costs)
            workload, names = _workload(args)
            report = document(workload, costs, names)
            if args.out is not None:
                from cartridge_loadtest.economics_plots import write_report

                write_report(report, args.out)
        except CostsError as error:
            for problem in error.problems:
                print(f"error: {problem}", file=sys.stderr)
            return 2
        except (TraceError, NothingToWeigh, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        if args.json:
            print(msgspec.json.format(msgspec.json.encode(report)).decode())
        else:
            print(table(report, args.top))
        if args.out is not None:
            print(f"written: {args.out / 'index.html'}", file=sys.stderr)
        return 0


def _workload(args: argparse.Namespace) -> "tuple[Workload, dict[Digest, str]]":
    """What was asked for, and the names of its Cartridges by digest."""
    from cartridge_loadtest import workloads

    if args.trace is not None:
        rows = workloads.read_trace(args.trace)
        name = args.trace.name.removesuffix(".gz").removesuffix(".jsonl")
        keys = {key for row in rows for key in row.hash_ids}
        workload = workloads.from_mooncake(rows, name=name, seed=None)
        workload = replace(workload, about="arrivals, lengths and prefixes as in the trace")
    else:
        makers = {
            "zipf": workloads.generated_zipf,
            "bursty": workloads.generated_bursts,
            "tool-agent": workloads.generated_tool_agent,
        }
        name = args.generate
        workload = makers[name](args.requests, seed=args.seed, name=name)
        # The largest library has so many.
        keys = set(range(400))
    return workload, workloads.names_of(name, keys)


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_REQUESTS:
        raise argparse.ArgumentTypeError(f"1 to {MAX_REQUESTS}")
    return value


economics = EconomicsCommand()
