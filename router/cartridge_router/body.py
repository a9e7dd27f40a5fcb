"""Edits to a JSON object's bytes: some members removed, some added, every other byte kept.

Owns where a top-level member begins and ends. Refuses bodies two parsers could read differently:
duplicate names, invalid UTF-8, anything that is not one JSON object.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

_SPACE = re.compile(rb"[ \t\n\r]*")
_NAME = re.compile(rb'"(?:[^"\\]|\\.)*"')


class InvalidBody(ValueError):
    """Bytes that are no single, unambiguous JSON object; the text says where."""


@dataclass(frozen=True)
class Member:
    """One top-level member: bytes [begin, end) from its name to the end of its value."""

    begin: int
    end: int
    value: bytes


class JsonBody:
    """A JSON object as received. `members` maps each name to its place and value bytes."""

    def __init__(self, data: bytes) -> None:
        """Parse the top level.

        Raises:
            InvalidBody: not UTF-8, not an object, nested too deep, or a name twice.
        """
        self.data = data
        self.members: dict[str, Member] = {}
        try:
            data.decode("utf-8")
            values = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except UnicodeDecodeError as error:
            raise InvalidBody(f"not UTF-8 at byte {error.start}") from error
        except RecursionError as error:
            raise InvalidBody("nested too deep") from error
        except msgspec.DecodeError as error:
            raise InvalidBody(f"not a JSON object: {error}") from error
        self._locate({name: bytes(raw) for name, raw in values.items()})

    def _locate(self, values: Mapping[str, bytes]) -> None:
        """Walk the members; the decoder gives each value's length, so only names are scanned."""
        data = self.data
        position = self._skip(self._skip(0) + 1)
        while data[position : position + 1] != b"}":
            begin = position
            match = _NAME.match(data, position)
            if match is None:
                raise InvalidBody(f"a member name is expected at byte {position}")
            name = msgspec.json.decode(match.group(), type=str)
            position = self._skip(self._skip(match.end()) + 1)
            value = values.get(name, b"")
            end = position + len(value)
            delimiter = self._skip(end)
            # Of two members with one name the decoder keeps the last: the first will not match.
            if (
                name in self.members
                or not value
                or data[position:end] != value
                or data[delimiter : delimiter + 1] not in (b",", b"}")
            ):
                raise InvalidBody(f"the member {name[:80]!r} is given twice")
            self.members[name] = Member(begin, end, value)
            position = delimiter
            if data[position : position + 1] == b",":
                position = self._skip(position + 1)

    def _skip(self, position: int) -> int:
        match = _SPACE.match(self.data, position)
        assert match is not None  # noqa: S101 - the pattern matches the empty string
        return match.end()

    def edited(
        self, *, remove: Iterable[str] = (), add: Mapping[str, bytes] | None = None
    ) -> bytes:
        """The body with members removed and added, and every other byte as it was.

        Args:
            remove: names to leave out; absent ones are ignored.
            add: name -> value bytes, appended as last members. A present member of that name is
                removed.
        """
        added = dict(add or {})
        gone = {*remove, *added} & set(self.members)
        if not gone and not added:
            return self.data
        inside = self.data.index(b"{") + 1
        pieces: list[bytes] = []
        previous_end = inside
        for name, member in self.members.items():
            if name not in gone:
                # With the separator and the space that stood before it.
                lead = self.data[previous_end : member.begin]
                pieces.append(lead if pieces else lead.replace(b",", b"", 1))
                pieces.append(self.data[member.begin : member.end])
            previous_end = member.end
        for name, value in added.items():
            separator = b"," if pieces else b""
            pieces.append(separator + msgspec.json.encode(name) + b":" + value)
        return self.data[:inside] + b"".join(pieces) + self.data[previous_end:]
