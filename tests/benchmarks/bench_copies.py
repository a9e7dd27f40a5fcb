"""What copies ahead of demand are worth: our policy with and without replication, simulated.

Owns the table of docs/simulator.md, "Copies ahead of demand". Refuses targets: it says what was
measured, also where replication loses.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cartridge_loadtest.fleet_simulator import FleetSettings, at_utilisation, simulate
from cartridge_loadtest.replica_model import EngineProfile
from tests.benchmarks.bench_placement import ROOT, UTILISATION, Figures, figures_of, traces_of

DATA: Final = ROOT.parent / "shared" / "data"
NUM_REQUESTS: Final = 2_000
HEAD: Final = (
    "| trace | replicas | mean, s | with | lower in | p99, s | with | store hits | with | "
    "GB from the store | with | of them ahead |"
)


def main(arguments: Sequence[str]) -> int:
    """Print the table, a line for each trace and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of public traces")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    print(HEAD)
    print("|---|" + "--:|" * (HEAD.count("|") - 2))
    for size in options.sizes:
        rows = dict[str, list[tuple[Figures, Figures, float]]]()
        for seed in options.seeds:
            for trace in traces_of(options.data, NUM_REQUESTS, seed):
                profile = EngineProfile()
                timed = at_utilisation(trace, size, UTILISATION, profile)
                found = list[Figures]()
                ahead_gb = 0.0
                for is_on in (False, True):
                    settings = FleetSettings(
                        num_replicas=size, profile=profile, seed=seed, replication=is_on
                    )
                    outcome = simulate(timed, settings)
                    found.append(figures_of(timed, outcome, profile))
                    ahead_gb = outcome.prefetched_bytes / 1e9
                rows.setdefault(trace.name, []).append((found[0], found[1], ahead_gb))
        for name, runs in rows.items():
            print(_line(name, size, runs), flush=True)
    return 0


def _line(name: str, size: int, runs: list[tuple[Figures, Figures, float]]) -> str:
    def mean(field: str, place: int) -> float:
        return statistics.fmean(getattr(run[place], field) for run in runs)

    num_lower = sum(run[1].mean_s < run[0].mean_s for run in runs)
    cells = [f"{mean('mean_s', place):.3f}" for place in (0, 1)]
    cells.append(f"{num_lower} of {len(runs)}")
    cells += [f"{mean('p99_s', place):.2f}" for place in (0, 1)]
    cells += [f"{mean('remote', place):.3f}" for place in (0, 1)]
    cells += [f"{mean('remote_gb', place):.0f}" for place in (0, 1)]
    cells.append(f"{statistics.fmean(run[2] for run in runs):.0f}")
    return f"| {name} | {size} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
