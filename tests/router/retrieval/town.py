"""A small made-up corpus: a town's papers, a film and its director, a series of reports.

Owns the documents that the tests ask. Refuses real facts.
"""

from collections.abc import Sequence

from cartridge_router.retrieval.calibration import DEFAULTS, Calibration
from cartridge_router.retrieval.documents import Document, prepare
from cartridge_router.retrieval.index import Index
from tests.router.retrieval.word_embedder import WordEmbedder

LIBRARY = Document(
    "library",
    "Town Library",
    ("Brambleford Library",),
    "Opening hours and loans of the library.",
    "The library opens at nine. Members borrow six books for three weeks. Late books cost a coin "
    "for each week. The reading room is on the first floor beside the map collection.",
)
POOL = Document(
    "pool",
    "Swimming Pool",
    (),
    "Prices and lanes of the swimming pool.",
    "The swimming pool has eight lanes. Children swim free on Sundays. The sauna is closed in "
    "July for repairs. Lockers take a coin.",
)
FILM = Document(
    "film",
    "The Glass Orchard",
    (),
    "",
    "The Glass Orchard is a drama film directed by Odalys Verrin. It was shot in one winter.",
)
DIRECTOR = Document(
    "director",
    "Odalys Verrin",
    (),
    "",
    "Odalys Verrin was born in Port Hask. She studied law before she made any picture.",
)
REPORTS = tuple(
    Document(
        f"report-{year}-{quarter}",
        f"{year} Q{quarter} Acorn Mills",
        ("Acorn",),
        "",
        f"Quarterly report. Revenue of flour was {year + quarter} crowns. Costs of grain rose.",
    )
    for year, quarter in ((2031, 3), (2031, 4), (2032, 1))
)
TOWN = (LIBRARY, POOL, FILM, DIRECTOR, *REPORTS)


def index_of(
    documents: Sequence[Document] = TOWN,
    *,
    embedder: WordEmbedder | None = None,
    calibration: Calibration = DEFAULTS,
) -> Index:
    """An index of documents with the embedder for tests."""
    embedder = embedder or WordEmbedder()
    return Index([prepare(one, embedder) for one in documents], embedder, calibration)
