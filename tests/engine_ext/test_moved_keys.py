"""Moved keys are those of the rotation, whether they were moved before or not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cartridge_engine_ext.moved_keys import MovedKeys
from cartridge_engine_ext.rotary import RotaryEmbedding
from cartridge_kernels.rope import default_inverse_frequencies, relocate_keys

DIM, TOKENS, LAYERS = 8, 6, 2
FREQUENCIES = default_inverse_frequencies(100.0, DIM)
ARTIFACT_BYTES = LAYERS * 2 * TOKENS * DIM * 4


class CountingRotary(RotaryEmbedding):
    """Counts the rows that it moves."""

    num_rows = 0

    def move(self, keys: torch.Tensor, num_positions: int) -> torch.Tensor:
        """See `RotaryEmbedding`."""
        type(self).num_rows += keys.shape[1]
        return super().move(keys, num_positions)


@pytest.fixture(autouse=True)
def _no_rows_yet() -> None:
    CountingRotary.num_rows = 0


def keys_of(seed: int) -> torch.Tensor:
    """Keys of an artifact in one layer."""
    return torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(seed))


def moved_keys(max_bytes: int) -> MovedKeys:
    """The memory under test."""
    return MovedKeys([CountingRotary(FREQUENCIES)] * LAYERS, max_bytes)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(0, LAYERS - 1), st.integers(0, 3), st.integers(0, TOKENS)
        ),
        max_size=30,
    ),
    st.sampled_from([0, ARTIFACT_BYTES, 3 * ARTIFACT_BYTES]),
)
def test_every_answer_is_the_rotation(
    asked: list[tuple[int, int, int, int]], max_bytes: int
) -> None:
    """In whatever order artifacts, layers, offsets and rows are asked for, and whatever is kept."""
    moved = moved_keys(max_bytes)
    for artifact, layer, offset, end in asked:
        keys = keys_of(10 * artifact + layer)
        found = moved.rows(f"artifact-{artifact}", layer, offset, keys, 0, end)
        assert torch.equal(found, relocate_keys(keys, offset, FREQUENCIES)[:, :end])
        assert moved._size_bytes <= max_bytes


def test_what_was_moved_is_not_moved_again() -> None:
    """The second load of an artifact at an offset takes what the first one made."""
    moved = moved_keys(ARTIFACT_BYTES)
    for _ in range(3):
        for layer in range(LAYERS):
            moved.rows("one", layer, 5, keys_of(layer), 2, 4)
    assert CountingRotary.num_rows == LAYERS * TOKENS


def test_the_least_recently_used_goes_first() -> None:
    """With room for two artifacts the third takes the place of the one not used for longest."""
    moved = moved_keys(2 * ARTIFACT_BYTES)
    for name in ("one", "two", "one", "three", "one"):
        for layer in range(LAYERS):
            moved.rows(name, layer, 5, keys_of(layer), 0, TOKENS)
    assert CountingRotary.num_rows == 3 * LAYERS * TOKENS


def test_what_does_not_fit_is_moved_row_by_row() -> None:
    """No more rows are moved than are asked for, and nothing is kept."""
    moved = moved_keys(ARTIFACT_BYTES - 1)
    moved.rows("one", 0, 5, keys_of(0), 2, 4)
    assert (CountingRotary.num_rows, moved._size_bytes) == (2, 0)
