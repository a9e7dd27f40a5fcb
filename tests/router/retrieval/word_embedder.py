"""An embedder that needs no model: each word is a direction of its own.

Owns a stand-in for tests of the index. Refuses meaning: only equal words are alike.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from cartridge_router.retrieval.embedders import Vectors, normalised
from cartridge_router.retrieval.words import fold_words, terms_of


class WordEmbedder:
    """Sums of fixed random directions; counts the texts it was asked for."""

    def __init__(self, identity: str = "words-64") -> None:
        self.identity = identity
        self.dim = 64
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors of the texts."""
        self.texts.extend(texts)
        rows = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            for word in terms_of(fold_words(text)) or ["nothing"]:
                seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
                rows[row] += np.random.default_rng(seed).normal(size=self.dim)
        return normalised(rows)
