"""Subcommands of `cartridge-router` on the engines' side; found through an entry-point group.

Owns their arguments and output. Refuses to import torch before a command runs, so that `--help`
works without it.
"""

import argparse
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cartridge_proto.codecs import CODECS, CodecUnavailable
from cartridge_proto.manifest import DEFAULT_INSTRUCTION, ConventionKind
from cartridge_proto.stores import StoreError, open_store

if TYPE_CHECKING:
    from cartridge_engine_ext.agent import AgentOptions
    from cartridge_engine_ext.build import Built


@dataclass(frozen=True)
class BuildCommand:
    """`cartridge build`."""

    help: str = "build Cartridges from text files by one prefill each"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        add = parser.add_argument
        add("--model", required=True, type=Path, help="Hugging Face folder of the model")
        add("--model-name", help="name of the model that people use; default: the folder's name")
        add("--adapter", type=Path, help="folder of a LoRA adapter to prefill with")
        add(
            "--adapter-name", help="name of the adapter that people use; default: the folder's name"
        )
        add("--text", required=True, action="append", type=Path, help="text file; may be repeated")
        add("--name", required=True, action="append", help="name of each Cartridge, in order")
        add("--title", action="append", default=[], help="title of each, in order")
        add("--sentence", action="append", default=[], help="one sentence on each, in order")
        add("--version", default="1", help="version of all; default: 1")
        add("--store", required=True, help="store folder or URL")
        add(
            "--convention",
            default=ConventionKind.SYSTEM_TURN.value,
            choices=[kind.value for kind in ConventionKind],
            help="system_turn for chats (default), document for /v1/completions",
        )
        add("--instruction", help="system turn text with {document} in it")
        add("--owner", default="public", help="tenant that owns the artifacts")
        add("--reader", action="append", help="tenant that may use them; default: * (everybody)")
        add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
        add(
            "--codec",
            default="identity",
            choices=list(CODECS),
            help="how the bytes are stored; default: identity",
        )
        add(
            "--values",
            default="full",
            choices=["full", "e4m3"],
            help="e4m3: 8 bits for each value, with scales; default: full",
        )
        add(
            "--no-text",
            action="store_true",
            help="do not keep the text in the store: selection then knows the title and sentence",
        )
        add("--alias", action="append", default=[], help="other names of all, for selection")
        add("--no-weights-digest", action="store_true", help="do not hash the model's weights")
        add("--json", action="store_true", help="print one JSON object for each Cartridge")

    def run(self, args: argparse.Namespace) -> int:
        """Build; prints a digest for each text."""
        if len(args.text) != len(args.name):
            print(f"{len(args.text)} --text and {len(args.name)} --name", file=sys.stderr)
            return 2
        import transformers

        from cartridge_engine_ext.build import DTYPES, Builder, Source
        from cartridge_engine_ext.errors import ConfigurationError

        transformers.logging.disable_progress_bar()
        instruction = args.instruction or DEFAULT_INSTRUCTION
        if "{document}" not in instruction:
            print("--instruction: {document} is missing", file=sys.stderr)
            return 2
        try:
            builder = Builder(
                model_dir=args.model,
                store=open_store(args.store),
                model_name=args.model_name or args.model.resolve().name,
                dtype=DTYPES[args.dtype],
                with_weights_digest=not args.no_weights_digest,
                say=lambda line: print(line, file=sys.stderr, flush=True),
                codec=args.codec,
                values=args.values,
                adapter=args.adapter,
                adapter_name=args.adapter_name,
            )
            for index, (file, name) in enumerate(zip(args.text, args.name, strict=True)):
                built = builder.build(
                    Source(
                        text=file.read_text("utf-8").strip(),
                        name=name,
                        version=args.version,
                        title=_nth(args.title, index),
                        sentence=_nth(args.sentence, index) or "",
                        convention=ConventionKind(args.convention),
                        instruction=instruction,
                        owner=args.owner,
                        readers=tuple(args.reader or ["*"]),
                        aliases=tuple(args.alias),
                        keeps_text=not args.no_text,
                    )
                )
                _print_built(built, as_json=args.json)
        except (ConfigurationError, CodecUnavailable, StoreError, OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0


@dataclass(frozen=True)
class QuantizeCommand:
    """`cartridge quantize`."""

    help: str = "make a smaller Cartridge of another one: values in 8 bits, keys as they are"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        add = parser.add_argument
        add("cartridge", help="name@version or digest of the Cartridge to start from")
        add("--store", required=True, help="store folder or URL")
        add("--model", required=True, type=Path, help="Hugging Face folder: the probe is made anew")
        add("--adapter", type=Path, help="folder of the LoRA adapter that it was made with")
        add("--name", required=True, help="name of the new Cartridge")
        add("--version", default="1", help="version of the new Cartridge; default: 1")
        add(
            "--values",
            default="e4m3",
            choices=["e4m3", "bfloat16"],
            help="e4m3: 8 bits with scales; default: e4m3",
        )
        add(
            "--keys",
            default="exact",
            choices=["exact", "bfloat16"],
            help="exact: as stored, bit for bit; bfloat16: rounded, from float32; default: exact",
        )
        add(
            "--scales",
            default="head_channel",
            choices=["head_channel", "head"],
            help="one scale for each head and channel, or for each head; default: head_channel",
        )
        add(
            "--power-of-two",
            action="store_true",
            help="scales that bfloat16 multiplies by exactly; costs a little accuracy",
        )
        add(
            "--codec",
            default="identity",
            choices=list(CODECS),
            help="how the bytes are stored; default: identity",
        )
        add("--json", action="store_true", help="print one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        """Quantise; prints the new digest."""
        import transformers

        from cartridge_engine_ext.errors import ConfigurationError
        from cartridge_engine_ext.quantise import Keys, Quantiser, Recipe, Values

        transformers.logging.disable_progress_bar()
        recipe = Recipe(
            keys=Keys(args.keys),
            values=Values(args.values),
            by_channel=args.scales == "head_channel",
            power_of_two=args.power_of_two,
        )
        try:
            store = open_store(args.store)
            digest = store.resolve(args.cartridge)
            quantiser = Quantiser(
                model_dir=args.model,
                store=store,
                say=lambda line: print(line, file=sys.stderr, flush=True),
                adapter=args.adapter,
            )
            built = quantiser.quantise(
                digest, recipe, name=args.name, version=args.version, codec=args.codec
            )
        except (ConfigurationError, CodecUnavailable, StoreError, OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        _print_built(built, as_json=args.json)
        return 0


@dataclass(frozen=True)
class PrepareModelCommand:
    """`model prepare`."""

    help: str = "convert the demo's model (SmolLM2-135M-Instruct) to a Hugging Face folder"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        parser.add_argument("--out", type=Path, help="target folder; default: the user's cache")

    def run(self, args: argparse.Namespace) -> int:
        """Convert once; prints the folder."""
        from cartridge_engine_ext.demo_model import default_model_dir, prepare_demo_model

        try:
            print(prepare_demo_model(args.out or default_model_dir()))
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0


@dataclass(frozen=True)
class WrapTemplateCommand:
    """`chat-template wrap`."""

    help: str = "write the chat template that an engine serves beside Cartridges"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        parser.add_argument("--model", required=True, type=Path, help="Hugging Face folder")
        parser.add_argument("--out", required=True, type=Path, help="file for vLLM --chat-template")

    def run(self, args: argparse.Namespace) -> int:
        """Wrap and prove the model's own template; prints the file."""
        from transformers import AutoTokenizer

        from cartridge_engine_ext import identity
        from cartridge_engine_ext.chat_template import (
            check_wrapped,
            renderer_of,
            tokenize_verbatim,
            wrap_chat_template,
        )
        from cartridge_engine_ext.errors import ConfigurationError

        try:
            original = identity.chat_template(args.model)
            if original is None:
                raise ConfigurationError(f"{args.model} has no chat template")
            tokenizer = AutoTokenizer.from_pretrained(args.model)
            wrapped = wrap_chat_template(original)
            check_wrapped(renderer_of(tokenizer), tokenize_verbatim(tokenizer), wrapped)
        except (ConfigurationError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(wrapped, "utf-8")
        print(args.out)
        return 0


@dataclass(frozen=True)
class AgentCommand:
    """`agent`; needs neither torch nor vLLM."""

    help: str = "keep verified Cartridges in memory for all engines of this machine"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""
        add = parser.add_argument
        add("--listen", required=True, help="socket for engines: unix:/path")
        add("--store", required=True, help="store folder or URL")
        add("--dram-bytes", required=True, type=int, help="bound of what is kept in memory")
        add("--pinned-bytes", type=int, help="bound of pins; default: half of --dram-bytes")
        add("--eviction-policy", default="lru", choices=["lru", "gdsf", "next_access"])
        add("--num-loaders", default=2, type=int, help="threads that fetch and verify; default: 2")
        add("--nvme-dir", type=Path, help="folder of a local disk, in front of the store")
        add("--nvme-bytes", type=int, help="bound of that folder")
        add("--allow-uid", action="append", type=int, help="user that may connect; default: own")
        add("--control-address", help="host:port or unix:/path of the gRPC control service")
        add("--control-token-file", help="file with its token, where the environment has none")
        add("--control-tls-cert", help="PEM file: its certificate")
        add("--control-tls-key", help="PEM file: its private key")
        add("--control-tls-client-ca", help="PEM file: who signs callers' certificates")
        add("--metrics-port", type=int, help="port of Prometheus metrics; default: none")
        add("--metrics-host", default="127.0.0.1", help="its address; default: 127.0.0.1")
        add("--name", default="agent", help="what it is called in answers; default: agent")

    def run(self, args: argparse.Namespace) -> int:
        """Serve until a signal."""
        from cartridge_engine_ext.agent import run_agent
        from cartridge_engine_ext.errors import ConfigurationError

        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        try:
            run_agent(agent_options(args), lambda line: print(line, flush=True))
        except ConfigurationError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0


def agent_options(args: argparse.Namespace) -> "AgentOptions":
    """What the arguments of `agent` say.

    Raises:
        ConfigurationError: a file of the control service cannot be used.
    """
    from cartridge_engine_ext.agent import AgentOptions
    from cartridge_engine_ext.control_access import read_access
    from cartridge_engine_ext.eviction import EvictionPolicyName

    return AgentOptions(
        listen=args.listen,
        store=args.store,
        dram_bytes=args.dram_bytes,
        pinned_bytes=args.pinned_bytes,
        eviction_policy=EvictionPolicyName(args.eviction_policy),
        num_loaders=args.num_loaders,
        nvme_dir=args.nvme_dir,
        nvme_bytes=args.nvme_bytes,
        allowed_uids=frozenset(args.allow_uid) if args.allow_uid else None,
        control_address=args.control_address,
        access=read_access(
            token_file=args.control_token_file,
            tls_cert=args.control_tls_cert,
            tls_key=args.control_tls_key,
            tls_client_ca=args.control_tls_client_ca,
        ),
        metrics_host=args.metrics_host,
        metrics_port=args.metrics_port,
        name=args.name,
    )


cartridge_build = BuildCommand()
cartridge_quantize = QuantizeCommand()
agent = AgentCommand()
model_prepare = PrepareModelCommand()
chat_template_wrap = WrapTemplateCommand()


def _nth(values: list[str], index: int) -> str | None:
    return values[index] if index < len(values) else None


def _print_built(built: "Built", *, as_json: bool) -> None:
    manifest = built.manifest
    if as_json:
        print(
            json.dumps(
                {
                    "name": manifest.name,
                    "version": manifest.version,
                    "digest": built.digest,
                    "num_tokens": manifest.num_tokens,
                    "size_bytes": manifest.payload_bytes,
                }
            ),
            flush=True,
        )
    else:
        print(f"{manifest.alias}  {built.digest}  {manifest.num_tokens} tokens", flush=True)
