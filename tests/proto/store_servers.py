"""Real servers for stores, on loopback: an S3 (moto), an OCI registry, a Redis.

Owns their start and their end. Refuses any other address.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
REGISTRY = ROOT / "build" / "services" / "docker-registry"
"""Debian's registry; `.ci/services` puts it there."""
BUCKET = "cartridges"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """URL of moto's S3 with one bucket."""
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    url = f"http://127.0.0.1:{port}"
    with _running(command, f"{url}/moto-api/", {}):
        httpx.put(f"{url}/{BUCKET}").raise_for_status()
        yield url


@contextlib.contextmanager
def oci_registry(folder: Path) -> Iterator[str]:
    """host:port of Debian's `docker-registry`, which keeps its files in `folder`."""
    assert REGISTRY.is_file(), f"{REGISTRY} is missing: run .ci/services"
    port = _free_port()
    config = folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder / 'registry'}}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    environment = {"OTEL_TRACES_EXPORTER": "none"}
    with _running(
        [str(REGISTRY), "serve", str(config)], f"http://127.0.0.1:{port}/v2/", environment
    ):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def _running(command: list[str], url: str, environment: Mapping[str, str]) -> Iterator[None]:
    """A process that answers at `url`, until the end of the block."""
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **environment},
    ) as process:
        try:
            _wait_for(process, url)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(process: subprocess.Popen[bytes], url: str) -> None:
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        assert process.poll() is None, f"it ended with status {process.returncode}"
        with contextlib.suppress(httpx.HTTPError):
            httpx.get(url, timeout=5)
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing answers at {url}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
