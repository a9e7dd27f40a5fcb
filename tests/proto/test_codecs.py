"""Codecs: lossless for any bytes, and strict with stored bytes that are wrong."""

import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.codecs import (
    CODECS,
    FRAME_BYTES,
    CodecUnavailable,
    ItemSpan,
    decode_blob,
    encode_blob,
    item_spans,
)
from cartridge_proto.digest import sha256_digest
from cartridge_proto.manifest import Blob, Encoding
from cartridge_proto.safetensors_header import InvalidPayload, check_blob
from tests.proto.encoded_artifact import encoded_sample
from tests.proto.sample_artifact import sample_artifact

SHUFFLE = CODECS["shuffle-zstd"]
DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


def decoded(
    stored: bytes, size_bytes: int, *, codec: str = "shuffle-zstd", threads: int = 1
) -> bytes:
    """What a codec makes of stored bytes, for memory of a size."""
    buffer = bytearray(size_bytes)
    CODECS[codec].decode_into(stored, memoryview(buffer), num_threads=threads)
    return bytes(buffer)


def floats(num_bytes: int) -> bytes:
    """Bytes of random float32 numbers."""
    numbers = numpy.random.default_rng(0).standard_normal(num_bytes // 4 + 1)
    return numbers.astype(numpy.float32).tobytes()[:num_bytes]


def frame(
    content: bytes, item_bytes: int = 1, *, has_checksum: bool = False, has_size: bool = True
) -> bytes:
    """One stored frame with any header."""
    compressor = zstandard.ZstdCompressor(write_checksum=has_checksum, write_content_size=has_size)
    compressed = compressor.compress(content)
    return struct.pack("<II", item_bytes, len(compressed)) + compressed


# --- lossless ------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", CODECS)
@given(data=st.binary(max_size=300), item_bytes=st.sampled_from([1, 2, 4]), begin=st.integers(0, 9))
def test_any_bytes_come_back(codec: str, data: bytes, item_bytes: int, begin: int) -> None:
    """Every length, also one that cuts an element, with right and wrong words on what it holds."""
    span = ItemSpan(begin, begin + len(data), item_bytes)
    assert decoded(CODECS[codec].encode(data, [span]), len(data), codec=codec) == data


@pytest.mark.parametrize("item_bytes", sorted(set(DTYPES.values())))
@pytest.mark.parametrize("num_bytes", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, 2 * FRAME_BYTES + 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_around_the_edges_of_frames_come_back(
    item_bytes: int, num_bytes: int, threads: int
) -> None:
    """None, one and several frames, whole ones or not, by one thread or more."""
    data = floats(num_bytes)
    stored = SHUFFLE.encode(data, [ItemSpan(0, num_bytes, item_bytes)])
    assert decoded(stored, num_bytes, threads=threads) == data


def test_shuffled_floats_take_fewer_bytes_than_plain_zstd() -> None:
    """The planes of exponents are what is gained; bytes that are noise cost under 1 % more."""
    data = floats(FRAME_BYTES)
    shuffled = len(SHUFFLE.encode(data, [ItemSpan(0, len(data), 4)]))
    assert shuffled < 0.9 * len(data)
    assert shuffled < len(SHUFFLE.encode(data))
    noise = numpy.random.default_rng(0).bytes(FRAME_BYTES)
    assert len(SHUFFLE.encode(noise)) < 1.01 * len(noise)


def test_a_blob_comes_back_as_its_manifest_says() -> None:
    """An encoded sample decodes to the safetensors file that the strict reader accepts."""
    manifest, stored = encoded_sample()
    [blob] = manifest.payload
    buffer = memoryview(bytearray(blob.decoded_bytes))
    decode_blob(blob, stored, buffer)
    check_blob(manifest, blob.sha256, buffer)
    assert buffer == sample_artifact()[1]


def test_identity_has_no_encoding() -> None:
    """A blob that is stored as it is is described as before codecs existed."""
    manifest, data = sample_artifact()
    stored, blob = encode_blob(data, "identity", item_spans(manifest.tensors))
    assert (stored, blob) == (data, manifest.payload[0])
    assert msgspec.to_builtins(blob).keys() == {"sha256", "size_bytes"}


# --- strict --------------------------------------------------------------------------------------
@pytest.mark.parametrize("cut", [0, 1, 7, 8, 20, -1])
def test_truncated_bytes_are_refused(cut: int) -> None:
    """An end anywhere is noticed before memory is used."""
    stored = SHUFFLE.encode(floats(100))
    with pytest.raises(InvalidPayload):
        decoded(stored[:cut], 100)


def test_trailing_bytes_are_refused() -> None:
    """Nothing may follow the last frame, outside it or in it."""
    data = floats(100)
    stored = SHUFFLE.encode(data)
    with pytest.raises(InvalidPayload, match="1 stored bytes after the last frame"):
        decoded(stored + b"\0", 100)
    longer = struct.pack("<II", 1, len(stored) - 8 + 1) + stored[8:] + b"\0"
    with pytest.raises(InvalidPayload, match="zstd"):
        decoded(longer, 100)


@pytest.mark.parametrize("size_bytes", [0, 99, 101, FRAME_BYTES + 100])
def test_another_size_than_the_real_one_is_refused(size_bytes: int) -> None:
    """The manifest's size decides how many frames there are and how long each is."""
    with pytest.raises(InvalidPayload):
        decoded(SHUFFLE.encode(floats(100)), size_bytes)


def test_frames_of_other_sizes_are_refused() -> None:
    """Frames cannot be cut otherwise, even if their sum is right."""
    data = floats(FRAME_BYTES + 100)
    pieces = frame(data[:100]) + frame(data[100:])
    with pytest.raises(InvalidPayload, match="zstd frame of 100 bytes"):
        decoded(pieces, len(data))


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (frame(b"x" * 100, item_bytes=3), "elements of 3 bytes"),
        (frame(b"x" * 100, item_bytes=0), "elements of 0 bytes"),
        (frame(b"x" * 100, has_checksum=True), "zstd frame of 100 bytes"),
        (frame(b"x" * 100, has_size=False), "zstd frame of 18446744073709551615 bytes"),
        (struct.pack("<II", 1, 1 << 31) + b"x" * 20, "2147483648 bytes are too many"),
        (struct.pack("<II", 1, 20) + b"x" * 20, "zstd"),
        (struct.pack("<II", 1, 0), "zstd"),
    ],
    ids=["three", "none", "checksum", "unknown", "length", "no_zstd", "empty"],
)
def test_frames_that_no_encoder_writes_are_refused(stored: bytes, text: str) -> None:
    """Element sizes, checksums, unknown sizes, lengths and other bytes."""
    with pytest.raises(InvalidPayload, match=text):
        decoded(stored, 100)


DECODE_AND_TELL_MEMORY = """
import re, resource, sys
from cartridge_proto.codecs import CODECS
from cartridge_proto.safetensors_header import InvalidPayload

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

codec = CODECS["shuffle-zstd"]
codec.decode_into(codec.encode(b"warm"), memoryview(bytearray(4)))
stored, size_bytes = open(sys.argv[1], "rb").read(), int(sys.argv[2])
buffer = memoryview(bytearray(size_bytes))
before = peak_kib()
try:
    codec.decode_into(stored, buffer)
    print("decoded", peak_kib() - before)
except InvalidPayload:
    print("refused", peak_kib() - before)
"""


@pytest.mark.parametrize("bomb", ["size", "window", "many frames", "lies"])
def test_a_bomb_takes_no_memory(bomb: str, tmp_path: Path) -> None:
    """Whatever a frame claims or hides, the process grows by a few frames at most."""
    big = zstandard.ZstdCompressor().compress(bytes(200 << 20))
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    windowed = zstandard.ZstdCompressor(compression_params=parameters)
    small = zstandard.ZstdCompressor().compress(bytes(100))
    compressed = {
        "size": big,
        "window": windowed.compress(bytes(200 << 20)),
        "many frames": small + big,
        # The honest header (magic, descriptor, one byte of size) before the blocks of the bomb.
        "lies": small[:6] + big[10:],
    }[bomb]
    file = tmp_path / "stored"
    file.write_bytes(struct.pack("<II", 1, len(compressed)) + compressed)
    arguments = [sys.executable, "-c", DECODE_AND_TELL_MEMORY, str(file), "100"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    outcome, grown_kib = done.stdout.split()
    assert outcome == "refused"
    assert int(grown_kib) < 4 * FRAME_BYTES // 1024


def test_a_lying_zstd_header_is_refused() -> None:
    """A frame that says 100 bytes and holds 200 MiB ends at what it says."""
    bomb = bytearray(zstandard.ZstdCompressor().compress(bytes(200 << 20)))
    honest = zstandard.ZstdCompressor().compress(bytes(100))
    # The honest header (magic, descriptor, one byte of size) before the blocks of the bomb.
    lying = honest[:6] + bytes(bomb[10:])
    assert zstandard.get_frame_parameters(lying).content_size == 100
    with pytest.raises(InvalidPayload, match="zstd"):
        decoded(struct.pack("<II", 1, len(lying)) + lying, 100)


@given(position=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_changes_nothing(position: int, bit: int) -> None:
    """Whatever bit flips, wrong bytes never pass; zstd has a bit in its header without meaning."""
    manifest, stored = encoded_sample()
    [blob] = manifest.payload
    damaged = bytearray(stored)
    damaged[position % len(damaged)] ^= 1 << bit
    buffer = memoryview(bytearray(blob.decoded_bytes))
    try:
        decode_blob(blob, bytes(damaged), buffer)
    except InvalidPayload:
        return
    assert buffer == sample_artifact()[1]


@given(stored=st.binary(max_size=200), size_bytes=st.integers(0, 3 * FRAME_BYTES))
def test_garbage_is_refused_in_an_orderly_way(stored: bytes, size_bytes: int) -> None:
    """Bytes from anywhere end in the one error that readers expect."""
    buffer = bytearray(size_bytes)
    try:
        SHUFFLE.decode_into(stored, memoryview(buffer))
    except InvalidPayload:
        return
    assert size_bytes == len(stored) == 0


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    """Several threads refuse what one refuses."""
    stored = bytearray(SHUFFLE.encode(floats(3 * FRAME_BYTES)))
    stored[-1] ^= 1
    stored[len(stored) // 2] ^= 0xFF
    with pytest.raises(InvalidPayload):
        decode_blob(
            Blob(
                sha256=sha256_digest(stored),
                size_bytes=len(stored),
                encoding=Encoding(
                    codec="shuffle-zstd",
                    size_bytes=3 * FRAME_BYTES,
                    sha256=sha256_digest(floats(3 * FRAME_BYTES)),
                ),
            ),
            bytes(stored),
            memoryview(bytearray(3 * FRAME_BYTES)),
            num_threads=2,
        )


def test_wrong_digests_and_sizes_of_a_blob_are_refused() -> None:
    """What comes out is hashed; what goes in has the manifest's size."""
    manifest, stored = encoded_sample()
    [blob] = manifest.payload
    assert blob.encoding
    buffer = memoryview(bytearray(blob.decoded_bytes))
    other = msgspec.structs.replace(blob.encoding, sha256=sha256_digest(b"other"))
    with pytest.raises(InvalidPayload, match="decoded bytes hash to"):
        decode_blob(msgspec.structs.replace(blob, encoding=other), stored, buffer)
    with pytest.raises(InvalidPayload, match="the manifest says"):
        decode_blob(blob, stored + b"x", buffer)
    with pytest.raises(ValueError, match="for a blob of"):
        decode_blob(blob, stored, buffer[1:])


def test_a_missing_package_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without zstandard the error says what to install; `identity` works."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CodecUnavailable, match=r"needs zstandard: pip install .*\[codecs\]"):
        SHUFFLE.encode(b"x")
    assert decoded(b"x", 1, codec="identity") == b"x"
