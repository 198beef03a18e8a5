"""LM08: a kernel's real batch limit is below the configured one and shows only at full concurrency.

Here a chip reports the limit when it starts: its group runs no more requests at once than that,
says so, and the request beyond it waits its turn.
"""

import time
from functools import partial

import pytest

from tests.fakes.field_models import Chain, FieldModel
from tests.field.field_cluster import ClusterSpec, FieldCluster, together

pytestmark = pytest.mark.end_to_end

LIMIT = 8
TOKENS = 48
PROMPTS = ("a", "b c", "the quick brown fox", "over the lazy dog", "x", "y z", "here", "some", "E")


def spec_of(running_max: int) -> ClusterSpec:
    options = ("--backend", "sim", "--backend-option", f"decode-rows-max={LIMIT}")
    options += ("--backend-option", "pace=off", "--kv-blocks", "128")
    return ClusterSpec(FieldModel(Chain()), (*options, "--max-running", str(running_max)))


ALLOWED, BEYOND = spec_of(LIMIT), spec_of(8 * LIMIT)


@pytest.mark.parametrize(
    "field",
    [
        pytest.param(ALLOWED, id=str(LIMIT), marks=pytest.mark.long),
        pytest.param(BEYOND, id=str(8 * LIMIT)),
    ],
    indirect=True,
)
def test_as_many_run_as_the_chip_takes_and_one_more_waits(field: FieldCluster) -> None:
    pids = field.worker_pids()
    prompts = [field.ids_of(text) for text in PROMPTS]
    assert len(prompts) == LIMIT + 1
    calls = [
        partial(field.ask, "grpc", prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in prompts
    ]
    (running, waiting), *answers = together(partial(watch_running, field), *calls)
    assert running == LIMIT
    assert waiting, "the ninth waits"
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == field.script(prompt[-1], TOKENS)
    assert field.worker_pids() == pids, "no worker was started again"
    assert bool(clamped(field)) is (field.spec is BEYOND)


def watch_running(field: FieldCluster) -> tuple[int, int]:
    """The most requests that ran and that waited, until none is left."""
    running = waiting = 0
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        (group,) = field.status().groups
        running, waiting = max(running, group.running), max(waiting, group.waiting)
        if running and not (group.running or group.waiting):
            break
    return running, waiting


def clamped(field: FieldCluster) -> list[dict[str, object]]:
    """The warnings about it: chip, limit and setting are named."""
    records = field.cluster.logged("group.rows_clamped")
    for record in records:
        assert record["level"] == "warning"
        assert (record["worker"], record["rows_max"]) == ("chip0", LIMIT)
        assert record["setting"] == "--max-running"
    return records
