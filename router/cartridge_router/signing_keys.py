"""The public keys that sign bearer tokens: fetched from one JWKS URL beside requests, and kept.

Owns the fetched keys and the task that renews them. Refuses symmetric keys, private keys and
algorithms, and to be waited for: a request is answered with what is known.

Source: RFC 7517 (JWK Set), RFC 8725 (which algorithms a verifier takes).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import jwt
import msgspec

from cartridge_router.errors import AuthenticationUnavailable

logger = logging.getLogger(__name__)

ALGORITHMS: Final = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
)
"""Asymmetric ones only: whoever can verify a token cannot make one."""
MAX_JWKS_BYTES: Final = 256 * 1024
FETCH_TIMEOUT_S: Final = 3.0
REFRESH_S: Final = 300.0
PAUSE_S: Final = 10.0
"""Least time between two fetches, whatever kids tokens name."""


class _JwkSet(msgspec.Struct):
    keys: list[dict[str, Any]]


class SigningKeys:
    """Keys by their `kid`. For use from one event loop; `run` keeps them fresh."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        refresh_s: float = REFRESH_S,
        pause_s: float = PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._session = session
        self._refresh_s = refresh_s
        self._pause_s = pause_s
        self._clock = clock
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_s: float | None = None
        self._wanted = asyncio.Event()

    def find(self, kid: str) -> jwt.PyJWK | None:
        """The key of that id; `None` when the issuer has just said that there is none.

        Raises:
            AuthenticationUnavailable: the keys that are known are too old to say so; newer ones
                are being fetched.
        """
        key = self._keys.get(kid)
        if key is not None:
            return key
        self._wanted.set()
        if self._fetched_s is None or self._clock() - self._fetched_s >= self._pause_s:
            raise AuthenticationUnavailable("the keys of the token's issuer are being fetched")
        return None

    async def fetch(self) -> None:
        """Read the set once; when it cannot be had, the keys stay as they are."""
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                data = await self._read()
            keys = await asyncio.to_thread(_usable, data)
        except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
            # The text of a bad set is not repeated: it could hold a secret by mistake.
            reason = type(error).__name__
            logger.warning("signing keys at %s cannot be had, the old stay: %s", self._url, reason)
            self._wanted.set()
            return
        if keys.keys() != self._keys.keys():
            logger.info("signing keys at %s: %s", self._url, ", ".join(sorted(keys)))
        self._keys = keys
        self._fetched_s = self._clock()
        self._wanted.clear()

    async def run(self) -> None:
        """Fetch again from time to time, and when a token names an unknown key, until cancelled."""
        while True:
            await asyncio.sleep(self._pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s):
                    await self._wanted.wait()
            await self.fetch()

    async def _read(self) -> bytes:
        # The session unpacks nothing, and a redirect could lead anywhere.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with self._session.get(self._url, headers=headers, allow_redirects=False) as answer:
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            data = b""
            async for chunk in answer.content.iter_any():
                data += chunk
                if len(data) > MAX_JWKS_BYTES:
                    raise ValueError(f"over {MAX_JWKS_BYTES} bytes")
            return data


def _usable(data: bytes) -> dict[str, jwt.PyJWK]:
    """The keys of a set that verify signatures, by kid; others are left out.

    Raises:
        ValueError: no set of keys, or none of them can be used.
    """
    keys: dict[str, jwt.PyJWK] = {}
    for entry in msgspec.json.decode(data, type=_JwkSet).keys:
        is_private = "d" in entry or entry.get("kty") == "oct"
        kid = entry.get("kid")
        if is_private or entry.get("use", "sig") != "sig" or not isinstance(kid, str):
            continue
        # A set may hold keys of other uses in any shape.
        with contextlib.suppress(jwt.PyJWTError, TypeError, ValueError):
            key = jwt.PyJWK(entry)
            if key.algorithm_name in ALGORITHMS:
                keys[kid] = key
    if not keys:
        raise ValueError("no key can be used")
    return keys
