"""Where a text names a document: by title, by alias, or by part of a title.

Owns the dictionary of names and the scan. Refuses names inside longer ones: in "House of Cards" no
document called "Cards" is named. The scan is linear in the text, whatever the number of names.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cartridge_router.retrieval.periods import read_period
from cartridge_router.retrieval.words import STOPWORDS, fold_words

FULL = 1.0
ALIAS = 0.95
WITHOUT_NOTE = 0.8
"""A title without its parenthesis: "Chicken (dance)" is often just "Chicken"."""
BEFORE_COMMA = 0.6
"""The part of a title before a comma, of two words or more: "John Wallop, 2nd Earl"."""
WITHOUT_PERIOD = 0.8
"""A title without its year and quarter names the whole series."""

_NOTE = re.compile(r"\s*[(\[][^()\[\]]*[)\]]\s*")

Phrase = tuple[str, ...]


@dataclass(frozen=True)
class Mention:
    """Words [start, end) of a text name these documents, each as strongly as its name is theirs."""

    start: int
    end: int
    documents: tuple[tuple[int, float], ...]


def names_of(title: str, aliases: Iterable[str]) -> dict[Phrase, float]:
    """The phrases that name a document, and how surely each does."""
    names: dict[Phrase, float] = {}

    def add(text: str, strength: float) -> None:
        phrase = tuple(fold_words(text))
        if phrase and not STOPWORDS.issuperset(phrase):
            names[phrase] = max(names.get(phrase, 0.0), strength)

    add(title, FULL)
    plain = _NOTE.sub(" ", title)
    if plain != title:
        add(plain, WITHOUT_NOTE)
    head, comma, _ = plain.partition(",")
    if comma and len(head.split()) > 1:
        add(head, BEFORE_COMMA)
    period, rest = read_period(fold_words(title))
    if period is not None:
        add(" ".join(rest), WITHOUT_PERIOD)
    for alias in aliases:
        add(alias, ALIAS)
    return names


class NameBook:
    """All names of the documents of one index."""

    def __init__(self, names: Sequence[dict[Phrase, float]]) -> None:
        """Take the names of each document, by its number."""
        self._owners: dict[Phrase, list[tuple[int, float]]] = {}
        lengths: dict[str, set[int]] = {}
        for document, own in enumerate(names):
            for phrase, strength in own.items():
                self._owners.setdefault(phrase, []).append((document, strength))
                lengths.setdefault(phrase[0], set()).add(len(phrase))
        self._lengths = {word: sorted(known, reverse=True) for word, known in lengths.items()}

    def scan(self, words: Sequence[str]) -> list[Mention]:
        """The names in folded words: the longest at each place, none inside another."""
        found: list[Mention] = []
        at = 0
        while at < len(words):
            for length in self._lengths.get(words[at], ()):
                owners = self._owners.get(tuple(words[at : at + length]))
                if owners is not None:
                    found.append(Mention(at, at + length, tuple(owners)))
                    at += length
                    break
            else:
                at += 1
        return found
