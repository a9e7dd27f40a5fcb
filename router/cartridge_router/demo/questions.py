"""The demo's questions: asked in every way the gateway offers, compared, and shown.

Owns the comparison and the result file. Refuses to compare anything but what came back over the
wire from the official client.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from cartridge_proto import names
from cartridge_proto.digest import sha256_digest
from cartridge_proto.stores import LocalStore
from cartridge_router.demo.stack import MODEL_NAME, DemoFailed, get_json

if TYPE_CHECKING:
    from cartridge_router.demo.engines import EngineKit

LOGPROB_TOLERANCE = 1e-4
"""Same KV, same float32 kernels; what is left is the order of sums (seen: below 3e-5)."""
MAX_TOKENS = 24
INSTRUCTION = "Answer the question from this document.\n\n{document}"
"""Default of `cartridge build --instruction`; the ordinary prompt must hold the same words."""
RECEIPT_TIMEOUT_S = 5.0


_QUESTION_KEYS = ("name", "title", "sentence", "question", "continuation", "expected")


@dataclass(frozen=True)
class Question:
    """One document and a question that it answers."""

    file: Path
    name: str
    title: str
    sentence: str
    question: str
    continuation: str
    """The same as raw text that a model goes on with, for `/v1/completions`."""
    expected: str

    @property
    def text(self) -> str:
        """The document."""
        return self.file.read_text("utf-8").strip()


def text_name(name: str) -> str:
    """Name of the raw-text Cartridge of a document."""
    return f"{name}-text"


def read_questions(folder: Path) -> list[Question]:
    """Questions of a documents folder.

    Raises:
        DemoFailed: no questions.json, or it is off.
    """
    try:
        entries = json.loads((folder / "questions.json").read_text("utf-8"))
        return [
            Question(
                file=folder / entry["document"],
                **{key: entry[key] for key in _QUESTION_KEYS},
            )
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DemoFailed(f"{folder}/questions.json: {error!r}") from error


@dataclass(frozen=True)
class Answer:
    """One answer: text, chosen tokens with logprobs, seconds to the first content, headers."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ttft_s: float
    headers: Mapping[str, str]
    num_prompt_tokens: int | None

    def difference(self, other: "Answer") -> float:
        """Largest difference of a logprob; infinite when the tokens differ."""
        if self.token_ids != other.token_ids or self.text != other.text:
            return float("inf")
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max((abs(a - b) for a, b in pairs), default=0.0)


@dataclass(frozen=True)
class Result:
    """One row of `build/demo.json`. Times in seconds; differences of natural-log probabilities."""

    question: str
    cartridge_ids: list[str]
    route: str
    answer_without: str
    answer_with: str
    contains_expected: bool
    equal: bool
    compared_with: str
    max_logprob_difference: float
    replica: str
    tier: str
    tier_cold: str
    decision: str
    decision_cold: str
    ttft_plain_s: float | None
    ttft_cold_s: float
    ttft_warm_s: float
    num_cartridge_tokens: int
    num_prompt_tokens: int | None


class Asker:
    """Asks through the official client."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._client = OpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=0, timeout=600)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        cartridge_ids: list[str] | None,
        *,
        stream: bool,
    ) -> Answer:
        """`/v1/chat/completions`, greedy."""
        arguments: dict[str, Any] = {"messages": list(messages), "logprobs": True}
        return self._ask(self._client.chat.completions, arguments, cartridge_ids, stream=stream)

    def complete(self, prompt: str, cartridge_ids: list[str] | None, *, stream: bool) -> Answer:
        """`/v1/completions`, greedy."""
        arguments: dict[str, Any] = {"prompt": prompt, "logprobs": 1}
        return self._ask(self._client.completions, arguments, cartridge_ids, stream=stream)

    def _ask(
        self,
        resource: Any,
        arguments: dict[str, Any],
        cartridge_ids: list[str] | None,
        *,
        stream: bool,
    ) -> Answer:
        extra: dict[str, Any] = {"return_token_ids": True}
        if cartridge_ids is not None:
            extra[names.FIELD_CARTRIDGE_IDS] = cartridge_ids
        started_s = time.monotonic()
        raw = resource.with_raw_response.create(
            model=MODEL_NAME,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=stream,
            extra_body=extra,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **arguments,
        )
        parsed = raw.parse()
        chunks = parsed if stream else [parsed]
        return _collect(chunks, dict(raw.headers), started_s)

    def served_tier(self, answer: Answer) -> str:
        """Where the engine really had the Cartridges, from its receipt."""
        request_id = answer.headers[names.HEADER_OWN_REQUEST_ID]
        give_up_s = time.monotonic() + RECEIPT_TIMEOUT_S
        while time.monotonic() < give_up_s:
            receipt = get_json(f"{self._gateway}/v1/cartridges/receipts/{request_id}")
            if receipt is not None:
                return "+".join(sorted({item["tier"] for item in receipt["items"]}))
            time.sleep(0.05)
        raise DemoFailed(f"no receipt of request {request_id} came")


def _collect(chunks: Iterable[Any], headers: Mapping[str, str], started_s: float) -> Answer:
    """Join the chunks of a stream, or the one body; text, ids and logprobs of either route."""
    text, token_ids, logprobs, ttft_s, num_prompt = "", [], [], None, None
    for chunk in chunks:
        if chunk.usage is not None:
            num_prompt = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            part = getattr(choice, "delta", None) or getattr(choice, "message", None)
            piece = (part.content if part is not None else choice.text) or ""
            if piece and ttft_s is None:
                ttft_s = time.monotonic() - started_s
            text += piece
            token_ids += list((choice.model_extra or {}).get("token_ids") or [])
            found = choice.logprobs
            if found is not None:
                content = getattr(found, "content", None)
                logprobs += (
                    [entry.logprob for entry in content]
                    if content is not None
                    else list(getattr(found, "token_logprobs", None) or [])
                )
    elapsed_s = time.monotonic() - started_s
    return Answer(text, tuple(token_ids), tuple(logprobs), ttft_s or elapsed_s, headers, num_prompt)


def ask_all(
    gateway: str, asked: Sequence[Question], kit: "EngineKit", say: Callable[[str], None]
) -> list[Result]:
    """Ask every question in every way."""
    asker = Asker(gateway)
    store = LocalStore(kit.store)
    say("warming both replicas up with a request that counts nowhere")
    for _ in range(4):
        asker.chat([{"role": "user", "content": "Good morning."}], None, stream=False)
    results = []
    for question in asked:
        say(f"asking: {question.question}")
        results.append(_ask_chat(asker, question, store, kit))
    say(f"asking on /v1/completions: {asked[0].question}")
    results.append(_ask_completion(asker, asked[0], store, kit))
    say("asking an ordered pair, both ways round")
    results.append(_ask_pair(asker, asked[0], asked[1], store, kit))
    return results


@dataclass(frozen=True)
class _Asked:
    """The four answers with a Cartridge."""

    cold: Answer
    warm: Answer
    whole: Answer

    def difference(self, reference: Answer) -> float:
        return max(reference.difference(a) for a in (self.cold, self.warm, self.whole))


def _ask_chat(asker: Asker, question: Question, store: LocalStore, kit: "EngineKit") -> Result:
    ids = [f"{question.name}@1"]
    turn = {"role": "user", "content": question.question}
    document = {"role": "system", "content": INSTRUCTION.format(document=question.text)}
    without = asker.chat([turn], [], stream=False)
    plain = asker.chat([document, turn], None, stream=True)
    asked = _Asked(
        cold=asker.chat([turn], ids, stream=True),
        warm=asker.chat([turn], ids, stream=True),
        whole=asker.chat([turn], ids, stream=False),
    )
    return _result(asker, question, ids, "chat", without, plain, asked, store, kit)


def _ask_completion(
    asker: Asker, question: Question, store: LocalStore, kit: "EngineKit"
) -> Result:
    ids = [f"{text_name(question.name)}@1"]
    prompt = f"\n\n{question.continuation}"
    without = asker.complete(prompt, [], stream=False)
    plain = asker.complete(question.text + prompt, None, stream=True)
    asked = _Asked(
        cold=asker.complete(prompt, ids, stream=True),
        warm=asker.complete(prompt, ids, stream=True),
        whole=asker.complete(prompt, ids, stream=False),
    )
    return _result(asker, question, ids, "completions", without, plain, asked, store, kit)


def _ask_pair(
    asker: Asker, one: Question, other: Question, store: LocalStore, kit: "EngineKit"
) -> Result:
    """No ordinary prompt equals a pair (neither document sees the other): it must equal itself."""
    ids = [f"{one.name}@1", f"{other.name}@1"]
    turn = {"role": "user", "content": one.question}
    without = asker.chat([turn], [], stream=False)
    asked = _Asked(
        cold=asker.chat([turn], ids, stream=True),
        warm=asker.chat([turn], ids, stream=True),
        whole=asker.chat([turn], ids, stream=False),
    )
    swapped = asker.chat([turn], ids[::-1], stream=False)
    if swapped.headers[names.HEADER_DIGEST] == asked.cold.headers[names.HEADER_DIGEST]:
        raise DemoFailed("a pair and the same pair in the other order have one identity")
    return _result(asker, one, ids, "chat", without, None, asked, store, kit)


def _result(
    asker: Asker,
    question: Question,
    ids: list[str],
    route: str,
    without: Answer,
    plain: Answer | None,
    asked: _Asked,
    store: LocalStore,
    kit: "EngineKit",
) -> Result:
    manifests = [store.read_manifest(store.resolve(name)) for name in ids]
    num_tokens = sum(manifest.num_tokens for manifest in manifests)
    reference = plain if plain is not None and not kit.is_simulated else asked.cold
    difference = asked.difference(reference)
    is_equal = difference <= LOGPROB_TOLERANCE
    if kit.is_simulated:
        marker = "+".join(
            store_blob_marker(store, manifest.payload[0].sha256) for manifest in manifests
        )
        is_equal = is_equal and marker in asked.cold.text
        compared_with = "marker of the bytes"
    elif plain is None:
        compared_with = "itself, asked again"
    else:
        compared_with = "ordinary prompt"
        counted = plain.num_prompt_tokens, asked.whole.num_prompt_tokens
        is_equal = is_equal and counted[0] == num_tokens + (counted[1] or 0)
    return Result(
        question=question.question,
        cartridge_ids=ids,
        route=route,
        answer_without=without.text.strip(),
        answer_with=asked.whole.text.strip(),
        contains_expected=question.expected.lower() in asked.whole.text.lower(),
        equal=is_equal,
        compared_with=compared_with,
        max_logprob_difference=difference,
        replica=asked.warm.headers[names.HEADER_REPLICA],
        tier=asker.served_tier(asked.warm),
        tier_cold=asker.served_tier(asked.cold),
        decision=asked.warm.headers[names.HEADER_DECISION],
        decision_cold=asked.cold.headers[names.HEADER_DECISION],
        ttft_plain_s=None if plain is None else plain.ttft_s,
        ttft_cold_s=asked.cold.ttft_s,
        ttft_warm_s=asked.warm.ttft_s,
        num_cartridge_tokens=num_tokens,
        num_prompt_tokens=asked.whole.num_prompt_tokens,
    )


def store_blob_marker(store: LocalStore, digest: str) -> str:
    """What a simulated replica answers with for a payload: the first 8 hex digits of its hash."""
    data = (store.root / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()
    return sha256_digest(data).removeprefix("sha256:")[:8]


def problems_of(results: Sequence[Result], kit: "EngineKit") -> list[str]:
    """Every check that did not hold."""
    problems = [
        f"{' + '.join(result.cartridge_ids)}: the answers differ ({result.compared_with}; "
        f"logprobs by {result.max_logprob_difference:.1e})"
        for result in results
        if not result.equal
    ]
    measured = [result for result in results if result.ttft_plain_s is not None]
    longest = max(measured, key=lambda result: result.num_cartridge_tokens)
    if not kit.is_simulated and longest.ttft_warm_s >= (longest.ttft_plain_s or 0):
        problems.append(
            f"{longest.cartridge_ids[0]}: warm TTFT {longest.ttft_warm_s:.3f} s is not below the "
            f"plain prompt's {longest.ttft_plain_s:.3f} s"
        )
    return problems


def write_results(results: Sequence[Result], out: Path) -> None:
    """Write the rows as JSON."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", "utf-8")


def show(console: Console, results: Sequence[Result]) -> None:
    """The table."""
    table = Table(show_lines=True, title="Questions without and with their Cartridge")
    for heading in ("question", "without", "with Cartridge"):
        table.add_column(heading, overflow="fold", ratio=3)
    table.add_column("replica, tier, decision", overflow="fold", ratio=2)
    table.add_column("TTFT plain\ncold\nwarm", justify="right", no_wrap=True)
    table.add_column("equal", justify="center", no_wrap=True)
    for result in results:
        table.add_row(
            f"{result.question}\n[dim]{' + '.join(result.cartridge_ids)}, "
            f"{result.num_cartridge_tokens} tokens, {result.route}[/]",
            f"[dim]{result.answer_without}[/]",
            f"[green]{result.answer_with}[/]" if result.contains_expected else result.answer_with,
            f"{result.replica}\n{result.tier_cold} → {result.tier}\n{result.decision}",
            "\n".join(
                "–" if value is None else f"{value:.3f} s"
                for value in (result.ttft_plain_s, result.ttft_cold_s, result.ttft_warm_s)
            ),
            "[green]yes[/]" if result.equal else "[red]NO[/]",
        )
    console.print(table)
    differences = [
        r.max_logprob_difference for r in results if r.compared_with == "ordinary prompt"
    ]
    if differences:
        console.print(
            f"Token for token equal to the ordinary prompt; logprobs within {max(differences):.1e} "
            f"(tolerance {LOGPROB_TOLERANCE:.0e})."
            if all(result.equal for result in results)
            else "Some answers differ from the ordinary prompt."
        )
