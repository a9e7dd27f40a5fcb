"""A headless Chromium for tests of the page, and everything it had to complain of.

Owns the browser's start and end, and the record of its console and requests. Refuses to judge what
a page shows.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser, Page, async_playwright

CHROMIUM = Path(__file__).parents[2] / "build" / "services" / "chromium"
"""Debian's, without a window; `.ci/services` puts it there."""
_NOTE_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`);
});
"""


@contextlib.asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """One browser, for as long as the block does."""
    assert CHROMIUM.is_file(), f"{CHROMIUM} is missing: run .ci/services"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            yield browser
        finally:
            await browser.close()


class Tab:
    """One page, and what happened in it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        """Errors and warnings of the console, and exceptions."""
        self.urls: list[str] = []
        page.on("console", lambda said: self._note(said.type, said.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.urls.append(request.url))

    def _note(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"}:
            self.complaints.append(text)

    async def violations(self) -> list[str]:
        """What the page tried against its Content Security Policy."""
        found: list[str] = await self.page.evaluate("window.violations")
        return found

    async def has_behaved(self, base_url: str) -> None:
        """Nothing to complain of, and nothing asked of anybody but the page's own server."""
        assert self.complaints == []
        assert await self.violations() == []
        assert self.urls
        assert [url for url in self.urls if not url.startswith(f"{base_url}/")] == []

    async def text(self, selector: str) -> str:
        """What one element shows."""
        return await self.page.locator(selector).inner_text()


@contextlib.asynccontextmanager
async def open_tab(
    browser: Browser,
    *,
    colours: Literal["light", "dark"] = "light",
    width: int = 1280,
    height: int = 900,
) -> AsyncIterator[Tab]:
    """A tab in a context of its own."""
    context = await browser.new_context(
        color_scheme=colours, viewport={"width": width, "height": height}
    )
    try:
        await context.add_init_script(_NOTE_VIOLATIONS)
        yield Tab(await context.new_page())
    finally:
        await context.close()
