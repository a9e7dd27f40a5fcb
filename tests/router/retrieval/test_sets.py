"""None, one or several: what is chosen from a ranking."""

from dataclasses import replace

import pytest

from cartridge_router.retrieval.calibration import DEFAULTS
from cartridge_router.retrieval.parts import Outcome
from cartridge_router.retrieval.search import search
from tests.router.retrieval.town import REPORTS, index_of

OPEN = replace(DEFAULTS, scope_threshold=0.0, skip_threshold=2.0)
BRIDGE = "Where was the director of The Glass Orchard born?"


def test_a_link_is_followed_to_the_second_document() -> None:
    """The film comes first, then the one it names as its director."""
    found = search(index_of(calibration=OPEN), BRIDGE)
    assert found.ids == ("film", "director")


def test_one_document_is_enough_where_it_says_all() -> None:
    """Nothing is added to a document that answers alone."""
    found = search(index_of(calibration=OPEN), "How many lanes has the swimming pool?")
    assert found.ids == ("pool",)


def test_a_question_over_a_whole_series_takes_all_of_it() -> None:
    """Without a period every report of the company belongs to the set."""
    found = search(index_of(calibration=OPEN), "How did Acorn's revenue of flour change?")
    assert set(found.ids) == {one.id for one in REPORTS}


@pytest.mark.parametrize("size", [0, 1, 2])
def test_a_set_is_never_larger_than_asked(size: int) -> None:
    """The caller's bound holds, whatever belongs together."""
    index = index_of(calibration=OPEN)
    assert len(search(index, "How did Acorn's revenue change?", max_size=size).ids) == size


def test_a_strange_question_gets_nothing() -> None:
    """Below the threshold the answer is empty and says that it is out of scope."""
    index = index_of(calibration=replace(OPEN, scope_threshold=0.9))
    found = search(index, "Who composed the anthem of Mars?")
    assert (found.ids, found.outcome) == ((), Outcome.OUT_OF_SCOPE)
    assert found.ranked.candidates
    assert found.ranked.scope < 0.9


def test_no_document_is_chosen_twice() -> None:
    """Even where several parts point at the same one."""
    ids = search(index_of(calibration=replace(OPEN, extend_threshold=0.001)), BRIDGE).ids
    assert len(ids) == len(set(ids)) > 1
