"""How a blob is read from whatever serves it over HTTP, whole or by a range.

Owns the range header and the meaning of the answers. Refuses an answer that is not the very bytes
that were asked for.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from cartridge_proto.digest import Digest
from cartridge_proto.stores.guarded_http import Answer
from cartridge_proto.stores.interface import StoreUnavailable
from cartridge_proto.stores.verification import check_size


def read_blob_pieces(
    ask: Callable[[Mapping[str, str]], AbstractContextManager[Answer]],
    digest: Digest,
    offset: int,
    buffer: memoryview,
    size_bytes: int,
) -> Iterator[int]:
    """Read a blob, or a range of it; yields the count of bytes after each piece.

    Args:
        ask: asks for the blob with these further headers; lets status 200 and 206 through.
        digest: for messages.
        offset: first byte.
        buffer: where `len(buffer)` bytes go.
        size_bytes: of the whole blob.

    Raises:
        NotInStore: there is none.
        CorruptStore: it has another size than `size_bytes`.
        StoreUnavailable: the server did not give these bytes.
    """
    if not buffer:
        return
    is_whole = len(buffer) == size_bytes
    span = f"bytes={offset}-{offset + len(buffer) - 1}"
    with ask({} if is_whole else {"range": span}) as answer:
        if is_whole and answer.status == 200:
            if answer.length is not None:
                check_size(digest, answer.length, size_bytes)
        else:
            total = answer.total_of_range(offset, len(buffer))
            if answer.status != 206 or total is None:
                raise StoreUnavailable(
                    f"blob {digest}: status {answer.status} and not the bytes asked for ({span})"
                )
            check_size(digest, total, size_bytes)
        yield from answer.read_into(buffer)
