"""The contract of stores, run by each of them against a real server."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import obstore
import pytest
import redis
from obstore.store import S3Store

from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import encode_manifest, manifest_digest
from cartridge_proto.stores import CorruptStore, LocalStore, NotInStore, Store, StoreError
from cartridge_proto.stores.object_storage import ObjectStorage
from cartridge_proto.stores.oci import OciRegistry, oci_manifest
from cartridge_proto.stores.redis_store import RedisStore
from tests.contracts.store import (
    Damage,
    DamagedStoreContract,
    MendableStoreContract,
    StoreContract,
    put_sample,
)
from tests.proto.encoded_artifact import encoded_sample
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

    def test_long_lists_come_in_pages(self, store: Store, registry_host: str) -> None:
        """Every name is there, however few come at a time."""
        digests = [put_sample(store, version=str(number)) for number in range(5)]
        for number, digest in enumerate(digests):
            store.set_alias(f"handbook@{number}", digest)
        prefix = store.location.removeprefix(f"oci://{registry_host}/")
        paged = OciRegistry(registry_host, prefix, is_plain=True, tags_per_page=2)
        assert paged.manifest_digests() == sorted(digests)
        assert len(paged.aliases()) == 5

    def test_any_client_of_registries_can_pull_a_cartridge(
        self, store: Store, registry_host: str
    ) -> None:
        """By name and version: manifest and blobs, under the digests that they have everywhere."""
        manifest, blob = sample_artifact()
        digest = put_sample(store)
        store.set_alias(manifest.alias, digest)
        prefix = store.location.removeprefix(f"oci://{registry_host}/")
        url = f"http://{registry_host}/v2/{prefix}/{manifest.name}"
        accept = {"accept": "application/vnd.oci.image.manifest.v1+json"}
        pulled = httpx.get(f"{url}/manifests/{manifest.version}", headers=accept)
        assert pulled.content == oci_manifest(digest, manifest)
        described = pulled.json()
        assert described["artifactType"] == "application/vnd.cartridge.artifact.v1"
        assert described["config"] == {
            "mediaType": "application/vnd.cartridge.manifest.v1+json",
            "digest": digest,
            "size": len(encode_manifest(manifest)),
        }
        (layer,) = described["layers"]
        assert (layer["digest"], layer["size"]) == (BLOB_DIGEST, len(blob))
        assert httpx.get(f"{url}/blobs/{digest}").content == encode_manifest(manifest)
        assert httpx.get(f"{url}/blobs/{BLOB_DIGEST}").content == blob

    def test_a_layer_says_that_it_is_encoded(self) -> None:
        """A client that knows safetensors only is not told that these bytes are."""
        layers = []
        for manifest in (sample_artifact()[0], encoded_sample()[0]):
            digest = Digest(manifest_digest(manifest))
            layers += json.loads(oci_manifest(digest, manifest))["layers"]
        plain, encoded = (
            (layer["mediaType"].rsplit(".", 1)[1], *layer["annotations"].values())
            for layer in layers
        )
        stem = encoded_sample()[0].payload[0].sha256.removeprefix("sha256:")
        assert plain == ("safetensors", f"{BLOB_DIGEST.removeprefix('sha256:')}.safetensors")
        assert encoded == ("encoded", f"{stem}.safetensors.shuffle-zstd")

    def test_what_others_put_there_is_no_cartridge(self, store: Store, registry_host: str) -> None:
        """An image beside ours is not listed, and resolving it is an error."""
        manifest, _ = sample_artifact()
        digest = put_sample(store)
        store.set_alias("handbook@1", digest)
        prefix = store.location.removeprefix(f"oci://{registry_host}/")
        url = f"http://{registry_host}/v2/{prefix}/handbook/manifests/2"
        image = json.loads(oci_manifest(digest, manifest))
        image["config"]["mediaType"] = "application/vnd.oci.image.config.v1+json"
        media_type = {"content-type": image["mediaType"]}
        httpx.put(url, json=image, headers=media_type).raise_for_status()
        assert store.aliases() == {"handbook@1": digest}
        with pytest.raises(CorruptStore, match="alias handbook@2"):
            store.resolve("handbook@2")

    @pytest.mark.parametrize("name", ["a..b", "a-", "a.-b", "n" * 124])
    def test_a_name_that_no_repository_can_have_is_refused(self, store: Store, name: str) -> None:
        """With the rule; such an alias is not there either."""
        digest = put_sample(store)
        with pytest.raises(StoreError, match="cannot be the name of an OCI repository"):
            store.set_alias(f"{name}@1", digest)
        with pytest.raises(NotInStore):
            store.resolve(f"{name}@1")


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
