"""Makes a smaller artifact of another one: values in 8 bits, or both in 16.

Owns the new tensors, their probe and what the new manifest says of where they come from. Refuses to
change a key unless it is told to, and numbers that do not fit.
"""

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
import torch
from transformers import AutoModelForCausalLM

from cartridge_engine_ext import identity
from cartridge_engine_ext.adapted_model import adapted_model
from cartridge_engine_ext.artifact_pool import tensor_view
from cartridge_engine_ext.build import Built, creation_time
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_engine_ext.payload import pack_payload, quantised_values
from cartridge_engine_ext.reference_probe import filled_cache, full_layers, reference_probe
from cartridge_proto.codecs import read_decoded_blob
from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.manifest import Kind, Manifest, Transform
from cartridge_proto.stores import Store

TRANSFORM_NAME = "quantise"
TRANSFORM_VERSION = "1"


class Keys(StrEnum):
    """What becomes of keys."""

    EXACT = "exact"
    BFLOAT16 = "bfloat16"
    """Rounded to the nearest; bit-exact where they are that already."""


class Values(StrEnum):
    """What becomes of values."""

    E4M3 = "e4m3"
    """8 bits, with float32 scales."""
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Recipe:
    """How an artifact is made smaller.

    `by_channel`: e4m3 scales for each head and channel, else one for each head. `power_of_two`:
    scales that bfloat16 can multiply by without rounding.
    """

    keys: Keys = Keys.EXACT
    values: Values = Values.E4M3
    by_channel: bool = True
    power_of_two: bool = False

    @property
    def parameters(self) -> dict[str, object]:
        """As the manifest's transform says them."""
        found: dict[str, object] = {"keys": self.keys.value, "values": self.values.value}
        if self.values is Values.E4M3:
            found["scales"] = "head_channel" if self.by_channel else "head"
            found["power_of_two"] = self.power_of_two
        return found


class Quantiser:
    """Quantises artifacts of one model, loaded once: the probe is answered anew.

    Args:
        model_dir: Hugging Face folder.
        store: where artifacts are and go.
        say: called with a line for each step that takes a while.
        adapter: folder of the LoRA adapter that the artifacts were made with.
    """

    def __init__(
        self,
        *,
        model_dir: Path,
        store: Store,
        say: Callable[[str], None],
        adapter: Path | None = None,
    ) -> None:
        self._store = store
        self._say = say
        say(f"model: {model_dir}")
        self._identity = identity.model_identity(model_dir, name="", with_weights=True)
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._adapter_digest = None
        if adapter is not None:
            self._model = adapted_model(self._model, adapter)
            self._adapter_digest = identity.adapter_digest(adapter)

    def quantise(
        self, digest: Digest, recipe: Recipe, *, name: str, version: str, codec: str = "identity"
    ) -> Built:
        """Store and name a smaller artifact made of `digest`.

        Raises:
            ConfigurationError: the artifact is another model's or adapter's, has latents, is
                quantised already, would not become smaller, or holds numbers that do not fit.
            StoreError: of the store, by its kinds.
        """
        source = self._store.read_manifest(digest)
        self._check(source)
        self._say(f"quantise {source.alias}: {source.num_tokens} tokens")
        exact = self._read(source)
        try:
            tensors = smaller_tensors(exact, recipe)
        except ValueError as error:
            raise ConfigurationError(f"{source.alias}: {error}") from error
        if all(tensors[name].dtype == tensor.dtype for name, tensor in exact.items()):
            raise ConfigurationError(f"{source.alias}: nothing in it would become smaller")
        with torch.inference_mode():
            cache = filled_cache(full_layers(tensors, source.geometry.num_layers))
            probe = reference_probe(self._model, cache, list(source.probe.prompt_token_ids))
        payload = pack_payload(tensors, codec)
        before = source.provenance.transform
        transform = Transform(
            name=TRANSFORM_NAME,
            version=TRANSFORM_VERSION,
            parameters=recipe.parameters,
            # What was made for one query stays so.
            query_digest=before.query_digest if before else None,
            retained_positions_digest=before.retained_positions_digest if before else None,
        )
        program = f"cartridge-router quantize {importlib.metadata.version('cartridge-router')}"
        manifest = msgspec.structs.replace(
            source,
            name=name,
            version=version,
            kind=Kind.TRANSFORMED,
            representation=payload.representation,
            tensors=payload.tensors,
            payload=[payload.blob],
            provenance=msgspec.structs.replace(
                source.provenance, builder=program, transform=transform, training=None
            ),
            probe=probe,
            derived_from=digest,
            created_at=creation_time(),
        )
        self._store.put_blob(payload.data)
        stored = self._store.put_manifest(manifest)
        self._store.set_alias(manifest.alias, stored)
        return Built(stored, manifest)

    def _check(self, source: Manifest) -> None:
        ours, theirs = self._identity, source.model
        if theirs.config_digest != ours.config_digest:
            raise ConfigurationError(
                f"{source.alias}: made for a model with config digest {theirs.config_digest}; "
                f"--model has {ours.config_digest}"
            )
        if theirs.weights_digest not in {None, ours.weights_digest}:
            raise ConfigurationError(
                f"{source.alias}: made for a model with weights digest {theirs.weights_digest}; "
                f"--model has {ours.weights_digest}"
            )
        adapter = theirs.adapter.digest if theirs.adapter else None
        if adapter != self._adapter_digest:
            raise ConfigurationError(
                f"{source.alias}: adapter digest {adapter}; --adapter has {self._adapter_digest}"
            )
        if source.geometry.has_latents:
            raise ConfigurationError(f"{source.alias}: a latent model stores no values")
        if source.representation.v_scale is not None:
            raise ConfigurationError(f"{source.alias}: its values are quantised already")

    def _read(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        buffers = {}
        for blob in manifest.payload:
            buffers[blob.sha256] = bytearray(blob.decoded_bytes)
            read_decoded_blob(self._store, blob, memoryview(buffers[blob.sha256]))
        return {
            name: tensor_view(
                buffers[parse_digest(tensor.blob)], tensor.dtype, tensor.shape, *tensor.byte_range
            )
            for name, tensor in manifest.tensors.items()
        }


def smaller_tensors(tensors: Mapping[str, torch.Tensor], recipe: Recipe) -> dict[str, torch.Tensor]:
    """`layers.{i}.k` and `.v` in the recipe's types, with `.v_scale` beside e4m3 values.

    Raises:
        ValueError: a number is NaN or infinite, or becomes so, naming the tensor.
    """
    found = {}
    for name, tensor in tensors.items():
        is_key = name.endswith(".k")
        is_rounded = recipe.keys is Keys.BFLOAT16 if is_key else recipe.values is Values.BFLOAT16
        found[name] = tensor.to(torch.bfloat16) if is_rounded else tensor
        if not bool(found[name].isfinite().all()):
            raise ValueError(f"{name}: a number is NaN or infinite")
    if recipe.values is Values.E4M3:
        found = quantised_values(
            found, by_channel=recipe.by_channel, power_of_two=recipe.power_of_two
        )
    return found
