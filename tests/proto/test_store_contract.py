"""The contract of stores, run by each of them against a real server."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
import redis
from obstore.store import S3Store

from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.stores import LocalStore, Store
from cartridge_proto.stores.object_storage import ObjectStorage
from cartridge_proto.stores.oci import OciRegistry
from cartridge_proto.stores.redis_store import RedisStore
from tests.contracts.store import Damage, DamagedStoreContract, MendableStoreContract, StoreContract
from tests.proto.sample_artifact import sample_artifact
from tests.proto.store_servers import BUCKET, oci_registry, s3_server

BLOB_DIGEST = sha256_digest(sample_artifact()[1])
_numbers = itertools.count()


@pytest.fixture
def source(tmp_path: Path) -> Store:
    """A store to copy from."""
    return LocalStore(tmp_path / "source")


class TestLocalStore(StoreContract, DamagedStoreContract, MendableStoreContract):
    """A folder."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        """An empty one."""
        return LocalStore(tmp_path / "store")

    @pytest.fixture
    def other(self, store: LocalStore) -> Store:
        """Another client of it."""
        return LocalStore(store.root)

    @pytest.fixture
    def damage(self, store: LocalStore) -> Damage:
        """Overwrite a file."""

        def overwrite(digest: Digest, data: bytes) -> None:
            is_blob = digest == BLOB_DIGEST
            path = store.blob_path(digest) if is_blob else store.manifest_path(digest)
            path.write_bytes(data)

        return overwrite


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """An S3 server."""
    with s3_server() as url:
        yield url


@pytest.fixture
def _aws_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "maker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")


@pytest.mark.services
@pytest.mark.usefixtures("_aws_credentials")
class TestObjectStorage(StoreContract, DamagedStoreContract, MendableStoreContract):
    """A bucket of moto's server."""

    @pytest.fixture
    def prefix(self) -> str:
        """A part of the bucket that no other test uses."""
        return f"team {next(_numbers)}/store"

    @pytest.fixture
    def store(self, s3_url: str, prefix: str) -> Store:
        """An empty one."""
        return ObjectStorage(BUCKET, prefix, endpoint=s3_url, region="us-east-1")

    @pytest.fixture
    def other(self, s3_url: str, prefix: str) -> Store:
        """Another client of it."""
        return ObjectStorage(BUCKET, prefix, endpoint=s3_url, region="us-east-1")

    @pytest.fixture
    def damage(self, s3_url: str, prefix: str) -> Damage:
        """Overwrite an object."""

        def overwrite(digest: Digest, data: bytes) -> None:
            stem = digest.removeprefix("sha256:")
            is_blob = digest == BLOB_DIGEST
            key = f"blobs/sha256/{stem}" if is_blob else f"manifests/sha256/{stem}.json"
            bucket = S3Store(
                BUCKET,
                endpoint=s3_url,
                region="us-east-1",
                client_options={"allow_http": True},
            )
            obstore.put(bucket, f"{prefix}/{key}", data)

        return overwrite


@pytest.fixture(scope="session")
def registry_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the registry keeps its files."""
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="session")
def registry_host(registry_dir: Path) -> Iterator[str]:
    """A registry."""
    with oci_registry(registry_dir) as host:
        yield host


@pytest.mark.services
class TestOciRegistry(StoreContract, DamagedStoreContract):
    """Debian's registry."""

    @pytest.fixture
    def store(self, registry_host: str) -> Store:
        """An empty one, under a prefix that no other test uses."""
        return OciRegistry(registry_host, f"team/store-{next(_numbers)}", is_plain=True)

    @pytest.fixture
    def other(self, store: Store, registry_host: str) -> Store:
        """Another client of it."""
        prefix = store.location.removeprefix(f"oci://{registry_host}/")
        return OciRegistry(registry_host, prefix, is_plain=True)

    @pytest.fixture
    def damage(self, registry_dir: Path) -> Iterator[Damage]:
        """Overwrite a file of the registry, which all prefixes share; mended at the end."""
        originals: dict[Path, bytes] = {}

        def overwrite(digest: Digest, data: bytes) -> None:
            stem = digest.removeprefix("sha256:")
            (path,) = registry_dir.rglob(f"blobs/sha256/{stem[:2]}/{stem}/data")
            originals.setdefault(path, path.read_bytes())
            path.write_bytes(data)

        yield overwrite
        for path, data in originals.items():
            path.write_bytes(data)


@pytest.mark.services
class TestRedisStore(StoreContract, DamagedStoreContract, MendableStoreContract):
    """A Valkey."""

    @pytest.fixture
    def store(self, redis_url: str) -> Store:
        """An empty one."""
        return RedisStore(redis_url, "library")

    @pytest.fixture
    def other(self, redis_url: str) -> Store:
        """Another client of it."""
        return RedisStore(redis_url, "library")

    @pytest.fixture
    def damage(self, redis_url: str) -> Damage:
        """Overwrite a value."""

        def overwrite(digest: Digest, data: bytes) -> None:
            kind = "blob" if digest == BLOB_DIGEST else "manifest"
            with redis.Redis.from_url(redis_url) as client:
                client.set(f"library:{kind}:{digest}", data)

        return overwrite
