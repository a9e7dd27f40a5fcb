"""Two kinds of replicas for the demo: real vLLM engines, and simulated ones.

Owns how each is prepared, started and given its Cartridges. Refuses to import torch or vllm: real
engines are child processes.
"""

import hashlib
import json
import struct
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import ConventionKind, Manifest
from cartridge_proto.safetensors_header import tensor_ranges
from cartridge_proto.stores import LocalStore
from cartridge_router.demo.questions import Question, text_name
from cartridge_router.demo.stack import (
    ENGINE_ENVIRONMENT,
    MAX_MODEL_LEN,
    MODEL_NAME,
    ClosedRedis,
    Stack,
    engine_command,
)


class EngineKit(Protocol):
    """What the demo needs of a kind of replica."""

    is_simulated: bool
    store: Path

    def prepare(self, stack: Stack) -> None:
        """Make what the replicas need to start."""
        ...

    def start_replica(self, stack: Stack, name: str, port: int, redis: ClosedRedis) -> None:
        """Start one replica."""
        ...

    def build(self, stack: Stack) -> Generator[str]:
        """Build all Cartridges; yields a line for each. Close it to stop."""
        ...


class VllmKit:
    """Real vLLM on the CPU."""

    is_simulated = False

    def __init__(self, work: Path, asked: Sequence[Question]) -> None:
        self.store = work / "store"
        self._template = work / "chat_template.jinja"
        self._asked = asked
        self._model_dir = Path()

    def prepare(self, stack: Stack) -> None:
        """Convert the model (once) and wrap its chat template."""
        self.store.mkdir(parents=True)
        *_, folder = _run(stack, "model", "prepare")
        self._model_dir = Path(folder)
        wrap = ["chat-template", "wrap", "--model", folder, "--out", str(self._template)]
        for _ in _run(stack, *wrap):
            pass

    def start_replica(self, stack: Stack, name: str, port: int, redis: ClosedRedis) -> None:
        """Start vLLM's API server."""
        command = engine_command(
            model_dir=self._model_dir,
            template=self._template,
            port=port,
            store=self.store,
            redis_url=redis.url,
            replica_id=name,
        )
        stack.start(name, command, {**ENGINE_ENVIRONMENT, **redis.engine_environment(name)})

    def build(self, stack: Stack) -> Generator[str]:
        """One prefill for each document: as a system turn, and the first also as raw text."""
        yield from self._build(stack, self._asked, ConventionKind.SYSTEM_TURN, lambda name: name)
        yield from self._build(stack, self._asked[:1], ConventionKind.DOCUMENT, text_name)

    def _build(
        self,
        stack: Stack,
        asked: Sequence[Question],
        convention: ConventionKind,
        name_of: Callable[[str], str],
    ) -> Generator[str]:
        arguments = ["cartridge", "build", "--json", "--model", str(self._model_dir)]
        arguments += ["--model-name", MODEL_NAME, "--store", str(self.store)]
        arguments += ["--convention", convention.value]
        for question in asked:
            arguments += ["--text", str(question.file), "--name", name_of(question.name)]
            arguments += ["--title", question.title, "--sentence", question.sentence]
        for line in _run(stack, *arguments):
            if not line.startswith("{"):
                continue
            built = json.loads(line)
            alias = f"{built['name']}@{built['version']}"
            yield f"  {alias}  {built['num_tokens']} tokens  {built['digest']}"


class SimulatedKit:
    """Simulated replicas: no torch, no vllm, answers made from the loaded bytes."""

    is_simulated = True

    def __init__(self, work: Path, asked: Sequence[Question]) -> None:
        self.store = work / "store"
        self._asked = asked

    def prepare(self, stack: Stack) -> None:
        """Write one artifact for each document, of made-up tensors."""
        for question in self._asked:
            put_simulated(self.store, question.name, question.text, ConventionKind.SYSTEM_TURN)
        first = self._asked[0]
        put_simulated(self.store, text_name(first.name), first.text, ConventionKind.DOCUMENT)

    def start_replica(self, stack: Stack, name: str, port: int, redis: ClosedRedis) -> None:
        """Start a simulated replica."""
        command = [sys.executable, "-m", "cartridge_loadtest.simulated_replica"]
        command += ["--port", str(port), "--model", MODEL_NAME, "--store", str(self.store)]
        command += ["--replica-id", name, "--redis-url", redis.url]
        command += ["--max-model-len", str(MAX_MODEL_LEN)]
        stack.start(name, command, redis.engine_environment(name))

    def build(self, stack: Stack) -> Generator[str]:
        """Name what `prepare` wrote."""
        for alias, digest in LocalStore(self.store).aliases().items():
            yield f"  {alias}  {digest}"


KITS: dict[str, Callable[[Path, Sequence[Question]], EngineKit]] = {
    "vllm": VllmKit,
    "sim": SimulatedKit,
}
"""Kinds of replicas by the name that `--engine` uses."""


def _run(stack: Stack, *arguments: str) -> Generator[str]:
    """Lines of a `cartridge-router` subcommand that needs torch, as they come.

    Raises:
        DemoFailed: it failed; with the end of what it said.
    """
    command = [sys.executable, "-m", "cartridge_router", *arguments]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return stack.lines_of(" ".join(arguments[:2]), command, environment)


def put_simulated(store_dir: Path, name: str, text: str, convention: ConventionKind) -> Manifest:
    """Store an artifact whose tensors are made up from a text: valid, small, and meaningless."""
    words = text.split()
    names, shape = ("layers.0.k", "layers.0.v"), [1, len(words), 2]
    size = 4 * len(words) * 2
    header = json.dumps(
        {
            tensor: {"dtype": "F32", "shape": shape, "data_offsets": [i * size, (i + 1) * size]}
            for i, tensor in enumerate(names)
        }
    ).encode()
    numbers = [
        int.from_bytes(hashlib.sha256(f"{name} {tensor} {i} {words[i // 2]}".encode()).digest()[:2])
        for tensor in names
        for i in range(2 * len(words))
    ]
    data = len(header).to_bytes(8, "little") + header + struct.pack(f"<{len(numbers)}f", *numbers)
    blob, ranges = sha256_digest(data), tensor_ranges(data)
    simulated = sha256_digest(b"simulated")
    is_turn = convention is ConventionKind.SYSTEM_TURN
    manifest = msgspec.convert(
        {
            "schema_version": 1,
            "name": name,
            "version": "1",
            "kind": "prefill",
            "model": {
                "architecture": "Simulated",
                "name": MODEL_NAME,
                "config_digest": simulated,
                "tokenizer_digest": simulated,
                "weights_digest": None,
                "adapter": None,
            },
            "geometry": {
                "num_layers": 1,
                "num_kv_heads": 1,
                "head_dim_k": 2,
                "head_dim_v": 2,
                "layer_kinds": ["full"],
            },
            "rope": {
                "type": "default",
                "theta": 10000.0,
                "scaling": None,
                "rotary_dim": 2,
                "stored_keys": "post",
                "first_position": 0,
            },
            "num_tokens": len(words),
            "positions": {"kind": "dense"},
            "representation": {"k_dtype": "F32", "v_dtype": "F32", "v_scale": None},
            "tensors": {
                tensor: {
                    "blob": blob,
                    "byte_range": ranges[tensor],
                    "shape": shape,
                    "dtype": "F32",
                    "sha256": sha256_digest(data[slice(*ranges[tensor])]),
                }
                for tensor in names
            },
            "payload": [{"sha256": blob, "size_bytes": len(data)}],
            "composition": {
                "class": "isolated",
                "set_id": None,
                "max_set_size": None,
                "position_layout": "sequential",
            },
            "provenance": {
                "source_digest": sha256_digest(text.encode()),
                "builder": "cartridge-router demo --engine sim",
                "transform": None,
                "training": None,
            },
            "access": {"owner": "public", "readers": ["*"]},
            "card": {"title": name, "aliases": [], "sentence": "Simulated.", "language": "en"},
            "prompt_convention": {
                "kind": convention,
                "has_bos": False,
                "chat_template_digest": simulated if is_turn else None,
            },
            "frozen": {"num_tokens": 0, "role": None},
            "probe": {"prompt_token_ids": [0], "steps": [{"token_id": 0, "top": []}]},
            "derived_from": None,
            "created_at": "2026-01-01T00:00:00Z",
        },
        Manifest,
    )
    store = LocalStore(store_dir)
    store.put_blob(data)
    store.set_alias(manifest.alias, store.put_manifest(manifest))
    return manifest
