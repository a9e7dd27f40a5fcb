"""Every name that crosses a process boundary, spelled once.

Owns HTTP headers, JSON fields, Redis keys, metric and environment names. Refuses logic: constants
and key formats only, so that a rename is one diff.
"""

from typing import Final

# --- HTTP headers: request -------------------------------------------------------------------
HEADER_CARTRIDGE_IDS: Final = "x-cartridge-ids"
HEADER_SESSION: Final = "x-session-id"
HEADER_POLICY: Final = "x-cartridge-policy"
HEADER_EXPLAIN: Final = "x-cartridge-explain"
HEADER_PRIORITY: Final = "x-cartridge-priority"
HEADER_DEADLINE_MS: Final = "x-cartridge-deadline-ms"
HEADER_ON_MISS: Final = "x-cartridge-on-miss"
HEADER_REQUEST_ID: Final = "x-request-id"
"""To an engine the id of this gateway; to a client its own, where that can be said back."""

HEADER_AUTHORIZATION: Final = "authorization"
HEADER_X_API_KEY: Final = "x-api-key"
HEADER_API_KEY: Final = "api-key"
HEADER_ENGINE_PRIORITY: Final = "x-vllm-priority"
HEADER_ENGINE_RANK: Final = "x-data-parallel-rank"
"""Headers by which vLLM is told what only an operator may say."""

# --- HTTP headers: response ------------------------------------------------------------------
HEADER_PREFIX: Final = "x-cartridge-"
HEADER_OWN_REQUEST_ID: Final = "x-cartridge-request-id"
"""The gateway's id of a request: receipts are found by it."""
HEADER_DIGEST: Final = "x-cartridge-digest"
HEADER_REPLICA: Final = "x-cartridge-replica"
HEADER_TIER: Final = "x-cartridge-tier"
HEADER_DECISION: Final = "x-cartridge-decision"
HEADER_SELECTION: Final = "x-cartridge-selection"
HEADER_MAP_AGE_MS: Final = "x-cartridge-map-age-ms"
HEADER_OVERHEAD_MS: Final = "x-cartridge-overhead-ms"
HEADER_QUEUED_MS: Final = "x-cartridge-queued-ms"
HEADER_EXPLANATION: Final = "x-cartridge-explanation"
HEADER_CHALLENGE: Final = "www-authenticate"


def rate_limit_header(what: str, unit: str) -> str:
    """`limit`, `remaining` or `reset` of `requests` or `tokens`, as OpenAI names them."""
    return f"x-ratelimit-{what}-{unit}"


# --- JSON fields of a request body -----------------------------------------------------------
FIELD_CARTRIDGE_IDS: Final = "cartridge_ids"
FIELD_KV_TRANSFER_PARAMS: Final = "kv_transfer_params"
FIELD_CARTRIDGES: Final = "cartridges"
FIELD_CACHE_SALT: Final = "cache_salt"
FIELD_KV_HINTS: Final = "kv_hints"
FIELD_EC_TRANSFER_PARAMS: Final = "ec_transfer_params"
FIELD_REQUEST_ID: Final = "request_id"
FIELD_PRIORITY: Final = "priority"
FIELD_PREVIOUS_RESPONSE: Final = "previous_response_id"
FIELD_PROMPT: Final = "prompt"
FIELD_MESSAGES: Final = "messages"
FIELD_INSTRUCTIONS: Final = "instructions"
FIELD_SYSTEM: Final = "system"
FIELD_CONTENT: Final = "content"
FIELD_ROLE: Final = "role"
FIELD_PROMPT_EMBEDS: Final = "prompt_embeds"
FIELD_CHAT_TEMPLATE: Final = "chat_template"
FIELD_CHAT_TEMPLATE_KWARGS: Final = "chat_template_kwargs"
FIELD_ADD_SPECIAL_TOKENS: Final = "add_special_tokens"
FIELD_RECEIPT: Final = "cartridge_receipt"
FIELD_SELF_TEST: Final = "cartridge_self_test"

# --- chat template switch (docs/spec/virtual-prefix-v1.md, "Prompt convention") ---------------
TEMPLATE_SWITCH: Final = "cartridge_system_turn"

# --- Redis -----------------------------------------------------------------------------------
REDIS_REPLICAS: Final = "cartridge:replicas"
"""Set of replica ids that have ever registered and not been removed."""
REDIS_CHANGES: Final = "cartridge:residency:changes"
"""Stream of signed residency changes, one entry per change."""
REDIS_RECEIPTS: Final = "cartridge:receipts"
"""Stream of signed receipts, one entry per finished request that used a Cartridge."""
REDIS_LOADS: Final = "cartridge:loads"
"""Channel on which gateways tell one another what they have booked on each replica, signed."""
STREAM_FIELD: Final = "e"
"""The one field of every stream entry: a sealed envelope."""


def residency_key(replica: str) -> str:
    """Hash of one replica: artifact digest -> sealed residency record."""
    return f"cartridge:residency:{replica}"


def lease_key(replica: str) -> str:
    """String with TTL: the sealed registration of a live replica."""
    return f"cartridge:lease:{replica}"


REDIS_USER_ADMIN: Final = "cartridge-admin"
REDIS_USER_GATEWAY: Final = "cartridge-gateway"


def redis_user_of_engine(replica: str) -> str:
    """Name of the Redis user of one replica."""
    return f"cartridge-engine-{replica}"


# --- control ---------------------------------------------------------------------------------
CONTROL_OWNER: Final = "cartridge-router"
"""Owner of the pins that gateways make; one name for all, so that any of them can end them."""

# --- environment -----------------------------------------------------------------------------
ENV_PREFIX: Final = "CARTRIDGE_ROUTER_"
ENV_RESIDENCY_KEY: Final = "CARTRIDGE_ROUTER_RESIDENCY_KEY"
ENV_WORKER: Final = "CARTRIDGE_ROUTER_WORKER"
"""What a gateway's process tells the workers that it starts."""
ENV_ADMIN_TOKEN: Final = "CARTRIDGE_ROUTER_ADMIN_TOKEN"  # noqa: S105 - the name, no secret
ENV_CONTROL_TOKEN: Final = "CARTRIDGE_ROUTER_CONTROL_TOKEN"  # noqa: S105 - the name, no secret
ENV_LOADTEST_API_KEY: Final = "CARTRIDGE_LOADTEST_API_KEY"
"""Key that a load test shows to a gateway."""
ENV_REDIS_USERNAME: Final = "CARTRIDGE_ROUTER_REDIS_USERNAME"
"""User of a gateway or an engine in Redis, where the URL names none."""
ENV_REDIS_PASSWORD: Final = "CARTRIDGE_ROUTER_REDIS_PASSWORD"  # noqa: S105 - the name, no secret
ENV_REDIS_PASSWORD_FILE: Final = "CARTRIDGE_ROUTER_REDIS_PASSWORD_FILE"  # noqa: S105 - the same
ENV_REDIS_USER_PASSWORD_PREFIX: Final = "CARTRIDGE_REDIS_PASSWORD_"  # noqa: S105 - the same
"""Before ADMIN, GATEWAY or ENGINE_{replica}: passwords that `redis-acl` gives to users."""
ENV_FAILPOINT: Final = "CARTRIDGE_FAILPOINT"
ENV_STORE_USERNAME: Final = "CARTRIDGE_STORE_USERNAME"
"""Account at an OCI registry or a Redis store; `s3` stores read the variables of AWS."""
ENV_STORE_PASSWORD: Final = "CARTRIDGE_STORE_PASSWORD"  # noqa: S105 - the name, no secret

# --- stores (docs/spec/store-v1.md) -----------------------------------------------------------
MEDIA_TYPE_ARTIFACT: Final = "application/vnd.cartridge.artifact.v1"
MEDIA_TYPE_MANIFEST: Final = "application/vnd.cartridge.manifest.v1+json"
MEDIA_TYPE_BLOB: Final = "application/vnd.cartridge.blob.v1.safetensors"
MEDIA_TYPE_ENCODED_BLOB: Final = "application/vnd.cartridge.blob.v1.encoded"
MEDIA_TYPE_OCI_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"


def store_blob_key(prefix: str, digest: str) -> str:
    """String of a Redis store: the bytes of a blob."""
    return f"{prefix}:blob:{digest}"


def store_manifest_key(prefix: str, digest: str) -> str:
    """String of a Redis store: the bytes of a manifest."""
    return f"{prefix}:manifest:{digest}"


def store_manifests_key(prefix: str) -> str:
    """Set of a Redis store: the digests of all manifests."""
    return f"{prefix}:manifests"


def store_aliases_key(prefix: str) -> str:
    """Hash of a Redis store: alias -> digest."""
    return f"{prefix}:aliases"


# --- domain separation of hashes and signatures ------------------------------------------------
DOMAIN_COMPOSITION: Final = b"cartridge-composition-v1"
DOMAIN_FINGERPRINT: Final = b"cartridge-model-fingerprint-v1"
DOMAIN_ENVELOPE: Final = b"cartridge-envelope-v1"
DOMAIN_TENANT_SALT: Final = b"cartridge-tenant-salt-v1"

# --- entry points ----------------------------------------------------------------------------
ENTRY_POINT_COMMANDS: Final = "cartridge_router.commands"
CONNECTOR_CLASS: Final = "CartridgeConnector"
CONNECTOR_MODULE: Final = "cartridge_engine_ext.connector"

# --- metrics (Prometheus) --------------------------------------------------------------------
METRIC_REQUESTS: Final = "cartridge_router_requests"
METRIC_REQUEST_SECONDS: Final = "cartridge_router_request_seconds"
METRIC_TTFB_SECONDS: Final = "cartridge_router_time_to_first_byte_seconds"
METRIC_OVERHEAD_SECONDS: Final = "cartridge_router_overhead_seconds"
METRIC_IN_FLIGHT: Final = "cartridge_router_in_flight"
METRIC_QUEUED: Final = "cartridge_router_queued"
METRIC_SEARCHES: Final = "cartridge_router_searches"
METRIC_SEARCH_SECONDS: Final = "cartridge_router_search_seconds"
METRIC_QUEUE_SECONDS: Final = "cartridge_router_queue_seconds"
METRIC_REPLICA_HEALTHY: Final = "cartridge_router_replica_healthy"
METRIC_REPLICAS: Final = "cartridge_router_replicas"
METRIC_DISCOVERY_FAILURES: Final = "cartridge_router_discovery_failures"
METRIC_MAP_MODE: Final = "cartridge_router_residency_mode"
METRIC_MAP_AGE: Final = "cartridge_router_residency_age_seconds"
METRIC_REJECTED_RECORDS: Final = "cartridge_router_rejected_records"
METRIC_RECEIPTS: Final = "cartridge_router_receipts"
METRIC_PREDICTION_RATIO: Final = "cartridge_router_prediction_ratio"
METRIC_FALLBACKS: Final = "cartridge_router_fallbacks"
METRIC_REGRET_RATIO: Final = "cartridge_router_regret_ratio"
METRIC_MISPREDICTIONS: Final = "cartridge_router_tier_mispredictions"
METRIC_UPSTREAM_RETRIES: Final = "cartridge_router_upstream_retries"
METRIC_REFUSED_CONNECTIONS: Final = "cartridge_router_refused_connections"
METRIC_CONNECTIONS: Final = "cartridge_router_connections"
METRIC_RELOAD_FAILURES: Final = "cartridge_router_reload_failures"
METRIC_EJECTIONS: Final = "cartridge_router_ejections"
METRIC_BROKEN_ANSWERS: Final = "cartridge_router_broken_answers"
METRIC_CUT_ANSWERS: Final = "cartridge_router_cut_answers"
METRIC_COPIES: Final = "cartridge_router_copies"

# --- trace spans and attributes (OpenTelemetry) ------------------------------------------------
ATTR_REPLICA: Final = "cartridge.replica"
ATTR_DECISION: Final = "cartridge.decision"
ATTR_DIGESTS: Final = "cartridge.digests"
ATTR_MODEL: Final = "gen_ai.request.model"
ATTR_OPERATION: Final = "gen_ai.operation.name"
ATTR_PROVIDER: Final = "gen_ai.provider.name"
ATTR_STATUS: Final = "http.response.status_code"
ATTR_ERROR: Final = "error.type"
ATTR_REQUEST_ID: Final = "cartridge.request_id"
"""With those of GenAI and HTTP by the semantic conventions of OpenTelemetry."""

# Prometheus metrics of the engine extension, beside vLLM's own.
METRIC_ENGINE_REQUESTS: Final = "cartridge_engine_requests"
METRIC_ENGINE_TOKENS: Final = "cartridge_engine_tokens"
METRIC_ENGINE_ABANDONED: Final = "cartridge_engine_abandoned"
METRIC_ENGINE_REFUSALS: Final = "cartridge_engine_refusals"
METRIC_ENGINE_LOADED_BYTES: Final = "cartridge_engine_loaded_bytes"
METRIC_ENGINE_LOAD_SECONDS: Final = "cartridge_engine_load_seconds"
METRIC_ENGINE_ENTERED: Final = "cartridge_engine_tier_entered"
METRIC_ENGINE_LEFT: Final = "cartridge_engine_tier_left"
METRIC_ENGINE_RESIDENCY_SECONDS: Final = "cartridge_engine_residency_seconds"
METRIC_ENGINE_RESIDENT_BYTES: Final = "cartridge_engine_resident_bytes"
METRIC_ENGINE_QUARANTINED: Final = "cartridge_engine_quarantined"
METRIC_ENGINE_HINTS: Final = "cartridge_engine_hints"

# Prometheus metrics of the node agent.
METRIC_AGENT_RESIDENT_ARTIFACTS: Final = "cartridge_agent_resident_artifacts"
METRIC_AGENT_RESIDENT_BYTES: Final = "cartridge_agent_resident_bytes"
METRIC_AGENT_EVICTIONS: Final = "cartridge_agent_evictions"
METRIC_AGENT_LOADS: Final = "cartridge_agent_loads"
METRIC_AGENT_ENGINES: Final = "cartridge_agent_engines"
METRIC_AGENT_DRAM_USED_BYTES: Final = "cartridge_agent_dram_used_bytes"
METRIC_AGENT_DRAM_CAPACITY_BYTES: Final = "cartridge_agent_dram_capacity_bytes"

SPAN_PREFIX: Final = "cartridge.prefix"
ATTRIBUTE_COMPOSITION: Final = "cartridge.composition"
ATTRIBUTE_TIER: Final = "cartridge.tier"
ATTRIBUTE_NUM_TOKENS: Final = "cartridge.num_tokens"
ATTRIBUTE_NUM_REUSED_TOKENS: Final = "cartridge.num_reused_tokens"
ATTRIBUTE_LOADED_BYTES: Final = "cartridge.loaded_bytes"
ATTRIBUTE_NUM_LOADS: Final = "cartridge.num_loads"
ATTRIBUTE_REASON: Final = "cartridge.reason"
