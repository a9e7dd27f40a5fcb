"""One question, one answer: rank, decide whether and how many, say why.

Owns the call that the gateway makes. Refuses deadlines and threads: the caller has both.
"""

from cartridge_router.retrieval.index import Index
from cartridge_router.retrieval.parts import (
    RANK_PARTS,
    SCOPE_PARTS,
    Candidate,
    Found,
    Outcome,
    Ranked,
)
from cartridge_router.retrieval.sets import choose

MAX_SET_SIZE = 4
NO_CANDIDATES = Ranked((), 0.0, {}, is_embedded=False)


def search(index: Index, question: str, *, max_size: int = MAX_SET_SIZE) -> Found:
    """The documents that answer a question: none, one or several, in order.

    Blocks for milliseconds: an embedding (about 6 ms on one core) where lexical scores do not
    decide, and the search. Safe from several threads.
    """
    if not index.documents:
        return Found((), Outcome.EMPTY_INDEX, NO_CANDIDATES, index.version)
    ranking = index.ranking(question)
    if ranking is None:
        return Found((), Outcome.NOTHING_MATCHES, NO_CANDIDATES, index.version)
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
