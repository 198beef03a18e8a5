"""The range of every field a client may send, but for its prompts; the same for both protocols."""

from collections.abc import Sequence

from control_plane.config import ControlPlaneConfig
from control_plane.errors import InvalidRequest
from control_plane.intake.generation_input import GenerationInput
from control_plane.request import Sampling

TEMPERATURE_MAX = 100.0
TEMPERATURE_GREEDY_BELOW = 9.999999747378752e-06
"""0.00001 as a float32, which is what gRPC carries. Dividing by less overflows; the choice is the
greedy one anyway."""
PENALTY_MAX = 2.0
REPETITION_PENALTY_MIN = 9.999999974752427e-07
"""0.000001 as a float32, for the same two reasons."""
REPETITION_PENALTY_MAX = 100.0
LOGIT_BIAS_MAX = 100.0
SEED_MAX = (1 << 64) - 1
PRIORITY_MAX = (1 << 31) - 1
CACHE_SALT_CHARACTERS_MAX = 256


class FieldChecks:
    """Every method raises InvalidRequest naming the field, the limit and the remedy."""

    def __init__(self, config: ControlPlaneConfig, vocabulary_size: int) -> None:
        self._config = config
        self._vocabulary_size = vocabulary_size

    # ---------------------------------------------------------------- lengths

    def check_lengths(self, wanted: GenerationInput) -> None:
        """max_tokens and min_tokens, as far as the prompt does not matter."""
        max_tokens, min_tokens = wanted.max_tokens, wanted.min_tokens
        if max_tokens is not None and max_tokens < 0:
            remedy = "leave it out for as many as fit"
            raise outside("max_tokens", max_tokens, "at least 1", remedy)
        if max_tokens == 0 and not (wanted.echo or wanted.prompt_top_tokens is not None):
            raise InvalidRequest(
                "max_tokens: 0 is below 1; leave it out for as many as fit, or ask for echo or "
                "prompt_logprobs to have only the prompt looked at",
                field="max_tokens",
            )
        if min_tokens is not None and min_tokens < 0:
            raise outside("min_tokens", min_tokens, "at least 0", "leave it out for none")
        if max_tokens is not None and (min_tokens or 0) > max_tokens:
            raise InvalidRequest(
                f"min_tokens: {short(min_tokens or 0)} is more than max_tokens, {max_tokens}; send "
                "a lower one or raise max_tokens",
                field="min_tokens",
            )

    # ---------------------------------------------------------------- drawing

    def seed(self, seed: int | None) -> int | None:
        """The seed, if one was sent."""
        if seed is not None and not 0 <= seed <= SEED_MAX:
            raise outside(
                "seed", seed, f"between 0 and {SEED_MAX}", "leave it out for a random one"
            )
        return seed

    def sampling(self, wanted: GenerationInput, seed: int, stop_ids: frozenset[int]) -> Sampling:
        """How tokens are drawn, of choice 0."""
        temperature = _real(
            "temperature",
            wanted.temperature,
            1.0,
            (0.0, TEMPERATURE_MAX),
            "send 0 for the likeliest token, 1 for the model's own distribution",
        )
        penalties = (-PENALTY_MAX, PENALTY_MAX)
        none = "leave it out or send 0 for none"
        min_tokens = wanted.min_tokens or 0
        if min_tokens and len(stop_ids) >= self._vocabulary_size:
            raise InvalidRequest(
                f"min_tokens: all {self._vocabulary_size} tokens end the answer, and none may come "
                f"before it has {short(min_tokens)}; send fewer stop_token_ids or no min_tokens",
                field="min_tokens",
            )
        return Sampling(
            temperature=0.0 if temperature < TEMPERATURE_GREEDY_BELOW else temperature,
            seed=seed,
            top_k=self._top_k(wanted.top_k),
            top_p=_real("top_p", wanted.top_p, 1.0, (0.0, 1.0), "leave it out or send 1 for all"),
            min_p=_real("min_p", wanted.min_p, 0.0, (0.0, 1.0), "leave it out or send 0 for all"),
            presence_penalty=_real(
                "presence_penalty", wanted.presence_penalty, 0.0, penalties, none
            ),
            frequency_penalty=_real(
                "frequency_penalty", wanted.frequency_penalty, 0.0, penalties, none
            ),
            repetition_penalty=_real(
                "repetition_penalty",
                wanted.repetition_penalty,
                1.0,
                (REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX),
                "leave it out or send 1 for none",
            ),
            logit_bias=self._logit_bias(wanted),
            suppressed_ids=tuple(sorted(stop_ids)) if min_tokens else (),
            min_tokens=min_tokens,
        )

    def _top_k(self, top_k: int | None) -> int:
        if top_k is None:
            return 0
        if top_k < -1:
            raise outside("top_k", top_k, "-1 or more", "leave it out or send 0 or -1 for all")
        return top_k if 0 < top_k < self._vocabulary_size else 0

    def _logit_bias(self, wanted: GenerationInput) -> tuple[tuple[int, float], ...]:
        bias_max = self._config.logit_bias_max
        if len(wanted.logit_bias) > bias_max:
            raise _too_many("logit_bias", f"{len(wanted.logit_bias)} token ids", bias_max)
        check_ids("logit_bias", tuple(wanted.logit_bias), self._vocabulary_size)
        limits = (-LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)
        remedy = "leave it out for none"
        return tuple(
            (token_id, _real("logit_bias", bias, 0.0, limits, remedy))
            for token_id, bias in sorted(wanted.logit_bias.items())
        )

    # ---------------------------------------------------------------- ends

    def check_stops(self, wanted: GenerationInput) -> None:
        """Stop strings and stop token ids."""
        config = self._config
        if len(wanted.stop) > config.stop_strings_max:
            raise _too_many("stop", f"{len(wanted.stop)} strings", config.stop_strings_max)
        for string in wanted.stop:
            if not string:
                raise InvalidRequest(
                    "stop: an empty string would end every answer at once; send strings of at "
                    "least one character, or none",
                    field="stop",
                )
            if len(string) > config.stop_string_characters_max:
                raise InvalidRequest(
                    f"stop: a string of {len(string)} characters is longer than "
                    f"{config.stop_string_characters_max}; send a shorter one",
                    field="stop",
                )
        ids_count, ids_max = len(wanted.stop_token_ids), config.stop_token_ids_max
        if ids_count > ids_max:
            raise _too_many("stop_token_ids", f"{ids_count} ids", ids_max)
        check_ids("stop_token_ids", wanted.stop_token_ids, self._vocabulary_size)

    # ---------------------------------------------------------------- log-probabilities

    def prompt_top_tokens(self, wanted: GenerationInput) -> int | None:
        """Alternatives at each place of the prompt; None if it is not scored."""
        self._check_tops("top_logprobs", wanted.top_tokens)
        self._check_tops("prompt_logprobs", wanted.prompt_top_tokens)
        if wanted.top_tokens and not wanted.logprobs:
            raise InvalidRequest(
                f"top_logprobs: {wanted.top_tokens} likeliest tokens come only with logprobs; ask "
                "for logprobs too, or leave it out",
                field="top_logprobs",
            )
        if not (wanted.echo and wanted.logprobs):
            return wanted.prompt_top_tokens
        return max(wanted.top_tokens or 0, wanted.prompt_top_tokens or 0)

    def _check_tops(self, name: str, count: int | None) -> None:
        tops_max = self._config.top_logprobs_max
        if count is not None and not 0 <= count <= tops_max:
            raise outside(name, count, f"between 0 and {tops_max}", "send fewer or leave it out")

    # ---------------------------------------------------------------- scheduling

    def check_scheduling(self, wanted: GenerationInput) -> None:
        """priority and cache_salt."""
        priority, salt = wanted.priority or 0, wanted.cache_salt
        if priority and self._config.scheduling.policy != "priority":
            raise InvalidRequest(
                f"priority: {short(priority)} has no meaning here, since the service does not run "
                "with --policy priority; leave it out or send 0",
                field="priority",
            )
        if abs(priority) > PRIORITY_MAX:
            raise outside(
                "priority", priority, f"between {-PRIORITY_MAX} and {PRIORITY_MAX}", "send 0"
            )
        if len(salt) > CACHE_SALT_CHARACTERS_MAX:
            raise _too_many("cache_salt", f"{len(salt)} characters", CACHE_SALT_CHARACTERS_MAX)
        if any("\ud800" <= character <= "\udfff" for character in salt):
            raise InvalidRequest(
                "cache_salt: not valid Unicode; send characters, not halves of them",
                field="cache_salt",
            )


def check_ids(label: str, token_ids: Sequence[int], vocabulary_size: int) -> None:
    """Raises InvalidRequest if an id does not exist. The cost is that of looking at each."""
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidRequest(
                f"{label}: token id {short(token_id)} is outside the vocabulary; ids go from 0 to "
                f"{vocabulary_size - 1}",
                field=field_of(label),
            )


def field_of(label: str) -> str:
    """The field of a label such as prompt[2]."""
    return label.partition("[")[0]


def short(number: int) -> str:
    """A number for people; one of thousands of digits only by its size."""
    bits = number.bit_length()
    return str(number) if bits <= 128 else f"a number of {bits} bits"


def outside(name: str, value: int, wanted: str, remedy: str) -> InvalidRequest:
    """The error of a number that is not what was `wanted`."""
    return InvalidRequest(f"{name}: {short(value)} is not {wanted}; {remedy}", field=name)


def _real(
    name: str, value: float | None, default: float, limits: tuple[float, float], remedy: str
) -> float:
    """A number within limits; not-a-number is within none."""
    if value is None:
        return default
    lowest, highest = limits
    # A number of hundreds of digits cannot become a float, but it can be compared.
    if not lowest <= value <= highest:
        shown = short(value) if isinstance(value, int) else f"{value}"
        raise InvalidRequest(
            f"{name}: {shown} is not between {lowest:g} and {highest:g}; {remedy}", field=name
        )
    return float(value)


def _too_many(name: str, what: str, most: int) -> InvalidRequest:
    remedy = "send fewer" if most else "none may be sent here: leave it out"
    return InvalidRequest(f"{name}: {what} are more than {most}; {remedy}", field=name)
