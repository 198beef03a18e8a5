"""The workloads W1 to W4: what is sent, how much of it at once, and in which order."""

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random

import anyio
from typing_extensions import override

from scripts.workloads.prompts import Prompt, PromptMaker
from scripts.workloads.streaming import Answer, Endpoint, RequestFailed, complete


@dataclass(frozen=True)
class Outcome:
    """What one workload came to. answers: those its figures are of, in the order they ended.

    long: in W4 the answer to the long prompt, which is not among `answers`.
    """

    answers: Sequence[Answer]
    duration_s: float
    long: Answer | None = None


@dataclass(frozen=True)
class Workload(ABC):
    """One kind of load; sizes in tokens."""

    name: str
    prompt_tokens: int
    output_tokens: int

    @property
    @abstractmethod
    def requests(self) -> int:
        """How many requests it sends."""

    @property
    @abstractmethod
    def context_tokens(self) -> int:
        """Tokens of its longest prompt and answer together, without a start token."""

    @abstractmethod
    async def run(
        self, endpoint: Endpoint, maker: PromptMaker, random: Random, on_answer: Callable[[], None]
    ) -> Outcome:
        """Sends it. on_answer: called after each answer. Raises RequestFailed, at the first."""


@dataclass(frozen=True)
class Batch(Workload):
    """Equal requests, so many at once; when one is answered the next is sent.

    prefix_tokens: words all prompts begin with, before the prompt_tokens of their own.
    """

    requests_count: int
    at_once: int
    prefix_tokens: int = 0

    @property
    @override
    def requests(self) -> int:
        return self.requests_count

    @property
    @override
    def context_tokens(self) -> int:
        return self.prefix_tokens + self.prompt_tokens + self.output_tokens

    @override
    async def run(
        self, endpoint: Endpoint, maker: PromptMaker, random: Random, on_answer: Callable[[], None]
    ) -> Outcome:
        prefix = maker.words(self.prefix_tokens, random)
        prompts = iter(
            [
                maker.prompt([*prefix, *maker.words(self.prompt_tokens, random)])
                for _ in range(self.requests_count)
            ]
        )
        answers: list[Answer] = []

        async def client() -> None:
            for prompt in prompts:
                answers.append(await complete(endpoint, prompt, self.output_tokens))
                on_answer()

        started_s = time.perf_counter()
        await _together([client] * self.at_once)
        return Outcome(answers, time.perf_counter() - started_s)


@dataclass(frozen=True)
class Interruption(Workload):
    """Requests are being decoded when one long prompt arrives.

    chunks_before: chunks each of them has got by then.
    """

    decoders_count: int
    chunks_before: int
    long_prompt_tokens: int
    long_output_tokens: int

    @property
    @override
    def requests(self) -> int:
        return self.decoders_count + 1

    @property
    @override
    def context_tokens(self) -> int:
        return self.long_prompt_tokens + self.long_output_tokens

    @override
    async def run(
        self, endpoint: Endpoint, maker: PromptMaker, random: Random, on_answer: Callable[[], None]
    ) -> Outcome:
        prompts = [
            maker.prompt(maker.words(self.prompt_tokens, random))
            for _ in range(self.decoders_count)
        ]
        long_prompt = maker.prompt(maker.words(self.long_prompt_tokens, random))
        decoding = [anyio.Event() for _ in prompts]
        answers: list[Answer] = []
        long_answers: list[Answer] = []

        def decoder(prompt: Prompt, event: anyio.Event) -> Callable[[], Awaitable[None]]:
            async def decode() -> None:
                def on_chunk(count: int) -> None:
                    if count == self.chunks_before:
                        event.set()

                answers.append(await complete(endpoint, prompt, self.output_tokens, on_chunk))
                event.set()  # an answer may have had fewer
                on_answer()

            return decode

        async def interrupt() -> None:
            for event in decoding:
                await event.wait()
            long_answers.append(await complete(endpoint, long_prompt, self.long_output_tokens))
            on_answer()

        started_s = time.perf_counter()
        await _together([*map(decoder, prompts, decoding), interrupt])
        return Outcome(answers, time.perf_counter() - started_s, long_answers[0])


async def _together(clients: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """All of them at once; the first failure ends the others and is raised as it is."""
    failures: list[RequestFailed] = []
    async with anyio.create_task_group() as tasks:

        async def guarded(client: Callable[[], Awaitable[None]]) -> None:
            try:
                await client()
            except RequestFailed as error:
                failures.append(error)
                tasks.cancel_scope.cancel()

        for client in clients:
            tasks.start_soon(guarded, client)
    if failures:
        raise failures[0]


def _by_name(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


WORKLOADS = _by_name(
    Batch("W1", 128, 128, requests_count=4, at_once=1),
    Batch("W2", 256, 128, requests_count=64, at_once=16),
    Batch("W3", 64, 64, requests_count=64, at_once=16, prefix_tokens=512),
    Interruption(
        "W4",
        32,
        256,
        decoders_count=8,
        chunks_before=16,
        long_prompt_tokens=3500,
        long_output_tokens=16,
    ),
)
QUICK_WORKLOADS = _by_name(
    Batch("W1", 16, 16, requests_count=1, at_once=1),
    Batch("W2", 32, 16, requests_count=8, at_once=4),
    Batch("W3", 8, 8, requests_count=8, at_once=4, prefix_tokens=64),
    Interruption(
        "W4",
        8,
        32,
        decoders_count=2,
        chunks_before=4,
        long_prompt_tokens=350,
        long_output_tokens=4,
    ),
)
"""About a hundredth of the work, to see whether everything answers."""
WARM_UP: tuple[Workload, ...] = (
    Batch("warm-up", 40, 16, requests_count=1, at_once=1),
    Batch("warm-up", 60, 8, requests_count=16, at_once=16),
)
