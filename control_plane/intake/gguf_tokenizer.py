"""A tokenizer of the `tokenizers` library, built from what a GGUF file says of its vocabulary."""

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from control_plane.errors import ConfigurationError
from control_plane.intake.model_files import GgufVocabulary

CONTROL = 3
USER_DEFINED = 4

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GROUPED_DIGITS = _WORDS % "{1,3}"
SINGLE_DIGITS = _WORDS % ""


def library_from_gguf(vocabulary: GgufVocabulary, name: str) -> LibraryTokenizer:
    """Raises ConfigurationError naming the model and what of its vocabulary is not supported."""
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
