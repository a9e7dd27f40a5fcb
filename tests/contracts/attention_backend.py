"""What every kernel for attention over segments must do: the answers of one softmax in float64."""

import pytest
import torch

from cartridge_kernels.backends import AttentionBackend
from cartridge_kernels.plan import Attended, InvalidPlan
from cartridge_kernels.reference import attend_dense
from tests.kernels.attention_cases import (
    CASES,
    AttentionCase,
    Inputs,
    SegmentCase,
    make_inputs,
)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the exact tensor."""
    difference = (found.to(torch.float64) - exact).norm()
    return float(difference / exact.norm()) if exact.norm() else float(difference)


def assert_close(found: Attended, exact: Attended, *, output: float, lse: float) -> None:
    """Outputs relative to their norm; log-sum-exps absolute, and nothing seen where nothing is."""
    assert torch.isfinite(found.output).all()
    assert relative_error(found.output, exact.output) <= output
    nothing = exact.lse == -torch.inf
    assert torch.equal(found.lse == -torch.inf, nothing)
    assert not found.output[nothing].any()
    seen = ~nothing
    if seen.any():
        assert float((found.lse[seen].to(torch.float64) - exact.lse[seen]).abs().max()) <= lse


class AttentionBackendContract:
    """Subclass it with a `backend` fixture."""

    output_tolerance = 5e-6
    """Float32 sums in another order than float64's; raise it with the reason."""
    lse_tolerance = 2e-5
    cases = CASES

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_exact(self, backend: AttentionBackend, case: AttentionCase) -> None:
        """The output and its log-sum-exp are those of one softmax over all that a query sees."""
        inputs = make_inputs(case)
        self.assert_exact(backend, inputs)

    def assert_exact(self, backend: AttentionBackend, inputs: Inputs) -> None:
        """Compare with the float64 oracle."""
        found = backend.attend(
            inputs.plan, inputs.queries, inputs.segments, inputs.live, scale=inputs.scale
        )
        exact = attend_dense(
            inputs.plan, inputs.queries, inputs.segments, inputs.live, scale=inputs.scale
        )
        assert found.output.dtype == found.lse.dtype == torch.float32
        assert_close(found, exact, output=self.output_tolerance, lse=self.lse_tolerance)

    # numpy computes in Triton's interpreter.
    @pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("broken", ["query", "key", "value"])
    def test_what_is_no_number(
        self, backend: AttentionBackend, broken: str, dtype: torch.dtype
    ) -> None:
        """NaN comes out as NaN, for who reads it alone: never as an answer that looks like one."""
        inputs = make_inputs(
            AttentionCase(
                "broken",
                [(1, 5, (0, 1)), (2, 6, (1,))],
                [SegmentCase(40), SegmentCase(9)],
                query_dtype=dtype,
            )
        )
        part = inputs.segments[0]
        if broken == "query":
            inputs.queries[0] = torch.nan
        else:
            rows = part.keys if broken == "key" else part.values
            rows.storage[rows.page_ids[0], :, 2] = torch.nan
        found = backend.attend(
            inputs.plan, inputs.queries, inputs.segments, inputs.live, scale=inputs.scale
        )
        assert found.output[0].isnan().all()
        assert broken == "value" or found.lse[0].isnan().all()
        assert found.output[1:].isfinite().all()
        assert found.lse[1:].isfinite().all()

    def test_rows_that_do_not_fit(self, backend: AttentionBackend) -> None:
        """Queries of another number of rows than the plan's are refused."""
        inputs = make_inputs(CASES[0])
        with pytest.raises(InvalidPlan, match="queries"):
            backend.attend(
                inputs.plan,
                inputs.queries.repeat(2, 1, 1),
                inputs.segments,
                inputs.live,
                scale=inputs.scale,
            )
