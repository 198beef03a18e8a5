"""Text to token ids and back: the `tokenizers` library, fed from tokenizer.json or GGUF metadata.

Byte-level BPE and the SentencePiece style, where every token is a fixed run of bytes (see
token_table); so text can be rebuilt token by token without asking what the tokens before it were.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer as LibraryTokenizer

from control_plane.errors import ConfigurationError
from control_plane.intake.gguf_tokenizer import library_from_gguf
from control_plane.intake.model_files import TokenizerJson, TokenizerSource
from control_plane.intake.token_table import TokenTable


class Tokenizer:
    """Encodes and decodes for one model; safe to use from several threads at once.

    size: largest id + 1. strips_first_space: `decode` leaves out the space a text begins with,
    because encoding puts one there.
    """

    def __init__(self, source: TokenizerSource, name: str) -> None:
        """Raises ConfigurationError naming the model and the part of it that is not supported."""
        if isinstance(source, TokenizerJson):
            self._library = _from_json(source)
            self._first_ids: tuple[int, ...] = ()
            self._last_ids: tuple[int, ...] = ()
        else:
            self._library = library_from_gguf(source, name)
            self._first_ids = _added("bos", source.bos_id, name) if source.add_bos else ()
            self._last_ids = _added("eos", source.eos_id, name) if source.add_eos else ()
        added = self._library.get_added_tokens_decoder()
        self._special_ids = {
            token.content: index for index, token in added.items() if token.special
        }
        around_nothing = (*self._first_ids, *self._library.encode("").ids)
        special = (each for each in around_nothing if each in self._special_ids.values())
        self._start_id = next(special, None)
        self._table = TokenTable.of(self._library, name)
        self.size = len(self._table.token_bytes)
        self.strips_first_space = self._table.strips_first_space
        self._text_bytes = list(self._table.token_bytes)
        for index in self._special_ids.values():
            self._text_bytes[index] = b""

    def encode(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        """Token ids of the text; names of special tokens in it become these tokens.

        add_special: put the model's start token first, unless the text begins with it already, and
        its end token last, where the file asks for one.
        Raises UnicodeEncodeError if the text has a lone surrogate.
        """
        text.encode()
        # The batch call is the one that lets other threads run meanwhile; "fast" leaves out
        # character offsets.
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special)
        ids = tuple(encoding.ids)
        if not add_special:
            return ids
        ids = (*self._first_ids, *ids, *self._last_ids)
        return ids[1:] if ids[:2] == (self._start_id, self._start_id) else ids

    def tokens_min(self, text: bytes) -> int:
        """Least tokens the text can have, from its size alone; 0 if nothing is known."""
        longest = self._table.text_bytes_max
        if longest is None:
            return 0
        return -(-len(text.translate(None, self._table.unknown_bytes)) // longest)

    def decode(self, token_ids: Iterable[int]) -> str:
        """A whole text, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text = b"".join(map(self.text_bytes, token_ids))
        if self.strips_first_space:
            text = text.removeprefix(b" ")
        return text.decode(errors="replace")

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text: nothing for special tokens and unknown ids."""
        return self._text_bytes[token_id] if token_id < self.size else b""

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, special or not; nothing for ids the vocabulary only pads."""
        return self._table.token_bytes[token_id] if token_id < self.size else b""

    def special_id(self, text: str) -> int | None:
        """Id of the special token written like this, or None."""
        return self._special_ids.get(text)


def _added(kind: str, token_id: int | None, name: str) -> tuple[int, ...]:
    """The start ("bos") or end ("eos") token that goes round every prompt."""
    if token_id is None:
        raise ConfigurationError(
            f"model {name}: every prompt is to have a token that the file does not name: "
            f"tokenizer.ggml.{kind}_token_id is missing or no id; write it, or set "
            f"tokenizer.ggml.add_{kind}_token to false"
        )
    return (token_id,)


def _from_json(source: TokenizerJson) -> LibraryTokenizer:
    try:
        library = LibraryTokenizer.from_file(str(source.path))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigurationError(f"tokenizer file {source.path}: {error}") from error
    library.no_truncation()
    library.no_padding()
    return library
