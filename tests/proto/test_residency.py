"""Residency records and their envelope: what is sealed comes back, and nothing else does."""

import hashlib
import hmac
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.codec import MAX_BYTES, RejectedRecord, seal, unseal
from cartridge_proto.digest import sha256_digest
from cartridge_proto.residency import (
    TIERS_FASTEST_FIRST,
    FailureReason,
    Receipt,
    ReceiptItem,
    ReceiptStatus,
    Registration,
    ResidencyChange,
    ResidencyRecord,
    ResidencyState,
    Tier,
)
from tests.proto.sample_artifact import engine_of, sample_artifact

T = TypeVar("T", ResidencyRecord, ResidencyChange, Registration, Receipt)

KEY = b"key of the engines"
DIGEST = sha256_digest(b"artifact")
EPOCH = "0123456789abcdef" * 2

counts = st.integers(0, 2**53)
digests = st.binary(max_size=4).map(sha256_digest)
replicas = st.text("abcXYZ019._:-", min_size=1, max_size=128)
epochs = st.text("0123456789abcdef", min_size=32, max_size=32)
residency_records = st.builds(
    ResidencyRecord,
    replica=replicas,
    epoch=epochs,
    digest=digests,
    tier=st.sampled_from(Tier),
    state=st.sampled_from(ResidencyState),
    size_bytes=counts,
    is_pinned=st.booleans(),
    seq=counts,
)
changes = st.builds(
    ResidencyChange,
    replica=replicas,
    epoch=epochs,
    digest=digests,
    seq=counts,
    record=st.none() | residency_records,
)
receipts = st.builds(
    Receipt,
    replica=replicas,
    epoch=epochs,
    request_id=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1),
    status=st.sampled_from(ReceiptStatus),
    reason=st.none() | st.sampled_from(FailureReason),
    detail=st.text(st.characters(codec="utf-8"), max_size=2048),
    items=st.lists(st.builds(ReceiptItem, digest=digests, tier=st.sampled_from(Tier)), max_size=64),
    num_virtual_tokens=counts,
    num_reused_tokens=counts,
    num_loads=counts,
    loaded_bytes=counts,
    load_s=st.floats(0, 1e6),
    scope=st.none() | st.text("abc019._:-", min_size=1, max_size=128),
)
registrations = st.builds(
    Registration,
    replica=replicas,
    epoch=epochs,
    seq=counts,
    engine=st.just(engine_of(sample_artifact()[0])),
    engine_version=st.text(st.characters(codec="ascii"), max_size=64),
    control_address=st.none() | st.text("abc.:0123", max_size=256),
    url=st.none() | st.from_regex(r"https?://[a-z0-9.-]{1,200}(:[0-9]{1,5})?", fullmatch=True),
)
records = residency_records | changes | receipts | registrations
SAMPLE = ResidencyRecord(
    replica="engine-0",
    epoch=EPOCH,
    digest=DIGEST,
    tier=Tier.DRAM,
    state=ResidencyState.READY,
    size_bytes=1024,
    is_pinned=False,
    seq=7,
)


def raw(fields: dict[str, Any]) -> bytes:
    """An unsigned envelope around any JSON object."""
    return b"-." + msgspec.json.encode(fields)


@given(records, st.none() | st.binary(min_size=1))
def test_a_sealed_record_comes_back_equal(record: T, key: bytes | None) -> None:
    """Sealing and unsealing with the same key, or without one, gives the record back."""
    assert unseal(seal(record, key), type(record), key) == record


@given(records)
def test_every_record_within_its_schema_fits_its_size_cap(record: T) -> None:
    """No record that the schema allows is too large for its reader."""
    assert len(seal(record, KEY)) <= MAX_BYTES[type(record)]


@given(records, st.data())
def test_one_changed_byte_is_rejected_under_a_key(record: T, data: st.DataObject) -> None:
    """Any byte of the envelope changed to any other makes the record untrusted."""
    sealed = bytearray(seal(record, KEY))
    position = data.draw(st.integers(0, len(sealed) - 1))
    sealed[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RejectedRecord):
        unseal(bytes(sealed), type(record), KEY)


@given(records, st.data())
def test_a_cut_or_longer_envelope_is_rejected_under_a_key(record: T, data: st.DataObject) -> None:
    """Missing or additional bytes make the record untrusted."""
    sealed = seal(record, KEY)
    cut = sealed[: data.draw(st.integers(0, len(sealed) - 1))]
    longer = sealed + data.draw(st.binary(min_size=1, max_size=4))
    for changed in (cut, longer):
        with pytest.raises(RejectedRecord):
            unseal(changed, type(record), KEY)


@given(records, st.binary(), st.binary())
def test_another_key_is_rejected(record: T, one: bytes, other: bytes) -> None:
    """A record is trusted only under the key that sealed it."""
    hashed = [key.rstrip(b"\0") for key in (one, other)]  # HMAC pads short keys with zeros
    if max(len(one), len(other)) > 64 or hashed[0] == hashed[1]:
        return
    with pytest.raises(RejectedRecord, match="signature does not match"):
        unseal(seal(record, one), type(record), other)


def test_an_unsigned_record_is_rejected_where_a_key_is_set() -> None:
    """Leaving the signature out does not pass for a reader with a key."""
    with pytest.raises(RejectedRecord, match="signature does not match"):
        unseal(seal(SAMPLE, None), ResidencyRecord, KEY)


def test_a_signed_record_is_read_where_no_key_is_set() -> None:
    """A reader without a key does not check signatures."""
    assert unseal(seal(SAMPLE, KEY), ResidencyRecord, None) == SAMPLE


def test_a_signature_holds_for_one_kind_of_record_only() -> None:
    """The bytes of a record, moved under another kind, do not verify."""
    with pytest.raises(RejectedRecord, match="ResidencyChange: the signature does not match"):
        unseal(seal(SAMPLE, KEY), ResidencyChange, KEY)


@pytest.mark.parametrize("kind", MAX_BYTES)
def test_an_oversized_record_is_refused_with_the_limit(kind: type[ResidencyRecord]) -> None:
    """The size is checked before anything else, and the text names kind, size and limit."""
    limit = MAX_BYTES[kind]
    message = f"{kind.__name__}: {limit + 1} bytes; the limit is {limit}"
    with pytest.raises(RejectedRecord, match=message):
        unseal(b"-" * (limit + 1), kind, None)


def test_an_envelope_without_separator_is_refused() -> None:
    """Bytes without a signature field are no envelope."""
    with pytest.raises(RejectedRecord, match="no signature field"):
        unseal(b"{}", ResidencyRecord, None)


@given(st.binary(max_size=200), st.sampled_from(sorted(MAX_BYTES, key=str)))
def test_any_bytes_are_a_record_or_rejected(data: bytes, kind: type[ResidencyRecord]) -> None:
    """No bytes raise anything but RejectedRecord, with or without a key."""
    with pytest.raises(RejectedRecord):
        unseal(b"-." + data, kind, None)
    with pytest.raises(RejectedRecord):
        unseal(data, kind, KEY)


@pytest.mark.parametrize("missing", [field.name for field in msgspec.structs.fields(SAMPLE)])
def test_every_field_is_required(missing: str) -> None:
    """A record without a field is refused by its name."""
    fields = msgspec.to_builtins(SAMPLE)
    del fields[missing]
    with pytest.raises(RejectedRecord, match=missing):
        unseal(raw(fields), ResidencyRecord, None)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"replica": ""}, r"\$.replica"),
        ({"replica": "a" * 129}, r"\{1,128\}.*\$.replica"),
        ({"replica": "a\n"}, r"\$.replica"),
        ({"replica": "a/b"}, r"\$.replica"),
        ({"epoch": "0" * 31}, r"\$.epoch"),
        ({"epoch": "0" * 32 + "\n"}, r"\$.epoch"),
        ({"digest": "sha256:0"}, r"\$.digest"),
        ({"tier": "tape"}, r"\$.tier"),
        ({"state": "half"}, r"\$.state"),
        ({"size_bytes": -1}, r">= 0.*\$.size_bytes"),
        ({"size_bytes": 1.5}, r"\$.size_bytes"),
        ({"is_pinned": 1}, r"\$.is_pinned"),
        ({"seq": -1}, r">= 0.*\$.seq"),
        ({"address": "http://elsewhere"}, "address"),
    ],
)
def test_a_record_off_schema_is_refused_by_field(broken: dict[str, Any], reason: str) -> None:
    """Even an unsigned reader checks every field; an address is never accepted."""
    fields = msgspec.to_builtins(SAMPLE) | broken
    with pytest.raises(RejectedRecord, match=reason):
        unseal(raw(fields), ResidencyRecord, None)


def test_tiers_are_listed_fastest_first() -> None:
    """The order of tiers is their speed."""
    assert TIERS_FASTEST_FIRST == (Tier.HBM, Tier.DRAM, Tier.NVME, Tier.REMOTE)


def test_the_signature_is_hmac_sha256_over_kind_and_payload() -> None:
    """The envelope is the one that docs/spec/virtual-prefix-v1.md writes down."""
    signature, payload = seal(SAMPLE, KEY).split(b".", 1)
    message = b"".join(
        len(part).to_bytes(8, "big") + part
        for part in (b"cartridge-envelope-v1", b"ResidencyRecord", payload)
    )
    assert signature.decode() == hmac.new(KEY, message, hashlib.sha256).hexdigest()
