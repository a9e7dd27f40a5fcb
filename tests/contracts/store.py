"""What every Cartridge store keeps, whatever it is made of.

Owns the behaviour suite of the interface `Store`. Refuses to know any store: a test module runs the
suite over those it has, each empty at the start of a test.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from cartridge_proto.digest import Digest, sha256_digest
from cartridge_proto.manifest import Blob, InvalidManifest, ManifestDigest, manifest_digest
from cartridge_proto.stores import CorruptStore, NotInStore, Store
from cartridge_proto.stores.copying import copy_artifact
from tests.proto.encoded_artifact import encoded_sample, encoding_of, with_stored_blob
from tests.proto.sample_artifact import sample_artifact

MANIFEST, BLOB = sample_artifact()
BLOB_DIGEST = sha256_digest(BLOB)
ABSENT = sha256_digest(b"not in any store")
LARGE = bytes(range(256)) * 4096 * 2 + b"tail"
"""More than is read at a time."""

Damage = Callable[[Digest, bytes], None]
"""Puts other bytes under the name of a stored blob or manifest, past the store."""


class StoreContract:
    """The suite; a subclass in a test module gives the fixtures `store` and, if it can, `damage`.

    `other` is a second client of the same place.
    """

    # --- what is put is read back --------------------------------------------------------------
    def test_an_artifact_is_read_back(self, store: Store, other: Store) -> None:
        """Blob, manifest and alias that one client put are there, verified, for another."""
        digest = put_sample(store)
        store.set_alias(MANIFEST.alias, digest)
        assert digest == manifest_digest(MANIFEST)
        assert other.read_manifest(digest) == other.verify(digest) == MANIFEST
        assert other.resolve(MANIFEST.alias) == digest
        assert other.aliases() == {MANIFEST.alias: digest}
        assert other.manifest_digests() == [digest]
        assert read(other, BLOB_DIGEST, len(BLOB)) == BLOB

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        """Nothing is there, and asking is no error."""
        assert store.aliases() == {}
        assert store.manifest_digests() == []
        assert not store.has_blob(ABSENT)

    def test_storing_again_changes_nothing(self, store: Store) -> None:
        """The second put of the same bytes gives the same digests."""
        assert put_sample(store) == put_sample(store)
        assert store.manifest_digests() == [manifest_digest(MANIFEST)]

    def test_several_artifacts_are_listed_in_order(self, store: Store) -> None:
        """Digests and aliases come sorted, and artifacts may share blobs."""
        digests = [put_sample(store, version=str(number)) for number in range(3)]
        for number in (2, 0, 1):
            store.set_alias(f"handbook@{number}", digests[number])
        store.set_alias("atlas@1", digests[1])
        assert store.manifest_digests() == sorted(digests)
        assert list(store.aliases().items()) == [
            ("atlas@1", digests[1]),
            *((f"handbook@{number}", digests[number]) for number in range(3)),
        ]

    def test_an_alias_moves(self, store: Store, other: Store) -> None:
        """Setting it again replaces what it stands for, for every client."""
        for version in ("1", "2"):
            digest = put_sample(store, version=version)
            store.set_alias("handbook@latest", digest)
            assert other.resolve("handbook@latest") == digest
            assert other.aliases() == {"handbook@latest": digest}

    def test_a_digest_stands_for_itself(self, store: Store) -> None:
        """Resolving a digest asks nobody."""
        assert store.resolve(ABSENT) == ABSENT

    def test_a_store_says_where_it_is(self, store: Store) -> None:
        """In a word that people can read."""
        assert store.location

    # --- blobs ---------------------------------------------------------------------------------
    @pytest.mark.parametrize("blob", [LARGE, b"x"], ids=["large", "one byte"])
    def test_a_blob_is_read_whole(self, store: Store, blob: bytes) -> None:
        """Of any size, and its presence is told."""
        digest = store.put_blob(memoryview(blob))
        assert digest == sha256_digest(blob)
        assert store.has_blob(digest)
        assert read(store, digest, len(blob)) == blob

    @pytest.mark.parametrize(
        ("offset", "count"),
        [(0, 1), (0, len(LARGE)), (1, 100), (len(LARGE) - 4, 4), (len(LARGE) // 2, 1 << 20)],
    )
    def test_a_range_of_a_blob_is_read(self, store: Store, offset: int, count: int) -> None:
        """These bytes and no others, told piece by piece."""
        digest = store.put_blob(LARGE)
        buffer = bytearray(count)
        counts: list[int] = []
        store.read_unverified_range(
            digest, offset, memoryview(buffer), size_bytes=len(LARGE), on_bytes=counts.append
        )
        assert bytes(buffer) == LARGE[offset : offset + count]
        assert sum(counts) == count

    def test_a_text_of_unknown_size_is_read_within_a_limit(self, store: Store) -> None:
        """As a whole, or not: too large and absent are told apart."""
        digest = store.put_blob(b"twelve bytes")
        assert store.read_small_blob(digest, 12) == b"twelve bytes"
        with pytest.raises(CorruptStore, match="the limit is 11"):
            store.read_small_blob(digest, 11)
        with pytest.raises(NotInStore):
            store.read_small_blob(ABSENT, 12)

    def test_the_text_of_an_artifact_is_copied_with_it(self, store: Store, source: Store) -> None:
        """Where the source has it; selection reads it at the target."""
        text = b"Bollard seven is reserved."
        put_sample(source)
        provenance = msgspec.structs.replace(
            MANIFEST.provenance, source_digest=source.put_blob(text)
        )
        digest = source.put_manifest(msgspec.structs.replace(MANIFEST, provenance=provenance))
        copy_artifact(source, store, digest)
        assert store.read_small_blob(sha256_digest(text), 100) == text

    def test_a_range_ends_when_the_reader_has_enough(self, store: Store) -> None:
        """What `on_bytes` raises ends the read, and the store can be used on."""

        class Enough(Exception):
            """Raised by the reader."""

        def stop(count: int) -> None:
            raise Enough

        digest = store.put_blob(LARGE)
        buffer = memoryview(bytearray(len(LARGE)))
        with pytest.raises(Enough):
            store.read_unverified_range(digest, 0, buffer, size_bytes=len(LARGE), on_bytes=stop)
        assert read(store, digest, len(LARGE)) == LARGE

    def test_a_range_outside_the_blob_is_a_fault_of_the_caller(self, store: Store) -> None:
        """It is not asked for."""
        digest = store.put_blob(BLOB)
        with pytest.raises(ValueError, match="of a blob of"):
            store.read_unverified_range(
                digest, len(BLOB) - 1, memoryview(bytearray(2)), size_bytes=len(BLOB)
            )

    @pytest.mark.parametrize("size_bytes", [len(BLOB) - 1, len(BLOB) + 1])
    def test_another_size_than_the_manifests_is_corruption(
        self, store: Store, size_bytes: int
    ) -> None:
        """A whole read and a ranged one say both sizes."""
        store.put_blob(BLOB)
        message = f"{len(BLOB)} bytes; the manifest says {size_bytes}"
        with pytest.raises(CorruptStore, match=message):
            read(store, BLOB_DIGEST, size_bytes)
        with pytest.raises(CorruptStore, match=message):
            store.read_unverified_range(
                BLOB_DIGEST, 1, memoryview(bytearray(8)), size_bytes=size_bytes
            )

    def test_many_threads_read_at_once(self, store: Store) -> None:
        """Each gets its own bytes."""
        blobs = [bytes([number]) * (1 << 20) for number in range(6)]
        digests = [store.put_blob(blob) for blob in blobs]
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda digest: read(store, digest, 1 << 20), digests * 3))
        assert found == blobs * 3

    # --- what is absent or misspelled ----------------------------------------------------------
    def test_what_is_absent_is_said_to_be_absent(self, store: Store) -> None:
        """Alias, manifest and blob, whole or ranged."""
        put_sample(store)
        for ask in (
            lambda: store.resolve("handbook@9"),
            lambda: store.read_manifest(ABSENT),
            lambda: store.verify(ABSENT),
            lambda: read(store, ABSENT, 7),
            lambda: store.read_unverified_range(ABSENT, 1, memoryview(bytearray(2)), size_bytes=7),
        ):
            with pytest.raises(NotInStore):
                ask()

    @pytest.mark.parametrize(
        "alias", ["", "handbook", "@1", "../a@1", "a/b@1", "A@1", "a@1\n", "a@1@2", "sha256:xyz"]
    )
    def test_a_name_that_is_no_alias_is_unknown(self, store: Store, alias: str) -> None:
        """For reading and for writing; it never becomes a path, a key or a URL."""
        digest = put_sample(store)
        with pytest.raises(NotInStore):
            store.resolve(alias)
        with pytest.raises(NotInStore):
            store.set_alias(alias, digest)
        assert store.aliases() == {}

    def test_a_manifest_needs_its_blobs_first(self, store: Store) -> None:
        """Without them nothing is stored."""
        with pytest.raises(NotInStore, match=f"payload: blob {BLOB_DIGEST} is not in the store"):
            store.put_manifest(MANIFEST)
        assert store.manifest_digests() == []

    def test_an_alias_needs_a_manifest(self, store: Store) -> None:
        """Without one nothing is stored."""
        with pytest.raises(NotInStore, match=f"manifest {ABSENT} is not in the store"):
            store.set_alias("handbook@1", ABSENT)
        assert store.aliases() == {}

    def test_an_invalid_manifest_is_not_stored(self, store: Store) -> None:
        """The contract is checked on the way in."""
        store.put_blob(BLOB)
        with pytest.raises(InvalidManifest):
            store.put_manifest(msgspec.structs.replace(MANIFEST, num_tokens=6))
        assert store.manifest_digests() == []

    # --- copies --------------------------------------------------------------------------------
    def test_an_artifact_is_copied_once(self, store: Store, source: Store) -> None:
        """Blobs that are there are not sent again; what was copied verifies, under its alias."""
        digest = put_sample(source)
        source.set_alias(MANIFEST.alias, digest)
        steps: list[int] = []
        first = copy_artifact(source, store, MANIFEST.alias, on_bytes=steps.append)
        assert (first.digest, first.alias) == (digest, MANIFEST.alias)
        assert (first.copied_bytes, first.present_bytes, sum(steps)) == (len(BLOB), 0, len(BLOB))
        assert store.verify(store.resolve(MANIFEST.alias)) == MANIFEST
        again = copy_artifact(source, store, digest)
        assert (again.alias, again.copied_bytes, again.present_bytes) == (None, 0, len(BLOB))

    # --- encoded blobs -------------------------------------------------------------------------
    def test_an_encoded_artifact_is_stored_verified_and_copied(
        self, store: Store, source: Store
    ) -> None:
        """A store moves the stored bytes, and verifies what they decode to."""
        manifest, stored = encoded_sample()
        source.put_blob(stored)
        digest = source.put_manifest(manifest)
        copied = copy_artifact(source, store, digest)
        assert copied.copied_bytes == len(stored) < len(BLOB)
        assert store.verify(digest) == store.read_manifest(digest) == manifest
        assert read(store, Digest(manifest.payload[0].sha256), len(stored)) == stored

    def test_stored_bytes_that_do_not_decode_are_corrupt(self, store: Store) -> None:
        """The blob is what its name says, and still not what the manifest says."""
        manifest, stored = encoded_sample()
        encoding = encoding_of(manifest.payload[0])
        blob = Blob(sha256=store.put_blob(stored + b"x"), size_bytes=len(stored) + 1)
        wrong = with_stored_blob(manifest, msgspec.structs.replace(blob, encoding=encoding))
        digest = store.put_manifest(wrong)
        with pytest.raises(CorruptStore, match="after the last frame"):
            store.verify(digest)


class DamagedStoreContract:
    """What is changed past the store is never handed out; for stores that can be damaged."""

    @pytest.mark.parametrize("position", [0, len(BLOB) // 2, len(BLOB) - 1])
    def test_a_flipped_bit_of_a_blob_is_refused(
        self, store: Store, damage: Damage, position: int
    ) -> None:
        """The error shows the digest."""
        digest = put_sample(store)
        changed = bytearray(BLOB)
        changed[position] ^= 4
        damage(BLOB_DIGEST, bytes(changed))
        with pytest.raises(CorruptStore, match=BLOB_DIGEST):
            read(store, BLOB_DIGEST, len(BLOB))
        with pytest.raises(CorruptStore, match=BLOB_DIGEST):
            store.verify(digest)

    @pytest.mark.parametrize("changed", [BLOB[:-1], BLOB + b"\0"], ids=["cut", "longer"])
    def test_a_cut_or_longer_blob_is_refused(
        self, store: Store, damage: Damage, changed: bytes
    ) -> None:
        """With both sizes."""
        digest = put_sample(store)
        damage(BLOB_DIGEST, changed)
        message = f"{len(changed)} bytes; the manifest says {len(BLOB)}"
        with pytest.raises(CorruptStore, match=message):
            read(store, BLOB_DIGEST, len(BLOB))
        with pytest.raises(CorruptStore, match=message):
            store.verify(digest)

    @pytest.mark.parametrize("changed", [b"{}", b"", b" " * (1 << 20) + b"  "])
    def test_a_changed_manifest_is_refused(
        self, store: Store, damage: Damage, changed: bytes
    ) -> None:
        """Other bytes, none, or more than any manifest has."""
        digest = put_sample(store)
        damage(digest, changed)
        with pytest.raises(CorruptStore, match=digest):
            store.read_manifest(digest)


class MendableStoreContract:
    """For stores that take bytes again, instead of believing what they have."""

    def test_storing_again_mends(self, store: Store, damage: Damage) -> None:
        """A blob that was damaged is whole after it was put again."""
        digest = put_sample(store)
        damage(BLOB_DIGEST, b"junk")
        store.put_blob(BLOB)
        assert store.verify(digest) == MANIFEST


def put_sample(store: Store, version: str = "1") -> ManifestDigest:
    """Store a sample artifact, without an alias."""
    manifest, blob = sample_artifact(version=version)
    store.put_blob(blob)
    return store.put_manifest(manifest)


def read(store: Store, digest: Digest, size_bytes: int) -> bytes:
    """A blob of a known size."""
    buffer = bytearray(size_bytes)
    store.read_blob_into(digest, memoryview(buffer))
    return bytes(buffer)
