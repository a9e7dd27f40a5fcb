"""The page at `/ui`, in a real browser: what it shows, and what it never does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from playwright.async_api import expect

from cartridge_policies.cost import TERMS
from cartridge_router.settings import PlacementSettings
from tests.router.browser import Tab, open_tab, running_browser
from tests.router.screenshot import make_screenshot
from tests.router.staged_fleet import TITLES, StagedFleet, staged_fleet

TOKEN = "the-token-of-the-tests"
HOSTILE = "<img src=x onerror=alert(1)>"
StartStage = Callable[..., AbstractAsyncContextManager[tuple[StagedFleet, Tab]]]


@pytest.fixture
def start_stage(tmp_path: Path, session: aiohttp.ClientSession) -> StartStage:
    """Start a staged fleet, and open its page in a browser."""

    @contextlib.asynccontextmanager
    async def start(**fields: Any) -> AsyncIterator[tuple[StagedFleet, Tab]]:
        async with (
            staged_fleet(tmp_path, session, **fields) as fleet,
            running_browser() as browser,
            open_tab(browser) as tab,
        ):
            await tab.page.goto(f"{fleet.admin}/ui")
            yield fleet, tab

    return start


async def test_it_shows_replicas_tiers_and_decisions(start_stage: StartStage) -> None:
    """Health, bytes by tier, the tier of each Cartridge on each replica, all cost terms."""
    async with start_stage() as (fleet, tab):
        assert await fleet.ask("crane-manual") == 200
        await expect(tab.page.locator("#live")).to_have_text("live")
        row = tab.page.locator("#replicas tbody tr", has_text="engine-0")
        for part in ("healthy", "registered", "hbm", "854 MiB", "sample", "settings"):
            await expect(row).to_contain_text(part)
        decision = tab.page.locator("#decisions > li").first
        await expect(decision).to_contain_text("200")
        await expect(decision).to_contain_text("crane-manual@1 → engine-2")
        chosen = decision.locator(".chosen")
        await expect(chosen).to_contain_text("▶ engine-2 (hbm)")
        await expect(chosen.locator(".stack span")).to_have_count(len(TERMS))
        await expect(decision.locator(".candidates > li")).to_have_count(4)
        late = decision.locator(".candidates > li", has_text="engine-1 (remote)")
        await expect(late).to_contain_text("load 1.10 s")
        label = await late.locator(".stack").get_attribute("aria-label")
        assert label is not None
        assert label.startswith("queue 0 + load 1.10 s + prefill ")
        first = tab.page.locator("#cartridges tbody tr").first
        await expect(first).to_contain_text("crane-manual@1")
        assert await first.locator("td").all_inner_texts() == [
            *("3890", "486 MiB", "1"),
            *("dram", "remote", "hbm", "remote"),
        ]
        assert await tab.page.locator("#cartridges thead th").all_inner_texts() == [
            *("Cartridge", "Tokens", "Size", "Requests in 5 min"),
            *("engine-0", "engine-1", "engine-2", "engine-3"),
        ]
        await expect(tab.page.locator("#facts")).to_contain_text("exact")
        await tab.has_behaved(fleet.admin)


async def test_it_goes_on_by_itself(start_stage: StartStage) -> None:
    """A request shows while it runs, and again when it has ended, without a reload."""
    async with start_stage() as (fleet, tab):
        await expect(tab.page.locator("#decisions")).to_have_text("No request has come yet.")
        fleet.holding.update(fleet.engines)
        asking = asyncio.create_task(fleet.ask("tide-tables"))
        first = tab.page.locator("#decisions > li").first
        await expect(first).to_contain_text("running")
        replica = tab.page.locator("#replicas tbody tr", has_text="engine-0")
        await expect(replica.locator(".gauge")).to_have_text("1")
        fleet.release.set()
        assert await asking == 200
        await expect(first).to_contain_text("200")
        await expect(replica.locator(".gauge")).to_have_text("0")
        assert sum(url.endswith("/ui") for url in tab.urls) == 1
        await tab.has_behaved(fleet.admin)


async def test_it_shows_who_waits(start_stage: StartStage) -> None:
    """Before a request has a replica, and for how long it had none."""
    placement = PlacementSettings(max_in_flight=1)
    async with start_stage(placement=placement) as (fleet, tab):
        fleet.holding.update(fleet.engines)
        asking = [asyncio.create_task(fleet.ask("tide-tables")) for _ in range(5)]
        rows = tab.page.locator("#decisions > li")
        await expect(rows.filter(has_text="waits for room")).to_have_count(1)
        await expect(tab.page.locator("#facts")).to_contain_text("waiting1")
        fleet.release.set()
        assert await asyncio.gather(*asking) == [200] * 5
        await expect(rows.filter(has_text="waited")).to_have_count(1)
        await expect(tab.page.locator("#facts")).to_contain_text("waiting0")
        await tab.has_behaved(fleet.admin)


async def test_it_shows_what_was_refused(start_stage: StartStage) -> None:
    """No replica, the status, and the gateway's own words."""
    async with start_stage() as (fleet, tab):
        assert await fleet.ask("tide-tables", model="absent") == 404
        first = tab.page.locator("#decisions > li").first
        for part in ("404", "nowhere", "model_not_found: no replica serves the model 'absent'"):
            await expect(first).to_contain_text(part)
        await tab.has_behaved(fleet.admin)


async def test_names_from_elsewhere_are_text(start_stage: StartStage) -> None:
    """A model that a client asks for or an engine serves, a Cartridge's title: no markup works."""
    titles = TITLES | {"tide-tables": (f"Tides {HOSTILE}", 3710)}
    async with start_stage(titles=titles, model=HOSTILE) as (fleet, tab):
        assert await fleet.ask("tide-tables", model=HOSTILE) == 200
        assert await fleet.ask(model=f"{HOSTILE}2") == 404
        await expect(tab.page.locator("#decisions > li")).to_have_count(2)
        await expect(tab.page.locator("#decisions")).to_contain_text(f"{HOSTILE}2")
        await expect(tab.page.locator("#replicas tbody")).to_contain_text(HOSTILE)
        await expect(tab.page.locator("#cartridges tbody")).to_contain_text(f"Tides {HOSTILE}")
        await expect(tab.page.locator("img")).to_have_count(0)
        await tab.has_behaved(fleet.admin)


async def test_the_browser_would_stop_markup_and_scripts(start_stage: StartStage) -> None:
    """Its policy holds where the script would err: no text is markup, nobody else is asked."""
    async with start_stage() as (_, tab):
        refused = await tab.page.evaluate(
            """() => {
              try { document.body.innerHTML = "<b>x</b>"; return null; }
              catch (error) { return error.name; }
            }"""
        )
        assert refused == "TypeError"
        await tab.page.evaluate(
            """() => {
              const node = document.createElement("img");
              node.src = "http://127.0.0.1:9/elsewhere";
              document.body.append(node);
            }"""
        )
        await tab.page.wait_for_function("window.violations.length === 2")
        assert await tab.violations() == [
            "require-trusted-types-for: trusted-types-sink",
            "img-src: http://127.0.0.1:9/elsewhere",
        ]


async def test_it_asks_for_the_token(start_stage: StartStage) -> None:
    """Nothing is asked for without it; a wrong one is said to be so; it is kept for the tab."""
    async with start_stage(operators_token=TOKEN) as (fleet, tab):
        field, main = tab.page.get_by_label("Token of"), tab.page.locator("#main")
        await expect(field).to_be_visible()
        await expect(main).to_be_hidden()
        assert [url for url in tab.urls if url.endswith("/state")] == []
        assert tab.complaints == []
        await field.fill("not-the-token-of-the-tests")
        await tab.page.get_by_role("button", name="Show").click()
        await expect(tab.page.get_by_role("alert")).to_have_text("This token is not the one.")
        # Of the browser itself, about the answer.
        (complaint,) = tab.complaints
        assert "401" in complaint
        tab.complaints.clear()
        await field.fill(TOKEN)
        await field.press("Enter")
        await expect(main).to_be_visible()
        await expect(tab.page.locator("#replicas")).to_contain_text("engine-3")
        await tab.page.reload()
        await expect(main).to_be_visible()
        await expect(field).to_be_hidden()
        assert TOKEN not in tab.page.url
        await tab.has_behaved(fleet.admin)


async def test_it_says_when_the_gateway_is_gone(start_stage: StartStage) -> None:
    """What it showed stays, with since when that is old; it comes back by itself."""
    async with start_stage() as (_, tab):
        live = tab.page.locator("#live")
        await expect(live).to_have_text("live")
        await tab.page.route("**/admin/state", lambda route: route.abort())
        await expect(live).to_contain_text("stale since")
        await expect(tab.page.locator("#replicas")).to_contain_text("engine-3")
        await tab.page.unroute("**/admin/state")
        await expect(live).to_have_text("live")
        assert all("ERR_FAILED" in complaint for complaint in tab.complaints)
        assert await tab.violations() == []


async def test_it_rests_while_nobody_looks(start_stage: StartStage) -> None:
    """A hidden page asks for nothing; shown again, it asks at once."""
    async with start_stage() as (_, tab):
        live = tab.page.locator("#live")
        await expect(live).to_have_text("live")
        await tab.page.clock.install()
        await tab.page.reload()
        await expect(live).to_have_text("live")
        await tab.page.evaluate(
            """() => {
              let isHidden = true;
              Object.defineProperty(document, "hidden", { get: () => isHidden });
              window.show = () => {
                isHidden = false;
                document.dispatchEvent(new Event("visibilitychange"));
              };
            }"""
        )
        num_asked = len(tab.urls)
        await tab.page.clock.run_for(60_000)
        assert len(tab.urls) == num_asked
        async with tab.page.expect_request("**/admin/state"):
            await tab.page.evaluate("window.show()")


@pytest.mark.parametrize("colours", ["light", "dark"])
async def test_it_follows_the_colours_of_the_system(
    tmp_path: Path, session: aiohttp.ClientSession, colours: Any
) -> None:
    """Dark on light, or light on dark."""
    async with (
        staged_fleet(tmp_path, session) as fleet,
        running_browser() as browser,
        open_tab(browser, colours=colours) as tab,
    ):
        await tab.page.goto(f"{fleet.admin}/ui")
        shown = await tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(part) for part in shown[4:-1].split(",")) / 3
        assert (brightness > 128) is (colours == "light")


async def test_the_picture_in_the_docs_can_be_made(tmp_path: Path) -> None:
    """What `make screenshot` does works, and gives a PNG."""
    await make_screenshot(tmp_path / "ui.png")
    assert (tmp_path / "ui.png").read_bytes().startswith(b"\x89PNG")
