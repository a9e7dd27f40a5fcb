"""Flags of an engine: what packed prefixes and attention in place are refused for at start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.packed_layout import PACKED_GPU_WORKER, PACKED_WORKER, CacheGeometry
from cartridge_engine_ext.plugin import _packed_cache, check_engine_flags
from tests.engine_ext.tiny_kinds import save_tiny_kind
from tests.engine_ext.tiny_model import save_tiny_model

VLLMS_OWN = "vllm.v1.worker.cpu_worker.CPUWorker"


def config_of(folder: Path, worker_cls: str, **settings: object) -> Any:
    """What vLLM's configuration says, as far as it is asked."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="fail",
            kv_role="kv_both",
            kv_connector_extra_config={
                "store": str(folder),
                "self_url": "http://127.0.0.1:8001",
                "model_dir": str(folder),
                **settings,
            },
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1, data_parallel_size=1, nnodes=1, worker_cls=worker_cls
        ),
        speculative_config=None,
        model_config=SimpleNamespace(model=str(folder)),
    )


def cache_config(dtype: torch.dtype = torch.bfloat16) -> Any:
    """One group of blocks of 16 slots."""
    spec = SimpleNamespace(block_size=16, dtype=dtype)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


@pytest.mark.parametrize("worker_cls", [VLLMS_OWN, PACKED_GPU_WORKER])
def test_in_place_needs_the_workers_that_can(worker_cls: str, tmp_path: Path) -> None:
    """The message has the flag to set; on a GPU there is none."""
    with pytest.raises(
        ConfigurationError, match=f"attend_in_place needs --worker-cls {PACKED_WORKER}"
    ):
        check_engine_flags(config_of(tmp_path, worker_cls, attend_in_place=True))


@pytest.mark.parametrize(
    ("worker_cls", "is_in_place"),
    [(VLLMS_OWN, False), (PACKED_WORKER, False), (PACKED_WORKER, True), (PACKED_GPU_WORKER, False)],
)
def test_other_pairs_start(worker_cls: str, is_in_place: bool, tmp_path: Path) -> None:
    """A worker that can read packed prefixes serves them with or without the setting."""
    check_engine_flags(config_of(tmp_path, worker_cls, attend_in_place=is_in_place))


def test_every_flag_is_in_one_message(tmp_path: Path) -> None:
    """The setting beside what vLLM was told otherwise."""
    config = config_of(tmp_path, VLLMS_OWN, attend_in_place=True)
    config.kv_transfer_config.kv_role = "kv_producer"
    config.speculative_config = object()
    with pytest.raises(ConfigurationError, match=r"kv_role .*; speculative .*; attend_in_place "):
        check_engine_flags(config)


@pytest.mark.parametrize("worker_cls", [PACKED_WORKER, PACKED_GPU_WORKER])
def test_a_packed_cache_is_what_vllm_laid_out(worker_cls: str, tmp_path: Path) -> None:
    """Blocks and dtype are vLLM's, the width is the model's; other workers have none."""
    model = save_tiny_model(tmp_path, head_dim=32)
    found = _packed_cache(config_of(model, worker_cls), cache_config())
    assert found == CacheGeometry(16, 32, "BF16")
    assert _packed_cache(config_of(model, VLLMS_OWN), cache_config()) is None


@pytest.mark.parametrize("kind", ["latents_v2", "windows_only", "windows_and_full"])
def test_models_that_cannot_have_packed_prefixes_are_refused(kind: str, tmp_path: Path) -> None:
    """The message has the kinds of layers, and the flag to leave out."""
    config = config_of(save_tiny_kind(tmp_path, kind), PACKED_WORKER)
    with pytest.raises(
        ConfigurationError, match=r"--worker-cls .*PackedCpuWorker: layers of kinds"
    ):
        _packed_cache(config, cache_config())
