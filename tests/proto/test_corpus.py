"""The corpus: what another implementation runs, this one passes."""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from cartridge_proto.codec import RejectedRecord, unseal
from cartridge_proto.composition import (
    InvalidComposition,
    cache_salt,
    composition_digest,
    decode_message,
    model_fingerprint,
)
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import InvalidManifest, Manifest, ModelIdentity, decode_manifest
from cartridge_proto.residency import Receipt, Registration, ResidencyChange, ResidencyRecord
from cartridge_proto.stores import CorruptStore, LocalStore

T = TypeVar("T", ResidencyRecord, ResidencyChange, Registration, Receipt)

CORPUS = Path(__file__).parents[1] / "corpus"
CASES = sorted(path for path in CORPUS.iterdir() if path.is_dir())
KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (ResidencyRecord, ResidencyChange, Registration, Receipt)
}
FILES = {
    "manifest": {"manifest.json"},
    "blob": {"manifest.json", "blob.safetensors"},
    "message": {"message.json"},
    "record": {"record.bin", "kind.txt"},
}
ERRORS = {
    "manifest": InvalidManifest,
    "blob": CorruptStore,
    "message": InvalidComposition,
    "record": RejectedRecord,
}


def subject(case: Path) -> str:
    """What a case is about: the first word of its name."""
    return case.name.split("_", 1)[0]


def run(case: Path, store: Path) -> dict[str, Any]:
    """Read the input of a case with this package; returns what `expected.json` holds."""
    about = subject(case)
    if about == "manifest":
        data = (case / "manifest.json").read_bytes()
        decode_manifest(data)
        return {"digest": sha256_digest(data)}
    if about == "blob":
        return _verify(case, LocalStore(store))
    if about == "message":
        return _decode_message(case)
    return _unseal(case, KINDS[(case / "kind.txt").read_text().strip()])


def _verify(case: Path, store: LocalStore) -> dict[str, Any]:
    data = (case / "manifest.json").read_bytes()
    manifest: Manifest = decode_manifest(data)
    digest = sha256_digest(data)
    [blob] = manifest.payload
    # The bytes are put under the name that the manifest claims, as a faulty store would hold them.
    for path, content in (
        (store.manifest_path(digest), data),
        (store.blob_path(Digest(blob.sha256)), (case / "blob.safetensors").read_bytes()),
    ):
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    store.verify(digest)
    return {"digest": digest, "blob": blob.sha256, "size_bytes": blob.size_bytes}


def _decode_message(case: Path) -> dict[str, Any]:
    message = decode_message(json.loads((case / "message.json").read_bytes()))
    model = msgspec.json.decode((case / "model.json").read_bytes(), type=ModelIdentity)
    fingerprint = model_fingerprint(model)
    composition = composition_digest(
        scope=message.scope,
        layout=message.layout,
        items=message.items,
        visibility=message.visibility,
        fingerprint=fingerprint,
    )
    assert message.composition == composition
    return {
        "fingerprint": fingerprint,
        "composition": composition,
        "cache_salt": cache_salt(composition),
        "num_tokens": message.num_tokens,
    }


def _unseal(case: Path, kind: type[T]) -> dict[str, Any]:
    key_file = case / "key.txt"
    key = key_file.read_bytes() if key_file.exists() else None
    record = unseal((case / "record.bin").read_bytes(), kind, key)
    return {"record": msgspec.to_builtins(record)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_corpus_holds(case: Path, tmp_path: Path) -> None:
    """An `_ok` case gives what it expects; a `_fail` case raises this package's own error."""
    if case.name.endswith("_ok"):
        assert run(case, tmp_path) == json.loads((case / "expected.json").read_bytes())
        return
    with pytest.raises(ERRORS[subject(case)]) as caught:
        run(case, tmp_path)
    assert (case / "error_contains.txt").read_text().strip() in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_is_complete(case: Path) -> None:
    """A case has its inputs, a reason of one sentence, and its expectation, and no other file."""
    names = {path.name for path in case.iterdir()}
    is_ok = case.name.endswith("_ok")
    expectation = "expected.json" if is_ok else "error_contains.txt"
    required = FILES[subject(case)] | {"reason.txt", expectation}
    assert is_ok or case.name.endswith("_fail")
    assert required <= names <= required | {"key.txt", "model.json"}
    reason = (case / "reason.txt").read_text()
    assert reason.endswith(".\n")
    assert reason.count("\n") == 1


def test_every_subject_has_cases_of_both_outcomes() -> None:
    """Manifests, blobs, messages and records each have something to accept and to refuse."""
    outcomes = {(subject(case), case.name.rsplit("_", 1)[1]) for case in CASES}
    assert outcomes == {(name, outcome) for name in FILES for outcome in ("ok", "fail")}


def test_compositions_of_the_corpus_are_all_different() -> None:
    """Order, layout, scope and visibility each made another identity."""
    expected = [
        json.loads((case / "expected.json").read_bytes())["composition"]
        for case in CASES
        if case.name.startswith("message_") and case.name.endswith("_ok")
    ]
    assert len(set(expected)) == len(expected)
