"""What counts as a word, and when two spellings are the same one.

Owns folding (letter case, accents, joined names) and the terms that lexical scores count. Refuses
language models of any kind: the same text always gives the same terms.
"""

import re
import threading
import unicodedata
from functools import lru_cache
from typing import Any

from cartridge_router.retrieval.embedders import import_extra

# Runs of letters and digits, where each ideograph stands alone: such scripts set no spaces.
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W_぀-ヿ㐀-鿿가-힯]+")
_JOINED = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")
_POSSESSIVE = re.compile(r"['’]s\b|(?<=s)['’](?!\w)", re.IGNORECASE)
# Within a word: "don't", "O'Brien"; also marks that some titles use for a letter.
_APOSTROPHE = re.compile(r"(?<=\w)['’ʻʼ`](?=\w)")

STOPWORDS = frozenset(
    """
    a an and are as at be been but by can could did do does for from had has have he her him
    his after before how i if in into is it its me my no not of on or our shall she should
    so such than that the their them then there these they this those to was we were what
    when where which who whom whose why will with would you your
    """.split()  # noqa: SIM905 - read as prose, not as a column
)

MAX_TERM_LETTERS = 40
"""Longer runs are noise (base64, rules of dashes) and would fill the vocabulary."""


def fold_words(text: str) -> list[str]:
    """The words of a text, spelled alike: no case, no accents, no possessive, camel case apart."""
    text = _APOSTROPHE.sub("", _POSSESSIVE.sub(" ", _JOINED.sub(" ", text)))
    text = unicodedata.normalize("NFKD", text.casefold())
    text = "".join(one for one in text if not unicodedata.combining(one))
    return _WORD.findall(unicodedata.normalize("NFC", text))


def terms_of(words: list[str]) -> list[str]:
    """What lexical scores count: stems, without words that every text has."""
    return [
        _stem(word) for word in words if word not in STOPWORDS and len(word) <= MAX_TERM_LETTERS
    ]


_stemmers = threading.local()


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    # A Stemmer may not be shared by threads.
    stemmer: Any = getattr(_stemmers, "english", None)
    if stemmer is None:
        stemmer = import_extra("Stemmer", "selection").Stemmer("english")
        stemmer.maxCacheSize = 0
        _stemmers.english = stemmer
    return str(stemmer.stemWord(word))
