"""`make bench-codecs`: what a codec saves on real keys and values, and what it costs.

Owns the measurements: one document prefilled by the demo's model, in every format, without an
engine. Refuses wall time: one thread, CPU seconds, each speed beside a plain copy of the same
bytes in the same run.
"""

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import zstandard

from cartridge_engine_ext.build import DTYPES, Builder, Built, Source
from cartridge_engine_ext.demo_model import default_model_dir, prepare_demo_model
from cartridge_proto.codecs import (
    CODECS,
    ShuffleZstdCodec,
    decode_blob,
    encode_blob,
    item_spans,
    read_decoded_blob,
)
from cartridge_proto.stores import LocalStore
from tests.benchmarks.rows import Row, report

DOCUMENT = Path("examples/documents/board-game.txt")
NUM_REPEATS = 7
LEVELS = (1, 3, 9)
NONE = (None, None)
"""No target, nothing to miss."""


@dataclass(frozen=True)
class Format:
    """One way to build the document: its artifact, and the decoded bytes of its blob."""

    name: str
    built: Built
    data: bytes


def main(arguments: Sequence[str]) -> int:
    """Measure everything; 1 when decoding does not give the bytes back."""
    parser = argparse.ArgumentParser(prog="make bench-codecs", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/codecs.json"))
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    full: Format | None = None
    for one in formats():
        rows += sizes(one)
        rows += speeds(one)
        if one.name.endswith("full"):
            full = one
        elif full is not None:
            rows.append(
                Row(f"{one.name}: file", len(one.data) / len(full.data), "of it", *NONE, full.name)
            )
            rows.append(probe_difference(full, one))
    return report(rows, given.out)


def formats() -> Iterator[Format]:
    """The document in each dtype, with full values and with values in 8 bits."""
    model_dir = prepare_demo_model(default_model_dir())
    text = DOCUMENT.read_text("utf-8").strip()
    for dtype in ("float32", "bfloat16"):
        for values in ("full", "e4m3"):
            with tempfile.TemporaryDirectory(prefix="cartridge-bench-") as folder:
                store = LocalStore(Path(folder))
                builder = Builder(
                    model_dir=model_dir,
                    store=store,
                    model_name="demo",
                    dtype=DTYPES[dtype],
                    with_weights_digest=False,
                    say=lambda line: None,
                    values=values,
                )
                built = builder.build(Source(text, "document"))
                (blob,) = built.manifest.payload
                data = bytearray(blob.decoded_bytes)
                read_decoded_blob(store, blob, memoryview(data))
            yield Format(f"{dtype} {values}", built, bytes(data))


def sizes(one: Format) -> list[Row]:
    """Stored bytes as parts of the safetensors file, and the file itself by token."""
    spans, size = item_spans(one.built.manifest.tensors), len(one.data)
    num_tokens = one.built.manifest.num_tokens
    plain = len(zstandard.ZstdCompressor(level=1).compress(one.data))
    against = f"safetensors file, {num_tokens} tokens"
    return [
        Row(f"{one.name}: identity", size / num_tokens, "bytes/token", None, None, against),
        Row(f"{one.name}: zstd alone", plain / size, "of it", None, None, against),
        *(
            Row(
                f"{one.name}: shuffle-zstd level {level}",
                len(ShuffleZstdCodec(level).encode(one.data, spans)) / size,
                "of it",
                None,
                None,
                against,
            )
            for level in LEVELS
        ),
    ]


def probe_difference(full: Format, small: Format) -> Row:
    """How far the answers to the probe are apart, where both took the same tokens before."""
    difference, num_same = 0.0, 0
    for one, other in zip(
        full.built.manifest.probe.steps, small.built.manifest.probe.steps, strict=True
    ):
        ours, theirs = dict(one.top), dict(other.top)
        shared = ours.keys() & theirs.keys()
        difference = max([difference, *(abs(ours[token] - theirs[token]) for token in shared)])
        if one.token_id != other.token_id:
            break
        num_same += 1
    against = (
        f"{full.name}; {num_same} of {len(full.built.manifest.probe.steps)} greedy tokens equal"
    )
    return Row(f"{small.name}: largest logprob difference", difference, "nat", *NONE, against)


def speeds(one: Format) -> list[Row]:
    """Megabytes of decoded bytes per CPU second, one thread."""
    spans = item_spans(one.built.manifest.tensors)
    stored, blob = encode_blob(one.data, "shuffle-zstd", spans)
    buffer = bytearray(len(one.data))
    view = memoryview(buffer)
    codec = CODECS["shuffle-zstd"]

    def copy() -> None:
        view[:] = one.data

    runs: dict[str, Callable[[], object]] = {
        "memcpy": copy,
        "sha256": lambda: hashlib.sha256(one.data).digest(),
        "encode": lambda: codec.encode(one.data, spans),
        "decode": lambda: codec.decode_into(stored, view),
        "decode and verify": lambda: decode_blob(blob, stored, view),
        "encode level 9": lambda: ShuffleZstdCodec(9).encode(one.data, spans),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(NUM_REPEATS):
        for name, run in runs.items():
            started_s = time.process_time()
            run()
            seconds[name].append(time.process_time() - started_s)
    buffer[:] = bytes(len(buffer))
    decode_blob(blob, stored, view)
    is_same = buffer == one.data
    speed = {
        name: len(one.data) / 1e6 / statistics.median(times) for name, times in seconds.items()
    }
    return [
        Row(f"{one.name}: comes back", float(is_same), "", "1", is_same, "bit for bit"),
        *(
            Row(
                f"{one.name}: {name}",
                value,
                "MB/CPU-s",
                None,
                None,
                f"{value / speed['memcpy']:.3f} of memcpy",
            )
            for name, value in speed.items()
        ),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
