"""An index on disk: written whole under its version, opened by what it says it is.

Owns the folder `versions/<version>` and the file `current` that names one. Refuses what is not
byte for byte what was written, and vectors of another embedder. Holds no code: JSON and arrays.
"""

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np

from cartridge_router.retrieval.calibration import Calibration
from cartridge_router.retrieval.documents import Document, PreparedDocument
from cartridge_router.retrieval.embedders import Embedder, Vectors
from cartridge_router.retrieval.errors import DamagedIndex, ForeignIndex
from cartridge_router.retrieval.index import Index
from cartridge_router.retrieval.words import fold_words

FORMAT: Final = 1
CURRENT: Final = "current"
LOCK: Final = ".lock"
VERSIONS: Final = "versions"
MANIFEST: Final = "manifest.json"
DOCUMENTS: Final = "documents.jsonl"
PASSAGES: Final = "passages.npy"
CARDS: Final = "cards.npy"
CALIBRATION: Final = "calibration.json"
FILES: Final = (CALIBRATION, CARDS, DOCUMENTS, PASSAGES)
_HEX: Final = frozenset("0123456789abcdef")


def save_index(index: Index, folder: Path) -> Path:
    """Write an index and make it the current one; returns where it lies.

    A reader sees the old index or the new one, whole; of several writers one at a time is at it.
    Older versions are removed.
    """
    versions = folder / VERSIONS
    versions.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _save(index, folder, versions)


def _save(index: Index, folder: Path, versions: Path) -> Path:
    place = versions / index.version
    # What a writer left that was killed is removed with the older versions.
    temporary = versions / f".writing-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write(index, temporary)
        if place.exists():
            # The same version: its bytes are the same, or damaged.
            shutil.rmtree(place)
        temporary.rename(place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(versions)
    pointer = folder / f".{CURRENT}-{os.getpid()}"
    pointer.write_text(index.version, "ascii")
    pointer.replace(folder / CURRENT)
    _sync(folder)
    for other in versions.iterdir():
        if other != place:
            shutil.rmtree(other, ignore_errors=True)
    return place


def load_index(folder: Path, embedder: Embedder) -> Index:
    """Open the current index; vectors are mapped, not read, after they were checked.

    Raises:
        DamagedIndex: something is missing or is not what was written.
        ForeignIndex: it is of another format, or of another embedder.
    """
    try:
        version = (folder / CURRENT).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedIndex(f"{folder / CURRENT}: {error}") from error
    if len(version) != 64 or not _HEX.issuperset(version):
        raise DamagedIndex(f"{folder / CURRENT}: names no version")
    place = folder / VERSIONS / version
    _check_manifest(place, version, embedder)
    index = _read(place, embedder)
    if index.version != version:
        raise DamagedIndex(f"{place}: its contents are of version {index.version}")
    return index


def _write(index: Index, place: Path) -> None:
    with (place / DOCUMENTS).open("w", encoding="utf-8") as file:
        for one in index.documents:
            document = one.document
            row = {
                "id": document.id,
                "title": document.title,
                "aliases": list(document.aliases),
                "sentence": document.sentence,
                "text": document.text,
                "num_passages": len(one.vectors),
            }
            # ASCII, so that any string comes back as it was.
            file.write(json.dumps(row) + "\n")
    np.save(place / PASSAGES, index.vectors.rows, allow_pickle=False)
    np.save(place / CARDS, index.cards, allow_pickle=False)
    (place / CALIBRATION).write_text(index.calibration.to_json(), "utf-8")
    manifest = {
        "format": FORMAT,
        "version": index.version,
        "embedder": index.embedder.identity,
        "dim": index.embedder.dim,
        "files": {name: _digest(place / name) for name in FILES},
    }
    (place / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    for name in (*FILES, MANIFEST):
        with (place / name).open("rb") as file:
            os.fsync(file.fileno())


def _check_manifest(place: Path, version: str, embedder: Embedder) -> None:
    try:
        manifest: Any = json.loads((place / MANIFEST).read_text("utf-8"))
        known, files = manifest["format"], dict(manifest["files"])
        identity, dim, own_version = manifest["embedder"], manifest["dim"], manifest["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedIndex(f"{place / MANIFEST}: {error!r}") from error
    if known != FORMAT:
        raise ForeignIndex(f"{place}: format {known!r}; this program reads {FORMAT}")
    if own_version != version or set(files) != set(FILES):
        raise DamagedIndex(f"{place / MANIFEST}: describes another folder")
    if (identity, dim) != (embedder.identity, embedder.dim):
        raise ForeignIndex(f"{place}: vectors of {identity!r}, not of {embedder.identity!r}")
    for name in FILES:
        try:
            found = _digest(place / name)
        except OSError as error:
            raise DamagedIndex(f"{place / name}: {error}") from error
        if found != files[name]:
            raise DamagedIndex(f"{place / name}: its digest is not the one that was written")


def _read(place: Path, embedder: Embedder) -> Index:
    try:
        rows: Vectors = np.load(place / PASSAGES, mmap_mode="r", allow_pickle=False)
        cards: Vectors = np.load(place / CARDS, allow_pickle=False)
        with (place / DOCUMENTS).open(encoding="utf-8") as file:
            described = [json.loads(line) for line in file]
        if rows.shape != (sum(one["num_passages"] for one in described), embedder.dim):
            raise DamagedIndex(f"{place / PASSAGES}: {rows.shape} does not fit its documents")
        if cards.shape != (len(described), embedder.dim):
            raise DamagedIndex(f"{place / CARDS}: {cards.shape} does not fit its documents")
        documents, start = [], 0
        for one, card in zip(described, cards, strict=True):
            end = start + one["num_passages"]
            documents.append(_document(one, rows[start:end], card))
            start = end
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedIndex(f"{place}: {error!r}") from error
    calibration = Calibration.from_json((place / CALIBRATION).read_text("utf-8"))
    return Index(documents, embedder, calibration, rows=rows)


def _document(row: dict[str, Any], vectors: Vectors, card: Vectors) -> PreparedDocument:
    document = Document(
        row["id"], row["title"], tuple(row["aliases"]), row["sentence"], row["text"]
    )
    passages = document.passages
    if len(passages) != len(vectors):
        raise DamagedIndex(f"{document.id}: {len(vectors)} vectors of {len(passages)} passages")
    words = tuple(tuple(fold_words(passage)) for passage in passages)
    return PreparedDocument(document, vectors, card, words)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
