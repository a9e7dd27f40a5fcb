"""A cross-encoder that orders the first candidates anew, and nothing else."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cartridge_router.retrieval.lexical import Scores
from cartridge_router.retrieval.rerankers import CrossEncoderReranker
from cartridge_router.retrieval.search import NUM_RERANKED, search
from tests.router.retrieval.tiny_cross_encoder import save_tiny_cross_encoder
from tests.router.retrieval.town import TOWN, index_of

QUESTION = "What costs a coin, lockers of the swimming pool or late books?"


class Prefers:
    """Ranks passages with a word first; remembers what it was shown."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.shown: list[str] = []

    def scores(self, question: str, passages: Sequence[str]) -> Scores:
        """1 with the word, 0 without."""
        self.shown += passages
        return np.array([float(self.word in passage) for passage in passages], np.float32)


def test_the_first_candidates_are_ordered_anew() -> None:
    """The reranker's first is chosen; candidates, scores and parts stay together."""
    index = index_of()
    plain = search(index, QUESTION, max_size=1)
    assert plain.ids == ("pool",)
    second = plain.ranked.candidates[1]
    title = next(one.title for one in TOWN if one.id == second.id)
    reranker = Prefers(title)
    found = search(index, QUESTION, max_size=1, reranker=reranker)
    assert found.ids == (second.id,)
    assert found.documents[0].score == second.score
    by_id = {one.id: one for one in plain.ranked.candidates}
    assert {one.id: one for one in found.ranked.candidates} == by_id
    assert len(reranker.shown) == min(NUM_RERANKED, len(plain.ranked.candidates))


def test_it_is_shown_the_passage_that_is_most_like_the_question() -> None:
    """With the title of its document in front."""
    reranker = Prefers("sauna")
    question = "Is the sauna of the swimming pool closed for repairs, or the library?"
    search(index_of(), question, reranker=reranker)
    assert reranker.shown[0].startswith("Swimming Pool. ")
    assert "sauna is closed" in reranker.shown[0]


def test_equal_scores_leave_the_order_as_it_was() -> None:
    """So does a reranker that knows nothing."""
    index = index_of()
    found = search(index, QUESTION, reranker=Prefers("nowhere to be found"))
    assert found == search(index, QUESTION)


def test_what_no_document_answers_is_not_shown() -> None:
    """Whether any does is not the reranker's to say, and its time is saved."""
    reranker = Prefers("a")
    question = "Who won the chess match on the moon?"
    found = search(index_of(), question, reranker=reranker)
    assert (found.ids, reranker.shown) == ((), [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder of random weights."""
    return save_tiny_cross_encoder(tmp_path_factory.mktemp("cross-encoder"))


def test_a_real_model_gives_one_number_for_each_passage(folder: Path) -> None:
    """The same for a passage whatever is beside it; any text at all is taken."""
    reranker = CrossEncoderReranker(folder)
    passages = ["The sauna is closed.", "", "lone \ud800 surrogate", "word " * 5000]
    scores = reranker.scores(QUESTION, passages)
    assert scores.shape == (4,)
    assert scores.dtype == np.float32
    assert np.isfinite(scores).all()
    alone = [reranker.scores(QUESTION, [passage])[0] for passage in passages]
    assert np.allclose(alone, scores, atol=1e-6)
    assert len(set(scores.round(6).tolist())) > 1
    assert reranker.scores(QUESTION, []).shape == (0,)


def test_a_real_model_orders_a_search(folder: Path) -> None:
    """End to end: the first of those that were shown is the model's own favourite."""
    index, reranker = index_of(), CrossEncoderReranker(folder)
    plain = search(index, QUESTION)
    found = search(index, QUESTION, reranker=reranker)
    shown = Prefers("")
    search(index, QUESTION, reranker=shown)
    favourite = int(reranker.scores(QUESTION, shown.shown).argmax())
    assert found.ids[0] == plain.ranked.candidates[favourite].id


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Nothing is fetched instead."""
    with pytest.raises(FileNotFoundError, match="absent: no folder with a cross-encoder"):
        CrossEncoderReranker(tmp_path / "absent")
