"""Validation, shared by both protocols: every refusal names the field and the limit."""

import random
from datetime import datetime

import anyio
import pytest

from control_plane.errors import InvalidRequest, ModelNotFound, QueueFull
from control_plane.intake.admission import (
    Admission,
    ChatPrompt,
    GenerationInput,
    TextPrompt,
    TokenPrompt,
)
from control_plane.intake.chat_template import ChatTemplate
from control_plane.intake.model_card import ModelCard
from control_plane.intake.reserved_fields import NEUTRAL_VALUES
from control_plane.intake.tokenizer import Tokenizer
from control_plane.intake.tokenizer_pool import TokenizerPool

pytestmark = pytest.mark.anyio

CONTEXT_TOKENS = 256


@pytest.fixture
def admission(tiny_model):
    tokenizer = Tokenizer(tiny_model.tokenizer, "tiny")
    template = ChatTemplate(tiny_model.chat_template, {}, datetime.now)
    pool = TokenizerPool(tokenizer, template, 1, waiting_max=2, context_tokens=CONTEXT_TOKENS)
    yield Admission(ModelCard.of(tiny_model, "mine", None), pool, random.Random(3))
    pool.close()


def wanting(**fields) -> GenerationInput:
    return GenerationInput(**({"prompt": TextPrompt("hi")} | fields))


async def test_defaults(admission):
    admitted = await admission.admit(wanting())
    request = admitted.request
    assert request.prompt_ids == (104, 105)
    assert request.sampling.temperature == 1.0
    assert 0 <= request.sampling.seed < 2**53
    assert request.max_tokens is None
    assert len(request.request_id) == 32
    assert admitted.stop_ids == {257, 258}
    assert admitted.output_tokens_max == CONTEXT_TOKENS - 2
    assert not request.wants_logprobs
    other = await admission.admit(wanting())
    assert other.request.sampling.seed != request.sampling.seed
    assert other.request.request_id != request.request_id


async def test_everything_asked_is_carried(admission):
    admitted = await admission.admit(
        wanting(
            request_id="r",
            model="default",
            temperature=0.25,
            seed=2**64 - 1,
            max_tokens=9,
            stop_token_ids=(5, 299),
            ignore_eos=True,
            logprobs=True,
            resume_output_ids=(1, 2),
            deadline=7.5,
        )
    )
    request = admitted.request
    assert (request.request_id, request.sampling.temperature) == ("r", 0.25)
    assert (request.sampling.seed, request.max_tokens) == (2**64 - 1, 9)
    assert (request.output_ids, request.deadline) == ((1, 2), 7.5)
    assert request.wants_logprobs
    assert admitted.stop_ids == {5, 299}
    assert admitted.output_tokens_max == 9


@pytest.mark.parametrize("temperature", [0, 1e-12, 9e-6])
async def test_tiny_temperatures_act_greedy(admission, temperature):
    admitted = await admission.admit(wanting(temperature=temperature))
    assert admitted.request.sampling.temperature == 0


@pytest.mark.parametrize("name", ["", "default", "mine"])
async def test_names_of_the_model(admission, name):
    assert (await admission.admit(wanting(model=name))).request.prompt_ids == (104, 105)


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"prompt": None}, "prompt", "missing"),
        ({"prompt": TextPrompt("")}, "prompt", "empty"),
        ({"prompt": TokenPrompt(())}, "prompt", "empty"),
        ({"prompt": ChatPrompt(())}, "messages", "empty"),
        ({"prompt": TokenPrompt((1, 300))}, "prompt", "300 is outside the vocabulary"),
        ({"prompt": TokenPrompt((1, -1))}, "prompt", "0 to 299"),
        ({"prompt": TokenPrompt((10**40,))}, "prompt", "bits"),
        ({"prompt": TextPrompt("x" * 256)}, "prompt", "256 tokens .* context of 256 .* 255"),
        ({"prompt": TokenPrompt((1,) * 2560)}, "prompt", "2560 tokens"),
        ({"max_tokens": 0}, "max_tokens", "below 1"),
        ({"max_tokens": -4}, "max_tokens", "below 1"),
        ({"max_tokens": 255}, "max_tokens", "2 prompt .* 255 .* 256 tokens; send at most 254"),
        ({"max_tokens": 10**5000}, "max_tokens", "bits"),
        ({"temperature": float("nan")}, "temperature", "nan"),
        ({"temperature": float("inf")}, "temperature", "0 and 100"),
        ({"temperature": -0.1}, "temperature", "0 and 100"),
        ({"temperature": 100.5}, "temperature", "0 and 100"),
        ({"seed": -1}, "seed", "-1 is not between"),
        ({"seed": 2**64}, "seed", str(2**64 - 1)),
        ({"stop_token_ids": (300,)}, "stop_token_ids", "outside"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids", "outside"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids", "65 ids are more than 64"),
        ({"resume_output_ids": (300,)}, "resume_output_ids", "outside"),
        ({"resume_output_ids": (1, 2), "max_tokens": 1}, "resume_output_ids", "2 tokens .* 1"),
        ({"request_id": "x" * 129}, "request_id", "129 characters"),
        ({"request_id": "a\x1b[2J"}, "request_id", "cannot be printed"),
        ({"reserved": {"top_p": 0.5}}, "top_p", "0.5 is not supported yet"),
        ({"reserved": {"top_p": float("nan")}}, "top_p", "not supported yet"),
        ({"reserved": {"n": True}}, "n", "not supported yet"),
        ({"reserved": {"echo": 1}}, "echo", "not supported yet"),
        ({"reserved": {"stop": [""]}}, "stop", "not supported yet"),
        ({"reserved": {"logit_bias": {"5": 1}}}, "logit_bias", "not supported yet"),
    ],
)
async def test_refusals(admission, fields, field, said):
    with pytest.raises(InvalidRequest, match=said) as caught:
        await admission.admit(wanting(**fields))
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")
    assert len(caught.value.message) < 400


async def test_prompts_that_wait_for_a_thread_are_bounded(admission):
    refusals = []

    async def ask() -> None:
        try:
            await admission.admit(wanting(prompt=TextPrompt("hi " * 50)))
        except QueueFull as error:
            refusals.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(ask)
    assert len(refusals) == 3
    assert "2 prompts wait" in refusals[0].message
    assert refusals[0].retry_after_s
    await admission.admit(wanting())


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt("é" * 2_000_000), "prompt"),
        (ChatPrompt(({"role": "user", "content": "é" * 2_000_000},)), "messages"),
    ],
)
async def test_a_text_that_cannot_fit_is_not_even_tokenized(admission, prompt, field, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    said = f"^{field}: 40000.. bytes .* 256 tokens .* at most 255 tokens"
    with pytest.raises(InvalidRequest, match=said) as caught:
        await admission.admit(wanting(prompt=prompt))
    assert caught.value.field == field


async def test_unknown_model(admission):
    with pytest.raises(ModelNotFound, match=r"'gpt-9' .* 'mine', 'default'") as caught:
        await admission.admit(wanting(model="gpt-9"))
    assert caught.value.field == "model"


async def test_neutral_values_of_every_reserved_field_are_accepted(admission):
    for name, values in NEUTRAL_VALUES.items():
        for value in (None, *values):
            await admission.admit(wanting(reserved={name: value}))
    await admission.admit(wanting(reserved={"top_p": 1.0, "presence_penalty": 0.0}))


async def test_the_last_token_of_the_context_can_be_asked_for(admission):
    admitted = await admission.admit(wanting(prompt=TextPrompt("x" * 255)))
    assert admitted.output_tokens_max == 1
    admitted = await admission.admit(wanting(max_tokens=254))
    assert admitted.output_tokens_max == 254
