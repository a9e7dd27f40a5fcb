"""The torch kernel for CPUs, against one softmax in float64."""

import pytest

from cartridge_kernels.cpu import CpuBackend
from tests.contracts.attention_backend import AttentionBackendContract


class TestCpu(AttentionBackendContract):
    """The contract."""

    @pytest.fixture
    def backend(self) -> CpuBackend:
        """The kernel under test."""
        return CpuBackend()
