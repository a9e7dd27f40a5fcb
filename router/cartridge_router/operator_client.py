"""Asks a running gateway, for the command line: the other end of `admin.py`.

Owns requests, their token, and the table of what is answered. Refuses to follow redirects, which
could carry the token elsewhere.
"""

import http.client
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from rich.table import Table
from rich.text import Text

from cartridge_proto.names import HEADER_AUTHORIZATION
from cartridge_router.admin import admin_token
from cartridge_router.errors import ConfigurationError, NotDone
from cartridge_router.settings import AdminSettings

TIMEOUT_S = 10.0
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}


class OperatorClient:
    """Talks to the listener for operators of one gateway. Blocks.

    Raises:
        ConfigurationError: the URL or the token cannot be used.
    """

    def __init__(self, url: str, token_file: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in _CONNECTIONS or not parts.netloc or parts.path not in {"", "/"}:
            raise ConfigurationError([f"--admin: {url!r} is not http(s)://host:port"])
        self._scheme, self._host = parts.scheme, parts.netloc
        self._token = admin_token(AdminSettings(token_file=token_file), os.environ)

    def replicas(self) -> list[dict[str, Any]]:
        """All replicas.

        Raises:
            NotDone: the gateway says why, or did not answer. So do the others.
        """
        rows: list[dict[str, Any]] = self._ask("GET", "/admin/replicas")["data"]
        return rows

    def state(self) -> dict[str, Any]:
        """What the page at `/ui` shows."""
        return self._ask("GET", "/admin/state")

    def add(self, name: str, url: str) -> dict[str, Any]:
        """Let a replica join; returns it."""
        return self._ask("POST", "/admin/replicas", {"name": name, "url": url})

    def remove(self, name: str) -> dict[str, Any]:
        """Let a replica leave; returns it."""
        return self._ask("DELETE", f"/admin/replicas/{quote(name, safe='')}")

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers[HEADER_AUTHORIZATION] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body)
        connection = _CONNECTIONS[self._scheme](self._host, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NotDone(f"{self._scheme}://{self._host}: {error!r}") from error
        finally:
            connection.close()
        if not isinstance(answer, dict):
            raise NotDone(f"{self._scheme}://{self._host}: no gateway's answer")
        if response.status >= http.HTTPStatus.BAD_REQUEST:
            raise NotDone(_message_of(answer, response.status))
        return answer


def _message_of(answer: dict[str, Any], status: int) -> str:
    error = answer.get("error")
    told = error.get("message") if isinstance(error, dict) else None
    return f"{told or 'refused'} ({status})"


def plain(text: str) -> Text:
    """A text from elsewhere for a terminal: neither markup nor control characters work in it."""
    return Text(
        "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    )


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """What `replicas list` shows: a row for each replica."""
    table = Table(title="Replicas")
    for heading in ("name", "url", "source", "status", "health"):
        table.add_column(heading, overflow="fold")
    table.add_column("in flight", justify="right")
    table.add_column("models", overflow="fold")
    for row in rows:
        table.add_row(
            *(plain(row[name]) for name in ("name", "url", "source", "status")),
            health_of(row),
            str(row["num_in_flight"]),
            plain(", ".join(row["models"])),
        )
    return table


def health_of(row: dict[str, Any]) -> Text:
    """One replica's health in words."""
    if row["left_alone"] is not None:
        return Text(f"left alone: {row['left_alone']}", "yellow")
    if row["is_healthy"] is None:
        return Text("–")
    return Text("healthy", "green") if row["is_healthy"] else Text("unhealthy", "red")
