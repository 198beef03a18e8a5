"""Prompts of a known number of tokens: text of words that are one token each, for every server."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from control_plane.intake.model_files import ModelFiles, TokenizerJson
from control_plane.intake.tokenizer import Tokenizer

WORD = re.compile(rb" [a-z]{3,9}")
WORDS_MIN = 100


class PromptsUnusable(Exception):
    """The tokenizer does not give words that are one token each."""


@dataclass(frozen=True)
class Prompt:
    """A text, and the tokens a server should count in it, start token included."""

    text: str
    tokens_count: int


class PromptMaker:
    """Draws words of one tokenizer and makes prompts of them."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """name: where the tokenizer comes from. Raises PromptsUnusable if it has too few words."""
        self.name = name
        self._tokenizer = tokenizer
        tokens = map(tokenizer.token_bytes, range(tokenizer.size))
        self._words = sorted({token.decode() for token in tokens if WORD.fullmatch(token)})
        if len(self._words) < WORDS_MIN:
            raise PromptsUnusable(
                f"tokenizer {name}: {len(self._words)} of its tokens are words of 3 to 9 letters "
                f"after a space, {WORDS_MIN} are needed; name another with --tokenizer"
            )
        self.start_tokens_count = len(tokenizer.encode("", add_special=True))

    @staticmethod
    def load(path: Path) -> "PromptMaker":
        """From a tokenizer.json, a GGUF file or a folder in Hugging Face layout.

        Raises PromptsUnusable, and ConfigurationError if the file cannot be used.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        source = TokenizerJson(file) if file.suffix == ".json" else ModelFiles.load(file).tokenizer
        return PromptMaker(Tokenizer(source, str(path)), str(path))

    def words(self, count: int, random: Random) -> list[str]:
        """So many words, each with the space before it."""
        return random.choices(self._words, k=count)

    def prompt(self, words: Sequence[str]) -> Prompt:
        """The words as a prompt. Raises PromptsUnusable if they are not one token each."""
        text = "".join(words)
        if self._tokenizer.strips_first_space:
            text = text.removeprefix(" ")
        count = len(self._tokenizer.encode(text, add_special=False))
        if count != len(words):
            raise PromptsUnusable(
                f"tokenizer {self.name}: {len(words)} words are {count} tokens, so that prompts "
                "have no known length; name another with --tokenizer"
            )
        return Prompt(text, len(self._tokenizer.encode(text, add_special=True)))
