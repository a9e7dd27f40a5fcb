"""Workloads are what their sources say, and the same for one seed."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from cartridge_loadtest.fleet_simulator import at_utilisation, prefill_span_s
from cartridge_loadtest.replica_model import EngineProfile
from cartridge_loadtest.workloads import (
    BLOCK_TOKENS,
    TraceError,
    TraceRow,
    from_azure,
    from_mooncake,
    generated_bursts,
    generated_tool_agent,
    generated_zipf,
    names_of,
    read_trace,
    spread_ties,
    write_trace,
)

LINES = (
    b'{"timestamp": 0, "input_length": 2000, "output_length": 5, "hash_ids": [0, 1, 2, 3]}\n'
    b'{"timestamp": 0, "input_length": 1800, "output_length": 6, "hash_ids": [0, 1, 2, 9]}\n'
    b'{"timestamp": 3000, "input_length": 1500, "output_length": 7, "hash_ids": [0, 4, 5]}\n'
)


def rows(folder: Path) -> list[TraceRow]:
    """The three of `LINES`, read from a file."""
    (folder / "trace.jsonl").write_bytes(LINES)
    return read_trace(folder / "trace.jsonl")


def test_a_trace_is_written_as_it_was_read(tmp_path: Path) -> None:
    """Mooncake's own bytes come back."""
    assert write_trace(rows(tmp_path)) == LINES


def test_a_head_that_comes_twice_is_a_cartridge_of_the_shared_run(tmp_path: Path) -> None:
    """Block 0 is everybody's; 1 is a head whose requests share two blocks; 4 comes once."""
    workload = from_mooncake(rows(tmp_path), name="t", seed=0)
    first, second, third = workload.requests
    assert first.cartridges == second.cartridges
    assert first.num_virtual_tokens == 3 * BLOCK_TOKENS
    assert [first.num_live_tokens, second.num_live_tokens] == [2000 - 1536, 1800 - 1536]
    assert third.cartridges == ()
    assert third.num_live_tokens == 1500
    assert [each.num_output_tokens for each in workload.requests] == [5, 6, 7]


def test_equal_timestamps_are_spread_before_the_next_one() -> None:
    """Nothing leaves its place, and no two come at once."""
    spread = spread_ties(np.array([0.0, 0.0, 0.0, 3.0, 3.0]), seed=4)
    assert (np.diff(spread) > 0).all()
    assert (spread[:3] < 3).all()
    assert (spread[3:] >= 3).all()


def test_rows_of_a_trace_may_come_in_any_order(tmp_path: Path) -> None:
    """Requests are in the order of their arrival all the same."""
    given = rows(tmp_path)
    assert len({row.timestamp for row in given}) > 1
    requests = from_mooncake(given, name="t", seed=None).requests
    arrivals = [each.arrival_s for each in from_mooncake(given[::-1], name="t", seed=None).requests]
    assert arrivals == [each.arrival_s for each in requests]


def test_without_a_seed_requests_come_when_the_trace_says(tmp_path: Path) -> None:
    """Equal timestamps stay equal."""
    requests = from_mooncake(rows(tmp_path), name="t", seed=None).requests
    assert [request.arrival_s for request in requests] == [0, 0, 3]


def test_azure_gives_arrivals_and_lengths(tmp_path: Path) -> None:
    """Times are relative to the first, tokens as told; Cartridges come on top."""
    source = tmp_path / "azure.csv"
    source.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:05.4799600,3180,8\n"
    )
    first, second = from_azure(source, name="a", seed=0).requests
    assert (first.num_live_tokens, first.num_output_tokens) == (4808, 10)
    assert second.num_live_tokens == 3180
    assert second.arrival_s >= 1.5


@pytest.mark.parametrize("make", [generated_zipf, generated_bursts, generated_tool_agent])
def test_a_seed_says_everything(make: object) -> None:
    """One seed gives one workload, another one another."""
    assert callable(make)
    assert make(50, seed=1) == make(50, seed=1)
    assert make(50, seed=1) != make(50, seed=2)


def test_time_is_scaled_to_the_prefill_that_keeps_a_fleet_so_busy() -> None:
    """Twice the replicas take the same work in half of the time."""
    profile = EngineProfile()
    workload = generated_tool_agent(100, seed=0)
    work_s = sum(
        profile.prefill_s(r.num_live_tokens, r.num_virtual_tokens) for r in workload.requests
    )
    assert prefill_span_s(workload, 4, 0.5, profile) == pytest.approx(work_s / 2)
    scaled = at_utilisation(workload, 8, 0.5, profile)
    assert scaled.requests[0].arrival_s == 0
    assert scaled.requests[-1].arrival_s == pytest.approx(work_s / 4)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{", "truncated"),
        (b'{"timestamp": 0}', "input_length"),
        (b'{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}', "timestamp"),
        (b'{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "input_le"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}', "hash_ids"),
        (b"\xff", "line 5"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: bytes, what: str) -> None:
    """File, number of the line (empty ones count) and what is wrong with it."""
    file = tmp_path / "trace.jsonl"
    file.write_bytes(LINES + b"\n" + line + b"\n")
    with pytest.raises(TraceError, match=what) as caught:
        read_trace(file)
    assert f"{file}, line 5: " in str(caught.value)


def test_a_trace_that_is_not_there_or_not_whole_is_an_error(tmp_path: Path) -> None:
    """No file, no gzip, and half of one: each is told with the name of the file."""
    (tmp_path / "no.gz").write_bytes(LINES)
    (tmp_path / "half.gz").write_bytes(gzip.compress(LINES)[:-20])
    for name, what in (("none", "No such file"), ("no.gz", "gzip"), ("half.gz", "ended")):
        with pytest.raises(TraceError, match=what) as caught:
            read_trace(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}: ")


def test_cartridges_are_known_by_their_names(tmp_path: Path) -> None:
    """Heads of a trace, and documents of a generated library."""
    trace = from_mooncake(rows(tmp_path), name="t", seed=0)
    assert names_of("t", range(10))[trace.requests[0].cartridges[0].digest] == "t/1"
    names = names_of("zipf", range(400))
    used = {each.digest for r in generated_zipf(50, seed=0).requests for each in r.cartridges}
    assert used <= names.keys()
