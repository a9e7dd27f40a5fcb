"""Which of many things to keep in which of few bounded places: a knapsack for each place.

Owns the choice, given sizes and gains. Refuses to know what they are of.

Source: R. Cohen, L. Katzir, D. Raz, An efficient approximation for the generalized assignment
problem, Information Processing Letters 100 (2006). Places are filled one after another by what each
thing gains over where it is by then; with a knapsack that reaches half of its optimum, all together
reach a third of theirs. Taking by gain per byte, or the best thing alone, reaches half.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """One thing may be kept in one place: the room it takes, what is gained over not doing so."""

    item: int
    place: str
    size: float
    gain: float


def plan(offers: Sequence[Offer], rooms: Mapping[str, float]) -> dict[int, Offer]:
    """At most one offer for each item, within each place's room.

    Gains at least a third of what the best such choice gains, and everything where there is room
    for all. Places are filled in the order of `rooms`.
    """
    chosen: dict[int, Offer] = {}
    at = {place: [each for each in offers if each.place == place] for place in rooms}
    for place, room in rooms.items():
        for offer in _knapsack(at[place], room, chosen):
            chosen[offer.item] = offer
    # What moved on left room behind; each move gains, so that this ends.
    while any(_fill(at[place], room, chosen) for place, room in rooms.items()):
        pass
    return chosen


def _more(offer: Offer, chosen: Mapping[int, Offer]) -> float:
    """What it gains over where the item is by now."""
    before = chosen.get(offer.item)
    return offer.gain - (before.gain if before else 0.0)


def _by_density(offers: Sequence[Offer], chosen: Mapping[int, Offer]) -> list[Offer]:
    gaining = [offer for offer in offers if _more(offer, chosen) > 0]
    return sorted(
        gaining,
        key=lambda offer: (
            -_more(offer, chosen) / offer.size if offer.size else float("-inf"),
            offer.item,
        ),
    )


def _knapsack(offers: Sequence[Offer], room: float, chosen: Mapping[int, Offer]) -> list[Offer]:
    dense = list[Offer]()
    used = 0.0
    fitting = [offer for offer in offers if offer.size <= room]
    for offer in _by_density(fitting, chosen):
        if used + offer.size <= room:
            dense.append(offer)
            used += offer.size
    alone = max(fitting, key=lambda offer: _more(offer, chosen), default=None)
    if alone and _more(alone, chosen) > sum(_more(offer, chosen) for offer in dense):
        return [alone]
    return dense


def _fill(offers: Sequence[Offer], room: float, chosen: dict[int, Offer]) -> bool:
    """Take in what gains and fits beside what is there; says whether anything was."""
    place = offers[0].place if offers else ""
    free = room - sum(offer.size for offer in chosen.values() if offer.place == place)
    has_moved = False
    for offer in _by_density(offers, chosen):
        if offer.size <= free and _more(offer, chosen) > 0:
            chosen[offer.item] = offer
            free -= offer.size
            has_moved = True
    return has_moved
