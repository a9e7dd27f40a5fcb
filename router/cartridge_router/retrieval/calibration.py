"""What was learnt about one index: weights and thresholds, as plain numbers.

Owns the values, their defaults and their JSON. Refuses code: a stored calibration is data only.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cartridge_router.retrieval.errors import DamagedIndex
from cartridge_router.retrieval.parts import EXTEND_PARTS, RANK_PARTS, SCOPE_PARTS, SKIP_PARTS

Weights = dict[str, float]


@dataclass(frozen=True)
class KnownQuestion:
    """A labelled question of an operator: empty `gold` means that no document answers it."""

    question: str
    gold: tuple[str, ...]


@dataclass(frozen=True)
class Calibration:
    """Weights of the parts (logits) and the thresholds on them.

    `scope_threshold` and `extend_threshold` are probabilities; `known` are labelled questions,
    which score later ones by likeness.
    """

    prose: Weights
    lists: Weights
    scope: Weights
    extend: Weights
    skip: Weights
    scope_threshold: float
    extend_threshold: float
    skip_threshold: float
    known: tuple[KnownQuestion, ...] = field(default=())
    made_from: str = "defaults"

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """Read what `to_json` wrote.

        Raises:
            DamagedIndex: it is not that.
        """
        try:
            given: dict[str, Any] = json.loads(text)
            known = tuple(
                KnownQuestion(str(one["question"]), tuple(map(str, one["gold"])))
                for one in given.pop("known")
            )
            made_from = str(given.pop("made_from"))
            weights = {name: _weights(given.pop(name), parts) for name, parts in _PARTS_OF.items()}
            thresholds = {name: float(given.pop(name)) for name in _THRESHOLDS}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedIndex(f"calibration: {error!r}") from error
        if given:
            raise DamagedIndex(f"calibration: unknown {sorted(given)}")
        return cls(
            prose=weights["prose"],
            lists=weights["lists"],
            scope=weights["scope"],
            extend=weights["extend"],
            skip=weights["skip"],
            scope_threshold=thresholds["scope_threshold"],
            extend_threshold=thresholds["extend_threshold"],
            skip_threshold=thresholds["skip_threshold"],
            known=known,
            made_from=made_from,
        )


_PARTS_OF = {
    "prose": RANK_PARTS,
    "lists": RANK_PARTS,
    "scope": ("bias", *SCOPE_PARTS),
    "extend": ("bias", *EXTEND_PARTS),
    "skip": ("bias", *SKIP_PARTS),
}
_THRESHOLDS = ("scope_threshold", "extend_threshold", "skip_threshold")


def _weights(given: Mapping[str, Any], parts: tuple[str, ...]) -> Weights:
    if set(given) != set(parts):
        raise ValueError(f"weights of {sorted(given)}, not of {sorted(parts)}")
    return {name: float(given[name]) for name in parts}


def _complete(parts: tuple[str, ...], given: Weights) -> Weights:
    return {name: given.get(name, 0.0) for name in parts}


DEFAULTS = Calibration(
    prose=_complete(
        RANK_PARTS,
        {
            "dense_max": 4.0,
            "bm25_passage": 4.0,
            "bm25_document": 1.0,
            "title_mention": 1.5,
            "mention_share": 1.0,
            "period": 4.0,
            "known_question": 3.0,
        },
    ),
    lists=_complete(
        RANK_PARTS,
        {
            "dense_max": 2.4,
            "dense_mean": 6.7,
            "dense_card": 2.6,
            "bm25_document": 2.2,
            "period": 4.0,
            "known_question": 8.0,
        },
    ),
    scope=_complete(
        ("bias", *SCOPE_PARTS),
        {
            "bias": -4.18,
            "mean_similarity": 0.51,
            "max_similarity": 3.09,
            "card_similarity": 3.53,
            "nearest_5": 1.7,
            "nearest_20": 0.48,
            "background": 0.31,
            "document_coverage": 2.33,
            "passage_coverage": 5.11,
            "document_score": 1.53,
            "title_mention": 2.2,
            "question_mass": -2.52,
            "gap": 1.54,
            "is_list": -0.16,
        },
    ),
    extend=_complete(
        ("bias", *EXTEND_PARTS),
        {
            "bias": -2.54,
            "score_gap": 0.95,
            "similarity_gap": 2.0,
            "title_mention": 3.04,
            "link_strength": 6.04,
            "link_context": 3.43,
            "link_early": -0.33,
            "link_crowd": -0.36,
            "link_back": 0.49,
            "series": 10.37,
            "gain": 8.67,
            "num_passages": -4.21,
            "size": -0.85,
            "mentions_left": 0.12,
            "parallel": 3.55,
            "finished": -3.22,
        },
    ),
    skip=_complete(
        ("bias", *SKIP_PARTS),
        {
            "bias": -3.69,
            "passage_margin": 3.46,
            "document_margin": 1.16,
            "agree": 1.74,
            "coverage": 5.17,
            "mention_share": 5.95,
            "is_list": 0.29,
        },
    ),
    scope_threshold=0.35,
    extend_threshold=0.5,
    skip_threshold=0.9,
)
"""One set for all indexes; `tests/benchmarks/fit_selection.py` says where they are from."""
