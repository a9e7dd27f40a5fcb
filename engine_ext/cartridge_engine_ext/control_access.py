"""Who may call the control service: a bearer token, client certificates, or both.

Owns reading and comparing the token, the TLS files, and the rule that an address which others can
reach is never open. Refuses to know what is called; standard health checks need no token.
"""

import hmac
import ipaddress
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto.names import ENV_CONTROL_TOKEN

MIN_TOKEN_CHARACTERS: Final = 16
_TOKEN = re.compile(r"[\x21-\x7e]+")
_HEALTH: Final = "/grpc.health.v1.Health/"


@dataclass(frozen=True)
class ControlTls:
    """PEM bytes. With `client_ca` a caller needs a certificate that it signed."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None


@dataclass(frozen=True)
class ControlAccess:
    """What a caller needs; without a token and client certificates, nothing."""

    token: str | None = None
    tls: ControlTls | None = None

    @property
    def is_open(self) -> bool:
        """Whether everybody who reaches the address may call."""
        return self.token is None and (self.tls is None or self.tls.client_ca is None)

    def check_address(self, address: str) -> None:
        """Refuse an open service where others than this machine can reach it.

        Raises:
            ConfigurationError: naming what to set.
        """
        if self.is_open and not is_local(address):
            raise ConfigurationError(
                f"control_address: {address} can be reached by others; set {ENV_CONTROL_TOKEN}, "
                "control_token_file or control_tls_client_ca, or listen on loopback"
            )

    def interceptors(self) -> list[grpc.ServerInterceptor]:
        """What a server runs before each call."""
        return [] if self.token is None else [_TokenCheck(self.token)]

    def add_port(self, server: grpc.Server, address: str) -> int:
        """Let a server listen; returns the port. A Unix socket is its user's only.

        Raises:
            RuntimeError: the address cannot be had.
        """
        mask = os.umask(0o177) if address.startswith("unix:") else None
        try:
            return self._add_port(server, address)
        finally:
            if mask is not None:
                os.umask(mask)

    def _add_port(self, server: grpc.Server, address: str) -> int:
        if self.tls is None:
            return server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [(self.tls.key, self.tls.certificate)],
            root_certificates=self.tls.client_ca,
            require_client_auth=self.tls.client_ca is not None,
        )
        return server.add_secure_port(address, credentials)


OPEN_ACCESS: Final = ControlAccess()


def read_access(
    *,
    token_file: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_client_ca: str | None = None,
) -> ControlAccess:
    """Access by settings and environment; the environment's token wins over the file's.

    Raises:
        ConfigurationError: listing every problem.
    """
    problems: list[str] = []

    def read(name: str, path: str | None) -> bytes | None:
        if path is None:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            problems.append(f"{name}: {path}: {error.strerror}")
            return None

    from_file = read("control_token_file", token_file)
    token = os.environ.get(ENV_CONTROL_TOKEN) or None
    name = ENV_CONTROL_TOKEN if token is not None else "control_token_file"
    if token is None and from_file is not None:
        token = from_file.decode("utf-8", "replace").strip()
    if token is not None and (len(token) < MIN_TOKEN_CHARACTERS or not _TOKEN.fullmatch(token)):
        problems.append(f"{name}: at least {MIN_TOKEN_CHARACTERS} visible ASCII characters")
    if (tls_cert is None) != (tls_key is None):
        problems.append("control_tls_cert and control_tls_key: both or neither")
    if tls_client_ca is not None and tls_cert is None:
        problems.append("control_tls_client_ca: needs control_tls_cert and control_tls_key")
    certificate, key = read("control_tls_cert", tls_cert), read("control_tls_key", tls_key)
    client_ca = read("control_tls_client_ca", tls_client_ca)
    if problems:
        raise ConfigurationError("; ".join(problems))
    if certificate is None or key is None:
        return ControlAccess(token)
    return ControlAccess(token, ControlTls(certificate, key, client_ca))


def is_local(address: str) -> bool:
    """Whether only this machine can reach an address: loopback, or a Unix socket."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _TokenCheck(grpc.ServerInterceptor):
    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "grpc.RpcMethodHandler[Any, Any] | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Let health through, and calls with the token."""
        if handler_call_details.method.startswith(_HEALTH) or self._has_token(
            handler_call_details.invocation_metadata
        ):
            return continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)

    def _has_token(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        found = [value for name, value in metadata if name == "authorization"]
        given = found[0] if len(found) == 1 else ""
        as_bytes = given if isinstance(given, bytes) else given.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(as_bytes, self._expected)


def _refuse(request: object, context: grpc.ServicerContext) -> None:
    context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "authorization: Bearer and the control token are needed"
    )
