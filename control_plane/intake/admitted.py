"""A checked call: one record for the core per choice, with what ends each answer.

Admission --Admitted--> Generation, servers
"""

from dataclasses import dataclass

from control_plane.intake.stop_matcher import StopStrings
from control_plane.request import Request


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends an answer: one of `stop_ids`, one of `stop_strings`, or `output_tokens_max`.

    min_tokens: neither an id nor a string ends it before it has so many tokens.
    output_tokens_max: by the client and the context; the core may have a lower one.
    """

    stop_ids: frozenset[int]
    stop_strings: StopStrings
    min_tokens: int
    output_tokens_max: int


@dataclass(frozen=True, slots=True)
class AdmittedChoice:
    """One choice of a call.

    index: over all choices, prompt by prompt. prompt_index: which of the prompts it continues.
    request: its record for the core; max_tokens 0 where nothing is to be drawn. Of the choices of a
    prompt that is to be scored only the first has prompt_top_tokens; its scores are those of all.
    prompt_text: what an echo puts before the answer; None unless it was asked for.
    """

    index: int
    prompt_index: int
    request: Request
    ends: Ends
    prompt_text: str | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A checked call. request_id: the client's. seed: of all choices, drawn if none was sent."""

    request_id: str
    seed: int
    choices: tuple[AdmittedChoice, ...]
