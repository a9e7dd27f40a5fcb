"""Who asks: API keys of a file, or bearer tokens, to the tenant on whose behalf a request runs.

Owns what is known of keys and tenants, and the task that reads the keys file again. Refuses to
limit anything, and to put a key into a message or a log.

Source: RFC 6750 (bearer tokens), RFC 8725 (what a verifier of tokens checks).
"""

import asyncio
import hashlib
import hmac
import json
import logging
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import jsonschema
import jwt
import msgspec
import yaml

from cartridge_proto.composition import ScopeText
from cartridge_proto.digest import END
from cartridge_proto.names import HEADER_API_KEY, HEADER_AUTHORIZATION, HEADER_X_API_KEY
from cartridge_router.errors import ConfigurationError, InvalidApiKey
from cartridge_router.settings import (
    MAX_PRIORITY,
    LimitSettings,
    ListedTenant,
    Settings,
    TenantSettings,
)
from cartridge_router.signing_keys import ALGORITHMS, SigningKeys
from cartridge_router.watching import FileWatch

logger = logging.getLogger(__name__)

KEY_PREFIX: Final = "cr-"
"""So that scanners of source code can tell a key that was committed by mistake."""
KEY_BYTES: Final = 32
LEEWAY_S: Final = 10
"""How far the clocks of gateway and issuer may be apart."""
INDEX_CHARS: Final = 32
"""Part of a hash that keys are found by; the rest is compared in constant time."""

_BEARER: Final = re.compile(r"bearer +([!-~]+) *", re.IGNORECASE)
_KEY: Final = re.compile(r"[!-~]+")
TENANT_NAME: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Sha256Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}" + END)]


@dataclass(frozen=True)
class Tenant:
    """On whose behalf a request runs; `name` is the scope of its KV."""

    name: str
    is_trusted: bool
    limits: LimitSettings
    max_priority: int = 0
    has_selection: bool = True


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of the file, by the hash of its text."""

    sha256: Sha256Hex
    tenant: ScopeText
    label: str | None = None
    """For people: where the key is used."""


class KeysFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys file."""

    tenants: dict[ScopeText, ListedTenant] = {}
    keys: list[ApiKey] = []


@dataclass(frozen=True)
class _Known:
    """What one reading of settings and file gave; replaced whole."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    keys: Mapping[str, tuple[str, Tenant]] = field(default_factory=dict)
    """Beginning of a hash -> the whole hash, and whose it is."""


class Tenants:
    """Names the tenant of each request. For use from one event loop."""

    def __init__(self, settings: Settings, signing_keys: SigningKeys | None) -> None:
        self._signing_keys = signing_keys
        file = settings.tenants.keys_file
        self._file = None if file is None else Path(file)
        self._content = KeysFile()
        self._watch: FileWatch | None = None
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Know tenants by other settings, and by the keys file as it was last read.

        Raises:
            ConfigurationError: the two do not go together; then nothing has changed.
        """
        if problems := _problems(self._content, settings.tenants):
            raise ConfigurationError([f"{self._file}: {problem}" for problem in problems])
        self._settings = settings.tenants
        self._known = _known(self._settings, self._content)
        self._everybody = Tenant(
            settings.tenant, settings.trust_client_fields, LimitSettings(), MAX_PRIORITY
        )

    def authorise(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant of a request. Costs a hash, or for a token a signature's check.

        Raises:
            InvalidApiKey: no key, an unknown one, or a token that is not good for any tenant.
            AuthenticationUnavailable: a token whose issuer's keys are not known now.
        """
        if not self._settings.is_on:
            return self._everybody
        key = _sent_key(headers)
        digest = key_hash(key)
        expected, tenant = self._known.keys.get(digest[:INDEX_CHARS], ("", None))
        if tenant is not None and hmac.compare_digest(expected, digest):
            return tenant
        if self._signing_keys is not None and key.count(".") == 2:
            return self._tenant_of_token(key, self._signing_keys)
        raise InvalidApiKey("the API key is not valid")

    def _tenant_of_token(self, token: str, signing_keys: SigningKeys) -> Tenant:
        claim = self._settings.tenant_claim
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            key = signing_keys.find(kid) if isinstance(kid, str) else None
            if key is None:
                raise InvalidApiKey("the token is signed with a key that its issuer does not have")
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self._settings.audience,
                issuer=self._settings.issuer,
                leeway=LEEWAY_S,
                options={
                    "require": ["exp", "iss", "aud", claim],
                    "enforce_minimum_key_length": True,
                },
            )
        except jwt.PyJWTError as error:
            raise InvalidApiKey(f"the token is not valid: {type(error).__name__}") from error
        name = claims[claim]
        if not isinstance(name, str) or TENANT_NAME.fullmatch(name) is None:
            raise InvalidApiKey(f"the token's claim {claim} is no name that a tenant can have")
        tenant = self._known.tenants.get(name)
        if tenant is not None:
            return tenant
        if not self._settings.allow_unlisted:
            raise InvalidApiKey(f"the token's tenant {name} is not listed")
        return Tenant(name, is_trusted=False, limits=self._settings.default_limits)

    # --- the file --------------------------------------------------------------------------------
    async def read_first(self) -> None:
        """Read the keys file and ask for the keys of tokens, where there are any.

        Raises:
            ConfigurationError: with every problem of it.
        """
        if self._file is not None:
            self._watch = await asyncio.to_thread(FileWatch, [self._file])
            await self._read(self._file)
        if self._signing_keys is not None:
            await self._signing_keys.fetch()

    async def run(self) -> None:
        """Read the file again whenever it changes, until cancelled; a bad one is left alone."""
        while self._file is not None and self._watch is not None:
            await asyncio.sleep(self._settings.refresh_s)
            # Noted before it is read: what is written while it is read shows at the next look.
            if not await asyncio.to_thread(self._watch.has_changed):
                continue
            try:
                await self._read(self._file)
            except ConfigurationError as error:
                for problem in error.problems:
                    logger.error("the keys stay as they are: %s", problem)  # noqa: TRY400
            else:
                logger.info("%s: %d keys are in force", self._file, len(self._known.keys))

    async def _read(self, file: Path) -> None:
        settings = self._settings
        content = await asyncio.to_thread(read_keys_file, file, settings)
        if settings is not self._settings and (problems := _problems(content, self._settings)):
            # They changed meanwhile.
            raise ConfigurationError([f"{file}: {problem}" for problem in problems])
        self._content = content
        self._known = _known(self._settings, content)


def key_hash(key: str) -> str:
    """What is kept of a key. `key` is ASCII."""
    return hashlib.sha256(key.encode("ascii")).hexdigest()


def new_key() -> str:
    """A fresh random key of 256 bits."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_entry(tenant: str, key: str, label: str | None) -> str:
    """The line under `keys` of a keys file that lets a key in."""
    told = "" if label is None else f", label: {json.dumps(label)}"
    return f'  - {{sha256: "{key_hash(key)}", tenant: "{tenant}"{told}}}'


def append_entry(file: Path, tenant: str, entry: str) -> bool:
    """Put an entry at the end of a keys file, all at once; makes the file where there is none.

    Returns whether the file itself lists the tenant; else the settings must.

    Raises:
        ConfigurationError: `file` is no keys file, or does not end with its keys.
    """
    if file.exists():
        before, text = _parse(file), file.read_text("utf-8")
        if not before.keys and "keys:" not in text:
            text = f"{text.rstrip()}\nkeys:\n"
    else:
        before, text = KeysFile(tenants={tenant: ListedTenant()}), ""
        text = f'tenants:\n  "{tenant}": {{}}\nkeys:\n'
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
        written = Path(folder) / file.name
        written.touch(mode=0o600)
        written.write_text(text.rstrip("\n") + f"\n{entry}\n", "utf-8")
        try:
            after = _parse(written)
        except ConfigurationError:
            after = KeysFile()
        if after.tenants != before.tenants or after.keys[:-1] != before.keys or not after.keys:
            raise ConfigurationError([f"{file}: does not end with its keys; add the entry by hand"])
        if file.exists():
            shutil.copymode(file, written)
        written.replace(file)
    return tenant in after.tenants


def read_keys_file(file: Path, settings: TenantSettings) -> KeysFile:
    """Read and check a keys file, with the tenants that settings list.

    Raises:
        ConfigurationError: with every problem; no value of the file is repeated, as it could be a
            key.
    """
    content = _parse(file)
    if problems := _problems(content, settings):
        raise ConfigurationError([f"{file}: {problem}" for problem in problems])
    return content


def _problems(content: KeysFile, settings: TenantSettings) -> list[str]:
    """What does not go together in a keys file, or with the tenants that settings list."""
    problems = [
        f"tenants.{name}: the settings list it too"
        for name in content.tenants
        if name in settings.listed
    ]
    first: dict[str, int] = {}
    for index, key in enumerate(content.keys):
        if key.tenant not in content.tenants and key.tenant not in settings.listed:
            problems.append(f"keys[{index}].tenant: {key.tenant} is listed nowhere")
        before = first.setdefault(key.sha256[:INDEX_CHARS], index)
        if before != index:
            problems.append(f"keys[{index}].sha256: the same as keys[{before}]")
    return problems


def _parse(file: Path) -> KeysFile:
    value = _read_yaml(file)
    validator = jsonschema.Draft202012Validator(msgspec.json.schema(KeysFile))
    errors = sorted(validator.iter_errors(value), key=lambda error: error.json_path)
    if errors:
        raise ConfigurationError([f"{file}: {_broken_rule(error)}" for error in errors])
    try:
        return msgspec.convert(value, KeysFile)
    except msgspec.ValidationError as error:
        raise ConfigurationError([f"{file}: a name is not a text"]) from error


def _read_yaml(file: Path) -> Any:
    try:
        value = yaml.safe_load(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError([f"{file}: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigurationError([f"{file}: not UTF-8"]) from error
    except yaml.YAMLError as error:
        # Its text quotes the file.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" at line {mark.line + 1}"
        raise ConfigurationError([f"{file}: no YAML{where}"]) from error
    return {} if value is None else value


def _broken_rule(error: jsonschema.ValidationError) -> str:
    """Where a value of the file is not what it must be; the value itself stays unsaid."""
    deepest: Any = jsonschema.exceptions.best_match([error])
    path = deepest.json_path.removeprefix("$.")
    if deepest.validator == "additionalProperties":
        return f"{path}: takes only {', '.join(deepest.schema['properties'])}"
    return f"{path}: breaks the rule {deepest.validator}: {deepest.validator_value}"[:200]


def _known(settings: TenantSettings, content: KeysFile) -> _Known:
    tenants = {
        name: Tenant(
            name,
            listed.is_trusted,
            settings.default_limits if listed.limits is None else listed.limits,
            listed.max_priority,
            listed.has_selection,
        )
        for name, listed in {**settings.listed, **content.tenants}.items()
    }
    keys = {key.sha256[:INDEX_CHARS]: (key.sha256, tenants[key.tenant]) for key in content.keys}
    return _Known(tenants, keys)


def _sent_key(headers: Mapping[str, str]) -> str:
    """The key that a client sent: as OpenAI's clients do, as Anthropic's, or as Azure's.

    Raises:
        InvalidApiKey: none, or nothing that can be one.
    """
    bearer = _BEARER.fullmatch(headers.get(HEADER_AUTHORIZATION, ""))
    if bearer is not None:
        return bearer[1]
    for name in (HEADER_X_API_KEY, HEADER_API_KEY):
        if _KEY.fullmatch(headers.get(name, "")):
            return headers[name]
    raise InvalidApiKey(
        f"no API key: send it as {HEADER_AUTHORIZATION}: Bearer KEY, or as {HEADER_X_API_KEY}"
    )
