"""Turns output tokens into text as they come, whole characters only; one per answer."""

import codecs
from collections.abc import Sequence

from control_plane.intake.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")

UTF8_BYTES_PENDING_MAX = 3
"""Most bytes of a character that is not complete."""


class Detokenizer:
    """Joined, the results of `feed` and one `flush` are what the tokens add to the text before.

    A character whose bytes are spread over tokens is held back until it is complete; special tokens
    give no text. The cost of a token is that of its own bytes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] | None = None) -> None:
        """prompt_ids: what the tokens continue; none at all begins a whole text, which may have to
        lose its first space. Left out: some text of whole characters."""
        self._tokenizer = tokenizer
        self._decoder = _Utf8Decoder(errors="replace")
        self._strips = False
        if prompt_ids is not None:
            tail = self._tail(prompt_ids)
            self._decoder.decode(tail)
            self._strips = tokenizer.strips_first_space and not tail

    def feed(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        text = self._tokenizer.text_bytes(token_id)
        if self._strips and text:
            self._strips = False
            text = text.removeprefix(b" ")
        return self._decoder.decode(text)

    def flush(self) -> str:
        """What is still held back at the end of the answer: empty or one U+FFFD."""
        return self._decoder.decode(b"", final=True)

    def _tail(self, token_ids: Sequence[int]) -> bytes:
        """Last bytes of the tokens' text: enough for a character that they begin."""
        tail = b""
        for token_id in reversed(token_ids):
            if len(tail) >= UTF8_BYTES_PENDING_MAX:
                break
            tail = self._tokenizer.text_bytes(token_id) + tail
        return tail[-UTF8_BYTES_PENDING_MAX:]
