"""In place or loaded: sums that add up, a worked example, and the table of the documentation."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_policies.in_place import Comparison, Machine, SegmentInDram, Usage, compare

KIB = 1024
GPU = Machine(host_bytes_per_s=100e9, link_bytes_per_s=50e9, hbm_bytes_per_s=3350e9, hop_s=30e-6)
SLOW_LINK = replace(GPU, link_bytes_per_s=5e9)
HOST = Machine(host_bytes_per_s=40e9, link_bytes_per_s=4e9, hbm_bytes_per_s=40e9)
K16V8 = SegmentInDram(4096, 96 * KIB, 96 * KIB)
LLAMA = Usage(num_steps=200, num_requests_per_load=1, num_layers=32, moved_bytes=16 * KIB + 128)
ON_HOST = replace(LLAMA, moved_bytes=0)

rates = st.floats(1e6, 1e13)
machines = st.builds(Machine, rates, rates, rates, st.floats(1e-7, 1e-2))
segments = st.builds(SegmentInDram, st.integers(1, 1_000_000), st.floats(1, 1e7), st.floats(1, 1e7))
usages = st.builds(
    Usage,
    st.floats(1, 1e5),
    st.floats(1, 1e6),
    st.integers(1, 200),
    st.floats(0, 1e7),
    st.floats(0, 0.99),
)


def seconds(found: Comparison) -> dict[str, float]:
    """Terms by name."""
    return {term.name: term.seconds for term in (*found.in_place, *found.loaded)}


def test_the_terms_are_those_of_the_formula() -> None:
    """A worked example: 1,000 tokens of 100 kB, ten steps, four requests to a load."""
    machine = Machine(
        host_bytes_per_s=50e6, link_bytes_per_s=10e6, hbm_bytes_per_s=1000e6, hop_s=0.01
    )
    segment = SegmentInDram(1000, 100_000, 200_000)
    usage = Usage(
        num_steps=10, num_requests_per_load=4, num_layers=3, moved_bytes=50_000, hidden_share=0.5
    )
    found = compare(segment, machine, usage)
    # attend: half of 100 MB / 50 MB/s = 1 s a step; move: half of 3 * (0.01 + 0.005) s.
    assert seconds(found) == pytest.approx(
        {"attend": 10.0, "move": 0.225, "load": 2.5, "read": 2.0}
    )
    assert found.in_place_s == pytest.approx(10.225)
    assert found.loaded_s == pytest.approx(4.5)
    assert found.break_even_steps == pytest.approx(2.5 / (1.0 + 0.0225 - 0.2))


@given(segments, machines, usages)
def test_both_ways_cost_the_same_at_the_break_even(
    segment: SegmentInDram, machine: Machine, usage: Usage
) -> None:
    """Fewer steps are sooner in place, more are sooner loaded; where it is infinite, none are."""
    steps = compare(segment, machine, usage).break_even_steps
    if math.isinf(steps):
        found = compare(segment, machine, usage)
        assert found.in_place_s <= found.loaded_s * (1 + 1e-9)
        return
    at = compare(segment, machine, replace(usage, num_steps=steps))
    assert at.in_place_s == pytest.approx(at.loaded_s, rel=1e-6)
    few = compare(segment, machine, replace(usage, num_steps=steps / 2))
    assert few.in_place_s <= few.loaded_s * (1 + 1e-9)
    many = compare(segment, machine, replace(usage, num_steps=steps * 2))
    assert many.in_place_s >= many.loaded_s * (1 - 1e-9)


@given(segments, machines, usages, st.floats(1, 1000))
def test_what_helps_one_way_never_harms_it(
    segment: SegmentInDram, machine: Machine, usage: Usage, factor: float
) -> None:
    """Faster memory and hidden work are for in place; faster links, HBM and sharing for loads."""
    before = compare(segment, machine, usage)

    def after(**changes: Any) -> Comparison:
        return compare(segment, replace(machine, **changes), usage)

    faster_host = after(host_bytes_per_s=machine.host_bytes_per_s * factor)
    shorter_hop = after(hop_s=machine.hop_s / factor)
    hidden = compare(segment, machine, replace(usage, hidden_share=(1 + usage.hidden_share) / 2))
    for found in (faster_host, shorter_hop, hidden):
        assert found.in_place_s <= before.in_place_s
        assert found.loaded_s == before.loaded_s
        assert found.break_even_steps >= before.break_even_steps
    faster_hbm = after(hbm_bytes_per_s=machine.hbm_bytes_per_s * factor)
    shared = replace(usage, num_requests_per_load=usage.num_requests_per_load * factor)
    for found in (faster_hbm, compare(segment, machine, shared)):
        assert found.loaded_s <= before.loaded_s
        assert found.in_place_s == before.in_place_s
        assert found.break_even_steps <= before.break_even_steps
    assert after(link_bytes_per_s=machine.link_bytes_per_s * factor).loaded_s <= before.loaded_s


def test_on_one_memory_in_place_is_always_sooner() -> None:
    """Where the model runs on the host nothing moves, and a load is work beside equal reads."""
    found = compare(K16V8, HOST, ON_HOST)
    assert seconds(found)["move"] == 0
    assert seconds(found)["attend"] == seconds(found)["read"]
    assert math.isinf(found.break_even_steps)
    assert found.loaded_s - found.in_place_s == pytest.approx(seconds(found)["load"])


def row(name: str, machine: Machine, usage: Usage) -> str:
    """One row of the table in docs/attention.md."""
    found = compare(K16V8, machine, usage)
    terms = seconds(found)
    steps = found.break_even_steps
    numbers = [f"{1000 * terms['load']:.1f}"]
    numbers += [
        f"{1000 * terms[name] / usage.num_steps:.2f}" for name in ("read", "attend", "move")
    ]
    numbers.append("always" if math.isinf(steps) else f"{steps:.1f}")
    return f"| {name} | " + " | ".join(numbers) + " |"


def test_the_documented_table_is_what_the_formula_says() -> None:
    """Each row of docs/attention.md, "When in place pays"."""
    rows = [
        row("CPU engine: one memory", HOST, ON_HOST),
        row("GPU, one request to a load", GPU, LLAMA),
        row("GPU, ten requests to a load", GPU, replace(LLAMA, num_requests_per_load=10)),
        row("GPU, 90 % of the host's work hidden", GPU, replace(LLAMA, hidden_share=0.9)),
        row("GPU, link of 5 GB/s", SLOW_LINK, LLAMA),
        row("GPU, link of 5 GB/s, 90 % hidden", SLOW_LINK, replace(LLAMA, hidden_share=0.9)),
    ]
    page = Path(__file__).parents[2] / "docs" / "attention.md"
    missing = [line for line in rows if line not in page.read_text().splitlines()]
    assert missing == []
