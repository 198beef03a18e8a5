"""Fields of the protocols that are not honoured yet: refused by name, never silently ignored.

A value that changes nothing (tool_choice = "none") is accepted, since many clients send it.
"""

import reprlib
from collections.abc import Mapping

from control_plane.errors import InvalidRequest

NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    # drawing
    "typical_p": (1,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "best_of": (1,),
    "use_beam_search": (False,),
    # shape of the answer
    "include_stop_str_in_output": (False,),
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
    # models
    "adapter": (0,),
}


def refuse_reserved(values: Mapping[str, object], choices_count: int) -> None:
    """Raises InvalidRequest for the first reserved field that asks for something.

    choices_count: of each prompt; as many candidates as choices leave nothing to pick.
    """
    for name, value in values.items():
        neutral_values = NEUTRAL_VALUES[name]
        if name == "best_of":
            neutral_values = tuple(dict.fromkeys((*neutral_values, choices_count)))
        if value is None or any(_same(value, neutral) for neutral in neutral_values):
            continue
        accepted = " or ".join(map(repr, neutral_values))
        raise InvalidRequest(
            f"{name}: {reprlib.repr(value)} is not supported yet; leave it out"
            + (f" or send {accepted}" if accepted else ""),
            field=name,
        )


def _same(value: object, neutral: object) -> bool:
    """Equality without Python's True == 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
