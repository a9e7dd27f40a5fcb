"""Which adapter a request has: by its files, read once and off the thread that asks."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from vllm.lora.request import LoRARequest

from cartridge_engine_ext import adapter_identity
from cartridge_engine_ext.adapter_identity import AdapterIdentities
from cartridge_engine_ext.errors import Refusal
from cartridge_engine_ext.identity import ADAPTER_FILES, adapter_digest
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.residency import FailureReason
from tests.engine_ext.fake_request import FakeLora
from tests.engine_ext.waiting import until


class CountingReader:
    """Reads as the engine does, counts, and notes on which thread."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.threads: set[int] = set()
        self.before_end: Callable[[], object] = lambda: None

    def digest(self, folder: Path) -> Digest:
        """See `identity.adapter_digest`."""
        self.folders.append(folder)
        self.threads.add(threading.get_ident())
        digest = adapter_digest(folder)
        self.before_end()
        return digest


@pytest.fixture
def reader() -> CountingReader:
    """What reads the folders."""
    return CountingReader()


@pytest.fixture
def identities(reader: CountingReader) -> Iterator[AdapterIdentities]:
    """The state under test."""
    identities = AdapterIdentities(reader.digest)
    yield identities
    identities.stop()


def put_adapter(folder: Path, weights: bytes = b"A") -> Path:
    """A folder with the two files of an adapter."""
    folder.mkdir(exist_ok=True)
    (folder / ADAPTER_FILES[0]).write_text(json.dumps({"r": 4, "peft_type": "LORA"}))
    (folder / ADAPTER_FILES[1]).write_bytes(weights)
    return folder


def read(identities: AdapterIdentities, lora: FakeLora) -> Digest:
    """Ask until the files are read."""
    adapter = identities.look(lora)
    found: list[Digest] = []

    def is_read() -> bool:
        digest = identities.digest(adapter)
        found.extend([] if digest is None else [digest])
        return bool(found)

    until(is_read)
    return found[0]


def test_files_are_read_once_and_elsewhere(
    identities: AdapterIdentities, reader: CountingReader, tmp_path: Path
) -> None:
    """However many requests and names: one read for a folder, never on the asking thread."""
    folder = put_adapter(tmp_path / "a")
    for name in ("a", "a", "alias"):
        assert read(identities, FakeLora(name, str(folder))) == adapter_digest(folder)
    assert reader.folders == [folder]
    assert threading.get_ident() not in reader.threads


def test_one_name_for_other_weights(identities: AdapterIdentities, tmp_path: Path) -> None:
    """Two adapters of one name are told apart by their weights."""
    one, other = (put_adapter(tmp_path / name, name.encode()) for name in ("one", "two"))
    digests = [read(identities, FakeLora("same", str(folder))) for folder in (one, other)]
    assert digests[0] != digests[1]


def test_files_that_change_are_refused(identities: AdapterIdentities, tmp_path: Path) -> None:
    """VLLM may hold the former weights; loaded anew, under another number, they are served."""
    folder = put_adapter(tmp_path / "a")
    lora = FakeLora("a", str(folder), 1)
    before = read(identities, lora)
    put_adapter(folder, b"B")
    with pytest.raises(
        Refusal, match=r"model\.adapter: a was first served with other files"
    ) as refused:
        read(identities, lora)
    assert refused.value.reason is FailureReason.INCOMPATIBLE
    assert read(identities, FakeLora("a", str(folder), 2)) == adapter_digest(folder) != before


def test_files_that_are_only_touched_are_served(
    identities: AdapterIdentities, reader: CountingReader, tmp_path: Path
) -> None:
    """The same bytes with other times are read once more, and are the same adapter."""
    folder = put_adapter(tmp_path / "a")
    lora = FakeLora("a", str(folder))
    before = read(identities, lora)
    os.utime(folder / ADAPTER_FILES[1], ns=(1, 1))
    assert read(identities, lora) == before
    assert len(reader.folders) == 2


def test_files_that_change_while_they_are_read(
    identities: AdapterIdentities, reader: CountingReader, tmp_path: Path
) -> None:
    """What was read may be half of either: refused, and read anew for the next request."""
    folder = put_adapter(tmp_path / "a")
    reader.before_end = lambda: put_adapter(folder, b"other")
    with pytest.raises(Refusal, match="changed while it was read"):
        read(identities, FakeLora("a", str(folder)))
    reader.before_end = lambda: (folder / ADAPTER_FILES[1]).unlink()
    with pytest.raises(Refusal, match="changed while it was read"):
        read(identities, FakeLora("a", str(folder)))
    reader.before_end = lambda: None
    put_adapter(folder)
    assert read(identities, FakeLora("a", str(folder))) == adapter_digest(folder)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("organisation/adapter", "organisation/adapter is no local folder"),
        ("~nobody-of-this-name/adapter", "~nobody-of-this-name/adapter is no local folder"),
        ("", ADAPTER_FILES[0]),
    ],
)
def test_what_is_no_local_folder_is_refused(
    path: str,
    text: str,
    identities: AdapterIdentities,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name on the hub, and a folder without an adapter: clear, and nothing is read."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match=r"model\.adapter: mine cannot be identified") as refused:
        identities.look(FakeLora("mine", path))
    assert refused.value.reason is FailureReason.UNSUPPORTED
    assert text in refused.value.detail


def test_an_adapter_without_safetensors_is_refused(
    identities: AdapterIdentities, tmp_path: Path
) -> None:
    """VLLM would read a pickle; its file is not what is missing here."""
    folder = put_adapter(tmp_path / "a")
    (folder / ADAPTER_FILES[1]).rename(folder / "adapter_model.bin")
    with pytest.raises(Refusal, match=ADAPTER_FILES[1]):
        identities.look(FakeLora("a", str(folder)))


def test_an_unreadable_file_is_named_and_tried_again(
    identities: AdapterIdentities, tmp_path: Path
) -> None:
    """A configuration that is none; once it is repaired the adapter is served."""
    folder = put_adapter(tmp_path / "a")
    (folder / ADAPTER_FILES[0]).write_text("{")
    with pytest.raises(Refusal, match=ADAPTER_FILES[0]) as refused:
        read(identities, FakeLora("a", str(folder)))
    assert refused.value.reason is FailureReason.UNSUPPORTED
    put_adapter(folder)
    assert read(identities, FakeLora("a", str(folder))) == adapter_digest(folder)


def test_whatever_a_reader_raises_is_a_refusal(tmp_path: Path) -> None:
    """The thread that asks is the scheduler's, and goes on; the next request reads again."""
    errors: list[Exception] = [RecursionError("deep")]

    def digest_of(folder: Path) -> Digest:
        if errors:
            raise errors.pop()
        return sha256_digest(b"read")

    identities = AdapterIdentities(digest_of)
    lora = FakeLora("a", str(put_adapter(tmp_path / "a")))
    with pytest.raises(Refusal, match="deep"):
        read(identities, lora)
    assert read(identities, lora) == sha256_digest(b"read")
    identities.stop()


def test_an_adapter_that_replaced_another_in_place_is_refused(
    identities: AdapterIdentities, tmp_path: Path
) -> None:
    """Requests that are under way would go on under other weights."""
    lora = FakeLora("a", str(put_adapter(tmp_path / "a")), load_inplace=True)
    with pytest.raises(Refusal, match="in place") as refused:
        identities.look(lora)
    assert refused.value.reason is FailureReason.UNSUPPORTED


def test_paths_are_found_as_vllm_finds_them(
    identities: AdapterIdentities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to where the engine runs, and to the home of its user."""
    folder = put_adapter(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("a", "~/a", str(folder)):
        assert identities.look(FakeLora("a", path)).folder == folder


def test_what_is_remembered_is_bounded(
    reader: CountingReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest digest goes first, and is computed anew when it is asked for."""
    monkeypatch.setattr(adapter_identity, "MAX_ADAPTERS", 2)
    identities = AdapterIdentities(reader.digest)
    loras = [FakeLora(name, str(put_adapter(tmp_path / name))) for name in "abc"]
    for lora in (*loras, loras[0]):
        read(identities, lora)
    assert [folder.name for folder in reader.folders] == ["a", "b", "c", "a"]
    assert len(identities._digests) == len(identities._first) == 2
    identities.stop()


def test_after_stop_nothing_is_read(identities: AdapterIdentities, tmp_path: Path) -> None:
    """An engine that ends is not ready for an adapter that it has not read."""
    identities.stop()
    with pytest.raises(Refusal, match="stopping") as refused:
        identities.look(FakeLora("a", str(put_adapter(tmp_path / "a"))))
    assert refused.value.reason is FailureReason.NOT_READY


def test_vllms_own_request_says_the_same(identities: AdapterIdentities, tmp_path: Path) -> None:
    """The stand-in's attributes are those of vLLM's `LoRARequest`, with the same defaults."""
    folder = put_adapter(tmp_path / "a")
    real = LoRARequest(lora_name="a", lora_int_id=1, lora_path=str(folder))
    assert identities.look(real) == identities.look(FakeLora("a", str(folder), 1))
