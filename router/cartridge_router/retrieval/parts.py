"""What a score is made of, by name, and what a search answers.

Owns the names and the shape of answers. Refuses arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

RANK_PARTS = (
    "dense_max",
    "dense_mean",
    "dense_card",
    "bm25_passage",
    "bm25_document",
    "bm25_card",
    "title_mention",
    "mention_share",
    "period",
    "known_question",
)
"""Of each candidate. The first, second, fourth and fifth are relative to the best candidate (1)."""

SCOPE_PARTS = (
    "mean_similarity",
    "max_similarity",
    "card_similarity",
    "nearest_5",
    "nearest_20",
    "background",
    "document_coverage",
    "passage_coverage",
    "document_score",
    "title_mention",
    "question_mass",
    "gap",
    "is_list",
    "known_inside",
    "known_outside",
)
"""Of the question with its first candidate: does any document answer it?"""

EXTEND_PARTS = (
    "score_gap",
    "similarity_gap",
    "title_mention",
    "link_strength",
    "link_context",
    "link_early",
    "link_crowd",
    "link_back",
    "series",
    "gain",
    "num_passages",
    "size",
    "mentions_left",
    "parallel",
    "finished",
)
"""Of a candidate beside the documents already chosen: does it belong to the set?"""

SKIP_PARTS = ("passage_margin", "document_margin", "agree", "coverage", "mention_share", "is_list")
"""Of lexical scores alone: are they decisive, so that no embedding is needed?"""


@dataclass(frozen=True)
class Candidate:
    """A document with its score and what that is made of."""

    id: str
    score: float
    parts: Mapping[str, float]


@dataclass(frozen=True)
class Ranked:
    """Candidates, best first; documents of equal score by id.

    `scope` is the estimated chance that any document answers, 0 to 1.
    """

    candidates: tuple[Candidate, ...]
    scope: float
    scope_parts: Mapping[str, float]
    is_embedded: bool
    """False when lexical scores were decisive."""


class Outcome(StrEnum):
    """Why a search answers what it does."""

    FOUND = "found"
    EMPTY_INDEX = "empty_index"
    NOTHING_MATCHES = "nothing_matches"
    OUT_OF_SCOPE = "out_of_scope"


@dataclass(frozen=True)
class Found:
    """The documents for a question in order; none with the reason, and the ranking behind it."""

    documents: tuple[Candidate, ...]
    outcome: Outcome
    ranked: Ranked
    index_version: str

    @property
    def ids(self) -> tuple[str, ...]:
        """Identities of the chosen documents, in order."""
        return tuple(document.id for document in self.documents)
