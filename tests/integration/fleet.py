"""One real vLLM engine, a real gateway and a real Redis-protocol server, and how tests ask them."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import redis
import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from cartridge_engine_ext.build import Builder, Built, Source
from cartridge_engine_ext.payload import pack_payload
from cartridge_engine_ext.reference_probe import filled_cache, full_layers, reference_probe
from cartridge_kernels.rope import relocate_keys
from cartridge_proto import names
from cartridge_proto.codec import unseal
from cartridge_proto.composition import cache_salt
from cartridge_proto.digest import parse_digest
from cartridge_proto.manifest import ConventionKind, Manifest, PositionLayout, Probe
from cartridge_proto.residency import Registration
from cartridge_proto.stores import LocalStore
from cartridge_router.demo.stack import MODEL_NAME, Process

RESIDENCY_KEY = "integration-tests"
BLOCK_SIZE = 32
"""Smallest block of vLLM's CPU backend, so that few tokens make many blocks."""
NUM_BLOCKS = 72
"""Just over one context: two long requests do not fit together and one is preempted."""
MAX_MODEL_LEN = 2048
CHUNK_TOKENS = 256
"""Most tokens of one step: a longer prompt is prefilled in chunks."""

TOLERANCE = 1e-4
"""Same KV, same float32 kernels on both sides; only the order of sums differs (seen: 3e-5)."""

NUM_NEW_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, their natural-log probabilities, the prompt's ids, headers and receipt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_token_ids: tuple[int, ...]
    headers: Mapping[str, str]
    receipt: dict[str, Any] | None
    num_prompt_tokens: int

    def difference(self, other: "Answer") -> float:
        """Largest difference of a logprob; infinite when the tokens differ."""
        if self.token_ids != other.token_ids:
            return float("inf")
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


@dataclass(frozen=True)
class Fleet:
    """Where everything is. `engine_url` is the engine without the gateway."""

    gateway_url: str
    engine_url: str
    engine: Process
    redis_url: str
    store: LocalStore
    builder: Builder
    model_dir: Path
    tokenizer: PreTrainedTokenizerBase
    client: httpx.Client
    start_engine: Callable[[], Process]
    """Start the same engine once more, after the first has ended."""
    stop_engine: Callable[[Process], None]
    """Kill an engine and all of its processes."""

    def post(
        self, path: str, body: Mapping[str, Any], *, base: str | None = None
    ) -> httpx.Response:
        """Post to the gateway (or another base URL)."""
        return self.client.post((base or self.gateway_url) + path, json=body)

    def complete(
        self,
        prompt: Sequence[int],
        cartridge_ids: Sequence[str] = (),
        *,
        num_new_tokens: int = NUM_NEW_TOKENS,
        **extra: Any,
    ) -> Answer:
        """Greedy `/v1/completions` through the gateway, by token ids."""
        request = _completion(prompt, cartridge_ids, num_new_tokens, **extra)
        response = self.post("/v1/completions", request)
        assert response.status_code == 200, response.text
        body = response.json()
        choice = body["choices"][0]
        return _answer(body, choice, choice["logprobs"]["token_logprobs"], response)

    def complete_with(self, prompt: Sequence[int], message: Mapping[str, Any]) -> Answer:
        """The same by the engine itself, with a message that no gateway of ours sends."""
        request = _completion(prompt, (), NUM_NEW_TOKENS)
        del request[names.FIELD_CARTRIDGE_IDS]
        request[names.FIELD_KV_TRANSFER_PARAMS] = {names.FIELD_CARTRIDGES: message}
        request["cache_salt"] = cache_salt(parse_digest(message["composition"]))
        response = self.post("/v1/completions", request, base=self.engine_url)
        assert response.status_code == 200, response.text
        body = response.json()
        choice = body["choices"][0]
        return _answer(body, choice, choice["logprobs"]["token_logprobs"], response)

    def stream(
        self,
        prompt: Sequence[int],
        cartridge_ids: Sequence[str],
        *,
        num_new_tokens: int,
        after_five: Callable[[], None],
    ) -> Answer:
        """The same as a stream; `after_five` is called when five chunks have come."""
        request = _completion(prompt, cartridge_ids, num_new_tokens, stream=True)
        token_ids: list[int] = []
        logprobs: list[float] = []
        num_chunks = 0
        url = f"{self.gateway_url}/v1/completions"
        with self.client.stream("POST", url, json=request) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                token_ids += choice["token_ids"]
                logprobs += choice["logprobs"]["token_logprobs"]
                num_chunks += 1
                if num_chunks == 5:
                    after_five()
        headers = dict(response.headers)
        receipt = self.receipt(headers[names.HEADER_OWN_REQUEST_ID])
        return Answer(tuple(token_ids), tuple(logprobs), (), headers, receipt, len(prompt))

    def receipt(self, request_id: str) -> dict[str, Any]:
        """The receipt of a request, as the gateway got it from Redis."""
        give_up_s = time.monotonic() + 30
        while time.monotonic() < give_up_s:
            found = self.client.get(f"{self.gateway_url}/v1/cartridges/receipts/{request_id}")
            if found.status_code == 200:
                receipt: dict[str, Any] = found.json()
                return receipt
            time.sleep(0.02)
        raise AssertionError(f"no receipt of {request_id}")

    def chat(
        self, messages: Sequence[Mapping[str, str]], cartridge_ids: Sequence[str] = ()
    ) -> Answer:
        """Greedy `/v1/chat/completions` through the gateway."""
        response = self.post(
            "/v1/chat/completions",
            {
                "model": MODEL_NAME,
                "messages": list(messages),
                "max_tokens": NUM_NEW_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": True,
                "return_token_ids": True,
                names.FIELD_CARTRIDGE_IDS: list(cartridge_ids),
            },
        )
        assert response.status_code == 200, response.text
        body = response.json()
        choice = body["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return _answer(body, choice, logprobs, response)

    def put(
        self, name: str, token_ids: Sequence[int], probe_prompt: Sequence[int] | None = None
    ) -> Built:
        """A Cartridge of these very tokens, for `/v1/completions`."""
        document = Source(
            text=json.dumps(list(token_ids)), name=name, convention=ConventionKind.DOCUMENT
        )
        built = self.builder.prefill(document, list(token_ids), list(probe_prompt or LIVE_PROMPT))
        self.wait_for_catalog(f"{name}@1", built.digest)
        return built

    def tensors(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """What an artifact's only blob holds."""
        found: dict[str, torch.Tensor] = load(
            self.store.blob_path(parse_digest(manifest.payload[0].sha256)).read_bytes()
        )
        return found

    def put_tensors(
        self, name: str, like: Manifest, tensors: Mapping[str, torch.Tensor], probe: Probe
    ) -> None:
        """A valid artifact of other tensors, in their own representation."""
        payload = pack_payload(tensors)
        self.store.put_blob(payload.data)
        self.put_manifest(
            msgspec.structs.replace(
                like,
                name=name,
                num_tokens=tensors["layers.0.k"].shape[1],
                representation=payload.representation,
                tensors=payload.tensors,
                payload=[payload.blob],
                probe=probe,
            )
        )

    def put_plain(
        self,
        name: str,
        like: Manifest,
        stored: Mapping[str, torch.Tensor],
        live: Sequence[int] = (),
    ) -> None:
        """A float32 artifact of what stored tensors mean, with a probe of its own."""
        tensors = {}
        layers = full_layers(stored, like.geometry.num_layers)
        for index, (keys, values) in enumerate(layers):
            tensors[f"layers.{index}.k"], tensors[f"layers.{index}.v"] = keys, values
        self.put_tensors(name, like, tensors, self.probe_behind(stored, like, live))

    def probe_behind(
        self, stored: Mapping[str, torch.Tensor], like: Manifest, live: Sequence[int] = ()
    ) -> Probe:
        """What transformers answers behind these tensors."""
        cache = filled_cache(full_layers(stored, like.geometry.num_layers))
        with torch.inference_mode():
            return reference_probe(self.builder._model, cache, list(live or LIVE_PROMPT))

    def put_manifest(self, manifest: Manifest) -> None:
        """Store and name a manifest whose blobs are there."""
        digest = self.store.put_manifest(manifest)
        self.store.set_alias(manifest.alias, digest)
        self.wait_for_catalog(manifest.alias, digest)

    def wait_for_catalog(self, alias: str, digest: str) -> None:
        """Wait until the gateway has seen what an alias stands for now."""
        give_up_s = time.monotonic() + 30
        while time.monotonic() < give_up_s:
            listed = self.client.get(f"{self.gateway_url}/v1/cartridges").json()["data"]
            if {"id": alias, "digest": digest}.items() <= next(
                (row for row in listed if row["id"] == alias), {}
            ).items():
                return
            time.sleep(0.02)
        raise AssertionError(f"the gateway does not list {alias} as {digest}")

    def control_address(self) -> str:
        """Where the engine's control service listens, by its lease."""
        with redis.Redis.from_url(self.redis_url) as client:
            data: Any = client.get(names.lease_key("replica-0"))
        address = unseal(data, Registration, RESIDENCY_KEY.encode()).control_address
        assert address is not None
        return address

    def metric(self, name: str) -> float:
        """Sum of one of vLLM's own metrics."""
        text = self.client.get(f"{self.engine_url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _completion(
    prompt: Sequence[int], cartridge_ids: Sequence[str], num_new_tokens: int, **extra: Any
) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": num_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        names.FIELD_CARTRIDGE_IDS: list(cartridge_ids),
        **extra,
    }


def _answer(
    body: Mapping[str, Any],
    choice: Mapping[str, Any],
    logprobs: Sequence[float],
    response: httpx.Response,
) -> Answer:
    params = body.get(names.FIELD_KV_TRANSFER_PARAMS) or {}
    prompt_ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids") or ()
    return Answer(
        token_ids=tuple(choice["token_ids"]),
        logprobs=tuple(logprobs),
        prompt_token_ids=tuple(prompt_ids),
        headers=dict(response.headers),
        receipt=params.get(names.FIELD_RECEIPT),
        num_prompt_tokens=body["usage"]["prompt_tokens"],
    )


LIVE_PROMPT = [3725, 338, 260, 1048, 282, 451, 47]
"""A few tokens that stand for a question; any do."""


def document_tokens(num_tokens: int, seed: int, ids: tuple[int, int] = (1000, 40_000)) -> list[int]:
    """Reproducible token ids without special tokens: no two documents share a beginning."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(*ids, (num_tokens,), generator=generator).tolist()


def at_once(calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Make all calls at the same time; the first that fails fails the test."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Answer]) -> Answer:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


class DenseReference:
    """Ordered compositions computed by transformers with a block-diagonal mask.

    Each segment sees itself only and stands where its layout says; live tokens see everything, and
    their positions go on from the sum of all lengths.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def logits(self, segments: Sequence[Sequence[int]], live: Sequence[int]) -> torch.Tensor:
        """Of the first generated token, [vocabulary], float32; segments in a row, as one text."""
        ids = [token for segment in segments for token in segment] + list(live)
        with torch.inference_mode():
            found: torch.Tensor = self._model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        return found

    def logprobs(
        self,
        segments: Sequence[Sequence[int]],
        live: Sequence[int],
        answer: Sequence[int],
        layout: PositionLayout = PositionLayout.SEQUENTIAL,
    ) -> tuple[list[int], list[float]]:
        """Greedy choices after each step of an answer, and the logprobs of its tokens."""
        ids = [token for segment in segments for token in segment] + [*live, *answer]
        total = sum(len(segment) for segment in segments)
        visible = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        start = 0
        for segment in segments:
            visible[start : start + len(segment), :start] = False
            start += len(segment)
        offsets = {
            PositionLayout.SHARED_LOCAL: [0] * len(segments),
            PositionLayout.SEQUENTIAL: [sum(map(len, segments[:i])) for i in range(len(segments))],
            PositionLayout.END_ALIGNED: [total - len(segment) for segment in segments],
        }[layout]
        positions = [
            offset + place
            for offset, segment in zip(offsets, segments, strict=True)
            for place in range(len(segment))
        ] + list(range(total, len(ids)))
        with torch.inference_mode():
            logits = self._model(
                torch.tensor([ids]),
                attention_mask=self._mask(visible),
                position_ids=torch.tensor([positions]),
                use_cache=False,
            ).logits[0]
        steps = torch.log_softmax(logits[total + len(live) - 1 : -1], -1)
        chosen = steps.gather(1, torch.tensor(list(answer))[:, None])[:, 0]
        return steps.argmax(-1).tolist(), chosen.tolist()

    def _mask(self, visible: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """What transformers wants: numbers to add, by kind of layer where there are several."""
        config = self._model.config
        kinds = set(getattr(config, "layer_types", None) or ())
        window = config.sliding_window if getattr(config, "sliding_window", None) else len(visible)
        seen = visible & ~torch.ones_like(visible).tril(-window)
        full, sliding = (
            torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
            for mask in (visible, seen)
        )
        return {"full_attention": full, "sliding_attention": sliding} if len(kinds) > 1 else sliding


class PrefixReference:
    """Live tokens behind given keys and values, computed by transformers in float32."""

    def __init__(self, model: Any, inverse_frequencies: torch.Tensor) -> None:
        self._model, self._frequencies = model, inverse_frequencies

    def logprobs(
        self,
        parts: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]],
        live: Sequence[int],
        answer: Sequence[int],
    ) -> tuple[list[int], list[float]]:
        """Greedy choices after each step of an answer, and the logprobs of its tokens.

        `parts` are Cartridges by layer, each placed behind the one before, with keys that bfloat16
        holds: moved ones are rounded to it again, once, as the engine does.
        """
        offsets = [
            sum(part[0][0].shape[1] for part in parts[:index]) for index in range(len(parts))
        ]
        layers = []
        for layer in range(len(parts[0])):
            keys = [
                relocate_keys(part[layer][0].bfloat16(), offset, self._frequencies).float()
                for part, offset in zip(parts, offsets, strict=True)
            ]
            values = [part[layer][1] for part in parts]
            layers.append((torch.cat(keys, 1), torch.cat(values, 1)))
        ids = torch.tensor([[*live, *answer]])
        with torch.inference_mode():
            logits = self._model(ids, past_key_values=filled_cache(layers)).logits[0]
        steps = torch.log_softmax(logits[len(live) - 1 : -1], -1)
        chosen = steps.gather(1, torch.tensor(list(answer))[:, None])[:, 0]
        return steps.argmax(-1).tolist(), chosen.tolist()
