"""SP04: parameters are accepted and then ignored: bias, penalties, min_tokens beside a stop string.

Here each does what it says, checked against a few lines of reference. min_tokens holds back end
tokens, stop tokens and stop strings alike: none ends an answer before it has so many tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

import grpc
import pytest
import torch

from tests.fakes.field_tokenizers import END, TURN_END
from tests.field.answers import Refused
from tests.field.field_cluster import PROTOCOLS, FieldCluster
from tests.field.shared_specs import ENDLESS_CHAIN, ENDS_CHAIN

pytestmark = pytest.mark.end_to_end

CLUSTER = ENDS_CHAIN
ON_ENDLESS = pytest.mark.parametrize("field", [ENDLESS_CHAIN], ids=["endless"], indirect=True)
TIE = 1e-3


@dataclass
class Reference:
    """What a greedy draw from a Chain must choose: bias, penalties, ends held back, largest.

    held_back: ids that may not come before there are min_tokens tokens.
    """

    bias: dict[int, float] = dataclass_field(default_factory=dict)
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    held_back: tuple[int, ...] = ()
    min_tokens: int = 0

    def check(self, field: FieldCluster, prompt_ids: Sequence[int], ids: Sequence[int]) -> None:
        """Every id has the largest adjusted logit after those before it, or is tied with it."""
        tensors = field.spec.model.tensors()
        embeddings = tensors["model.embed_tokens.weight"].double()
        head = tensors["lm_head.weight"].double()
        for index, token_id in enumerate(ids):
            known = [*prompt_ids, *ids[:index]]
            hidden = embeddings[known[-1]]
            logits = head @ (hidden / hidden.pow(2).mean().add(1e-5).sqrt())
            adjusted = self._adjusted(logits, known, ids[:index])
            best = int(adjusted.argmax())
            assert adjusted[token_id] >= adjusted[best] - TIE, (
                f"token {index} is {token_id} instead of {best}"
            )

    def _adjusted(
        self, logits: torch.Tensor, known: Sequence[int], output: Sequence[int]
    ) -> torch.Tensor:
        logits = logits.clone()
        for token_id, value in self.bias.items():
            logits[token_id] += value
        for token_id in set(known):
            rate = self.repetition
            logits[token_id] = (
                logits[token_id] / rate if logits[token_id] > 0 else (logits[token_id] * rate)
            )
        for token_id in set(output):
            logits[token_id] -= self.presence + self.frequency * output.count(token_id)
        if len(output) < self.min_tokens:
            logits[[*self.held_back]] = -torch.inf
        return logits


# ---------------------------------------------------------------- bias


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_bias_forbids_the_next_token_or_forces_another(
    field: FieldCluster, protocol: str
) -> None:
    letter = field.tokenizer.id_of
    scripted, other = letter(" the"), letter(" dog")
    plain = field.ask(protocol, "A", max_tokens=6)
    assert plain.ids[0] == scripted
    forbidden = field.ask(protocol, "A", max_tokens=6, logit_bias={scripted: -100})
    assert scripted not in forbidden.ids
    Reference(bias={scripted: -100}).check(field, plain.prompt_ids, forbidden.ids)
    forced = field.ask(protocol, "A", max_tokens=6, logit_bias={other: 100})
    assert forced.ids == [other] * 6
    assert forced.text == " dog" * 6
    # The biases of one request are not those of another in the same batch.
    assert field.ask(protocol, "A", max_tokens=6).ids == plain.ids
    ended = field.ask(protocol, "A", max_tokens=6, logit_bias={END: 100})
    assert (ended.ids, ended.text, ended.finish) == ([END], "", "stop")


# ---------------------------------------------------------------- penalties


@ON_ENDLESS
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_large_penalty_leaves_a_loop(field: FieldCluster, protocol: str) -> None:
    tokens_count = 48
    x, y = field.tokenizer.ids_of("x", "y")
    loop = [y, x] * (tokens_count // 2)

    def ids(**parameters: object) -> list[int]:
        answer = field.ask(protocol, "x", max_tokens=tokens_count, **parameters)
        assert len(answer.ids) == tokens_count
        return answer.ids

    prompt_ids = field.ids_of("x")
    assert ids() == loop
    # Neither the prompt's tokens nor any of its own again.
    found = ids(repetition_penalty=100.0)
    assert not {x, y} & set(found[1:])
    assert x not in found
    assert len(set(found)) == tokens_count
    Reference(repetition=100.0).check(field, prompt_ids, found)
    # Too small for the first turns of the loop, and larger with each of them.
    found = ids(frequency_penalty=2.0)
    assert found[:20] == loop[:20]
    assert found != loop
    Reference(frequency=2.0).check(field, prompt_ids, found)
    # Once a token is there, however often: too small for this loop.
    assert ids(presence_penalty=2.0) == loop
    assert ids(repetition_penalty=0.5, frequency_penalty=-2.0, presence_penalty=-2.0) == loop


@ON_ENDLESS
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_presence_counts_a_token_once(field: FieldCluster, protocol: str) -> None:
    """A rival is biased to within 1 of "y": one "y" in the answer and it comes first."""
    x, y, rival = field.tokenizer.ids_of("x", "y", "Q")
    tensors = field.spec.model.tensors()
    after_x = tensors["lm_head.weight"] @ tensors["model.embed_tokens.weight"][x]
    bias = {rival: float(after_x[y] - after_x[rival]) - 1.0}
    prompt_ids = field.ids_of("x")
    first_turns = {0.0: [y, x, y, x], 0.5: [y, x, y, x], 1.5: [y, x, rival]}
    for presence, turns in first_turns.items():
        answer = field.ask(protocol, "x", max_tokens=8, logit_bias=bias, presence_penalty=presence)
        assert answer.ids[: len(turns)] == turns
        Reference(bias=bias, presence=presence).check(field, prompt_ids, answer.ids)


# ---------------------------------------------------------------- min_tokens


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("trigger", "at", "ends", "parameters"),
    [
        ("F", 4, (END, TURN_END), {}),
        ("G", 2, (END, TURN_END), {}),
        ("G", 2, (END,), {"ignore_eos": True, "stop_token_ids": [END]}),
        ("G", 2, (END,), {"ignore_eos": True, "stop": ["<|end|>"]}),
    ],
)
def test_min_tokens_holds_back_end_tokens(
    field: FieldCluster,
    protocol: str,
    trigger: str,
    at: int,
    ends: tuple[int, ...],
    parameters: dict[str, Any],
) -> None:
    prompt_ids = field.ids_of(trigger)
    ended = field.ask(protocol, trigger, max_tokens=24, min_tokens=at - 1, **parameters)
    assert (len(ended.ids), ended.finish) == (at, "stop")
    for min_tokens in (at, 20):
        answer = field.ask(protocol, trigger, max_tokens=24, min_tokens=min_tokens, **parameters)
        assert len(answer.ids) > min_tokens
        assert not set(ends) & set(answer.ids[:min_tokens])
        Reference(held_back=ends, min_tokens=min_tokens).check(field, prompt_ids, answer.ids)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("trigger", "stop", "at", "before", "with_it"),
    [("C", "\n\n", 2, " lazy", " lazy\n\n"), ("A", "STOPNOW", 5, " thex", " thexSTOPNOWy")],
)
def test_min_tokens_holds_back_a_stop_string(
    field: FieldCluster,
    protocol: str,
    trigger: str,
    stop: str,
    at: int,
    before: str,
    with_it: str,
) -> None:
    for min_tokens in (0, at):
        answer = field.ask(protocol, trigger, max_tokens=24, min_tokens=min_tokens, stop=[stop])
        assert (answer.text, answer.finish, len(answer.ids)) == (before, "stop", at)
    plain = field.ask(protocol, trigger, max_tokens=24)
    for min_tokens in (at + 1, 20):
        answer = field.ask(protocol, trigger, max_tokens=24, min_tokens=min_tokens, stop=[stop])
        assert answer.ids == plain.ids
        assert answer.text == plain.text
        assert answer.text.startswith(with_it)
        assert answer.finish == "length"


@ON_ENDLESS
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_first_match_that_counts_ends_it(field: FieldCluster, protocol: str) -> None:
    for min_tokens, tokens_count in ((0, 2), (2, 2), (3, 4), (20, 20), (21, 22)):
        answer = field.ask(protocol, "x", max_tokens=40, min_tokens=min_tokens, stop=["yx"])
        assert (len(answer.ids), answer.finish) == (tokens_count, "stop")
        assert answer.text == "yx" * (tokens_count // 2 - 1)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_more_than_there_may_be_is_refused(field: FieldCluster, protocol: str) -> None:
    with pytest.raises(Refused) as caught:
        field.ask(protocol, "A", max_tokens=4, min_tokens=5)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.parameter == "min_tokens"
    assert len(field.ask(protocol, "F", max_tokens=5, min_tokens=5).ids) == 5
