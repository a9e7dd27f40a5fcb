"""What every embedder keeps, whatever runs the model.

Owns the behaviour suite of the interface `Embedder`. Refuses to know an implementation: a subclass
gives it a fixture `embedder`.
"""

import numpy as np

from cartridge_router.retrieval.embedders import Embedder

TEXTS = (
    "Where is the town library?",
    "a",
    "",
    "Ünïcödé 中文 🏋️ עברית",
    "lone surrogate \ud800 here",
    "word " * 5000,
)
TOLERANCE = 1e-5
"""Sums of 384 float32 products, in another order, differ by less."""


class EmbedderContract:
    """The suite."""

    def test_gives_one_unit_vector_for_each_text(self, embedder: Embedder) -> None:
        """Any text at all gets a finite float32 row of length 1."""
        vectors = embedder.embed(TEXTS)
        assert vectors.shape == (len(TEXTS), embedder.dim)
        assert vectors.dtype == np.float32
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=TOLERANCE)

    def test_gives_no_rows_for_no_texts(self, embedder: Embedder) -> None:
        """An empty list is an empty matrix of the right width."""
        assert embedder.embed([]).shape == (0, embedder.dim)

    def test_gives_the_same_bytes_again(self, embedder: Embedder) -> None:
        """A text's vector does not change from call to call."""
        assert np.array_equal(embedder.embed(TEXTS[:4]), embedder.embed(TEXTS[:4]))

    def test_a_vector_does_not_depend_on_its_neighbours(self, embedder: Embedder) -> None:
        """A text alone, and the same beside a much longer one, are one vector."""
        alone = embedder.embed(TEXTS[:1])[0]
        beside = embedder.embed([TEXTS[5], TEXTS[0]])[1]
        assert np.allclose(alone, beside, atol=TOLERANCE)

    def test_reads_no_more_than_its_window(self, embedder: Embedder) -> None:
        """What follows the first 256 tokens of a long text changes nothing."""
        long = "word " * 600
        one, other = embedder.embed([long, long + "but this is about a whale"])
        assert np.allclose(one, other, atol=TOLERANCE)

    def test_likens_what_means_the_same(self, embedder: Embedder) -> None:
        """A paraphrase is nearer than another subject."""
        asked, same, other = embedder.embed(
            ["How do I get my money back?", "refund policy", "the orbit of the moon"]
        )
        assert asked @ same > asked @ other + 0.2

    def test_its_identity_is_that_of_its_model(self, embedder: Embedder) -> None:
        """The identity is a plain name that can stand in a file."""
        assert embedder.identity
        assert embedder.identity.isascii()
        assert "/" not in embedder.identity
