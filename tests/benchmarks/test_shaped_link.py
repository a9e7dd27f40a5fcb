"""The links of `make bench-prediction`: all bytes, and not before their time."""

import socket
import threading
import time

import pytest

from tests.benchmarks.shaped_link import Shape, shaped_links

SENT = bytes(range(256)) * 8192
"""2 MiB."""


@pytest.fixture
def echo_port() -> int:
    """A server that answers each letter with as many bytes as there are."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(SENT)
        server.close()

    threading.Thread(target=serve, daemon=True).start()
    port: int = server.getsockname()[1]
    return port


def test_a_link_to_nobody_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    """Where the server is gone, its client learns it at once, and nothing breaks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with (
        shaped_links(port, [Shape(0.1, 1e6)]) as ports,
        socket.create_connection(("127.0.0.1", ports[0]), timeout=10) as client,
    ):
        assert client.recv(1) == b""
    assert caplog.records == []


def test_a_link_is_late_and_slow_and_loses_nothing(echo_port: int) -> None:
    """Two answers of 2 MiB at 8 MiB/s, each 0.1 s late, take 0.7 s at least."""
    with (
        shaped_links(echo_port, [Shape(0.1, 8 << 20)]) as ports,
        socket.create_connection(("127.0.0.1", ports[0])) as client,
    ):
        begun_s = time.monotonic()
        for _ in range(2):
            client.sendall(b"x")
            found = b""
            while len(found) < len(SENT):
                found += client.recv(1 << 20)
            assert found == SENT
        assert time.monotonic() - begun_s >= 0.7
