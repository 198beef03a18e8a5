"""Turns output tokens into text as they come, whole characters only; one per answer."""

import codecs

from control_plane.intake.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The joined results of `feed` and one `flush` equal `Tokenizer.decode` of all the tokens.

    A character whose bytes are spread over tokens is held back until it is complete; special tokens
    give no text. The cost of a token is that of its own bytes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = _Utf8Decoder(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        return self._decoder.decode(self._tokenizer.text_bytes(token_id))

    def flush(self) -> str:
        """What is still held back at the end of the answer: empty or one U+FFFD."""
        return self._decoder.decode(b"", final=True)
