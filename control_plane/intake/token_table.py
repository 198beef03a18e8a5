"""The bytes of text every token stands for, read off a library tokenizer once at the start.

With both kinds of tokenizer that are supported a token is a fixed run of bytes, whatever stands
around it, so that text can be rebuilt token by token (see detokenizer):

    ByteLevel      each letter of a token stands for one byte (GPT-2's alphabet)
    SentencePiece  a token is its own text with "▁" for a space, or one byte written <0xNN>
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as LibraryTokenizer

from control_plane.errors import ConfigurationError

NFC_SHRINKS_MOST = 9
"""Bytes of text that may become one under NFC: decomposing shrinks it to a third at most (U+1FEF),
composing what comes of that to another third (U+1FAA)."""

SPACE_MARK = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
MARK_TO_SPACE = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
SPACE_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
FIRST_SPACE_OFF = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
SENTENCEPIECE_DECODERS = (
    (MARK_TO_SPACE, {"type": "ByteFallback"}, {"type": "Fuse"}, FIRST_SPACE_OFF),
    (MARK_TO_SPACE, {"type": "ByteFallback"}, {"type": "Fuse"}),
    (MARK_TO_SPACE, {"type": "Fuse"}, FIRST_SPACE_OFF),
    (MARK_TO_SPACE, {"type": "Fuse"}),
)


@dataclass(frozen=True, slots=True)
class TokenTable:
    """token_bytes: by id; nothing where an id has no token. unknown_bytes: bytes of a text that the
    library leaves out of what it encodes. text_bytes_max: most other bytes of a text one token can
    stand for; None where that cannot be told. strips_first_space: a whole text that would begin
    with a space begins without it, because encoding had put one there.
    """

    token_bytes: Sequence[bytes]
    unknown_bytes: bytes
    text_bytes_max: int | None
    strips_first_space: bool

    @staticmethod
    def of(library: LibraryTokenizer, name: str) -> "TokenTable":
        """Raises ConfigurationError naming the model and its decoder if that is not supported."""
        stages = _stages(library.decoder, "decoders")
        kinds = [stage["type"] for stage in stages]
        if kinds == ["ByteLevel"]:
            return _byte_level(library)
        if kinds == ["Metaspace"]:
            mark = stages[0]["replacement"]
            # Which way is told by prepend_scheme; files of before 2024 have add_prefix_space.
            prepends = stages[0].get("prepend_scheme", stages[0].get("add_prefix_space", "always"))
            return _sentencepiece(library, mark, strips=prepends not in ("never", False))
        if tuple(stages) in SENTENCEPIECE_DECODERS:
            return _sentencepiece(
                library,
                SPACE_MARK,
                byte_fallback="ByteFallback" in kinds,
                strips="Strip" in kinds,
            )
        raise ConfigurationError(
            f"model {name}: tokenizer.json has the decoder {', '.join(kinds) or 'null'}; supported "
            f"are ByteLevel, Metaspace, and Replace ({SPACE_MARK} by a space), ByteFallback, Fuse, "
            "Strip (one space at the start) in this order"
        )


# ---------------------------------------------------------------- ByteLevel


def _byte_level(library: LibraryTokenizer) -> TokenTable:
    alphabet = _byte_alphabet()
    letters = frozenset(alphabet)

    def spelled(text: str) -> bytes:
        # An added token with other letters, such as a space, is written as itself.
        if letters.issuperset(text):
            return bytes(map(alphabet.__getitem__, text))
        return text.encode()

    known = library.get_vocab(with_added_tokens=False)
    # Bytes without a token of their own vanish when a text is encoded.
    unknown_bytes = bytes(byte for text, byte in alphabet.items() if text not in known)
    vocabulary = library.get_vocab(with_added_tokens=True)
    table = _by_id((index, spelled(text)) for text, index in vocabulary.items())
    return TokenTable(
        table,
        unknown_bytes,
        _byte_level_bytes_max(library, table, unknown_bytes),
        strips_first_space=False,
    )


def _byte_level_bytes_max(
    library: LibraryTokenizer, table: Sequence[bytes], unknown_bytes: bytes
) -> int | None:
    added = library.get_added_tokens_decoder().values()
    stages = _stages(library.pre_tokenizer, "pretokenizers")
    # Without a byte-level stage every character that is no letter of the alphabet gets lost.
    if not any(stage["type"] == "ByteLevel" for stage in stages):
        return None
    if not _keeps_text(stages, ("ByteLevel", "Digits", "Split")) or _takes_spaces(added):
        return None
    if library.normalizer is None:
        shrinks = 1
    elif isinstance(library.normalizer, normalizers.NFC) and not unknown_bytes:
        shrinks = NFC_SHRINKS_MOST
    else:
        return None
    return shrinks * max(map(len, [*table, *(token.content.encode() for token in added)]))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself, or the next free code point from 256 on."""
    printable: Sequence[int] = [*range(33, 127), *range(161, 173), *range(174, 256)]
    free = itertools.count(256)
    return {chr(byte if byte in printable else next(free)): byte for byte in range(256)}


# ---------------------------------------------------------------- SentencePiece


def _sentencepiece(
    library: LibraryTokenizer, mark: str, *, byte_fallback: bool = False, strips: bool
) -> TokenTable:
    def spelled(text: str) -> bytes:
        if byte_fallback and (byte := BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        return text.replace(mark, " ").encode()

    vocabulary = library.get_vocab(with_added_tokens=True)
    return TokenTable(
        _by_id((index, spelled(text)) for text, index in vocabulary.items()),
        b"",
        _sentencepiece_bytes_max(library, vocabulary),
        strips_first_space=strips,
    )


def _sentencepiece_bytes_max(library: LibraryTokenizer, vocabulary: dict[str, int]) -> int | None:
    model = library.model
    # Without all byte tokens, any run of unknown characters may be one token.
    if not isinstance(model, models.BPE) or not model.byte_fallback:
        return None
    if any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
        return None
    stages = _stages(library.pre_tokenizer, "pretokenizers")
    added = library.get_added_tokens_decoder().values()
    if not _keeps_text(stages, ("Metaspace", "Digits", "Split")) or _takes_spaces(added):
        return None
    for stage in _stages(library.normalizer, "normalizers"):
        if stage != SPACE_TO_MARK and stage["type"] != "Prepend":
            return None
    # The text may hold the mark itself, so it counts with its own bytes and not as a space.
    return max(len(text.encode()) for text in vocabulary)


# ---------------------------------------------------------------- both


def _stages(part: Any, sequence_key: str) -> list[dict[str, Any]]:  # noqa: ANN401 - any of a dozen
    """A decoder, pre-tokenizer or normalizer as the stages it consists of; [] if there is none."""
    if part is None:
        return []
    stage = json.loads(part.__getstate__())
    stages: list[dict[str, Any]] = stage[sequence_key] if stage["type"] == "Sequence" else [stage]
    return stages


def _keeps_text(stages: list[dict[str, Any]], kinds: tuple[str, ...]) -> bool:
    return all(stage["type"] in kinds and stage.get("behavior") != "Removed" for stage in stages)


def _takes_spaces(added: Iterable[AddedToken]) -> bool:
    """True if a token swallows the spaces around it, however many."""
    return any(token.lstrip or token.rstrip for token in added)


def _by_id(entries: Iterable[tuple[int, bytes]]) -> list[bytes]:
    found = dict(entries)
    return [found.get(index, b"") for index in range(max(found, default=-1) + 1)]
