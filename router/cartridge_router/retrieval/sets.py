"""Which of the ranked documents make the answer: none, one or several, in which order.

Owns the decision to abstain and the step from the documents chosen to one more. Refuses scores of
its own: it weighs what the index measured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cartridge_router.retrieval.index import (
    Index,
    Matrix,
    Numbers,
    Question,
    Ranking,
    as_vector,
)
from cartridge_router.retrieval.lexical import Scores
from cartridge_router.retrieval.parts import (
    EXTEND_PARTS,
)
from cartridge_router.retrieval.words import terms_of

MAX_LINKED = 32
NUM_RANKED = 24

PREFIX = 6
"""Letters by which a word of a question and one beside a link are alike: direct-or, direct-ed."""


@dataclass(frozen=True)
class Pool:
    """Documents that could join a set, with their scaled parts and scores."""

    numbers: Numbers
    scaled: Matrix
    scores: Scores


def pool_beside(index: Index, ranking: Ranking, chosen: Sequence[int]) -> Pool:
    """The best candidates, what the chosen ones name, and what names them."""
    numbers = {int(one) for one in ranking.numbers[:NUM_RANKED]}
    for one in chosen:
        links = sorted(index.links.outgoing[one], key=lambda link: (-link.share, link.target))
        numbers.update(link.target for link in links[:MAX_LINKED])
        sources = index.links.incoming.get(one, ())
        numbers.update(source for source, _ in sources[:MAX_LINKED])
    for mention in ranking.question.mentions:
        numbers.update(number for number, _ in mention.documents[:NUM_RANKED])
    others = np.array(sorted(numbers - set(chosen)), np.int64)
    parts = index.parts(ranking.question, others, ranking.per_document)
    scaled = index.scaled(ranking.question, parts, ranking.tops)
    return Pool(others, scaled, index.fused(others, scaled))


def extend_parts(index: Index, ranking: Ranking, chosen: Sequence[int], pool: Pool) -> Matrix:
    """float32 [others, EXTEND_PARTS]: each candidate beside the documents chosen so far."""
    question = ranking.question
    context = _LinkContext(index, question, chosen)
    first = int(np.nonzero(ranking.numbers == chosen[0])[0][0])
    num_left = len(context.free_mentions)
    out = np.zeros((len(pool.numbers), len(EXTEND_PARTS)), np.float32)
    for row, number in enumerate(pool.numbers.tolist()):
        strength, said, early, crowd = context.link_to(number)
        out[row] = (
            (pool.scores[row] - ranking.scores[first]) / 5,
            pool.scaled[row, 0] - ranking.parts[first, 0],
            context.free_mention(number),
            strength,
            said,
            early,
            crowd,
            context.link_back(number),
            context.series(number),
            context.gain(number),
            math.log(index.lengths[chosen[0]]) / 3,
            len(chosen) - 1,
            min(num_left, 3) / 3,
            context.parallel(number),
            context.finished,
        )
    return out


class _LinkContext:
    """What the documents chosen so far say about others."""

    def __init__(self, index: Index, question: Question, chosen: Sequence[int]) -> None:
        self._index = index
        self._question = question
        self._chosen = list(chosen)
        taken = [one for one in question.mentions if any(n in chosen for n, _ in one.documents)]
        self.free_mentions = [one for one in question.mentions if one not in taken]
        named = {term for one in taken for term in terms_of(question.words[one.start : one.end])}
        self._asked = {term[:PREFIX] for term in question.terms if term not in named}
        covered = frozenset().union(*(index.term_sets[one] for one in chosen))
        self._uncovered = set(question.terms) - covered
        self._links = [
            (link, len(index.links.outgoing[one]))
            for one in chosen
            for link in index.links.outgoing[one]
        ]
        mentioned = {number for mention in taken for number, _ in mention.documents}
        followed = {
            one
            for one in chosen
            if one in mentioned
            and any(
                link.target in chosen and link.target not in mentioned
                for link in index.links.outgoing[one]
            )
        }
        self._has_followed = bool(followed)
        self._open = [one for one in chosen if one in mentioned and one not in followed]
        self._open_links = [link for one in self._open for link in index.links.outgoing[one]]

    def link_to(self, number: int) -> tuple[float, float, float, float]:
        best = (0.0, 0.0, 0.0, 0.0)
        for link, crowd in self._links:
            if link.target == number:
                strength = link.strength * float(self._index.name_rarity[number])
                said = {term[:PREFIX] for term in terms_of(list(link.context))}
                overlap = len(said & self._asked) / max(len(self._asked), 1)
                best = max(best, (strength, overlap, link.share, 1 / crowd))
        return best

    def link_back(self, number: int) -> float:
        return max(
            (
                link.strength * float(self._index.name_rarity[link.target])
                for link in self._index.links.outgoing[number]
                if link.target in self._chosen
            ),
            default=0.0,
        )

    def parallel(self, number: int) -> float:
        """1 for what a member names whose peer's link was followed: the other film's director."""
        return float(self._has_followed and any(one.target == number for one in self._open_links))

    @property
    def finished(self) -> float:
        """1 when as many links were followed as documents are named in the question."""
        return float(self._has_followed and not self._open)

    def free_mention(self, number: int) -> float:
        rarity = float(self._index.name_rarity[number])
        return max(
            (
                strength * rarity
                for one in self.free_mentions
                for owner, strength in one.documents
                if owner == number
            ),
            default=0.0,
        )

    def series(self, number: int) -> float:
        period, rest = self._index.documents[number].series
        if period is None or not rest or self._question.period is not None:
            return 0.0
        return float(
            all(self._index.documents[one].series[1] == rest for one in self._chosen)
            and not self._question.asks_latest
        )

    def gain(self, number: int) -> float:
        gained = self._uncovered & self._index.term_sets[number]
        ideal = self._index.document_field.ideal
        return ideal(sorted(gained)) / self._question.document_ideal


@dataclass(frozen=True)
class Choice:
    """A chosen document by number, with its score and scaled parts [RANK_PARTS]."""

    number: int
    score: float
    parts: Matrix


def choose(
    index: Index, ranking: Ranking, *, max_size: int, exact_size: int | None = None
) -> list[Choice]:
    """The chosen documents in order; empty to abstain.

    `exact_size` is for measuring: that many documents, whatever the thresholds say.
    """
    limit = max_size if exact_size is None else exact_size
    if limit < 1 or (exact_size is None and ranking.scope < index.calibration.scope_threshold):
        return []
    chosen = [Choice(int(ranking.numbers[0]), float(ranking.scores[0]), ranking.parts[0])]
    weights = as_vector(index.calibration.extend, EXTEND_PARTS)
    threshold = index.calibration.extend_threshold
    least = math.log(threshold / (1 - threshold)) - index.calibration.extend["bias"]
    while len(chosen) < limit:
        members = [one.number for one in chosen]
        pool = pool_beside(index, ranking, members)
        if not len(pool.numbers):
            break
        logits = extend_parts(index, ranking, members, pool) @ weights
        best = int(logits.argmax())
        if exact_size is None and logits[best] < least:
            break
        chosen.append(Choice(int(pool.numbers[best]), float(pool.scores[best]), pool.scaled[best]))
    return chosen
