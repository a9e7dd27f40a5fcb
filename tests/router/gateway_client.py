"""A client of one gateway, quick settings, and readers of what it answers.

Owns no server and no fixture. Refuses to judge answers.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from multidict import CIMultiDictProxy
from prometheus_client.parser import text_string_to_metric_families

from cartridge_proto.stores import LocalStore
from cartridge_router.settings import (
    CartridgeSettings,
    DrainSettings,
    FleetSettings,
    ForwardingSettings,
    ResidencySettings,
    Settings,
)
from tests.loadtest.cartridge_requests import chat_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True)
class Reply:
    """One whole answer."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error of the body; fails when there is none, or when it has another shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error, dict)
        return error

    @property
    def text(self) -> str:
        """What the engine said, on either route."""
        choice = self.json["choices"][0]
        said: str = choice["message"]["content"] if "message" in choice else choice["text"]
        return said


class Gateway:
    """Talks to one gateway; `headers` go with every request."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.session = session
        self.url = url
        self.headers = headers or {}

    def as_caller(self, key: str) -> "Gateway":
        """The same gateway, asked with a key."""
        return Gateway(self.session, self.url, {"Authorization": f"Bearer {key}"})

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        """A GET."""
        sent = {**self.headers, **(headers or {})}
        async with self.session.get(self.url + path, headers=sent) as response:
            return await self._read(response)

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """A POST of JSON."""
        return await self.post_bytes(path, json.dumps(body).encode(), headers)

    async def post_bytes(
        self, path: str, data: bytes, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """A POST of raw bytes."""
        sent = {"Content-Type": "application/json", **self.headers, **(headers or {})}
        async with self.session.post(self.url + path, data=data, headers=sent) as response:
            return await self._read(response)

    async def ask(self, *cartridge_ids: str, path: str = CHAT, **fields: Any) -> Reply:
        """A question with the named Cartridges, or with none."""
        body = chat_body(**fields)
        if path == TEXT:
            body = {"model": body["model"], "prompt": "When does it open?", **fields}
        if cartridge_ids:
            body["cartridge_ids"] = list(cartridge_ids)
        return await self.post(path, body)

    async def metric(self, name: str, **labels: str) -> float:
        """A sample's value, 0 when there is none with these labels."""
        text = (await self.get("/metrics")).body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def has_metric(self, name: str, value: float, **labels: str) -> None:
        """Wait until a sample has a value."""

        async def is_so() -> bool:
            return await self.metric(name, **labels) == value

        await until_true(is_so, f"{name}{labels} is {value}")

    async def is_idle(self) -> None:
        """Wait until no request is in flight at any replica."""
        await self.has_metric("cartridge_router_in_flight", 0)

    async def has_registered(self, *replicas: str) -> None:
        """Wait until exactly these replicas have a lease in an exact map."""

        async def is_so() -> bool:
            state = (await self.get("/ready")).json
            is_exact = state["residency"]["mode"] == "exact"
            return is_exact and sorted(state["replicas"]["registered"]) == sorted(replicas)

        await until_true(is_so, f"{replicas} registered")

    async def has_residents(self, alias: str, expected: Mapping[str, str]) -> None:
        """Wait until a Cartridge is listed with these replicas and tiers."""

        async def is_so() -> bool:
            listed = (await self.get("/v1/cartridges")).json["data"]
            return any(
                {row["replica"]: row["tier"] for row in entry["residency"]} == expected
                for entry in listed
                if entry["id"] == alias
            )

        await until_true(is_so, f"{alias} resident at {expected}")

    @staticmethod
    async def _read(response: aiohttp.ClientResponse) -> Reply:
        return Reply(response.status, response.headers, await response.read())


StartGateway = Callable[..., Awaitable[Gateway]]


def quick_gateway(
    *replicas: str,
    store: LocalStore | None = None,
    redis_url: str | None = None,
    forwarding: ForwardingSettings | None = None,
    **fields: Any,
) -> Settings:
    """A gateway that looks at everything often, on a free port."""
    return Settings(
        port=0,
        replicas=list(replicas),
        store=None if store is None else str(store.root),
        redis_url=redis_url,
        forwarding=forwarding or ForwardingSettings(),
        cartridges=fields.pop("cartridges", CartridgeSettings(refresh_s=0.05)),
        fleet=fields.pop("fleet", FleetSettings(probe_interval_s=0.05, num_failures=2)),
        residency=fields.pop("residency", ResidencySettings()),
        drain=fields.pop("drain", DrainSettings(settle_s=0.0, grace_s=1.0)),
        **fields,
    )


async def until_true(is_true: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition that must be asked for; fails after 10 seconds."""
    try:
        async with asyncio.timeout(10):
            while not await is_true():  # noqa: ASYNC110 - asked of another process or task
                await asyncio.sleep(0.01)
    except TimeoutError as error:
        raise AssertionError(f"did not happen: {what}") from error
