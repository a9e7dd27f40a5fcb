"""Sealed memory: nobody can change it, other processes can read it, and only the right one."""

import fcntl
import gc
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from cartridge_engine_ext.sealed_memory import ReceivedMemory, SealedMemory, map_memory

DATA = bytes(range(256)) * 40

READER = """
import sys
from cartridge_engine_ext.sealed_memory import MemoryReference, map_memory
with map_memory(MemoryReference(*map(int, sys.argv[1:]))) as mapping:
    sys.stdout.buffer.write(mapping[:])
assert "torch" not in sys.modules
"""


def fill(buffer: memoryview) -> None:
    """Write the sample."""
    buffer[:] = DATA


def num_descriptors() -> int:
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def memory() -> Iterator[SealedMemory]:
    """The sample, sealed."""
    memory = SealedMemory(len(DATA), fill)
    yield memory
    memory.close()


def test_another_process_reads_the_bytes(memory: SealedMemory) -> None:
    """A process that only knows the reference maps the same bytes, without torch."""
    arguments = [str(number) for number in astuple(memory.reference)]
    result = subprocess.run(
        [sys.executable, "-c", READER, *arguments], capture_output=True, check=True, timeout=60
    )
    assert result.stdout == DATA


def test_nothing_can_be_written_after_sealing(memory: SealedMemory) -> None:
    """The kernel refuses writes, shared writable mappings, resizing and further seals."""
    path = f"/proc/{os.getpid()}/fd/{memory.reference.descriptor}"
    descriptor = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, len(DATA), access=mmap.ACCESS_WRITE)
        for size in (0, len(DATA) + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(descriptor)
    with map_memory(memory.reference) as mapping:
        assert mapping[:] == DATA


def test_writing_to_a_mapping_stays_there(memory: SealedMemory) -> None:
    """Mappings are copy-on-write: what one reader writes no other sees."""
    with map_memory(memory.reference) as one:
        one[:4] = b"gone"
        with map_memory(memory.reference) as other:
            assert other[:] == DATA


@pytest.mark.parametrize("change", [{"inode": 1}, {"size_bytes": 1}])
def test_other_memory_than_referenced_is_refused(
    change: dict[str, int], memory: SealedMemory
) -> None:
    """A descriptor number that now names something else is noticed, and nothing stays open."""
    before = num_descriptors()
    with pytest.raises(OSError, match="is not the memory that was referenced"):
        map_memory(replace(memory.reference, **change))
    assert num_descriptors() == before


def test_closed_memory_is_refused() -> None:
    """After `close` a reference names nothing; a mapping made before keeps its bytes."""
    memory = SealedMemory(len(DATA), fill)
    reference = memory.reference
    with map_memory(reference) as mapping:
        memory.close()
        memory.close()
        with pytest.raises(OSError, match=r"is not the memory|No such file"):
            map_memory(reference)
        assert mapping[:] == DATA


def test_a_failed_fill_leaves_nothing_open() -> None:
    """An error while filling passes through, and the descriptor is closed."""

    def fail(buffer: memoryview) -> None:
        raise RuntimeError("bad bytes")

    before = num_descriptors()
    with pytest.raises(RuntimeError, match="bad bytes"):
        SealedMemory(len(DATA), fail)
    assert num_descriptors() == before


def test_a_failed_fill_that_still_has_a_view_is_told_as_it_is() -> None:
    """What went wrong is heard, not that the memory could not be closed at once."""
    before = num_descriptors()

    def fill(view: memoryview) -> None:
        part = view[1:]  # alive in the traceback
        raise RuntimeError(f"bad bytes after {len(part)}")

    with pytest.raises(RuntimeError, match="bad bytes after 9"):
        SealedMemory(10, fill)
    gc.collect()
    assert num_descriptors() == before


def test_the_view_for_filling_ends_with_filling() -> None:
    """Who keeps the writable view cannot use it once the memory is sealed."""
    kept: list[memoryview] = []

    def keep(buffer: memoryview) -> None:
        fill(buffer)
        kept.append(buffer)

    memory = SealedMemory(len(DATA), keep)
    with pytest.raises(ValueError, match="released"):
        kept[0][0] = 1
    memory.close()


# --- received from another process ---------------------------------------------------------------
def unsealed(seals: int, data: bytes = DATA) -> int:
    """A descriptor of memory with these seals."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_sealed_memory_is_taken_over(memory: SealedMemory) -> None:
    """A duplicate holds the same bytes, also after the first owner has closed its own."""
    received = ReceivedMemory(memory.duplicate(), len(DATA))
    assert received.reference.inode == memory.reference.inode
    memory.close()
    with map_memory(received.reference) as mapping:
        assert mapping[:] == DATA
    received.close()
    assert received.is_closed


@pytest.mark.parametrize(
    "seals",
    [
        0,
        fcntl.F_SEAL_WRITE,
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK,
    ],
)
def test_memory_that_can_still_change_is_refused(seals: int) -> None:
    """Each of the three seals is needed, and the descriptor does not stay open."""
    before = num_descriptors()
    with pytest.raises(OSError, match="not sealed"):
        ReceivedMemory(unsealed(seals), len(DATA))
    assert num_descriptors() == before


def test_what_is_no_such_memory_is_refused(tmp_path: Path) -> None:
    """Another size than promised, and files, which cannot be sealed at all."""
    before = num_descriptors()
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    with pytest.raises(OSError, match=f"{len(DATA)} bytes of memory; 1 were promised"):
        ReceivedMemory(unsealed(seals), 1)
    file = tmp_path / "file"
    file.write_bytes(DATA)
    with pytest.raises(OSError, match="Invalid argument"):
        ReceivedMemory(os.open(file, os.O_RDONLY), len(DATA))
    assert num_descriptors() == before
