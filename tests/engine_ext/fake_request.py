"""A plain stand-in for vLLM's `Request`, and the messages that a gateway would send.

Owns the attributes that the scheduler half reads and writes. Refuses to import vllm: that a real
`Request` has them too is tested once, in `test_vllm_request.py`.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cartridge_proto.composition import (
    CompositionItem,
    CompositionMessage,
    OnMiss,
    cache_salt,
    composition_digest,
    layout_offsets,
    model_fingerprint,
)
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest, PositionLayout
from cartridge_proto.names import FIELD_CARTRIDGES

BLOCK_SIZE = 16
LIVE = [7, 8, 9]

_numbers = itertools.count()


@dataclass
class FakeSampling:
    """The one sampling parameter that matters to a virtual prefix."""

    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class FakeLora:
    """vLLM's `LoRARequest`, as far as it says which files were loaded."""

    lora_name: str
    lora_path: str
    lora_int_id: int = 1
    load_inplace: bool = False


@dataclass
class FakeRequest:
    """One request as the scheduler sees it; block hashes chain over salt and tokens."""

    kv_transfer_params: dict[str, Any] | None
    cache_salt: str | None = None
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(LIVE))
    sampling_params: FakeSampling | None = field(default_factory=FakeSampling)
    prompt_embeds: object | None = None
    mm_features: list[object] = field(default_factory=list)
    lora_request: FakeLora | None = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    trace_headers: dict[str, str] | None = None
    max_tokens: int = 1000
    finished_reason: str | None = "stop"
    request_id: str = field(default_factory=lambda: f"cmpl-{next(_numbers)}")
    num_prompt_tokens: int = field(init=False)
    block_hashes: list[bytes] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids or [])
        self._all_token_ids = list(self.prompt_token_ids or [])
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Append the hash of each full block that has none yet."""
        for start in range(
            len(self.block_hashes) * BLOCK_SIZE,
            len(self._all_token_ids) - BLOCK_SIZE + 1,
            BLOCK_SIZE,
        ):
            parent = self.block_hashes[-1] if start else (self.cache_salt or "").encode()
            tokens = self._all_token_ids[start : start + BLOCK_SIZE]
            self.block_hashes.append(hashlib.sha256(parent + repr(tokens).encode()).digest())

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output."""
        return list(self._all_token_ids)

    def get_finished_reason(self) -> str | None:
        """How it ended."""
        return self.finished_reason


def message_of(
    artifacts: Sequence[tuple[Digest, Manifest]],
    *,
    layout: PositionLayout = PositionLayout.SEQUENTIAL,
    scope: str = "public",
    lengths: Sequence[int] | None = None,
    visibility: Sequence[bool] | None = None,
    on_miss: OnMiss = OnMiss.FAIL,
    deadline_ms: int = 60_000,
    request_id: str = "req-1",
) -> dict[str, Any]:
    """`kv_transfer_params.cartridges`, as a gateway that believes these arguments makes it."""
    lengths = lengths or [manifest.num_tokens for _, manifest in artifacts]
    seen = visibility or [True] * len(lengths)
    offsets = layout_offsets(
        layout, [length if is_seen else 0 for length, is_seen in zip(lengths, seen, strict=True)]
    )
    items = [
        CompositionItem(digest=digest, num_tokens=length, offset=offset)
        for (digest, _), length, offset in zip(artifacts, lengths, offsets, strict=True)
    ]
    visible = list(seen)
    composition = composition_digest(
        scope=scope,
        layout=layout,
        items=items,
        visibility=visible,
        fingerprint=model_fingerprint(artifacts[0][1].model),
    )
    message = CompositionMessage(
        v=1,
        request_id=request_id,
        composition=composition,
        scope=scope,
        layout=layout,
        items=items,
        visibility=visible,
        deadline_ms=deadline_ms,
        on_miss=on_miss,
    )
    builtins: dict[str, Any] = msgspec.to_builtins(message)
    return builtins


def request_with(message: dict[str, Any], **attributes: Any) -> FakeRequest:
    """A request that carries a message and the salt that goes with it."""
    attributes.setdefault("cache_salt", cache_salt(Digest(message["composition"])))
    return FakeRequest({FIELD_CARTRIDGES: message}, **attributes)
