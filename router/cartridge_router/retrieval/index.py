"""The documents that one audience may see, ready to be asked.

Owns the arrays of one visible set and the named parts of each candidate's score. Refuses changes
in place, and any document outside the set: every statistic is of these documents alone, so that
what another tenant adds cannot move a score.
"""

import copy
import hashlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cartridge_router.retrieval.calibration import DEFAULTS, Calibration, Weights
from cartridge_router.retrieval.documents import PreparedDocument
from cartridge_router.retrieval.embedders import Embedder, Vectors
from cartridge_router.retrieval.lexical import LexicalField, Scores
from cartridge_router.retrieval.links import Links
from cartridge_router.retrieval.names import Mention, NameBook, Phrase
from cartridge_router.retrieval.parts import (
    RANK_PARTS,
    SCOPE_PARTS,
    SKIP_PARTS,
)
from cartridge_router.retrieval.periods import Period, question_period
from cartridge_router.retrieval.vectors import PassageVectors
from cartridge_router.retrieval.words import fold_words, terms_of

Numbers = npt.NDArray[np.int64]
Matrix = npt.NDArray[np.float32]

NUM_PER_PART = 24
"""Candidates taken from each way of looking."""

NUM_NEAREST = 200
EPSILON = 1e-6
MAX_QUESTION_CHARACTERS = 8_000


EQUAL = 0.9999
"""A passage this similar is the question itself."""


@dataclass(frozen=True)
class Lesson:
    """What to leave out of account when the question itself is being learnt from.

    `hidden` documents, the labelled question `known`, passages equal to the question.
    """

    hidden: frozenset[int] = frozenset()
    known: int | None = None
    without_equal: bool = False


NO_LESSON = Lesson()


@dataclass(frozen=True)
class Question:
    """A question as an index reads it. Scores are of all passages, documents and cards."""

    words: list[str]
    terms: list[str]
    mentions: list[Mention]
    period: Period | None
    asks_latest: bool
    passages: Scores
    documents: Scores
    cards: Scores
    passage_ideal: float
    document_ideal: float
    card_ideal: float
    vector: Vectors | None
    background: float
    nearest: Vectors
    nearest_rows: Numbers


@dataclass(frozen=True)
class Ranking:
    """A question's candidates by number, best first, with parts [candidates, RANK_PARTS].

    `tops` is the largest of each part before it was made relative.
    """

    question: Question
    numbers: Numbers
    parts: Matrix
    scores: Scores
    scope_parts: Matrix
    scope: float
    tops: Scores
    per_document: Scores
    is_list: npt.NDArray[np.bool_]
    ids: list[str]


class Index:
    """An immutable index of one visible set; see `build` and `with_changes`.

    Safe to ask from several threads. Everything here blocks: keep it off the event loop.
    """

    def __init__(
        self,
        documents: Iterable[PreparedDocument],
        embedder: Embedder,
        calibration: Calibration = DEFAULTS,
        *,
        rows: Vectors | None = None,
    ) -> None:
        """Index prepared documents; their order does not matter.

        `rows` are their vectors in the order of ids, where one array (a mapped file) has them.

        Raises:
            ValueError: two documents of one id.
        """
        self.documents = tuple(sorted(documents, key=lambda one: one.document.id))
        self.ids = tuple(one.document.id for one in self.documents)
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("two documents of one id")
        self.embedder = embedder
        self.calibration = calibration
        self.known_vectors = embedder.embed([one.question for one in calibration.known])
        self._prepare_fields()
        self._prepare_vectors(rows)

    def _prepare_fields(self) -> None:
        documents = self.documents
        self.book = NameBook([one.names for one in documents])
        self.links = Links.build(documents, self.book)
        self.passage_field = LexicalField.build(
            [terms for one in documents for terms in one.passage_terms]
        )
        self.document_field = LexicalField.build(
            [
                [*(term for terms in one.passage_terms for term in terms), *one.card_terms]
                for one in documents
            ]
        )
        self.card_field = LexicalField.build([one.card_terms for one in documents])
        self.numbers = {id_: number for number, id_ in enumerate(self.ids)}

    def _prepare_vectors(self, rows: Vectors | None) -> None:
        documents, dim = self.documents, self.embedder.dim
        nothing = np.zeros((0, dim), np.float32)
        if rows is None:
            rows = np.concatenate([nothing, *(one.vectors for one in documents)])
        self.vectors = PassageVectors(rows)
        lengths = np.array([len(one.vectors) for one in documents], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)
        self.lengths = lengths
        self.owners = np.repeat(np.arange(len(documents)), lengths)
        means = [one.vectors.mean(axis=0) for one in documents]
        self.means = np.stack(means) if means else nothing
        self.means = self.means / (np.linalg.norm(self.means, axis=1, keepdims=True) + EPSILON)
        self.cards = np.stack([one.card_vector for one in documents]) if documents else nothing
        self.centre = rows.mean(axis=0) if len(rows) else np.zeros(dim, np.float32)
        self.is_list = np.array([one.is_list for one in documents], bool)
        # How rare it is that another document names this one, 0 to 1: "After" names little.
        size = len(documents)
        self.name_rarity = np.log1p(size / (1 + self.links.num_naming)) / math.log1p(max(size, 1))

    def warm(self) -> None:
        """Make now what the first question would otherwise wait for."""
        self.vectors.warm()
        _ = self.version, self.latest, self.term_sets, self.links.incoming

    @cached_property
    def version(self) -> str:
        """Digest of everything that decides an answer."""
        digest = hashlib.sha256()
        for part in (
            self.embedder.identity,
            self.calibration.to_json(),
            *(one.document.digest for one in self.documents),
        ):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()

    def with_changes(
        self, added: Iterable[PreparedDocument] = (), removed: Collection[str] = ()
    ) -> "Index":
        """Another index: documents of equal id are replaced, those removed are gone."""
        added = list(added)
        gone = {*removed, *(one.document.id for one in added)}
        kept = [one for one in self.documents if one.document.id not in gone]
        return Index([*kept, *added], self.embedder, self.calibration)

    def with_calibration(self, calibration: Calibration) -> "Index":
        """Another index of the same documents, which shares all that does not depend on it."""
        other = copy.copy(self)
        for name in ("version", "_known_owners", "_known_is_inside"):
            other.__dict__.pop(name, None)
        other.calibration = calibration
        other.known_vectors = self.embedder.embed([one.question for one in calibration.known])
        return other

    @cached_property
    def latest(self) -> dict[tuple[str, ...], Period]:
        """The last period of each series of two documents or more."""
        periods: dict[tuple[str, ...], list[Period]] = {}
        for one in self.documents:
            period, rest = one.series
            if period is not None and rest:
                periods.setdefault(rest, []).append(period)
        return {rest: max(known) for rest, known in periods.items() if len(known) > 1}

    def read(self, text: str, *, lexical_only: bool = False) -> Question:
        """Score a question against every field."""
        text = text[:MAX_QUESTION_CHARACTERS]
        words = fold_words(text)
        terms = terms_of(words)
        period, asks_latest = question_period(text)
        question = Question(
            words,
            terms,
            self.book.scan(words),
            period,
            asks_latest,
            self.passage_field.scores(terms),
            self.document_field.scores(terms),
            self.card_field.scores(terms),
            self.passage_field.ideal(terms) + EPSILON,
            self.document_field.ideal(terms) + EPSILON,
            self.card_field.ideal(terms) + EPSILON,
            None,
            0.0,
            np.zeros(0, np.float32),
            np.zeros(0, np.int64),
        )
        return question if lexical_only else self.with_vector(question, text)

    def with_vector(self, question: Question, text: str) -> Question:
        """The same question with its vector and nearest passages."""
        vector = self.embedder.embed([text])[0]
        rows, similarities = self.vectors.nearest(vector, NUM_NEAREST)
        return replace(
            question,
            vector=vector,
            background=float(self.centre @ vector),
            nearest=similarities,
            nearest_rows=rows,
        )

    def passage_scores(self, question: Question) -> Scores:
        """BM25 of each document's best passage."""
        return np.maximum.reduceat(question.passages, self.starts)

    def best_passage(self, question: Question, number: int) -> int:
        """Which passage of a document is most like a question: by vectors, else by words."""
        rows = slice(self.starts[number], self.starts[number] + self.lengths[number])
        if question.vector is None:
            return int(question.passages[rows].argmax())
        return int((self.vectors.rows[rows] @ question.vector).argmax())

    def candidates(self, question: Question, per_document: Scores) -> Numbers:
        """Documents worth scoring: the best of each way of looking."""
        numbers: set[int] = set()
        for scores in (per_document, question.documents, question.cards):
            numbers.update(_best(scores, NUM_PER_PART))
        for mention in question.mentions:
            owners = sorted(mention.documents, key=lambda one: -one[1])
            numbers.update(number for number, _ in owners[:NUM_PER_PART])
        if question.vector is not None:
            near = dict.fromkeys(self.owners[question.nearest_rows].tolist())
            numbers.update(list(near)[: NUM_PER_PART * 2])
            if len(self.documents) <= 5_000:
                numbers.update(_best(self.means @ question.vector, NUM_PER_PART, floor=-1.0))
                numbers.update(_best(self.cards @ question.vector, 8, floor=-1.0))
        return np.array(sorted(numbers), np.int64)

    def parts(
        self,
        question: Question,
        numbers: Numbers,
        per_document: Scores,
        lesson: Lesson = NO_LESSON,
    ) -> Matrix:
        """float32 [numbers, RANK_PARTS] without the scale of the best candidate."""
        matrix = np.zeros((len(numbers), len(RANK_PARTS)), np.float32)
        if question.vector is not None:
            matrix[:, 0] = self._max_similarities(question.vector, numbers, lesson)
            matrix[:, 1] = self.means[numbers] @ question.vector
            matrix[:, 2] = self.cards[numbers] @ question.vector
            matrix[:, 9] = self._known(question, numbers, lesson)
        matrix[:, 3] = per_document[numbers]
        matrix[:, 4] = question.documents[numbers]
        matrix[:, 5] = question.cards[numbers] / question.card_ideal
        self._fill_mentions(question, numbers, matrix)
        if question.period is not None or question.asks_latest:
            named = {
                self.documents[number].series[1]
                for mention in question.mentions
                for number, _ in mention.documents
                if self.documents[number].series[0] is not None
            }
            matrix[:, 8] = [self._period(question, self.documents[one], named) for one in numbers]
        return matrix

    def _max_similarities(self, vector: Vectors, numbers: Numbers, lesson: Lesson) -> Scores:
        if not len(numbers):
            return np.zeros(0, np.float32)
        lengths = self.lengths[numbers]
        begins = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        rows = np.arange(lengths.sum()) + np.repeat(self.starts[numbers] - begins, lengths)
        similar = self.vectors.rows[rows] @ vector
        if lesson.without_equal:
            similar = np.where(similar < EQUAL, similar, -1.0)
        best: Scores = np.maximum.reduceat(similar, begins)
        return best

    def _without(self, question: Question, lesson: Lesson) -> Question:
        keep = np.ones(len(question.nearest), bool)
        if lesson.hidden:
            keep &= ~np.isin(self.owners[question.nearest_rows], list(lesson.hidden))
        if lesson.without_equal:
            keep &= question.nearest < EQUAL
        if keep.all():
            return question
        return replace(
            question, nearest=question.nearest[keep], nearest_rows=question.nearest_rows[keep]
        )

    def _known(self, question: Question, numbers: Numbers, lesson: Lesson) -> Scores:
        likeness = np.zeros(len(numbers), np.float32)
        if not len(self.known_vectors) or question.vector is None:
            return likeness
        similar = self.known_vectors @ question.vector
        if lesson.known is not None:
            similar[lesson.known] = 0.0
        best: dict[int, float] = {}
        for row in np.argsort(-similar)[:64].tolist():
            for number in self._known_owners[row]:
                best.setdefault(number, float(similar[row]))
        return np.array([best.get(int(one), 0.0) for one in numbers], np.float32)

    @cached_property
    def _known_owners(self) -> list[list[int]]:
        return [
            [self.numbers[id_] for id_ in one.gold if id_ in self.numbers]
            for one in self.calibration.known
        ]

    def _fill_mentions(self, question: Question, numbers: Numbers, matrix: Matrix) -> None:
        place = {int(number): row for row, number in enumerate(numbers)}
        for mention in question.mentions:
            terms = terms_of(question.words[mention.start : mention.end])
            share = self.passage_field.ideal(terms) / question.passage_ideal
            for number, strength in mention.documents:
                row = place.get(number)
                if row is not None:
                    weight = strength * float(self.name_rarity[number])
                    matrix[row, 6] = max(matrix[row, 6], weight)
                    matrix[row, 7] = max(matrix[row, 7], strength * share)

    def _period(self, question: Question, document: PreparedDocument, named: set[Phrase]) -> float:
        """1 when it is of the period asked for, -1 when it is of another, 0 unknown.

        Where a question names a series, the right period of another series says nothing.
        """
        period, rest = document.series
        if period is None or (named and rest not in named):
            return 0.0
        if question.period is not None:
            return 1.0 if question.period.covers(period) else -1.0
        if question.asks_latest and rest in self.latest:
            return 1.0 if self.latest[rest] == period else -1.0
        return 0.0

    def scaled(self, question: Question, parts: Matrix, tops: Scores) -> Matrix:
        """Parts relative to the best of each: 1 is the best, 0 the background or nothing."""
        scaled = parts.copy()
        if question.vector is not None:
            for column in (0, 1):
                top = tops[column] - question.background
                scaled[:, column] = (parts[:, column] - question.background) / (top + EPSILON)
        for column in (3, 4):
            scaled[:, column] = parts[:, column] / (tops[column] + EPSILON)
        return scaled

    def fused(self, numbers: Numbers, scaled: Matrix) -> Scores:
        """The score of each candidate, in logits."""
        prose = scaled @ as_vector(self.calibration.prose, RANK_PARTS)
        lists = scaled @ as_vector(self.calibration.lists, RANK_PARTS)
        return np.where(self.is_list[numbers], lists, prose).astype(np.float32)

    def skip_parts(self, question: Question, per_document: Scores) -> Matrix:
        """float32 [SKIP_PARTS] of lexical scores."""
        first = int(per_document.argmax())
        first_by_document = int(question.documents.argmax())
        share = max(
            (
                self.passage_field.ideal(terms_of(question.words[one.start : one.end]))
                for one in question.mentions
                if any(number == first for number, _ in one.documents)
            ),
            default=0.0,
        )
        return np.array(
            [
                _margin(per_document),
                _margin(question.documents),
                float(first == first_by_document),
                float(per_document[first]) / question.passage_ideal,
                share / question.passage_ideal,
                float(self.is_list[first]),
            ],
            np.float32,
        )

    def scope_parts(
        self,
        question: Question,
        numbers: Numbers,
        parts: Matrix,
        scores: Scores,
        lesson: Lesson = NO_LESSON,
    ) -> Matrix:
        """float32 [SCOPE_PARTS] of a question whose best candidate comes first."""
        inside, outside = self._known_scope(question, lesson)
        near = question.nearest
        first = parts[0]
        return np.array(
            [
                first[1],
                first[0],
                first[2],
                near[:5].mean() if len(near) else 0.0,
                near[:20].mean() if len(near) else 0.0,
                question.background,
                first[4] / question.document_ideal,
                first[3] / question.passage_ideal,
                first[4] / 30,
                first[6],
                math.log1p(question.document_ideal) / 4,
                (scores[0] - scores[1]) / 5 if len(scores) > 1 else 1.0,
                float(self.is_list[numbers[0]]),
                inside,
                outside,
            ],
            np.float32,
        )

    def _known_scope(self, question: Question, lesson: Lesson) -> tuple[float, float]:
        if not len(self.known_vectors) or question.vector is None:
            return 0.0, 0.0
        similar = self.known_vectors @ question.vector
        if lesson.known is not None:
            similar[lesson.known] = 0.0
        inside = similar[self._known_is_inside]
        outside = similar[~self._known_is_inside]
        return (
            float(np.sort(inside)[-3:].mean()) if len(inside) else 0.0,
            float(outside.max()) if len(outside) else 0.0,
        )

    @cached_property
    def _known_is_inside(self) -> npt.NDArray[np.bool_]:
        return np.array([bool(one.gold) for one in self.calibration.known], bool)

    def ranking(
        self, text: str, *, allow_skip: bool = True, lesson: Lesson = NO_LESSON
    ) -> Ranking | None:
        """The candidates for a question; `None` if nothing is like it, or the index is empty.

        `lesson` says what to leave out of account when the question itself is being learnt from.
        """
        if not self.documents:
            return None
        question = self.read(text, lexical_only=True)
        per_document = self.passage_scores(question)
        if not (allow_skip and self._is_decisive(question, per_document)):
            question = self.with_vector(question, text)
        question = self._without(question, lesson)
        numbers = self.candidates(question, per_document)
        if lesson.hidden:
            numbers = numbers[~np.isin(numbers, list(lesson.hidden))]
        if not len(numbers):
            return None
        parts = self.parts(question, numbers, per_document, lesson)
        tops = parts.max(axis=0)
        scaled = self.scaled(question, parts, tops)
        scores = self.fused(numbers, scaled)
        order = np.lexsort((numbers, -scores))
        numbers, parts, scaled, scores = numbers[order], parts[order], scaled[order], scores[order]
        scope_parts = self.scope_parts(question, numbers, parts, scores, lesson)
        scope = (
            1.0
            if question.vector is None
            else logistic(self.calibration.scope, SCOPE_PARTS, scope_parts)
        )
        return Ranking(
            question,
            numbers,
            scaled,
            scores,
            scope_parts,
            scope,
            tops,
            per_document,
            self.is_list[numbers],
            [self.ids[one] for one in numbers],
        )

    def _is_decisive(self, question: Question, per_document: Scores) -> bool:
        if self.calibration.skip_threshold >= 1 or not per_document.any():
            return False
        parts = self.skip_parts(question, per_document)
        return logistic(self.calibration.skip, SKIP_PARTS, parts) >= self.calibration.skip_threshold

    @cached_property
    def term_sets(self) -> list[frozenset[str]]:
        """Terms of each document."""
        return [
            frozenset(term for terms in one.passage_terms for term in terms) | set(one.card_terms)
            for one in self.documents
        ]


def as_vector(weights: Weights, parts: Sequence[str]) -> Scores:
    """Weights in the order of parts."""
    return np.array([weights[part] for part in parts], np.float32)


def logistic(weights: Weights, parts: Sequence[str], values: Matrix) -> float:
    """Probability, 0 to 1."""
    logit = weights["bias"] + float(values @ as_vector(weights, parts))
    return 1 / (1 + math.exp(-max(-60.0, min(60.0, logit))))


def _best(scores: Scores, count: int, floor: float = 0.0) -> list[int]:
    """Numbers of the `count` highest scores above a floor; of equal ones the lowest numbers."""
    top = float(scores.max(initial=floor))
    found = np.nonzero(scores > floor)[0]
    if len(found) > 4 * count and top > 0:
        # Most scores are far from the top, and to order them all is slow.
        for share in (0.5, 0.25):
            near = np.nonzero(scores > max(share * top, floor))[0]
            if len(near) >= count:
                found = near
                break
    order = np.lexsort((found, -scores[found]))[:count]
    numbers: list[int] = found[order].tolist()
    return numbers


def _margin(scores: Scores) -> float:
    """How far the first is before the second, as a part of the first."""
    values = [float(scores[number]) for number in _best(scores, 2)]
    first, second = [*values, 0.0, 0.0][:2]
    return (first - second) / (first + EPSILON)
