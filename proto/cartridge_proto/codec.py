"""Bytes of the records in Redis: a signed envelope around JSON.

Owns the envelope, its HMAC and its size caps. Refuses a record that is unsigned where a key is set,
signed with another key or for another kind, oversized, or off schema.
"""

import hmac
from typing import Final, TypeVar

import msgspec

from cartridge_proto.digest import length_prefixed
from cartridge_proto.loads import GatewayLoads
from cartridge_proto.names import DOMAIN_ENVELOPE
from cartridge_proto.residency import Receipt, Registration, ResidencyChange, ResidencyRecord

T = TypeVar("T", ResidencyRecord, ResidencyChange, Registration, Receipt, GatewayLoads)

MAX_BYTES: Final[dict[type, int]] = {
    ResidencyRecord: 4096,
    ResidencyChange: 8192,
    Registration: 65536,
    Receipt: 32768,
    GatewayLoads: 262_144,
}
"""Largest accepted envelope of each record, in bytes."""

_UNSIGNED = b"-"


class RejectedRecord(ValueError):
    """Bytes that are not a record this reader trusts; the text says which check failed."""


def seal(record: T, key: bytes | None) -> bytes:
    """Encode a record; signed with HMAC-SHA256 when there is a key."""
    payload = msgspec.json.encode(record)
    return _signature(type(record), payload, key) + b"." + payload


def unseal(data: bytes, kind: type[T], key: bytes | None) -> T:
    """Check and decode a record. Without a key signatures are not checked.

    Raises:
        RejectedRecord: too large, wrongly signed, or not of this kind.
    """
    if len(data) > MAX_BYTES[kind]:
        raise RejectedRecord(f"{kind.__name__}: {len(data)} bytes; the limit is {MAX_BYTES[kind]}")
    signature, separator, payload = data.partition(b".")
    if not separator:
        raise RejectedRecord(f"{kind.__name__}: no signature field")
    if key is not None and not hmac.compare_digest(signature, _signature(kind, payload, key)):
        raise RejectedRecord(f"{kind.__name__}: the signature does not match")
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RejectedRecord(f"{kind.__name__}: {error}") from error


def _signature(kind: type, payload: bytes, key: bytes | None) -> bytes:
    if key is None:
        return _UNSIGNED
    message = length_prefixed(DOMAIN_ENVELOPE, [kind.__name__.encode(), payload])
    return hmac.new(key, message, "sha256").hexdigest().encode()
