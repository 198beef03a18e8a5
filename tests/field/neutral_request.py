"""Random requests as both protocols can say them: drawn once, then sent over HTTP and gRPC."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from tests.fakes.field_tokenizers import SIZE, SPECIAL_TEXTS, FieldTokenizer
from tests.field.field_cluster import CONTEXT

Messages = tuple[Mapping[str, str], ...]
Prompt = str | tuple[int, ...] | Messages
"""A text, token ids, or a conversation."""

CHOICES_MAX = 4
"""Of one request: sixteen at a time mostly fit the queue."""
TOKENS_MAX = 10
UINT32_MAX = (1 << 32) - 1
INT32_MAX = (1 << 31) - 1
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, -0.0, 1e-12, 1e-6, 1e-5, 1e-4, 0.1, 0.7, 1.0, 1.2, 2.0, 99.9, 100.0),
    "top_k": (-1, 0, 1, 2, 40, SIZE - 1, SIZE, SIZE + 1, INT32_MAX),
    "top_p": (0.0, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0),
    "min_p": (0.0, 1e-6, 0.05, 0.5, 1.0),
    "presence_penalty": (-2.0, -0.5, 0.0, 0.3, 2.0),
    "frequency_penalty": (-2.0, -0.5, 0.0, 0.3, 2.0),
    "repetition_penalty": (1e-6, 0.5, 1.0, 1.1, 100.0),
    "seed": (0, 1, 7, (1 << 53) + 1, (1 << 63), (1 << 64) - 1),
    "ignore_eos": (True, False),
    "logprobs": (True, False),
    "priority": (0,),
    "cache_salt": ("", "a", "tenant 1", "x" * 256, "\U0001f600"),
    "model": ("", "default"),
    "adapter": (0,),
}
"""Values that are fine, at the limits too, of fields that go with all others."""
WRONG: dict[str, tuple[object, ...]] = {
    "temperature": (-1e-6, -1.0, 100.5, 1e30, *NOT_FINITE),
    "top_k": (-2, -INT32_MAX - 1),
    "top_p": (-0.1, 1.001, *NOT_FINITE),
    "min_p": (-0.1, 1.001, *NOT_FINITE),
    "presence_penalty": (-2.01, 2.01, *NOT_FINITE),
    "frequency_penalty": (-2.01, 2.01, *NOT_FINITE),
    "repetition_penalty": (0.0, -1.0, 9e-7, 100.5, *NOT_FINITE),
    "logit_bias": (
        *({SIZE: 1.0}, {UINT32_MAX: 1.0}, {5: 100.5}, {5: -1e9}),
        *({5: each} for each in NOT_FINITE),
        dict.fromkeys(range(1025), 0.0),
    ),
    "stop": ([""], ["a", ""], ["x" * 257], ["x"] * 17),
    "stop_token_ids": ([SIZE], [5, UINT32_MAX], [5] * 65),
    "n": (0, 129, UINT32_MAX),
    "max_tokens": (CONTEXT, UINT32_MAX),
    "top_logprobs": (21, UINT32_MAX),
    "prompt_logprobs": (21, UINT32_MAX),
    "priority": (1, -1, INT32_MAX, -INT32_MAX - 1),
    "cache_salt": ("x" * 257,),
    "model": ("gpt-unknown", "x" * 1000, " default", "\U0001f600"),
    "adapter": (1, UINT32_MAX),
}
"""Values that are refused whatever else is asked."""
WRONG_TEXTS: tuple[str, ...] = ("", "the" * 10 * CONTEXT)
WRONG_IDS: tuple[tuple[int, ...], ...] = (
    *((), (SIZE,), (5, UINT32_MAX), (5,) * CONTEXT, (5,) * (CONTEXT + 1), (5,) * 5000),
)
WRONG_CHATS: tuple[Messages, ...] = ((), ({"role": "user", "content": "the" * 10 * CONTEXT},))
WORDS = (
    *("the", " quick", " brown", " fox", " jumps", "\n", "  ", "!", "stop", "ing", "e", "\x00"),
    *("你", "好", "é", "\U0001f44d", "\u202e", "<|end|>", "<|special|>", "<|start|>"),
)


@dataclass(frozen=True)
class NeutralRequest:
    """number: what it was drawn from. fields: by gRPC's names; absent ones are not sent.

    prompts: over gRPC each is a call of its own. echo: the prompt comes before the answer, which
    only HTTP can do. wrong: fields at fault; with none of them it must be answered.
    """

    number: int
    is_chat: bool
    prompts: tuple[Prompt, ...]
    fields: Mapping[str, Any]
    echo: bool = False
    wrong: frozenset[str] = frozenset()

    @property
    def choices_count(self) -> int:
        """Of each prompt."""
        return int(self.fields.get("n", 1))

    @property
    def logprobs(self) -> bool:
        """Log-probabilities of the output are asked for."""
        return bool(self.fields.get("logprobs"))

    @property
    def top_logprobs(self) -> int:
        """Alternatives at each place of the output."""
        return int(self.fields.get("top_logprobs", 0))

    @property
    def prompt_logprobs(self) -> int | None:
        """Alternatives at each place of the prompt; None if it is not to be scored."""
        return self.fields.get("prompt_logprobs")

    @property
    def echoes_logprobs(self) -> bool:
        """Those of the prompt come with the echo."""
        return self.echo and self.logprobs

    def spoiled(self, fault: str, **fields: Any) -> "NeutralRequest":
        """The same with a mistake."""
        return replace(self, fields={**self.fields, **fields}, wrong=self.wrong | {fault})


def draw_request(number: int, random: Random, tokenizer: FieldTokenizer) -> NeutralRequest:
    """Three of four are fine; the others have a mistake, some of them two."""
    request = draw_fine(number, random, tokenizer)
    if random.random() < 0.75:
        return request
    # A mistake of the prompt is found before or after others, as it is one of several or not.
    spoil = random.choice((spoil_field, spoil_field, spoil_field, spoil_prompt, spoil_relation))
    request = spoil(request, random)
    if spoil is spoil_field and random.random() < 0.2:
        request = spoil_field(request, random)
    return request


# ---------------------------------------------------------------- what is fine


def draw_fine(number: int, random: Random, tokenizer: FieldTokenizer) -> NeutralRequest:
    """A request that must be answered, and whose tokens are determined."""
    prompts, is_chat = draw_prompts(random)
    fields: dict[str, Any] = {
        name: random.choice(values) for name, values in NEUTRAL.items() if random.random() < 0.3
    }
    if "seed" not in fields and fields.get("temperature", 1) >= 1e-6:
        fields["seed"] = random.getrandbits(random.choice((8, 53, 64)))
    for name, chance, drawn in (
        ("logit_bias", 0.2, draw_bias),
        ("stop", 0.3, draw_stop),
        ("stop_token_ids", 0.2, draw_stop_ids),
    ):
        if random.random() < chance:
            fields[name] = drawn(random)
    if random.random() < 0.3:
        fields["n"] = random.randint(1, CHOICES_MAX // len(prompts))
    echo = not is_chat and random.random() < 0.2
    if random.random() < 0.2:
        fields["prompt_logprobs"] = random.choice((0, 1, 5, 20))
    if fields.get("logprobs") and random.random() < 0.5:
        fields["top_logprobs"] = random.choice((0, 1, 2, 19, 20))
    longest = max(tokens_count(prompt, tokenizer) for prompt in prompts)
    draw_lengths(fields, random, CONTEXT - longest, may_be_none=echo or "prompt_logprobs" in fields)
    return NeutralRequest(number, is_chat, prompts, fields, echo)


def draw_prompts(random: Random) -> tuple[tuple[Prompt, ...], bool]:
    """Prompts of one kind, and whether it is a conversation."""
    kind = random.choice(("text", "ids", "chat", "chat", "texts", "lists"))
    if kind == "chat":
        return (draw_chat(random),), True
    draw: Callable[[Random], Prompt] = draw_ids if kind in ("ids", "lists") else draw_text
    count = random.randint(2, CHOICES_MAX) if kind in ("texts", "lists") else 1
    return tuple(draw(random) for _ in range(count)), False


def draw_text(random: Random) -> str:
    """At most 120 tokens."""
    return "".join(random.choices(WORDS, k=random.choice((1, 3, 10, 30))))


def draw_ids(random: Random) -> tuple[int, ...]:
    """Rarely up to the longest prompt there may be."""
    count = random.choice((1, 2, 15, 16, 17, 33)) if random.random() < 0.97 else CONTEXT - 1
    # Few beginnings, so that some are in the cache.
    beginning = [5 + random.randrange(2)] * count if random.random() < 0.5 else []
    return tuple(beginning[: count // 2] + random.choices(range(SIZE), k=count))[-count:]


def draw_chat(random: Random) -> Messages:
    """One to three messages; the template takes every role."""
    roles = ("user", "assistant", "system", "", "tool", "\U0001f600")
    return tuple(
        {"role": random.choice(roles), "content": draw_text(random)[: random.choice((0, 20))]}
        for _ in range(random.randint(1, 3))
    )


def draw_bias(random: Random) -> dict[int, float]:
    """Half of it at the limits."""
    count = random.choice((0, 1, 3, SIZE))
    ids = random.sample(range(SIZE), count)
    return {each: random.choice((-100.0, 100.0, random.uniform(-5, 5))) for each in ids}


def draw_stop(random: Random) -> list[str]:
    """Up to the most there may be; some of them likely in a text, some names of special tokens."""
    strings = [
        *WORDS,
        *SPECIAL_TEXTS,
        "".join(random.choices("etaoin shrdlu", k=random.randint(1, 3))),
        chr(random.choice((0xFFFD, 0x7F, 0xE9, 0x1F44D))),
        "x" * 256,
    ]
    return random.choices(strings, k=random.choice((0, 1, 2, 16)))


def draw_stop_ids(random: Random) -> list[int]:
    """Up to the most there may be."""
    return random.choices(range(SIZE), k=random.choice((0, 1, 3, 64)))


def draw_lengths(fields: dict[str, Any], random: Random, room: int, *, may_be_none: bool) -> None:
    """max_tokens and min_tokens; room: tokens behind the longest prompt."""
    share = random.random()
    if share < 0.1 and may_be_none:
        fields["max_tokens"] = 0
    elif share < 0.97:
        fields["max_tokens"] = min(room, random.randint(1, TOKENS_MAX))
    elif share < 0.98:
        fields["max_tokens"] = room
    most = fields.get("max_tokens", TOKENS_MAX)
    if random.random() < 0.2:
        fields["min_tokens"] = random.choice((0, most // 2, most))


def tokens_count(prompt: Prompt, tokenizer: FieldTokenizer) -> int:
    """Tokens of the prompt; most that it may have, for a conversation."""
    if isinstance(prompt, str):
        return len(tokenizer.encode(prompt))
    if not any(isinstance(each, Mapping) for each in prompt):
        return len(prompt)
    text = "".join(f"{each['role']}: {each['content']}\n" for each in prompt)
    return 20 + 2 * len(prompt) + len(text.encode())


# ---------------------------------------------------------------- what is not


def spoil_field(request: NeutralRequest, random: Random) -> NeutralRequest:
    """One field is beyond its limits."""
    name = random.choice(sorted(WRONG))
    fields = {name: random.choice(WRONG[name])}
    if name == "top_logprobs":
        fields["logprobs"] = True
    return request.spoiled(name, **fields)


def spoil_prompt(request: NeutralRequest, random: Random) -> NeutralRequest:
    """One of the prompts is empty, too long or has ids that do not exist."""
    index = random.randrange(len(request.prompts))
    wrong: Prompt
    if request.is_chat:
        wrong = random.choice(WRONG_CHATS)
    elif isinstance(request.prompts[index], str):
        wrong = random.choice(WRONG_TEXTS)
    else:
        wrong = random.choice(WRONG_IDS)
    prompts = (*request.prompts[:index], wrong, *request.prompts[index + 1 :])
    return replace(request.spoiled("messages" if request.is_chat else "prompt"), prompts=prompts)


def spoil_relation(request: NeutralRequest, random: Random) -> NeutralRequest:
    """Two fields do not go together."""
    case = random.choice(("min above max", "nothing asked", "tops alone"))
    if case == "min above max":
        least = random.choice((4, UINT32_MAX))
        return request.spoiled("min_tokens", max_tokens=3, min_tokens=least)
    if case == "tops alone" and request.is_chat:
        tops = random.choice((1, 20))
        return request.spoiled("top_logprobs", logprobs=False, top_logprobs=tops)
    fields = {name: value for name, value in request.fields.items() if name != "prompt_logprobs"}
    request = replace(request, fields=fields, echo=False)
    return request.spoiled("max_tokens", max_tokens=0, min_tokens=0)
