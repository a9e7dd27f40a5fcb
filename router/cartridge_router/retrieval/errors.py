"""What can be wrong with an index and with what it needs.

    RetrievalError
    ├── ExtraMissing          a package of an extra is not installed
    ├── DamagedIndex          a stored index is not what was written
    └── ForeignIndex          a stored index is of another version, or of another embedder

Owns no handling. Refuses to be part of the gateway's tree: this package knows no request.
"""


class RetrievalError(Exception):
    """Root of this package's errors."""


class ExtraMissing(RetrievalError):
    """A package that an extra brings is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module} is not installed: pip install 'cartridge-router[{extra}]'")
        self.module = module
        self.extra = extra


class DamagedIndex(RetrievalError):
    """A stored index is not what was written."""


class ForeignIndex(RetrievalError):
    """A stored index was written by another version, or its vectors are another embedder's."""
