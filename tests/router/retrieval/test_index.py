"""An index answers from its own documents alone, and changes only into another one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cartridge_router.retrieval.calibration import DEFAULTS
from cartridge_router.retrieval.documents import Document, prepare
from cartridge_router.retrieval.embedders import Vectors, normalised
from cartridge_router.retrieval.index import Index
from cartridge_router.retrieval.parts import RANK_PARTS, Found, Outcome
from cartridge_router.retrieval.passages import content_digest
from cartridge_router.retrieval.search import search
from cartridge_router.retrieval.vectors import FLAT_MAX_VECTORS, PassageVectors
from tests.router.retrieval.town import DIRECTOR, FILM, LIBRARY, POOL, REPORTS, TOWN, index_of
from tests.router.retrieval.word_embedder import WordEmbedder

QUESTIONS = (
    "How many books may members borrow?",
    "Is the sauna closed in July?",
    "Where was the director of The Glass Orchard born?",
    "What was Acorn's revenue of flour in Q4 2031?",
    "Who composed the anthem of Mars?",
)
EVERYTHING = replace(DEFAULTS, scope_threshold=0.0, skip_threshold=2.0)
"""Nothing is refused, every question is embedded."""


def answers(index: Index) -> list[Found]:
    """What an index says to every question, scores and all."""
    return [search(index, question) for question in QUESTIONS]


def test_a_question_finds_the_document_that_answers_it() -> None:
    """First comes the one whose text says so, with each part of its score by name."""
    found = search(index_of(), QUESTIONS[0])
    assert found.ids[0] == "library"
    assert set(found.documents[0].parts) == set(RANK_PARTS)
    assert found.outcome is Outcome.FOUND


def test_an_empty_index_says_that_it_is_empty() -> None:
    """No documents, no candidates, no error."""
    found = search(index_of([]), QUESTIONS[0])
    assert (found.ids, found.outcome) == ((), Outcome.EMPTY_INDEX)


def test_a_document_without_text_is_found_by_its_card() -> None:
    """Title, aliases and sentence are all that is known of it."""
    bare = replace(LIBRARY, text=None)
    found = search(index_of([bare, POOL], calibration=EVERYTHING), "hours and loans of the library")
    assert found.ids[0] == "library"


@pytest.mark.parametrize("question", ["", "   ", "?!", "\ud800", "的" * 20_000, "the of and"])
def test_any_text_is_a_question(question: str) -> None:
    """Odd questions are answered, if only with nothing."""
    assert search(index_of(), question).outcome in set(Outcome)


def test_another_tenants_documents_change_nothing() -> None:
    """A text planted in one visible set leaves another's answers equal, bit for bit."""
    embedder = WordEmbedder()
    own = [prepare(one, embedder) for one in (LIBRARY, POOL, FILM)]
    before = answers(Index(own, embedder))
    planted = Document("planted", "Town Library", (), "", "books borrow members sauna July " * 40)
    other = Index([*own, prepare(planted, embedder)], embedder)
    assert "planted" in {one.id for one in search(other, QUESTIONS[0]).ranked.candidates}
    assert answers(Index(own, embedder)) == before


@settings(max_examples=20, deadline=None)
@given(st.permutations(TOWN))
def test_the_order_of_documents_does_not_matter(documents: list[Document]) -> None:
    """The same set is the same index: version, scores and answers."""
    index, other = index_of(), index_of(documents)
    assert other.version == index.version
    assert answers(other) == answers(index)


def test_a_changed_index_is_the_one_that_would_be_built_anew() -> None:
    """Additions, replacements and removals leave no trace of how they came."""
    embedder = WordEmbedder()
    start = index_of((LIBRARY, POOL, FILM), embedder=embedder)
    changed_pool = replace(POOL, text="The pool is now a skating rink.")
    changed = start.with_changes(
        [prepare(DIRECTOR, embedder), prepare(changed_pool, embedder)], {"library", "unknown"}
    )
    anew = index_of((changed_pool, FILM, DIRECTOR))
    assert changed.version == anew.version
    assert answers(changed) == answers(anew)


def test_a_change_leaves_the_old_index_as_it_was() -> None:
    """Whoever still asks the old one gets its answers."""
    index = index_of()
    before, version = answers(index), index.version
    index.with_changes(removed={"library", "film"})
    assert (answers(index), index.version) == (before, version)


def test_what_is_removed_is_gone() -> None:
    """Neither candidates, links nor term counts remember it."""
    index = index_of(calibration=EVERYTHING).with_changes(removed={"director"})
    found = search(index, QUESTIONS[2])
    assert "director" not in {one.id for one in found.ranked.candidates}
    assert "hask" not in index.document_field.vocabulary
    film = index.ids.index("film")
    assert index.links.outgoing[film] == ()


def test_two_documents_of_one_id_are_refused() -> None:
    """An id names one document."""
    with pytest.raises(ValueError, match="two documents"):
        index_of((LIBRARY, replace(POOL, id="library")))


def test_the_version_names_everything_that_decides() -> None:
    """Another card, text, calibration or embedder is another version."""
    versions = {
        index_of().version,
        index_of((replace(LIBRARY, sentence="Other."), *TOWN[1:])).version,
        index_of((replace(LIBRARY, text="Other."), *TOWN[1:])).version,
        index_of(calibration=EVERYTHING).version,
        index_of(embedder=WordEmbedder("words-other")).version,
    }
    assert len(versions) == 5


def test_known_passages_are_not_embedded_again() -> None:
    """Vectors pass from one audience's index to the next by what the text says."""
    first = WordEmbedder()
    known = {content_digest(one): first.embed([one])[0] for one in (*POOL.passages, POOL.card)}
    second = WordEmbedder()
    again = prepare(POOL, second, known)
    assert second.texts == []
    assert np.array_equal(again.vectors, prepare(POOL, first).vectors)


def test_decisive_words_save_the_embedding() -> None:
    """Where lexical scores leave no doubt the embedder is not asked, and the answer says so."""
    embedder = WordEmbedder()
    index = index_of(embedder=embedder, calibration=replace(DEFAULTS, skip_threshold=0.01))
    asked = len(embedder.texts)
    found = search(index, "Members borrow six books for three weeks")
    assert found.ids[0] == "library"
    assert not found.ranked.is_embedded
    assert len(embedder.texts) == asked


def test_many_vectors_are_searched_by_clusters() -> None:
    """Above the border the nearest vector is still found, though not every one is looked at."""
    chance = np.random.default_rng(3)
    centres = normalised(chance.normal(size=(200, 16)).astype(np.float32))
    rows: Vectors = normalised(
        (np.repeat(centres, 101, axis=0) + chance.normal(0, 0.1, (20_200, 16))).astype(np.float32)
    )
    vectors = PassageVectors(rows)
    assert len(rows) > FLAT_MAX_VECTORS
    assert not vectors.is_flat
    asked = chance.integers(0, len(rows), 50)
    right = [int(vectors.nearest(rows[one], 5)[0][0]) == one for one in asked]
    assert sum(right) >= 45


def test_a_period_in_the_question_decides_within_a_series() -> None:
    """Reports that read alike are told apart by the quarter asked for."""
    index = index_of(calibration=EVERYTHING)
    for report in REPORTS:
        year, quarter = report.id.split("-")[1:]
        found = search(index, f"What was Acorn's revenue in Q{quarter} {year}?")
        assert found.ids[0] == report.id
    assert search(index, "Acorn's revenue in the latest report").ids[0] == "report-2032-1"


def test_the_right_period_of_another_series_counts_for_nothing() -> None:
    """A question that names a company is not answered by another company's report of that time."""
    rival = replace(REPORTS[0], id="rival", title="2031 Q3 Birch Foundry", aliases=("Birch",))
    index = index_of((*REPORTS, rival), calibration=EVERYTHING)
    found = search(index, "What was Acorn's revenue in Q3 2031?")
    parts = {one.id: one.parts["period"] for one in found.ranked.candidates}
    assert parts["report-2031-3"] == 1
    assert parts["report-2031-4"] == -1
    assert parts["rival"] == 0


def test_a_name_that_very_many_share_links_to_none_of_them() -> None:
    """Otherwise a thousand documents of one alias would be linked a million times."""
    crowd = [
        Document(f"crowd-{number:03}", f"Ledger {number}", ("Acorn",), "", "Acorn sold flour.")
        for number in range(60)
    ]
    index = index_of([*crowd, FILM, DIRECTOR])
    assert all(index.links.outgoing[index.numbers[one.id]] == () for one in crowd)
    assert len(index.links.outgoing[index.numbers["film"]]) == 1


def test_a_warmed_index_has_nothing_left_to_prepare() -> None:
    """Warming makes what the first search would wait for, and changes no answer."""
    index, cold = index_of(), index_of()
    index.warm()
    assert {"version", "latest", "term_sets"} <= set(vars(index))
    assert answers(index) == answers(cold)
