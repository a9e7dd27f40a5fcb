"""How much a tenant may ask: requests and tokens in a minute, requests in flight.

Owns the counts of this process. Refuses to know who a tenant is, and to be shared: what another
gateway has let through is not seen here (docs/decisions/0010-tenants.md).
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Final

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from cartridge_proto.names import rate_limit_header
from cartridge_router.errors import RateLimitExceeded, RequestTooLarge
from cartridge_router.tenants import Tenant

MINUTE_S: Final = 60
IN_FLIGHT_RETRY_S: Final = 1

Window = tuple[int, float, int, float]
"""Count of the window before and seconds until it is forgotten; the same of this window."""


class Limits:
    """Counts of all tenants. For use from one event loop."""

    def __init__(self) -> None:
        self._storage = MemoryStorage()
        self._windows = SlidingWindowCounterRateLimiter(self._storage)
        self._in_flight: dict[str, int] = {}

    @contextlib.contextmanager
    def in_flight(self, tenant: Tenant) -> Iterator[None]:
        """Count one request for as long as the block runs.

        Raises:
            RateLimitExceeded: as many are in flight as may be.
        """
        limit, count = tenant.limits.requests_in_flight, self._in_flight.get(tenant.name, 0)
        if limit is not None and count >= limit:
            raise RateLimitExceeded(
                f"tenant {tenant.name} has {count} requests in flight; the limit is {limit}",
                retry_after_s=IN_FLIGHT_RETRY_S,
            )
        self._in_flight[tenant.name] = count + 1
        try:
            yield
        finally:
            left = self._in_flight[tenant.name] - 1
            if left:
                self._in_flight[tenant.name] = left
            else:
                del self._in_flight[tenant.name]

    async def spend(self, tenant: Tenant, num_tokens: int) -> dict[str, str]:
        """Take one request and its tokens from the tenant's minute; returns headers that say so.

        A request that is refused for its tokens has been counted as a request, as at OpenAI.

        Raises:
            RequestTooLarge: more tokens than a minute ever has.
            RateLimitExceeded: no room now; the error says when.
        """
        limits = tenant.limits
        if limits.tokens_per_minute is not None and num_tokens > limits.tokens_per_minute:
            raise RequestTooLarge(
                f"the request may take {num_tokens} tokens, prompt and answer; tenant "
                f"{tenant.name} has {limits.tokens_per_minute} in a minute"
            )
        headers: dict[str, str] = {}
        for unit, limit, cost in (
            ("requests", limits.requests_per_minute, 1),
            ("tokens", limits.tokens_per_minute, num_tokens),
        ):
            if limit is None:
                continue
            item = RateLimitItemPerMinute(limit, namespace=unit)
            has_room = await self._windows.hit(item, tenant.name, cost=cost)
            window = await self._storage.get_sliding_window(item.key_for(tenant.name), MINUTE_S)
            headers |= _told(unit, limit, window)
            if not has_room:
                wait_s = max(1, math.ceil(_wait_s(limit, cost, window)))
                raise RateLimitExceeded(
                    f"tenant {tenant.name} has no {unit} left in this minute: limit {limit}, "
                    f"asked for {cost}; try again in {wait_s} s",
                    retry_after_s=wait_s,
                    headers=headers,
                )
        return headers


def _told(unit: str, limit: int, window: Window) -> dict[str, str]:
    before, before_ttl_s, now, now_ttl_s = window
    remaining = limit - math.floor(before * before_ttl_s / MINUTE_S + now)
    reset_s = now_ttl_s if now else before_ttl_s
    return {
        rate_limit_header("limit", unit): str(limit),
        rate_limit_header("remaining", unit): str(max(0, remaining)),
        rate_limit_header("reset", unit): duration(reset_s),
    }


def _wait_s(limit: int, cost: int, window: Window) -> float:
    """Seconds until a sliding window has room: the count before fades evenly, then the present."""
    before, before_ttl_s, now, now_ttl_s = window
    room = limit - cost
    if now <= room:
        return before_ttl_s - (room - now) * MINUTE_S / before if before else 0.0
    # Counts of this window begin to fade when it has become the one before.
    return now_ttl_s - room * MINUTE_S / now


def duration(seconds: float) -> str:
    """A duration as OpenAI's headers have it: `120ms`, `1s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < MINUTE_S else f"{whole // MINUTE_S}m{whole % MINUTE_S}s"
