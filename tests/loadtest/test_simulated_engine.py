"""The simulated engine's virtual prefix: which bytes answer, what is refused, what is published."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import redis

from cartridge_loadtest.openai_bodies import Endpoint
from cartridge_loadtest.simulated_engine import EngineSettings, derive_identity
from cartridge_proto.codec import RejectedRecord, unseal
from cartridge_proto.composition import CompositionMessage
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import (
    Adapter,
    ConventionKind,
    Manifest,
    PositionLayout,
    manifest_digest,
)
from cartridge_proto.names import (
    REDIS_RECEIPTS,
    REDIS_REPLICAS,
    STREAM_FIELD,
    lease_key,
    residency_key,
)
from cartridge_proto.residency import (
    FailureReason,
    Receipt,
    ReceiptStatus,
    Registration,
    ResidencyRecord,
    ResidencyState,
    Tier,
)
from cartridge_proto.stores import LocalStore
from tests.loadtest.cartridge_requests import chat_body, fields_for, message_for, until
from tests.loadtest.replica_client import (
    Client,
    StartReplica,
    mark_of,
    put_sample,
    quick_settings,
)
from tests.proto.sample_artifact import engine_of, sample_artifact

CHAT, TEXT = Endpoint.CHAT.value, Endpoint.TEXT.value
KEY = b"a residency key"
INTERNAL_ERROR = {
    "message": "Internal server error",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}


def receipts_of(client: redis.Redis, key: bytes | None = None) -> list[Receipt]:
    """All published receipts, oldest first."""
    entries: Any = client.xrange(REDIS_RECEIPTS)
    return [unseal(fields[STREAM_FIELD.encode()], Receipt, key) for _, fields in entries]


def rows_of(client: redis.Redis, key: bytes | None = None) -> dict[str, ResidencyRecord]:
    """Published residency rows of `sim-0`, by digest."""
    rows: Any = client.hgetall(residency_key("sim-0"))
    return {digest.decode(): unseal(data, ResidencyRecord, key) for digest, data in rows.items()}


async def ask(client: Client, message: CompositionMessage, **fields: Any) -> tuple[int, Any]:
    """Status and parsed body of a chat request with the composition."""
    status, data = await client.post(CHAT, chat_body(**fields_for(message), **fields))
    return status, json.loads(data)


def flip_a_bit(store: LocalStore, manifest: Manifest) -> None:
    """Damage the last byte of the artifact's payload."""
    path = store.blob_path(Digest(manifest.payload[0].sha256))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


async def test_an_answer_carries_the_bytes_it_was_made_from(
    start_replica: StartReplica, store: LocalStore
) -> None:
    """The marker is the hash of the stored payload, on both endpoints."""
    manifest = put_sample(store)
    client = await start_replica(quick_settings(store))
    marker = f"simulated answer from {mark_of(store, manifest)}"
    _, body = await ask(client, message_for(manifest))
    assert body["choices"][0]["message"]["content"] == marker
    fields = fields_for(message_for(manifest))
    _, text_body = await client.post(TEXT, {"prompt": "x", **fields})
    assert json.loads(text_body)["choices"][0]["text"] == marker


@pytest.mark.parametrize("layout", list(PositionLayout))
async def test_an_ordered_pair_answers_in_its_order(
    start_replica: StartReplica, store: LocalStore, layout: PositionLayout
) -> None:
    """Two artifacts are used in the order of the items, for each layout."""
    one, two = put_sample(store, "one", seed=1), put_sample(store, "two", num_tokens=7, seed=2)
    client = await start_replica(quick_settings(store))
    for pair in ((one, two), (two, one)):
        _, body = await ask(client, message_for(*pair, layout=layout))
        marks = "+".join(mark_of(store, manifest) for manifest in pair)
        assert body["choices"][0]["message"]["content"] == f"simulated answer from {marks}"


async def test_the_receipt_says_where_the_artifact_was(
    start_replica: StartReplica, store: LocalStore
) -> None:
    """The first request is served from remote, the second from dram."""
    manifest = put_sample(store)
    client = await start_replica(quick_settings(store))
    for tier in (Tier.REMOTE, Tier.DRAM):
        _, body = await ask(client, message_for(manifest))
        receipt = msgspec.convert(body["kv_transfer_params"]["cartridge_receipt"], Receipt)
        assert (receipt.status, receipt.reason) == (ReceiptStatus.SERVED, None)
        assert [(item.digest, item.tier) for item in receipt.items] == [
            (manifest_digest(manifest), tier)
        ]
        assert (receipt.num_virtual_tokens, receipt.num_loads) == (manifest.num_tokens, 1)
        assert receipt.loaded_bytes == manifest.payload_bytes
        assert (receipt.request_id, receipt.scope) == ("req-1", "public")


async def test_live_tokens_alone_are_counted_as_prompt(
    start_replica: StartReplica, store: LocalStore
) -> None:
    """`usage.prompt_tokens` does not count virtual positions, as in vLLM."""
    manifest = put_sample(store)
    client = await start_replica(quick_settings(store))
    _, body = await ask(client, message_for(manifest))
    assert body["usage"]["prompt_tokens"] == 4


async def test_a_flipped_bit_is_refused_and_the_replica_lives(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """A corrupt blob gives vLLM's 500, a failed receipt, no row, and no harm to others."""
    bad, good = put_sample(store, "bad", seed=1), put_sample(store, "good", seed=2)
    flip_a_bit(store, bad)
    client = await start_replica(quick_settings(store, redis_url))
    assert await ask(client, message_for(bad)) == (500, {"error": INTERNAL_ERROR})
    status, _ = await ask(client, message_for(good))
    assert status == 200
    with redis.Redis.from_url(redis_url) as inspector:
        await until(lambda: len(receipts_of(inspector)) == 2, "both receipts")
        failed, served = receipts_of(inspector)
        assert (failed.status, failed.reason) == (
            ReceiptStatus.FAILED,
            FailureReason.CORRUPT_ARTIFACT,
        )
        assert bad.payload[0].sha256 in failed.detail
        assert served.status is ReceiptStatus.SERVED
        assert set(rows_of(inspector)) == {manifest_digest(good)}


async def test_a_failed_load_ends_a_stream_with_an_error_event(
    start_replica: StartReplica, store: LocalStore
) -> None:
    """A stream has already said 200: the error comes as an event, and then `[DONE]`."""
    manifest = put_sample(store)
    flip_a_bit(store, manifest)
    client = await start_replica(quick_settings(store))
    fields = fields_for(message_for(manifest))
    status, data = await client.post(CHAT, chat_body(stream=True, **fields))
    role, error, done = data.decode().removesuffix("\n\n").split("\n\n")
    assert status == 200
    assert json.loads(role[6:])["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert json.loads(error[6:]) == {"error": INTERNAL_ERROR}
    assert done == "data: [DONE]"
    _, text_data = await client.post(TEXT, {"prompt": "x", "stream": True, **fields})
    assert len(text_data.decode().removesuffix("\n\n").split("\n\n")) == 2


def _wrong_digest(body: dict[str, Any]) -> None:
    item = body["kv_transfer_params"]["cartridges"]["items"][0]
    item["digest"] = sha256_digest(b"nothing")


def _other_salt(body: dict[str, Any]) -> None:
    body["cache_salt"] = "0" * 64


def _no_salt(body: dict[str, Any]) -> None:
    del body["cache_salt"]


def _other_scope(body: dict[str, Any]) -> None:
    body["kv_transfer_params"]["cartridges"]["scope"] = "somebody-else"


def _longer(body: dict[str, Any]) -> None:
    body["kv_transfer_params"]["cartridges"]["items"][0]["num_tokens"] += 1


def _moved(body: dict[str, Any]) -> None:
    body["kv_transfer_params"]["cartridges"]["items"][0]["offset"] = 1


def _unknown_field(body: dict[str, Any]) -> None:
    body["kv_transfer_params"]["cartridges"]["path"] = "/etc/passwd"


def _not_an_object(body: dict[str, Any]) -> None:
    body["kv_transfer_params"]["cartridges"] = []


def _prompt_logprobs(body: dict[str, Any]) -> None:
    body["prompt_logprobs"] = 1


def _long_prompt(body: dict[str, Any]) -> None:
    body["messages"][0]["content"] = "word " * (8192 - 5)


def _empty_prompt(body: dict[str, Any]) -> None:
    body["messages"][0]["content"] = ""


def _hidden(body: dict[str, Any]) -> None:
    body["kv_transfer_params"]["cartridges"]["visibility"] = [False]


def _drop_on_miss(body: dict[str, Any]) -> None:
    body["kv_transfer_params"]["cartridges"]["on_miss"] = "drop"


@pytest.mark.parametrize(
    ("damage", "reason", "part"),
    [
        (_wrong_digest, FailureReason.UNKNOWN_ARTIFACT, "not in the store"),
        (_other_salt, FailureReason.INVALID_MESSAGE, "cache_salt"),
        (_no_salt, FailureReason.INVALID_MESSAGE, "cache_salt"),
        (_other_scope, FailureReason.INVALID_MESSAGE, "composition"),
        (_longer, FailureReason.INVALID_MESSAGE, "items[0].num_tokens"),
        (_moved, FailureReason.INVALID_MESSAGE, "items.offset"),
        (_unknown_field, FailureReason.INVALID_MESSAGE, "path"),
        (_not_an_object, FailureReason.INVALID_MESSAGE, "object"),
        (_prompt_logprobs, FailureReason.UNSUPPORTED, "prompt_logprobs"),
        (_empty_prompt, FailureReason.UNSUPPORTED, "prompts without a token"),
        (_hidden, FailureReason.INVALID_MESSAGE, "visibility"),
        (_drop_on_miss, FailureReason.UNSUPPORTED, "on_miss drop"),
        (_long_prompt, FailureReason.CONTEXT_LENGTH, "5 Cartridge tokens and 8187 prompt tokens"),
    ],
)
async def test_a_damaged_request_fails_closed(
    start_replica: StartReplica,
    store: LocalStore,
    redis_url: str,
    damage: Callable[[dict[str, Any]], None],
    reason: FailureReason,
    part: str,
) -> None:
    """Each wrong field gives a 500 and a receipt whose reason and detail name it."""
    body = chat_body(**fields_for(message_for(put_sample(store))))
    damage(body)
    client = await start_replica(quick_settings(store, redis_url))
    status, _ = await client.post(CHAT, body)
    assert status == 500
    with redis.Redis.from_url(redis_url) as inspector:
        await until(lambda: len(receipts_of(inspector)) == 1, "a receipt")
        receipt = receipts_of(inspector)[0]
    assert (receipt.status, receipt.reason) == (ReceiptStatus.FAILED, reason)
    assert part in receipt.detail
    assert (receipt.num_loads, receipt.loaded_bytes) == (0, 0)
    is_readable = reason is not FailureReason.INVALID_MESSAGE or part != "object"
    assert receipt.request_id == ("req-1" if is_readable else "unknown")


async def failure_of(
    client: Client, message: CompositionMessage, redis_url: str
) -> tuple[FailureReason | None, str]:
    """Reason and detail of the only receipt, after a request that must fail."""
    status, _ = await ask(client, message)
    assert status == 500
    with redis.Redis.from_url(redis_url) as inspector:
        await until(lambda: len(receipts_of(inspector)) == 1, "a receipt")
        return receipts_of(inspector)[0].reason, receipts_of(inspector)[0].detail


async def test_an_artifact_of_another_model_is_incompatible(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """A manifest whose model differs from a given identity is refused by field name."""
    manifest = put_sample(store)
    other = msgspec.structs.replace(manifest.model, tokenizer_digest=sha256_digest(b"other"))
    identity = msgspec.structs.replace(engine_of(manifest), model=other)
    settings = dataclasses.replace(quick_settings(store, redis_url), identity=identity)
    client = await start_replica(settings)
    reason, detail = await failure_of(client, message_for(manifest), redis_url)
    assert reason is FailureReason.INCOMPATIBLE
    assert "model.tokenizer_digest" in detail
    assert client.replica.engine.tier.residents() == {}


async def test_an_artifact_of_an_adapter_is_incompatible(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """A simulated replica serves one base model and no adapters."""
    manifest = put_sample(store)
    adapter = Adapter(name="lora", digest=sha256_digest(b"adapter"))
    changed = msgspec.structs.replace(
        manifest, model=msgspec.structs.replace(manifest.model, adapter=adapter)
    )
    store.put_manifest(changed)
    client = await start_replica(quick_settings(store, redis_url))
    reason, detail = await failure_of(client, message_for(changed), redis_url)
    assert reason is FailureReason.INCOMPATIBLE
    assert "model.adapter" in detail


async def test_a_load_beyond_the_deadline_fails(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """A request does not wait longer than its deadline; the load goes on for the next."""
    manifest = put_sample(store)
    settings = dataclasses.replace(quick_settings(store, redis_url), load_s=0.2)
    client = await start_replica(settings)
    message = msgspec.structs.replace(message_for(manifest), deadline_ms=1)
    reason, _ = await failure_of(client, message, redis_url)
    assert reason is FailureReason.DEADLINE
    tier = client.replica.engine.tier
    await until(lambda: tier.is_resident(manifest_digest(manifest)), "the load went on")
    assert (await ask(client, message))[0] == 200


async def test_an_artifact_larger_than_the_tier_is_a_matter_of_capacity(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """An artifact that cannot fit fails, and evicts nothing."""
    small, large = put_sample(store, "small"), put_sample(store, "large", num_tokens=100)
    settings = quick_settings(store, redis_url)
    client = await start_replica(dataclasses.replace(settings, dram_bytes=small.payload_bytes))
    await ask(client, message_for(small))
    status, _ = await ask(client, message_for(large))
    assert status == 500
    with redis.Redis.from_url(redis_url) as inspector:
        await until(lambda: len(receipts_of(inspector)) == 2, "both receipts")
        assert receipts_of(inspector)[1].reason is FailureReason.CAPACITY
    assert client.replica.engine.tier.is_resident(manifest_digest(small))


async def test_an_engine_without_the_extension_ignores_cartridges(
    start_replica: StartReplica, store: LocalStore
) -> None:
    """Without a store the replica is a plain vLLM, which answers as if nothing was asked."""
    message = message_for(put_sample(store))
    client = await start_replica(quick_settings(None))
    status, body = await ask(client, message)
    assert status == 200
    assert body["choices"][0]["message"]["content"] == "simulated answer without cartridges"


async def test_another_tenant_s_artifact_counts_as_absent(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """An artifact that the scope may not read gives the same reason as one that is not there."""
    manifest, blob = sample_artifact(readers=("tenant-a",))
    store.put_blob(blob)
    store.put_manifest(manifest)
    client = await start_replica(quick_settings(store, redis_url))
    reason, detail = await failure_of(client, message_for(manifest), redis_url)
    assert reason is FailureReason.UNKNOWN_ARTIFACT
    assert "not in the store" in detail


async def test_a_rope_that_cannot_be_moved_is_refused_at_an_offset(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """With length-dependent rotary embeddings a second, moved artifact is unsupported."""
    pair = []
    for seed in (1, 2):
        sample, blob = sample_artifact(seed=seed)
        rope = msgspec.structs.replace(sample.rope, type="dynamic")
        pair.append(msgspec.structs.replace(sample, rope=rope))
        store.put_blob(blob)
        store.put_manifest(pair[-1])
    client = await start_replica(quick_settings(store, redis_url))
    reason, detail = await failure_of(client, message_for(*pair), redis_url)
    assert reason is FailureReason.UNSUPPORTED
    assert "items[1].offset" in detail


# --- what the fleet sees -------------------------------------------------------------------------
async def test_a_replica_registers_publishes_and_leaves(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """Lease and rows are there while it serves, signed with the key, and gone after `stop`."""
    manifest = put_sample(store)
    settings = dataclasses.replace(quick_settings(store, redis_url), residency_key=KEY)
    client = await start_replica(settings)
    with redis.Redis.from_url(redis_url) as inspector:
        await until(lambda: inspector.exists(lease_key("sim-0")) == 1, "the lease")
        lease: Any = inspector.get(lease_key("sim-0"))
        registration = unseal(lease, Registration, KEY)
        assert registration.engine == msgspec.structs.replace(
            engine_of(manifest), max_model_len=8192
        )
        await ask(client, message_for(manifest))
        await until(lambda: len(rows_of(inspector, KEY)) == 1, "the row")
        record = rows_of(inspector, KEY)[manifest_digest(manifest)]
        assert (record.tier, record.state) == (Tier.DRAM, ResidencyState.READY)
        assert record.size_bytes == manifest.payload_bytes
        with pytest.raises(RejectedRecord):
            rows_of(inspector, b"another key")
        await client.replica.stop()
        assert inspector.exists(lease_key("sim-0"), residency_key("sim-0")) == 0
        assert inspector.smembers(REDIS_REPLICAS) == set()


async def test_an_evicted_artifact_is_withdrawn(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """With room for one, the second artifact takes the first one's place, row included."""
    one, two = put_sample(store, "one", seed=1), put_sample(store, "two", seed=2)
    room = max(one.payload_bytes, two.payload_bytes)
    settings = dataclasses.replace(quick_settings(store, redis_url), dram_bytes=room)
    client = await start_replica(settings)
    with redis.Redis.from_url(redis_url) as inspector:
        for manifest in (one, two, one):
            status, body = await ask(client, message_for(manifest))
            assert status == 200
            receipt = body["kv_transfer_params"]["cartridge_receipt"]
            assert receipt["items"][0]["tier"] == "remote"
            expected = {manifest_digest(manifest)}
            await until(lambda: set(rows_of(inspector)) == expected, "one row")  # noqa: B023
    state = json.loads((await client.get("/sim/state"))[1])
    assert state["resident"] == [manifest_digest(one)]
    assert state["dram_bytes"] == one.payload_bytes


async def test_simultaneous_requests_share_one_load(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """Eight cold requests at once leave one row that was written once."""
    manifest = put_sample(store)
    settings = dataclasses.replace(quick_settings(store, redis_url), load_s=0.05)
    client = await start_replica(settings)
    answers = await asyncio.gather(*(ask(client, message_for(manifest)) for _ in range(8)))
    assert {status for status, _ in answers} == {200}
    with redis.Redis.from_url(redis_url) as inspector:
        await until(lambda: len(rows_of(inspector)) == 1, "the row")
        assert rows_of(inspector)[manifest_digest(manifest)].seq == 1


async def test_a_replica_with_an_empty_store_joins_when_it_fills(
    start_replica: StartReplica, store: LocalStore, redis_url: str
) -> None:
    """The identity is taken at the first request that finds a manifest in the store."""
    client = await start_replica(quick_settings(store, redis_url))
    await client.get("/health")
    with redis.Redis.from_url(redis_url) as inspector:
        assert inspector.exists(lease_key("sim-0")) == 0
        manifest = put_sample(store)
        status, _ = await ask(client, message_for(manifest))
        assert status == 200
        await until(lambda: inspector.exists(lease_key("sim-0")) == 1, "the lease")


async def test_requests_go_on_without_redis(
    start_replica: StartReplica, store: LocalStore, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A Redis that is not there changes no answer."""
    nowhere = tmp_path_factory.mktemp("nowhere") / "socket"
    manifest = put_sample(store)
    client = await start_replica(quick_settings(store, f"unix://{nowhere}"))
    for _ in range(2):
        status, body = await ask(client, message_for(manifest))
        assert status == 200
        assert mark_of(store, manifest) in body["choices"][0]["message"]["content"]


def test_the_chat_template_comes_from_the_first_manifest_that_has_one(store: LocalStore) -> None:
    """A store that also holds raw-text artifacts still gives the template of its chat ones."""
    put_sample(store, "chat")
    for index in range(4):
        manifest, blob = sample_artifact(
            name=f"text-{index}", convention=ConventionKind.DOCUMENT, seed=index
        )
        store.put_blob(blob)
        store.put_manifest(manifest)
    identity = derive_identity(store, 100)
    assert identity is not None
    assert identity.chat_template_digest == sha256_digest(b"sample chat template")
    assert identity.max_model_len == 100


def test_a_damaged_manifest_gives_no_identity(store: LocalStore) -> None:
    """A manifest that does not hash to its name is passed over."""
    manifest = put_sample(store)
    store.manifest_path(manifest_digest(manifest)).write_bytes(b"{}")
    assert derive_identity(store, 100) is None


def test_a_given_identity_sets_the_context_limit() -> None:
    """The identity's `max_model_len` wins over the setting."""
    manifest, _ = sample_artifact()
    settings = EngineSettings(
        model="m", replica=quick_settings(None).replica, identity=engine_of(manifest)
    )
    assert settings.context_tokens == 4096
