"""Prompts of words: as many tokens as words, or a refusal."""

from random import Random

import pytest

from control_plane.intake.model_files import TokenizerJson
from control_plane.intake.tokenizer import Tokenizer
from scripts.workloads.prompts import PromptMaker, PromptsUnusable
from tests.fakes.word_tokenizer import save_word_tokenizer


@pytest.fixture
def path(tmp_path):
    save_word_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def test_words_are_one_token_each(path):
    maker = PromptMaker.load(path)
    words = maker.words(300, Random(1))
    prompt = maker.prompt(words)
    tokenizer = Tokenizer(TokenizerJson(path), "words")
    assert prompt.tokens_count == len(tokenizer.encode(prompt.text, add_special=True)) == 300
    assert len(prompt.text.split()) == 300
    assert maker.words(300, Random(1)) == words != maker.words(300, Random(2))


def test_a_folder_holds_its_tokenizer(path):
    maker = PromptMaker.load(path.parent)
    assert maker.name == str(path.parent)


def test_a_tokenizer_of_too_few_words_is_refused(tmp_path):
    save_word_tokenizer(tmp_path / "tokenizer.json", words_count=99)
    with pytest.raises(PromptsUnusable, match="99 of its tokens are words"):
        PromptMaker.load(tmp_path)


def test_words_that_are_several_tokens_are_refused(path):
    maker = PromptMaker.load(path)
    with pytest.raises(PromptsUnusable, match="2 words are 5 tokens"):
        maker.prompt([" abc", " xyz"])
