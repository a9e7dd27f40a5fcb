"""One question, one answer: rank, decide whether and how many, say why.

Owns the call that the gateway makes. Refuses deadlines and threads: the caller has both.
"""

from dataclasses import replace

import numpy as np

from cartridge_router.retrieval.index import Index, Ranking
from cartridge_router.retrieval.parts import (
    RANK_PARTS,
    SCOPE_PARTS,
    Candidate,
    Found,
    Outcome,
    Ranked,
)
from cartridge_router.retrieval.rerankers import Reranker
from cartridge_router.retrieval.sets import choose

MAX_SET_SIZE = 4
NUM_RERANKED = 8
"""Candidates that a reranker looks at."""
NO_CANDIDATES = Ranked((), 0.0, {}, is_embedded=False)


def search(
    index: Index,
    question: str,
    *,
    max_size: int = MAX_SET_SIZE,
    reranker: Reranker | None = None,
) -> Found:
    """The documents that answer a question: none, one or several, in order.

    Blocks for milliseconds: an embedding (about 6 ms on one core) where lexical scores do not
    decide, and the search; with a reranker, for what that takes. Safe from several threads.
    """
    if not index.documents:
        return Found((), Outcome.EMPTY_INDEX, NO_CANDIDATES, index.version)
    ranking = index.ranking(question)
    if ranking is None:
        return Found((), Outcome.NOTHING_MATCHES, NO_CANDIDATES, index.version)
    if reranker is not None and ranking.scope >= index.calibration.scope_threshold:
        ranking = reranked(index, ranking, question, reranker)
    rows = zip(ranking.ids, ranking.scores.tolist(), ranking.parts.tolist(), strict=True)
    candidates = tuple(
        Candidate(id_, score, dict(zip(RANK_PARTS, parts, strict=True)))
        for id_, score, parts in rows
    )
    ranked = Ranked(
        candidates,
        ranking.scope,
        dict(zip(SCOPE_PARTS, map(float, ranking.scope_parts), strict=True)),
        is_embedded=ranking.question.vector is not None,
    )
    chosen = choose(index, ranking, max_size=max_size)
    documents = tuple(
        Candidate(
            index.ids[one.number],
            one.score,
            dict(zip(RANK_PARTS, map(float, one.parts), strict=True)),
        )
        for one in chosen
    )
    outcome = Outcome.FOUND if documents else Outcome.OUT_OF_SCOPE
    return Found(documents, outcome, ranked, index.version)


def reranked(index: Index, ranking: Ranking, question: str, reranker: Reranker) -> Ranking:
    """The same candidates, the first ones in the order of a reranker; scores stay with them.

    Of each document it reads the title and the passage that is most like the question.
    """
    passages = []
    for number in ranking.numbers[:NUM_RERANKED].tolist():
        document = index.documents[number].document
        best = index.best_passage(ranking.question, number)
        passages.append(f"{document.title}. {document.passages[best]}")
    first = np.argsort(-reranker.scores(question, passages), kind="stable")
    order = np.concatenate([first, np.arange(len(first), len(ranking.numbers))])
    return replace(
        ranking,
        numbers=ranking.numbers[order],
        parts=ranking.parts[order],
        scores=ranking.scores[order],
        is_list=ranking.is_list[order],
        ids=[ranking.ids[place] for place in order.tolist()],
    )
