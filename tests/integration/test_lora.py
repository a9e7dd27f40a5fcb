"""LoRA adapters: an artifact is the ordinary prompt under its own adapter, and under no other.

Two random adapters of a tiny random model; `alias` is the first under a second name, and the files
of `fleeting` are written anew while the engine runs.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cartridge_engine_ext import identity
from cartridge_engine_ext.build import Builder, Built, Source
from cartridge_proto import names
from cartridge_proto.composition import cache_salt
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import ConventionKind
from cartridge_router.catalog import Cartridge
from cartridge_router.demo.stack import MODEL_NAME
from cartridge_router.selection import SelectedBy, Selection
from tests.engine_ext.tiny_adapter import save_tiny_adapter
from tests.engine_ext.tiny_model import MAX_POSITIONS, save_tiny_model
from tests.integration.fleet import BLOCK_SIZE, TOLERANCE, Answer, Fleet, at_once, document_tokens
from tests.integration.running_fleet import running_fleet
from tests.integration.tiny_fleet import IDS, LIVE, drop_prefix_cache, tier_of

pytestmark = pytest.mark.engine

NUM_TOKENS = 2 * BLOCK_SIZE + 5
NUM_FULL = 2 * BLOCK_SIZE
DOCUMENT = document_tokens(NUM_TOKENS, seed=1200, ids=IDS)
SEEDS = {"a": 1, "b": 2, "fleeting": 3}
CLEAR = 1000 * TOLERANCE
"""What two adapters differ by at least, or these tests could not fail."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model, its adapters and the store."""
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def fleet(work: Path) -> Iterator[Fleet]:
    """An engine with all adapters."""
    model = save_tiny_model(work / "model", head_dim=32)
    folders = {
        name: save_tiny_adapter(model, work / name, seed=seed) for name, seed in SEEDS.items()
    }
    modules = [f"{name}={folder}" for name, folder in {**folders, "alias": work / "a"}.items()]
    arguments = ["--block-size", str(BLOCK_SIZE), "--enable-lora", "--max-lora-rank", "8"]
    # Two at a time, so that the batch of a test holds both; all four stay in memory.
    arguments += ["--max-loras", "2", "--max-cpu-loras", "4", "--lora-modules", *modules]
    with running_fleet(work, model, max_model_len=MAX_POSITIONS, arguments=arguments) as running:
        yield running


def put(fleet: Fleet, name: str, adapter: Path | None, document: list[int] = DOCUMENT) -> Built:
    """A Cartridge of a document, prefilled with an adapter or without."""
    builder = Builder(
        model_dir=fleet.model_dir,
        store=fleet.store,
        model_name=MODEL_NAME,
        dtype=torch.float32,
        with_weights_digest=True,
        say=lambda line: None,
        adapter=adapter,
    )
    source = Source(text=json.dumps(document), name=name, convention=ConventionKind.DOCUMENT)
    built = builder.prefill(source, document, LIVE)
    fleet.wait_for_catalog(f"{name}@1", built.digest)
    return built


def ordinary(fleet: Fleet, model: str, document: list[int] = DOCUMENT) -> Answer:
    """The answer of a model to the ordinary prompt."""
    return fleet.complete(document + LIVE, model=model)


def around(fleet: Fleet, model: str, built: Built, request_id: str) -> dict[str, Any]:
    """Ask the engine itself, past the gateway, for what must be refused; its receipt."""
    selection = Selection(
        (Cartridge(Digest(built.digest), built.manifest),),
        built.manifest.composition.position_layout,
        SelectedBy.EXPLICIT,
        scope="public",
    )
    message = selection.message(request_id=request_id, deadline_ms=30_000)
    assert message is not None
    body = {
        "model": model,
        "prompt": LIVE,
        "max_tokens": 2,
        names.FIELD_KV_TRANSFER_PARAMS: {names.FIELD_CARTRIDGES: msgspec.to_builtins(message)},
        names.FIELD_CACHE_SALT: cache_salt(Digest(message.composition)),
    }
    response = fleet.post("/v1/completions", body, base=fleet.engine_url)
    assert response.status_code == 500, response.text
    assert "choices" not in response.json()
    return fleet.receipt(request_id)


def refused(fleet: Fleet, model: str, alias: str) -> str:
    """Ask through the gateway for what must be refused as incompatible; the message."""
    body = {
        "model": model,
        "prompt": LIVE,
        "max_tokens": 2,
        names.FIELD_CARTRIDGE_IDS: [alias],
    }
    response = fleet.post("/v1/completions", body)
    assert response.status_code == 409, response.text
    return str(response.json()["error"]["message"])


def test_adapters_answer_differently(fleet: Fleet) -> None:
    """The canary: otherwise an artifact under the wrong adapter would look right."""
    answers = [ordinary(fleet, model) for model in (MODEL_NAME, "a", "b")]
    for index, one in enumerate(answers):
        for other in answers[index + 1 :]:
            assert one.difference(other) > CLEAR
    assert ordinary(fleet, "a").difference(ordinary(fleet, "alias")) <= TOLERANCE


@pytest.mark.parametrize("model", [MODEL_NAME, "a", "b"])
def test_an_artifact_answers_as_the_ordinary_prompt(fleet: Fleet, work: Path, model: str) -> None:
    """With its own adapter, or with none: cold, from HBM, and from memory once that is lost."""
    built = put(fleet, f"own-{model}", None if model == MODEL_NAME else work / model)
    expected = ordinary(fleet, model)
    found = []
    for must_drop in (False, False, True):
        if must_drop:
            drop_prefix_cache(fleet)
        injected = fleet.complete(LIVE, [f"own-{model}@1"], model=model)
        assert expected.difference(injected) <= TOLERANCE
        assert injected.receipt is not None
        found.append((tier_of(injected.receipt), injected.receipt["num_reused_tokens"]))
    assert found == [("remote", 0), ("hbm", NUM_FULL), ("dram", 0)]
    made_with = built.manifest.model.adapter
    if made_with is not None:
        assert made_with.digest == identity.adapter_digest(work / model)


def test_an_artifact_of_another_adapter_is_refused(fleet: Fleet, work: Path) -> None:
    """By the engine, also while the prefix is whole in HBM; the gateway's 409 names the field."""
    built = put(fleet, "of-a", work / "a")
    for _ in range(2):
        injected = fleet.complete(LIVE, ["of-a@1"], model="a")
    assert injected.receipt is not None
    assert tier_of(injected.receipt) == "hbm", "what must not be found is there"
    message = refused(fleet, "b", "of-a@1")
    for part in ("incompatible", "model.adapter"):
        assert part in message
    for name in ("a", "b"):
        assert identity.adapter_digest(work / name) in message
    receipt = around(fleet, "b", built, "of-a-by-b")
    assert (receipt["status"], receipt["reason"]) == ("failed", "incompatible")
    assert "model.adapter" in receipt["detail"]


@pytest.mark.parametrize(("made_with", "model"), [("a", MODEL_NAME), (None, "a")])
def test_an_adapter_and_its_base_model_do_not_share(
    fleet: Fleet, work: Path, made_with: str | None, model: str
) -> None:
    """Refused by the gateway, which sees that one is an adapter, and by the engine itself."""
    name = f"made-with-{made_with or 'nothing'}"
    built = put(fleet, name, None if made_with is None else work / made_with)
    fleet.complete(LIVE, [f"{name}@1"], model=made_with or MODEL_NAME)
    assert "model.adapter" in refused(fleet, model, f"{name}@1")
    receipt = around(fleet, model, built, f"{name}-by-other")
    assert (receipt["status"], receipt["reason"]) == ("failed", "incompatible")
    assert "model.adapter" in receipt["detail"]


def test_a_second_name_of_the_adapter_reads_the_same_artifact(fleet: Fleet, work: Path) -> None:
    """Its blocks are its own, so the first use loads; the answers are equal."""
    document = document_tokens(NUM_TOKENS, seed=1201, ids=IDS)
    put(fleet, "two-names", work / "a", document)
    expected = ordinary(fleet, "a", document)
    found = []
    for model in ("a", "a", "alias", "alias", "a"):
        injected = fleet.complete(LIVE, ["two-names@1"], model=model)
        assert expected.difference(injected) <= TOLERANCE
        assert injected.receipt is not None
        found.append(injected.receipt["num_reused_tokens"])
    assert found == [0, NUM_FULL, 0, NUM_FULL, NUM_FULL]


def test_adapters_in_one_batch_do_not_see_each_other(fleet: Fleet, work: Path) -> None:
    """Requests at once, each under its own adapter and with its own artifact.

    Without the base model: vLLM computes its tokens with an adapter when there is one in the batch
    (docs/compatibility.md).
    """
    expected, calls = [], []
    for index, model in enumerate(("a", "b", "a")):
        document = document_tokens(NUM_TOKENS, seed=1210 + index, ids=IDS)
        put(fleet, f"batch-{index}", work / model, document)
        expected.append(ordinary(fleet, model, document))
        calls.append(_call(fleet, model, f"batch-{index}@1"))
    for one, other in zip(expected, at_once(calls), strict=True):
        assert one.difference(other) <= TOLERANCE


def test_files_that_were_written_anew_are_refused(fleet: Fleet, work: Path) -> None:
    """The engine holds the former weights: neither artifact is served until it loads them anew."""
    put(fleet, "former", work / "fleeting")
    expected = ordinary(fleet, "fleeting")
    assert expected.difference(fleet.complete(LIVE, ["former@1"], model="fleeting")) <= TOLERANCE
    save_tiny_adapter(fleet.model_dir, work / "fleeting", seed=4)
    put(fleet, "latter", work / "fleeting")
    for name in ("former", "latter"):
        message = refused(fleet, "fleeting", f"{name}@1")
        assert "first served with other files" in message
    assert expected.difference(ordinary(fleet, "fleeting")) <= TOLERANCE, "they are in memory"


def _call(fleet: Fleet, model: str, alias: str) -> Callable[[], Answer]:
    return lambda: fleet.complete(LIVE, [alias], model=model)
