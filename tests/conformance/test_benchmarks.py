"""Benchmark programs of others, run against a listening gateway."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.conformance.conftest import CLIENTS, PROGRAMS, RunProgram
from tests.conformance.model_engine import MODEL
from tests.engine_ext.tiny_model import save_tiny_tokenizer
from tests.router.keys_files import ACME_KEY
from tests.router.stub_engine import StubEngine

NUM_REQUESTS = 8
OUTPUT_TOKENS = 6
PATHS = ["/v1/chat/completions", "/v1/completions"]


@pytest.mark.parametrize("path", PATHS)
async def test_guidellm(
    run_program: RunProgram, gateway: str, engine: StubEngine, tmp_path: Path, path: str
) -> None:
    """A concurrent run ends with every request successful and none in error."""
    entry = {"prompt": "When does it open?", "output_tokens_count": OUTPUT_TOKENS}
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text((json.dumps(entry) + "\n") * NUM_REQUESTS)
    backend = f"kind=openai_http,target={gateway},api_key={ACME_KEY},request_format={path}"
    await run_program(
        *(CLIENTS / "guidellm", "run", "--disable-console"),
        *("--backend", backend),
        *("--data", f"kind=json_file,path={prompts}"),
        *("--profile", "kind=concurrent,streams=[2]"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--output", f"kind=json,path={report}"),
        GUIDELLM__MAX_WORKER_PROCESSES="1",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert benchmark["scheduler_metrics"]["requests_made"] == {
        "successful": NUM_REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": NUM_REQUESTS,
    }
    output = benchmark["metrics"]["output_token_count"]["successful"]
    assert output["mean"] == OUTPUT_TOKENS
    assert [request.path for request in engine.requests] == [path] * NUM_REQUESTS


async def test_vllm_bench_serve(run_program: RunProgram, gateway: str, tmp_path: Path) -> None:
    """`vllm bench serve` completes every request, and counts the tokens that were asked for."""
    tokenizer, report = tmp_path / "tokenizer", tmp_path / "report.json"
    await asyncio.to_thread(save_tiny_tokenizer, tokenizer)
    await run_program(
        *(sys.executable, PROGRAMS / "vllm_bench.py"),
        *("--backend", "openai-chat", "--base-url", gateway, "--endpoint", PATHS[0]),
        *("--model", MODEL, "--tokenizer", tokenizer),
        *("--dataset-name", "random", "--num-prompts", str(NUM_REQUESTS)),
        *("--random-input-len", "16", "--random-output-len", str(OUTPUT_TOKENS)),
        *("--max-concurrency", "4", "--disable-tqdm", "--save-result"),
        *("--result-dir", report.parent, "--result-filename", report.name),
    )
    result = json.loads(report.read_text())
    assert (result["completed"], result["failed"]) == (NUM_REQUESTS, 0)
    assert result["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS
