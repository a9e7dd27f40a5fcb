"""`python -m tests.benchmarks.fit_selection`: where the weights in `calibration.DEFAULTS` are from.

Owns the fit of the scope, extend and skip weights over the tuning halves of all sets at once, each
set as heavy as the others. Refuses the test halves. The ranking weights were chosen by hand on the
same halves, over a coarse grid; see docs/benchmarks/selection.md for what came of it.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from cartridge_router.retrieval.documents import prepare
from cartridge_router.retrieval.embedders import OnnxEmbedder
from cartridge_router.retrieval.index import Index, Matrix, Ranking, as_vector
from cartridge_router.retrieval.learning import fit_logistic
from cartridge_router.retrieval.parts import EXTEND_PARTS, SCOPE_PARTS, SKIP_PARTS
from cartridge_router.retrieval.sets import extend_parts, pool_beside
from tests.benchmarks.bench_selection import (
    SETS,
    VECTORS,
    Asked,
    StoredVectors,
    documents_of,
    half_of,
    questions_of,
)

NUM_QUESTIONS = 900
NUM_STEPS = 500
MAX_SIZE = 4

Step = tuple[Matrix, list[int], bool]
"""Parts of the pool, rows that are right, and whether to stop is right."""


def main(arguments: Sequence[str]) -> int:
    """Print the fitted weights as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("SELECTION_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default))
    given = parser.parse_args(arguments)
    stored = StoredVectors(OnnxEmbedder(), VECTORS)
    steps: dict[str, list[Step]] = {}
    scope: dict[str, tuple[Matrix, list[bool]]] = {}
    skip: dict[str, list[tuple[Matrix, bool]]] = {}
    for name in SETS:
        documents = [prepare(one, stored) for one in documents_of(name, given.data)]
        index = Index(documents, stored)
        asked = [one for one in questions_of(name, given.data) if half_of(name, one) == "tuning"]
        random.Random(1).shuffle(asked)
        answers = [(one, index.ranking(one.question, allow_skip=False)) for one in asked]
        pairs = [(one, found) for one, found in answers[:NUM_QUESTIONS] if found is not None]
        steps[name] = [step for one, found in pairs for step in steps_of(index, one, found)]
        scope[name] = (
            np.stack([found.scope_parts for _, found in pairs]),
            [bool(one.gold) for one, _ in pairs],
        )
        skip[name] = [
            (
                index.skip_parts(found.question, found.per_document),
                bool(one.gold) and int(found.numbers[0]) == int(found.per_document.argmax()),
            )
            for one, found in pairs
            if found.per_document.any()
        ]
    extend = fit_extend([found[:NUM_STEPS] for found in steps.values()])
    # Filings are left out: no question of theirs is without an answer, and every one is alike.
    inside = fit_scope([found for name, found in scope.items() if name != "sec10q"])
    fitted = {"extend": extend, "scope": inside, "skip": fit_skip(list(skip.values()))}
    sys.stdout.write(json.dumps(fitted, indent=1) + "\n")
    return 0


def steps_of(index: Index, one: Asked, ranking: Ranking) -> list[Step]:
    """The decisions on the way to the right set, where the first document is right."""
    gold = {index.numbers[id_] for id_ in one.gold}
    chosen = [int(ranking.numbers[0])]
    if chosen[0] not in gold:
        return []
    found: list[Step] = []
    weights = as_vector(index.calibration.extend, EXTEND_PARTS)
    while len(chosen) < MAX_SIZE:
        pool = pool_beside(index, ranking, chosen)
        parts = extend_parts(index, ranking, chosen, pool)
        right = [row for row, number in enumerate(pool.numbers.tolist()) if number in gold]
        is_whole = len(chosen) >= len(gold)
        if is_whole or right:
            found.append((parts, right, is_whole))
        if is_whole or not right:
            break
        best = max(right, key=lambda row: float(parts[row] @ weights))
        chosen.append(int(pool.numbers[best]))
    return found


def fit_extend(sets: Sequence[Sequence[Step]]) -> dict[str, float]:
    """A softmax over the pool and stopping, whose logit is 0."""
    weights = torch.zeros(len(EXTEND_PARTS) + 1, requires_grad=True)

    def loss() -> torch.Tensor:
        total = torch.zeros(())
        for steps in sets:
            for parts, right, is_whole in steps:
                logits = torch.from_numpy(parts) @ weights[1:] + weights[0]
                every = torch.cat([logits, torch.zeros(1)])
                good = every[-1] if is_whole else torch.logsumexp(logits[right], 0)
                total = total + (torch.logsumexp(every, 0) - good) / len(steps)
        return total / len(sets) + 0.002 * (weights[1:] ** 2).mean()

    return minimised(weights, loss, EXTEND_PARTS)


def fit_scope(sets: Sequence[tuple[Matrix, list[bool]]]) -> dict[str, float]:
    """A logistic regression in which both kinds of questions of each set weigh the same."""
    weights = torch.zeros(len(SCOPE_PARTS) + 1, requires_grad=True)
    softplus = torch.nn.functional.softplus

    def loss() -> torch.Tensor:
        total = torch.zeros(())
        for parts, inside in sets:
            logits = torch.from_numpy(parts) @ weights[1:] + weights[0]
            is_inside = torch.tensor(inside)
            total = total + softplus(-logits[is_inside]).mean() / 2
            if not all(inside):
                total = total + softplus(logits[~is_inside]).mean() / 2
        return total / len(sets) + 0.003 * (weights[1:] ** 2).mean()

    return minimised(weights, loss, SCOPE_PARTS)


def fit_skip(sets: Sequence[Sequence[tuple[Matrix, bool]]]) -> dict[str, float]:
    """A logistic regression: did the best passage by words name what the whole search named?"""
    rows = [row for found in sets for row, _ in found]
    share = np.concatenate([np.full(len(found), 300 / max(len(found), 1)) for found in sets])
    fitted = fit_logistic(
        np.concatenate([np.ones((len(rows), 1), np.float32), np.stack(rows)], axis=1),
        np.array([agreed for found in sets for _, agreed in found]),
        np.zeros(len(SKIP_PARTS) + 1),
        strength=0.5,
        weights=share,
    )
    return named(fitted.tolist(), SKIP_PARTS)


def minimised(
    weights: torch.Tensor, loss: Callable[[], torch.Tensor], parts: Sequence[str]
) -> dict[str, float]:
    """Weights by name where the loss is least."""
    search = torch.optim.LBFGS([weights], max_iter=60, line_search_fn="strong_wolfe")

    def step() -> float:
        search.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    search.step(step)  # type: ignore[no-untyped-call]
    return named(weights.detach().tolist(), parts)


def named(weights: Sequence[float], parts: Sequence[str]) -> dict[str, float]:
    """The bias and the weights, rounded as they are shipped."""
    return {name: round(one, 2) for name, one in zip(("bias", *parts), weights, strict=True)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
