"""How a blob is stored: codecs that turn a safetensors file into fewer bytes, and back.

Owns the codecs and the check that what comes out is what the manifest says. Refuses to take more
memory than the manifest names, or to believe a size that the stored bytes claim.

The format of `shuffle-zstd` is in docs/spec/manifest-v1.md. numpy and zstandard (extra `codecs`)
are imported when they are needed: `identity` needs neither.

Source: RFC 8878 (Zstandard); byte shuffle as in Masui et al., arXiv 1503.00638, section 2.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from cartridge_proto.digest import Digest, parse_digest, sha256_digest
from cartridge_proto.manifest import ITEM_BYTES, Blob, Encoding, Tensor
from cartridge_proto.safetensors_header import InvalidPayload

FRAME_BYTES: Final = 1 << 20
"""Decoded bytes of each frame but the last."""
LEVEL: Final = 1
"""zstd level; higher ones take longer and store more of keys and values (docs/benchmarks)."""

_FRAME_HEADER: Final = struct.Struct("<II")
"""Bytes of an element in this frame (1, 2 or 4), and bytes of the zstd frame that follows."""
_ITEM_SIZES: Final = frozenset(ITEM_BYTES.values())
_MAX_STORED_FRAME_BYTES: Final = FRAME_BYTES + (FRAME_BYTES >> 8) + 64
"""zstd's own bound for bytes that it cannot compress.

Source: ZSTD_COMPRESSBOUND in zstd.h.
"""


class CodecUnavailable(Exception):
    """The packages that a codec needs are not installed; the text says what to install."""


@dataclass(frozen=True)
class ItemSpan:
    """Bytes [begin, end) of a blob hold elements of `item_bytes` bytes each."""

    begin: int
    end: int
    item_bytes: int


class Codec(Protocol):
    """A reversible spelling of a blob. Thread-safe; both methods take CPU time and do no I/O."""

    @property
    def name(self) -> str:
        """As manifests and commands spell it."""
        ...

    def encode(self, data: bytes | memoryview, spans: Sequence[ItemSpan] = ()) -> bytes:
        """The stored bytes. `spans` say what the bytes are; wrong ones only cost size."""
        ...

    def decode_into(
        self, stored: bytes | memoryview, buffer: memoryview, *, num_threads: int = 1
    ) -> None:
        """Fill a buffer of exactly the decoded size.

        Takes at most two frames of memory for each thread beside the two arguments.

        Raises:
            InvalidPayload: the stored bytes decode to more, to less, or not at all. The buffer
                then holds anything.
            CodecUnavailable: a package is missing.
        """
        ...


class IdentityCodec:
    """The safetensors file itself."""

    name = "identity"

    def encode(self, data: bytes | memoryview, spans: Sequence[ItemSpan] = ()) -> bytes:
        """The same bytes."""
        return bytes(data)

    def decode_into(
        self, stored: bytes | memoryview, buffer: memoryview, *, num_threads: int = 1
    ) -> None:
        """Copy; see `Codec`."""
        if len(stored) != len(buffer):
            raise InvalidPayload(f"{len(stored)} stored bytes for a blob of {len(buffer)}")
        buffer[:] = stored


@dataclass(frozen=True)
class _Frame:
    """One frame: bytes [begin, end) of the stored bytes, and of the decoded ones."""

    item_bytes: int
    stored: tuple[int, int]
    decoded: tuple[int, int]


@dataclass(frozen=True)
class ShuffleZstdCodec:
    """Byte planes of elements, compressed frame by frame; lossless.

    The first bytes of all elements of a frame, then the second ones, and so on: sign and exponent
    of floats, which repeat, are no longer cut apart by mantissas, which do not. `level` is zstd's.
    """

    level: int = LEVEL
    name: ClassVar[str] = "shuffle-zstd"

    def encode(self, data: bytes | memoryview, spans: Sequence[ItemSpan] = ()) -> bytes:
        """See `Codec`; equal for equal arguments and one version of zstandard."""
        numpy, zstandard = _packages()
        compressor = zstandard.ZstdCompressor(level=self.level, write_content_size=True)
        view = memoryview(data)
        parts = []
        for begin in range(0, len(view), FRAME_BYTES):
            piece = view[begin : begin + FRAME_BYTES]
            item_bytes = _item_bytes(spans, begin, begin + len(piece))
            compressed = compressor.compress(_shuffled(numpy, piece, item_bytes))
            parts += [_FRAME_HEADER.pack(item_bytes, len(compressed)), compressed]
        return b"".join(parts)

    def decode_into(
        self, stored: bytes | memoryview, buffer: memoryview, *, num_threads: int = 1
    ) -> None:
        """See `Codec`; frames are independent, and the packages do their work without the GIL."""
        numpy, zstandard = _packages()
        view = memoryview(stored)

        def decode(frame: _Frame) -> None:
            begin, end = frame.decoded
            planes = _decompressed(zstandard, view[slice(*frame.stored)], end - begin)
            _unshuffle(numpy, planes, frame.item_bytes, buffer[begin:end])

        frames = list(_frames(view, len(buffer)))
        if num_threads == 1 or len(frames) < 2:
            for frame in frames:
                decode(frame)
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="cartridge-decoder") as threads:
            for _ in threads.map(decode, frames):
                pass


CODECS: Final[Mapping[str, Codec]] = {
    codec.name: codec for codec in (IdentityCodec(), ShuffleZstdCodec())
}
"""All codecs by name."""


class BlobReader(Protocol):
    """What hands out stored bytes: a store, or a tier in front of one."""

    def read_blob_into(self, digest: Digest, buffer: memoryview) -> None:
        """Fill memory of exactly the stored size with verified bytes; raises a `StoreError`."""
        ...


def item_spans(tensors: Mapping[str, Tensor]) -> list[ItemSpan]:
    """Where elements of which size are, by the table of tensors of one blob."""
    return [ItemSpan(*tensor.byte_range, ITEM_BYTES[tensor.dtype]) for tensor in tensors.values()]


def encode_blob(
    data: bytes | memoryview, codec: str, spans: Sequence[ItemSpan] = ()
) -> tuple[bytes, Blob]:
    """The stored bytes of a safetensors file, and how a manifest names them.

    Raises:
        KeyError: there is no such codec.
        CodecUnavailable: a package is missing.
    """
    stored = CODECS[codec].encode(data, spans)
    if codec != ShuffleZstdCodec.name:
        return stored, Blob(sha256=sha256_digest(stored), size_bytes=len(stored))
    encoding = Encoding(codec="shuffle-zstd", size_bytes=len(data), sha256=sha256_digest(data))
    return stored, Blob(sha256=sha256_digest(stored), size_bytes=len(stored), encoding=encoding)


def decode_blob(
    blob: Blob, stored: bytes | memoryview, buffer: memoryview, *, num_threads: int = 1
) -> None:
    """Fill memory of exactly `blob.decoded_bytes` from stored bytes, and verify that memory.

    The digest of the stored bytes is the caller's to check.

    Raises:
        InvalidPayload: what comes out is not what the manifest says.
        CodecUnavailable: a package is missing.
    """
    if len(stored) != blob.size_bytes:
        raise InvalidPayload(f"{len(stored)} stored bytes; the manifest says {blob.size_bytes}")
    if len(buffer) != blob.decoded_bytes:
        raise ValueError(f"{len(buffer)} bytes for a blob of {blob.decoded_bytes}")
    codec = blob.encoding.codec if blob.encoding else IdentityCodec.name
    CODECS[codec].decode_into(stored, buffer, num_threads=num_threads)
    found = sha256_digest(buffer)
    if found != blob.decoded_sha256:
        raise InvalidPayload(f"decoded bytes hash to {found}, not to {blob.decoded_sha256}")


def read_decoded_blob(
    reader: BlobReader, blob: Blob, buffer: memoryview, *, num_threads: int = 1
) -> None:
    """Fill memory of exactly `blob.decoded_bytes` with a blob's decoded bytes, verified.

    An encoded blob takes memory for its stored bytes until this returns.

    Raises:
        StoreError: of the reader, by its kinds.
        InvalidPayload: what was stored does not decode to what the manifest says.
        CodecUnavailable: a package is missing.
    """
    digest = parse_digest(blob.sha256)
    if not blob.encoding:
        reader.read_blob_into(digest, buffer)
        return
    stored = memoryview(bytearray(blob.size_bytes))
    reader.read_blob_into(digest, stored)
    decode_blob(blob, stored, buffer, num_threads=num_threads)


def _packages() -> tuple[Any, Any]:
    try:
        import numpy
        import zstandard
    except ModuleNotFoundError as error:
        raise CodecUnavailable(
            f"codec shuffle-zstd needs {error.name}: pip install 'cartridge-router[codecs]'"
        ) from error
    return numpy, zstandard


def _item_bytes(spans: Sequence[ItemSpan], begin: int, end: int) -> int:
    """Size of most elements in a range; 1 where nothing is known."""
    covered: dict[int, int] = {}
    for span in spans:
        shared = min(end, span.end) - max(begin, span.begin)
        if shared > 0:
            covered[span.item_bytes] = covered.get(span.item_bytes, 0) + shared
    return max(covered, key=lambda size: (covered[size], size), default=1)


def _frames(stored: memoryview, size_bytes: int) -> Iterator[_Frame]:
    """The frames of a blob of `size_bytes`, every byte of `stored` accounted for.

    Raises:
        InvalidPayload: there are more, fewer or other frames.
    """
    position = 0
    for begin in range(0, size_bytes, FRAME_BYTES):
        if len(stored) - position < _FRAME_HEADER.size:
            raise InvalidPayload(f"stored bytes end before the frame of byte {begin}")
        item_bytes, num_bytes = _FRAME_HEADER.unpack_from(stored, position)
        position += _FRAME_HEADER.size
        if item_bytes not in _ITEM_SIZES:
            raise InvalidPayload(f"frame of byte {begin}: elements of {item_bytes} bytes")
        if num_bytes > min(_MAX_STORED_FRAME_BYTES, len(stored) - position):
            raise InvalidPayload(f"frame of byte {begin}: {num_bytes} bytes are too many")
        yield _Frame(
            item_bytes,
            (position, position + num_bytes),
            (begin, min(begin + FRAME_BYTES, size_bytes)),
        )
        position += num_bytes
    if position != len(stored):
        raise InvalidPayload(f"{len(stored) - position} stored bytes after the last frame")


def _decompressed(zstandard: Any, compressed: memoryview, size_bytes: int) -> bytes:
    """The content of one zstd frame that must have exactly `size_bytes`.

    What the frame says of itself is read before anything is taken for it: its content size, and
    its window, for which a decoder takes memory.
    """
    try:
        header = zstandard.get_frame_parameters(compressed)
        is_expected = (header.content_size, header.dict_id, header.has_checksum) == (
            size_bytes,
            0,
            False,
        )
        if not is_expected or header.window_size > FRAME_BYTES:
            raise InvalidPayload(
                f"zstd frame of {header.content_size} bytes, window {header.window_size}; "
                f"{size_bytes} and at most {FRAME_BYTES} are right"
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=FRAME_BYTES)
        data: bytes = decompressor.decompress(compressed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidPayload(f"zstd: {error}") from error
    if len(data) != size_bytes:
        raise InvalidPayload(f"zstd frame of {len(data)} bytes instead of {size_bytes}")
    return data


def _shuffled(numpy: Any, data: memoryview, item_bytes: int) -> bytes:
    """Byte planes of whole elements, then the bytes of an element that is cut off."""
    if item_bytes == 1:
        return bytes(data)
    num_items = len(data) // item_bytes
    planes = numpy.empty(len(data), numpy.uint8)
    given = numpy.frombuffer(data, numpy.uint8)
    whole = num_items * item_bytes
    rows = given[:whole].reshape(num_items, item_bytes)
    for index in range(item_bytes):
        planes[index * num_items : (index + 1) * num_items] = rows[:, index]
    planes[whole:] = given[whole:]
    result: bytes = planes.tobytes()
    return result


def _unshuffle(numpy: Any, planes: bytes, item_bytes: int, buffer: memoryview) -> None:
    """The reverse of `_shuffled`; one plane at a time is five times as fast as a transposition."""
    if item_bytes == 1:
        buffer[:] = planes
        return
    num_items = len(buffer) // item_bytes
    whole = num_items * item_bytes
    given = numpy.frombuffer(planes, numpy.uint8)
    target = numpy.frombuffer(buffer, numpy.uint8)
    rows = target[:whole].reshape(num_items, item_bytes)
    for index in range(item_bytes):
        rows[:, index] = given[index * num_items : (index + 1) * num_items]
    target[whole:] = given[whole:]
