"""A client of one simulated replica, quick settings and stored samples, for its tests.

Owns no server and no fixture; refuses to judge answers.
"""

import hashlib
from collections.abc import Awaitable, Callable

import aiohttp

from cartridge_loadtest.simulated_engine import EngineSettings
from cartridge_loadtest.simulated_replica import SimulatedReplica
from cartridge_proto.digest import Digest
from cartridge_proto.manifest import Manifest
from cartridge_proto.residency import ReplicaId
from cartridge_proto.stores import LocalStore
from tests.proto.sample_artifact import sample_artifact

MODEL = "sample"


def put_sample(
    store: LocalStore, name: str = "harbour-rules", *, num_tokens: int = 5, seed: int = 0
) -> Manifest:
    """Store a small valid artifact and return its manifest."""
    manifest, blob = sample_artifact(name=name, num_tokens=num_tokens, seed=seed)
    store.put_blob(blob)
    store.put_manifest(manifest)
    return manifest


def mark_of(store: LocalStore, manifest: Manifest) -> str:
    """What an answer made from this artifact's stored bytes carries: 8 hex characters."""
    data = b"".join(store.blob_path(Digest(blob.sha256)).read_bytes() for blob in manifest.payload)
    return hashlib.sha256(data).hexdigest()[:8]


def quick_settings(store: LocalStore | None, redis_url: str | None = None) -> EngineSettings:
    """An engine whose steps take no time."""
    return EngineSettings(
        model=MODEL,
        replica=ReplicaId("sim-0"),
        store=None if store is None else store.root,
        redis_url=redis_url,
        ttft_s=0.0,
        prefill_s_per_token=0.0,
        load_s=0.0,
        itl_s=0.0,
    )


class Client:
    """Talks to one simulated replica."""

    def __init__(self, session: aiohttp.ClientSession, url: str, replica: SimulatedReplica) -> None:
        self.url = url
        self.replica = replica
        self._session = session

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        async with self._session.get(self.url + path) as response:
            return response.status, await response.read()

    async def post(self, path: str, body: object) -> tuple[int, bytes]:
        """Status and body of a POST of JSON."""
        async with self._session.post(self.url + path, json=body) as response:
            return response.status, await response.read()

    async def post_bytes(self, path: str, data: bytes) -> aiohttp.ClientResponse:
        """A POST of raw bytes; the body of the response is read."""
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self.url + path, data=data, headers=headers) as response:
            await response.read()
            return response


StartReplica = Callable[..., Awaitable[Client]]
