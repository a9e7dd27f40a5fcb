"""The receipt book: found, waited for, predicted, and never without bound."""

import asyncio

import msgspec

from cartridge_proto.residency import ReplicaId, Tier
from cartridge_router.receipts import MAX_RECEIPTS, ReceiptBook
from tests.loadtest.cartridge_requests import until
from tests.router.sample_receipts import receipt_of

R0 = ReplicaId(receipt_of("a").replica)


async def test_a_receipt_is_found_after_it_came() -> None:
    """By its request's id only."""
    book = ReceiptBook()
    assert book.find("a") is None
    receipt = receipt_of("a")
    book.note(receipt)
    assert (book.find("a"), book.find("b")) == (receipt, None)
    assert await book.wait("a", R0, 0.0) is receipt


async def test_all_who_wait_get_the_receipt() -> None:
    """Two waiters of one request are both answered when it comes; a third of another is not."""
    book, receipt = ReceiptBook(), receipt_of("a")
    waiting = [asyncio.create_task(book.wait("a", R0, 10.0)) for _ in range(2)]
    other = asyncio.create_task(book.wait("b", R0, 0.01))
    assert await other is None
    book.note(receipt)
    assert await asyncio.gather(*waiting) == [receipt, receipt]


async def test_a_waiter_that_leaves_does_not_take_the_receipt_along() -> None:
    """One is cancelled, the other is answered, and nothing is kept for either."""
    book, receipt = ReceiptBook(), receipt_of("a")
    first, second = (asyncio.create_task(book.wait("a", R0, 10.0)) for _ in range(2))
    await until(lambda: bool(book._waiters), "both wait")
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    book.note(receipt)
    assert await second is receipt
    assert book._waiters == {}


async def test_a_receipt_of_another_replica_explains_nothing() -> None:
    """The first of two replicas failed for a reason of its own; the second one's is waited for."""
    book = ReceiptBook()
    book.note(receipt_of("a"))
    other = ReplicaId("another")
    assert await book.wait("a", other, 0.01) is None
    waiting = asyncio.create_task(book.wait("a", other, 10.0))
    await until(lambda: bool(book._waiters), "it waits")
    book.note(receipt_of("a"))
    theirs = msgspec.structs.replace(receipt_of("a"), replica=other)
    await until(lambda: bool(book._waiters), "it waits on")
    book.note(theirs)
    assert await waiting is theirs
    assert book._waiters == {}


async def test_a_waiter_in_vain_is_forgotten() -> None:
    """After its time the answer is `None`, and a late receipt finds nobody."""
    book = ReceiptBook()
    assert await book.wait("a", R0, 0.001) is None
    assert book._waiters == {}
    book.note(receipt_of("a"))
    assert book.find("a") is not None


def test_a_prediction_is_taken_once() -> None:
    """A repeated receipt is compared with nothing."""
    book = ReceiptBook()
    book.expect("a", Tier.DRAM)
    assert [book.take_prediction("a"), book.take_prediction("a")] == [Tier.DRAM, None]


def test_the_oldest_are_forgotten() -> None:
    """Receipts and predictions are bounded, oldest first."""
    book = ReceiptBook()
    for index in range(MAX_RECEIPTS + 2):
        book.note(receipt_of(str(index)))
        book.expect(str(index), Tier.DRAM)
    assert [book.find(str(index)) is None for index in range(3)] == [True, True, False]
    taken = [book.take_prediction(str(index)) for index in range(3)]
    assert taken == [None, None, Tier.DRAM]
