"""`cartridge-router economics`: table, JSON, the folder of plots, and answers to wrong input."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from cartridge_loadtest.economics_command import economics
from cartridge_loadtest.economics_costs import Costs, costs_of
from cartridge_loadtest.economics_plots import PLOTS
from cartridge_loadtest.workloads import (
    BLOCK_TOKENS,
    TraceRow,
    cartridge,
    write_trace,
)

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: object) -> int:
    """The command, as the gateway's command line would call it."""
    parser = argparse.ArgumentParser()
    economics.configure(parser)
    return economics.run(parser.parse_args([str(argument) for argument in arguments]))


def trace_file(folder: Path) -> Path:
    """Document 1 comes in 30 requests, document 7 in 2, the last one has none; in a minute."""
    rows = [TraceRow(index * 1_000, 2_148, 20, [1, 2, 3, 4, 100 + index]) for index in range(30)]
    rows += [TraceRow(40_000 + index, 700, 20, [7, 200 + index]) for index in range(2)]
    rows += [TraceRow(60_000, 400, 20, [300])]
    file = folder / "day.jsonl"
    file.write_bytes(write_trace(rows))
    return file


def report_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What `--json` prints."""
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_json_tells_all_with_terms_that_add_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For each Cartridge, and in total over those that are kept; names are those of the trace."""
    report = report_of(capsys, "--trace", trace_file(tmp_path))
    first, second = report["cartridges"]
    assert (first["name"], first["num_requests"]) == ("day/1", 30)
    assert first["digest"] == cartridge("day/1", 1).digest
    assert first["source_tokens"] == 4 * BLOCK_TOKENS
    assert first["kept_in"] is not None
    assert (second["name"], second["num_requests"]) == ("day/7", 2)
    terms = ("build_usd", "store_usd", "residency_usd", "fill_usd", "load_usd")
    for row in report["cartridges"]:
        spent_usd = sum(row[term] for term in terms)
        assert row["net_usd_if_kept"] == pytest.approx(row["saved_usd"] - spent_usd)
        assert row["saved_usd_per_request"] * row["num_requests"] == pytest.approx(row["saved_usd"])
        (here,) = [each for each in row["tiers"] if each["tier"] == row["tier"]]
        assert here["net_usd"] == row["net_usd_if_kept"]
    totals, kept = report["totals"], [row for row in report["cartridges"] if row["kept_in"]]
    for term in (*terms, "saved_usd", "net_usd"):
        assert totals[term] == pytest.approx(sum(row[term] for row in kept))
    assert totals["net_usd"] == pytest.approx(
        totals["saved_usd"] - sum(totals[term] for term in terms)
    )
    assert sum(tier["net_usd"] for tier in report["tiers"]) == pytest.approx(totals["net_usd"])
    assert sum(tier["num_cartridges"] for tier in report["tiers"]) == totals["num_kept"]


def test_the_table_shows_the_best_and_says_how_many_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the tiers and the sum in words."""
    assert run("--trace", trace_file(tmp_path), "--top", 1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("33 requests in 60 s, weighed over 60 s; 8 replicas")
    assert lines[5].split()[0] == "day/1"
    assert lines[6] == "… and 1 more (--top, --json)"
    assert [line.split()[0] for line in lines[9:13]] == ["hbm", "dram", "nvme", "remote"]
    assert lines[14].startswith("Keep ")


def test_what_never_pays_is_sent_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where GPUs cost nothing, no use saves anything."""
    costs = tmp_path / "costs.yaml"
    costs.write_text("prices: {gpu_usd_per_hour: 0}\n")
    trace = trace_file(tmp_path)
    assert run("--trace", trace, "--costs", costs, "--out", tmp_path / "out") == 0
    table = capsys.readouterr().out
    assert "text (" in table
    assert "never" in table
    assert "Keep 0 of 2: net 0 USD" in table


def test_a_trace_that_shares_nothing_has_nothing_to_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its plots are empty, and no error."""
    file = tmp_path / "alone.jsonl"
    file.write_bytes(write_trace([TraceRow(0, 10, 1, [1]), TraceRow(9, 10, 1, [2])]))
    assert run("--trace", file, "--out", tmp_path / "out") == 0
    assert "nothing to keep" in capsys.readouterr().out


def test_a_folder_gets_plots_and_a_page_that_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the same JSON; a name is no markup."""
    trace = trace_file(tmp_path).rename(tmp_path / "<b>.jsonl")
    out = tmp_path / "made" / "here"
    report = report_of(capsys, "--trace", trace, "--out", out)
    assert json.loads((out / "report.json").read_text()) == report
    page = (out / "index.html").read_text()
    assert "&lt;b&gt;/1" in page
    assert "<b>" not in page
    for name in PLOTS:
        assert f'src="{name}.png"' in page
        assert (out / f"{name}.png").read_bytes().startswith(PNG)
    assert {file.name for file in out.iterdir()} == {
        "report.json", "index.html", *(f"{name}.png" for name in PLOTS)
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["zipf", "bursty", "tool-agent"])
def test_a_generated_workload_needs_no_file(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its Cartridges have names, and one seed gives one report."""
    asked = ("--generate", kind, "--requests", 60, "--seed", 3)
    report = report_of(capsys, *asked)
    assert report["num_requests_in_trace"] == 60
    assert all(row["name"].startswith(f"{kind}/") for row in report["cartridges"])
    assert report == report_of(capsys, *asked)


def test_a_plan_with_costs_says_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure of the file is in the report, and what it is about in the table."""
    costs = tmp_path / "costs.yaml"
    costs.write_text(
        "horizon_days: 30\nmodel: {values: e4m3}\n"
        "build: {kind: trained, gpu_hours_per_cartridge: 0.25, source_tokens_per_token: 20}\n"
    )
    trace = trace_file(tmp_path)
    report = report_of(capsys, "--trace", trace, "--costs", costs)
    assert report["costs"]["build"]["gpu_hours_per_cartridge"] == 0.25
    assert report["horizon_s"] == 30 * 86_400
    assert run("--trace", trace, "--costs", costs) == 0
    head = capsys.readouterr().out
    assert "weighed over 30.0 days" in head
    assert "96 KiB a token, trained in 0.25 GPU-hours each, 20 tokens of text" in head


def test_wrong_input_is_told_in_one_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file, a bad line, nothing in it, wrong costs, a folder that is a file."""
    trace = trace_file(tmp_path)
    bad, empty, costs = (tmp_path / name for name in ("bad.jsonl", "empty.jsonl", "costs.yaml"))
    bad.write_bytes(trace.read_bytes() + b'{"timestamp": "soon"}\n')
    empty.write_bytes(b"\n")
    costs.write_text("prices: {gpu_usd_per_hour: -1, gpu: 2}\n")
    for arguments, status, told in (
        (("--trace", tmp_path / "none"), 1, ["No such file"]),
        (("--trace", bad), 1, ["bad.jsonl, line 34: "]),
        (("--trace", empty), 1, ["the trace has no requests"]),
        (("--trace", trace, "--costs", costs), 2, ["'gpu' was unexpected", "minimum of 0"]),
        (("--trace", trace, "--costs", tmp_path / "no.yaml"), 2, ["no.yaml: No such file"]),
        (("--trace", trace, "--out", trace), 1, ["File exists"]),
    ):
        assert run(*arguments) == status
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == len(told)
        for line, words in zip(lines, told, strict=True):
            assert line.startswith("error: ")
            assert words in line


def test_arguments_have_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """A trace or a generated workload, and counts from 1."""
    for arguments in ((), ("--generate", "zipf", "--requests", 0), ("--generate", "guess")):
        with pytest.raises(SystemExit):
            run(*arguments)
    assert "1 to 1000000" in capsys.readouterr().err


def page() -> str:
    """What users read."""
    return (Path(__file__).parents[2] / "docs" / "economics.md").read_text()


def test_the_page_shows_the_defaults() -> None:
    """Its YAML is every field as it is without a file, but for the horizon."""
    (block,) = re.findall(r"```yaml\n(.*?)```", page(), re.S)
    costs = costs_of(yaml.safe_load(block))
    assert msgspec.structs.replace(costs, horizon_days=None) == Costs()
    for section in Costs.__struct_fields__:
        assert f"\n{section}:" in f"\n{block}"


def test_the_example_on_the_page_is_what_the_command_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the costs that stand above it."""
    (example,) = re.findall(r"```\n\$ cat costs.yaml\n(.*?)```", page(), re.S)
    text, _, rest = example.partition("$ cartridge-router economics ")
    command, _, printed = rest.partition("\n")
    (tmp_path / "costs.yaml").write_text(text)
    arguments = [str(tmp_path / word) if word == "costs.yaml" else word for word in command.split()]
    assert run(*arguments) == 0
    assert capsys.readouterr().out == printed
