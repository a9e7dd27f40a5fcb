"""`make bench-quality`: what fewer bits of keys and values cost in answers, on the demo's model.

Owns the comparison: documents prefilled in float32, their last part read token by token behind the
first part's keys and values, stored in several formats. Refuses what no artifact can hold but to
show why: quantised keys.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from cartridge_engine_ext.demo_model import default_model_dir, prepare_demo_model
from cartridge_engine_ext.reference_probe import filled_cache
from cartridge_kernels.scaled_values import dequantise_values, quantise_values
from tests.benchmarks.rows import Row, report

DOCUMENTS = ("board-game", "loom-manual", "harbour-rules", "bread-recipe")
PREFIX_PART = 0.6
MAX_MEAN_KL = 1e-3
MIN_FRAGILITY = 10.0

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Format:
    """What becomes of keys and of values, [num_kv_heads, num_tokens, dim], and bytes of a pair."""

    name: str
    keys: Change
    values: Change
    pair_bytes: int


@dataclass(frozen=True)
class Quality:
    """Of all tokens that were read: natural logarithms."""

    divergence: torch.Tensor
    loss: torch.Tensor
    choices: torch.Tensor


def rounded(numbers: torch.Tensor) -> torch.Tensor:
    """As bfloat16 holds them."""
    return numbers.to(torch.bfloat16).to(torch.float32)


def e4m3(*, by_channel: bool = True, power_of_two: bool = False) -> Change:
    """As e4m3 with scales holds them."""

    def change(numbers: torch.Tensor) -> torch.Tensor:
        codes, scale = quantise_values(numbers, by_channel=by_channel, power_of_two=power_of_two)
        return dequantise_values(codes, scale)

    return change


FORMATS = (
    Format("BF16 (K16/V16)", rounded, rounded, 4),
    Format("K16/V8", rounded, e4m3(), 3),
    Format("K16/V8, scales by head", rounded, e4m3(by_channel=False), 3),
    Format("K16/V8, powers of two", rounded, e4m3(power_of_two=True), 3),
    Format("K8/V16", e4m3(), rounded, 3),
    Format("K8/V8", e4m3(), e4m3(), 2),
)


def main(arguments: Sequence[str]) -> int:
    """Measure all formats; 1 when one misses its target."""
    parser = argparse.ArgumentParser(prog="make bench-quality", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/bench/quality.json"))
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: the demo's")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model_dir = given.model or prepare_demo_model(default_model_dir())
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    found: dict[str, list[Quality]] = {}
    for document in DOCUMENTS:
        text = Path(f"examples/documents/{document}.txt").read_text("utf-8")
        ids = tokenizer(text)["input_ids"]
        print(f"{document}: {len(ids)} tokens", file=sys.stderr, flush=True)
        for name, quality in measure(model, ids).items():
            found.setdefault(name, []).append(quality)
    rows = rows_of(found)
    status = report(rows, given.out)
    plot(found, given.out.with_suffix(".png"))
    return status


def measure(model: Any, ids: list[int]) -> dict[str, Quality]:
    """Read the end of a document behind its beginning, in every format."""
    length = int(len(ids) * PREFIX_PART)
    live = torch.tensor([ids[length:]])
    with torch.inference_mode():
        cache = DynamicCache()
        model(torch.tensor([ids[:length]]), past_key_values=cache)
        layers = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]

        def read(stored: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
            logits: torch.Tensor = model(live, past_key_values=filled_cache(stored)).logits[0, :-1]
            return torch.log_softmax(logits, -1)

        exact = read(layers)
        found = {"float32": quality(exact, exact, live)}
        for one in FORMATS:
            stored = [(one.keys(keys), one.values(values)) for keys, values in layers]
            found[one.name] = quality(exact, read(stored), live)
    return found


def quality(exact: torch.Tensor, other: torch.Tensor, live: torch.Tensor) -> Quality:
    """Compare log-probabilities [num_tokens, vocabulary]."""
    divergence = (exact.exp() * (exact - other)).sum(-1)
    loss = -other.gather(1, live[0, 1:, None])[:, 0]
    return Quality(divergence, loss, other.argmax(-1))


def rows_of(found: dict[str, list[Quality]]) -> list[Row]:
    """The table, and what the issue asks of it."""
    exact = joined(found["float32"])
    against = f"float32, {len(exact.loss)} tokens of {len(DOCUMENTS)} documents"
    rows = []
    means = {}
    for one in FORMATS:
        got = joined(found[one.name])
        means[one.name] = mean = float(got.divergence.mean())
        is_bounded = one.name.startswith("K16/V8")
        rows += [
            Row(
                f"{one.name}: KL, mean",
                mean,
                "nats",
                f"<= {MAX_MEAN_KL}" if is_bounded else None,
                mean <= MAX_MEAN_KL if is_bounded else None,
                against,
            ),
            Row(
                f"{one.name}: KL, worst token",
                float(got.divergence.max()),
                "nats",
                None,
                None,
                against,
            ),
            Row(
                f"{one.name}: loss, more by",
                float((got.loss - exact.loss).mean()),
                "nats",
                None,
                None,
                against,
            ),
            Row(
                f"{one.name}: same best token",
                float((got.choices == exact.choices).float().mean()),
                "of tokens",
                None,
                None,
                against,
            ),
            Row(f"{one.name}: bytes", one.pair_bytes / 4, "of BF16", None, None, "BF16"),
        ]
    fragility = means["K8/V16"] / means["K16/V8"]
    rows.append(
        Row(
            "K8/V16 over K16/V8: KL, mean",
            fragility,
            "times",
            f">= {MIN_FRAGILITY:g}",
            fragility >= MIN_FRAGILITY,
            "the same bytes, spent on values",
        )
    )
    return rows


def joined(parts: Sequence[Quality]) -> Quality:
    """All documents together."""
    return Quality(
        torch.cat([part.divergence for part in parts]),
        torch.cat([part.loss for part in parts]),
        torch.cat([part.choices for part in parts]),
    )


def plot(found: dict[str, list[Quality]], path: Path) -> None:
    """Divergence of every token, by format."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [one.name for one in FORMATS]
    numbers = [joined(found[name]).divergence.clamp(min=1e-9).log10().tolist() for name in names]
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    axes.boxplot(numbers, orientation="horizontal", tick_labels=names, whis=(1, 99))
    axes.axvline(-3, color="grey", linestyle=":")
    axes.set_xlabel(
        "log10 of KL(float32 || format), each token (boxes: quartiles, lines: 1 to 99 %)"
    )
    axes.invert_yaxis()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
