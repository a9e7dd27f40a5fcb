"""Servers that go wrong: each fault is a clear error, in bounded time, and never a wrong byte."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from cartridge_proto.digest import sha256_digest
from cartridge_proto.stores import (
    CorruptStore,
    NotInStore,
    Store,
    StoreError,
    StoreUnavailable,
)
from cartridge_proto.stores.guarded_addresses import Network, check_redirect, network_of
from cartridge_proto.stores.guarded_http import GuardedHttp
from cartridge_proto.stores.object_storage import ObjectStorage
from cartridge_proto.stores.oci import OciRegistry
from cartridge_proto.stores.patience import Patience
from cartridge_proto.stores.redis_store import RedisStore
from tests import trust
from tests.contracts.store import put_sample, read
from tests.proto.misbehaving_http import Fault, MisbehavingHttp, misbehaving_http

BLOB = bytes(range(256)) * 40
DIGEST = sha256_digest(BLOB)
QUICK = Patience(connect_s=5, silence_s=0.3, grace_s=0.3, min_bytes_per_s=1 << 20)


@pytest.fixture
def server() -> Iterator[MisbehavingHttp]:
    """A server of one blob."""
    with misbehaving_http(BLOB) as state:
        yield state


@pytest.fixture
def aws_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """An account in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "maker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")


@pytest.fixture(params=["s3", "oci"])
def store(request: pytest.FixtureRequest, server: MisbehavingHttp, aws_account: None) -> Store:
    """A store whose server it is."""
    if request.param == "s3":
        return ObjectStorage(
            "bucket", "store", endpoint=server.url, region="us-east-1", patience=QUICK
        )
    host = server.url.removeprefix("http://")
    return OciRegistry(host, "store", is_plain=True, patience=QUICK)


def whole(store: Store) -> None:
    """Read the blob."""
    assert read(store, DIGEST, len(BLOB)) == BLOB


def ranged(store: Store) -> None:
    """Read a part of the blob, which is not verified by the store."""
    buffer = bytearray(100)
    store.read_unverified_range(DIGEST, 50, memoryview(buffer), size_bytes=len(BLOB))
    assert bytes(buffer) == BLOB[50:150]


both = pytest.mark.parametrize("ask", [whole, ranged])


@both
def test_without_a_fault_the_bytes_come(store: Store, ask: Callable[[Store], None]) -> None:
    """The server is one that a store can read from."""
    ask(store)


@both
@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault.SHORT_BODY, StoreUnavailable, "the body ended early"),
        (Fault.WRONG_LENGTH, CorruptStore, f"{len(BLOB) - 1} bytes; the manifest says {len(BLOB)}"),
        (Fault.LONGER_UNANNOUNCED, CorruptStore, "more than"),
        (Fault.BYTE_BY_BYTE, StoreUnavailable, "too slow"),
        (Fault.SILENT, StoreUnavailable, "silent for too long"),
        (Fault.RESET, StoreUnavailable, "the connection broke off"),
        (Fault.REDIRECT_LINK_LOCAL, StoreError, "169.254.169.254 is special"),
        (Fault.REDIRECT_ENDLESS, StoreError, "a redirect that is not followed"),
        (Fault.REDIRECT_NOWHERE, StoreError, "no http"),
        (Fault.SERVER_ERROR, StoreUnavailable, "status 503"),
        (Fault.FORBIDDEN, StoreUnavailable, "status 403; are the store's credentials set"),
        (Fault.CLOSED, StoreUnavailable, "the connection broke off"),
    ],
)
def test_a_fault_of_the_server_is_a_clear_error(
    store: Store,
    server: MisbehavingHttp,
    ask: Callable[[Store], None],
    fault: Fault,
    error: type[StoreError],
    message: str,
) -> None:
    """Of the right kind, without a signature in it; and the store works again afterwards."""
    server.fault = fault
    with pytest.raises(error, match=message) as caught:
        ask(store)
    assert "X-Amz" not in str(caught.value)
    assert "?" not in str(caught.value).replace("credentials set?", "")
    server.fault = Fault.NONE
    ask(store)


def test_signatures_are_in_no_log(
    store: Store, server: MisbehavingHttp, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what was asked nor what was tried again, at any level."""
    caplog.set_level("DEBUG")
    server.fault, server.num_faults = Fault.CLOSED, 1
    whole(store)
    assert "Retrying" in caplog.text
    assert "/store/blobs/" in caplog.text
    assert "X-Amz" not in caplog.text
    assert "secret-of-the-test" not in caplog.text


@pytest.mark.parametrize("fault", [Fault.HTML, Fault.HTML_PADDED, Fault.FLIPPED_BIT])
def test_other_bytes_with_status_200_are_refused(
    store: Store, server: MisbehavingHttp, fault: Fault
) -> None:
    """By their length or by their digest."""
    server.fault = fault
    with pytest.raises(CorruptStore, match=DIGEST):
        whole(store)


@pytest.mark.parametrize("fault", [Fault.HTML, Fault.OTHER_RANGE, Fault.IGNORED_RANGE])
def test_an_answer_that_is_not_the_range_is_refused(
    store: Store, server: MisbehavingHttp, fault: Fault
) -> None:
    """A whole blob or a page is not taken for a part of the blob."""
    server.fault = fault
    with pytest.raises(StoreUnavailable, match="not the bytes asked for"):
        ranged(store)


def test_a_slow_server_is_given_up_in_time(store: Store, server: MisbehavingHttp) -> None:
    """It sends a byte now and then, so no single read ever times out."""
    server.fault = Fault.BYTE_BY_BYTE
    started_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="too slow"):
        whole(store)
    # The limit is 0.31 s; the blob would take 100 s.
    assert time.monotonic() - started_s < 30


def test_what_is_absent_is_not_in_the_store(store: Store) -> None:
    """404 is a sure answer."""
    with pytest.raises(NotInStore):
        read(store, sha256_digest(b"other"), 5)
    assert store.has_blob(DIGEST)
    assert not store.has_blob(sha256_digest(b"other"))


def test_a_server_that_is_not_there_is_unavailable(store: Store, server: MisbehavingHttp) -> None:
    """For each verb, so that nobody takes it for an empty store."""
    gone = OciRegistry("127.0.0.1:1", "store", is_plain=True, patience=QUICK)
    bucket = ObjectStorage("bucket", endpoint="http://127.0.0.1:1", region="r", patience=QUICK)
    for away in (gone, bucket):
        for ask in (
            lambda away=away: away.resolve("handbook@1"),
            lambda away=away: away.aliases(),
            lambda away=away: away.manifest_digests(),
            lambda away=away: away.read_manifest(DIGEST),
            lambda away=away: away.has_blob(DIGEST),
            lambda away=away: away.put_blob(BLOB),
            lambda away=away: whole(away),
        ):
            with pytest.raises(StoreUnavailable):
                ask()


# --- redirects -----------------------------------------------------------------------------------
def test_a_redirect_to_storage_is_followed_without_credentials(server: MisbehavingHttp) -> None:
    """As registries do; the account is not sent to the other host."""
    with misbehaving_http(BLOB) as front:
        front.fault = Fault.REDIRECT
        front.location = f"{server.url}/{DIGEST}?signature=s"
        buffer = bytearray(len(BLOB))
        headers = {"authorization": "Basic eA=="}
        http = GuardedHttp(patience=QUICK)
        with http.ask("GET", f"{front.url}/{DIGEST}", headers=headers) as answer:
            assert sum(answer.read_into(memoryview(buffer))) == len(BLOB)
        assert bytes(buffer) == BLOB
        assert front.headers[0]["authorization"] == "Basic eA=="
        assert "authorization" not in server.headers[0]
        assert server.headers[0]["host"] == server.url.removeprefix("http://")


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("127.0.0.1", Network.LOOPBACK),
        ("::1", Network.LOOPBACK),
        ("::ffff:127.0.0.1", Network.LOOPBACK),
        ("10.1.2.3", Network.PRIVATE),
        ("192.168.1.1", Network.PRIVATE),
        ("fd12::1", Network.PRIVATE),
        ("8.8.8.8", Network.PUBLIC),
        ("2606:4700::1111", Network.PUBLIC),
        ("169.254.169.254", None),
        ("::ffff:169.254.169.254", None),
        ("64:ff9b::a9fe:a9fe", None),
        ("fe80::1%eth0", None),
        ("fd00:ec2::254", None),
        ("100.100.100.200", None),
        ("168.63.129.16", None),
        ("0.0.0.0", None),
        ("224.0.0.1", None),
    ],
)
def test_addresses_are_told_apart(address: str, network: Network | None) -> None:
    """However they are written; those of metadata services are none that a store may name."""
    assert network_of(address) is network


PLACES = {"loopback": "127.0.0.1", "private": "10.1.2.3", "public": "8.8.8.8"}


@pytest.mark.parametrize("origin", PLACES)
@pytest.mark.parametrize("target", [*PLACES, "special"])
def test_a_redirect_never_leads_further_inside(origin: str, target: str) -> None:
    """Outwards or sideways it may; the error names the address."""
    order = ["special", "loopback", "private", "public"]
    address = PLACES.get(target, "169.254.169.254")
    if target != "special" and order.index(target) >= order.index(origin):
        check_redirect([PLACES[origin]], [address], "http://place/")
    else:
        with pytest.raises(StoreError, match=f"{address} is {target}"):
            check_redirect([PLACES[origin]], [address], "http://place/")


def test_one_inner_address_among_several_is_enough_to_refuse() -> None:
    """A name that resolves to a public and a loopback address is not followed."""
    with pytest.raises(StoreError, match=r"127\.0\.0\.1 is loopback"):
        check_redirect(["8.8.8.8"], ["8.8.4.4", "127.0.0.1"], "http://place/")


@pytest.mark.usefixtures("aws_account")
@pytest.mark.parametrize("status", [200, 403])
def test_an_error_of_a_listing_quotes_no_answer(server: MisbehavingHttp, status: int) -> None:
    """A listing may have been redirected: what is there is for no log and no client."""
    store = ObjectStorage("bucket", endpoint=server.url, region="us-east-1", patience=QUICK)
    server.script["GET /bucket"] = (307, {"location": f"{server.url}/inner?role=x"}, b"")
    server.script["GET /inner"] = (status, {}, b'{"SecretAccessKey" : "inner secret"}')
    with pytest.raises(StoreUnavailable) as caught:
        store.aliases()
    text = str(caught.value)
    assert "ecret" not in text
    assert "?" not in text
    assert ("status code: 403" if status == 403 else "invalid list response") in text


# --- accounts ------------------------------------------------------------------------------------
ACCOUNT = ("maker", "secret-of-the-test")


def registry(server: MisbehavingHttp, account: tuple[str, str] | None) -> OciRegistry:
    """A store of the server with an account."""
    host = server.url.removeprefix("http://")
    return OciRegistry(host, "store", is_plain=True, account=account, patience=QUICK)


def test_a_token_is_fetched_once_and_used(server: MisbehavingHttp) -> None:
    """The account goes to the token service only, and the token to the registry."""
    server.challenge = f'Bearer realm="{server.url}/token",service="registry"'
    server.token = "a.token"
    store = registry(server, ACCOUNT)
    for _ in range(2):
        whole(store)
    authorizations = [headers.get("authorization") for headers in server.headers]
    basic = "Basic bWFrZXI6c2VjcmV0LW9mLXRoZS10ZXN0"
    assert authorizations == [None, basic, "Bearer a.token", "Bearer a.token"]
    assert server.token_queries == ["scope=repository%3Astore%3Apull&service=registry"]


def test_an_account_is_sent_where_the_registry_asks_for_one(server: MisbehavingHttp) -> None:
    """Basic, after the challenge."""
    server.challenge = 'Basic realm="registry"'
    server.token = "bWFrZXI6c2VjcmV0LW9mLXRoZS10ZXN0"
    whole(registry(server, ACCOUNT))
    assert [headers.get("authorization") for headers in server.headers] == [
        None,
        "Basic bWFrZXI6c2VjcmV0LW9mLXRoZS10ZXN0",
    ]


@pytest.mark.parametrize(
    ("challenge", "account", "message"),
    [
        ('Basic realm="x"', None, "asks for an account"),
        ('Basic realm="x"', ("maker", "wrong"), "status 401; are the store's credentials set"),
        ("Negotiate", ACCOUNT, "asks for an account"),
        ("", ACCOUNT, "asks for an account"),
        ('Bearer service="x"', ACCOUNT, "is not asked"),
        ('Bearer realm="ftp://127.0.0.1/token"', ACCOUNT, "is not asked"),
        ('Bearer realm="http://169.254.169.254/token"', ACCOUNT, "is special"),
        ('Bearer realm="{url}/nothing"', ACCOUNT, "gave no token"),
        ('Bearer realm="{url}/no-token"', ACCOUNT, "gave no token"),
    ],
)
def test_a_challenge_that_cannot_be_met_is_a_clear_error(
    server: MisbehavingHttp, challenge: str, account: tuple[str, str] | None, message: str
) -> None:
    """The password is in none."""
    server.challenge = challenge.replace("{url}", server.url)
    server.token = "a.token"
    with pytest.raises(StoreError, match=message) as caught:
        whole(registry(server, account))
    assert "secret-of-the-test" not in str(caught.value)


# --- registries that answer strangely ------------------------------------------------------------
TAGS = "GET /v2/store/tags/list"
UPLOADS = "POST /v2/store/blobs/uploads/"


def test_tags_that_are_no_list_are_unavailable(server: MisbehavingHttp) -> None:
    """A page of a proxy is not an empty store."""
    store = registry(server, None)
    for body in (b"<html>", b"[]", b'{"tags": 1}', b"{}", b"[" * 100_000):
        server.script[TAGS] = (200, {}, body)
        with pytest.raises(StoreUnavailable, match="no list of tags"):
            store.manifest_digests()
        with pytest.raises(StoreUnavailable, match="no list of tags"):
            store.aliases()


def test_an_endless_list_of_tags_is_refused(server: MisbehavingHttp) -> None:
    """Each page names a next one."""
    page = json.dumps({"tags": ["x"] * 30_000}).encode()
    server.script[TAGS] = (200, {"link": '</v2/store/tags/list?last=x>; rel="next"'}, page)
    with pytest.raises(StoreError, match="more than 100000 names"):
        registry(server, None).manifest_digests()


def test_an_alias_that_is_no_oci_manifest_is_corrupt(server: MisbehavingHttp) -> None:
    """Whatever the registry gives under the tag."""
    store = registry(server, None)
    path = "/v2/store/handbook/manifests/1"
    server.script[f"HEAD {path}"] = (200, {}, b"")
    for body in (b"", b"<html>", b"[]", b'{"config": {"digest": "x"}}', b"[" * 100_000):
        server.script[f"GET {path}"] = (200, {}, body)
        with pytest.raises(CorruptStore, match="alias handbook@1"):
            store.resolve("handbook@1")


def test_an_upload_goes_to_the_registry_only(server: MisbehavingHttp) -> None:
    """Not to a host that the registry names."""
    store = registry(server, ACCOUNT)
    server.script[UPLOADS] = (202, {"location": "http://127.0.0.2:9/upload"}, b"")
    with pytest.raises(StoreError, match="uploads to another host are not made"):
        store.put_blob(b"other")
    server.script[UPLOADS] = (202, {"location": "/upload?state=1"}, b"")
    with pytest.raises(NotInStore):
        store.put_blob(b"other")
    server.script["PUT /upload"] = (201, {}, b"")
    assert store.put_blob(b"other") == sha256_digest(b"other")


def test_an_answer_without_a_length_is_unavailable(store: Store, server: MisbehavingHttp) -> None:
    """Nobody can say how large the blob is."""
    for prefix in ("/v2/store/blobs/", "/bucket/store/blobs/sha256/"):
        name = DIGEST if prefix.startswith("/v2") else DIGEST.removeprefix("sha256:")
        server.script[f"HEAD {prefix}{name}"] = (200, {"content-length": "many"}, b"")
    with pytest.raises(StoreUnavailable, match="without a length"):
        store.has_blob(DIGEST)


# --- TLS -----------------------------------------------------------------------------------------
@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trust.Authority:
    """An authority that this process trusts."""
    made = trust.make_authority("tests")
    (tmp_path / "ca.pem").write_bytes(made.pem)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    return made


def test_a_certificate_must_be_the_hosts(authority: trust.Authority, tmp_path: Path) -> None:
    """Also after a redirect, which connects to an address; an untrusted one is refused."""
    others = trust.make_authority("others")
    with (
        misbehaving_http(BLOB, tls=trust.server_context(authority, tmp_path)) as good,
        misbehaving_http(BLOB, tls=trust.server_context(others, tmp_path)) as bad,
        misbehaving_http(BLOB) as front,
    ):
        front.fault = Fault.REDIRECT
        for server in (good, bad):
            front.location = f"{server.url}/{DIGEST}"
            for url in (f"{server.url}/{DIGEST}", f"{front.url}/{DIGEST}"):
                if server is good:
                    assert fetched(url) == BLOB
                else:
                    with pytest.raises(StoreUnavailable, match="no trusted TLS connection"):
                        fetched(url)
        front.location = f"{good.url.replace('127.0.0.1', 'localhost')}/{DIGEST}"
        with pytest.raises(StoreUnavailable, match="no trusted TLS connection"):
            fetched(f"{front.url}/{DIGEST}")


def test_a_redirect_never_leaves_https(authority: trust.Authority, tmp_path: Path) -> None:
    """Bytes would be verified all the same, but their signature would be read on the way."""
    with (
        misbehaving_http(BLOB, tls=trust.server_context(authority, tmp_path)) as front,
        misbehaving_http(BLOB) as server,
    ):
        front.fault = Fault.REDIRECT
        front.location = f"{server.url}/{DIGEST}"
        with pytest.raises(StoreError, match="it leaves https"):
            fetched(f"{front.url}/{DIGEST}")
        assert server.asked == []


@pytest.mark.usefixtures("aws_account")
def test_a_listing_is_never_led_from_https_to_http(
    authority: trust.Authority, tmp_path: Path
) -> None:
    """Where the services of clouds that give out credentials are."""
    with (
        misbehaving_http(tls=trust.server_context(authority, tmp_path)) as front,
        misbehaving_http() as inner,
    ):
        front.script["GET /bucket"] = (307, {"location": f"{inner.url}/latest/meta-data/"}, b"")
        store = ObjectStorage("bucket", endpoint=front.url, region="us-east-1", patience=QUICK)
        with pytest.raises(StoreUnavailable):
            store.aliases()
        assert front.headers != []
        assert inner.headers == []


def fetched(url: str) -> bytes:
    """What the guarded client reads there."""
    with GuardedHttp(patience=QUICK).ask("GET", url) as answer:
        return answer.read(len(BLOB))


# --- Redis ---------------------------------------------------------------------------------------
def test_a_blob_above_the_cap_is_refused_by_redis(redis_url: str) -> None:
    """The error gives both sizes, and nothing is stored."""
    store = RedisStore(redis_url, "library", max_blob_bytes=len(BLOB) - 1)
    with pytest.raises(StoreError, match=f"{len(BLOB)} bytes; a Redis store takes up to"):
        store.put_blob(BLOB)
    assert not store.has_blob(DIGEST)


def test_keys_of_other_types_are_corruption(redis_url: str) -> None:
    """Somebody else's keys under our names are not an outage."""
    store = RedisStore(redis_url, "library")
    digest = put_sample(store)
    with redis.Redis.from_url(redis_url) as client:
        for key in client.keys("library:*"):
            client.delete(key)
            client.zadd(key, {"x": 1})
    with pytest.raises(CorruptStore, match="another type"):
        store.read_manifest(digest)
    with pytest.raises(CorruptStore, match="another type"):
        store.manifest_digests()


def test_a_redis_that_is_not_there_is_unavailable() -> None:
    """For each verb."""
    store = RedisStore("redis://127.0.0.1:1/0", "library", patience=QUICK)
    for ask in (store.aliases, store.manifest_digests, lambda: store.put_blob(BLOB)):
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1"):
            ask()
