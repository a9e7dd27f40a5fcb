"""Memory that cannot change once it is verified, readable by other processes of one machine.

Owns anonymous files (memfd) that are filled, sealed and then only read, here or by who receives
their descriptor. Refuses to hand out a
writable view after sealing; the kernel enforces it.

Source: memfd_create(2), fcntl(2) "File Sealing".
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryReference:
    """Names sealed memory to another process of the same user on this machine.

    `inode` guards against a descriptor number that was closed and given to something else.
    """

    pid: int
    descriptor: int
    inode: int
    size_bytes: int


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class SealedMemory:
    """Immutable bytes in an anonymous file. `close` frees them once no process maps them."""

    def __init__(self, size_bytes: int, fill: Callable[[memoryview], None]) -> None:
        self.size_bytes = size_bytes
        self._descriptor = os.memfd_create("cartridge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, size_bytes)
            _fill(mmap.mmap(self._descriptor, size_bytes), fill)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            self.close()
            raise

    @property
    def reference(self) -> MemoryReference:
        """How another process finds these bytes while this object is open."""
        inode = os.fstat(self._descriptor).st_ino
        return MemoryReference(os.getpid(), self._descriptor, inode, self.size_bytes)

    def duplicate(self) -> int:
        """Another descriptor of the same bytes, for handing over; the caller closes it."""
        return os.dup(self._descriptor)

    @property
    def is_closed(self) -> bool:
        """Whether the bytes were given up."""
        return self._descriptor < 0

    def close(self) -> None:
        """Give up the bytes. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _fill(mapping: mmap.mmap, fill: Callable[[memoryview], None]) -> None:
    """Fill a mapping and take it away; sealing needs that nobody can write any more."""
    view = memoryview(mapping)
    try:
        fill(view)
    except BaseException:
        # The frames that raised may hold views of the bytes, which then go with the error: that
        # the mapping cannot be closed yet must not be what the caller hears.
        with contextlib.suppress(BufferError):
            view.release()
            mapping.close()
        raise
    view.release()
    mapping.close()


class ReceivedMemory(SealedMemory):
    """Memory that another process filled and sealed. Takes over the descriptor.

    Its bytes cannot change from here on; what they are is for the receiver to verify.

    Raises:
        OSError: it is not sealed against writing and resizing, or has another size; the
            descriptor is closed.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._descriptor = descriptor
        try:
            needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & needed != needed:
                raise OSError("the memory is not sealed")
            found = os.fstat(descriptor).st_size
            if found != size_bytes:
                raise OSError(f"{found} bytes of memory; {size_bytes} were promised")
        except BaseException:
            self.close()
            raise


def map_memory(reference: MemoryReference) -> mmap.mmap:
    """Map sealed memory of this or another process.

    The mapping is copy-on-write, so that nothing written to it reaches the bytes themselves.

    Raises:
        OSError: the memory is gone, or is not the one that was referenced.
    """
    path = f"/proc/{reference.pid}/fd/{reference.descriptor}"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_ino, status.st_size) != (reference.inode, reference.size_bytes):
            raise OSError(f"{path} is not the memory that was referenced")
        return mmap.mmap(descriptor, reference.size_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
