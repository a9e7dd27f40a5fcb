"""The session's one engine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cartridge_engine_ext.demo_model import default_model_dir, prepare_demo_model
from cartridge_engine_ext.packed_layout import PACKED_WORKER
from tests.integration.fleet import (
    BLOCK_SIZE,
    CHUNK_TOKENS,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    DenseReference,
    Fleet,
)
from tests.integration.running_fleet import running_fleet
from tests.integration.span_receiver import SpanReceiver, receiving_spans
from tests.integration.tiny_fleet import running_tiny_fleet


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The demo's model, converted once for this machine."""
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    return prepare_demo_model(default_model_dir())


@pytest.fixture(scope="session")
def dense_reference(model_dir: Path) -> DenseReference:
    """The model in transformers, for what vLLM cannot compute itself."""
    return DenseReference(model_dir)


@pytest.fixture(scope="session")
def fleet(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One engine with the extension behind a gateway; started once, about a minute."""
    arguments = ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
    # Ordinary prompts of some tests, and a live prompt of one, come in several chunks.
    arguments += ["--max-num-batched-tokens", str(CHUNK_TOKENS)]
    arguments += ["--worker-cls", PACKED_WORKER]
    work = tmp_path_factory.mktemp("fleet")
    with running_fleet(
        work, model_dir, max_model_len=MAX_MODEL_LEN, arguments=arguments
    ) as running:
        yield running


@pytest.fixture(scope="session")
def spans() -> Iterator[SpanReceiver]:
    """What the engine of `tiered` exports."""
    with receiving_spans() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def tiered(tmp_path_factory: pytest.TempPathFactory, spans: SpanReceiver) -> Iterator[Fleet]:
    """A tiny model's engine with small tiers, for tests that leave it running."""
    work = tmp_path_factory.mktemp("tiered")
    with running_tiny_fleet(work, otlp_endpoint=spans.endpoint) as running:
        yield running
