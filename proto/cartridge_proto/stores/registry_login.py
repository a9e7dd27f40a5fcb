"""Authorisation at an OCI registry: Basic, or tokens by its challenge.

Owns the account from the environment and the tokens, by repository and right. Refuses to send the
account anywhere but to the registry, and to the token service it names on a network that is not
further inside.

Source: https://distribution.github.io/distribution/spec/auth/token/
"""

import base64
import json
import re
import threading
import time
from urllib.parse import urlencode, urlsplit

from cartridge_proto.stores.guarded_addresses import check_redirect, resolve_host
from cartridge_proto.stores.guarded_http import GuardedHttp, printable
from cartridge_proto.stores.interface import StoreUnavailable

_PARAMETER = re.compile(r'([a-z_]+)="([^"]*)"')
_MAX_TOKEN_BYTES = 64 << 10
_DEFAULT_LIFE_S = 60.0


class RegistryLogin:
    """The `Authorization` header for each repository; may be used from any thread.

    Args:
        http: client of the registry.
        base: its URL.
        account: user and password; `None` = anonymous.
    """

    def __init__(self, http: GuardedHttp, base: str, account: tuple[str, str] | None) -> None:
        self._http = http
        self._base = base
        self._account = account
        self._lock = threading.Lock()
        self._headers: dict[tuple[str, str], tuple[str, float]] = {}

    def header(self, repository: str, right: str) -> dict[str, str]:
        """What is known to be needed; empty before the first challenge."""
        with self._lock:
            value, until_s = self._headers.get((repository, right), ("", 0.0))
        return {"authorization": value} if time.monotonic() < until_s else {}

    def accept(self, challenge: str, repository: str, right: str) -> None:
        """Answer a `WWW-Authenticate` header, so that the next `header` holds what it asks for.

        Args:
            challenge: the header's text.
            repository: which the refused request was about.
            right: `pull` or `pull,push`.

        Raises:
            StoreUnavailable: it cannot be answered.
        """
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._account is not None:
            header, life_s = self._basic(self._account), float("inf")
        elif scheme.lower() == "bearer":
            header, life_s = self._token(dict(_PARAMETER.findall(rest)), repository, right)
        else:
            raise StoreUnavailable(f"{self._base}: asks for an account; none is set")
        with self._lock:
            self._headers[repository, right] = (header, time.monotonic() + life_s)

    def _token(self, parameters: dict[str, str], repository: str, right: str) -> tuple[str, float]:
        realm = parameters.get("realm", "")
        parts, base = urlsplit(realm), urlsplit(self._base)
        place = printable(realm)
        if parts.hostname is None or parts.scheme not in {"https", base.scheme}:
            raise StoreUnavailable(f"{self._base}: its token service {place} is not asked")
        check_redirect(
            resolve_host(base.hostname or "", base.port or 443),
            resolve_host(parts.hostname, parts.port or 443),
            place,
        )
        query = {"scope": f"repository:{repository}:{right}"}
        if "service" in parameters:
            query["service"] = parameters["service"]
        headers = {"authorization": self._basic(self._account)} if self._account else {}
        separator = "&" if parts.query else "?"
        url = f"{realm}{separator}{urlencode(query)}"
        # A token service that is not there says nothing about what the store holds.
        with self._http.ask("GET", url, headers=headers, expected=(200, 404)) as answer:
            data = answer.read(_MAX_TOKEN_BYTES) if answer.status == 200 else b""
        try:
            fields = json.loads(data)
            token = fields.get("token") or fields["access_token"]
            life_s = float(fields.get("expires_in") or _DEFAULT_LIFE_S)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreUnavailable(f"{place}: gave no token") from error
        if not isinstance(token, str) or re.fullmatch(r"[\x21-\x7e]+", token) is None:
            raise StoreUnavailable(f"{place}: gave no token")
        # Renewed before it ends on the way.
        return f"Bearer {token}", life_s * 0.8

    @staticmethod
    def _basic(account: tuple[str, str]) -> str:
        return "Basic " + base64.b64encode(":".join(account).encode()).decode()
