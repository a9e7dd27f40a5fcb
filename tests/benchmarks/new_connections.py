"""How long new clients wait at a gateway that is busy: bursts of connections beside steady ones.

Owns the load and the times. Refuses to start anything: `python -m tests.benchmarks.new_connections
PORT` asks a gateway on this machine, in front of an engine that answers at once.
"""

import asyncio
import statistics
import sys
import time
from typing import Final

import uvloop

NUM_STEADY: Final = 64
NUM_NEW: Final = 64
NUM_BURSTS: Final = 6
PAUSE_S: Final = 0.5
_BODY: Final = b'{"model":"sample","messages":[{"role":"user","content":"%b"}]}' % (b"x" * 2000)
_REQUEST: Final = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_REQUEST)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head:
        raise SystemExit(f"no answer, but {head!r}")
    await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))


async def _steady(port: int, times_s: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        while True:
            begun_s = time.perf_counter()
            await _ask(reader, writer)
            times_s.append(time.perf_counter() - begun_s)
    finally:
        writer.close()


async def _new(port: int) -> float:
    begun_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await _ask(reader, writer)
    writer.close()
    return time.perf_counter() - begun_s


async def _main(port: int) -> None:
    times_s: list[float] = []
    steady = [asyncio.create_task(_steady(port, times_s)) for _ in range(NUM_STEADY)]
    bursts = []
    for _ in range(NUM_BURSTS):
        await asyncio.sleep(PAUSE_S)
        bursts.append(sorted(await asyncio.gather(*(_new(port) for _ in range(NUM_NEW)))))
    for task in steady:
        task.cancel()
    await asyncio.gather(*steady, return_exceptions=True)
    median_s = statistics.median(statistics.median(burst) for burst in bursts)
    worst_s = statistics.median(burst[-1] for burst in bursts)
    print(
        f"first answer of {NUM_NEW} new connections: median {median_s * 1000:.0f} ms, last "
        f"{worst_s * 1000:.0f} ms; of {NUM_STEADY} steady ones {len(times_s)} answers, median "
        f"{statistics.median(times_s) * 1000:.0f} ms"
    )


if __name__ == "__main__":
    uvloop.run(_main(int(sys.argv[1])))
