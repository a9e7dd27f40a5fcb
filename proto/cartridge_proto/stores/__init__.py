"""Cartridge stores behind one interface: what is put is read back, or an error says why not.

Owns the public names. Refuses to import a client library before a store that needs it is opened.
"""

from cartridge_proto.stores.interface import (
    CorruptStore,
    NotInStore,
    Store,
    StoreError,
    StoreUnavailable,
)
from cartridge_proto.stores.local import LocalStore
from cartridge_proto.stores.opening import open_store, store_problem

__all__ = [
    "CorruptStore",
    "LocalStore",
    "NotInStore",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "open_store",
    "store_problem",
]
