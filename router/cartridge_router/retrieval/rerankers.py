"""A second look at the first candidates, by a model that reads question and passage together.

Owns the `Reranker` protocol and its implementation. Refuses downloads, and to decide whether any
document answers: it changes the order of the first ones and nothing else.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cartridge_router.retrieval.embedders import MAX_CHARACTERS, import_extra
from cartridge_router.retrieval.lexical import Scores


class Reranker(Protocol):
    """Says how well passages answer a question; higher is better."""

    def scores(self, question: str, passages: Sequence[str]) -> Scores:
        """float32 [len(passages)], on any scale. Blocks for the time the model takes."""
        ...


class CrossEncoderReranker:
    """Any model folder that sentence-transformers reads as a cross-encoder; nothing is fetched.

    Safe to call from several threads. Some 10 ms for each passage on one core, by the model.
    """

    def __init__(self, model: Path) -> None:
        """Load a model folder.

        Raises:
            ExtraMissing: sentence-transformers is not installed.
            FileNotFoundError: there is no such folder.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        library = import_extra("sentence_transformers", "embeddings")
        if not model.is_dir():
            raise FileNotFoundError(f"{model}: no folder with a cross-encoder")
        self._model: Any = library.CrossEncoder(str(model), device="cpu", local_files_only=True)
        self._lock = threading.Lock()

    def scores(self, question: str, passages: Sequence[str]) -> Scores:
        """As `Reranker.scores` says; each pair goes through alone, whatever is beside it."""
        if not passages:
            return np.zeros(0, np.float32)
        pairs = [(_bounded(question), _bounded(passage)) for passage in passages]
        with self._lock:
            found = self._model.predict(pairs, batch_size=1, show_progress_bar=False)
        return np.asarray(found, np.float32).reshape(len(passages), -1)[:, -1]


def _bounded(text: str) -> str:
    # A lone surrogate has no UTF-8, which tokenizers ask for.
    return text[:MAX_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
