"""Indexes of documents on a disk, one folder for each tenant and kind of prompt.

Owns what becomes of a Cartridge's card and text, and where vectors and calibrations outlive a
process. Refuses to choose what a tenant may read. Everything here blocks.
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from cartridge_proto.manifest import ConventionKind
from cartridge_proto.stores import StoreError
from cartridge_router.catalog import Cartridge, Catalog
from cartridge_router.retrieval.calibration import DEFAULTS, Calibration
from cartridge_router.retrieval.documents import Document, PreparedDocument, prepare
from cartridge_router.retrieval.embedders import (
    Embedder,
    OnnxEmbedder,
    RememberedEmbedder,
    SentenceTransformersEmbedder,
    Vectors,
)
from cartridge_router.retrieval.errors import DamagedIndex, ForeignIndex
from cartridge_router.retrieval.index import Index
from cartridge_router.retrieval.passages import content_digest
from cartridge_router.retrieval.rerankers import CrossEncoderReranker
from cartridge_router.retrieval.storage import (
    CALIBRATION,
    CURRENT,
    VERSIONS,
    load_index,
    save_index,
)

logger = logging.getLogger(__name__)

DEFAULT_EMBEDDER: Final = "minilm-int8"
_PLAIN: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")


class Shelves:
    """Makes indexes, and remembers what they are made of. For use from one thread at a time.

    Args:
        catalog: whose texts are read.
        embedder: `minilm-int8`, or the folder of a model for sentence-transformers.
        reranker: the folder of a cross-encoder; `None` = none.
        folder: where indexes lie; `None` = nowhere.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        embedder: str,
        folder: Path | None,
        reranker: Path | None = None,
    ) -> None:
        self._catalog = catalog
        self._folder = folder
        self._prepared: dict[str, PreparedDocument] = {}
        self.embedder: Embedder = (
            OnnxEmbedder()
            if embedder == DEFAULT_EMBEDDER
            else SentenceTransformersEmbedder(Path(embedder))
        )
        self.reranker = None if reranker is None else CrossEncoderReranker(reranker)

    def make(
        self, tenant: str, convention: ConventionKind, cartridges: Sequence[Cartridge]
    ) -> Index:
        """The index of these Cartridges for a tenant; kept, with a folder, and warm.

        What an index of the same tenant has on the disk (vectors, a calibration) is used.
        """
        learned = self.learned(tenant, convention)
        known, calibration = self._known(tenant, convention)
        prepared = [self._prepare(cartridge, known) for cartridge in cartridges]
        if self.learned(tenant, convention) != learned:
            # Somebody has calibrated it while texts were embedded.
            _, calibration = self._known(tenant, convention)
        index = Index(
            prepared,
            # Of this tenant alone: how fast an answer comes says what was asked before.
            RememberedEmbedder(self.embedder),
            calibration,
        )
        index.warm()
        if self._folder is not None:
            try:
                self.save(index, tenant, convention)
            except OSError as error:
                # It costs the next start its time.
                logger.warning("the index of %s is not kept: %s", tenant, error)
        return index

    def save(self, index: Index, tenant: str, convention: ConventionKind) -> None:
        """Keep an index.

        Raises:
            OSError: the folder cannot be written.
        """
        save_index(index, self._place(tenant, convention))

    def forget_all_but(self, digests: Iterable[str]) -> None:
        """Drop from memory what was prepared for Cartridges that no index holds any more."""
        for digest in self._prepared.keys() - set(digests):
            del self._prepared[digest]

    def learned(self, tenant: str, convention: ConventionKind) -> str:
        """What tells one calibration on the disk from another; empty without any."""
        if self._folder is None:
            return ""
        place = self._place(tenant, convention)
        try:
            version = (place / CURRENT).read_text("ascii").strip()
            data = (place / VERSIONS / version / CALIBRATION).read_bytes()
        except (OSError, UnicodeDecodeError):
            return ""
        return hashlib.sha256(data).hexdigest()

    def _known(
        self, tenant: str, convention: ConventionKind
    ) -> tuple[Mapping[str, Vectors], Calibration]:
        """Vectors by the digest of their text, and what was learned."""
        if not self.learned(tenant, convention):
            return {}, DEFAULTS
        try:
            index = load_index(self._place(tenant, convention), self.embedder)
        except (DamagedIndex, ForeignIndex, OSError) as error:
            logger.warning("the index of %s is made anew: %s", tenant, error)
            return {}, DEFAULTS
        vectors = {
            content_digest(text): vector
            for one in index.documents
            for text, vector in zip(
                (*one.document.passages, one.document.card),
                (*one.vectors, one.card_vector),
                strict=True,
            )
        }
        return vectors, index.calibration

    def _place(self, tenant: str, convention: ConventionKind) -> Path:
        """A tenant's name is whatever an operator gave it: only plain ones are file names."""
        if self._folder is None:
            raise ValueError("no folder for indexes")
        digest = hashlib.sha256(tenant.encode()).hexdigest()[:12]
        name = tenant if _PLAIN.fullmatch(tenant) else "tenant"
        return self._folder / f"{name}-{digest}-{convention.value}"

    def _prepare(self, cartridge: Cartridge, known: Mapping[str, Vectors]) -> PreparedDocument:
        prepared = self._prepared.get(cartridge.digest)
        if prepared is None:
            card = cartridge.manifest.card
            try:
                text, is_read = self._catalog.read_text(cartridge.manifest), True
            except StoreError as error:
                logger.warning("%s is found by its card only: %s", cartridge.manifest.alias, error)
                text, is_read = None, False
            document = Document(
                cartridge.digest, card.title, tuple(card.aliases), card.sentence, text
            )
            prepared = prepare(document, self.embedder, known)
            if is_read:
                self._prepared[cartridge.digest] = prepared
        return prepared
