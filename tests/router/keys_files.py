"""Keys files of the tests, and the keys themselves.

Owns how a file is written: at once, as an operator's tool does. Refuses to judge it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cartridge_router.tenants import key_hash

ACME_KEY, BETA_KEY = "cr-acme-secret-of-the-tests", "cr-beta-secret-of-the-tests"


def write_keys(
    path: Path,
    tenants: Mapping[str, Mapping[str, Any]] | None = None,
    keys: Mapping[str, str] | None = None,
) -> str:
    """Replace a keys file by rename: by default two tenants with a key each; returns its path."""
    tenants = {"acme": {}, "beta": {}} if tenants is None else tenants
    keys = {ACME_KEY: "acme", BETA_KEY: "beta"} if keys is None else keys
    entries = [{"sha256": key_hash(key), "tenant": tenant} for key, tenant in keys.items()]
    content = {"tenants": {name: dict(fields) for name, fields in tenants.items()}, "keys": entries}
    return replace_file(path, yaml.safe_dump(content))


def replace_file(path: Path, text: str) -> str:
    """Put a text in the place of a file, by rename; returns the path."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
    return str(path)
