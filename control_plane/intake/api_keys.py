"""Who may use the service: the API keys both protocols ask for, if any are configured."""

import hashlib
import hmac
from collections.abc import Iterable

from control_plane.errors import Unauthenticated

SCHEME = "bearer"


class ApiKeys:
    """Without keys everybody may. Only digests are kept; the time of a check tells nothing."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def check(self, authorization_header: str | None) -> None:
        """Raises Unauthenticated unless the header, or gRPC metadata, is `Bearer KEY`."""
        if not self._digests:
            return
        scheme, _, key = (authorization_header or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != SCHEME or not key:
            raise Unauthenticated(
                "authorization: this service asks for an API key; send 'Authorization: Bearer KEY'",
                field="authorization",
            )
        digest = _digest(key)
        # All of them are compared, whichever it is.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthenticated(
                "authorization: this API key is not known here; send one of the service's keys",
                field="authorization",
            )


def is_key(text: str) -> bool:
    """Whether a header can carry it as a key: letters, digits and signs of ASCII, no blanks."""
    return bool(text) and all("!" <= character <= "~" for character in text)


def _digest(key: str) -> bytes:
    """Of equal length for every key; half characters, which no key has, do no harm."""
    return hashlib.sha256(key.encode(errors="backslashreplace")).digest()
