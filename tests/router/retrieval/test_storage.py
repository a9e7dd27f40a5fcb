"""An index on disk is the one that was written, or is refused with the reason."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cartridge_router.retrieval.errors import DamagedIndex, ForeignIndex
from cartridge_router.retrieval.learning import calibrate
from cartridge_router.retrieval.search import search
from cartridge_router.retrieval.storage import load_index, save_index
from tests.router.retrieval.test_index import answers
from tests.router.retrieval.test_learning import INSIDE, OUTSIDE
from tests.router.retrieval.town import TOWN, index_of
from tests.router.retrieval.word_embedder import WordEmbedder


def test_a_stored_index_answers_as_the_fresh_one(tmp_path: Path) -> None:
    """Scores, sets and version are equal, bit for bit, and no document is embedded again."""
    index = index_of()
    index = index.with_calibration(calibrate(index, (*INSIDE, *OUTSIDE)))
    save_index(index, tmp_path)
    embedder = WordEmbedder()
    loaded = load_index(tmp_path, embedder)
    assert loaded.version == index.version
    assert set(embedder.texts) == {one.question for one in index.calibration.known}
    assert answers(loaded) == answers(index)


def test_vectors_are_mapped(tmp_path: Path) -> None:
    """Passage vectors stay in the file until they are read."""
    save_index(index_of(), tmp_path)
    assert isinstance(load_index(tmp_path, WordEmbedder()).vectors.rows, np.memmap)


def test_an_empty_index_can_be_stored(tmp_path: Path) -> None:
    """A tenant without documents has an index as well."""
    save_index(index_of([]), tmp_path)
    assert load_index(tmp_path, WordEmbedder()).ids == ()


def test_a_later_index_takes_the_place_of_the_earlier(tmp_path: Path) -> None:
    """The newest is current, and the older one's files are gone."""
    save_index(index_of(), tmp_path)
    later = index_of(TOWN[:3])
    place = save_index(later, tmp_path)
    assert load_index(tmp_path, WordEmbedder()).version == later.version
    assert list(place.parent.iterdir()) == [place]


def test_writers_do_not_remove_what_another_is_writing(tmp_path: Path) -> None:
    """Workers of one gateway, or a command beside it: one of their indexes is current, whole."""
    indexes = [index_of(TOWN[:count]) for count in range(1, len(TOWN) + 1)]
    with ThreadPoolExecutor(len(indexes)) as threads:
        for _ in range(5):
            places = list(threads.map(lambda index: save_index(index, tmp_path), indexes))
    current = load_index(tmp_path, WordEmbedder())
    assert current.version in {index.version for index in indexes}
    assert [one.name for one in (tmp_path / "versions").iterdir()] == [current.version]
    assert len(set(places)) == len(indexes)


def test_others_may_read_what_is_kept(tmp_path: Path) -> None:
    """As far as the umask says: the command and the gateway may be different users."""
    place = save_index(index_of(), tmp_path)
    ordinary = tmp_path / "ordinary"
    ordinary.mkdir()
    assert place.stat().st_mode == ordinary.stat().st_mode


def test_the_same_index_can_be_written_again(tmp_path: Path) -> None:
    """Writing mends a damaged copy of the same version."""
    place = save_index(index_of(), tmp_path)
    (place / "cards.npy").write_bytes(b"")
    save_index(index_of(), tmp_path)
    assert search(load_index(tmp_path, WordEmbedder()), "sauna repairs").ranked.candidates


def test_a_failed_write_leaves_the_current_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk half way harms nothing that was there."""
    index = index_of()
    save_index(index, tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="no space"):
        save_index(index_of(TOWN[:2]), tmp_path)
    assert load_index(tmp_path, WordEmbedder()).version == index.version
    assert [one.name for one in (tmp_path / "versions").iterdir()] == [index.version]


@pytest.mark.parametrize(
    "name", ["passages.npy", "cards.npy", "documents.jsonl", "calibration.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    """One changed bit, a missing tail or a missing file: the error says which file."""
    path = save_index(index_of(), tmp_path) / name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-7])
    else:
        path.unlink()
    with pytest.raises(DamagedIndex, match=name):
        load_index(tmp_path, WordEmbedder())


def test_vectors_of_another_embedder_are_refused(tmp_path: Path) -> None:
    """They would be compared with questions of another space."""
    save_index(index_of(), tmp_path)
    with pytest.raises(ForeignIndex, match="words-other"):
        load_index(tmp_path, WordEmbedder("words-other"))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": 2}, ForeignIndex),
        ({"version": "0" * 64}, DamagedIndex),
        ({"files": {}}, DamagedIndex),
        ({"files": None}, DamagedIndex),
    ],
)
def test_a_manifest_of_something_else_is_refused(
    tmp_path: Path, change: dict[str, object], error: type[Exception]
) -> None:
    """Another format is foreign; a description that does not fit is damage."""
    path = save_index(index_of(), tmp_path) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error):
        load_index(tmp_path, WordEmbedder())


@pytest.mark.parametrize("text", ["", "../../elsewhere", "A" * 64])
def test_a_pointer_to_no_version_is_refused(tmp_path: Path, text: str) -> None:
    """What `current` says is never used as a path unless it is a digest."""
    save_index(index_of(), tmp_path)
    (tmp_path / "current").write_text(text)
    with pytest.raises(DamagedIndex, match="current"):
        load_index(tmp_path, WordEmbedder())


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    """Nothing there is not an empty index."""
    with pytest.raises(DamagedIndex, match="current"):
        load_index(tmp_path, WordEmbedder())
