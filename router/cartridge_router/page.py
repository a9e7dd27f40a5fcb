"""The page for operators at `/ui`: its files, and what a browser may do with them.

Owns their headers. Refuses data of any kind: the script asks for that, with the operator's token.

Source: Content Security Policy Level 3, Trusted Types (W3C).
"""

import importlib.resources
from collections.abc import Mapping
from typing import Final

from aiohttp import web

NEEDS_TOKEN: Final = (b'data-token="none"', b'data-token="needed"')
"""What the page says where nobody needs a token, and where one is needed."""
_FILES: Final = {
    "/ui": ("page.html", "text/html"),
    "/ui/page.css": ("page.css", "text/css"),
    "/ui/page.js": ("page.js", "text/javascript"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}
PATHS: Final = frozenset(_FILES)
GUARDED: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of the page and of its data: no other site's page reads or runs them."""
_HEADERS: Final = {
    **GUARDED,
    # Trusted Types: a text can never become markup, wherever it came from.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class Page:
    """Handlers of the files, which `read_page` has read."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files

    def routes(self) -> list[web.RouteDef]:
        """Every path that is served."""
        return [web.get(path, self.file) for path in self._files]

    async def file(self, request: web.Request) -> web.Response:
        """One file."""
        return web.Response(
            body=self._files[request.path],
            content_type=_FILES[request.path][1],
            charset="utf-8",
            headers=_HEADERS,
        )


def read_page(*, needs_token: bool) -> Page:
    """Read the page's files; blocks."""
    folder = importlib.resources.files("cartridge_router") / "ui"
    files = {path: (folder / name).read_bytes() for path, (name, _) in _FILES.items()}
    if needs_token:
        files["/ui"] = files["/ui"].replace(*NEEDS_TOKEN)
    return Page(files)
