"""What answers at an address: which model, how much context, and whether it is Polychip."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from scripts.workloads.streaming import Endpoint, message_of

TIMEOUT_S = 30.0
KEY_REMEDY = "; give a key with --api-key or POLYCHIP_API_KEY"


class ServerUnreachable(Exception):
    """Nothing answers at the address."""


class ServerUnusable(Exception):
    """It answers, but not as it must."""


@dataclass(frozen=True)
class Server:
    """A server to measure.

    label: what results call it. version: of Polychip; None for others. context_tokens: None where
    it does not tell.
    """

    label: str
    endpoint: Endpoint
    is_polychip: bool
    version: str | None
    context_tokens: int | None

    def flush_cache(self) -> int | None:
        """Empties the prefix cache; the blocks freed, or None where it is not Polychip.

        Raises ServerUnreachable, ServerUnusable.
        """
        if not self.is_polychip:
            return None
        freed = _call("POST", self.endpoint, "/admin/cache/flush").get("blocks_freed")
        return freed if isinstance(freed, int) else None


def look_at(
    address: str, model: str | None, api_key: str | None, ignore_eos: bool, label: str = ""
) -> Server:
    """Asks it for its models. model: the name to send; None takes the first it lists.

    address: URL, with or without /v1. label: the address if empty. Raises ServerUnreachable,
    ServerUnusable.
    """
    address = address.rstrip("/").removesuffix("/v1")
    endpoint = Endpoint(address, model or "", api_key, ignore_eos)
    listed = _call("GET", endpoint, "/v1/models").get("data")
    models = [each for each in listed or () if isinstance(each, dict)]
    if model is None and not models:
        raise ServerUnusable(f"{address} lists no model; name one with --model")
    chosen = next((each for each in models if each.get("id") == model), models[0] if models else {})
    is_polychip = chosen.get("owned_by") == "polychip"
    version = _call("GET", endpoint, "/health").get("version") if is_polychip else None
    name = model or str(chosen.get("id"))
    context = chosen.get("max_model_len")
    return Server(
        label or address,
        Endpoint(address, name, api_key, ignore_eos),
        is_polychip,
        version if isinstance(version, str) else None,
        context if isinstance(context, int) else None,
    )


def _call(method: str, endpoint: Endpoint, path: str) -> Mapping[str, Any]:
    try:
        response = httpx.request(
            method,
            endpoint.address + path,
            headers=endpoint.headers,
            timeout=TIMEOUT_S,
            trust_env=False,
        )
    except httpx.TransportError as error:
        raise ServerUnreachable(
            f"nothing answers at {endpoint.address} ({error}); start a service with "
            "`polychip serve`, or name another address"
        ) from error
    where = f"{endpoint.address}: {method} {path}"
    if not response.is_success:
        raise ServerUnusable(
            f"{where}: HTTP {response.status_code}: {message_of(response.content)}"
            + (KEY_REMEDY if response.status_code == httpx.codes.UNAUTHORIZED else "")
        )
    try:
        content = response.json()
    except ValueError as error:
        raise ServerUnusable(f"{where}: the answer is not JSON") from error
    return content if isinstance(content, dict) else {}
