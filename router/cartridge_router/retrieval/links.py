"""Which documents name which others, and where.

Owns the links recorded when an index is built. Refuses links out of the index: a name counts only
if its document is in the same visible set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cartridge_router.retrieval.documents import PreparedDocument
from cartridge_router.retrieval.names import NameBook

CONTEXT_WORDS = 12
"""Words before a name that say what it is to the document: "directed by", "son of"."""

MAX_NAMESAKES = 50
"""A name that more documents have links to none of them: it would link all with all."""


@dataclass(frozen=True)
class Link:
    """One document names another: how often, how surely, and the words before the first time.

    `share` is how early the first mention comes: 1 at the start of the text, 0 at its end.
    """

    target: int
    count: int
    strength: float
    share: float
    context: tuple[str, ...]


@dataclass(frozen=True)
class Links:
    """Links of each document by its number, and how many documents name each one."""

    outgoing: tuple[tuple[Link, ...], ...]
    num_naming: npt.NDArray[np.int32]

    @classmethod
    def build(cls, documents: Sequence[PreparedDocument], book: NameBook) -> "Links":
        """Scan every text once."""
        outgoing = []
        num_naming = np.zeros(len(documents), np.int32)
        for number, document in enumerate(documents):
            links = _links_of(number, document, book)
            outgoing.append(links)
            for link in links:
                num_naming[link.target] += 1
        return cls(tuple(outgoing), num_naming)

    @cached_property
    def incoming(self) -> dict[int, list[tuple[int, Link]]]:
        """Links to each document: who names it, and the link."""
        found: dict[int, list[tuple[int, Link]]] = {}
        for source, links in enumerate(self.outgoing):
            for link in links:
                found.setdefault(link.target, []).append((source, link))
        return found


def _links_of(number: int, document: PreparedDocument, book: NameBook) -> tuple[Link, ...]:
    found: dict[int, Link] = {}
    num_words = sum(len(words) for words in document.words)
    before = 0
    for words in document.words:
        for mention in book.scan(words):
            if len(mention.documents) > MAX_NAMESAKES:
                continue
            for target, strength in mention.documents:
                if target == number:
                    continue
                known = found.get(target)
                if known is None:
                    found[target] = Link(
                        target,
                        1,
                        strength,
                        1 - (before + mention.start) / max(num_words, 1),
                        tuple(words[max(0, mention.start - CONTEXT_WORDS) : mention.start]),
                    )
                else:
                    found[target] = Link(
                        target,
                        known.count + 1,
                        max(strength, known.strength),
                        known.share,
                        known.context,
                    )
        before += len(words)
    return tuple(found[target] for target in sorted(found))
