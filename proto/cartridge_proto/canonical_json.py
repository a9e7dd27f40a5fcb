"""Canonical JSON: the one byte spelling of a manifest, so that its digest is its identity.

Owns encoding (RFC 8785) and a strict reader. Refuses duplicate keys, NaN, Infinity and numbers
beyond a double, lone surrogates, nesting beyond 64 levels, and anything above the caller's limit.
"""

import json
import math
from collections import Counter
from typing import Any, NoReturn

import rfc8785

MAX_DEPTH = 64


def encode_canonical(value: object) -> bytes:
    """Canonical bytes of a JSON value (dict, list, str, int, float, bool, None).

    Raises:
        ValueError: the value has no canonical form (an integer beyond 2**53, NaN, …).

    Source: RFC 8785 (JSON Canonicalization Scheme).
    """
    try:
        return rfc8785.dumps(value)  # type: ignore[arg-type]
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise ValueError(f"no canonical JSON form: {error}") from error


def decode_strict(data: bytes, *, max_bytes: int) -> Any:
    """Parse JSON that two careful parsers cannot read differently.

    Raises:
        ValueError: with the reason and, for sizes, the limit.
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes of JSON; the limit is {max_bytes}")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except RecursionError as error:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    _check_depth(value)
    _check_surrogates(data, value)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = [ascii(name)[:80] for name, count in counts.items() if count > 1]
        raise ValueError(f"duplicate keys: {', '.join(repeated[:8])}")
    return result


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is beyond a double")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [node for node in level if isinstance(node, dict | list)]
        if not level:
            return
        level = [
            child for node in level for child in (node.values() if isinstance(node, dict) else node)
        ]
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _check_surrogates(data: bytes, value: Any) -> None:
    if b"\\ud" not in data.lower():  # UTF-8 holds none: only an escape can spell one
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a lone surrogate is not text") from error
