"""The roster: what several sources list becomes one fleet, by a rule that is said."""

import pytest

from cartridge_proto.residency import ReplicaId
from cartridge_router.roster import Listed, Roster, Source

A, B = ReplicaId("a"), ReplicaId("b")
URL, OTHER = "http://127.0.0.1:1", "http://127.0.0.1:2"


def test_each_source_keeps_its_own_list() -> None:
    """A list is replaced as a whole, and touches nobody else's."""
    roster = Roster()
    roster.replace(Source.SETTINGS, {A: URL})
    roster.replace(Source.FILE, {B: OTHER})
    assert roster.present == {A: Listed(URL, Source.SETTINGS), B: Listed(OTHER, Source.FILE)}
    roster.replace(Source.FILE, {})
    assert roster.present == {A: Listed(URL, Source.SETTINGS)}


def test_the_source_that_stands_first_is_believed(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever came last; a name with two addresses is said once, and again when it changes."""
    roster = Roster()
    for source in reversed(Source):
        roster.replace(source, {A: f"http://{source.value}:1"})
        assert roster.present == {A: Listed(f"http://{source.value}:1", source)}
    caplog.clear()
    roster.replace(Source.DNS, {A: "http://dns:2"})
    assert [record.getMessage() for record in caplog.records] == [
        "replica a: http://operator:1 of operator is used, not http://dns:2 of dns"
    ]
    caplog.clear()
    roster.replace(Source.DNS, {A: "http://dns:2"})
    assert caplog.records == []


def test_the_same_address_from_two_sources_is_no_conflict(caplog: pytest.LogCaptureFixture) -> None:
    """And when the first one no longer lists it, the second one does."""
    roster = Roster()
    roster.replace(Source.SETTINGS, {A: URL})
    roster.replace(Source.DNS, {A: URL})
    assert caplog.records == []
    roster.replace(Source.SETTINGS, {})
    assert roster.present == {A: Listed(URL, Source.DNS)}


def test_what_an_operator_takes_out_stays_out_while_it_is_listed() -> None:
    """A source that lists it again and again does not bring it back; one that has let go does."""
    roster = Roster()
    roster.replace(Source.FILE, {A: URL, B: OTHER})
    roster.take_out(A)
    roster.replace(Source.FILE, {A: URL, B: OTHER})
    assert list(roster.present) == [B]
    assert roster.taken_out == {A: Listed(URL, Source.FILE)}
    roster.replace(Source.FILE, {B: OTHER})
    assert roster.taken_out == {}
    roster.replace(Source.FILE, {A: URL})
    assert list(roster.present) == [A]


def test_what_an_operator_adds_wins_and_comes_back() -> None:
    """Also over having been taken out; and an added one that is taken out is gone for good."""
    roster = Roster()
    roster.replace(Source.SETTINGS, {A: URL})
    roster.take_out(A)
    roster.add(A, OTHER)
    assert roster.present == {A: Listed(OTHER, Source.OPERATOR)}
    roster.replace(Source.SETTINGS, {})
    roster.take_out(A)
    assert (roster.present, roster.taken_out) == ({}, {})
    roster.take_out(B)
    assert roster.taken_out == {}
