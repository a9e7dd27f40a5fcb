"""What the gateway serves, as OpenAPI 3.1: its own routes and fields, and where engines answer.

Owns the description; tests hold it against the routes and answers of a live gateway.
Refuses what engines take and answer.

Source: OpenAPI Specification 3.1.1.
"""

import http
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from cartridge_policies import POLICIES
from cartridge_proto import names
from cartridge_proto.residency import Receipt, Tier
from cartridge_router.errors import (
    AllReplicasSaturated,
    AuthenticationUnavailable,
    CartridgeNotServed,
    ContextTooLong,
    DeadlineExceeded,
    GatewayEnding,
    IncompatibleCartridge,
    InvalidAdminToken,
    InvalidApiKey,
    InvalidRequest,
    NoEligibleReplica,
    QueueFull,
    QueueTimeout,
    RateLimitExceeded,
    ReplicaExists,
    RequestTimeout,
    RequestTooLarge,
    ResponseUnavailable,
    RouterError,
    UnknownCartridge,
    UnknownModel,
    UnknownPath,
    UnknownReceipt,
    UnknownReplica,
    UnknownResponse,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from cartridge_router.request import Route
from cartridge_router.roster import NamedReplica
from cartridge_router.settings import MAX_PRIORITY, MIN_PRIORITY
from cartridge_router.shapes import (
    AnthropicError,
    CartridgeFields,
    Cartridges,
    EngineFields,
    Error,
    Explanation,
    Health,
    Model,
    Models,
    Readiness,
    ReplicaEntry,
    Replicas,
)
from cartridge_router.steering import MAX_DEADLINE_MS, ON_MISS, YES

API_VERSION: Final = "1.0.0"
"""Of what is described here, not of the package."""
EXAMPLE_MODEL: Final = "smollm2-135m-instruct"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_REF: Final = "#/components/schemas/{name}"
Described = dict[str, Any]


_SHAPES: Final[tuple[type, ...]] = (
    *(CartridgeFields, EngineFields, Error, AnthropicError, Model, Models, Cartridges),
    *(Explanation, Receipt, Health, Readiness),
)
_ADMIN_SHAPES: Final[tuple[type, ...]] = (Error, NamedReplica, ReplicaEntry, Replicas)

_KEYED: Final = (InvalidApiKey, AuthenticationUnavailable)
_READ: Final = (InvalidRequest, RequestTimeout, RequestTooLarge, RateLimitExceeded)
_PLACED: Final = (UnknownModel, AllReplicasSaturated, NoEligibleReplica)
_QUEUED: Final = (QueueFull, QueueTimeout, DeadlineExceeded)
_CHOSEN: Final = (UnknownCartridge, IncompatibleCartridge, ContextTooLong)
_FORWARDED: Final = (UpstreamUnavailable, UpstreamTimeout, GatewayEnding)
_STORED: Final = (UnknownResponse, ResponseUnavailable)

_RETRY_AFTER: Final = {
    "description": "Seconds after which to ask again.",
    "schema": {"type": "string", "pattern": "^[0-9]+$"},
}
_TOLD: Final = {
    names.HEADER_OWN_REQUEST_ID: (
        "The gateway's id of this request: its receipt is found by it.",
        "^[0-9a-f]{32}$",
    ),
    names.HEADER_REQUEST_ID: ("The client's own id, where it sent one.", "^[ -~]{1,128}$"),
    names.HEADER_REPLICA: ("The replica that answered.", None),
    names.HEADER_DECISION: ("Why it was chosen.", None),
    names.HEADER_SELECTION: ("How the Cartridges were found.", "^(explicit|none)$"),
    names.HEADER_OVERHEAD_MS: ("What the gateway itself took.", r"^[0-9]+\.[0-9]{2}$"),
    names.HEADER_QUEUED_MS: ("How long the request waited for room.", "^[0-9]+$"),
    names.HEADER_EXPLANATION: ("Costs of the best candidates, JSON.", None),
    names.HEADER_MAP_AGE_MS: ("Age of what is known of residency.", "^[0-9]+$"),
    names.HEADER_CARTRIDGE_IDS: ("Aliases of the Cartridges that were used.", None),
    names.HEADER_DIGEST: ("Identity of their composition.", "^sha256:[0-9a-f]{64}$"),
    names.HEADER_TIER: (
        "Where the replica had them, as far as was known.",
        f"^({'|'.join(Tier)})$",
    ),
    **{
        names.rate_limit_header(what, unit): (f"{what} of {unit} in a minute of the tenant.", None)
        for unit in ("requests", "tokens")
        for what in ("limit", "remaining", "reset")
    },
}
"""Headers of an answer, each with what it says and its pattern."""
_ALWAYS: Final = frozenset({names.HEADER_OWN_REQUEST_ID, names.HEADER_REQUEST_ID})


@dataclass(frozen=True, kw_only=True)
class _Operation:
    """One method of one path.

    `answer`: what an answer holds, a shape or a media type; `None` where an engine answers.
    `also`: other statuses with the same shape.
    `is_open`: no key is asked for.
    """

    method: str = "get"
    path: str
    summary: str
    tag: str
    answer: type | str | None = None
    also: Sequence[http.HTTPStatus] = ()
    body: type | None = None
    errors: Sequence[type[RouterError]] = ()
    parameters: Sequence[Described] = ()
    is_anthropic: bool = False
    is_open: bool = False
    has_stream: bool = False

    def described(self) -> Described:
        """The Operation Object."""
        found: Described = {
            "operationId": f"{self.method}{_words(self.path)}",
            "summary": self.summary,
            "tags": [self.tag],
            "responses": dict(sorted((self._answers() | self._refusals()).items())),
        }
        parameters = [*_path_parameters(self.path), *self.parameters]
        if parameters:
            found["parameters"] = parameters
        if self.body is not None:
            content = _content(self.body)
            if self.body in (CartridgeFields, EngineFields):
                content[_JSON]["example"] = {"model": EXAMPLE_MODEL}
            found["requestBody"] = {"required": True, "content": content}
        if self.is_open:
            found["security"] = []
        return found

    def _answers(self) -> Described:
        if self.answer is not None:
            good = _response("What was asked for.", _content(self.answer), {})
            statuses = (http.HTTPStatus.OK, *self.also)
            return {str(int(status)): good for status in statuses}
        if not self.has_stream:
            return {"default": _response("What the engine answered.", {}, _headers())}
        content: Described = {_JSON: {"schema": {}}, _EVENTS: {"schema": {"type": "string"}}}
        return {"200": _response("What the engine answered.", content, _headers())}

    def _refusals(self) -> Described:
        content = _content(AnthropicError if self.is_anthropic else Error)
        by_status: dict[int, list[type[RouterError]]] = {}
        for error in dict.fromkeys(self.errors):
            by_status.setdefault(error.status, []).append(error)
        found = {}
        for status, errors in by_status.items():
            text = "; ".join(f"`{error.code}`: {_sentence(error)}" for error in errors)
            headers = _headers() if self.answer is None else {}
            if headers and UnknownPath in errors:
                # A path that no route takes, as one with a line feed in it, is no request yet.
                headers |= {name: _header(name, is_required=False) for name in _ALWAYS}
            if any(error.retry_after_s is not None for error in errors):
                headers["Retry-After"] = _RETRY_AFTER
            if status == http.HTTPStatus.UNAUTHORIZED:
                challenge = {"description": "How to log in.", "schema": {"type": "string"}}
                headers["WWW-Authenticate"] = {**challenge, "required": True}
            found[str(status)] = _response(text, content, headers)
        return found


def _sentence(error: type[RouterError]) -> str:
    return (error.__doc__ or "").partition("\n")[0]


def _content(held: type | str) -> Described:
    """A shape as JSON, or a text of a media type."""
    if isinstance(held, str):
        return {held: {"schema": {} if held == _JSON else {"type": "string"}}}
    return {_JSON: {"schema": {"$ref": _REF.format(name=held.__name__)}}}


def _words(path: str) -> str:
    """A path as the rest of a camel-cased name."""
    parts = path.replace("{", "").replace("}", "").replace("_", "/").split("/")
    return "".join(part[:1].upper() + part[1:] for part in parts)


def _response(text: str, content: Described, headers: Described) -> Described:
    found: Described = {"description": text}
    if headers:
        found["headers"] = headers
    if content:
        found["content"] = content
    return found


def _headers() -> Described:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in _TOLD}


def _told() -> Described:
    """The headers that those references mean."""
    return {name: _header(name, is_required=name in _ALWAYS) for name in _TOLD}


def _header(name: str, *, is_required: bool) -> Described:
    text, pattern = _TOLD[name]
    schema = {"type": "string"} | ({} if pattern is None else {"pattern": pattern})
    return {"description": text, "schema": schema} | ({"required": True} if is_required else {})


def _path_parameters(path: str) -> list[Described]:
    names_ = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
        for name in names_
    ]


_ID_HEADER: Final[Described] = {
    "name": names.HEADER_REQUEST_ID,
    "in": "header",
    "required": False,
    "description": "Said back in the answer, if it is 1 to 128 printable ASCII characters.",
    "schema": {"type": "string"},
}
_CARTRIDGE_HEADER: Final[Described] = {
    "name": names.HEADER_CARTRIDGE_IDS,
    "in": "header",
    "required": False,
    "description": "Cartridges for clients that cannot add a field, separated by commas.",
    "schema": {"type": "string"},
}
_STEERING: Final[tuple[Described, ...]] = tuple(
    {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
    for name, text, schema in (
        (
            names.HEADER_PRIORITY,
            "Higher goes first where requests wait; a tenant may not go above its own.",
            {"type": "integer", "minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY, "default": 0},
        ),
        (
            names.HEADER_DEADLINE_MS,
            "Milliseconds until the first byte of the answer.",
            {"type": "integer", "minimum": 1, "maximum": MAX_DEADLINE_MS},
        ),
        (
            names.HEADER_POLICY,
            "Placement policy of this request.",
            {"enum": sorted(POLICIES)},
        ),
        (
            names.HEADER_ON_MISS,
            "What to do where the Cartridges cannot be had: fail, put their texts into the prompt "
            "(also where that is predicted to be sooner), or go without.",
            {"enum": list(ON_MISS)},
        ),
        (
            names.HEADER_EXPLAIN,
            "Whether the answer tells the costs of the best candidates.",
            {"enum": list(YES), "default": "0"},
        ),
        (
            names.HEADER_SESSION,
            "Name of the conversation, for policies that keep its requests on one replica.",
            {"type": "string"},
        ),
    )
)
_POLICY_HEADER: Final = next(each for each in _STEERING if each["name"] == names.HEADER_POLICY)
_ON_MISS_HEADER: Final = next(each for each in _STEERING if each["name"] == names.HEADER_ON_MISS)
_EXPLAINED_ROUTES: Final = (Route.CHAT, Route.COMPLETIONS, Route.RESPONSES, Route.MESSAGES)
_ROUTE_QUERY: Final[Described] = {
    "name": "route",
    "in": "query",
    "required": False,
    "description": "The route that the body is meant for.",
    "schema": {"enum": [str(route) for route in _EXPLAINED_ROUTES], "default": str(Route.CHAT)},
}
_OUTSIDE_V1: Final = (
    *("/tokenize", "/detokenize", "/pooling", "/classify"),
    *("/score", "/rerank", "/v2/rerank"),
)


def _generating(route: Route, summary: str) -> _Operation:
    return _Operation(
        method="post",
        path=str(route),
        summary=summary,
        tag="generate",
        body=CartridgeFields,
        errors=(
            *(*_KEYED, *_READ, *_PLACED, *_QUEUED),
            *(*_CHOSEN, CartridgeNotServed, *_FORWARDED),
            *(_STORED if route is Route.RESPONSES else ()),
        ),
        parameters=(_CARTRIDGE_HEADER, *_STEERING, _ID_HEADER),
        is_anthropic=route is Route.MESSAGES,
        has_stream=True,
    )


def _passed(method: str, path: str) -> _Operation:
    return _Operation(
        method=method,
        path=path,
        summary="Passed to a replica as it is",
        tag="engine",
        body=EngineFields if method == "post" else None,
        parameters=(*_STEERING, _ID_HEADER),
        errors=(
            *(*_KEYED, *_READ, *_PLACED, *_QUEUED, UnknownPath, *_FORWARDED),
            *(_STORED if path == "/v1/{tail}" else ()),
        ),
        is_anthropic=path == Route.COUNT_TOKENS,
    )


_OPERATIONS: Final = (
    _generating(Route.CHAT, "Answer a chat, with Cartridges or without"),
    _generating(Route.COMPLETIONS, "Complete a text, with Cartridges or without"),
    _generating(Route.RESPONSES, "Make a response, with Cartridges or without"),
    _generating(Route.MESSAGES, "Answer messages in Anthropic's API, with Cartridges or without"),
    _Operation(
        path="/v1/models",
        summary="Models of all healthy replicas",
        tag="models",
        answer=Models,
        errors=_KEYED,
    ),
    _Operation(
        path="/v1/models/{model}",
        summary="One of them",
        tag="models",
        answer=Model,
        errors=(*_KEYED, UnknownModel),
    ),
    _Operation(
        path="/v1/cartridges",
        summary="Cartridges the caller may use",
        tag="cartridges",
        answer=Cartridges,
        errors=_KEYED,
    ),
    _Operation(
        method="post",
        path="/v1/cartridges/explain",
        summary="What a request would do",
        tag="cartridges",
        answer=Explanation,
        body=CartridgeFields,
        errors=(*_KEYED, *_READ, *_PLACED, *_CHOSEN),
        parameters=(_ROUTE_QUERY, _CARTRIDGE_HEADER, _POLICY_HEADER, _ON_MISS_HEADER),
    ),
    _Operation(
        path="/v1/cartridges/receipts/{request_id}",
        summary="What an engine did for one request",
        tag="cartridges",
        answer=Receipt,
        errors=(*_KEYED, UnknownReceipt),
    ),
    _Operation(
        path="/health",
        summary="Whether this process works",
        tag="process",
        answer=Health,
        is_open=True,
    ),
    _Operation(
        path="/ready",
        summary="Whether requests are to come here",
        tag="process",
        answer=Readiness,
        is_open=True,
        also=(http.HTTPStatus.SERVICE_UNAVAILABLE,),
    ),
    _Operation(
        path="/metrics",
        summary="Metrics for Prometheus",
        tag="process",
        answer="text/plain",
        is_open=True,
    ),
    _Operation(
        path="/openapi.json",
        summary="This description",
        tag="process",
        answer=_JSON,
        is_open=True,
    ),
    *(_passed("post", path) for path in (*_OUTSIDE_V1, str(Route.COUNT_TOKENS))),
    *(_passed(method, "/v1/{tail}") for method in ("post", "get", "delete")),
)

_OF_OPERATORS: Final = (InvalidRequest, InvalidAdminToken)
_ADMIN_OPERATIONS: Final = (
    _Operation(
        path="/admin/state",
        summary="Everything that the page at /ui shows",
        tag="state",
        answer=_JSON,
        errors=_OF_OPERATORS,
    ),
    _Operation(
        path="/admin/replicas",
        summary="All replicas",
        tag="replicas",
        answer=Replicas,
        errors=_OF_OPERATORS,
    ),
    _Operation(
        method="post",
        path="/admin/replicas",
        summary="Let a replica join",
        tag="replicas",
        answer=ReplicaEntry,
        body=NamedReplica,
        errors=(*_OF_OPERATORS, ReplicaExists, RequestTimeout, RequestTooLarge),
        also=(http.HTTPStatus.CREATED,),
    ),
    _Operation(
        method="delete",
        path="/admin/replicas/{name}",
        summary="Send it no more requests",
        tag="replicas",
        answer=ReplicaEntry,
        errors=(*_OF_OPERATORS, UnknownReplica),
    ),
)


def gateway_description() -> Described:
    """What clients of a gateway may ask."""
    keys = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": names.HEADER_X_API_KEY},
        "api-key": {"type": "apiKey", "in": "header", "name": names.HEADER_API_KEY},
    }
    return _description(
        "Cartridge Router",
        "An OpenAI-compatible gateway that serves documents as KV prefixes. Engines answer; what "
        "they take and answer beyond the fields named here is in vLLM's own description. Keys are "
        "asked for where the operator has set tenants.",
        _OPERATIONS,
        _SHAPES,
        keys,
    )


def admin_description() -> Described:
    """What operators of a gateway may ask, on the listener of `admin.port`."""
    return _description(
        "Cartridge Router, for operators",
        "Which replicas there are. A token is asked for where one is set.",
        _ADMIN_OPERATIONS,
        _ADMIN_SHAPES,
        {"bearer": {"type": "http", "scheme": "bearer"}},
    )


def _description(
    title: str,
    text: str,
    operations: Iterable[_Operation],
    shapes: Sequence[type],
    logins: Described,
) -> Described:
    paths: dict[str, Described] = {}
    responses: dict[str, Described] = {}
    for operation in operations:
        described = operation.described()
        paths.setdefault(operation.path, {})[operation.method] = described
        described["responses"] = {
            status: {"$ref": f"#/components/responses/{_shared(responses, status, response)}"}
            for status, response in described["responses"].items()
        }
    _, schemas = msgspec.json.schema_components(shapes, ref_template=_REF)
    components: Described = {
        "schemas": dict(sorted(schemas.items())),
        "responses": responses,
        "securitySchemes": logins,
    }
    if any("headers" in response for response in responses.values()):
        components["headers"] = _told()
    return {
        "openapi": "3.1.1",
        "info": {"title": title, "version": API_VERSION, "description": text},
        "security": [*({name: []} for name in logins), {}],
        "paths": paths,
        "components": components,
    }


def _shared(responses: dict[str, Described], status: str, response: Described) -> str:
    """The name of a response that many operations have; it is put among the others if it is new."""
    same = (name for name, other in responses.items() if other == response)
    named = f"{status}.{sum(name.startswith(f'{status}.') for name in responses) + 1}"
    name = next((name for name in same if name.startswith(f"{status}.")), named)
    responses[name] = response
    return name


DESCRIPTION: Final = msgspec.json.encode(gateway_description())
"""As it is served."""
