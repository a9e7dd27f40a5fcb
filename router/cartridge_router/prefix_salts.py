"""Salts by which each tenant finds only its own prompts in the prefix caches of shared engines.

Owns how a salt is made of a tenant's name, and on which addresses engines take one. Refuses to edit
bodies, and to salt requests with Cartridges: the identity of a composition names its tenant.
"""

import hashlib
import hmac
from typing import Final

from cartridge_proto.digest import length_prefixed
from cartridge_proto.names import DOMAIN_TENANT_SALT
from cartridge_router.request import Route

SALTED_PATHS: Final = frozenset(
    {Route.CHAT, Route.COMPLETIONS, Route.RESPONSES, Route.MESSAGES}
    | {"/v1/chat/completions/batch", "/v1/embeddings", "/v1/systemone", "/pooling", "/classify"}
    | {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
)
"""Whose bodies have a `cache_salt` in vLLM 0.32, and reach its prefix cache."""


class PrefixSalts:
    """Makes salts that are the same in every gateway with the same key, and after a restart.

    Args:
        key: a secret; without one whoever knows a tenant's name can make its salt, which only
            trusted tenants may send.
    """

    def __init__(self, key: bytes | None) -> None:
        self._key = key or b""

    def of(self, tenant: str) -> str:
        """The `cache_salt` of a tenant: 64 hex characters. Costs a few microseconds."""
        text = length_prefixed(DOMAIN_TENANT_SALT, [tenant.encode()])
        return hmac.digest(self._key, text, hashlib.sha256).hex()
