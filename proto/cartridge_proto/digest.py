"""SHA-256 digests as they are written in this system: `sha256:` and 64 lower-case hex characters.

Owns the textual form and its check. Refuses any other algorithm or spelling, because a digest also
names a file.
"""

import hashlib
import re
from typing import Annotated, NewType

import msgspec

END = r"(?!\n)$"
"""End of a pattern. `$` alone lets a final newline pass in Python, and JSON Schema has no `\\Z`."""

DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}" + END
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

Digest = NewType("Digest", str)
"""`sha256:<64 hex>`; the identity of a blob or of a manifest (then also called artifact digest)."""

DigestText = Annotated[str, msgspec.Meta(pattern=DIGEST_PATTERN)]
"""A digest inside a wire struct: checked by pattern when decoded."""


def parse_digest(text: str) -> Digest:
    """Check the spelling of a digest.

    Raises:
        ValueError: `text` is not `sha256:` followed by 64 lower-case hex characters.
    """
    if _DIGEST.fullmatch(text) is None:
        raise ValueError(f"not a sha256 digest: {text[:80]!r}")
    return Digest(text)


def sha256_digest(data: bytes | bytearray | memoryview) -> Digest:
    """Digest of a buffer."""
    return Digest("sha256:" + hashlib.sha256(data).hexdigest())


def length_prefixed(domain: bytes, parts: list[bytes]) -> bytes:
    """Encode byte strings so that no two different lists give the same bytes.

    Each part, the domain first, is preceded by its length as 8 bytes big endian.
    """
    encoded = bytearray()
    for part in [domain, *parts]:
        encoded += len(part).to_bytes(8, "big")
        encoded += part
    return bytes(encoded)
