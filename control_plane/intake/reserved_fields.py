"""Fields of the protocols that are not honoured yet: refused by name, never silently ignored.

A value that changes nothing (top_p = 1) is accepted, since many clients send it.
"""

import reprlib
from collections.abc import Mapping

from control_plane.errors import InvalidRequest

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    # filters
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    # penalties and biases
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    # ends
    "stop": ([],),
    "min_tokens": (0,),
    "include_stop_str_in_output": (False,),
    # choices and log-probabilities
    "n": (1,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    # shape of the answer
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "skip_special_tokens": (True,),
    # chat
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    # scheduling
    "priority": (0,),
    "cache_salt": ("",),
    "adapter": (0,),
}


def refuse_reserved(values: Mapping[str, object]) -> None:
    """Raises InvalidRequest for the first reserved field that asks for something."""
    for name, value in values.items():
        if value is None or any(_same(value, neutral) for neutral in NEUTRAL_VALUES[name]):
            continue
        accepted = " or ".join(map(repr, NEUTRAL_VALUES[name]))
        raise InvalidRequest(
            f"{name}: {reprlib.repr(value)} is not supported yet; leave it out"
            + (f" or send {accepted}" if accepted else ""),
            field=name,
        )


def _same(value: object, neutral: object) -> bool:
    """Equality without Python's True == 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
