"""Text to token ids and back: the `tokenizers` library, fed from tokenizer.json or GGUF metadata.

Byte-level BPE only: there every token is a fixed run of bytes, so that text can be rebuilt token by
token (see detokenizer) without ever asking what the tokens before it were.
"""

import itertools
import json
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from control_plane.errors import ConfigurationError
from control_plane.intake.model_files import GgufVocabulary, TokenizerJson, TokenizerSource

CONTROL = 3
USER_DEFINED = 4

NFC_SHRINKS_MOST = 9
"""Bytes of text that may become one under NFC: decomposing shrinks it to a third at most (U+1FEF),
composing what comes of that to another third (U+1FAA)."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GROUPED_DIGITS = _WORDS % "{1,3}"
SINGLE_DIGITS = _WORDS % ""


class Tokenizer:
    """Encodes and decodes for one model; safe to use from several threads at once."""

    def __init__(self, source: TokenizerSource, name: str) -> None:
        """Raises ConfigurationError naming the model and the part of it that is not supported."""
        if isinstance(source, TokenizerJson):
            self._library = _from_json(source, name)
            self._bos_id = None
        else:
            self._library = _from_gguf(source, name)
            self._bos_id = source.bos_id if source.add_bos else None
        added = self._library.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._bytes = _token_bytes(self._library.get_vocab(with_added_tokens=True))
        self._unknown_bytes = _unknown_bytes(self._library)
        self._token_text_bytes_max = _token_text_bytes_max(
            self._library, self._bytes, self._unknown_bytes
        )

    def encode(self, text: str, *, add_special: bool) -> tuple[int, ...]:
        """Token ids of the text; names of special tokens in it become these tokens.

        add_special: put the model's start token first, unless the text begins with it already.
        Raises UnicodeEncodeError if the text has a lone surrogate.
        """
        text.encode()
        # The batch call is the one that lets other threads run meanwhile; "fast" leaves out
        # character offsets.
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special)
        ids = tuple(encoding.ids)
        if add_special and self._bos_id is not None:
            ids = (self._bos_id, *ids)
        if add_special and len(ids) > 1 and ids[0] == ids[1] and ids[0] in self._special_ids:
            return ids[1:]
        return ids

    def tokens_min(self, text: bytes) -> int:
        """Least tokens the text can have, from its size alone; 0 if nothing is known."""
        longest = self._token_text_bytes_max
        if longest is None:
            return 0
        return -(-len(text.translate(None, self._unknown_bytes)) // longest)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of the tokens without special ones; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.text_bytes, token_ids)).decode(errors="replace")

    def text_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text: nothing for special tokens and unknown ids."""
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes, special or not; nothing for ids the vocabulary only pads."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""


# ---------------------------------------------------------------- building


def _from_json(source: TokenizerJson, name: str) -> LibraryTokenizer:
    try:
        library = LibraryTokenizer.from_file(str(source.path))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigurationError(f"tokenizer file {source.path}: {error}") from error
    if not isinstance(library.decoder, decoders.ByteLevel):
        raise ConfigurationError(
            f"model {name}: tokenizer.json has the decoder {type(library.decoder).__name__}; only "
            "ByteLevel is supported"
        )
    library.no_truncation()
    library.no_padding()
    return library


def _from_gguf(vocabulary: GgufVocabulary, name: str) -> LibraryTokenizer:
    if vocabulary.model != "gpt2":
        raise ConfigurationError(
            f"model {name}: tokenizer model {vocabulary.model!r} is not supported; byte-level BPE "
            "('gpt2') is"
        )
    library = LibraryTokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=[_merge(merge, name) for merge in vocabulary.merges],
            ignore_merges=vocabulary.pre == "llama-bpe",
        )
    )
    library.pre_tokenizer = _pre_tokenizer(vocabulary.pre, name)
    if vocabulary.pre == "qwen2":
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        library.add_tokens(
            [
                AddedToken(text, special=special, normalized=False)
                for text, its_kind in zip(vocabulary.tokens, vocabulary.token_types, strict=False)
                if its_kind == kind
            ]
        )
    return library


def _merge(merge: str, name: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise ConfigurationError(f"model {name}: tokenizer.ggml.merges has {merge!r}, not a pair")
    return left, right


def _pre_tokenizer(pre: str, name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut into words before merging, by GGUF's name for it."""
    by_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    stages: dict[str, list[pre_tokenizers.PreTokenizer]] = {
        "gpt-2": [by_regex],
        # Decimal digits only: fractions and superscripts stay with the word regex, as in the
        # reference outputs, although the library's own Digits would part them too.
        "smollm": [pre_tokenizers.Split(Regex(r"\p{Nd}"), "isolated"), by_regex],
        "llama-bpe": [pre_tokenizers.Split(Regex(GROUPED_DIGITS), "isolated"), bytes_only],
        "qwen2": [pre_tokenizers.Split(Regex(SINGLE_DIGITS), "isolated"), bytes_only],
    }
    if pre not in stages:
        problem = f"{pre!r} is not supported" if pre else "tokenizer.ggml.pre is missing"
        raise ConfigurationError(
            f"model {name}: pre-tokenizer {problem}; supported are {', '.join(stages)}"
        )
    return pre_tokenizers.Sequence(stages[pre])


def _token_bytes(vocabulary: dict[str, int]) -> list[bytes]:
    alphabet = _byte_alphabet()
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    letters = frozenset(alphabet)
    for text, index in vocabulary.items():
        # An added token with other letters, such as a space, is written as itself.
        spelled = letters.issuperset(text)
        table[index] = bytes(map(alphabet.__getitem__, text)) if spelled else text.encode()
    return table


def _unknown_bytes(library: LibraryTokenizer) -> bytes:
    """Bytes without a token of their own: the library leaves them out of what it encodes."""
    vocabulary = library.get_vocab(with_added_tokens=False)
    return bytes(byte for text, byte in _byte_alphabet().items() if text not in vocabulary)


def _token_text_bytes_max(
    library: LibraryTokenizer, table: list[bytes], unknown_bytes: bytes
) -> int | None:
    """Most bytes of text one token can stand for; None where text may vanish on its way."""
    added = library.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    if not _keeps_text(library.pre_tokenizer):
        return None
    if library.normalizer is None:
        shrinks = 1
    elif isinstance(library.normalizer, normalizers.NFC) and not unknown_bytes:
        shrinks = NFC_SHRINKS_MOST
    else:
        return None
    return shrinks * max(map(len, [*table, *(token.content.encode() for token in added)]))


def _keeps_text(pre_tokenizer: pre_tokenizers.PreTokenizer | None) -> bool:
    # Without a byte-level stage every character that is no letter of the alphabet gets lost.
    if pre_tokenizer is None:
        return False
    stage = json.loads(pre_tokenizer.__getstate__())
    stages = stage.get("pretokenizers", [stage])
    return any(stage["type"] == "ByteLevel" for stage in stages) and all(
        stage["type"] in ("ByteLevel", "Digits", "Split") and stage.get("behavior") != "Removed"
        for stage in stages
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself, or the next free code point from 256 on."""
    printable: Sequence[int] = [*range(33, 127), *range(161, 173), *range(174, 256)]
    free = itertools.count(256)
    return {chr(byte if byte in printable else next(free)): byte for byte in range(256)}
