"""A tokenizer.json of byte-level BPE with some hundred words that are one token each."""

from itertools import islice, product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def save_word_tokenizer(path: Path, words_count: int = 200) -> None:
    """Words of three letters, a to z; everything else is spelt in bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġ" + "".join(word) for word in islice(product("abcdefgh", repeat=3), words_count)]
    vocabulary = {text: index for index, text in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
