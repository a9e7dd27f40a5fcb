"""The C kernel for CPUs, against one softmax in float64."""

import pytest

from cartridge_kernels.native import NativeBackend, build
from tests.contracts.attention_backend import AttentionBackendContract


class TestNative(AttentionBackendContract):
    """The contract."""

    @pytest.fixture
    def backend(self) -> NativeBackend:
        """The kernel under test."""
        build()
        return NativeBackend()
