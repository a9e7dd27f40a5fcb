"""BM25 over one field of the documents of one index.

Owns the field's vocabulary and weights. Refuses documents of any other index: a document frequency
is a fact about the whole set, so a set per audience is the only score that leaks nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cartridge_router.retrieval.embedders import import_extra

Scores = npt.NDArray[np.float32]

K1 = 1.2
B = 0.75


@dataclass(frozen=True)
class LexicalField:
    """Impact of each term in each row, by term: `indptr` says where a term's rows begin.

    `log_rarity` float32 [num_terms]: the idf, also the best that a term can give a row per
    (k1 + 1).
    """

    vocabulary: dict[str, int]
    impacts: Scores
    rows: npt.NDArray[np.int32]
    indptr: npt.NDArray[np.int64]
    rarity: Scores
    num_rows: int

    @classmethod
    def build(cls, rows: Sequence[Sequence[str]]) -> "LexicalField":
        """Index rows of terms; the same rows give the same bytes."""
        library = import_extra("bm25s", "selection")
        counts = Counter(term for row in rows for term in set(row))
        # Sorted: the library's own order is that of a set of strings, which differs by process.
        vocabulary = {term: number for number, term in enumerate(sorted(counts))}
        rarity = np.array([_rarity(len(rows), counts[term]) for term in vocabulary], np.float32)
        if not vocabulary:
            nothing = np.zeros(0, np.float32)
            return cls({}, nothing, np.zeros(0, np.int32), np.zeros(1, np.int64), rarity, len(rows))
        scorer: Any = library.BM25(method="lucene", k1=K1, b=B)
        scorer.index(
            ([[vocabulary[term] for term in row] for row in rows], dict(vocabulary)),
            create_empty_token=False,
            show_progress=False,
        )
        scores = scorer.scores
        return cls(
            vocabulary,
            np.asarray(scores["data"], np.float32),
            np.asarray(scores["indices"], np.int32),
            np.asarray(scores["indptr"], np.int64),
            rarity,
            len(rows),
        )

    def scores(self, terms: Sequence[str]) -> Scores:
        """float32 [num_rows]: how well each row answers to the terms; 0 shares none."""
        scores = np.zeros(self.num_rows, np.float32)
        for term, times in sorted(Counter(terms).items()):
            number = self.vocabulary.get(term)
            if number is not None:
                found = slice(self.indptr[number], self.indptr[number + 1])
                # A row stands once among a term's rows, so that plain indexing adds.
                scores[self.rows[found]] += self.impacts[found] * np.float32(times)
        return scores

    def ideal(self, terms: Sequence[str]) -> float:
        """What a row of nothing but these terms would score at most; unknown terms count fully."""
        unknown = _rarity(self.num_rows, 0)
        total = 0.0
        for term, times in Counter(terms).items():
            number = self.vocabulary.get(term)
            total += times * (unknown if number is None else float(self.rarity[number]))
        return total


def _rarity(num_rows: int, num_with: int) -> float:
    """Source: Lucene's BM25 idf, log(1 + (N - n + 0.5) / (n + 0.5))."""
    return math.log(1 + (num_rows - num_with + 0.5) / (num_with + 0.5))
