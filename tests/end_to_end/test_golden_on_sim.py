"""Golden cases on simulated chips: the same token ids, alone and as a group of two.

Nothing above the backends differs from the run on cpu; what the chips do comes late, in their own
order, through kernels and collectives of another make.
"""

import pytest

from tests.end_to_end.cluster import Clusters
from tests.end_to_end.generation import request_of
from tests.golden.cases import golden_cases

CASES = 1
CASES_LONG = 6
LOGPROB_TOLERANCE = 1e-3


@pytest.mark.end_to_end
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_golden_cases(clusters: Clusters, size: int, long_run: bool) -> None:
    client = clusters.client("--backend", "sim", "--groups", str(size), "--dtype", "float32")
    assert {worker.backend for worker in client.status().workers} == {"sim"}
    # The shortest first: a simulated chip takes its time.
    cases = sorted(
        golden_cases(), key=lambda case: len(case.prompt_ids) + 20 * len(case.output_ids)
    )
    for case in cases[: CASES_LONG if long_run else CASES]:
        answer = client.generate(request_of(case.prompt_ids, len(case.output_ids)))
        assert tuple(answer.ids) == case.output_ids, case.name
        for ours, theirs in zip(answer.logprobs, case.logprobs, strict=True):
            assert abs(ours - theirs) < LOGPROB_TOLERANCE, case.name
