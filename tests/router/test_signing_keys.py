"""Keys of tokens: which are used, when they are fetched, and what is said while they are not."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from cartridge_router.errors import AuthenticationUnavailable
from cartridge_router.signing_keys import MAX_JWKS_BYTES, SigningKeys
from cartridge_router.testing import FakeClock
from tests.loadtest.cartridge_requests import until
from tests.router.token_issuer import RSA_KEY, JwksServer, public_jwk


@pytest.fixture
async def issuer() -> AsyncIterator[JwksServer]:
    """A server of public keys."""
    server = JwksServer()
    await server.start()
    yield server
    await server.stop()


async def test_keys_are_found_by_their_id(
    issuer: JwksServer, session: aiohttp.ClientSession
) -> None:
    """Once they are fetched; another id is none of the issuer's."""
    keys = SigningKeys(issuer.url, session)
    with pytest.raises(AuthenticationUnavailable):
        keys.find("RS256")
    await keys.fetch()
    for algorithm in ("RS256", "ES256", "EdDSA"):
        found = keys.find(algorithm)
        assert found is not None
        assert found.algorithm_name == algorithm
    assert keys.find("another") is None
    assert issuer.num_asked == 1


@pytest.mark.parametrize(
    "jwk",
    [
        {"kty": "oct", "k": "c2VjcmV0", "alg": "HS256", "kid": "bad"},
        {**public_jwk("RS256"), "kid": "bad", "use": "enc"},
        {**public_jwk("RS256"), "kid": "bad", "alg": "HS256"},
        {**public_jwk("RS256"), "kid": "bad", "d": "private"},
        {**public_jwk("RS256"), "kid": "bad", "kty": "unknown"},
        {**public_jwk("RS256"), "kid": "bad", "n": "!"},
        {**public_jwk("RS256"), "kid": None},
        {**public_jwk("RS256"), "kid": 7},
        {**public_jwk("RS256"), "kid": "bad", "alg": ["RS256"]},
        {},
    ],
)
async def test_a_key_that_cannot_be_used_is_left_out(
    issuer: JwksServer, session: aiohttp.ClientSession, jwk: dict[str, Any]
) -> None:
    """Symmetric, private, unknown and nameless ones do no harm to the others."""
    issuer.publish(jwk, public_jwk("ES256"))
    keys = SigningKeys(issuer.url, session)
    await keys.fetch()
    assert keys.find("ES256") is not None
    assert keys.find("bad") is None


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b"{}"),
        (302, b""),
        (200, b""),
        (200, b"[]"),
        (200, b'{"keys": []}'),
        (200, b'{"keys": [1]}'),
        (200, b"[" * 100_000),
        (200, json.dumps({"keys": [public_jwk("RS256")]}).encode().ljust(MAX_JWKS_BYTES + 1)),
    ],
)
async def test_a_bad_set_changes_nothing(
    issuer: JwksServer,
    session: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
    status: int,
    body: bytes,
) -> None:
    """The keys that were known stay, and it is said in the log without the bytes."""
    issuer.publish(public_jwk("ES256"))
    keys = SigningKeys(issuer.url, session)
    await keys.fetch()
    issuer.status, issuer.body = status, body
    await keys.fetch()
    assert keys.find("ES256") is not None
    assert "cannot be had, the old stay" in caplog.text


async def test_a_server_that_is_away_is_asked_again(
    issuer: JwksServer, session: aiohttp.ClientSession
) -> None:
    """Nothing is known until it comes; it need not be asked for."""
    url = issuer.url
    await issuer.stop()
    keys = SigningKeys(url, session, pause_s=0.01, refresh_s=600)
    await keys.fetch()
    with pytest.raises(AuthenticationUnavailable):
        keys.find("ES256")
    task = asyncio.create_task(keys.run())
    try:
        await issuer.start(int(url.split(":")[2].partition("/")[0]))
        await until(lambda: issuer.num_asked == 1, "asked again")
        await until(lambda: keys._fetched_s is not None, "read")
        assert keys.find("ES256") is not None
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_an_unknown_key_makes_it_ask_again_once_in_a_while(
    issuer: JwksServer, session: aiohttp.ClientSession
) -> None:
    """A key that the issuer has begun to use is found; made-up ids do not lead to more fetches."""
    clock = FakeClock()
    issuer.publish(public_jwk("ES256"))
    keys = SigningKeys(issuer.url, session, pause_s=0.001, refresh_s=600, clock=clock)
    await keys.fetch()
    issuer.publish(public_jwk("ES256"), public_jwk("RS256", RSA_KEY))
    task = asyncio.create_task(keys.run())
    try:
        # The set is as good as new: the issuer is asked, and this once the answer is no.
        assert keys.find("RS256") is None
        await until(lambda: issuer.num_asked == 2, "asked again")
        await until(lambda: keys.find("RS256") is not None, "found")
        clock.advance(1)
        with pytest.raises(AuthenticationUnavailable):
            keys.find("made-up")
    finally:
        task.cancel()
        await asyncio.wait([task])
