"""The demo from start to end: set up, build, ask, check, show.

Owns the order of the steps and the exit status. Refuses to call a run ok in which any answer
differed.
"""

import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from cartridge_router.demo import engines, questions
from cartridge_router.demo.stack import (
    MODEL_NAME,
    NUM_REPLICAS,
    ClosedRedis,
    DemoFailed,
    Interrupted,
    Stack,
    free_port,
    get_json,
    interruptions,
    run_interruptibly,
    running_redis,
    running_stack,
)

GATEWAY_PORT = 8000
FIRST_REPLICA_PORT = 8001
ADMIN_PORT = 8005
REPLICAS = [f"replica-{index}" for index in range(NUM_REPLICAS)]
SHIPPED_DOCUMENTS = Path(__file__).parent / "documents"


def run_demo(*, engine: str, documents: Path | None, out: Path, must_stay: bool) -> int:
    """Run; returns 0 when every check held."""
    # A pipe has no width of its own; the table wants room.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    started_s = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="cartridge-demo-"))
    try:
        asked = questions.read_questions(documents or SHIPPED_DOCUMENTS)
        kit = engines.KITS[engine](work, asked)
        steps = _Steps(console, started_s)

        with (
            interruptions() as interrupted,
            running_redis(work / "redis", REPLICAS) as redis,
            running_stack(work / "logs") as stack,
        ):

            def start_and_ask() -> list[questions.Result]:
                admin = f"http://127.0.0.1:{free_port(ADMIN_PORT)}" if must_stay else None
                gateway = _start(stack, kit, redis, steps, admin)
                if admin is not None:
                    _stay(console, stack, gateway, asked, admin)
                if kit.is_simulated:
                    console.print(
                        "[yellow]Simulated engines: the answers below are markers made from "
                        "the bytes that were loaded. No model runs.[/]"
                    )
                return questions.ask_all(gateway, asked, kit, steps.say)

            results = run_interruptibly(start_and_ask, stack, interrupted)
        questions.write_results(results, out)
        questions.show(console, results)
        problems = questions.problems_of(results, kit)
        for problem in problems:
            console.print(f"[red]{problem}[/]")
        console.print(f"results: {out}   {time.monotonic() - started_s:.0f} s in all")
        console.print("demo: failed" if problems else "demo: ok")
        if not problems:
            shutil.rmtree(work)
        return 1 if problems else 0
    except DemoFailed as error:
        console.print(f"[red]{error}[/]\ndemo: failed")
        return 1
    except Interrupted:
        shutil.rmtree(work, ignore_errors=True)
        console.print("\nstopped; nothing is left running")
        return 130


class _Steps:
    """Prints what is going on, with the seconds since the start."""

    def __init__(self, console: Console, started_s: float) -> None:
        self._console = console
        self._started_s = started_s

    def say(self, text: str) -> None:
        """One line."""
        elapsed_s = time.monotonic() - self._started_s
        self._console.print(f"[dim]{elapsed_s:6.1f} s[/]  {text}", soft_wrap=True)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """A line, and a spinner while the block runs."""
        self.say(text)
        with self._console.status(text):
            yield


def _start(
    stack: Stack, kit: engines.EngineKit, redis: ClosedRedis, steps: _Steps, admin: str | None
) -> str:
    """Start everything and build the Cartridges; returns the gateway's base URL.

    `admin`: base URL of its listener for operators; `None` for none.
    """
    with steps.waiting("model: converting once, cached afterwards"):
        kit.prepare(stack)
    replicas = []
    for index, name in enumerate(REPLICAS):
        port = free_port(FIRST_REPLICA_PORT + index)
        kit.start_replica(stack, name, port, redis)
        replicas.append(f"{name}=http://127.0.0.1:{port}")
    port = free_port(GATEWAY_PORT)
    gateway = f"http://127.0.0.1:{port}"
    with (
        steps.waiting("cartridges: one prefill for each document, while the replicas start"),
        contextlib.closing(kit.build(stack)) as lines,
    ):
        for line in lines:
            steps.say(line)
    command = [sys.executable, "-m", "cartridge_router", "serve", "--port", str(port)]
    command += ["--replicas", ",".join(replicas), "--redis-url", redis.url]
    command += ["--store", str(kit.store)]
    operators = {} if admin is None else {"CARTRIDGE_ROUTER_ADMIN__PORT": admin.rpartition(":")[2]}
    stack.start(
        "gateway",
        command,
        {
            **operators,
            **redis.gateway_environment,
            "CARTRIDGE_ROUTER_CARTRIDGES__ALLOW_UNCERTIFIED_COMPOSITION": "true",
            # Nobody routes to this gateway, and nobody waits for answers when the demo ends.
            "CARTRIDGE_ROUTER_DRAIN__SETTLE_S": "0",
            "CARTRIDGE_ROUTER_DRAIN__GRACE_S": "1",
        },
    )

    def is_registered() -> bool:
        state = get_json(f"{gateway}/ready")
        return state is not None and len(state["replicas"]["registered"]) == NUM_REPLICAS

    with steps.waiting(f"{NUM_REPLICAS} replicas: starting, and proving themselves (self-test)"):
        stack.wait_for("replicas", is_registered)
    steps.say(f"gateway: {gateway}")
    return gateway


def _stay(
    console: Console, stack: Stack, gateway: str, asked: list[questions.Question], admin: str
) -> NoReturn:
    example = asked[0]
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": example.question}],
        "cartridge_ids": [f"{example.name}@1"],
    }
    console.print(
        f"\ncurl {gateway}/v1/chat/completions -H 'content-type: application/json' "
        f"-d '{json.dumps(body)}'\n\n"
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{gateway}/v1", api_key="none")\n'
        "answer = client.chat.completions.create(\n"
        f'    model="{MODEL_NAME}",\n'
        f'    messages=[{{"role": "user", "content": "{example.question}"}}],\n'
        f'    extra_body={{"cartridge_ids": ["{example.name}@1"]}},\n'
        ")\nprint(answer.choices[0].message.content)\n\n"
        f"Watch it work: {admin}/ui   or: cartridge-router top --admin {admin}\n"
        "Ctrl-C ends everything.",
        markup=False,
        soft_wrap=True,
    )
    stack.wait_for_end()
