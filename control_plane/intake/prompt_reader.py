"""Prompts of a call to token ids, their lengths checked before anything looks at what is in them.

Admission --prompts--> PromptReader --texts--> TokenizerPool
"""

from control_plane.errors import InvalidRequest
from control_plane.intake.field_checks import check_ids, field_of
from control_plane.intake.generation_input import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from control_plane.intake.loop_turns import LoopTurns
from control_plane.intake.model_card import ModelCard
from control_plane.intake.shown import shown
from control_plane.intake.tokenizer import Tokenizer
from control_plane.intake.tokenizer_pool import TokenizerJob, TokenizerPool

LONG_LIST_IDS = 1 << 14
"""The loop gets a turn after so many ids: looking at them takes about half a millisecond."""

Ids = tuple[int, ...]


class PromptReader:
    """For the event loop's thread; everything that takes long is done in the pool."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer, pool: TokenizerPool) -> None:
        self._card = card
        self._tokenizer = tokenizer
        self._pool = pool
        self._turns = LoopTurns(LONG_LIST_IDS)

    def check(self, prompts: tuple[Prompt, ...]) -> None:
        """What can be said without looking at every id or character. Raises InvalidRequest."""
        if not prompts:
            raise InvalidRequest(
                "prompt: is missing; send at least one token of input", field="prompt"
            )
        for index, prompt in enumerate(prompts):
            label = label_of(prompts, index)
            if not _length(prompt):
                raise _empty(label)
            if isinstance(prompt, TokenPrompt):
                self.check_length(len(prompt.token_ids), label)

    async def check_lists(self, label: str, lists: tuple[Ids, ...]) -> None:
        """Lists of ids that are no longer than the context. Raises InvalidRequest."""
        for token_ids in lists:
            check_ids(label, token_ids, self._card.vocabulary_size)
            await self._turns.did(len(token_ids))

    async def read(self, prompts: tuple[Prompt, ...]) -> list[Ids]:
        """The ids of every prompt, all at once as far as there are threads; raises RequestError."""
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, TokenPrompt):
                await self.check_lists(label_of(prompts, index), (prompt.token_ids,))
        jobs: list[TokenizerJob[Ids] | Ids] = []
        read: list[Ids] = []
        try:
            jobs.extend(map(self._begin, prompts))
            for index, job in enumerate(jobs):
                token_ids = await job.result() if isinstance(job, TokenizerJob) else job
                label = label_of(prompts, index)
                if not token_ids:
                    raise _empty(label)
                self.check_length(len(token_ids), label)
                await self._check_known(label, token_ids)
                read.append(token_ids)
        finally:
            for job in jobs:
                if isinstance(job, TokenizerJob):
                    job.abandon()
        return read

    async def texts(self, prompts: tuple[Prompt, ...], prompts_ids: list[Ids]) -> list[str]:
        """What an echo shows of every prompt; raises QueueFull."""
        return [
            prompt.text
            if isinstance(prompt, TextPrompt)
            else await self._pool.decode(token_ids).result()
            for prompt, token_ids in zip(prompts, prompts_ids, strict=True)
        ]

    def check_length(self, tokens_count: int, label: str) -> None:
        """Raises InvalidRequest if no token of output fits behind so many."""
        context_tokens = self._card.context_tokens
        if tokens_count >= context_tokens:
            raise no_room_for_output(label, tokens_count, context_tokens)

    async def _check_known(self, label: str, token_ids: Ids) -> None:
        """Some tokenizers have more tokens than the model. Raises InvalidRequest."""
        size = self._card.vocabulary_size
        if self._tokenizer.size <= size:
            return
        token_id = max(token_ids)
        if token_id >= size:
            text = self._tokenizer.token_bytes(token_id).decode(errors="replace")
            raise InvalidRequest(
                f"{label}: its text {shown(text)} is token {token_id}, "
                f"which the model does not have: its ids go from 0 to {size - 1}; leave that text "
                "out",
                field=field_of(label),
            )
        await self._turns.did(len(token_ids))

    def _begin(self, prompt: Prompt) -> TokenizerJob[Ids] | Ids:
        match prompt:
            case TextPrompt(text=text):
                return self._pool.encode(text)
            case ChatPrompt(messages=messages):
                return self._pool.encode_chat(messages)
            case TokenPrompt(token_ids=token_ids):
                return token_ids


def _length(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt(text=text):
            return len(text)
        case ChatPrompt(messages=messages):
            return len(messages)
        case TokenPrompt(token_ids=token_ids):
            return len(token_ids)


def label_of(prompts: tuple[Prompt, ...], index: int) -> str:
    """What a message calls a prompt: the client's field, and which of several it is."""
    name = "messages" if isinstance(prompts[index], ChatPrompt) else "prompt"
    return name if len(prompts) == 1 else f"{name}[{index}]"


def no_room_for_output(label: str, tokens_count: int, context_tokens: int) -> InvalidRequest:
    """What is said of a prompt of so many tokens."""
    return InvalidRequest(
        f"{label}: {tokens_count} tokens leave no room for output in the context of "
        f"{context_tokens} tokens; send at most {context_tokens - 1}",
        field=field_of(label),
    )


def _empty(label: str) -> InvalidRequest:
    what = "one message" if label == "messages" else "one token of input"
    return InvalidRequest(f"{label}: is empty; send at least {what}", field=field_of(label))
