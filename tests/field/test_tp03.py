"""TP03: ranks of one group decide for themselves and part, until a collective hangs.

Here the control plane alone says what is admitted, stopped and evicted, and rank 0 alone draws: the
ranks follow. Every step carries the digest of the slots and blocks there must be after it, which
each rank compares with its own; one that differs ends the epoch.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from kernels import sampling_reference
from protos import admin_pb2
from tests.fakes.dense_llama import dense_logits
from tests.fakes.field_models import FieldModel, Mix
from tests.field.answers import Answer
from tests.field.field_cluster import ClusterSpec, FieldCluster
from tests.field.near_ties import is_near_tie, signed
from tests.field.prompts import random_ids
from tests.field.running_streams import ask_watched

MODEL = FieldModel(Mix(tied=True))
BLOCKS = 16
"""A third of what the requests of all slots would hold in the end."""
CLUSTER = ClusterSpec(
    MODEL,
    (
        *("--groups", "2", "--kv-blocks", str(BLOCKS), "--max-queue", "64"),
        *("--digest-interval", "1"),
    ),
)
REQUESTS = 200
AT_A_TIME = 12
TOKENS_MAX = 100
STOPS = ("the", "er")
STALL_S = 5.0


@pytest.mark.end_to_end
def test_the_ranks_of_a_group_never_part(field: FieldCluster, long_run: bool) -> None:
    field.check_alive()
    before = field.status()
    moments = [time.monotonic()]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        numbers = range(REQUESTS if long_run else REQUESTS // 4)
        watched = list(pool.map(lambda number: ask(field, number), numbers))
    moments += sorted(moment for arrivals, _ in watched for moment in arrivals)
    assert max(later - earlier for earlier, later in pairwise(moments)) < STALL_S

    answers = [answer for _, answer in watched]
    for number, answer in enumerate(answers):
        check_text(field, answer)
        check_drawn(answer, temperature(number))
    assert {answer.finish for answer in answers} == {"stop", "length"}
    assert sum(answer.retractions for answer in answers) > 0, "memory was not tight"
    assert not any(answer.failovers for answer in answers)
    assert identities(field.status()) == identities(before), "an epoch ended"
    assert field.cluster.errors() == []
    field.check_alive()


def temperature(number: int) -> float:
    """Every other request is greedy."""
    return float(number % 2)


def ask(field: FieldCluster, number: int) -> tuple[list[float], Answer]:
    """When the pieces came, and the answer; a seed is the service's to choose."""
    choose = random.Random(f"tp03 {number}")
    shared = random_ids(("tp03 shared", choose.randrange(3)), choose.choice([16, 31, 32]))
    # Ends with a whole character, so that the answer begins with one.
    prompt = [
        *shared,
        *random_ids(("tp03", number), choose.randrange(40)),
        MODEL.tokenizer.id_of("a"),
    ]
    return ask_watched(
        field,
        choose.choice(["http-stream", "grpc"]),
        prompt,
        temperature=temperature(number),
        max_tokens=choose.randrange(TOKENS_MAX // 4, TOKENS_MAX + 1),
        stop=STOPS,
        ignore_eos=True,
    )


def check_text(field: FieldCluster, answer: Answer) -> None:
    """It ends before the first stop string, where one came."""
    whole = field.tokenizer.decode(answer.ids)
    places = [place for place in map(whole.find, STOPS) if place >= 0]
    assert answer.finish == ("stop" if places else "length")
    assert answer.text == whole[: min(places, default=None)]


def check_drawn(answer: Answer, drawn_at: float) -> None:
    """Every token is what the reference draws from the dense logits, except at ties."""
    known = [*answer.prompt_ids, *answer.ids]
    logits = dense_logits(MODEL.shape, MODEL.tensors(), known)
    count = len(answer.ids)
    none = torch.zeros(count, dtype=torch.int64)
    found, _ = sampling_reference.sample(
        logits[len(answer.prompt_ids) - 1 : -1].float(),
        torch.full((count,), drawn_at),
        none + signed(answer.seed),
        none,
        torch.arange(count),
        none,
        torch.ones(count),
        torch.zeros(count),
    )
    sampling = {"temperature": drawn_at, "seed": answer.seed}
    for place, (drawn, expected) in enumerate(zip(answer.ids, found.tolist(), strict=True)):
        tied = drawn == expected or (drawn_at == 0.0 and drawn // 2 == expected // 2)
        before = (answer.prompt_ids, answer.ids[:place])
        assert tied or is_near_tie(MODEL, sampling, 0, before, {drawn, expected})


def identities(status: admin_pb2.GetStatusResponse) -> list[tuple[str, int]]:
    """Epochs of the groups, incarnations of the workers."""
    return [(each.id, each.epoch) for each in status.groups] + [
        (each.id, each.incarnation) for each in status.workers
    ]
