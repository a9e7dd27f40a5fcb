"""vLLM's own `Request` has what the stand-in has, and is changed alike."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext.adapter_identity import AdapterIdentities
from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_engine_ext.first_load_probe import PASSED
from cartridge_engine_ext.hbm_census import HbmCensus
from cartridge_engine_ext.residency_ledger import ResidencyLedger
from cartridge_engine_ext.scheduler_side import SchedulerSide, SelfTestGate
from cartridge_proto.composition import cache_salt
from cartridge_proto.digest import Digest
from cartridge_proto.names import FIELD_CARTRIDGES
from cartridge_proto.residency import Epoch, ReplicaId
from cartridge_proto.stores import LocalStore
from tests.engine_ext.fake_request import BLOCK_SIZE, FakeRequest, message_of
from tests.engine_ext.stored_artifacts import put_sample
from tests.proto.sample_artifact import engine_of, sample_artifact

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request, RequestStatus

pytestmark = pytest.mark.engine

PLACEHOLDER = 49_152
LIVE = [7, 8, 9]


@pytest.fixture
def side(tmp_path: Path) -> Iterator[SchedulerSide]:
    """The scheduler half over a store with one artifact, after its self-test."""
    engine = msgspec.structs.replace(engine_of(sample_artifact()[0]), block_size=BLOCK_SIZE)
    pool = ArtifactPool(
        store=LocalStore(tmp_path), engine=engine, capacity_bytes=1 << 20, num_loaders=1
    )
    yield SchedulerSide(
        pool=pool,
        engine=engine,
        replica=ReplicaId("replica-0"),
        epoch=Epoch("0" * 32),
        placeholder_token_id=PLACEHOLDER,
        gate=SelfTestGate(is_open=True, immovable=None),
        adapters=AdapterIdentities(),
        verdict_of=lambda digest, manifest, adapter: PASSED,
        census=HbmCensus(
            ResidencyLedger(),
            group_ids=[0],
            block_bytes=1,
            pinned_fraction=0.0,
            longest_request_blocks=2,
        ),
        packed_cache=None,
        is_in_place=False,
        hints=lambda value: None,
        on_ended=lambda ended: None,
        on_captured=lambda tensors: None,
    )
    pool.close()


def request_of(tokens: list[int], salt: str | None, params: dict[str, Any] | None = None) -> Any:
    """A request as vLLM's engine core makes it."""
    extra = None if params is None else {"kv_transfer_params": params}
    return Request(
        request_id="cmpl-0",
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=4, extra_args=extra),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def test_a_real_request_gets_the_prefix(side: SchedulerSide, tmp_path: Path) -> None:
    """Tokens, lengths and block hashes are those of an ordinary request for the same tokens."""
    init_none_hash(sha256)
    artifact = put_sample(LocalStore(tmp_path), num_tokens=20)
    message = message_of([artifact])
    salt = cache_salt(Digest(message["composition"]))
    request = request_of(LIVE, salt, {FIELD_CARTRIDGES: message})
    side.on_new_request(request)
    expected = [PLACEHOLDER] * 20 + LIVE
    ordinary = request_of(expected, request.cache_salt)
    assert list(request.all_token_ids) == list(ordinary.all_token_ids) == expected
    assert request.prompt_token_ids == expected
    assert (request.num_prompt_tokens, request.num_tokens) == (23, 23)
    assert request.block_hashes == ordinary.block_hashes
    assert len(request.block_hashes) == 1
    side.finish(request)


def test_a_real_request_is_refused_to_two_tokens(side: SchedulerSide) -> None:
    """What cannot be served becomes two tokens that vLLM will fail."""
    request = request_of(LIVE, "mine", {FIELD_CARTRIDGES: {}})
    side.on_new_request(request)
    assert list(request.all_token_ids) == request.prompt_token_ids == [0, 0]
    assert (request.num_prompt_tokens, request.num_tokens) == (2, 2)
    assert request.skip_reading_prefix_cache is False
    assert side.num_matched_tokens(request, 0) == (1, True)
    side.finish(request)


def test_the_stand_in_has_no_attribute_of_its_own() -> None:
    """Everything the scheduler half may use of the stand-in is there on a real request."""
    real = request_of(LIVE, None)
    ours = {name for name in dir(FakeRequest(None)) if not name.startswith("__")}
    assert {name for name in ours if not hasattr(real, name)} == {"finished_reason"}


def test_an_error_is_spelled_as_the_receipts_expect() -> None:
    """A request that vLLM failed gives the word by which the scheduler half knows it."""
    request = request_of(LIVE, None)
    request.status = RequestStatus.FINISHED_ERROR
    assert str(request.get_finished_reason()) == "error"
