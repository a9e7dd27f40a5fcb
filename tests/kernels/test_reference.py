"""The readable kernel, against one softmax in float64."""

import pytest

from cartridge_kernels.reference import ReferenceBackend
from tests.contracts.attention_backend import AttentionBackendContract


class TestReference(AttentionBackendContract):
    """The contract."""

    @pytest.fixture
    def backend(self) -> ReferenceBackend:
        """The kernel under test."""
        return ReferenceBackend()
