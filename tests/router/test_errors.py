"""The error tree: what is drawn is what is there, and what may be retried says when."""

import re

import pytest

from cartridge_router import errors
from cartridge_router.errors import ConfigurationError, RouterError


def below(kind: type[RouterError]) -> list[type[RouterError]]:
    """All kinds of an error."""
    return [each for sub in kind.__subclasses__() for each in (sub, *below(sub))]


KINDS = below(RouterError)


@pytest.mark.parametrize("kind", KINDS)
def test_each_error_is_drawn_with_its_status(kind: type[RouterError]) -> None:
    """The tree on top of the module is true."""
    assert errors.__doc__ is not None
    assert re.search(rf"[├└]── {kind.__name__} +{kind.status}\b", errors.__doc__)


def test_nothing_is_drawn_that_is_not_there() -> None:
    """Each name in the tree is a class of the module."""
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert sorted(drawn) == sorted(kind.__name__ for kind in KINDS)


def test_each_error_has_a_code_of_its_own() -> None:
    """A client can tell all of them apart without reading the message."""
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert RouterError.code not in codes


@pytest.mark.parametrize("kind", KINDS)
def test_client_faults_are_named_as_such_and_others_may_be_retried(
    kind: type[RouterError],
) -> None:
    """4xx are invalid requests, but for 429; 429, 502 and 503 say when to come again."""
    is_fault = kind.status < 500 and kind.status != 429
    assert (kind.openai_type == "invalid_request_error") == is_fault
    assert (kind.retry_after_s is not None) == (kind.status in {429, 502, 503})


def test_a_configuration_error_is_no_request_s_fault() -> None:
    """It holds every problem, and no handler answers it to a client."""
    error = ConfigurationError(["a: wrong", "b: wrong"])
    assert (error.problems, str(error)) == (["a: wrong", "b: wrong"], "a: wrong; b: wrong")
    assert not isinstance(error, RouterError)
