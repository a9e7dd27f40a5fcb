"""`make bench-packed`: what packed Cartridges take and cost on a real engine, beside plain slots.

Owns two engines of the demo's model, one after the other: packed into KV blocks, and read in place.
Refuses wall time: CPU seconds of the engine's processes, each kind of prefix in turn, in one run.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cartridge_engine_ext.demo_model import default_model_dir, prepare_demo_model
from cartridge_engine_ext.packed_layout import PACKED_WORKER
from cartridge_engine_ext.quantise import Keys, Quantiser, Recipe, Values
from cartridge_engine_ext.reference_probe import full_layers
from cartridge_kernels.rope import default_inverse_frequencies
from cartridge_proto import names
from cartridge_proto.digest import Digest
from cartridge_proto.residency import Tier
from tests.benchmarks.process_costs import cpu_s
from tests.benchmarks.rows import Row, report
from tests.integration.fleet import (
    LIVE_PROMPT,
    TOLERANCE,
    Fleet,
    PrefixReference,
    at_once,
    document_tokens,
)
from tests.integration.running_fleet import running_fleet
from tests.integration.tiny_fleet import rows as residency

BLOCK_SIZE = 128
MAX_MODEL_LEN = 4608
NUM_NEW_TOKENS = 48
NUM_REPEATS = 5
IN_PLACE = "k16v8 in place"
ALONE = "no Cartridge"
"""What each engine's figures are compared with: the question alone, on the same engine in turn."""
KINDS = {
    "k16v8": Recipe(Keys.BFLOAT16, Values.E4M3),
    "bf16": Recipe(Keys.BFLOAT16, Values.BFLOAT16),
}


@dataclass(frozen=True)
class Cost:
    """What a kind of prefix costs; `hbm_bytes` is what it takes there."""

    token: float
    """CPU time of one generated token, as a part of that of the question alone."""
    alone_s: float
    hbm_bytes: int | None


def main(arguments: Sequence[str]) -> int:
    """Measure everything; 1 when a target was missed."""
    parser = argparse.ArgumentParser(prog="make bench-packed", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/packed.json"))
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 8])
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    found: dict[tuple[str, int], Cost] = {}
    with engine() as fleet:
        put_all(fleet, given.tokens)
        difference = against_transformers(fleet)
        for num_readers in given.readers:
            costs = in_turn(fleet, [ALONE, "plain", *KINDS], num_readers)
            found |= {(name, num_readers): cost for name, cost in costs.items()}
    with engine(attend_in_place=True) as fleet:
        put_all(fleet, given.tokens)
        for num_readers in given.readers:
            costs = in_turn(fleet, [ALONE, "k16v8"], num_readers)
            found[IN_PLACE, num_readers] = costs["k16v8"]
    rows = [difference, *rows_of(found, given.readers)]
    return report(rows, given.out)


@contextmanager
def engine(**extra: Any) -> Iterator[Fleet]:
    """An engine whose worker reads packed prefixes."""
    with running_fleet(
        Path(tempfile.mkdtemp(prefix="cartridge-bench-")),
        prepare_demo_model(default_model_dir()),
        max_model_len=MAX_MODEL_LEN,
        arguments=["--block-size", str(BLOCK_SIZE), "--worker-cls", PACKED_WORKER],
        with_probe=False,
        **extra,
    ) as fleet:
        yield fleet


def put_all(fleet: Fleet, num_tokens: int) -> None:
    """One document in each representation; `plain` is K16/V8's numbers in float32."""
    source = fleet.put("source", document_tokens(num_tokens, seed=5))
    quantiser = Quantiser(model_dir=fleet.model_dir, store=fleet.store, say=lambda line: None)
    for name, recipe in KINDS.items():
        built = quantiser.quantise(Digest(source.digest), recipe, name=name, version="1")
        fleet.wait_for_catalog(f"{name}@1", built.digest)
    small = fleet.store.read_manifest(fleet.store.resolve("k16v8@1"))
    fleet.put_plain("plain", source.manifest, fleet.tensors(small))


def against_transformers(fleet: Fleet) -> Row:
    """Two K16/V8 Cartridges and one BF16 in one request, through the gateway."""
    quantiser = Quantiser(model_dir=fleet.model_dir, store=fleet.store, say=lambda line: None)
    parts, aliases = [], []
    for index, kind in enumerate(("k16v8", "bf16", "k16v8")):
        source = fleet.put(
            f"part-{index}-exact", document_tokens(400 + 70 * index, seed=50 + index)
        )
        built = quantiser.quantise(
            Digest(source.digest), KINDS[kind], name=f"part-{index}", version="1"
        )
        fleet.wait_for_catalog(f"part-{index}@1", built.digest)
        geometry = built.manifest.geometry
        parts.append(full_layers(fleet.tensors(built.manifest), geometry.num_layers))
        aliases.append(f"part-{index}@1")
    answer = fleet.complete(LIVE_PROMPT, aliases)
    frequencies = default_inverse_frequencies(built.manifest.rope.theta, geometry.head_dim_k)
    reference = PrefixReference(fleet.builder._model, frequencies)
    choices, logprobs = reference.logprobs(parts, LIVE_PROMPT, answer.token_ids)
    difference = max(abs(a - b) for a, b in zip(logprobs, answer.logprobs, strict=True))
    is_equal = tuple(choices) == answer.token_ids and difference <= TOLERANCE
    return Row(
        "two K16/V8 and one BF16: logprobs",
        difference,
        "nats",
        f"<= {TOLERANCE}",
        is_equal,
        f"transformers on the same tensors, {len(choices)} greedy tokens",
    )


def in_turn(fleet: Fleet, cartridges: Sequence[str], num_readers: int) -> dict[str, Cost]:
    """Each Cartridge read by so many requests at once, again and again; medians."""
    seconds: dict[str, list[float]] = {name: [] for name in cartridges}
    for name in cartridges:
        fleet.complete(LIVE_PROMPT, named(name), num_new_tokens=1)
    for _ in range(NUM_REPEATS):
        for name in cartridges:
            calls = [
                partial(
                    fleet.complete,
                    [*LIVE_PROMPT, 1000 + reader],
                    named(name),
                    num_new_tokens=NUM_NEW_TOKENS,
                )
                for reader in range(num_readers)
            ]
            before_s = cpu_s(fleet.engine.popen.pid)
            at_once(calls)
            spent_s = cpu_s(fleet.engine.popen.pid) - before_s
            seconds[name].append(spent_s / (num_readers * NUM_NEW_TOKENS))
    alone_s = statistics.median(seconds.pop(ALONE))
    return {
        name: Cost(statistics.median(values) / alone_s, alone_s, hbm_bytes(fleet, name))
        for name, values in seconds.items()
    }


def named(name: str) -> list[str]:
    """The `cartridge_ids` of a kind."""
    return [] if name == ALONE else [f"{name}@1"]


def hbm_bytes(fleet: Fleet, name: str) -> int | None:
    """What the residency map says a Cartridge alone takes in HBM; `None` = no row."""
    answer = fleet.complete(LIVE_PROMPT, [f"{name}@1"], num_new_tokens=1)
    record = residency(fleet).get(answer.headers[names.HEADER_DIGEST])
    return record.size_bytes if record is not None and record.tier is Tier.HBM else None


def rows_of(found: dict[tuple[str, int], Cost], readers: Sequence[int]) -> list[Row]:
    """Ratios to the question alone, and to BF16."""
    rows = []
    for num_readers in readers:
        for name in ("plain", *KINDS, IN_PLACE):
            cost = found[name, num_readers]
            against = f"the question alone on the same engine: {cost.alone_s * 1000:.1f} ms"
            title = f"CPU of a token/{num_readers} readers/{name}"
            rows.append(Row(title, cost.token, "of 1", None, None, against))
    first = readers[0]
    small, half, full = (found[name, first].hbm_bytes for name in ("k16v8", "bf16", "plain"))
    if small is not None and half is not None and full is not None:
        ratio = small / half
        rows += [
            Row("HBM/k16v8", ratio, "of 1", "<= 0.76", ratio <= 0.76, f"BF16, {half} bytes"),
            Row("HBM/bf16", half / full, "of 1", None, None, f"float32 slots, {full} bytes"),
        ]
    else:
        rows.append(Row("HBM/k16v8", float("nan"), "of 1", "<= 0.76", False, "no row on the map"))
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
