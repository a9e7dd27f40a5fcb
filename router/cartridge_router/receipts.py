"""Receipts of engines, matched with the requests of this gateway and what was predicted for them.

Owns the last receipts, the predictions, and who waits. Refuses to grow: the oldest are forgotten.
"""

import asyncio
from collections import OrderedDict

from cartridge_proto.residency import Receipt, ReplicaId, Tier

MAX_RECEIPTS = 4096


class ReceiptBook:
    """Receipts by request id. For use from one event loop."""

    def __init__(self) -> None:
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()
        self._predictions: OrderedDict[str, Tier] = OrderedDict()
        self._waiters: dict[str, set[asyncio.Future[Receipt]]] = {}

    def expect(self, request_id: str, tier: Tier) -> None:
        """Note the predicted tier of a request."""
        self._predictions[request_id] = tier
        while len(self._predictions) > MAX_RECEIPTS:
            self._predictions.popitem(last=False)

    def take_prediction(self, request_id: str) -> Tier | None:
        """The predicted tier of a request of this gateway, once."""
        return self._predictions.pop(request_id, None)

    def note(self, receipt: Receipt) -> None:
        """Take in a receipt."""
        self._receipts[receipt.request_id] = receipt
        while len(self._receipts) > MAX_RECEIPTS:
            self._receipts.popitem(last=False)
        for waiter in self._waiters.pop(receipt.request_id, ()):
            if not waiter.done():
                waiter.set_result(receipt)

    def find(self, request_id: str) -> Receipt | None:
        """The receipt of a request, if it came."""
        return self._receipts.get(request_id)

    async def wait(self, request_id: str, replica: ReplicaId, timeout_s: float) -> Receipt | None:
        """A replica's receipt of a request, waiting a little for it; `None` if it does not come.

        Another replica may have had the request before, and failed it for a reason of its own.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    receipt = self.find(request_id)
                    if receipt is not None and receipt.replica == replica:
                        return receipt
                    await self._next(request_id)
        except TimeoutError:
            return None

    async def _next(self, request_id: str) -> None:
        """Wait for the next receipt of a request."""
        waiter: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(request_id, set())
        waiters.add(waiter)
        try:
            await waiter
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiters.get(request_id) is waiters:
                del self._waiters[request_id]
