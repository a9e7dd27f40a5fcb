"""Calibration: what is learnt, from whom, and that it is plain data."""

import json

import numpy as np
import pytest

from cartridge_router.retrieval.calibration import DEFAULTS, Calibration, KnownQuestion
from cartridge_router.retrieval.errors import DamagedIndex
from cartridge_router.retrieval.learning import calibrate, fit_logistic
from cartridge_router.retrieval.search import search
from tests.router.retrieval.town import index_of

INSIDE = tuple(
    KnownQuestion(question, (id_,))
    for number in range(12)
    for question, id_ in (
        (f"how long may member {number} borrow books of the library", "library"),
        (f"how much is the swimming pool for child {number} on sundays", "pool"),
    )
)
OUTSIDE = tuple(
    KnownQuestion(f"which {planet} moon {number} has volcanoes of the sulphur kind", ())
    for number in range(12)
    for planet in ("jovian", "martian")
)


def test_labelled_questions_teach_what_to_refuse() -> None:
    """After calibration new questions of both kinds are told apart."""
    index = index_of()
    taught = index.with_calibration(calibrate(index, (*INSIDE, *OUTSIDE)))
    assert search(taught, "how long may i borrow books of the library").ids == ("library",)
    assert search(taught, "which saturnian moon has volcanoes").ids == ()


def test_calibration_is_deterministic() -> None:
    """The same index and questions give the same numbers."""
    index = index_of()
    assert calibrate(index, (*INSIDE, *OUTSIDE)) == calibrate(index, (*INSIDE, *OUTSIDE))
    assert calibrate(index) == calibrate(index)


def test_an_index_alone_sets_its_threshold() -> None:
    """Without questions only the threshold is learnt, from the documents' own words."""
    learnt = calibrate(index_of())
    assert learnt.made_from == "its own documents"
    assert learnt.scope == DEFAULTS.scope
    assert 0 < learnt.scope_threshold < 1


def test_questions_about_documents_out_of_sight_are_left_out() -> None:
    """Their text must not reach an index that may not see their documents."""
    secret = KnownQuestion("what is in the sealed vault", ("vault",))
    learnt = calibrate(index_of(), (*INSIDE, secret))
    assert secret not in learnt.known
    assert len(learnt.known) == len(INSIDE)


def test_a_calibration_comes_back_from_its_json() -> None:
    """With its questions, in any script."""
    learnt = calibrate(index_of(), (*INSIDE, *OUTSIDE, KnownQuestion("図書館はどこ", ("library",))))
    assert Calibration.from_json(learnt.to_json()) == learnt


@pytest.mark.parametrize(
    "change",
    [
        {"scope": {}},
        {"known": [{}]},
        {"skip_threshold": "high"},
        {"surprise": 1},
        {"prose": None},
    ],
)
def test_a_damaged_calibration_is_refused(change: dict[str, object]) -> None:
    """A field that is missing, odd or unknown is an error, not a default."""
    with pytest.raises(DamagedIndex, match="calibration"):
        Calibration.from_json(json.dumps(json.loads(DEFAULTS.to_json()) | change))


def test_a_fit_without_evidence_stays_at_its_prior() -> None:
    """Two contradicting rows teach nothing; many agreeing ones move the weight."""
    prior = np.array([0.0, 0.0])
    rows = np.array([[1.0, 1.0], [1.0, 1.0]], np.float32)
    assert np.allclose(fit_logistic(rows, np.array([True, False]), prior, strength=1.0), 0)
    moved = fit_logistic(
        np.array([[1.0, 1.0], [1.0, -1.0]] * 50, np.float32),
        np.array([True, False] * 50),
        prior,
        strength=1.0,
    )
    assert moved[1] > 1.5
