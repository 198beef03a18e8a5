"""Random requests, sixteen at a time, over both protocols: valid ones, wrong ones, noise, leavers.

The same request means the same on both: the same refusal, or the same answer. Nothing makes the
service fail, hang or leak. A failure prints the numbers of the requests; `--seed N` sends one
alone.
"""

import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

import grpc
import httpx
import pytest

from protos import inference_pb2
from tests.fakes.dense_llama import dense_logits
from tests.fakes.field_models import FieldModel, Mix
from tests.fakes.field_tokenizers import SIZE
from tests.field.alike import check_alike, parted
from tests.field.exchange import (
    Outcome,
    grpc_message,
    http_body,
    over_grpc,
    over_http,
    patiently,
)
from tests.field.field_cluster import LOGPROB_TOLERANCE, FieldCluster
from tests.field.near_ties import is_near_tie
from tests.field.neutral_request import NeutralRequest, draw_request
from tests.field.rough_clients import leave, send_grpc_noise, send_http_noise
from tests.field.scrape import scrape
from tests.field.shared_specs import MIX

pytestmark = pytest.mark.end_to_end

CLUSTER = MIX
COUNT = 10_000
AT_A_TIME = 16
SHOWN_PROBLEMS = 5
FAILURES = "request_failures"
EXPECTED_FAILURES = {
    *("INVALID_REQUEST", "MODEL_NOT_FOUND", "QUEUE_FULL", "CANCELLED", "DEADLINE_EXCEEDED"),
}
KINDS = {"compared": 80, "http noise": 7, "grpc noise": 5, "leaving": 8}


def test_no_request_breaks_anything(
    field: FieldCluster, counted: Callable[[int], int], only_seed: int | None
) -> None:
    field.check_alive()
    pids = field.worker_pids()
    numbers = range(counted(COUNT)) if only_seed is None else [only_seed]
    sender = Sender(field)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        problems = [problem for problem in pool.map(sender.play, numbers) if problem is not None]
    assert not problems, f"{len(problems)} problems; the first:\n" + "\n\n".join(
        problems[:SHOWN_PROBLEMS]
    )
    field.check_idle()
    seen = scrape(field)
    seen.check_reconciled()
    for name in ("open", "running", "waiting", "held"):
        assert seen.total(f"num_requests_{name}") == 0, name
    failures = {key[1]: count for key, count in seen.values.items() if key[0] == FAILURES}
    unexpected = {reason for reason, count in failures.items() if count} - EXPECTED_FAILURES
    assert not unexpected
    assert "Traceback" not in field.cluster.logs()
    assert field.worker_pids() == pids
    field.check_alive()


def test_near_ties_are_told_from_faults() -> None:
    """Tokens 2i and 2i + 1 always have equal logits; no others are near the best."""
    model = FieldModel(Mix(tied=True))
    prompt, output = [5, 9, 200], [17]
    logits = dense_logits(model.shape, model.tensors(), [*prompt, *output])[-1]
    best = int(logits[0::2].argmax()) * 2
    known = (prompt, output)
    for sampling in ({"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.0}):
        assert is_near_tie(model, sampling, 0, known, {best, best + 1})
        assert not is_near_tie(model, sampling, 0, known, {best, (best + 2) % SIZE})
    pushed = {"temperature": 0.0, "logit_bias": {best: 1e-3}}
    assert not is_near_tie(model, pushed, 0, known, {best, best + 1})


def said_by(error: Exception) -> str:
    """The message, and the line it came from, which may be all it says."""
    lines = traceback.format_exception(error, limit=-1, chain=False)
    return "".join(lines)[-2500:]


class Sender:
    """Plays requests by their numbers, whatever their kind; any thread may."""

    def __init__(self, field: FieldCluster) -> None:
        self._field = field
        self._problems_count = 0

    def play(self, number: int) -> str | None:
        """What was wrong with it, or None; nothing is sent once enough was wrong."""
        if self._problems_count >= SHOWN_PROBLEMS:
            return None
        random = Random(number)
        (kind,) = random.choices(list(KINDS), list(KINDS.values()))
        try:
            match kind:
                case "compared":
                    self._compare(number, random)
                case "http noise":
                    send_http_noise(self._field, number, random)
                case "grpc noise":
                    send_grpc_noise(self._field, number, random)
                case _:
                    leave(self._field, number, random)
        except (AssertionError, httpx.HTTPError, grpc.RpcError, ValueError, KeyError) as error:
            self._problems_count += 1
            return f"request {number}, {kind}: {said_by(error)}"
        return None

    # ------------------------------------------------------------ the same over both

    def _compare(self, number: int, random: Random) -> None:
        request = draw_request(number, random, self._field.tokenizer)
        try:
            self._send_both(request, random)
        except (AssertionError, httpx.HTTPError) as error:
            raise AssertionError(f"{str(request)[:2000]}\n{said_by(error)}") from error

    def _send_both(self, request: NeutralRequest, random: Random) -> None:
        field = self._field
        path, body = http_body(request, random)
        messages = [grpc_message(field, request, prompt) for prompt in request.prompts]
        if random.random() < 0.5:
            for index, message in enumerate(messages):
                message.request_id = f"{request.number} é{'x' * (20 * index)}"
        tries = [lambda: over_http(field, request, path, body)]
        tries += [lambda each=each: over_grpc(field, request, each) for each in messages]
        order = random.sample(range(len(tries)), len(tries))
        outcomes = {index: patiently(tries[index]) for index in order}
        http, *calls = (outcomes[index] for index in range(len(tries)))
        check_alike(field, request, http, calls)
        if request.prompt_logprobs is None and not (request.echo or calls[0].refused):
            self._resume(request, random, messages[0], calls[0])

    def _resume(
        self,
        request: NeutralRequest,
        random: Random,
        message: inference_pb2.GenerateRequest,
        whole: Outcome,
    ) -> None:
        """Whoever has the beginning, after any message, gets the rest."""
        assert whole.usage is not None
        message.sampling.seed = whole.usage[2]
        marks = [random.choice(choice.marks) for choice in whole.choices]
        for choice, (ids_count, _) in zip(whole.choices, marks, strict=True):
            message.resume_output_ids.add(ids=(choice.ids or [])[:ids_count])
        rest = patiently(lambda: over_grpc(self._field, request, message))
        assert rest.refused is None, f"resuming: {rest.refused}"
        tied = False
        for index, (choice, expected) in enumerate(zip(rest.choices, whole.choices, strict=True)):
            ids_count, characters_count = marks[index]
            ids = expected.ids or []
            resumed = ids[:ids_count] + (choice.ids or [])
            if parted(self._field, request, index, whole.prompt_ids, (resumed, ids)):
                tied = True
                continue
            assert choice.text == expected.text[characters_count:], f"resumed {choice}, {expected}"
            assert choice.finish == expected.finish
            assert choice.logprobs == pytest.approx(
                expected.logprobs[ids_count:], abs=LOGPROB_TOLERANCE
            )
        assert tied or rest.usage == whole.usage
