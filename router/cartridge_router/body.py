"""Edits to a JSON object's bytes: some members removed, some added, every other byte kept.

Owns where a top-level member begins and ends. Refuses bodies two parsers could read differently:
duplicate names, invalid UTF-8, anything that is not one JSON object.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

_BEGIN = re.compile(rb"[ \t\n\r]*\{")
_NAME = re.compile(rb'[ \t\n\r]*("(?:[^"\\]|\\.)*")[ \t\n\r]*:[ \t\n\r]*')
_DELIMITER = re.compile(rb"[ \t\n\r]*([,}])")


class InvalidBody(ValueError):
    """Bytes that are no single, unambiguous JSON object; the text says where."""


class Member(NamedTuple):
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
        data, members = self.data, self.members
        begin = _BEGIN.match(data)
        assert begin is not None  # noqa: S101 - the decoder has found an object
        position = begin.end()
        while named := _NAME.match(data, position):
            literal = named[1]
            name = (
                msgspec.json.decode(literal, type=str)
                if b"\\" in literal
                else literal[1:-1].decode()
            )
            value, value_begin = values.get(name, b""), named.end()
            end = value_begin + len(value)
            delimiter = _DELIMITER.match(data, end)
            # Of two members with one name the decoder keeps the last: the first will not match.
            if name in members or not value or delimiter is None or data[value_begin:end] != value:
                raise InvalidBody(f"the member {name[:80]!r} is given twice")
            members[name] = Member(named.start(1), end, value)
            position = delimiter.end()

    def edited(
        self,
        *,
        remove: Iterable[str] = (),
        add: Mapping[str, bytes] | None = None,
        replace: Mapping[str, bytes] | None = None,
    ) -> bytes:
        """The body with members removed, added and replaced, and every other byte as it was.

        Args:
            remove: names to leave out; absent ones are ignored.
            add: name -> value bytes, appended as last members. A present member of that name is
                removed.
            replace: name -> value bytes, where the member is; one that is not there is appended.
        """
        replaced, added = dict(replace or {}), dict(add or {})
        added = {n: v for n, v in replaced.items() if n not in self.members} | added
        gone = {*remove, *added} & set(self.members)
        if not gone and not added and not replaced:
            return self.data
        inside = self.data.index(b"{") + 1
        pieces: list[bytes] = []
        previous_end = inside
        for name, member in self.members.items():
            if name not in gone:
                # With the separator and the space that stood before it.
                lead = self.data[previous_end : member.begin]
                pieces.append(lead if pieces else lead.replace(b",", b"", 1))
                if name in replaced:
                    value_begin = member.end - len(member.value)
                    pieces.append(self.data[member.begin : value_begin] + replaced[name])
                else:
                    pieces.append(self.data[member.begin : member.end])
            previous_end = member.end
        for name, value in added.items():
            separator = b"," if pieces else b""
            pieces.append(separator + msgspec.json.encode(name) + b":" + value)
        return self.data[:inside] + b"".join(pieces) + self.data[previous_end:]
