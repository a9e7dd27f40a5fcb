"""A document as its owner gives it, and as an index needs it.

Owns the work that depends on one document alone: passages, vectors, terms, names. Refuses to know
other documents, so that what is prepared once serves every index the document is in.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from cartridge_router.retrieval.embedders import Embedder, Vectors
from cartridge_router.retrieval.names import Phrase, names_of
from cartridge_router.retrieval.passages import content_digest, is_list, split_passages
from cartridge_router.retrieval.periods import Period, read_period
from cartridge_router.retrieval.words import fold_words, terms_of

_passages_of = lru_cache(256)(split_passages)
"""Of the texts asked for last: a text is in memory anyway, its passages are as much again."""


@dataclass(frozen=True)
class Document:
    """What is known about a Cartridge's document; without text its card is all there is."""

    id: str
    title: str
    aliases: tuple[str, ...] = ()
    sentence: str = ""
    text: str | None = None

    @property
    def card(self) -> str:
        """Title, aliases and sentence as one text."""
        return ". ".join(part for part in (self.title, *self.aliases, self.sentence) if part)

    @property
    def passages(self) -> tuple[str, ...]:
        """At least one: a document without text is found by its card."""
        return _passages_of(self.text or "") or (self.card,)

    @cached_property
    def digest(self) -> str:
        """Names the document by everything that selection reads of it."""
        digest = hashlib.sha256()
        text = "\0" if self.text is None else self.text
        for part in (self.id, self.title, *self.aliases, "\0", self.sentence, text):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.hexdigest()


@dataclass(frozen=True)
class PreparedDocument:
    """A document with what an index needs of it.

    `vectors` float32 [num_passages, dim] and `card_vector` float32 [dim]; `words` holds each
    passage's folded words.
    """

    document: Document
    vectors: Vectors
    card_vector: Vectors
    words: tuple[tuple[str, ...], ...]

    @cached_property
    def is_list(self) -> bool:
        """Whether its passages are entries of a list, such as sample questions."""
        return is_list(self.document.text or "")

    @cached_property
    def names(self) -> dict[Phrase, float]:
        """What names it in a question or in another document."""
        return names_of(self.document.title, self.document.aliases)

    @cached_property
    def series(self) -> tuple[Period | None, Phrase]:
        """Its period, and its title without that: documents of equal rest are a series."""
        period, rest = read_period(fold_words(self.document.title))
        return period, tuple(rest)

    @cached_property
    def passage_terms(self) -> tuple[tuple[str, ...], ...]:
        """Terms of each passage."""
        return tuple(tuple(terms_of(list(words))) for words in self.words)

    @cached_property
    def card_terms(self) -> tuple[str, ...]:
        """Terms of the card."""
        return tuple(terms_of(fold_words(self.document.card)))


def prepare(
    document: Document, embedder: Embedder, known: Mapping[str, Vectors] | None = None
) -> PreparedDocument:
    """Cut, embed and fold a document; `known` vectors by passage digest are not computed again."""
    passages = document.passages
    texts = [*passages, document.card]
    known = known or {}
    digests = [content_digest(text) for text in texts]
    missing = [text for text, digest in zip(texts, digests, strict=True) if digest not in known]
    embedded = iter(embedder.embed(missing))
    rows = [known[digest] if digest in known else next(embedded) for digest in digests]
    vectors = np.stack(rows).astype(np.float32)
    return PreparedDocument(
        document,
        vectors[:-1],
        vectors[-1],
        tuple(tuple(fold_words(passage)) for passage in passages),
    )
