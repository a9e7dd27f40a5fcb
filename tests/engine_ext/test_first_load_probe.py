"""The first-load probe: replayed once, compared with room for ties, kept over restarts."""

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import tests.engine_ext.quiet_vllm  # noqa: F401 - first: vllm warns while it is imported

# isort: split
from cartridge_engine_ext.first_load_probe import (
    PASSED,
    RETRY_AFTER_S,
    FirstLoadProbe,
    ProbeVerdict,
    build_digest,
    compare,
)
from cartridge_engine_ext.self_test import Answer
from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Manifest, Probe, ProbeStep
from tests.engine_ext.stored_artifacts import WAIT_S
from tests.engine_ext.waiting import until
from tests.proto.sample_artifact import sample_artifact

MANIFEST = msgspec.structs.replace(
    sample_artifact()[0],
    probe=Probe(
        prompt_token_ids=[1, 2],
        steps=[
            ProbeStep(token_id=3, top=[(3, -0.5), (4, -0.501), (5, -2.0)]),
            ProbeStep(token_id=6, top=[(6, -0.1)]),
        ],
    ),
)
DIGEST = sha256_digest(b"artifact")
RIGHT = Answer((3, 6), (-0.5, -0.1))
WRONG = Answer((5, 6), (-2.0, -0.1))


class FakeEngine:
    """Answers probes with what it is told, and counts them; waits while `gate` is closed."""

    def __init__(self, answer: Answer) -> None:
        self.answer_is = answer
        self.asked: list[tuple[Digest, list[int], int]] = []
        self.adapters: list[str | None] = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_broken = False

    def answer(
        self,
        manifest: Manifest,
        digest: Digest,
        prompt: list[int],
        count: int,
        adapter: str | None,
    ) -> Answer:
        """See `FirstLoadProbe`."""
        self.adapters.append(adapter)
        self.asked.append((digest, prompt, count))
        assert self.gate.wait(WAIT_S)
        if self.is_broken:
            raise OSError("no answer")
        return self.answer_is


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine that answers as the reference did."""
    engine = FakeEngine(RIGHT)
    yield engine
    engine.gate.set()


def settled(probe: FirstLoadProbe) -> ProbeVerdict:
    """Ask until there is a verdict."""
    found: list[ProbeVerdict] = []

    def is_known() -> bool:
        verdict = probe.verdict(DIGEST, MANIFEST, None)
        found.extend([verdict] if verdict is not None else [])
        return bool(found)

    until(is_known)
    return found[0]


def test_asked_once(engine: FakeEngine) -> None:
    """However often a verdict is asked for, the engine answers one probe, of the manifest."""
    probe = FirstLoadProbe(engine.answer, build="b", folder=None)
    engine.gate.clear()
    assert [probe.verdict(DIGEST, MANIFEST, None) for _ in range(5)] == [None] * 5
    engine.gate.set()
    assert settled(probe) == PASSED
    assert engine.asked == [(DIGEST, [1, 2], 2)]
    assert probe.quarantined() == {}
    probe.stop()


def test_the_adapter_that_is_asked_for_answers(engine: FakeEngine) -> None:
    """The probe names it; a try after one that failed names that of whoever waits then."""
    now_s = 100.0
    probe = FirstLoadProbe(engine.answer, build="b", folder=None, clock=lambda: now_s)
    engine.is_broken = True
    probe.verdict(DIGEST, MANIFEST, "first-name")
    until(lambda: probe._running == set())
    engine.is_broken = False
    now_s += RETRY_AFTER_S
    until(lambda: probe.verdict(DIGEST, MANIFEST, "other-name") is not None)
    assert engine.adapters == ["first-name", "other-name"]
    assert probe.verdict(DIGEST, MANIFEST, "a third") == PASSED
    probe.stop()


def test_a_mismatch_is_quarantined(engine: FakeEngine) -> None:
    """The verdict stays, with the step and the tokens."""
    engine.answer_is = WRONG
    probe = FirstLoadProbe(engine.answer, build="b", folder=None)
    text = "probe step 0: token 5, expected 3"
    assert settled(probe) == ProbeVerdict(text)
    assert probe.quarantined() == {DIGEST: text}
    engine.answer_is = RIGHT
    assert settled(probe) == ProbeVerdict(text)
    probe.stop()


def test_no_answer_is_no_verdict(engine: FakeEngine) -> None:
    """A probe that the engine could not answer is tried again after a while, not at once."""
    now_s = 100.0
    engine.is_broken = True
    probe = FirstLoadProbe(engine.answer, build="b", folder=None, clock=lambda: now_s)
    probe.verdict(DIGEST, MANIFEST, None)
    until(lambda: probe._running == set())
    assert [probe.verdict(DIGEST, MANIFEST, None) for _ in range(5)] == [None] * 5
    assert len(engine.asked) == 1
    engine.is_broken = False
    now_s += RETRY_AFTER_S
    assert settled(probe) == PASSED
    assert len(engine.asked) == 2
    probe.stop()


@pytest.mark.parametrize("answer", [RIGHT, WRONG])
def test_verdicts_outlive_the_process(answer: Answer, engine: FakeEngine, tmp_path: Path) -> None:
    """The same build does not ask again; another build does."""
    engine.answer_is = answer
    for build, num_asked in (("b", 1), ("b", 1), ("c", 2)):
        probe = FirstLoadProbe(engine.answer, build=build, folder=tmp_path)
        assert (settled(probe).problem is None) == (answer is RIGHT)
        assert len(engine.asked) == num_asked
        probe.stop()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"problem": 3}', b"\xff"])
def test_a_damaged_verdict_is_found_out_anew(
    content: bytes, engine: FakeEngine, tmp_path: Path
) -> None:
    """Whatever the file holds, it lets nothing serve unprobed."""
    path = tmp_path / "b" / f"{DIGEST.removeprefix('sha256:')}.json"
    path.parent.mkdir()
    path.write_bytes(content)
    engine.answer_is = WRONG
    probe = FirstLoadProbe(engine.answer, build="b", folder=tmp_path)
    assert settled(probe).problem is not None
    assert len(engine.asked) == 1
    probe.stop()


def test_a_folder_that_cannot_be_written(engine: FakeEngine, tmp_path: Path) -> None:
    """Verdicts then live as long as the process."""
    (tmp_path / "file").touch()
    probe = FirstLoadProbe(engine.answer, build="b", folder=tmp_path / "file")
    assert settled(probe) == PASSED
    probe.stop()


def test_after_stop_nothing_serves(engine: FakeEngine) -> None:
    """An engine that ends gives no verdict that lets an unprobed artifact serve."""
    probe = FirstLoadProbe(engine.answer, build="b", folder=None)
    probe.stop()
    verdict = probe.verdict(DIGEST, MANIFEST, None)
    assert verdict is not None
    assert verdict.problem == "the engine is stopping"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (RIGHT, None),
        (Answer((3, 6), (-0.504, -0.1)), None),
        (Answer((3, 6), (-0.51, -0.1)), "probe step 0: the logprob of token 3 differs by 1.00e-02"),
        (Answer((3, 6), (-0.5, float("nan"))), "probe step 1: the logprob of token 6 differs"),
        # As good as the best, within the tolerance: what follows has another prompt.
        (Answer((4, 9), (-0.501, -7.0)), None),
        (Answer((4, 9), (-0.6, -7.0)), "probe step 0: the logprob of token 4 differs"),
        (Answer((5, 6), (-2.0, -0.1)), "probe step 0: token 5, expected 3"),
        (Answer((9, 6), (-2.0, -0.1)), "probe step 0: token 9, expected 3"),
        (Answer((3, 7), (-0.5, -0.1)), "probe step 1: token 7, expected 6"),
        (Answer((3,), (-0.5,)), "probe: 1 tokens instead of 2"),
    ],
)
def test_comparison(answer: Answer, problem: str | None) -> None:
    """Tokens, then logprobs, each step; ties count as equal."""
    found = compare(MANIFEST.probe, answer, "F32")
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(problem)


def test_a_reference_without_logprobs() -> None:
    """Then tokens alone are compared."""
    probe = Probe(prompt_token_ids=[1], steps=[ProbeStep(token_id=3, top=[])])
    assert compare(probe, Answer((3,), (-9.0,)), "F32") is None
    assert compare(probe, Answer((4,), (-0.1,)), "F32") is not None


def test_a_build_is_named_by_all_of_its_parts() -> None:
    """Parts do not run into one another."""
    assert build_digest("a", "bc") != build_digest("ab", "c")
    assert build_digest("a", "b") == build_digest("a", "b")
