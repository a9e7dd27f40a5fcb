"""Plans for open-loop runs: when requests are due, which Cartridges they name, how long they are.

Owns what is drawn, all of it from one seed, and how a trace becomes a plan. Refuses to send, and
to ask a server anything.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from cartridge_loadtest.open_loop_records import PlannedRequest
from cartridge_loadtest.workloads import Arrivals, Workload, zipf

BURST_SHAPE: Final = 0.05
"""Of the gamma law of interarrival times in bursts: coefficient of variation 4.5."""
LENGTH_SPREAD: Final = 0.6
"""Standard deviation of the logarithm of a question's length."""
MAX_QUESTION_WORDS: Final = 2_000
PLAN_LIMIT: Final = 1_000_000
"""Requests of one plan."""


class ArrivalLaw(StrEnum):
    """How interarrival times are drawn; their mean is given in any case."""

    POISSON = "poisson"
    BURSTY = "bursty"


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What a plan is drawn from."""

    duration_s: float
    rate_per_s: float
    choices: Sequence[Sequence[str]]
    """Cartridges, or ordered sets of them, the most popular first."""
    arrivals: ArrivalLaw = ArrivalLaw.POISSON
    zipf_slope: float = 1.0
    plain_ratio: float = 0.1
    """Share of requests that name none."""
    question_words: int = 40
    """Median length of a question."""
    answer_tokens: int = 16
    sessions_per_choice: int = 4
    """Conversations about one Cartridge; 0: requests belong to none."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse with a `ValueError` what no plan can be made from."""
        if not 0 < self.duration_s < math.inf or not 0 < self.rate_per_s < math.inf:
            raise ValueError("a rate and a duration are more than 0")
        if self.duration_s * self.rate_per_s > PLAN_LIMIT:
            raise ValueError(f"a rate and a duration make {PLAN_LIMIT} requests at most")
        if not 0 <= self.plain_ratio <= 1:
            raise ValueError("the share of plain requests is from 0 to 1")
        if not 0 <= self.zipf_slope < math.inf or self.sessions_per_choice < 0:
            raise ValueError("a slope and a number of sessions are 0 or more")


def drawn_plan(settings: PlanSettings) -> list[PlannedRequest]:
    """Requests over `duration_s`, in the order in which they are due."""
    chance = np.random.default_rng(settings.seed)
    due = due_times(settings, chance)
    return _planned(due.tolist(), settings, chance)


def due_times(settings: PlanSettings, chance: np.random.Generator) -> Arrivals:
    """Seconds from 0 to `duration_s`, not falling."""
    expected = settings.duration_s * settings.rate_per_s
    times = np.zeros(0)
    # Rarely more than once: bursts can fall short of their mean by far.
    while times.size == 0 or times[-1] < settings.duration_s:
        count = int(expected * 1.2) + 50
        gaps = (
            chance.exponential(1.0, count)
            if settings.arrivals is ArrivalLaw.POISSON
            else chance.gamma(BURST_SHAPE, 1 / BURST_SHAPE, count)
        )
        first_s = times[-1] if times.size else 0.0
        times = np.concatenate([times, first_s + np.cumsum(gaps / settings.rate_per_s)])
    kept: Arrivals = times[times < settings.duration_s]
    return kept


def _planned(
    due: Sequence[float], settings: PlanSettings, chance: np.random.Generator
) -> list[PlannedRequest]:
    count, choices = len(due), settings.choices
    is_plain = chance.random(count) < settings.plain_ratio
    words = chance.lognormal(np.log(settings.question_words), LENGTH_SPREAD, count)
    which = (
        chance.choice(len(choices), count, p=zipf(len(choices), settings.zipf_slope))
        if choices
        else np.zeros(count, dtype=np.int64)
    )
    talk = chance.integers(0, max(1, settings.sessions_per_choice), count)
    return [
        PlannedRequest(
            due_s=due_s,
            cartridges=list(choices[rank]) if choices and not plain else [],
            num_question_words=length,
            max_answer_tokens=settings.answer_tokens,
            session=f"talk-{rank}-{number}" if settings.sessions_per_choice else None,
        )
        for due_s, plain, rank, length, number in zip(
            due,
            is_plain.tolist(),
            which.tolist(),
            np.clip(words, 1, MAX_QUESTION_WORDS).astype(int).tolist(),
            talk.tolist(),
            strict=True,
        )
    ]


def cut_to_trace(workload: Workload, settings: PlanSettings) -> PlanSettings:
    """The same for no longer than the trace has requests: what is after it is no part of a run."""
    longest_s = len(workload.requests) / settings.rate_per_s
    return replace(settings, duration_s=min(settings.duration_s, longest_s))


def trace_plan(workload: Workload, settings: PlanSettings) -> list[PlannedRequest]:
    """The arrivals, lengths and sharing of a workload, at the rate and for the time given.

    Its shape in time stays; its speed is scaled to `rate_per_s`. The prefix that most of its
    requests share becomes the first of `choices`, and so on; when those are used up, from the first
    again. Questions are cut at 2,000 words, answers at `answer_tokens`.

    Raises:
        ValueError: a workload without two moments.
    """
    requests = workload.requests
    if len(requests) < 2 or requests[-1].arrival_s <= requests[0].arrival_s:
        raise ValueError("a trace has two moments at least")
    first_s = requests[0].arrival_s
    factor = (len(requests) - 1) / settings.rate_per_s / (requests[-1].arrival_s - first_s)
    kept = [
        replace(each, arrival_s=(each.arrival_s - first_s) * factor)
        for each in requests
        if (each.arrival_s - first_s) * factor < settings.duration_s
    ]
    counts = Counter(each.prefix for each in kept if each.prefix is not None)
    choices = settings.choices
    place = {prefix: rank for rank, (prefix, _) in enumerate(counts.most_common())}
    return [
        PlannedRequest(
            due_s=each.arrival_s,
            cartridges=(
                list(choices[place[each.prefix] % len(choices)])
                if choices and each.prefix is not None
                else []
            ),
            num_question_words=min(max(1, each.num_live_tokens), MAX_QUESTION_WORDS),
            max_answer_tokens=min(max(1, each.num_output_tokens), settings.answer_tokens),
            session=each.session,
        )
        for each in kept
    ]
