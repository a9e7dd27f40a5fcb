"""The first-load probe: each artifact answers its manifest's probe on this engine before it serves.

Owns the verdicts, one for each artifact and engine build, and their tolerances. Refuses to let an
artifact serve whose probe was answered otherwise: it stays quarantined on this engine build.
"""

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cartridge_engine_ext.self_test import Answer
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest, Probe

logger = logging.getLogger(__name__)

TOLERANCES = {"F32": 5e-3, "BF16": 0.15, "F16": 0.05}
"""Largest allowed difference of a probe's logprobs, by stored key dtype.

The reference ran another implementation of the model, so float32 gets more room than the boot
self-test (seen: 4e-5), and half precision several units in the last place of a logit near 20.
"""
MAX_VERDICT_BYTES = 4096
RETRY_AFTER_S = 2.0
"""Between two tries of a probe that the engine did not answer."""


@dataclass(frozen=True)
class ProbeVerdict:
    """How an artifact answered its probe; `problem` is `None` when it may serve."""

    problem: str | None


PASSED = ProbeVerdict(None)


def build_digest(*parts: str) -> str:
    """Names an engine build: whatever changes what it computes is one of the parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class FirstLoadProbe:
    """Verdicts of one engine. All methods may be called from any thread and return at once.

    Args:
        answer: greedy answer of this engine to token ids behind one artifact, with as many tokens
            as asked for, by the adapter that the API calls so, or by the base model. Blocks; raises
            when the engine does not answer.
        build: name of this engine build, see `build_digest`.
        folder: where verdicts are kept over restarts; `None` keeps them for this boot.
    """

    def __init__(
        self,
        answer: Callable[[Manifest, Digest, list[int], int, str | None], Answer],
        *,
        build: str,
        folder: Path | None,
        on_quarantine: Callable[[Digest], None] = lambda digest: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._answer = answer
        self._on_quarantine = on_quarantine
        self._folder = folder / build if folder is not None else None
        self._lock = threading.Lock()
        self._verdicts: dict[Digest, ProbeVerdict] = {}
        self._running: set[Digest] = set()
        self._retry_s: dict[Digest, float] = {}
        self._clock = clock
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="first-load-probe")

    def verdict(
        self, digest: Digest, manifest: Manifest, adapter: str | None
    ) -> ProbeVerdict | None:
        """What is known of an artifact that is ready in dram; `None` while its probe runs.

        `adapter` is a name of the adapter that the artifact was made with, if it was: its digest is
        part of the artifact, so verdicts need no key beside that.
        """
        with self._lock:
            known = self._verdicts.get(digest)
            if known is not None or digest in self._running:
                return known
            if self._clock() < self._retry_s.get(digest, 0.0):
                return None
            self._running.add(digest)
        try:
            self._executor.submit(self._run, digest, manifest, adapter)
        except RuntimeError:
            # Stopped: nothing serves any more.
            return ProbeVerdict("the engine is stopping")
        return None

    def quarantined(self) -> dict[Digest, str]:
        """Artifacts that may not serve, and why."""
        with self._lock:
            return {
                digest: verdict.problem
                for digest, verdict in self._verdicts.items()
                if verdict.problem is not None
            }

    def stop(self) -> None:
        """Start no further probe; one that runs ends when the engine has answered."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    # --- on the probing thread -------------------------------------------------------------------
    def _run(self, digest: Digest, manifest: Manifest, adapter: str | None) -> None:
        verdict = None
        try:
            verdict = self._kept(digest)
            if verdict is None:
                verdict = self._replay(digest, manifest, adapter)
                self._keep(digest, verdict)
        except Exception as error:
            # No verdict: who waits goes on waiting, and it is tried again after a while.
            logger.warning("artifact %s: its probe was not answered: %r", digest, error)
        with self._lock:
            self._running.discard(digest)
            self._retry_s.pop(digest, None)
            if verdict is None:
                self._retry_s[digest] = self._clock() + RETRY_AFTER_S
            if verdict is not None:
                self._verdicts[digest] = verdict
        if verdict is not None and verdict.problem is not None:
            logger.error("artifact %s is quarantined: %s", digest, verdict.problem)
            self._on_quarantine(digest)

    def _replay(self, digest: Digest, manifest: Manifest, adapter: str | None) -> ProbeVerdict:
        probe = manifest.probe
        if not probe.steps:
            return PASSED
        prompt = list(probe.prompt_token_ids)
        answer = self._answer(manifest, digest, prompt, len(probe.steps), adapter)
        return ProbeVerdict(compare(probe, answer, manifest.representation.k_dtype))

    def _kept(self, digest: Digest) -> ProbeVerdict | None:
        if self._folder is None:
            return None
        try:
            with self._path(digest).open("rb") as file:
                problem = json.loads(file.read(MAX_VERDICT_BYTES))["problem"]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # none, or damaged: the probe is replayed
        return ProbeVerdict(problem) if problem is None or isinstance(problem, str) else None

    def _keep(self, digest: Digest, verdict: ProbeVerdict) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".partial-")
            with os.fdopen(handle, "w") as file:
                json.dump({"problem": verdict.problem and verdict.problem[:1000]}, file)
            os.replace(temporary, self._path(digest))
        except OSError as error:
            logger.warning("verdict of %s not kept: %s", digest, error)

    def _path(self, digest: Digest) -> Path:
        assert self._folder is not None  # noqa: S101 - asked by both callers
        return self._folder / f"{digest.removeprefix('sha256:')}.json"


def compare(probe: Probe, answer: Answer, dtype: str) -> str | None:
    """Why an answer is not the reference's; `None` when it is.

    Where the engine chose another token that the reference held for equally good, within the
    tolerance, what follows cannot be compared and is not.
    """
    tolerance = TOLERANCES[dtype]
    if len(answer.token_ids) != len(probe.steps):
        return f"probe: {len(answer.token_ids)} tokens instead of {len(probe.steps)}"
    for index, (step, token_id, logprob) in enumerate(
        zip(probe.steps, answer.token_ids, answer.logprobs, strict=True)
    ):
        alternatives = dict(step.top)
        expected = alternatives.get(token_id)
        best = alternatives.get(step.token_id)
        if token_id != step.token_id and (
            expected is None or best is None or best - expected > tolerance
        ):
            return f"probe step {index}: token {token_id}, expected {step.token_id}"
        if expected is None:
            continue  # the reference gave tokens only
        difference = abs(logprob - expected)
        # Written so that NaN is out of tolerance.
        if not difference <= tolerance:
            return (
                f"probe step {index}: the logprob of token {token_id} differs by "
                f"{difference:.2e}, tolerance {tolerance:.0e}"
            )
        if token_id != step.token_id:
            return None
    return None
