"""`cartridge-router index suggest-cards|set-cards`: what selection reads of a Cartridge first.

Owns the question to the model, the file of drafts, and the change of a card. Refuses to change a
card unread: drafts go through a file that a person looks at.
"""

import argparse
import http.client
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import msgspec
import yaml

from cartridge_proto.manifest import Card, ConventionKind, Manifest
from cartridge_proto.names import FIELD_CARTRIDGE_IDS, HEADER_AUTHORIZATION
from cartridge_proto.stores import Store, StoreError
from cartridge_proto.stores.opening import open_store
from cartridge_router.errors import ConfigurationError
from cartridge_router.request import Route

ENV_API_KEY: Final = "OPENAI_API_KEY"
"""As OpenAI's clients read it."""
TIMEOUT_S: Final = 300.0
MAX_ANSWER_TOKENS: Final = 256
MAX_TEXT: Final = 160
"""Characters of each text of a draft."""
MAX_ALIASES: Final = 5
_ASK: Final = (
    "Write a catalogue card of the document above: its title, other names that people use for it, "
    "and one sentence that says what it is about and which period it covers."
)
_SHORT: Final = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "title": _SHORT,
        "aliases": {"type": "array", "items": _SHORT, "maxItems": MAX_ALIASES},
        "sentence": _SHORT,
    },
    "required": ["title", "aliases", "sentence"],
    "additionalProperties": False,
}
_CONNECTIONS: Final = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class _Draft(msgspec.Struct, forbid_unknown_fields=True):
    """What the model answers."""

    title: _Text
    aliases: Annotated[list[_Text], msgspec.Meta(max_length=64)]
    sentence: _Text


class CardEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A card of the file, by the alias of its Cartridge."""

    cartridge: str
    title: _Text
    aliases: Annotated[list[_Text], msgspec.Meta(max_length=64)]
    sentence: _Text
    language: str = "en"


class _NoDraft(Exception):
    """The model has not said what can be a card."""


def suggest(args: argparse.Namespace) -> int:
    """Draft cards with the model, each from its own Cartridge; 1 where some could not be made.

    Raises:
        ConfigurationError: the file cannot be written; the drafts are printed instead.
    """
    # What is not there is said before minutes go into drafts of the others.
    wanted, num_failed = _wanted(_opened(args.store), args.cartridge), 0
    entries = []
    for alias, manifest in wanted:
        try:
            draft = _ask(args.url, args.model, alias, manifest)
        except (_NoDraft, OSError, http.client.HTTPException) as error:
            print(f"{alias}: {error}", file=sys.stderr)
            num_failed += 1
            continue
        print(f"{alias}: {draft.title}", file=sys.stderr)
        language = manifest.card.language
        entry = CardEntry(alias, draft.title, draft.aliases, draft.sentence, language)
        entries.append(msgspec.to_builtins(entry))
    text = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True)
    if args.out is None:
        print(text, end="")
    else:
        try:
            args.out.write_text(text, "utf-8")
        except OSError as error:
            # Minutes went into them.
            print(text, end="")
            raise ConfigurationError([f"--out: {error}"]) from error
    return 1 if num_failed else 0


def set_cards(args: argparse.Namespace) -> int:
    """Give Cartridges the cards of a file: the same tensors under a new digest and their alias."""
    store = _opened(args.store)
    entries = read_cards(args.file)
    problems, found = [], []
    for entry in entries:
        try:
            manifest = store.read_manifest(store.resolve(entry.cartridge))
            card = msgspec.convert(
                {
                    "title": entry.title,
                    "aliases": entry.aliases,
                    "sentence": entry.sentence,
                    "language": entry.language,
                },
                Card,
            )
        except (StoreError, msgspec.ValidationError) as error:
            problems.append(f"{args.file}: {entry.cartridge}: {error}")
        else:
            found.append((entry.cartridge, manifest, card))
    if problems:
        # Nothing is changed by a file that is wrong anywhere.
        raise ConfigurationError(problems)
    for alias, manifest, card in found:
        if manifest.card == card:
            print(f"{alias}: as it was")
            continue
        digest = store.put_manifest(msgspec.structs.replace(manifest, card=card))
        store.set_alias(alias, digest)
        print(f"{alias}: {digest}")
    return 0


def read_cards(file: Path) -> list[CardEntry]:
    """The entries of a file.

    Raises:
        ConfigurationError: it cannot be read, or is no list of cards.
    """
    try:
        value = yaml.safe_load(file.read_text("utf-8"))
        entries = msgspec.convert(value, list[CardEntry])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigurationError([f"{file}: {error}"]) from error
    names = [entry.cartridge for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError([f"{file}: {name} stands there twice" for name in twice])
    return entries


def _opened(text: str) -> Store:
    try:
        return open_store(text)
    except StoreError as error:
        raise ConfigurationError([f"--store: {error}"]) from error


def _wanted(store: Store, aliases: list[str] | None) -> list[tuple[str, Manifest]]:
    """Cartridges that are named, or all.

    Raises:
        ConfigurationError: one that is named is not there.
    """
    try:
        names = sorted(store.aliases()) if aliases is None else aliases
        return [(alias, store.read_manifest(store.resolve(alias))) for alias in names]
    except StoreError as error:
        raise ConfigurationError([f"--cartridge: {error}"]) from error


def _ask(url: str, model: str, alias: str, manifest: Manifest) -> _Draft:
    """One draft.

    Raises:
        _NoDraft: no answer, or none that can be a card.
    """
    body: dict[str, Any] = {
        "model": model,
        FIELD_CARTRIDGE_IDS: [alias],
        "max_tokens": MAX_ANSWER_TOKENS,
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "card", "schema": _SCHEMA},
        },
    }
    is_chat = manifest.prompt_convention.kind is ConventionKind.SYSTEM_TURN
    if is_chat:
        body["messages"] = [{"role": "user", "content": _ASK}]
    else:
        body["prompt"] = f"\n\n{_ASK}\n"
    answer = _post(url, Route.CHAT if is_chat else Route.COMPLETIONS, body)
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if is_chat else choice["text"]
        return msgspec.json.decode(text, type=_Draft)
    except (LookupError, TypeError, msgspec.DecodeError) as error:
        raise _NoDraft(f"the model answered no card: {error}") from error


def _post(url: str, path: str, body: dict[str, Any]) -> Any:
    """The JSON of an answer.

    Raises:
        _NoDraft: another status than 200, or no JSON.
    """
    parts = urlsplit(url)
    if parts.scheme not in _CONNECTIONS or not parts.netloc or parts.path not in {"", "/"}:
        raise ConfigurationError([f"--url: {url!r} is not http(s)://host:port"])
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(ENV_API_KEY):
        headers[HEADER_AUTHORIZATION] = f"Bearer {key}"
    connection = _CONNECTIONS[parts.scheme](parts.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise _NoDraft(f"HTTP {answer.status}: {data[:300].decode('utf-8', 'replace')}")
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise _NoDraft(f"no JSON was answered: {error}") from error
