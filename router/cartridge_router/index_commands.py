"""`cartridge-router index build|calibrate|show`: indexes for selection, made beside the gateway.

Owns what the commands print and the file of labelled questions. Refuses to be imported without the
extra `selection`; the command line says what to install.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from cartridge_proto.manifest import ConventionKind
from cartridge_proto.stores.opening import open_store
from cartridge_router.catalog import Cartridge, Catalog
from cartridge_router.errors import ConfigurationError
from cartridge_router.retrieval.calibration import KnownQuestion
from cartridge_router.retrieval.index import Index
from cartridge_router.retrieval.learning import MIN_LABELLED, calibrate
from cartridge_router.shelves import Shelves

CONVENTIONS = {"chat": ConventionKind.SYSTEM_TURN, "text": ConventionKind.DOCUMENT}


class LabelledQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the file: `cartridges` are names or aliases; none for what nothing answers."""

    question: str
    cartridges: list[str]


def build(args: argparse.Namespace) -> int:
    """Make an index and keep it, with what an older one had learned."""
    with _opened(args) as (shelves, cartridges):
        index = shelves.make(args.tenant, CONVENTIONS[args.prompts], cartridges)
        _save(shelves, index, args)
        _print(index, as_json=args.json)
    return 0


def learn(args: argparse.Namespace) -> int:
    """Calibrate an index, by labelled questions or by its own texts, and keep it."""
    questions = [] if args.questions is None else _read_questions(args.questions)
    with _opened(args) as (shelves, cartridges):
        index = shelves.make(args.tenant, CONVENTIONS[args.prompts], cartridges)
        known = _known(questions, cartridges)
        index = index.with_calibration(calibrate(index, known))
        _save(shelves, index, args)
        _print(index, as_json=args.json)
    return 0


def _save(shelves: Shelves, index: Index, args: argparse.Namespace) -> None:
    """Keep it where the gateway looks.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    try:
        shelves.save(index, args.tenant, CONVENTIONS[args.prompts])
    except OSError as error:
        raise ConfigurationError([f"--index-dir: {error}"]) from error


@contextlib.contextmanager
def _opened(args: argparse.Namespace) -> Iterator[tuple[Shelves, list[Cartridge]]]:
    """Where indexes lie, and what the tenant may read.

    Raises:
        ConfigurationError: it may read nothing.
    """
    catalog = Catalog(open_store(args.store), refresh_s=1.0)
    try:
        asyncio.run(catalog.refresh())
        kind = CONVENTIONS[args.prompts]
        found = catalog.newest_for(
            args.tenant, lambda manifest: manifest.prompt_convention.kind is kind
        )
        if not found:
            raise ConfigurationError(
                [
                    f"--tenant: no Cartridge for prompts of kind {args.prompts} in the store that "
                    f"{args.tenant!r} may read"
                ]
            )
        yield Shelves(catalog, embedder=args.embedder, folder=args.index_dir), found
    finally:
        catalog.close()


def _read_questions(file: Path) -> list[LabelledQuestion]:
    """Lines of JSON.

    Raises:
        ConfigurationError: the file cannot be read, or lines are none; each is named.
    """
    found, problems = [], []
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError([f"{file}: {error.strerror}"]) from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line, type=LabelledQuestion))
            except msgspec.DecodeError as error:
                problems.append(f"{file}:{number}: {error}")
    if problems:
        raise ConfigurationError(problems)
    return found


def _known(questions: list[LabelledQuestion], cartridges: list[Cartridge]) -> list[KnownQuestion]:
    """Questions by the digests of their Cartridges.

    Raises:
        ConfigurationError: a name stands for none of them; or there are too few to learn from.
    """
    digests: dict[str, str] = {}
    for cartridge in cartridges:
        manifest = cartridge.manifest
        for name in (manifest.name, manifest.alias, cartridge.digest):
            digests[name] = cartridge.digest
    unknown = sorted({n for each in questions for n in each.cartridges if n not in digests})
    if unknown:
        raise ConfigurationError([f"cartridges: {name!r} is not in the index" for name in unknown])
    if questions and len(questions) < MIN_LABELLED:
        raise ConfigurationError(
            [f"{len(questions)} questions; fewer than {MIN_LABELLED} teach nothing"]
        )
    return [
        KnownQuestion(each.question, tuple(digests[name] for name in each.cartridges))
        for each in questions
    ]


def _print(index: Index, *, as_json: bool) -> None:
    calibration = index.calibration
    told: dict[str, Any] = {
        "version": index.version,
        "documents": len(index.documents),
        "without_text": sum(one.document.text is None for one in index.documents),
        "passages": sum(len(one.vectors) for one in index.documents),
        "embedder": index.embedder.identity,
        "calibration": calibration.made_from,
        "scope_threshold": round(calibration.scope_threshold, 4),
    }
    if as_json:
        print(json.dumps(told, indent=2))
        return
    for name, value in told.items():
        print(f"{name.replace('_', ' '):16} {value}")
