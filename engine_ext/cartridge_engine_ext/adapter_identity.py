"""Which LoRA adapter a request is computed with: the digest of the files that vLLM was given.

Owns the digests of adapter folders, and which one each adapter was first served with. Refuses what
is no local folder, and files that changed under an adapter which vLLM may still hold as it was.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cartridge_engine_ext.errors import ConfigurationError, Refusal
from cartridge_engine_ext.identity import ADAPTER_FILES, adapter_digest
from cartridge_engine_ext.thread_priority import yield_to_serving
from cartridge_proto.digest import Digest, length_prefixed, sha256_digest
from cartridge_proto.residency import FailureReason

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

MAX_ADAPTERS = 1024
"""Adapters that are remembered, and digests; the oldest goes first."""
_DOMAIN = b"cartridge-adapter-blocks-v1"

_Signature = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RequestAdapter:
    """The adapter of one request, with its files as they were when the request came."""

    name: str
    """What the API calls it."""
    number: int
    """vLLM's own; an adapter that is loaded anew under a name gets another."""
    folder: Path
    signature: _Signature
    """Device, inode, bytes and times of each file: equal while nobody wrote to them."""

    @property
    def loaded(self) -> tuple[str, int, Path]:
        """What vLLM loads once, whatever becomes of the files."""
        return self.name, self.number, self.folder

    def bind(self, composition: Digest) -> Digest:
        """The identity of a composition's blocks under this adapter.

        vLLM's own block hashes have name and path of the adapter, but not its content. The digest
        of that may not be known when blocks are looked for: the state of the files stands for it.
        """
        parts = [composition, *map(str, self.loaded), repr(self.signature)]
        return sha256_digest(length_prefixed(_DOMAIN, [os.fsencode(part) for part in parts]))


class AdapterIdentities:
    """Digests by folder and state of its files. Called on one thread; files are read on another.

    Args:
        digest_of: digest of a folder; blocks, and raises `ConfigurationError`.
    """

    def __init__(self, digest_of: Callable[[Path], Digest] = adapter_digest) -> None:
        self._digest_of = digest_of
        self._digests: dict[tuple[Path, _Signature], Future[Digest]] = {}
        self._first: dict[tuple[str, int, Path], Digest] = {}
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix="adapter-digest", initializer=yield_to_serving
        )

    def look(self, request: "LoRARequest") -> RequestAdapter:
        """The adapter that a request names; begins to read its files unless they are known.

        Costs a look at the state of two files.

        Raises:
            Refusal: its files cannot be found, or may be replaced under its name.
        """
        name = request.lora_name
        if request.load_inplace:
            raise _unsupported(name, "it was loaded in place of another; load it under a new name")
        folder = Path(os.path.expanduser(request.lora_path)).absolute()
        try:
            signature = _signature(folder)
        except OSError as error:
            reason = str(error) if folder.is_dir() else f"{request.lora_path} is no local folder"
            raise _unsupported(name, reason) from error
        adapter = RequestAdapter(name, request.lora_int_id, folder, signature)
        self._future(adapter)
        return adapter

    def digest(self, adapter: RequestAdapter) -> Digest | None:
        """Digest of the files of an adapter; `None` while they are read.

        Raises:
            Refusal: they cannot be read, or are not those that it was first served with.
        """
        future = self._future(adapter)
        if not future.done():
            return None
        try:
            digest = future.result()
        except Exception as error:
            # Whatever it was: the scheduler's thread goes on, and the next request tries again.
            del self._digests[adapter.folder, adapter.signature]
            raise _unsupported(adapter.name, str(error)) from error
        first = self._first.setdefault(adapter.loaded, digest)
        _trim(self._first)
        if digest != first:
            raise Refusal(
                FailureReason.INCOMPATIBLE,
                f"model.adapter: {adapter.name} was first served with other files than are in "
                f"{adapter.folder} now, and the engine may hold those: load it under a new name",
            )
        return digest

    def stop(self) -> None:
        """Read no further files; one that is being read is read to its end."""
        self._executor.shutdown(wait=False)

    def _future(self, adapter: RequestAdapter) -> "Future[Digest]":
        key = adapter.folder, adapter.signature
        future = self._digests.get(key)
        if future is None:
            try:
                future = self._executor.submit(self._read, adapter)
            except RuntimeError as error:
                raise Refusal(FailureReason.NOT_READY, "the engine is stopping") from error
            self._digests[key] = future
            _trim(self._digests)
        return future

    def _read(self, adapter: RequestAdapter) -> Digest:
        """On the reading thread."""
        digest = self._digest_of(adapter.folder)
        try:
            is_same = _signature(adapter.folder) == adapter.signature
        except OSError:
            is_same = False
        if not is_same:
            raise ConfigurationError(f"{adapter.folder}: changed while it was read")
        return digest


def _signature(folder: Path) -> _Signature:
    states = [(folder / name).stat() for name in ADAPTER_FILES]
    return tuple(
        (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        for state in states
    )


def _unsupported(name: str, reason: str) -> Refusal:
    return Refusal(
        FailureReason.UNSUPPORTED, f"model.adapter: {name} cannot be identified: {reason}"
    )


def _trim(known: dict[Any, Any]) -> None:
    while len(known) > MAX_ADAPTERS:
        del known[next(iter(known))]
