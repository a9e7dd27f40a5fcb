"""An issuer of bearer tokens: key pairs, tokens, and a server of the public keys.

Owns what is signed and what is published. Refuses to verify.
"""

import json
import time
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER, AUDIENCE = "https://issuer.test", "cartridge-router"
RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
PRIVATE_KEYS: dict[str, Any] = {"RS256": RSA_KEY, "ES256": EC_KEY, "EdDSA": ED_KEY}


def public_jwk(algorithm: str, key: Any = None, **fields: Any) -> dict[str, Any]:
    """The public half as an issuer publishes it; its `kid` is the algorithm's name."""
    public = (PRIVATE_KEYS[algorithm] if key is None else key).public_key()
    makers: dict[str, Any] = {"RS256": RSAAlgorithm, "ES256": ECAlgorithm, "EdDSA": OKPAlgorithm}
    made = makers[algorithm].to_jwk(public, as_dict=True)
    return {"kid": algorithm, "alg": algorithm, "use": "sig", **made, **fields}


def token(
    algorithm: str = "ES256",
    *,
    key: Any = None,
    headers: dict[str, Any] | None = None,
    **claims: Any,
) -> str:
    """A token that is good for a minute and for `acme`; `claims` replace, `None` leaves out."""
    payload = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "exp": time.time() + 60,
        "tenant": "acme",
        **claims,
    }
    return jwt.encode(
        {name: value for name, value in payload.items() if value is not None},
        PRIVATE_KEYS[algorithm] if key is None else key,
        algorithm,
        headers={"kid": algorithm} if headers is None else headers,
    )


class JwksServer:
    """Publishes `body` with `status` on a loopback port, and counts who asks."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.num_asked = 0
        self.body = b""
        self.publish(*(public_jwk(name) for name in PRIVATE_KEYS))
        self._runner: web.AppRunner | None = None

    def publish(self, *keys: dict[str, Any]) -> None:
        """Say from now on that these are the keys."""
        self.body = json.dumps({"keys": keys}).encode()

    async def start(self, port: int = 0) -> None:
        """Listen."""
        app = web.Application()
        app.router.add_get("/jwks", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/jwks"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, _: web.Request) -> web.Response:
        self.num_asked += 1
        return web.Response(body=self.body, status=self.status)
