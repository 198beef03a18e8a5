"""Small tokenizers written by hand for the field scenarios: byte-level, and SentencePiece style.

Both have the same special tokens under the same ids, every byte, common letters and a few words,
and `SIZE` tokens in all. Their files are what `tokenizers` saves and transformers reads.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer as LibraryTokenizer

SIZE = 512
START, END, TURN_END, SPECIAL = range(4)
SPECIAL_TEXTS = ("<|start|>", "<|end|>", "<|turn_end|>", "<|special|>")
UNKNOWN = 4
"""Id of the unknown token, which only the SentencePiece style has."""

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?:;'-()你好"
WORDS = (
    " the quick brown fox jumps over lazy dog and then it runs away from here to there again with "
    "some other small animals that like water trees grass wind sun moon stars night morning user "
    "assistant system hello world please stop start never ends always counting numbers letters"
)
FIRST_BYTES_OF_YOU = b"\xe4\xbd"
"""Two of the three bytes of 你: a token of its own, so that the character is two tokens."""


@dataclass(frozen=True)
class FieldTokenizer:
    """sentencepiece: False is byte-level. pieces: further tokens a script needs; encoding a text
    never gives them. starts: a text is encoded with the start token first. long_letters: above 0,
    so many letters x are a token, and encoding finds it before any other.
    """

    sentencepiece: bool = False
    pieces: tuple[str | bytes, ...] = ()
    starts: bool = True
    long_letters: int = 0

    def id_of(self, piece: str | bytes) -> int:
        """Id of the token that stands for exactly this text; a single byte of bytes for itself."""
        raw = piece.encode() if isinstance(piece, str) else piece
        if piece in SPECIAL_TEXTS:
            return SPECIAL_TEXTS.index(str(piece))
        # SentencePiece has two tokens for a letter: its own, and its byte's.
        if self.sentencepiece and isinstance(piece, bytes) and len(piece) == 1:
            return self._vocabulary[f"<0x{piece[0]:02X}>"]
        return self._vocabulary[self._spell(raw)]

    def ids_of(self, *pieces: str | bytes) -> list[int]:
        """Ids of tokens given by their texts."""
        return [self.id_of(piece) for piece in pieces]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text, as the library itself gives them."""
        return list(self.library.encode(text, add_special_tokens=add_special).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text without special tokens, as the library itself gives it."""
        return str(self.library.decode(list(token_ids), skip_special_tokens=True))

    def text_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text that has begun."""
        return self._texts[token_id]

    @cached_property
    def library(self) -> LibraryTokenizer:
        """The tokenizer itself."""
        return LibraryTokenizer.from_str(self.to_json())

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [
                    {
                        "id": self._vocabulary[text],
                        "content": text,
                        "single_word": False,
                        "lstrip": False,
                        "rstrip": False,
                        "normalized": False,
                        "special": text in self._specials,
                    }
                    for text in (*self._specials, *self._long_texts)
                ],
                "post_processor": self._start_first() if self.starts else None,
                "model": {
                    "type": "BPE",
                    "dropout": None,
                    "unk_token": "<unk>" if self.sentencepiece else None,
                    "continuing_subword_prefix": None,
                    "end_of_word_suffix": None,
                    "fuse_unk": self.sentencepiece,
                    "byte_fallback": self.sentencepiece,
                    "ignore_merges": False,
                    "vocab": self._vocabulary,
                    "merges": self._merges,
                },
                **(SENTENCEPIECE_STAGES if self.sentencepiece else BYTE_LEVEL_STAGES),
            }
        )

    @property
    def _specials(self) -> tuple[str, ...]:
        return (*SPECIAL_TEXTS, "<unk>") if self.sentencepiece else SPECIAL_TEXTS

    @property
    def _long_texts(self) -> tuple[str, ...]:
        return (self.long_letters * "x",) if self.long_letters else ()

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return {text: index for index, (text, _) in enumerate(self._entries)}

    @cached_property
    def _merges(self) -> list[list[str]]:
        return [merge for _, merge in self._entries if merge]

    @cached_property
    def _texts(self) -> list[bytes]:
        return list(map(self._bytes_of, self._vocabulary))

    @cached_property
    def _entries(self) -> list[tuple[str, list[str]]]:
        """Every token with the merge that makes it, if one does; SIZE of them."""
        found: dict[str, list[str]] = {}
        for text, merge in self._candidates():
            found.setdefault(text, merge)
            if len(found) == SIZE:
                break
        assert len(found) == SIZE, "the words do not suffice"
        return list(found.items())

    def _candidates(self) -> Iterator[tuple[str, list[str]]]:
        yield from ((text, []) for text in self._specials)
        if self.sentencepiece:
            yield from ((f"<0x{byte:02X}>", []) for byte in range(256))
            yield from ((text, []) for text in ("▁", *CHARACTERS))
        else:
            yield from ((letter, []) for letter in BYTE_LETTERS)
        for piece in (*self.pieces, *self._long_texts):
            yield self._spell(piece.encode() if isinstance(piece, str) else piece), []
        if not self.sentencepiece:
            yield from self._built(FIRST_BYTES_OF_YOU)
        for word in WORDS.split():
            yield from self._built(f" {word}".encode())
        for pair in itertools.product(b"etaoinshrdlu", repeat=2):
            yield from self._built(bytes(pair))

    def _built(self, word: bytes) -> Iterator[tuple[str, list[str]]]:
        spelled = self._spell(word)
        for end in range(2, len(spelled) + 1):
            yield spelled[:end], [spelled[: end - 1], spelled[end - 1]]

    def _spell(self, raw: bytes) -> str:
        if self.sentencepiece:
            return raw.decode().replace(" ", "▁")
        return "".join(BYTE_LETTERS[byte] for byte in raw)

    def _bytes_of(self, token: str) -> bytes:
        if token in self._specials:
            return b""
        if not self.sentencepiece:
            return bytes(map(BYTE_LETTERS.index, token))
        if token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def _start_first(self) -> dict[str, object]:
        start = SPECIAL_TEXTS[START]
        text = {"Sequence": {"id": "A", "type_id": 0}}
        first = {"SpecialToken": {"id": start, "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {start: {"id": start, "ids": [START], "tokens": [start]}},
        }


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    free = itertools.count(256)
    return [chr(byte if byte in printable else next(free)) for byte in range(256)]


BYTE_LETTERS = _byte_letters()
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
BYTE_LEVEL_STAGES = {
    "normalizer": None,
    "pre_tokenizer": {**BYTE_LEVEL, "use_regex": True},
    "decoder": {**BYTE_LEVEL, "use_regex": True},
}
SENTENCEPIECE_STAGES = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "pre_tokenizer": None,
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
}
