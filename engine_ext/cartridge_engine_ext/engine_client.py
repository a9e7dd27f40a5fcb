"""Asks this engine's own API server, for the boot self-test.

Owns the HTTP and the shape of two vLLM routes. Refuses everything else: it talks to one address
and is not a client for users.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from cartridge_engine_ext.errors import EngineExtensionError
from cartridge_engine_ext.self_test import NUM_NEW_TOKENS, Answer
from cartridge_proto.names import FIELD_CACHE_SALT, FIELD_KV_TRANSFER_PARAMS

POLL_S = 0.25
REQUEST_TIMEOUT_S = 300.0


class EngineClient:
    """Blocking requests to `base_url`; for use from a thread of its own."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._base_url = base_url.rstrip("/")
        self._api_key = api_key

    def wait_until_healthy(self, is_stopping: Callable[[], bool]) -> bool:
        """Wait for `/health`; False when told to stop first."""
        while not is_stopping():
            try:
                self._request("/health", None)
            except (OSError, http.client.HTTPException):
                time.sleep(POLL_S)
            else:
                return True
        return False

    def served_model(self) -> str:
        """Name of the first model that is served."""
        return str(self._request("/v1/models", None)["data"][0]["id"])

    def complete(
        self,
        model: str,
        prompt: list[int],
        kv_transfer_params: dict[str, Any],
        salt: str,
        num_new_tokens: int = NUM_NEW_TOKENS,
    ) -> Answer:
        """Greedy answer to token ids.

        Raises:
            EngineExtensionError: the engine refused.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": num_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
            FIELD_KV_TRANSFER_PARAMS: kv_transfer_params,
            FIELD_CACHE_SALT: salt,
        }
        try:
            choice = self._request("/v1/completions", body)["choices"][0]
        except urllib.error.HTTPError as error:
            text = error.read(2000).decode("utf-8", "replace")
            raise EngineExtensionError(f"HTTP {error.code}: {text}") from error
        return Answer(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))

    def _request(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"content-type": "application/json"}
        if self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        request = urllib.request.Request(  # noqa: S310 - the scheme is checked in settings
            self._base_url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=headers,
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:  # noqa: S310
            data = response.read()
        return json.loads(data) if data else None
