"""Histories: eight workers over one store and one nvme folder, killed at random, and a model."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cartridge_engine_ext.nvme_tier import NvmeTier
from cartridge_proto.stores import LocalStore
from tests.engine_ext.artifact_history import (
    ALIASES,
    Call,
    HistoryModel,
    Operation,
    Outcome,
    QuietState,
    universe,
)
from tests.engine_ext.history_machine import Machine, running_machine, running_nursery
from tests.engine_ext.history_worker import NVME_BYTES, Fault

if TYPE_CHECKING:
    import subprocess

NUM_WORKERS = 8
ONE, SAME_BLOB, OTHER = universe()[2], universe()[3], universe()[4]
ALIAS = ALIASES[0]


# --- the real thing ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator["subprocess.Popen[str]"]:
    """What forks workers, for all tests of this file."""
    with running_nursery(tmp_path_factory.mktemp("nursery")) as running:
        yield running


def run_history(machine: Machine, *, num_rounds: int, num_operations: int, num_kills: int) -> None:
    """Rounds of operations and kills; what all workers hold is written down after each."""
    for worker in range(NUM_WORKERS):
        failpoint = machine.draw_failpoint() if worker % 2 else ""
        machine.start(worker, failpoint=failpoint)
    for _ in range(num_rounds):
        machine.run(num_operations, num_kills=num_kills)
        machine.look()
    machine.stop()


def misnamed(root: Path) -> list[Path]:
    """Files that lie under a digest that they do not have, but for unfinished ones."""
    return [
        path
        for path in root.glob("*/*/sha256/*")
        if not path.name.startswith(".partial-")
        and hashlib.sha256(path.read_bytes()).hexdigest() != path.stem
    ]


def check_history(machine: Machine) -> None:
    """Nothing impossible happened, enough happened, and the folders hold what their names say."""
    model = machine.model()
    assert model.problems() == [], f"seed {machine.seed}"
    assert misnamed(machine.root) == []
    with_outcome = Counter((call.operation, call.outcome) for call in model.calls)
    assert all(with_outcome[operation, Outcome.OK] for operation in Operation)
    assert with_outcome[Operation.REQUEST, Outcome.OK] >= 100
    assert machine.num_kills >= 6
    # The next engine of this machine finds a sound folder, whatever was left by kills.
    tier = NvmeTier(
        store=LocalStore(machine.root / "store"),
        root=machine.root / "nvme",
        capacity_bytes=NVME_BYTES,
    )
    tier.check_invariants()
    assert not list(machine.root.glob("nvme/*/sha256/.partial-*"))
    tier.close()


@pytest.mark.services
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_request_gets_the_bytes_of_its_digest(
    nursery: "subprocess.Popen[str]", tmp_path: Path, seed: int
) -> None:
    """Whatever eight workers do to the store and to each other, and whoever is killed in it."""
    with running_machine(tmp_path, nursery, seed=seed) as machine:
        run_history(machine, num_rounds=3, num_operations=40, num_kills=6)
        check_history(machine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
def test_longer_histories(nursery: "subprocess.Popen[str]", tmp_path: Path, seed: int) -> None:
    """The same with more of everything."""
    with running_machine(tmp_path, nursery, seed=seed) as machine:
        run_history(machine, num_rounds=8, num_operations=120, num_kills=12)
        check_history(machine)


# --- workers that do it wrong --------------------------------------------------------------------
MUTANTS = {
    Fault.SWAPPED_MEMORY: "other bytes than the artifact's",
    Fault.UNCHECKED_BYTES: "other bytes than the artifact's",
    Fault.STALE_ALIAS: "it did not stand for",
    Fault.LOST_ALIAS: "it was there",
    Fault.KEPT_PIN: "pins: ",
    Fault.KEPT_USE: "uses that nobody ends",
    Fault.UNTOLD_EVICTION: "dram: rows of",
}


@pytest.mark.services
@pytest.mark.parametrize("fault", MUTANTS)
def test_the_model_sees_what_a_worker_does_wrong(
    nursery: "subprocess.Popen[str]", tmp_path: Path, fault: Fault
) -> None:
    """Wrong bytes, a wrong alias, a leak or an untrue row: each is found, and named."""
    with running_machine(tmp_path, nursery, seed=1, fault=fault) as machine:
        for worker in range(2):
            machine.start(worker)
        machine.run(80)
        machine.look()
        problems = machine.model().problems()
    assert any(MUTANTS[fault] in problem for problem in problems), problems


@pytest.mark.services
def test_unverified_bytes_in_the_folder_are_seen(
    nursery: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    """Bytes under a name that is not theirs are found in the folder, and reach no request."""
    with running_machine(tmp_path, nursery, seed=1, fault=Fault.FALSE_NAME) as machine:
        for worker in range(2):
            machine.start(worker)
        machine.run(80)
        machine.look()
        machine.stop()
        assert misnamed(tmp_path)
        problems = machine.model().problems()
    assert not any("other bytes" in problem for problem in problems)


# --- the model alone -----------------------------------------------------------------------------
def call(operation: Operation, called_ns: int, returned_ns: int, **fields: Any) -> Call:
    """A call that went well."""
    made = Call(
        worker=0,
        boot=0,
        operation=operation,
        digest=ONE.digest,
        alias="",
        called_ns=called_ns,
        returned_ns=returned_ns,
        outcome=Outcome.OK,
        found="",
        detail="",
    )
    return replace(made, **fields)


def moved(called_ns: int, returned_ns: int, digest: str, outcome: Outcome = Outcome.OK) -> Call:
    """An alias that moves."""
    return call(
        Operation.MOVE_ALIAS, called_ns, returned_ns, alias=ALIAS, digest=digest, outcome=outcome
    )


def resolved(called_ns: int, returned_ns: int, digest: str) -> Call:
    """An alias that was looked up."""
    return call(Operation.RESOLVE, called_ns, returned_ns, alias=ALIAS, digest="", found=digest)


def asked(called_ns: int, outcome: Outcome, found: str = "") -> Call:
    """A request of ten nanoseconds."""
    return call(Operation.REQUEST, called_ns, called_ns + 10, outcome=outcome, found=found)


def problems(*calls: Call) -> int:
    """How many the model finds."""
    return len(HistoryModel(calls, []).problems())


PUBLISHED = call(Operation.PUBLISH, 0, 10)


def test_only_the_artifacts_own_bytes_will_do() -> None:
    """Those of another artifact are a problem, and so are those of one that nobody published."""
    assert problems(PUBLISHED, asked(20, Outcome.OK, ONE.content)) == 0
    assert problems(PUBLISHED, asked(20, Outcome.OK, OTHER.content)) == 1
    assert problems(asked(20, Outcome.OK, ONE.content)) == 1
    assert problems(PUBLISHED, asked(20, Outcome.CORRUPT)) == 1
    assert problems(PUBLISHED, asked(20, Outcome.LATE)) == 1


def test_an_alias_stands_for_what_it_was_moved_to() -> None:
    """Old and new while it moves; only the new one afterwards; either after a kill."""
    first, second = moved(0, 10, ONE.digest), moved(20, 30, OTHER.digest)
    assert problems(first, resolved(11, 12, ONE.digest)) == 0
    assert problems(first, second, resolved(25, 40, ONE.digest)) == 0
    assert problems(first, second, resolved(15, 22, OTHER.digest)) == 0
    assert problems(first, second, resolved(31, 40, OTHER.digest)) == 0
    assert problems(first, second, resolved(31, 40, ONE.digest)) == 1
    assert problems(first, second, resolved(12, 19, OTHER.digest)) == 1
    killed = moved(20, 30, OTHER.digest, Outcome.UNKNOWN)
    assert problems(first, killed, resolved(31, 40, ONE.digest)) == 0
    assert problems(first, killed, resolved(31, 40, OTHER.digest)) == 0
    later = moved(50, 60, ONE.digest)
    assert problems(first, killed, later, resolved(70, 80, OTHER.digest)) == 1


def test_what_is_there_is_found() -> None:
    """Absent is right before the publication ended, or when a deletion may have come between."""
    absent = asked(20, Outcome.ABSENT)
    assert problems(absent) == 0
    assert problems(PUBLISHED, absent) == 1
    assert problems(call(Operation.PUBLISH, 0, 25), absent) == 0
    assert problems(PUBLISHED, call(Operation.DELETE, 12, 15), absent) == 0
    assert problems(call(Operation.DELETE, 0, 1), call(Operation.PUBLISH, 2, 10), absent) == 1
    shared = call(Operation.DELETE, 5, 15, digest=SAME_BLOB.digest)
    assert problems(PUBLISHED, shared, absent) == 0
    other = call(Operation.DELETE, 5, 15, digest=OTHER.digest)
    assert problems(PUBLISHED, other, absent) == 1


def test_a_quiet_worker_holds_what_it_says() -> None:
    """Rows, pins, uses and memories must agree with the bytes."""
    digest = ONE.digest
    sound = QuietState(
        worker=0,
        boot=0,
        pins=[digest],
        users={digest: 0},
        pinned=[digest],
        dram=[digest],
        nvme=[],
        dram_rows=[digest],
        nvme_rows=[],
        pinned_rows=[digest],
        num_memories=1,
        broken="",
    )
    assert HistoryModel([], [sound]).problems() == []
    changes: list[dict[str, Any]] = [
        {"pins": []},
        {"users": {digest: 1}},
        {"dram_rows": []},
        {"nvme_rows": [digest]},
        {"pinned_rows": []},
        {"num_memories": 2},
        {"broken": "over capacity"},
    ]
    for change in changes:
        assert len(HistoryModel([], [replace(sound, **change)]).problems()) == 1
