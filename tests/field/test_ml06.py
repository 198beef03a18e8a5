"""ML06: a tokenizer rebuilt from GGUF splits special tokens, and loses start and end tokens.

Texts go in over HTTP as a client sends them; a scripted core stands in for the chips, since the ids
are all that counts.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from control_plane.intake.model_files import GgufVocabulary, ModelFiles
from scripts.topology import PACKAGED_MODELS
from tests.control_plane.intake.fake_core import FakeCore, Running, running, saying
from tests.golden.tokenizer_cases import TokenizerCases, tokenizer_cases

PROMPTS_AT_ONCE = 16

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=["default", "gemma3"])
def model(request: pytest.FixtureRequest) -> tuple[ModelFiles, TokenizerCases]:
    """A packaged model's files, and the ids that another program gives the texts."""
    packaged = PACKAGED_MODELS[request.param]
    path = packaged.path()
    if path is None:
        assert request.param != "default"
        pytest.skip(f"the model is not installed; {packaged.install} brings it")
    return ModelFiles.load(path), tokenizer_cases(request.param)


async def test_200_texts_have_the_ids_of_another_program(
    model: tuple[ModelFiles, TokenizerCases],
) -> None:
    files, cases = model
    assert len(cases.texts) >= 200
    # Each answer is the file's end token: it ends the answer and gives no text.
    core = FakeCore(saying("", then=cases.end_token_ids[:1]))
    async with running(files, core) as service:
        for first in range(0, len(cases.texts), PROMPTS_AT_ONCE):
            texts = cases.texts[first : first + PROMPTS_AT_ONCE]
            choices = await answers(service, texts)
            for text, choice, ids in zip(texts, choices, cases.ids[first:], strict=False):
                # A text that begins with the start token gets no second one.
                start = () if cases.start_ids and ids[:1] == cases.start_ids else cases.start_ids
                assert choice["prompt_token_ids"] == [*start, *ids], text
                assert choice["token_ids"] == [cases.end_token_ids[0]]
                assert (choice["finish_reason"], choice["text"]) == ("stop", "")
        assert isinstance(files.tokenizer, GgufVocabulary)
        special_ids = [files.tokenizer.tokens.index(each) for each in cases.special_tokens.values()]
        prompts = [f"a{text}{text}b" for text in cases.special_tokens.values()]
        for choice, special_id in zip(await answers(service, prompts), special_ids, strict=True):
            assert choice["prompt_token_ids"][-3:-1] == [special_id] * 2
            assert len(choice["prompt_token_ids"]) == len(cases.start_ids) + 4


async def answers(service: Running, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """The choices of one call with all prompts."""
    body = {"model": "default", "prompt": prompts, "max_tokens": 4, "return_token_ids": True}
    answer = await service.http.post("/v1/completions", json=body)
    choices: list[dict[str, Any]] = answer.raise_for_status().json()["choices"]
    return choices
