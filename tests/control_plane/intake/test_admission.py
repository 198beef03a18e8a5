"""Validation, shared by both protocols: every refusal names the field, the limit and the remedy."""

import struct
import threading
from dataclasses import replace
from random import Random

import anyio
import anyio.lowlevel
import pytest

from control_plane.config import SchedulingConfig
from control_plane.errors import InvalidRequest, ModelNotFound, QueueFull
from control_plane.intake.generation_input import ChatPrompt, TextPrompt, TokenPrompt
from control_plane.intake.reserved_fields import NEUTRAL_VALUES
from control_plane.intake.tokenizer import Tokenizer
from control_plane.request import Sampling
from tests.control_plane.intake.fake_core import CONTEXT_TOKENS, END, OTHER_END, until
from tests.control_plane.intake.tiny_intake import tiny_intake, wanting

pytestmark = pytest.mark.anyio

NAN, INF = float("nan"), float("inf")
VOCABULARY_SIZE = 259
PRIORITY = SchedulingConfig(policy="priority")


@pytest.fixture
def make(tiny_model):
    pools = []

    def make(**settings):
        made = tiny_intake(tiny_model, **settings)
        pools.append(made.pool)
        return made.admission

    yield make
    for pool in pools:
        pool.close()


async def only(admission, *prompts, **fields):
    (choice,) = (await admission.admit("r", wanting(*prompts, **fields))).choices
    return choice


async def test_defaults_change_nothing(make):
    admission = make()
    choice = await only(admission)
    request = choice.request
    assert (request.request_id, request.prompt_ids, request.max_tokens) == ("r", (104, 105), None)
    assert request.sampling == Sampling(temperature=1.0, seed=request.sampling.seed)
    assert 0 <= request.sampling.seed < 2**53
    assert (request.wants_logprobs, request.top_tokens, request.prompt_top_tokens) == (
        False,
        0,
        None,
    )
    assert request.use_prefix_cache
    assert choice.ends.stop_ids == {END, OTHER_END}
    assert not choice.ends.stop_strings
    assert (choice.ends.min_tokens, choice.ends.output_tokens_max) == (0, CONTEXT_TOKENS - 2)
    assert choice.prompt_text is None
    assert (await only(admission)).request.sampling.seed != request.sampling.seed


async def test_everything_asked_is_carried(make):
    admission = make(scheduling=PRIORITY)
    choice = await only(
        admission,
        model="default",
        temperature=0.25,
        top_k=5,
        top_p=0.5,
        min_p=0.125,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={9: -100, 2: 100},
        seed=2**64 - 1,
        stop=("ab",),
        stop_token_ids=(5, 258, 5),
        min_tokens=3,
        max_tokens=9,
        ignore_eos=True,
        logprobs=True,
        top_tokens=4,
        prompt_top_tokens=2,
        resume_output_ids=((1, 2),),
        priority=-7,
        cache_salt="tenant",
        deadline=7.5,
    )
    request = choice.request
    assert request.sampling == Sampling(
        temperature=0.25,
        seed=2**64 - 1,
        top_k=5,
        top_p=0.5,
        min_p=0.125,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias=((2, 100.0), (9, -100.0)),
        suppressed_ids=(5, 258),
        min_tokens=3,
    )
    assert (request.max_tokens, request.output_ids, request.deadline) == (9, (1, 2), 7.5)
    assert (request.priority, request.salt) == (-7, "tenant")
    assert (request.wants_logprobs, request.top_tokens, request.prompt_top_tokens) == (True, 4, 2)
    assert not request.use_prefix_cache
    assert choice.ends.stop_ids == {5, 258}
    assert (choice.ends.min_tokens, choice.ends.output_tokens_max) == (3, 9)


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


@pytest.mark.parametrize(
    ("fields", "changed"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1e-12}, {"temperature": 0.0}),
        ({"temperature": 9e-6}, {"temperature": 0.0}),
        ({"temperature": 100}, {"temperature": 100.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": VOCABULARY_SIZE}, {"top_k": 0}),
        ({"top_k": 10**30}, {"top_k": 0}),
        ({"top_k": VOCABULARY_SIZE - 1}, {"top_k": VOCABULARY_SIZE - 1}),
        ({"top_p": 0}, {"top_p": 0.0}),
        ({"min_p": 1}, {"min_p": 1.0}),
        ({"repetition_penalty": 100}, {"repetition_penalty": 100.0}),
        # What gRPC's float32 makes of 0.00001 and 0.000001 is in the range, too.
        ({"temperature": float32(1e-5)}, {"temperature": float32(1e-5)}),
        ({"repetition_penalty": float32(1e-6)}, {"repetition_penalty": float32(1e-6)}),
        ({"min_tokens": 10**30}, {"min_tokens": 254, "suppressed_ids": (END, OTHER_END)}),
    ],
)
async def test_the_ends_of_the_ranges(make, fields, changed):
    sampling = (await only(make(), seed=1, **fields)).request.sampling
    assert sampling == Sampling(**({"temperature": 1.0, "seed": 1} | changed))


@pytest.mark.parametrize("name", ["", "default", "mine"])
async def test_names_of_the_model(make, name):
    assert (await only(make(), model=name)).request.prompt_ids == (104, 105)


TOO_MANY = tuple(range(VOCABULARY_SIZE))

REFUSALS = [
    ({"prompts": ()}, "prompt", "missing"),
    ({"prompts": (TextPrompt(""),)}, "prompt", "empty"),
    ({"prompts": (TokenPrompt(()),)}, "prompt", "empty"),
    ({"prompts": (ChatPrompt(()),)}, "messages", "empty"),
    ({"prompts": (ChatPrompt(({"role": "robot", "content": ""},)),)}, "messages", "no robots"),
    ({"prompts": (TokenPrompt((1, VOCABULARY_SIZE)),)}, "prompt", "259 is outside the vocabulary"),
    ({"prompts": (TokenPrompt((1, -1)),)}, "prompt", "0 to 258"),
    ({"prompts": (TokenPrompt((10**40,)),)}, "prompt", "bits"),
    ({"prompts": (TextPrompt("x" * 256),)}, "prompt", "256 tokens .* context of 256 .* 255"),
    ({"prompts": (TokenPrompt((1,) * 2560),)}, "prompt", "2560 tokens"),
    ({"prompts": (TextPrompt("a\ud800"),)}, "prompt", "Unicode"),
    ({"prompts": (TextPrompt("a"), TextPrompt(""))}, "prompt", r"prompt\[1\]: is empty"),
    ({"prompts": (TextPrompt("a"), TokenPrompt((300,)))}, "prompt", r"prompt\[1\]: token id 300"),
    ({"prompts": (TextPrompt("x" * 256), TextPrompt("a"))}, "prompt", r"prompt\[0\]: 256 tokens"),
    ({"prompts": (TextPrompt("a"),) * 129}, "prompt", "129 prompts are more than the 128"),
    ({"n": 0}, "n", "0 is not at least 1"),
    ({"n": 129}, "n", "129 choices .* 1 prompts .* 128"),
    ({"prompts": (TextPrompt("a"),) * 3, "n": 43}, "n", "at most 42"),
    ({"n": 10**5000}, "n", "bits"),
    ({"max_tokens": 0}, "max_tokens", "0 is below 1; .*echo or prompt_logprobs"),
    ({"max_tokens": -4}, "max_tokens", "-4 is not at least 1"),
    ({"max_tokens": 255}, "max_tokens", "2 prompt .* 255 .* 256 tokens; send at most 254"),
    ({"max_tokens": 10**5000}, "max_tokens", "bits"),
    ({"min_tokens": -1}, "min_tokens", "-1 is not at least 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "5 is more than max_tokens, 4"),
    ({"min_tokens": 1, "stop_token_ids": TOO_MANY}, "min_tokens", "all 259 tokens end the answer"),
    ({"temperature": NAN}, "temperature", "nan"),
    ({"temperature": INF}, "temperature", "0 and 100"),
    ({"temperature": -0.1}, "temperature", "0 and 100"),
    ({"temperature": 100.5}, "temperature", "0 and 100"),
    ({"temperature": 10**400}, "temperature", "bits"),
    ({"top_k": -2}, "top_k", "-2 is not -1 or more"),
    ({"top_p": -0.01}, "top_p", "between 0 and 1"),
    ({"top_p": 1.01}, "top_p", "between 0 and 1"),
    ({"top_p": NAN}, "top_p", "nan"),
    ({"min_p": 1.5}, "min_p", "between 0 and 1"),
    ({"min_p": NAN}, "min_p", "nan"),
    ({"presence_penalty": 2.1}, "presence_penalty", "-2 and 2"),
    ({"presence_penalty": NAN}, "presence_penalty", "nan"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "-2 and 2"),
    ({"frequency_penalty": -INF}, "frequency_penalty", "inf"),
    ({"repetition_penalty": 0}, "repetition_penalty", "1e-06 and 100"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty", "1e-06 and 100"),
    ({"repetition_penalty": 100.1}, "repetition_penalty", "and 100"),
    ({"repetition_penalty": NAN}, "repetition_penalty", "nan"),
    ({"logit_bias": {1: 100.5}}, "logit_bias", "-100 and 100"),
    ({"logit_bias": {1: NAN}}, "logit_bias", "nan"),
    ({"logit_bias": {VOCABULARY_SIZE: 1.0}}, "logit_bias", "259 is outside the vocabulary"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias", "-1 is outside the vocabulary"),
    ({"logit_bias": dict.fromkeys(range(1025), 0)}, "logit_bias", "1025 token ids .* than 1024"),
    ({"seed": -1}, "seed", "-1 is not between"),
    ({"seed": 2**64}, "seed", str(2**64 - 1)),
    ({"stop": ("a", "")}, "stop", "empty"),
    ({"stop": ("a",) * 17}, "stop", "17 strings are more than 16"),
    ({"stop": ("a" * 257,)}, "stop", "257 characters is longer than 256"),
    ({"stop_token_ids": (VOCABULARY_SIZE,)}, "stop_token_ids", "outside"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids", "outside"),
    ({"logprobs": True, "top_tokens": 21}, "top_logprobs", "21 is not between 0 and 20"),
    ({"logprobs": True, "top_tokens": -1}, "top_logprobs", "0 and 20"),
    ({"top_tokens": 2}, "top_logprobs", "only with logprobs"),
    ({"prompt_top_tokens": 21}, "prompt_logprobs", "21 is not between 0 and 20"),
    ({"resume_output_ids": ((300,),)}, "resume_output_ids", "outside"),
    ({"resume_output_ids": ((1, 2),), "max_tokens": 1}, "resume_output_ids", "2 tokens .* the 1"),
    ({"resume_output_ids": ((1,) * 255,)}, "resume_output_ids", "255 tokens .* the 254"),
    ({"resume_output_ids": ((), ())}, "resume_output_ids", "2 lists .* the 1 choices"),
    ({"cache_salt": "x" * 257}, "cache_salt", "257 characters are more than 256"),
    ({"cache_salt": "\udc00"}, "cache_salt", "Unicode"),
    ({"priority": 1}, "priority", "--policy priority"),
    ({"reserved": {"typical_p": 0.5}}, "typical_p", "0.5 is not supported yet"),
    ({"reserved": {"typical_p": NAN}}, "typical_p", "not supported yet"),
    ({"reserved": {"adapter": True}}, "adapter", "not supported yet"),
    ({"reserved": {"best_of": 3}, "n": 2}, "best_of", "not supported yet; .* send 1 or 2"),
]


@pytest.mark.parametrize(("fields", "field", "said"), REFUSALS)
async def test_refusals(make, fields, field, said):
    prompts = fields.get("prompts")
    others = {name: value for name, value in fields.items() if name != "prompts"}
    many = {"stop_token_ids_max": 1000}
    wanted = wanting(**others) if prompts is None else wanting(*prompts, **others)
    if prompts == ():
        wanted = type(wanted)(prompts=())
    with pytest.raises(InvalidRequest, match=said) as caught:
        await make(**many).admit("r", wanted)
    assert caught.value.field == field
    assert caught.value.message.startswith((f"{field}: ", f"{field}["))
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("settings", "fields", "field"),
    [
        ({"logit_bias_max": 0}, {"logit_bias": {1: 1}}, "logit_bias"),
        ({"stop_strings_max": 0}, {"stop": ("a",)}, "stop"),
        ({"stop_token_ids_max": 0}, {"stop_token_ids": (1,)}, "stop_token_ids"),
        ({"top_logprobs_max": 0}, {"logprobs": True, "top_tokens": 1}, "top_logprobs"),
        ({"choices_max": 1}, {"n": 2}, "n"),
        ({"stop_string_characters_max": 2}, {"stop": ("abc",)}, "stop"),
        ({"scheduling": PRIORITY}, {"priority": 2**31}, "priority"),
    ],
)
async def test_limits_are_settings_and_0_means_none(make, settings, fields, field):
    admission = make(**settings)
    with pytest.raises(InvalidRequest) as caught:
        await admission.admit("r", wanting(**fields))
    assert caught.value.field == field
    await admission.admit("r", wanting())


async def test_a_priority_of_0_needs_no_policy(make):
    assert (await only(make(), priority=0)).request.priority == 0


async def test_n_choices_of_every_prompt(make):
    admitted = await make().admit(
        "r",
        wanting(
            TextPrompt("a"),
            TokenPrompt((7, 8)),
            n=2,
            seed=5,
            max_tokens=4,
            resume_output_ids=((), (1,), (2, 3)),
        ),
    )
    assert (admitted.request_id, admitted.seed) == ("r", 5)
    assert [choice.index for choice in admitted.choices] == [0, 1, 2, 3]
    assert [choice.prompt_index for choice in admitted.choices] == [0, 0, 1, 1]
    requests = [choice.request for choice in admitted.choices]
    assert [each.request_id for each in requests] == ["r/0", "r/1", "r/2", "r/3"]
    assert [each.prompt_ids for each in requests] == [(97,), (97,), (7, 8), (7, 8)]
    assert [each.sampling.choice for each in requests] == [0, 1, 0, 1]
    assert {each.sampling.seed for each in requests} == {5}
    assert [each.output_ids for each in requests] == [(), (1,), (2, 3), ()]


async def test_only_the_first_choice_of_a_prompt_scores_it(make):
    admitted = await make().admit(
        "r", wanting(TextPrompt("ab"), TokenPrompt((7, 8)), n=3, prompt_top_tokens=2)
    )
    requests = [choice.request for choice in admitted.choices]
    assert [each.prompt_top_tokens for each in requests] == [2, None, None] * 2
    assert [each.use_prefix_cache for each in requests] == [False, True, True] * 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_top_tokens": 2}, "prompt_logprobs"),
        ({"prompt_top_tokens": 2, "n": 3}, "prompt_logprobs"),
        ({"echo": True, "logprobs": True, "top_tokens": 2}, "logprobs"),
    ],
)
async def test_scores_of_all_prompts_are_bounded_whatever_n_is(make, fields, field):
    wanted = wanting(TextPrompt("abcd"), TokenPrompt((7, 8)), **fields)
    await make(prompt_scores_max=18).admit("r", wanted)
    said = f"^{field}: 6 prompt tokens with 3 log-probabilities each are more than the 17 .*; send"
    with pytest.raises(InvalidRequest, match=said) as caught:
        await make(prompt_scores_max=17).admit("r", wanted)
    assert caught.value.field == field
    await make(prompt_scores_max=17).admit("r", wanting(TextPrompt("abcd" * 60), echo=True))


@pytest.mark.parametrize(
    ("most", "too_many", "field", "said"),
    [
        ({"n": 8}, {"n": 9}, "n", "9 choices of 1 prompts are more than the 8"),
        ({"prompts": 4, "n": 2}, {"prompts": 3, "n": 3}, "n", "send at most 2"),
        ({"prompts": 8}, {"prompts": 9}, "prompt", "9 prompts are more than the 8"),
    ],
)
async def test_what_the_queue_can_never_hold_is_not_asked_to_try_again(
    make, most, too_many, field, said
):
    admission = make(scheduling=SchedulingConfig(queue_requests_max=8))

    async def admit(prompts=1, **fields):
        return await admission.admit("r", wanting(*[TextPrompt("hi")] * prompts, **fields))

    await admit(**most)
    with pytest.raises(InvalidRequest, match=f"^{field}: .*{said}") as caught:
        await admit(**too_many)
    assert caught.value.field == field


async def test_tokens_the_queue_can_never_hold(make):
    admission = make(scheduling=SchedulingConfig(queue_tokens_max=12))
    await admission.admit("r", wanting(TextPrompt("abcd"), n=3))
    await admission.admit("r", wanting(TextPrompt("abcd"), n=9, max_tokens=0, echo=True))
    said = "^prompt: 16 tokens in 4 choices are more than the 12 that may wait .* lower n"
    for fields in ({}, {"prompt_top_tokens": 0}):
        with pytest.raises(InvalidRequest, match=said) as caught:
            await admission.admit("r", wanting(TextPrompt("abcd"), n=4, **fields))
        assert caught.value.field == "prompt"
    resumed = wanting(TextPrompt("abcde"), n=2, resume_output_ids=((), (1, 2, 3)))
    with pytest.raises(InvalidRequest, match=r"^prompt: 13 tokens in 2 choices"):
        await admission.admit("r", resumed)
    with pytest.raises(InvalidRequest) as caught:
        await admission.admit("r", wanting(ChatPrompt(({"role": "u", "content": "hello"},))))
    assert caught.value.field == "messages"


async def test_a_text_whose_tokens_the_model_does_not_have(tiny_model):
    made = tiny_intake(replace(tiny_model, vocabulary_size=257))
    said = r"^prompt: its text '<\|im_end\|>' is token 257, .* 0 to 256; leave that text out"
    with pytest.raises(InvalidRequest, match=said) as caught:
        await made.admission.admit("r", wanting(TextPrompt("hi<|im_end|>you")))
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest, match=r"^prompt\[1\]: its text"):
        await made.admission.admit("r", wanting(TextPrompt("hi"), TextPrompt("<|endoftext|>")))
    with pytest.raises(InvalidRequest, match=r"^messages: its text '<\|im_end\|>'"):
        await made.admission.admit("r", wanting(ChatPrompt(({"role": "u", "content": "x"},))))
    # Stop strings only name them: such a token cannot be drawn, so it ends nothing.
    stops = ("<|im_end|>", "<|im_start|>")
    choice = await only(made.admission, TextPrompt("hi<|im_start|>"), stop=stops, min_tokens=1)
    assert choice.ends.stop_ids == {256}
    assert choice.request.sampling.suppressed_ids == (256,)
    made.pool.close()


async def test_others_get_a_turn_while_many_prompts_are_looked_at(make):
    admission, turns = make(), 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count_turns)
        await admission.admit("r", wanting(*[TokenPrompt((1,) * 255)] * 128))
        turns_meanwhile = turns
        tasks.cancel_scope.cancel()
    assert turns_meanwhile


async def test_a_stop_string_that_names_a_special_token_stops_at_its_id(make):
    ends = (await only(make(), stop=("<|im_start|>", "x"), ignore_eos=True)).ends
    assert ends.stop_ids == {256}
    choice = await only(make(), stop=("<|im_start|>",), min_tokens=1)
    assert choice.request.sampling.suppressed_ids == (256, 257, 258)


async def test_echo_brings_the_prompt_s_text_and_with_logprobs_its_scores(make):
    admission = make()
    admitted = await admission.admit(
        "r", wanting(TextPrompt("hé"), TokenPrompt((104, 257, 105)), echo=True)
    )
    assert [choice.prompt_text for choice in admitted.choices] == ["hé", "hi"]
    assert {choice.request.prompt_top_tokens for choice in admitted.choices} == {None}
    for top_tokens, expected in ((None, 0), (3, 3)):
        request = (await only(admission, echo=True, logprobs=True, top_tokens=top_tokens)).request
        assert (request.prompt_top_tokens, request.use_prefix_cache) == (expected, False)


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_top_tokens": 0}])
async def test_no_output_at_all_may_be_asked_where_the_prompt_is(make, fields):
    choice = await only(make(), max_tokens=0, **fields)
    assert (choice.request.max_tokens, choice.ends.output_tokens_max) == (0, 0)


async def test_prompts_that_wait_for_a_thread_are_bounded(make, monkeypatch):
    admission, refusals = make(pieces_max=2), []
    encode, released = Tokenizer.encode, threading.Event()

    def held(*arguments, **options):
        assert released.wait(60), "nobody released the threads"
        return encode(*arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", held)

    async def ask() -> None:
        try:
            await admission.admit("r", wanting(TextPrompt("hi " * 50)))
        except QueueFull as error:
            refusals.append(error)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(ask)
        await until(lambda: len(refusals) == 3)
        released.set()
    assert len(refusals) == 3
    assert "2 prompts wait" in refusals[0].message
    await admission.admit("r", wanting())


async def test_a_call_refused_for_one_prompt_leaves_nothing_behind(tiny_model, monkeypatch):
    encode, released = Tokenizer.encode, threading.Event()

    def held(*arguments, **options):
        assert released.wait(60), "nobody released the threads"
        return encode(*arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", held)
    made = tiny_intake(tiny_model, pieces_max=4, threads_count=2)
    for _ in range(3):
        released.clear()
        with pytest.raises(QueueFull):
            await made.admission.admit("r", wanting(*[TextPrompt("hi")] * 5))
        released.set()
        await until(lambda: made.budget.pieces_count == 0)
        with pytest.raises(InvalidRequest):
            await made.admission.admit("r", wanting(*[TextPrompt("a\ud800")] * 3))
        await until(lambda: made.budget.pieces_count == 0)
    made.pool.close()


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt("é" * 2_000_000), "prompt"),
        (ChatPrompt(({"role": "user", "content": "é" * 2_000_000},)), "messages"),
    ],
)
async def test_a_text_that_cannot_fit_is_not_even_tokenized(make, prompt, field, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    said = f"^{field}: 40000.. bytes .* 256 tokens .* at most 255 tokens"
    with pytest.raises(InvalidRequest, match=said) as caught:
        await make().admit("r", wanting(prompt))
    assert caught.value.field == field


class UnreadIds(tuple):
    """Ids that may be counted, but not looked at."""

    __slots__ = ()

    def __iter__(self):
        pytest.fail("the ids were looked at")

    def __getitem__(self, index):
        pytest.fail("the ids were looked at")


async def test_lists_that_are_too_long_are_not_looked_at(make):
    admission, ids = make(), UnreadIds((0,) * 5_000_000)
    for wanted in (
        wanting(TokenPrompt(ids)),
        wanting(resume_output_ids=(ids,)),
        wanting(stop_token_ids=ids),
    ):
        with pytest.raises(InvalidRequest, match="5000000"):
            await admission.admit("r", wanted)


async def test_unknown_model(make):
    with pytest.raises(ModelNotFound, match=r"'gpt-9' .* 'mine', 'default'") as caught:
        await make().admit("r", wanting(model="gpt-9"))
    assert caught.value.field == "model"


async def test_neutral_values_of_every_reserved_field_are_accepted(make):
    admission = make()
    for name, values in NEUTRAL_VALUES.items():
        for value in (None, *values):
            await admission.admit("r", wanting(reserved={name: value}))
    await admission.admit("r", wanting(reserved={"typical_p": 1.0, "best_of": 3}, n=3))


async def test_the_last_token_of_the_context_can_be_asked_for(make):
    admission = make()
    assert (await only(admission, TextPrompt("x" * 255))).ends.output_tokens_max == 1
    assert (await only(admission, max_tokens=254)).ends.output_tokens_max == 254


@pytest.mark.parametrize("seed", range(20))
async def test_any_mixture_of_values_is_admitted_whole_or_refused_by_name(make, seed):
    """Nothing but a RequestError leaves admission, and what is admitted fits the wire's types."""
    random, admission = Random(seed), make(scheduling=PRIORITY)
    numbers = (0, 1, -1, 2, 0.5, 1e-9, 99, 1e30, NAN, INF, -INF, 10**30)
    whole = [number for number in numbers if isinstance(number, int)]
    blamed = []
    for _ in range(40):
        reals = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        fields = {name: random.choice(numbers) for name in reals if random.random() < 0.2}
        integers = ("top_k", "n", "seed", "min_tokens", "max_tokens", "top_tokens", "priority")
        fields |= {name: random.choice(whole) for name in integers if random.random() < 0.2}
        if random.random() < 0.2:
            fields["logit_bias"] = {random.choice(whole): random.choice(numbers)}
        try:
            admitted = await admission.admit("r", wanting(**fields))
        except InvalidRequest as error:
            blamed.append((error.field, set(fields) | {"top_logprobs"}))
            continue
        for choice in admitted.choices:
            sampling = choice.request.sampling
            assert 0 <= sampling.top_k < 2**31
            assert 0 <= sampling.min_tokens <= choice.ends.output_tokens_max < CONTEXT_TOKENS
            assert 0 <= sampling.seed < 2**64
            assert sampling.temperature == 0 or 1e-5 <= sampling.temperature <= 100
    assert blamed
    assert all(field in sent for field, sent in blamed)
