"""A vLLM engine with the Cartridge extension, simulated: its state, its checks and its timing.

Owns the virtual-prefix checks, the dram tier, residency, receipts and the seconds each step takes.
Refuses HTTP and tokens: an answer is a marker made from the payload bytes that were really read.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cartridge_engine_ext.residency_publisher import ResidencyPublisher, new_epoch
from cartridge_loadtest.dram_tier import DramTier, LoadedArtifact, PayloadTooLarge
from cartridge_loadtest.openai_bodies import GenerationRequest
from cartridge_proto.claims import FalseClaim, check_claims
from cartridge_proto.codecs import read_decoded_blob
from cartridge_proto.compatibility import (
    EngineIdentity,
    adapter_mismatch,
    incompatibilities,
    unsupported,
)
from cartridge_proto.composition import (
    CompositionMessage,
    InvalidComposition,
    OnMiss,
    cache_salt,
    claimed_request_id,
    claimed_scope,
    decode_message,
)
from cartridge_proto.digest import Digest, parse_digest
from cartridge_proto.residency import (
    FailureReason,
    Receipt,
    ReceiptItem,
    ReceiptStatus,
    ReplicaId,
    Tier,
)
from cartridge_proto.stores import CorruptStore, NotInStore, Store, StoreError, open_store

ENGINE_VERSION = "simulated"
BLOCK_SIZE_TOKENS = 16
FLUSH_TIMEOUT_S = 1.0
MAX_DETAIL_LENGTH = 2048
KV_CAPACITY_CONTEXTS = 16
"""The simulated KV cache holds this many requests of the longest context."""
PLAIN_MARKER = "simulated answer without cartridges"


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a simulated engine serves and how long its steps take."""

    model: str
    replica: ReplicaId
    store: Path | str | None = None
    """Folder or URL; `None` simulates a vLLM without the extension, which ignores Cartridges."""
    redis_url: str | None = None
    """`None`: nothing is published."""
    residency_key: bytes | None = None
    identity: EngineIdentity | None = None
    """`None`: taken from the first readable manifest of the store, once there is one."""
    control_address: str | None = None
    advertise_url: str | None = None
    """Where gateways reach it, told in its lease; `None`: not told."""
    ttft_s: float = 0.02
    prefill_s_per_token: float = 0.0005
    load_s: float = 0.02
    """Extra seconds for each artifact that was not in the dram tier."""
    itl_s: float = 0.002
    num_tokens: int = 16
    """Pieces of an answer at most."""
    dram_bytes: int = 1 << 30
    max_model_len: int = 8192
    max_num_seqs: int = 256
    """Requests that run at once; the others wait."""
    lease_s: float = 6.0

    @property
    def context_tokens(self) -> int:
        """The context limit: a given identity's own, else `max_model_len`."""
        return self.max_model_len if self.identity is None else self.identity.max_model_len


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What an engine made: the text, and the receipt if Cartridges were used."""

    text: str
    receipt: Receipt | None


class VirtualPrefixFailed(Exception):
    """The request must fail closed; `receipt` says why."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(f"{receipt.reason}: {receipt.detail}")
        self.receipt = receipt


class _Refused(Exception):
    """A reason to fail a virtual prefix, before it has become a receipt."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class SimulatedEngine:
    """One engine boot, used from one event loop. `start` before use; `stop` once."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.epoch = new_epoch()
        self.identity = settings.identity
        self.num_running = 0
        self.num_waiting = 0
        self.num_running_tokens = 0
        self.num_aborted = 0
        self.tier = DramTier(capacity_bytes=settings.dram_bytes, fetch=self._fetch, notes=self)
        self._store = open_store(str(settings.store)) if settings.store is not None else None
        self._publisher: ResidencyPublisher | None = None
        self._slots = asyncio.Semaphore(settings.max_num_seqs)
        self._registering = asyncio.Lock()
        self._is_registered = False

    async def start(self) -> None:
        """Find the identity and join the fleet, if the store already tells who this is."""
        await self.register()

    async def stop(self) -> None:
        """End all loads and leave the fleet."""
        await self.tier.close()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.stop)

    async def register(self) -> None:
        """Take an identity and begin to publish; does nothing once that is done."""
        if self._is_registered or self._store is None:
            return
        async with self._registering:
            if self._is_registered:
                return
            if self.identity is None:
                self.identity = await asyncio.to_thread(
                    derive_identity, self._store, self.settings.context_tokens
                )
            if self.identity is None:
                return
            self._is_registered = True
            if self.settings.redis_url is not None:
                self._publisher = ResidencyPublisher(
                    redis_url=self.settings.redis_url,
                    replica=self.settings.replica,
                    epoch=self.epoch,
                    key=self.settings.residency_key,
                    engine=self.identity,
                    engine_version=ENGINE_VERSION,
                    url=self.settings.advertise_url,
                    lease_s=self.settings.lease_s,
                )
                self._publisher.start(self.settings.control_address)

    # --- residency: what `DramTier` tells ------------------------------------------------------
    def put(self, digest: Digest, size_bytes: int) -> None:
        """Publish that an artifact is in dram."""
        if self._publisher is not None:
            self._publisher.put(digest, Tier.DRAM, size_bytes)

    async def withdraw(self, digest: Digest) -> None:
        """Publish that an artifact goes; returns when it is written, or Redis did not answer."""
        if self._publisher is not None:
            self._publisher.withdraw(digest)
            await asyncio.to_thread(self._publisher.flush, FLUSH_TIMEOUT_S)

    # --- one request --------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def admit(self, request: GenerationRequest) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        self.num_running_tokens += request.num_live_tokens
        try:
            yield
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1
            self.num_running_tokens -= request.num_live_tokens
            self._slots.release()

    @property
    def kv_cache_usage(self) -> float:
        """Share of the simulated KV cache in use, 0 to 1."""
        capacity = KV_CAPACITY_CONTEXTS * self.settings.context_tokens
        return min(1.0, self.num_running_tokens / capacity)

    async def prefill(self, request: GenerationRequest) -> Generation:
        """Everything before the first token, in simulated time. Call it within `admit`.

        Raises:
            VirtualPrefixFailed: the Cartridges cannot be used; its receipt is published.
        """
        generation = Generation(text=PLAIN_MARKER, receipt=None)
        if request.cartridges is not None and self._store is not None:
            generation = await self._load_virtual_prefix(request)
        live_s = request.num_live_tokens * self.settings.prefill_s_per_token
        await asyncio.sleep(self.settings.ttft_s + live_s)
        return generation

    async def _load_virtual_prefix(self, request: GenerationRequest) -> Generation:
        started_s = time.monotonic()
        message: CompositionMessage | None = None
        items: list[ReceiptItem] = []
        artifacts: list[LoadedArtifact] = []
        refusal: _Refused | None = None
        try:
            message = _check_message(request, self.settings.context_tokens)
            # Before the first load: a receipt says where artifacts were when the request came.
            items = [
                ReceiptItem(digest=item.digest, tier=self._tier_of(parse_digest(item.digest)))
                for item in message.visible_items
            ]
            artifacts = await self._load_items(message)
            _check_artifacts(message, artifacts)
        except _Refused as error:
            refusal = error
        receipt = Receipt(
            replica=self.settings.replica,
            epoch=self.epoch,
            request_id=claimed_request_id(request.cartridges),
            scope=claimed_scope(request.cartridges),
            status=ReceiptStatus.SERVED if refusal is None else ReceiptStatus.FAILED,
            reason=None if refusal is None else refusal.reason,
            detail="" if refusal is None else str(refusal)[:MAX_DETAIL_LENGTH],
            items=items,
            num_virtual_tokens=message.num_tokens if message is not None else 0,
            num_reused_tokens=0,
            num_loads=1 if refusal is None else 0,
            loaded_bytes=sum(a.size_bytes for a in artifacts) if refusal is None else 0,
            load_s=time.monotonic() - started_s,
        )
        if self._publisher is not None:
            self._publisher.publish_receipt(receipt)
        if refusal is not None:
            raise VirtualPrefixFailed(receipt) from refusal
        marks = [artifact.payload_digest.removeprefix("sha256:")[:8] for artifact in artifacts]
        return Generation(text=f"simulated answer from {'+'.join(marks)}", receipt=receipt)

    def _tier_of(self, digest: Digest) -> Tier:
        return Tier.DRAM if self.tier.is_resident(digest) else Tier.REMOTE

    async def _load_items(self, message: CompositionMessage) -> list[LoadedArtifact]:
        """All artifacts in order, one after the other, before the deadline."""
        try:
            async with asyncio.timeout(message.deadline_ms / 1000):
                return [
                    await self.tier.load(parse_digest(item.digest))
                    for item in message.visible_items
                ]
        except TimeoutError as error:
            raise _Refused(
                FailureReason.DEADLINE, f"not loaded within {message.deadline_ms} ms"
            ) from error
        except PayloadTooLarge as error:
            raise _Refused(FailureReason.CAPACITY, str(error)) from error
        except NotInStore as error:
            raise _Refused(FailureReason.UNKNOWN_ARTIFACT, str(error)) from error
        except CorruptStore as error:
            raise _Refused(FailureReason.CORRUPT_ARTIFACT, str(error)) from error
        except StoreError as error:
            raise _Refused(FailureReason.INTERNAL, str(error)) from error

    async def _fetch(self, digest: Digest) -> LoadedArtifact:
        """Read and verify an artifact, in a thread, and refuse one that means nothing here."""
        if self._store is None:
            raise _Refused(FailureReason.NOT_READY, "no store")
        manifest = await asyncio.to_thread(self._store.read_manifest, digest)
        await self.register()
        if self.identity is None:
            raise _Refused(FailureReason.NOT_READY, "the engine does not know its model yet")
        adapter = adapter_mismatch(manifest, None)
        for reason, mismatches in (
            (FailureReason.UNSUPPORTED, unsupported(manifest)),
            (FailureReason.INCOMPATIBLE, incompatibilities(manifest, self.identity)),
            (FailureReason.INCOMPATIBLE, [] if adapter is None else [adapter]),
        ):
            if mismatches:
                raise _Refused(reason, "; ".join(str(mismatch) for mismatch in mismatches))
        artifact = await asyncio.to_thread(_read_verified, self._store, digest)
        await asyncio.sleep(self.settings.load_s)
        return artifact


def derive_identity(store: Store, max_model_len: int) -> EngineIdentity | None:
    """Who an engine must be to serve this store: the model of its first readable manifest.

    The chat template is that of the first manifest of the same model that has one. Blocks; `None`
    when no manifest can be read.
    """
    first = None
    template: str | None = None
    for digest in store.manifest_digests():
        with contextlib.suppress(StoreError):
            manifest = store.read_manifest(digest)
            first = manifest if first is None else first
            if manifest.model == first.model:
                template = template or manifest.prompt_convention.chat_template_digest
    if first is None:
        return None
    return EngineIdentity(
        model=msgspec.structs.replace(first.model, adapter=None),
        geometry=first.geometry,
        rope=first.rope,
        chat_template_digest=template,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE_TOKENS,
    )


def _read_verified(store: Store, digest: Digest) -> LoadedArtifact:
    """Verify an artifact, then hash the bytes this engine keeps: all blobs in manifest order."""
    manifest = store.verify(digest)
    hasher = hashlib.sha256()
    for blob in manifest.payload:
        buffer = memoryview(bytearray(blob.decoded_bytes))
        read_decoded_blob(store, blob, buffer)
        hasher.update(buffer)
    return LoadedArtifact(
        manifest=manifest,
        payload_digest=Digest(f"sha256:{hasher.hexdigest()}"),
        size_bytes=manifest.decoded_bytes,
    )


def _check_message(request: GenerationRequest, max_model_len: int) -> CompositionMessage:
    """The checks that need no artifact."""
    try:
        message = decode_message(request.cartridges)
    except InvalidComposition as error:
        raise _Refused(FailureReason.INVALID_MESSAGE, str(error)) from error
    if request.cache_salt != cache_salt(Digest(message.composition)):
        raise _Refused(FailureReason.INVALID_MESSAGE, "cache_salt is not the composition identity")
    found = [
        what
        for what, is_present in (
            ("prompt_logprobs and echo", request.reads_prompt_logits),
            ("prompts without a token of their own", request.num_live_tokens == 0),
            (f"on_miss {message.on_miss}", message.on_miss is not OnMiss.FAIL),
        )
        if is_present
    ]
    if found:
        raise _Refused(
            FailureReason.UNSUPPORTED, f"not supported with Cartridges: {', '.join(found)}"
        )
    # One position must stay free for the first generated token.
    if message.num_tokens + request.num_live_tokens >= max_model_len:
        raise _Refused(
            FailureReason.CONTEXT_LENGTH,
            f"{message.num_tokens} Cartridge tokens and {request.num_live_tokens} prompt tokens "
            f"leave no room in a context of {max_model_len}",
        )
    return message


def _check_artifacts(message: CompositionMessage, artifacts: list[LoadedArtifact]) -> None:
    """Check what the gateway claimed against the verified manifests."""
    manifests = {
        item.digest: artifact.manifest
        for item, artifact in zip(message.visible_items, artifacts, strict=True)
    }
    try:
        check_claims(message, manifests)
    except FalseClaim as claim:
        raise _Refused(claim.reason, claim.detail) from claim
