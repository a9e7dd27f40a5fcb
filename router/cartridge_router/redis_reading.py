"""Connections to Redis for reading what others write, and how such a task ends.

Owns their timeouts. Refuses retries: whoever reads connects anew, as a connection that was
cancelled in the middle of an answer must not be used again.
"""

import asyncio
from typing import Final

import redis.asyncio

REDIS_TIMEOUT_S: Final = 3.0
RECONNECT_S: Final = 0.5


def connection(url: str) -> redis.asyncio.Redis:
    """A client with one connection of its own; close it."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        single_connection_client=True,
        # Else each connection looks through site-packages for redis-py's own version.
        driver_info=None,
    )


def raise_if_cancelled() -> None:
    """Take note of a cancellation that was lost on the way.

    redis-py sends through `asyncio.wait_for`, which before Python 3.12 returns the result instead
    when the cancellation comes in the moment the send is done.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
