"""How a document's text is cut into what is embedded and scored.

Owns the cut: runs of about 128 words, or one piece for each line of a list of short lines. Refuses
overlap: a fact is found by the passage that holds it, and every passage costs an embedding.
"""

import hashlib
import re

PASSAGE_WORDS = 128
"""About what a 256-token embedder reads of English; longer pieces would be cut by it."""

MIN_TAIL_WORDS = 24
"""A shorter rest joins the passage before it: a vector of a few words attracts any question."""

MIN_LIST_LINES = 4
MAX_LIST_LINE_WORDS = 32
MAX_LIST_MEAN_WORDS = 16
"""Lines this short and this many are entries on their own: sample questions, commands, rows."""

_TWO_SENTENCES = re.compile(r"[.!?…]\W*\s\W*\w")


def split_passages(text: str) -> tuple[str, ...]:
    """The passages of a text in order; empty for a text without words."""
    if is_list(text):
        return tuple(dict.fromkeys(_lines(text)))
    words = text.split()
    if not words:
        return ()
    starts = list(range(0, len(words), PASSAGE_WORDS))
    if len(starts) > 1 and len(words) - starts[-1] < MIN_TAIL_WORDS:
        starts.pop()
    ends = [*starts[1:], len(words)]
    return tuple(" ".join(words[start:end]) for start, end in zip(starts, ends, strict=True))


def content_digest(text: str) -> str:
    """Names a passage by what it says, so that equal passages are embedded once."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_list(text: str) -> bool:
    """Whether a text is a list of short lines, each an entry of one sentence on its own."""
    lines = _lines(text)
    lengths = [line.count(" ") + 1 for line in lines]
    return (
        len(lengths) >= MIN_LIST_LINES
        and max(lengths) <= MAX_LIST_LINE_WORDS
        and sum(lengths) <= MAX_LIST_MEAN_WORDS * len(lengths)
        # A conversation has short lines too, but says several things in one.
        and 5 * sum(bool(_TWO_SENTENCES.search(line)) for line in lines) <= len(lines)
    )


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]
