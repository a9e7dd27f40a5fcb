"""Which year and quarter a title or a question names.

Owns the spellings. Refuses to guess: what names no year names no period.
"""

import re
from dataclasses import dataclass

from cartridge_router.retrieval.words import fold_words

_QUARTERS = {
    "first": 1, "second": 2, "third": 3, "fourth": 4, "1st": 1, "2nd": 2, "3rd": 3, "4th": 4,
}  # fmt: skip
_QUARTER = re.compile(r"^q([1-4])$|^([1-4])q$")
_YEAR = re.compile(r"^(?:fy)?((?:19|20)\d\d)$")
_BOTH = re.compile(r"^q([1-4])((?:19|20)\d\d)$|^((?:19|20)\d\d)q([1-4])$")
_FILLERS = frozenset({"of", "fiscal", "fy", "year", "the", "for", "in", "report", "s"})

LATEST = frozenset({"latest", "newest", "current", "recent"})
"""Words that ask for the last of a series."""

EARLIER = frozenset({"previous", "past", "prior", "earlier", "preceding"})
"""Words that ask for what came before as well: the latest is then compared, not meant alone."""


@dataclass(frozen=True, order=True)
class Period:
    """A year, or a quarter of one; `quarter` 0 is the whole year."""

    year: int
    quarter: int = 0

    def covers(self, other: "Period") -> bool:
        """Whether the other lies within this one."""
        return self.year == other.year and self.quarter in (0, other.quarter)


def read_period(words: list[str]) -> tuple[Period | None, list[str]]:
    """The first period that folded words name, and the words that are left without it.

    A quarter counts only beside a year: "Q3 2022", "2022 Q3", "third quarter of fiscal 2022".
    """
    for at, word in enumerate(words):
        both = _BOTH.match(word)
        if both:
            year, quarter = both[2] or both[3], both[1] or both[4]
            return Period(int(year), int(quarter)), words[:at] + words[at + 1 :]
        year_match = _YEAR.match(word)
        if year_match:
            start, end, quarter_number = _around(words, at)
            return Period(int(year_match[1]), quarter_number), words[:start] + words[end:]
    return None, words


def question_period(text: str) -> tuple[Period | None, bool]:
    """The period that a question names, and whether it asks for the latest alone instead."""
    words = fold_words(text)
    period, _ = read_period(words)
    asks_latest = not LATEST.isdisjoint(words) and EARLIER.isdisjoint(words)
    return period, period is None and asks_latest


def _around(words: list[str], at: int) -> tuple[int, int, int]:
    """The quarter beside a year: where both begin and end, and its number (0: none)."""
    before = at
    while before > 0 and words[before - 1] in _FILLERS:
        before -= 1
    quarter = _quarter_ending(words, before)
    if quarter is not None:
        return quarter[0], at + 1, quarter[1]
    after = at + 1
    if after < len(words) and (found := _QUARTER.match(words[after])):
        return at, after + 1, int(found[1] or found[2])
    if after + 1 < len(words) and words[after + 1] == "quarter" and words[after] in _QUARTERS:
        return at, after + 2, _QUARTERS[words[after]]
    return at, at + 1, 0


def _quarter_ending(words: list[str], end: int) -> tuple[int, int] | None:
    if end >= 1 and (found := _QUARTER.match(words[end - 1])):
        return end - 1, int(found[1] or found[2])
    if end >= 2 and words[end - 1] == "quarter" and words[end - 2] in _QUARTERS:
        return end - 2, _QUARTERS[words[end - 2]]
    return None
