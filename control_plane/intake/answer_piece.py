"""What an answer hands to a server, piece by piece."""

from dataclasses import dataclass

from control_plane.request import FinishReason
from control_plane.scheduling.messages import PromptDelta, TopTokens


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts and facts of a finished generation, all choices together; see protos/inference.proto.

    Every prompt counts once, however many choices it has.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    group_id: str
    failovers: int
    retractions: int
    seed: int


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What came of one choice since its piece before.

    choice: index over all choices, prompt by prompt. first_index: output index of token_ids[0].
    text: whole characters only, nothing that may yet become a stop string, and without the text
    that ended the answer. texts: the part of it that came with each token, so that a piece may be
    cut anywhere; without tokens, `text` is what those before held back. logprobs, tops: one a token
    if asked for, else empty. prompt_deltas: scores of the prompt, all of them before the first
    token; only with the first choice of each prompt. finish_reason: set in the last piece of the
    choice. usage: set in the last piece of all.
    """

    choice: int
    first_index: int
    token_ids: tuple[int, ...]
    text: str
    texts: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[TopTokens, ...] = ()
    prompt_deltas: tuple[PromptDelta, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
