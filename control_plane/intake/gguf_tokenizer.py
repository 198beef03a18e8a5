"""A tokenizer of the `tokenizers` library, built from what a GGUF file says of its vocabulary.

Two kinds: byte-level BPE, with its merges and a named way to cut text into words first, and the
SentencePiece style, whose merges follow from the scores of its tokens.
"""

from collections.abc import Callable, Iterator

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from control_plane.errors import ConfigurationError
from control_plane.intake.model_files import CONTROL_TOKEN, SENTENCEPIECE, GgufVocabulary
from control_plane.intake.token_table import SPACE_MARK

NORMAL = 1
UNKNOWN = 2
USER_DEFINED = 4

GPT_2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GROUPED_DIGITS = _WORDS % "{1,3}"
SINGLE_DIGITS = _WORDS % ""
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Pre-tokenizers of models that take a word which is a token as it is, without merging."""


def library_from_gguf(vocabulary: GgufVocabulary, name: str) -> LibraryTokenizer:
    """Raises ConfigurationError naming the model and what of its vocabulary is not supported."""
    builders: dict[str, Callable[[GgufVocabulary, str], LibraryTokenizer]] = {
        "gpt2": _byte_level,
        SENTENCEPIECE: _sentencepiece,
    }
    if vocabulary.model not in builders:
        raise ConfigurationError(
            f"model {name}: tokenizer model {vocabulary.model!r} is not supported; supported are "
            f"'gpt2' (byte-level BPE) and {SENTENCEPIECE!r} (SentencePiece with scores)"
        )
    library = builders[vocabulary.model](vocabulary, name)
    for kinds, special in (((CONTROL_TOKEN, UNKNOWN), True), ((USER_DEFINED,), False)):
        library.add_tokens(
            [
                AddedToken(text, special=special, normalized=False)
                for text, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=False)
                if kind in kinds
            ]
        )
    return library


# ---------------------------------------------------------------- byte-level BPE


def _byte_level(vocabulary: GgufVocabulary, name: str) -> LibraryTokenizer:
    library = LibraryTokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=[_merge(merge, name) for merge in vocabulary.merges],
            ignore_merges=vocabulary.pre in WHOLE_WORDS,
        )
    )
    library.pre_tokenizer = _pre_tokenizer(vocabulary.pre, name)
    if vocabulary.pre == "qwen2":
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
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
    llama3 = [_split(GROUPED_DIGITS), bytes_only]
    stages: dict[str, list[pre_tokenizers.PreTokenizer]] = {
        "gpt-2": [by_regex],
        # llama.cpp's own, for models whose way nobody named.
        "default": [
            _split(r"[\p{P}$+<=>^~|]+"),
            _split(GPT_2_WORDS),
            _split(r"\p{N}+"),
            _split(r"[0-9][0-9][0-9]"),
            bytes_only,
        ],
        # Decimal digits only: fractions and superscripts stay with the word regex, as in the
        # reference outputs, although the library's own Digits would part them too.
        "smollm": [_split(r"\p{Nd}"), by_regex],
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "qwen2": [_split(SINGLE_DIGITS), bytes_only],
        "tekken": [_split(TEKKEN), bytes_only],
    }
    if pre not in stages:
        problem = f"{pre!r} is not supported" if pre else "tokenizer.ggml.pre is missing"
        raise ConfigurationError(
            f"model {name}: pre-tokenizer {problem}; supported are {', '.join(stages)}"
        )
    return pre_tokenizers.Sequence(stages[pre])


def _split(regex: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(regex), "isolated")


# ---------------------------------------------------------------- SentencePiece


def _sentencepiece(vocabulary: GgufVocabulary, name: str) -> LibraryTokenizer:
    _check_sentencepiece(vocabulary, name)
    unknown = vocabulary.unknown_id
    library = LibraryTokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=list(_merges(vocabulary)),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
        )
    )
    marked = normalizers.Replace(" ", SPACE_MARK)
    text = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        library.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marked])
        library.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)])
    else:
        library.normalizer = marked
        library.decoder = decoders.Sequence(text)
    return library


def _check_sentencepiece(vocabulary: GgufVocabulary, name: str) -> None:
    if vocabulary.pre not in ("", "default"):
        raise ConfigurationError(
            f"model {name}: pre-tokenizer {vocabulary.pre!r} is not supported with tokenizer model "
            f"{vocabulary.model!r}; supported is default"
        )
    tokens, scores = len(vocabulary.tokens), len(vocabulary.scores)
    types = len(vocabulary.token_types)
    if not tokens == scores == types:
        raise ConfigurationError(
            f"model {name}: tokenizer.ggml.tokens has {tokens} entries, scores {scores} and "
            f"token_type {types}; tokenizer model {vocabulary.model!r} needs as many of each"
        )


def _merges(vocabulary: GgufVocabulary) -> Iterator[tuple[str, str]]:
    """Every pair of tokens whose joined text is a token, best score first.

    SentencePiece joins the neighbours whose joined text has the best score; the library joins those
    that come first in this list. Of equal scores (converters without any write one number for all)
    the lower id wins: that is the order in which such vocabularies were made.
    """
    known = frozenset(vocabulary.tokens)
    entries = zip(vocabulary.tokens, vocabulary.scores, vocabulary.token_types, strict=True)
    results = [(-score, text) for text, score, kind in entries if kind == NORMAL]
    results.sort(key=lambda entry: entry[0])
    for _, text in results:
        for cut in range(len(text) - 1, 0, -1):
            left, right = text[:cut], text[cut:]
            if left in known and right in known:
                yield left, right
