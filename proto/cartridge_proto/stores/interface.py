"""What every Cartridge store promises, and how it says that it could not.

StoreError
├── NotInStore        no such alias, manifest or blob: asking again changes nothing
├── CorruptStore      what is stored is not what its name says
└── StoreUnavailable  the store could not be asked now: the same question may be answered later

Owns the error tree. Refuses any transport: implementations are its neighbours.
"""


class StoreError(Exception):
    """Base of what can go wrong with a store."""


class NotInStore(StoreError):
    """No such alias, manifest or blob."""


class CorruptStore(StoreError):
    """Stored bytes do not hash to their name, or break the manifest contract."""


class StoreUnavailable(StoreError):
    """The store could not be asked, or gave up in the middle; a later try may succeed."""
