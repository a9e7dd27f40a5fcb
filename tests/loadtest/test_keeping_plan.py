"""The plan of what to keep where: within its room, and how near to the best it comes."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from cartridge_loadtest.keeping_plan import Offer, plan

PLACES = ("nvme", "dram", "hbm")

items = st.lists(
    st.fixed_dictionaries(
        {place: st.none() | st.tuples(st.integers(0, 10), st.integers(1, 100)) for place in PLACES}
    ),
    max_size=5,
)
"""For each place nothing, or room taken and gain."""
rooms = st.fixed_dictionaries({place: st.integers(0, 25) for place in PLACES})

Items = list[dict[str, tuple[int, int] | None]]


def offers_of(drawn: Items) -> list[Offer]:
    """What `plan` is given."""
    return [
        Offer(index, place, float(offer[0]), float(offer[1]))
        for index, each in enumerate(drawn)
        for place, offer in each.items()
        if offer is not None
    ]


def best_gain(offers: list[Offer], room: dict[str, int]) -> float:
    """By trying everything."""
    by_item: dict[int, list[Offer | None]] = {}
    for offer in offers:
        by_item.setdefault(offer.item, [None]).append(offer)
    best = 0.0
    for choice in product(*by_item.values()):
        taken = [offer for offer in choice if offer is not None]
        if all(sum(o.size for o in taken if o.place == place) <= room[place] for place in room):
            best = max(best, sum(offer.gain for offer in taken))
    return best


@given(items, rooms)
def test_a_plan_keeps_within_its_rooms_and_gains_a_third_of_the_best(
    drawn: Items, room: dict[str, int]
) -> None:
    """Each item is in one place that was offered, no room is exceeded, and the bound holds."""
    offers = offers_of(drawn)
    chosen = plan(offers, room)
    assert set(chosen.values()) <= set(offers)
    assert all(offer.item == item for item, offer in chosen.items())
    for place in PLACES:
        assert sum(each.size for each in chosen.values() if each.place == place) <= room[place]
    gain = sum(offer.gain for offer in chosen.values())
    assert best_gain(offers, room) / 3 <= gain <= best_gain(offers, room)


@given(items)
def test_with_room_for_all_everything_is_where_it_gains_most(drawn: Items) -> None:
    """Then the plan is the best one."""
    offers = offers_of(drawn)
    room = dict.fromkeys(PLACES, 1_000)
    assert sum(offer.gain for offer in plan(offers, room).values()) == best_gain(offers, room)


@given(items, rooms)
def test_nothing_that_still_fits_would_gain(drawn: Items, room: dict[str, int]) -> None:
    """Room that was left by what moved on is used."""
    offers = offers_of(drawn)
    chosen = plan(offers, room)
    for offer in offers:
        now = chosen.get(offer.item)
        if offer.gain > (now.gain if now else 0):
            used = sum(each.size for each in chosen.values() if each.place == offer.place)
            assert used + offer.size > room[offer.place]


def test_one_large_thing_beats_a_dense_small_one() -> None:
    """By gain per byte alone the small one would keep the large one out."""
    chosen = plan([Offer(0, "dram", 1, 2), Offer(1, "dram", 10, 10)], {"dram": 10})
    assert list(chosen) == [1]
