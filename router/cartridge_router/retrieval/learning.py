"""What an index learns about itself: from labelled questions, or from its own text.

Owns the small fits (logistic, with the defaults as prior) and the thresholds. Refuses to learn
from questions in use: an operator gives them, or they are cut from the documents.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cartridge_router.retrieval.calibration import Calibration, KnownQuestion, Weights
from cartridge_router.retrieval.index import (
    Index,
    Lesson,
    Matrix,
    Ranking,
    as_vector,
    logistic,
)
from cartridge_router.retrieval.parts import RANK_PARTS, SCOPE_PARTS, SKIP_PARTS
from cartridge_router.retrieval.sets import choose
from cartridge_router.retrieval.words import STOPWORDS

RECALL = 0.95
"""Share of answerable questions that the threshold lets through."""

MIN_LABELLED = 20
"""Fewer of a kind teach a threshold nothing."""

MAX_SELF_QUESTIONS = 300
SELF_WORDS = 12
SKIP_AGREEMENT = 0.98
PRIOR_STRENGTH = 5.0
"""Questions' worth of belief in the defaults, for each weight."""

Asked = tuple[KnownQuestion, Ranking, Lesson]


def calibrate(
    index: Index, questions: Iterable[KnownQuestion] = (), *, seed: int = 0
) -> Calibration:
    """Learn weights and thresholds of an index; without questions, from its own passages.

    Labelled questions whose gold is not all in the index are left out. Costs about a search and
    an embedding for each question; deterministic by seed.
    """
    known = tuple(one for one in questions if all(id_ in index.numbers for id_ in one.gold))
    if not known:
        return _from_own_text(index, seed)
    start = replace(index.calibration, known=known, made_from=f"{len(known)} labelled questions")
    index = index.with_calibration(start)
    learnt = _learn_ranking(start, _ask(index, known))
    index = index.with_calibration(learnt)
    asked = _ask(index, known)
    learnt = _learn_scope(learnt, asked)
    learnt = _learn_skip(index.with_calibration(learnt), learnt, asked)
    return _learn_size(index, learnt, asked, seed)


def fit_logistic(
    values: Matrix,
    labels: npt.NDArray[np.bool_],
    prior: npt.NDArray[np.float64],
    *,
    strength: float,
    weights: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.float64]:
    """Coefficients of a logistic regression that leaves its prior only for evidence.

    `values` [n, k], `prior` [k]. Minimises the summed log loss plus strength/2 · |w − prior|².
    Source: Newton's method (iteratively reweighted least squares), with halved steps.
    """
    x, y = values.astype(np.float64), labels.astype(np.float64)
    importance = np.ones(len(y)) if weights is None else weights
    w = prior.copy()

    def loss(at: npt.NDArray[np.float64]) -> float:
        logits = x @ at
        data = np.logaddexp(0, logits) - y * logits
        return float((importance * data).sum() + strength / 2 * ((at - prior) ** 2).sum())

    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -60, 60)))
        gradient = x.T @ (importance * (p - y)) + strength * (w - prior)
        curvature = (x * (importance * p * (1 - p))[:, None]).T @ x
        step = np.linalg.solve(curvature + strength * np.eye(len(w)), gradient)
        scale, now = 1.0, loss(w)
        while loss(w - scale * step) > now and scale > 1e-4:
            scale /= 2
        w = w - scale * step
        if np.abs(scale * step).max() < 1e-6:
            break
    return w


def _ask(index: Index, known: Sequence[KnownQuestion]) -> list[Asked]:
    found = []
    for number, one in enumerate(known):
        lesson = Lesson(known=number)
        ranking = index.ranking(one.question, allow_skip=False, lesson=lesson)
        if ranking is not None:
            found.append((one, ranking, lesson))
    return found


def _learn_ranking(start: Calibration, asked: Sequence[Asked]) -> Calibration:
    """Weights by pairs: a document of the answer before the best others of its kind."""
    pairs: dict[bool, list[Matrix]] = {True: [], False: []}
    for one, ranking, _ in asked:
        if not one.gold:
            continue
        is_gold = np.array([ranking.ids[row] in one.gold for row in range(len(ranking.numbers))])
        if not is_gold.any() or is_gold.all():
            continue
        first = int(np.nonzero(is_gold)[0][0])
        kind = bool(ranking.is_list[first])
        same = np.nonzero(~is_gold & (ranking.is_list == kind))[0][:5]
        pairs[kind].extend(ranking.parts[first] - ranking.parts[row] for row in same)
    learnt = {}
    for kind, name in ((False, "prose"), (True, "lists")):
        weights = getattr(start, name)
        rows = pairs[kind]
        if len(rows) >= 5 * MIN_LABELLED:
            prior = as_vector(weights, RANK_PARTS).astype(np.float64)
            fitted = fit_logistic(
                np.stack(rows),
                np.ones(len(rows), bool),
                prior,
                strength=PRIOR_STRENGTH,
                weights=np.full(len(rows), 0.2),
            )
            weights = dict(zip(RANK_PARTS, map(float, fitted), strict=True))
        learnt[name] = weights
    return replace(start, **learnt)


def _learn_scope(start: Calibration, asked: Sequence[Asked]) -> Calibration:
    values = np.stack([ranking.scope_parts for _, ranking, _ in asked])
    inside = np.array([bool(one.gold) for one, _, _ in asked], bool)
    if inside.sum() < MIN_LABELLED:
        return start
    if (~inside).sum() < MIN_LABELLED:
        # Nothing to tell them from: the threshold only gives way to questions that it refused.
        chances = [logistic(start.scope, SCOPE_PARTS, row) for row in values[inside]]
        least = float(np.quantile(chances, (1 - RECALL) / 5))
        return replace(start, scope_threshold=min(start.scope_threshold, least))
    weights = fit_scope(values, inside, start.scope)
    return replace(start, scope=weights, scope_threshold=scope_threshold(weights, values, inside))


def fit_scope(values: Matrix, inside: npt.NDArray[np.bool_], prior: Weights) -> Weights:
    """Scope weights from questions of both kinds, each kind as heavy as the other."""
    names = ("bias", *SCOPE_PARTS)
    rows = np.concatenate([np.ones((len(values), 1), np.float32), values], axis=1)
    share = np.where(inside, 0.5 / inside.mean(), 0.5 / (~inside).mean())
    fitted = fit_logistic(
        rows, inside, as_vector(prior, names).astype(np.float64), strength=0.05, weights=share
    )
    return dict(zip(names, map(float, fitted), strict=True))


def scope_threshold(weights: Weights, values: Matrix, inside: npt.NDArray[np.bool_]) -> float:
    """The chance that 95 % of the answerable questions reach."""
    chances = np.array([logistic(weights, SCOPE_PARTS, row) for row in values])
    return float(np.quantile(chances[inside], 1 - RECALL))


def _learn_skip(index: Index, start: Calibration, asked: Sequence[Asked]) -> Calibration:
    """Skip the embedding where lexical scores alone named what the whole search named."""
    rows, agreed = [], []
    for one, ranking, _ in asked:
        if ranking.per_document.any():
            rows.append(index.skip_parts(ranking.question, ranking.per_document))
            first = int(ranking.numbers[0])
            agreed.append(bool(one.gold) and first == int(ranking.per_document.argmax()))
    return replace(start, skip_threshold=skip_threshold(start.skip, rows, agreed))


def skip_threshold(weights: Weights, rows: Sequence[Matrix], agreed: Sequence[bool]) -> float:
    """The lowest chance above which 98 % agree; 2 (never) if there is none."""
    if len(rows) < MIN_LABELLED:
        return 2.0
    chances = np.array([logistic(weights, SKIP_PARTS, row) for row in rows])
    order = np.argsort(-chances, kind="stable")
    right = np.cumsum(np.array(agreed, float)[order])
    share = right / np.arange(1, len(order) + 1)
    fit = np.nonzero(share >= SKIP_AGREEMENT)[0]
    if not len(fit) or fit[-1] + 1 < MIN_LABELLED:
        return 2.0
    return float(min(chances[order[fit[-1]]], 0.999))


def _learn_size(index: Index, start: Calibration, asked: Sequence[Asked], seed: int) -> Calibration:
    """The threshold on one more document that makes most sets right."""
    sample = [(one, ranking) for one, ranking, _ in asked if one.gold]
    if len(sample) < MIN_LABELLED:
        return start
    random.Random(seed).shuffle(sample)  # noqa: S311 - a sample, no secret
    sample = sample[:200]
    best, best_right = start.extend_threshold, -1
    for threshold in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.9, 0.95):
        trial = replace(start, extend_threshold=threshold, scope_threshold=0.0)
        view = index.with_calibration(trial)
        right = sum(
            {index.ids[choice.number] for choice in choose(view, ranking, max_size=4)}
            == set(one.gold)
            for one, ranking in sample
        )
        if right > best_right:
            best, best_right = threshold, right
    return replace(start, extend_threshold=best)


def _from_own_text(index: Index, seed: int) -> Calibration:
    """Thresholds from runs of words of the documents, with and without their document."""
    start = replace(index.calibration, made_from="its own documents")
    if len(index.documents) < 2:
        return start
    inside, values, rows, agreed = [], [], [], []
    for number, text in self_questions(index, seed):
        own = Lesson(without_equal=True)
        for lesson in (own, replace(own, hidden=frozenset({number}))):
            ranking = index.ranking(text, allow_skip=False, lesson=lesson)
            if ranking is None:
                continue
            inside.append(not lesson.hidden)
            values.append(ranking.scope_parts)
            if not lesson.hidden and ranking.per_document.any():
                rows.append(index.skip_parts(ranking.question, ranking.per_document))
                agreed.append(int(ranking.numbers[0]) == int(ranking.per_document.argmax()))
    if len(values) < 2 * MIN_LABELLED:
        return start
    return replace(
        start,
        scope_threshold=_between(start.scope, np.stack(values), np.array(inside, bool)),
    )


def self_questions(index: Index, seed: int) -> list[tuple[int, str]]:
    """Runs of words from passages spread over all documents, with the document's number."""
    order = random.Random(seed)  # noqa: S311 - a sample, no secret
    numbers = list(range(len(index.documents)))
    order.shuffle(numbers)
    found: list[tuple[int, str]] = []
    while len(found) < MAX_SELF_QUESTIONS:
        for number in numbers[: MAX_SELF_QUESTIONS - len(found)]:
            document = index.documents[number]
            words = list(order.choice(document.words))
            if len(words) > SELF_WORDS:
                begin = order.randrange(len(words) - SELF_WORDS)
                words = words[begin : begin + SELF_WORDS]
            # A question says less than the text does, and in other words.
            kept = [word for word in words if word in STOPWORDS or order.random() < 0.6]
            found.append((number, " ".join(kept or words)))
        if not numbers:
            break
    return found


def _between(weights: Weights, values: Matrix, inside: npt.NDArray[np.bool_]) -> float:
    """The threshold that errs least on both kinds, but lets 95 % of the answerable pass."""
    chances = np.array([logistic(weights, SCOPE_PARTS, row) for row in values])
    own, strange = chances[inside], chances[~inside]
    tried = np.unique(own)
    right = [(own >= one).mean() + (strange < one).mean() for one in tried]
    return float(min(tried[int(np.argmax(right))], np.quantile(own, 1 - RECALL)))
