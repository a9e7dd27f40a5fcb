"""Store URLs: what is understood, what is refused, and that nothing secret is shown."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_proto.names import ENV_STORE_PASSWORD, ENV_STORE_USERNAME
from cartridge_proto.stores import LocalStore, Store, StoreError, open_store, store_problem
from cartridge_proto.stores.opening import BadStoreUrl, parse_store_url

ACCOUNT = {ENV_STORE_USERNAME: "maker", ENV_STORE_PASSWORD: "secret-of-the-test"}


@pytest.mark.parametrize("text", ["/srv/store", "srv/store", "file:///srv/store", "./a:b"])
def test_a_path_or_a_file_url_is_a_folder(text: str) -> None:
    """A relative path stays relative."""
    store = open_store(text, {})
    assert isinstance(store, LocalStore)
    assert store.root == Path(text.removeprefix("file://"))


def test_a_percent_sign_in_a_file_url_is_decoded() -> None:
    """As in any URL."""
    assert open_store("file:///srv/a%20b", {}).location == "/srv/a b"


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("s3://bucket/team/store?region=eu-central-1", "s3://bucket/team/store"),
        ("s3://bucket?endpoint=http://127.0.0.1:9000", "s3://bucket"),
        ("oci://registry.example/team/store", "oci://registry.example/team/store"),
        ("oci://127.0.0.1:5000/store", "oci://127.0.0.1:5000/store"),
        ("redis://127.0.0.1:6379/2/library", "redis://127.0.0.1:6379/2/library"),
        ("redis://127.0.0.1:6379/library", "redis://127.0.0.1:6379/0/library"),
        ("redis://127.0.0.1:6379/2", "redis://127.0.0.1:6379/2/cartridge-store"),
        ("redis://127.0.0.1", "redis://127.0.0.1/0/cartridge-store"),
        ("rediss://valkey.example/7days", "rediss://valkey.example/0/7days"),
    ],
)
def test_each_kind_of_store_is_opened(text: str, location: str) -> None:
    """Without asking anybody; its location is the URL without options and account."""
    store: Store = open_store(text, ACCOUNT)
    assert store.location == location
    store.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty store"),
        (
            "http://host/store",
            "unknown kind of store http://; allowed are a folder, file:///folder",
        ),
        ("S3X://bucket", "unknown kind of store s3x://"),
        ("file://host/store", "write file:///folder"),
        ("s3://", "no bucket's name"),
        ("s3://UPPER/store", "no bucket's name"),
        ("s3://bucket/a?colour=red", "no option 'colour'; allowed: endpoint, insecure, region"),
        ("s3://bucket/a#b", "a # has no meaning"),
        ("s3://bucket/a//b", "an empty part"),
        ("s3://bucket/a/%2e%2e/b", "an empty part, a . or a .."),
        ("s3://bucket/a%0ab", "the prefix has"),
        ("oci://registry.example", "the repository is missing"),
        ("oci://registry.example/Upper", "must be a repository name"),
        ("oci://registry.example/../x", "must be a repository name"),
        ("oci://registry.example/store?insecure=maybe", "insecure is true or false"),
        ("oci:///store", "not host or host:port"),
        ("oci://a b/store", "not host or host:port"),
        ("oci://[1/store", "not a URL"),
        ("redis://host/0/a/b", "the path is /database/prefix"),
        ("s3://bucket?endpoint=http://minio.example:9000", "is plain http"),
    ],
)
def test_what_names_no_store_is_refused(text: str, message: str) -> None:
    """The message says what is wrong with it or what is allowed."""
    with pytest.raises(StoreError) as caught:
        open_store(text, {})
    assert message in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "oci", "redis", "rediss"])
def test_an_account_in_the_url_is_refused_and_not_shown(scheme: str) -> None:
    """The message names the variables to set instead."""
    for account in ("maker:hunter2@", ":hunter2@", "hunter2@"):
        with pytest.raises(BadStoreUrl) as caught:
            parse_store_url(f"{scheme}://{account}host/store")
        assert "hunter2" not in str(caught.value)
        assert ENV_STORE_PASSWORD in str(caught.value)


@given(
    st.text(), st.sampled_from(["", "s3://", "oci://", "redis://", "file://", "x://", "s3://b/"])
)
def test_any_text_is_understood_or_refused(rest: str, start: str) -> None:
    """No text raises anything else, and what is understood has no account in it."""
    try:
        url = parse_store_url(start + rest)
    except BadStoreUrl:
        return
    assert url.scheme == "file" or "@" not in url.host
    store_problem(start + rest)


@pytest.mark.parametrize("text", ["", "ftp://host", "/does/not/exist", "file:///does/not/exist"])
def test_a_setting_that_names_no_store_has_a_problem(text: str) -> None:
    """Also a folder that is not there, which a command that writes would make."""
    assert store_problem(text)


def test_a_setting_that_names_a_store_has_none(tmp_path: Path) -> None:
    """A folder that is there, or a URL, which is not asked."""
    for text in (str(tmp_path), f"file://{tmp_path}", "oci://127.0.0.1:1/store"):
        assert store_problem(text) is None


def test_insecure_allows_plain_http_to_another_machine() -> None:
    """Where the operator says so."""
    url = "s3://bucket?endpoint=http://minio.example:9000&insecure=true"
    assert open_store(url, {}).location == "s3://bucket"
    assert parse_store_url("oci://registry.example/store?insecure=true").is_insecure
    assert not parse_store_url("oci://registry.example/store?insecure=false").is_insecure


def test_a_client_library_is_imported_by_its_store_only() -> None:
    """Importing stores and opening a folder brings in no client of any server."""
    script = (
        "import sys\n"
        "from cartridge_proto.stores import open_store\n"
        "open_store('/tmp')\n"
        "print(sorted({'obstore', 'redis', 'urllib3', 'ssl'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "package"),
    [("s3://bucket", "obstore"), ("oci://host/store", "urllib3"), ("redis://host", "redis")],
)
def test_a_missing_package_is_named_with_its_extra(text: str, package: str) -> None:
    """The error says what to install."""
    script = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "from cartridge_proto.stores import StoreError, open_store\n"
        "try:\n"
        f"    open_store({text!r})\n"
        "except StoreError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert package in done.stdout
    assert "pip install 'cartridge-router[stores]'" in done.stdout
