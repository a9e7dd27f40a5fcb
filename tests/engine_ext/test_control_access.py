"""Who may call the control service: tokens and client certificates over real gRPC on loopback."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cartridge_engine_ext.artifact_pool import ArtifactPool
from cartridge_engine_ext.control_access import (
    OPEN_ACCESS,
    ControlAccess,
    ControlTls,
    is_local,
    read_access,
)
from cartridge_engine_ext.control_service import ControlServer, ControlService
from cartridge_engine_ext.errors import ConfigurationError
from cartridge_proto.names import ENV_CONTROL_TOKEN
from cartridge_proto.residency import Epoch, ReplicaId
from cartridge_proto.stores import LocalStore
from cartridge_proto.v1 import control_pb2, control_pb2_grpc
from tests.engine_ext.stored_artifacts import WAIT_S
from tests.proto.sample_artifact import engine_of, sample_artifact
from tests.trust import make_authority

TOKEN = "a-token-of-the-operator"
ENGINE = engine_of(sample_artifact()[0])


@contextmanager
def server_with(
    access: ControlAccess, folder: Path, address: str = "127.0.0.1:0"
) -> Iterator[ControlServer]:
    """A control server over an empty pool."""
    pool = ArtifactPool(
        store=LocalStore(folder), engine=ENGINE, capacity_bytes=1 << 20, num_loaders=1
    )
    service = ControlService(
        pool=pool,
        engine=ENGINE,
        engine_version="",
        replica=ReplicaId("replica-0"),
        epoch=Epoch("0" * 32),
        not_ready_reason=lambda: None,
    )
    try:
        server = ControlServer(service, address, access)
        try:
            yield server
        finally:
            server.stop()
    finally:
        pool.close()


def describe(channel: grpc.Channel, authorization: str | None = None) -> str:
    """The replica's name, or the status of the refusal."""
    stub = control_pb2_grpc.CartridgeControlStub(channel)
    metadata = () if authorization is None else (("authorization", authorization),)
    call = stub.Describe.future(control_pb2.DescribeRequest(), metadata=metadata, timeout=WAIT_S)
    status = call.code()
    return call.result().replica if status is grpc.StatusCode.OK else str(status.name)


def is_healthy(channel: grpc.Channel) -> bool:
    """Whether a standard health check is answered."""
    stub = health_pb2_grpc.HealthStub(channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.NOT_SERVING)


# --- tokens --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "authorization",
    [None, "", TOKEN, f"Bearer {TOKEN}x", f"bearer {TOKEN}", "Bearer ", f"Basic {TOKEN}"],
)
def test_a_call_without_the_token_is_unauthenticated(
    authorization: str | None, tmp_path: Path
) -> None:
    """Absent, empty, longer, or in another scheme: UNAUTHENTICATED; health needs none."""
    with (
        server_with(ControlAccess(TOKEN), tmp_path) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        assert describe(channel, authorization) == "UNAUTHENTICATED"
        assert is_healthy(channel)


def test_a_call_with_the_token_is_answered(tmp_path: Path) -> None:
    """`authorization: Bearer TOKEN` is let in, once and not twice."""
    with (
        server_with(ControlAccess(TOKEN), tmp_path) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        assert describe(channel, f"Bearer {TOKEN}") == "replica-0"
        twice = (("authorization", f"Bearer {TOKEN}"),) * 2
        with pytest.raises(grpc.RpcError) as caught:
            control_pb2_grpc.CartridgeControlStub(channel).Describe(
                control_pb2.DescribeRequest(), metadata=twice
            )
        assert isinstance(caught.value, grpc.Call)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_stream_needs_the_token_too(tmp_path: Path) -> None:
    """Watch is refused like the rest."""
    with (
        server_with(ControlAccess(TOKEN), tmp_path) as server,
        grpc.insecure_channel(server.address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        next(control_pb2_grpc.CartridgeControlStub(channel).Watch(control_pb2.WatchRequest()))
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    details = caught.value.details()
    assert details.startswith("authorization: ")
    assert TOKEN not in details


# --- addresses -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:0", True),
        ("127.8.9.1:8002", True),
        ("localhost:8002", True),
        ("[::1]:8002", True),
        ("unix:/run/agent.sock", True),
        ("0.0.0.0:8002", False),
        ("[::]:8002", False),
        ("10.0.0.5:8002", False),
        ("engine-0:8002", False),
        (":8002", False),
    ],
)
def test_loopback_and_unix_sockets_are_local(address: str, expected: bool) -> None:
    """Names other than localhost may be anything, and are not."""
    assert is_local(address) is expected


def test_an_address_for_others_is_never_open(tmp_path: Path) -> None:
    """Without a token and client certificates it is a configuration error; with one it serves."""
    with (
        pytest.raises(ConfigurationError, match=r"control_address: 0\.0\.0\.0:0 .*token"),
        server_with(OPEN_ACCESS, tmp_path, "0.0.0.0:0"),
    ):
        pass
    only_server = ControlAccess(tls=ControlTls(b"", b"", None))
    with pytest.raises(ConfigurationError):
        only_server.check_address("0.0.0.0:0")
    ControlAccess(TOKEN).check_address("0.0.0.0:0")
    ControlAccess(tls=ControlTls(b"", b"", b"")).check_address("0.0.0.0:0")


def test_a_unix_socket_is_for_its_user_only(tmp_path: Path) -> None:
    """Mode 0600 from its first moment; it needs no token."""
    path = tmp_path / "control.sock"
    with (
        server_with(OPEN_ACCESS, tmp_path, f"unix:{path}") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        assert path.stat().st_mode & 0o777 == 0o600
        assert describe(channel) == "replica-0"


# --- client certificates -------------------------------------------------------------------------
def test_only_callers_with_a_certificate_of_the_authority_get_in(tmp_path: Path) -> None:
    """mTLS: ours is answered; none, and one of another authority, reach nothing."""
    ours, others = make_authority("ours"), make_authority("others")
    server_key, server_certificate = ours.issue("engine-0")
    access = ControlAccess(tls=ControlTls(server_certificate, server_key, ours.pem))
    with server_with(access, tmp_path) as server:
        for authority, expected in ((ours, "replica-0"), (others, "UNAVAILABLE"), (None, None)):
            key, certificate = authority.issue("gateway") if authority else (None, None)
            credentials = grpc.ssl_channel_credentials(ours.pem, key, certificate)
            with grpc.secure_channel(server.address, credentials) as channel:
                assert describe(channel) == (expected or "UNAVAILABLE")
                if authority is ours:
                    assert is_healthy(channel)
        with grpc.insecure_channel(server.address) as channel:
            assert describe(channel) == "UNAVAILABLE"


def test_a_certificate_does_not_replace_the_token(tmp_path: Path) -> None:
    """With both set a caller needs both."""
    ours = make_authority("ours")
    server_key, server_certificate = ours.issue("engine-0")
    access = ControlAccess(TOKEN, ControlTls(server_certificate, server_key, ours.pem))
    key, certificate = ours.issue("gateway")
    credentials = grpc.ssl_channel_credentials(ours.pem, key, certificate)
    with (
        server_with(access, tmp_path) as server,
        grpc.secure_channel(server.address, credentials) as channel,
    ):
        assert describe(channel) == "UNAUTHENTICATED"
        assert describe(channel, f"Bearer {TOKEN}") == "replica-0"


# --- settings ------------------------------------------------------------------------------------
def test_the_token_comes_from_the_environment_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's surrounding space does not count; the environment wins; neither is open."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv(ENV_CONTROL_TOKEN, "")
    assert read_access(token_file=str(file)) == ControlAccess(TOKEN)
    monkeypatch.setenv(ENV_CONTROL_TOKEN, "x" * 16)
    assert read_access(token_file=str(file)) == ControlAccess("x" * 16)
    monkeypatch.delenv(ENV_CONTROL_TOKEN)
    assert read_access() == OPEN_ACCESS


def test_tls_comes_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificate, key and authority are read as they are."""
    monkeypatch.delenv(ENV_CONTROL_TOKEN, raising=False)
    files = {name: tmp_path / name for name in ("tls_cert", "tls_key", "tls_client_ca")}
    for name, file in files.items():
        file.write_bytes(name.encode())
    access = read_access(**{name: str(file) for name, file in files.items()})
    assert access.tls == ControlTls(b"tls_cert", b"tls_key", b"tls_client_ca")
    assert not access.is_open


@pytest.mark.parametrize("token", ["short", "with a space in it", "ünïcödé-ünïcödé"])
def test_a_poor_token_is_refused_without_being_told(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too short, or signs that a header cannot carry: the message names where it was set."""
    monkeypatch.setenv(ENV_CONTROL_TOKEN, token)
    with pytest.raises(ConfigurationError, match=ENV_CONTROL_TOKEN) as caught:
        read_access()
    assert token not in str(caught.value)


def test_every_problem_is_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are not there and files that need others."""
    monkeypatch.delenv(ENV_CONTROL_TOKEN, raising=False)
    with pytest.raises(ConfigurationError) as caught:
        read_access(token_file="/absent/token", tls_key="/absent/key", tls_client_ca="/absent/ca")
    for text in (
        "control_token_file: /absent/token: No such file",
        "control_tls_cert and control_tls_key: both or neither",
        "control_tls_client_ca: needs",
        "control_tls_key: /absent/key",
    ):
        assert text in str(caught.value)


def test_tls_files_that_are_no_certificates_are_a_configuration_error(tmp_path: Path) -> None:
    """The message names the address that could not be had."""
    access = ControlAccess(TOKEN, ControlTls(b"no certificate", b"no key", None))
    with (
        pytest.raises(ConfigurationError, match="control_address"),
        server_with(access, tmp_path),
    ):
        pass
