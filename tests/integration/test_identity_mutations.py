"""Every single field of a manifest, changed alone: the load is refused, or misses what is cached.

The message to the engine is the one a gateway would make that believed the changed manifest; the
gateway itself is passed by, so that the engine's own checks are what is tested.
"""

import copy
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cartridge_proto import names
from cartridge_proto.canonical_json import encode_canonical
from cartridge_proto.composition import cache_salt
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import InvalidManifest, Manifest, decode_manifest
from cartridge_router.catalog import Cartridge
from cartridge_router.demo.stack import MODEL_NAME
from cartridge_router.selection import SelectedBy, Selection
from tests.integration.fleet import Fleet, document_tokens
from tests.integration.tiny_fleet import IDS, LIVE, NUM_TOKENS, put_as

pytestmark = pytest.mark.engine

DESCRIPTIVE = (
    # What people and selection read, and where an artifact came from: a change makes another
    # artifact with the same tensors, which is served as what it is, under an identity of its own.
    *("name", "version", "kind", "card", "provenance", "created_at", "derived_from", "access"),
    *("composition", "frozen", "model.name"),
    # A raw-text prefix: what stands in the live prompt is the client's.
    "prompt_convention.has_bos",
    # Another question whose expected answer was not changed: a random model answers both alike.
    "probe.prompt_token_ids",
)
Path = tuple[str | int, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all values that hold no others."""
    if isinstance(value, dict) and value:
        for key in value:
            yield from leaves(value[key], (*path, key))
    elif isinstance(value, list) and value:
        for index in range(len(value)):
            yield from leaves(value[index], (*path, index))
    else:
        yield path


def other(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * 1.5 + 0.25
        case str() if value.startswith("sha256:"):
            return value[:-1] + ("0" if value[-1] != "0" else "1")
        case str():
            return "joint" if value == "isolated" else value + "x"
        case None:
            return "x"
        case []:
            return ["x"]
        case _:
            return {"x": 1}


def changed(manifest: dict[str, Any], path: Path) -> dict[str, Any]:
    """A copy with one value changed."""
    result = copy.deepcopy(manifest)
    *inner, last = path
    holder: Any = result
    for step in inner:
        holder = holder[step]
    holder[last] = other(holder[last])
    return result


def believed(manifest: dict[str, Any], original: Manifest) -> Manifest:
    """What a gateway would go by; one that cannot read the change goes by the original."""
    try:
        return decode_manifest(encode_canonical(manifest))
    except InvalidManifest:
        return original


def ask(fleet: Fleet, digest: Digest, manifest: Manifest) -> dict[str, Any] | None:
    """One request straight to the engine; its receipt, or `None` when the engine refused."""
    selection = Selection(
        (Cartridge(digest, manifest),),
        manifest.composition.position_layout,
        SelectedBy.EXPLICIT,
        scope=manifest.access.owner,
    )
    message = selection.message(request_id="mutation", deadline_ms=30_000)
    assert message is not None
    body = {
        "model": MODEL_NAME,
        "prompt": LIVE,
        "max_tokens": 2,
        "temperature": 0,
        names.FIELD_KV_TRANSFER_PARAMS: {names.FIELD_CARTRIDGES: msgspec.to_builtins(message)},
        names.FIELD_CACHE_SALT: cache_salt(Digest(message.composition)),
    }
    response = fleet.client.post(f"{fleet.engine_url}/v1/completions", json=body)
    if response.status_code != 200:
        return None
    receipt: dict[str, Any] = response.json()[names.FIELD_KV_TRANSFER_PARAMS][names.FIELD_RECEIPT]
    return receipt


@pytest.mark.parametrize(
    ("codec", "values"), [("identity", "full"), ("shuffle-zstd", "e4m3")], ids=["plain", "encoded"]
)
def test_every_changed_field_is_refused_or_misses(tiered: Fleet, codec: str, values: str) -> None:
    """100 %: no change of a manifest lets a request read what is cached for the original."""
    document = document_tokens(NUM_TOKENS, seed=900, ids=IDS)
    built = put_as(tiered, f"mutations-{codec}", document, codec, values)
    original = msgspec.to_builtins(built.manifest)
    store = tiered.store
    for _ in range(2):
        receipt = ask(tiered, Digest(built.digest), built.manifest)
    assert receipt is not None
    assert receipt["items"][0]["tier"] == "hbm", "what must not be found is there"
    paths = list(leaves(original))
    outcomes: dict[str, str] = {}
    for path in paths:
        mutated = changed(original, path)
        data = encode_canonical(mutated)
        digest = sha256_digest(data)
        store.manifest_path(digest).write_bytes(data)
        receipt = ask(tiered, digest, believed(mutated, built.manifest))
        name = ".".join(map(str, path))
        if receipt is None:
            outcomes[name] = "refused"
        else:
            assert receipt["status"] == "served"
            assert receipt["items"][0]["digest"] == digest
            outcomes[name] = "missed" if receipt["items"][0]["tier"] == "remote" else "HIT"
    assert len(outcomes) == len(paths) > 80
    assert [name for name, outcome in outcomes.items() if outcome == "HIT"] == []
    served = {name for name, outcome in outcomes.items() if outcome == "missed"}
    # All else decides what attention reads, and is refused.
    assert {name for name in served if not name.startswith(DESCRIPTIVE)} == set()
    assert any(name.startswith("card") for name in served), "a change of the card only misses"


def test_a_borrowed_digest_is_refused(tiered: Fleet) -> None:
    """Bytes under the digest of others are no manifest, whatever they say."""
    one, two = (
        tiered.put(f"borrowed-{index}", document_tokens(20, seed=910 + index, ids=IDS), LIVE)
        for index in range(2)
    )
    path = tiered.store.manifest_path(Digest(one.digest))
    path.write_bytes(tiered.store.manifest_path(Digest(two.digest)).read_bytes())
    assert ask(tiered, Digest(one.digest), one.manifest) is None
