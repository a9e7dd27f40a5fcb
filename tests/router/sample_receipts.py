"""Receipts of requests that were served, told apart by their ids."""

from cartridge_engine_ext.residency_publisher import new_epoch
from cartridge_proto.residency import Receipt, ReceiptStatus


def receipt_of(request_id: str) -> Receipt:
    """A receipt of a served request."""
    return Receipt(
        replica="r0",
        epoch=new_epoch(),
        request_id=request_id,
        scope="public",
        status=ReceiptStatus.SERVED,
        reason=None,
        detail="",
        items=[],
        num_virtual_tokens=0,
        num_reused_tokens=0,
        num_loads=1,
        loaded_bytes=0,
        load_s=0.0,
    )
