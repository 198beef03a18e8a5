"""Asks the process that measures a model's needs, and reads its answer."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from scripts.planning.needs import Chips, GroupNeeds, ModelNeeds, RankNeeds, Task

PROGRAM = ("-m", "scripts.planning.measuring")
DEADLINE_S = 300.0
"""torch is imported first, which takes a while on a busy machine."""


class NotMeasured(Exception):
    """The process could not open the model or a chip; the text says why."""


def measure_needs(task: Task) -> tuple[ModelNeeds, Chips]:
    """What `scripts.planning.measuring` says of a task; of the chips that they are at hand.

    Raises NotMeasured.
    """
    try:
        done = subprocess.run(
            [sys.executable, *PROGRAM, json.dumps(asdict(task))],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotMeasured(f"no answer in {DEADLINE_S:g} s; it was ended") from error
    if done.returncode != 0 or not done.stdout:
        last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise NotMeasured(f"the process ended with status {done.returncode}: {last}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise NotMeasured(answer["error"])
    chips = Chips(backend=task.backend, count=task.chips_on_host, at_hand=True, **answer["chip"])
    return _model(answer["model"]), chips


def _model(fields: Mapping[str, Any]) -> ModelNeeds:
    groups = tuple(
        GroupNeeds(tuple(each["policies"]), tuple(RankNeeds(**rank) for rank in each["ranks"]))
        for each in fields["groups"]
    )
    lists = {name: tuple(fields[name]) for name in ("kv_windows", "refused")}
    return ModelNeeds(**{**fields, **lists, "groups": groups})
