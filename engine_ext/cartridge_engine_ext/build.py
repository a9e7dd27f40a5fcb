"""Builds a Cartridge from a text: one ordinary prefill, stored exactly or with values in 8 bits.

Owns the prefill with transformers and the manifest. Refuses texts longer than the model's
context, templates without a system turn of their own and numbers that are none.
"""

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from cartridge_engine_ext import identity
from cartridge_engine_ext.adapted_model import adapted_model
from cartridge_engine_ext.chat_template import renderer_of, system_turn, tokenize_verbatim
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.latents import stored_latents
from cartridge_engine_ext.payload import pack_payload, quantised_values
from cartridge_engine_ext.prefill_manifest import prefill_manifest
from cartridge_engine_ext.reference_probe import filled_cache, full_layers, reference_probe
from cartridge_proto.codecs import CODECS
from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import (
    DEFAULT_INSTRUCTION,
    Access,
    Adapter,
    Card,
    ConventionKind,
    Manifest,
    ManifestDigest,
    PromptConvention,
)
from cartridge_proto.stores import Store

PROBE_QUESTION = "What is this about?"
VALUE_FORMATS = ("full", "e4m3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Source:
    """A text and how its Cartridge is called."""

    text: str
    name: str
    version: str = "1"
    title: str | None = None
    sentence: str = ""
    convention: ConventionKind = ConventionKind.SYSTEM_TURN
    instruction: str = DEFAULT_INSTRUCTION
    owner: str = "public"
    readers: tuple[str, ...] = ("*",)
    aliases: tuple[str, ...] = ()
    """Other names, on its card."""
    keeps_text: bool = True
    """Whether the text lies in the store too, for selection."""


@dataclass(frozen=True)
class Built:
    """What was stored."""

    digest: ManifestDigest
    manifest: Manifest


class Builder:
    """Prefills texts with one model, loaded once.

    Args:
        model_dir: Hugging Face folder.
        store: where the artifacts go.
        model_name: the name that people use for the model.
        dtype: element type of the model and of the stored keys and values.
        with_weights_digest: hash the weights, so that engines match by weights.
        say: called with a line for each step that takes a while.
        codec: how blobs are stored; a name of `cartridge_proto.codecs.CODECS`.
        adapter: folder of a LoRA adapter that the texts are prefilled with.
        adapter_name: what people call it; default: the folder's name.
        values: `full`, or `e4m3` with a scale for each layer, head and channel. The probe is then
            computed with what the values have become.
    """

    def __init__(
        self,
        *,
        model_dir: Path,
        store: Store,
        model_name: str,
        dtype: torch.dtype,
        with_weights_digest: bool,
        say: Callable[[str], None],
        codec: str = "identity",
        values: str = "full",
        adapter: Path | None = None,
        adapter_name: str | None = None,
    ) -> None:
        if codec not in CODECS:
            raise ConfigurationError(f"codec: {codec!r} is none of {', '.join(CODECS)}")
        if values not in VALUE_FORMATS:
            raise ConfigurationError(f"values: {values!r} is none of {', '.join(VALUE_FORMATS)}")
        self._codec, self._has_small_values = codec, values == "e4m3"
        self._model_dir = model_dir
        self._store = store
        self._say = say
        say(f"model: {model_dir}")
        self._identity = identity.model_identity(
            model_dir, name=model_name, with_weights=with_weights_digest
        )
        self._geometry = identity.geometry(model_dir)
        if self._has_small_values and self._geometry.has_latents:
            raise ConfigurationError(f"values: {values}: a latent model stores no values")
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()
        if adapter is not None:
            say(f"adapter: {adapter}")
            self._model = adapted_model(self._model, adapter)
            self._identity = msgspec.structs.replace(
                self._identity,
                adapter=Adapter(
                    name=adapter_name or adapter.resolve().name,
                    digest=identity.adapter_digest(adapter),
                ),
            )

    def build(self, source: Source) -> Built:
        """Prefill, store and name one text.

        Raises:
            ConfigurationError: the text does not fit, or has no place in the model's chat.
        """
        return self.prefill(source, *self._prompts(source))

    def prefill(self, source: Source, prefix: list[int], live: list[int]) -> Built:
        """Prefill token ids that stand for `source`, and store and name the result.

        Args:
            source: what the ids stand for; its text is only hashed.
            prefix: the Cartridge's tokens.
            live: the probe's live prompt.

        Raises:
            ConfigurationError: there are no ids, they do not fit the context, or the model computes
                values that are no numbers.
        """
        limit = int(self._model.config.max_position_embeddings)
        if not prefix:
            raise ConfigurationError(f"{source.name}: the text has no tokens")
        if len(prefix) >= limit:
            raise ConfigurationError(f"{source.name}: {len(prefix)} tokens; the context is {limit}")
        self._say(f"prefill {source.name}: {len(prefix)} tokens")
        with torch.inference_mode():
            # Made without the model's configuration: every layer then keeps every position, also
            # those that a window has left behind.
            cache = DynamicCache()
            self._model(torch.tensor([prefix]), past_key_values=cache, use_cache=True)
            named = self._tensors(cache)
            if self._has_small_values:
                try:
                    named = quantised_values(named)
                except ValueError as error:
                    raise ConfigurationError(f"{source.name}: {error}") from error
                # The probe is answered from what is stored.
                layers = full_layers(named, self._geometry.num_layers, self._model.dtype)
                cache = filled_cache(layers)
            probe = reference_probe(self._model, cache, live)
        payload = pack_payload(named, self._codec)
        manifest = prefill_manifest(
            name=source.name,
            version=source.version,
            model=self._identity,
            geometry=self._geometry,
            rope=identity.rope(self._model_dir),
            payload=payload,
            source_digest=sha256_digest(source.text.encode()),
            builder=f"cartridge-router prefill, transformers {transformers.__version__}",
            access=Access(owner=source.owner, readers=list(source.readers)),
            card=Card(
                title=source.title or source.name,
                aliases=list(source.aliases),
                sentence=source.sentence,
                language="en",
            ),
            prompt_convention=self._convention(source, prefix),
            probe=probe,
            created_at=creation_time(),
        )
        if source.keeps_text:
            self._store.put_blob(source.text.encode())
        self._store.put_blob(payload.data)
        digest = self._store.put_manifest(manifest)
        self._store.set_alias(manifest.alias, digest)
        return Built(digest, manifest)

    def _tensors(self, cache: DynamicCache) -> dict[str, torch.Tensor]:
        """Keys and values, or latents, by their names in an artifact."""
        layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        if self._geometry.has_latents:
            latents = [stored_latents(self._model.config, *layer) for layer in layers]
            return {f"layers.{index}.k": latent for index, latent in enumerate(latents)}
        return {
            f"layers.{index}.{part}": tensor.contiguous().clone()
            for index, layer in enumerate(layers)
            for part, tensor in zip("kv", layer, strict=True)
        }

    def _prompts(self, source: Source) -> tuple[list[int], list[int]]:
        """Token ids of the prefix and of the probe's live prompt."""
        verbatim = tokenize_verbatim(self._tokenizer)
        if source.convention is ConventionKind.DOCUMENT:
            prefix = list(self._tokenizer(source.text)["input_ids"])
            return prefix, verbatim(f"\n\n{PROBE_QUESTION}")
        render = renderer_of(self._tokenizer)
        content = source.instruction.replace("{document}", source.text)
        head = system_turn(render, content)
        turns = [
            {"role": "system", "content": content},
            {"role": "user", "content": PROBE_QUESTION},
        ]
        return verbatim(head), verbatim(render(None, turns, True, {})[len(head) :])

    def _convention(self, source: Source, prefix: list[int]) -> PromptConvention:
        is_turn = source.convention is ConventionKind.SYSTEM_TURN
        return PromptConvention(
            kind=source.convention,
            has_bos=bool(prefix) and prefix[0] == self._tokenizer.bos_token_id,
            chat_template_digest=identity.chat_template_digest(self._model_dir)
            if is_turn
            else None,
        )


def creation_time() -> str:
    """UTC time to the second; SOURCE_DATE_EPOCH wins, so that a build can be repeated."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    moment = (
        datetime.datetime.fromtimestamp(int(epoch), datetime.UTC)
        if epoch
        else datetime.datetime.now(datetime.UTC)
    )
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
