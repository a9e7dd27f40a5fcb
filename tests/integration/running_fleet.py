"""Starts one real engine behind a gateway. Everything here is a real process on loopback."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoTokenizer

from cartridge_engine_ext.build import Builder
from cartridge_proto.stores import LocalStore
from cartridge_router.demo.stack import (
    ENGINE_ENVIRONMENT,
    MODEL_NAME,
    engine_command,
    free_port,
    get_json,
    running_redis,
    running_stack,
)
from tests.integration.fleet import RESIDENCY_KEY, Fleet


@contextmanager
def running_fleet(
    work: Path,
    model_dir: Path,
    *,
    max_model_len: int,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    **extra: Any,
) -> Iterator[Fleet]:
    """An engine of a model, ready and registered; about a minute.

    `arguments` are flags of vLLM, `extra` goes into `kv_connector_extra_config`.
    """
    store = LocalStore(work / "store")
    store.root.mkdir(exist_ok=True)
    with (
        running_redis(work / "redis", ["replica-0"]) as redis,
        running_stack(work / "logs") as stack,
    ):
        template = work / "chat_template.jinja"
        wrap = ["chat-template", "wrap", "--model", str(model_dir), "--out", str(template)]
        list(stack.lines_of("wrap", [sys.executable, "-m", "cartridge_router", *wrap], {}))
        port, gateway_port = free_port(), free_port()
        command = engine_command(
            model_dir=model_dir,
            template=template,
            port=port,
            store=store.root,
            redis_url=redis.url,
            max_model_len=max_model_len,
            arguments=arguments,
            replica_id="replica-0",
            **extra,
        )
        engine_environment = {
            **ENGINE_ENVIRONMENT,
            **redis.engine_environment("replica-0"),
            "CARTRIDGE_ROUTER_RESIDENCY_KEY": RESIDENCY_KEY,
            # Lets a test preempt everything and drop the prefix cache.
            "VLLM_SERVER_DEV_MODE": "1",
            **(environment or {}),
        }
        engine = stack.start("engine", command, engine_environment)
        stack.start(
            "gateway",
            [
                *(sys.executable, "-m", "cartridge_router", "serve", "--port", str(gateway_port)),
                *("--replicas", f"replica-0=http://127.0.0.1:{port}"),
                *("--redis-url", redis.url, "--store", str(store.root)),
            ],
            {
                **redis.gateway_environment,
                "CARTRIDGE_ROUTER_RESIDENCY_KEY": RESIDENCY_KEY,
                "CARTRIDGE_ROUTER_CARTRIDGES__ALLOW_UNCERTIFIED_COMPOSITION": "true",
                "CARTRIDGE_ROUTER_CARTRIDGES__REFRESH_S": "0.1",
                "CARTRIDGE_ROUTER_DRAIN__SETTLE_S": "0",
                "CARTRIDGE_ROUTER_DRAIN__GRACE_S": "1",
            },
        )
        builder = Builder(
            model_dir=model_dir,
            store=store,
            model_name=MODEL_NAME,
            dtype=torch.float32,
            with_weights_digest=True,
            say=lambda line: None,
        )
        gateway_url = f"http://127.0.0.1:{gateway_port}"

        def is_registered() -> bool:
            state = get_json(f"{gateway_url}/ready")
            return state is not None and bool(state["replicas"]["registered"])

        stack.wait_for("the engine's self-test", is_registered)
        with httpx.Client(timeout=300) as client:
            yield Fleet(
                gateway_url=gateway_url,
                engine_url=f"http://127.0.0.1:{port}",
                engine=engine,
                redis_url=redis.admin_url,
                store=store,
                builder=builder,
                model_dir=model_dir,
                tokenizer=AutoTokenizer.from_pretrained(model_dir),
                client=client,
                start_engine=lambda: stack.start("engine", command, engine_environment),
                stop_engine=stack.end,
            )
