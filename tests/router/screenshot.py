"""Makes docs/images/ui.png: the page for operators over a staged fleet (`make screenshot`).

Owns the requests that are shown. Refuses to measure anything: sizes and load are made up.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import aiohttp

from tests.loadtest.cartridge_requests import until
from tests.router.browser import open_tab, running_browser
from tests.router.staged_fleet import StagedFleet, staged_fleet

OUT = Path(__file__).parents[2] / "docs" / "images" / "ui.png"
HEIGHT = 1500
ASKED = (
    ("crane-manual", 6),
    ("dangerous-goods", 3),
    ("customs-faq", 2),
    ("ice-service", 2),
    ("pilotage-act", 1),
    ("harbour-rules", 5),
    ("tide-tables", 4),
)


async def send_requests(fleet: StagedFleet) -> list[asyncio.Task[int]]:
    """Some that are answered, some that still run; returns those."""
    for name, count in ASKED:
        for _ in range(count):
            await fleet.ask(name)
    fleet.holding.update({"engine-0", "engine-2"})
    running = [
        asyncio.create_task(fleet.ask(name))
        for name in (*["harbour-rules"] * 7, *["crane-manual"] * 3)
    ]

    def num_held() -> int:
        return sum(engine.num_open for engine in fleet.engines.values())

    await until(lambda: num_held() == len(running), "all of them run")
    fleet.holding.clear()
    await fleet.ask("fire-drill")
    await fleet.gateway.ask("harbour-rules@1", model="another")
    await fleet.ask()
    await fleet.ask("vhf-channels", messages=[{"role": "user", "content": "Which one? " * 200}])
    await fleet.ask("tide-tables")
    await fleet.ask("harbour-rules")
    return running


async def make_screenshot(out: Path) -> None:
    """Stage, ask, look, save."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            aiohttp.ClientSession() as session,
            staged_fleet(Path(folder), session) as fleet,
            running_browser() as browser,
            open_tab(browser, height=HEIGHT) as tab,
        ):
            running = await send_requests(fleet)
            await tab.page.goto(f"{fleet.admin}/ui")
            await tab.page.get_by_text("live", exact=True).wait_for()
            await tab.page.locator("#decisions .chosen").first.wait_for()
            await tab.page.screenshot(path=out)
            fleet.release.set()
            await asyncio.gather(*running)


if __name__ == "__main__":
    asyncio.run(make_screenshot(Path(sys.argv[1]) if sys.argv[1:] else OUT))
