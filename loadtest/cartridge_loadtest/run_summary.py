"""What the lines of an open-loop run amount to: percentiles, shares, balance, and its validity.

Owns the arithmetic and the names of metrics. Refuses to leave the failed out: for TTFT and total
time they count as later than all others. Refuses files and clocks.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cartridge_loadtest.open_loop_records import RequestRecord
from cartridge_proto.residency import Tier

WARM_TIERS: Final = frozenset({Tier.HBM.value, Tier.DRAM.value})
"""A Cartridge there needs no disk and no network."""
PLAIN: Final = "none"
"""In place of a tier: the request named no Cartridge."""
END_SHARE: Final = 1 / 3
"""Of a run, at its end, in which each replica should still answer."""


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What makes an answer good; `None`: no such limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """Whether the stream was complete, had content and kept the limits."""
        if record.error is not None or record.ttft_s is None:
            return False
        is_prompt = self.ttft_s is None or record.ttft_s <= self.ttft_s
        return is_prompt and (
            self.tpot_s is None or record.tpot_s is None or record.tpot_s <= self.tpot_s
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """Lines of one run, and what they must be judged with.

    `replicas` are those of the fleet, or empty where they are known by their answers only.
    """

    records: Sequence[RequestRecord]
    num_planned: int
    duration_s: float
    slo: Slo = Slo()
    replicas: Sequence[str] = ()

    @property
    def complete(self) -> list[RequestRecord]:
        """Requests whose stream came to its end."""
        return [record for record in self.records if record.error is None]

    @property
    def num_by_replica(self) -> dict[str, int]:
        """Complete answers of each replica of the fleet; 0 for one that gave none."""
        counted = Counter(each.replica for each in self.complete if each.replica is not None)
        return {name: counted[name] for name in sorted({*self.replicas, *counted})}


def percentile(values: Iterable[float], share: float, *, num_missing: int = 0) -> float | None:
    """Nearest rank: the least value that `share` of all values do not exceed.

    Args:
        values: in any order.
        share: above 0, up to 1.
        num_missing: further ones that are larger than all values, by how much is unknown.

    Returns:
        One of the values; `None` when there are none, or when the rank falls to a missing one.
    """
    ordered = sorted(values)
    rank = math.ceil(share * (len(ordered) + num_missing))
    return ordered[rank - 1] if 0 < rank <= len(ordered) else None


def tier_of(record: RequestRecord) -> str:
    """Where its Cartridges were; `none` without any."""
    return record.tier or PLAIN


def _ttft(run: Run, share: float) -> float | None:
    values = [each.ttft_s for each in run.complete if each.ttft_s is not None]
    return percentile(values, share, num_missing=len(run.records) - len(values))


def _total(run: Run, share: float) -> float | None:
    values = [each.total_s for each in run.complete]
    return percentile(values, share, num_missing=len(run.records) - len(values))


def _itl(run: Run, share: float) -> float | None:
    return percentile((gap_s for each in run.complete for gap_s in each.itl_s), share)


def _tpot(run: Run, share: float) -> float | None:
    return percentile((each.tpot_s for each in run.complete if each.tpot_s is not None), share)


def _error_ratio(run: Run) -> float | None:
    return _ratio(len(run.records) - len(run.complete), len(run.records))


def _goodput_ratio(run: Run) -> float | None:
    return _ratio(_num_good(run), run.num_planned)


def _goodput_per_s(run: Run) -> float | None:
    return _num_good(run) / run.duration_s


def _num_good(run: Run) -> int:
    return sum(run.slo.is_met(record) for record in run.records)


def _warm_ratio(run: Run) -> float | None:
    tiers = [each.tier for each in run.complete if each.tier is not None]
    return _ratio(sum(tier in WARM_TIERS for tier in tiers), len(tiers))


def _max_over_mean(run: Run) -> float | None:
    counts = run.num_by_replica.values()
    return max(counts) * len(counts) / sum(counts) if sum(counts) else None


def _replicas_at_end_ratio(run: Run) -> float | None:
    from_s = run.duration_s * (1 - END_SHARE)
    seen = {each.replica for each in run.complete if each.due_s >= from_s} - {None}
    return _ratio(len(seen), len(run.num_by_replica))


def _late(run: Run) -> float | None:
    return percentile((record.late_s for record in run.records), 0.99)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One figure of a run. A target is the most it may be, or the least."""

    unit: str
    is_least: bool
    of: Callable[[Run], float | None]
    about: str


def _seconds(of: Callable[[Run, float], float | None], share: float, about: str) -> Metric:
    return Metric(unit="s", is_least=False, about=about, of=lambda run: of(run, share))


METRICS: Final[Mapping[str, Metric]] = {
    "ttft_p50_s": _seconds(_ttft, 0.5, "due to first content, median of all requests"),
    "ttft_p90_s": _seconds(_ttft, 0.9, "due to first content, 90th percentile of all requests"),
    "ttft_p99_s": _seconds(_ttft, 0.99, "due to first content, 99th percentile of all requests"),
    "itl_p50_s": _seconds(_itl, 0.5, "gap between content chunks, median"),
    "itl_p99_s": _seconds(_itl, 0.99, "gap between content chunks, 99th percentile"),
    "tpot_p50_s": _seconds(_tpot, 0.5, "mean gap of an answer, median of answers"),
    "tpot_p99_s": _seconds(_tpot, 0.99, "mean gap of an answer, 99th percentile of answers"),
    "total_p50_s": _seconds(_total, 0.5, "due to end, median of all requests"),
    "total_p99_s": _seconds(_total, 0.99, "due to end, 99th percentile of all requests"),
    "error_ratio": Metric(
        unit="1", is_least=False, of=_error_ratio, about="requests without a complete stream"
    ),
    "goodput_ratio": Metric(
        unit="1", is_least=True, of=_goodput_ratio, about="planned requests within the SLO"
    ),
    "goodput_per_s": Metric(
        unit="1/s", is_least=True, of=_goodput_per_s, about="requests within the SLO each second"
    ),
    "warm_ratio": Metric(
        unit="1",
        is_least=True,
        of=_warm_ratio,
        about="of answers with Cartridges, those from hbm or dram",
    ),
    "max_over_mean_replicas": Metric(
        unit="1",
        is_least=False,
        of=_max_over_mean,
        about="answers of the busiest replica, over the mean of all",
    ),
    "replicas_at_end_ratio": Metric(
        unit="1",
        is_least=True,
        of=_replicas_at_end_ratio,
        about="replicas that answered in the last third of the run",
    ),
}
"""All figures that a targets file may name."""

LATE_P99: Final = "late_p99_s"
RECORDED: Final = "recorded_ratio"


def measured(run: Run) -> dict[str, float | None]:
    """All metrics by name, how late requests were sent, and how many of them have a line."""
    return {name: metric.of(run) for name, metric in METRICS.items()} | {
        LATE_P99: _late(run),
        RECORDED: _ratio(len(run.records), run.num_planned),
    }


def faults_of_the_generator(run: Run, max_late_p99_s: float) -> list[str]:
    """Why the figures say nothing about the fleet; empty when they do.

    Sends happen at moments that the fleet does not choose, so their lateness is also how late this
    process read what had come.
    """
    problems = []
    if not run.num_planned:
        problems.append("nothing was planned")
    if len(run.records) != run.num_planned:
        problems.append(f"{len(run.records)} of {run.num_planned} planned requests were recorded")
    late_s = _late(run)
    if late_s is not None and late_s > max_late_p99_s:
        problems.append(
            f"the generator could not keep up: 1 % of the requests were sent {late_s:.3f} s late "
            f"or later, and {max_late_p99_s:g} s is allowed"
        )
    return problems
