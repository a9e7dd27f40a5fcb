"""Errors that a client sees, each with its HTTP status and OpenAI type.

RouterError
├── InvalidRequest            400  malformed, or asks for what Cartridges cannot do
├── InvalidApiKey             401  no key, an unknown one, or one of no tenant: WWW-Authenticate
├── InvalidAdminToken         401  for operators: WWW-Authenticate
├── UnknownModel              404
├── UnknownCartridge          404  absent, or not for this caller: the same answer
├── UnknownReceipt            404
├── UnknownResponse           404  absent, or of another tenant: the same answer
├── UnknownReplica            404  for operators
├── UnknownPath               404
├── MethodNotAllowed          405
├── RequestTimeout            408  the body came too slowly
├── ReplicaExists             409  at another address; for operators
├── IncompatibleCartridge     409  names the field
├── RequestTooLarge           413  larger than a body, or a minute of the tenant, may be
├── ContextTooLong            422  with the numbers
├── RateLimitExceeded         429  Retry-After; a limit of the tenant
├── AllReplicasSaturated      429  Retry-After; all that could serve are at their limit
│   ├── QueueFull             429  Retry-After; no more may wait for them
│   └── QueueTimeout          429  Retry-After; waited as long as a request may
├── AuthenticationUnavailable 503  Retry-After; the keys of tokens are not known now
├── NoEligibleReplica         503  Retry-After
├── ResponseUnavailable       503  Retry-After; who keeps it, or knows of it, is away
├── GatewayEnding             503  Retry-After; another gateway, or this one after its restart
├── CartridgeNotServed        503  Retry-After; the engine did not serve the virtual prefix
├── UpstreamUnavailable       502  Retry-After
├── UpstreamTimeout           504
└── DeadlineExceeded          504  the client's own deadline for the first byte

ConfigurationError            not a request's fault: the process does not start
NotDone                       what a command asked of a running gateway
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from cartridge_proto.names import HEADER_CHALLENGE


class ConfigurationError(Exception):
    """The settings cannot work; `problems` lists all of them."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class NotDone(Exception):
    """A running gateway did not do what a command asked, or could not be asked."""


class RouterError(Exception):
    """Base of all errors answered to a client; `param` names the offending field.

    `headers` go into the answer.
    """

    status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    retry_after_s: int | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    is_from_receipt: bool = False
    """An engine said so of the Cartridges; without them the request may be answered."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(RouterError):
    """The request itself is wrong."""

    status = 400
    openai_type = "invalid_request_error"
    code = "invalid_request"


class InvalidApiKey(RouterError):
    """The caller is nobody we know. The message never repeats what was sent."""

    status = 401
    openai_type = "invalid_request_error"
    code = "invalid_api_key"
    headers = MappingProxyType({HEADER_CHALLENGE: "Bearer"})


class InvalidAdminToken(RouterError):
    """Who asks is no operator of this gateway."""

    status = 401
    openai_type = "invalid_request_error"
    code = "invalid_admin_token"
    headers = MappingProxyType({HEADER_CHALLENGE: "Bearer"})


class UnknownModel(RouterError):
    """No replica serves the model."""

    status = 404
    openai_type = "invalid_request_error"
    code = "model_not_found"


class UnknownCartridge(RouterError):
    """No such Cartridge for this caller."""

    status = 404
    openai_type = "invalid_request_error"
    code = "cartridge_not_found"


class UnknownReceipt(RouterError):
    """No receipt under that request id."""

    status = 404
    openai_type = "invalid_request_error"
    code = "receipt_not_found"


class UnknownResponse(RouterError):
    """No such stored response of this caller."""

    status = 404
    openai_type = "invalid_request_error"
    code = "response_not_found"


class UnknownReplica(RouterError):
    """No replica has this name; only operators are told."""

    status = 404
    openai_type = "invalid_request_error"
    code = "replica_not_found"


class UnknownPath(RouterError):
    """Nothing is served at that address."""

    status = 404
    openai_type = "invalid_request_error"
    code = "path_not_found"


class MethodNotAllowed(RouterError):
    """The address is served, by another method."""

    status = 405
    openai_type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(RouterError):
    """The body came too slowly."""

    status = 408
    openai_type = "invalid_request_error"
    code = "request_timeout"


class ReplicaExists(RouterError):
    """The name is taken by a replica at another address; only operators are told."""

    status = 409
    openai_type = "invalid_request_error"
    code = "replica_exists"


class IncompatibleCartridge(RouterError):
    """The Cartridge does not fit the model, the route, or the others."""

    status = 409
    openai_type = "invalid_request_error"
    code = "cartridge_incompatible"


class RequestTooLarge(RouterError):
    """Larger than the limit for a body, or for a minute of the tenant: waiting does not help."""

    status = 413
    openai_type = "invalid_request_error"
    code = "request_too_large"


class ContextTooLong(RouterError):
    """Cartridges and prompt do not fit the context."""

    status = 422
    openai_type = "invalid_request_error"
    code = "context_length_exceeded"


class RateLimitExceeded(RouterError):
    """The tenant is at one of its limits; `retry_after_s` says when there is room."""

    status = 429
    openai_type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after_s = 1

    def __init__(
        self, message: str, *, retry_after_s: int, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.headers = headers or {}


class AllReplicasSaturated(RouterError):
    """Every replica that could serve is at its limit; `retry_after_s` is a guess at the queue."""

    status = 429
    openai_type = "rate_limit_error"
    code = "all_replicas_saturated"
    retry_after_s = 1

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(AllReplicasSaturated):
    """As many requests wait as may."""

    code = "queue_full"


class QueueTimeout(AllReplicasSaturated):
    """The request has waited as long as one may."""

    code = "queue_timeout"


class AuthenticationUnavailable(RouterError):
    """Whether a token is valid cannot be said before its issuer's keys are fetched."""

    status = 503
    code = "authentication_unavailable"
    retry_after_s = 2


class NoEligibleReplica(RouterError):
    """No replica can serve the request at all."""

    status = 503
    code = "no_eligible_replica"
    retry_after_s = 2


class ResponseUnavailable(RouterError):
    """A stored response may be there, and cannot be had now."""

    status = 503
    code = "response_unavailable"
    retry_after_s = 2


class GatewayEnding(RouterError):
    """This gateway ends, and has waited for the answer as long as it may."""

    status = 503
    code = "gateway_ending"
    retry_after_s = 2


class CartridgeNotServed(RouterError):
    """The engine did not serve the virtual prefix; nothing was generated from it."""

    status = 503
    code = "cartridge_not_served"
    retry_after_s = 2


class UpstreamUnavailable(RouterError):
    """No replica could be reached, or it broke off before an answer."""

    status = 502
    code = "upstream_unavailable"
    retry_after_s = 2


class UpstreamTimeout(RouterError):
    """A replica accepted the request and did not answer in time."""

    status = 504
    code = "upstream_timeout"


class DeadlineExceeded(RouterError):
    """The first byte did not come before the client's own deadline."""

    status = 504
    code = "deadline_exceeded"
