"""The table of work items: every key that a row sees once, nothing else, and each result a slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_kernels.plan import Plan, Representation, RequestShape, Segment
from cartridge_kernels.work_items import (
    MAX_CHUNK_TOKENS,
    MIN_CHUNK_TOKENS,
    WorkTable,
    build_work_table,
    choose_chunk_tokens,
    choose_rows_per_item,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Up to five requests over up to four segments, in any order."""
    lengths = draw(st.lists(st.integers(1, 70), max_size=4))
    segments = tuple(Segment(length, 0, Representation.FULL) for length in lengths)
    requests = draw(
        st.lists(
            st.builds(
                RequestShape,
                num_queries=st.integers(1, 12),
                num_live=st.integers(0, 60),
                segments=st.permutations(range(len(segments))).flatmap(
                    lambda order: st.integers(0, len(order)).map(lambda n: tuple(order[:n]))
                ),
            ),
            min_size=1,
            max_size=5,
        )
    )
    return Plan(segments, tuple(requests))


def wanted(plan: Plan) -> list[tuple[int, bool, int, int]]:
    """All (row, is live, request or segment, key) that the plan says are seen."""
    found = []
    for index, request in enumerate(plan.requests):
        for query in range(request.num_queries):
            row = plan.row_starts[index] + query
            num_seen = max(0, request.num_live - request.num_queries + query + 1)
            found += [(row, True, index, key) for key in range(num_seen)]
            for segment in request.segments:
                tokens = range(plan.segments[segment].num_tokens)
                found += [(row, False, segment, key) for key in tokens]
    return sorted(found)


def covered(table: WorkTable) -> list[tuple[int, bool, int, int]]:
    """The same by the items, repeated if they repeat it."""
    return sorted(
        (row, item.is_live, item.index, key)
        for item in table.items
        for i, row in enumerate(item.rows)
        for key in range(item.begin, min(item.end, item.limit + i * item.limit_step))
    )


@given(plans(), st.integers(1, 9), st.integers(1, 40))
def test_each_visible_key_once(plan: Plan, rows_per_item: int, chunk_tokens: int) -> None:
    """Every (row, visible key) is in exactly one item, and no key that a row does not see."""
    table = build_work_table(plan, rows_per_item=rows_per_item, chunk_tokens=chunk_tokens)
    assert covered(table) == wanted(plan)


@given(plans(), st.integers(1, 9), st.integers(1, 40))
def test_items_are_of_bounded_size_and_never_empty(
    plan: Plan, rows_per_item: int, chunk_tokens: int
) -> None:
    """Each row of an item sees its first key; items have at most the rows and keys asked for."""
    table = build_work_table(plan, rows_per_item=rows_per_item, chunk_tokens=chunk_tokens)
    for item in table.items:
        assert 1 <= len(item.rows) <= rows_per_item
        assert 1 <= item.end - item.begin <= chunk_tokens
        assert item.begin < item.limit
        assert item.begin % chunk_tokens == 0


@given(plans(), st.integers(1, 9), st.integers(1, 40))
def test_slots(plan: Plan, rows_per_item: int, chunk_tokens: int) -> None:
    """Items number their slots without gaps, and each row finds its own, all of them, once."""
    table = build_work_table(plan, rows_per_item=rows_per_item, chunk_tokens=chunk_tokens)
    by_items = [
        (item.first_slot + i, row) for item in table.items for i, row in enumerate(item.rows)
    ]
    assert by_items == list(enumerate(table.slot_rows))
    slots, starts = table.slots_by_row
    assert len(starts) == plan.num_rows + 1
    by_rows = [
        (slot, row) for row in range(plan.num_rows) for slot in slots[starts[row] : starts[row + 1]]
    ]
    assert sorted(by_rows) == by_items


@given(plans(), st.integers(1, 9), st.integers(1, 40))
def test_a_shared_span_stands_once_for_its_readers(
    plan: Plan, rows_per_item: int, chunk_tokens: int
) -> None:
    """A span of a segment is read once for each full set of rows, not once for each request."""
    table = build_work_table(plan, rows_per_item=rows_per_item, chunk_tokens=chunk_tokens)
    for index, readers in enumerate(plan.readers):
        num_rows = sum(plan.requests[request].num_queries for request in readers)
        num_spans = -(-plan.segments[index].num_tokens // chunk_tokens)
        items = [item for item in table.items if not item.is_live and item.index == index]
        assert len(items) == num_spans * -(-num_rows // rows_per_item)


@pytest.mark.parametrize(
    ("num_readers", "group", "rows"), [(1, 4, 4), (16, 4, 16), (64, 4, 16), (64, 3, 21), (1, 80, 1)]
)
def test_rows_of_an_item(num_readers: int, group: int, rows: int) -> None:
    """Rows times heads fill the smallest tile that all readers fit into, of at most 64."""
    plan = Plan((Segment(100, 0, Representation.FULL),), (RequestShape(1, 5, (0,)),) * num_readers)
    assert choose_rows_per_item(plan, group=group, max_tile_rows=64) == rows


@pytest.mark.parametrize(
    ("num_tokens", "chunk_tokens"),
    [(100, MIN_CHUNK_TOKENS), (8192, 512), (1_000_000, MAX_CHUNK_TOKENS)],
)
def test_spans_are_as_long_as_the_device_stays_full(num_tokens: int, chunk_tokens: int) -> None:
    """Short segments are cut finely so that there are enough programs, long ones are not."""
    plan = Plan((Segment(num_tokens, 0, Representation.FULL),), (RequestShape(1, 5, (0,)),))
    found = choose_chunk_tokens(plan, num_kv_heads=8, rows_per_item=16, num_programs=128)
    assert found == chunk_tokens
