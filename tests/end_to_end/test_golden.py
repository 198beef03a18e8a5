"""Golden cases over real processes: same token ids, log-probabilities within 1e-3.

Four settings may matter: tensor-parallel size, chunk size, prefix cache, and company in the batch.
The ordinary run takes every case once, spread over nine combinations in which every pair of values
of any two settings occurs; the long run takes the whole product on six cases. Goal: whatever way a
prompt is computed, the answer is the reference's.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

import pytest

from protos import inference_pb2
from tests.end_to_end.cluster import Clusters
from tests.end_to_end.generation import Client, Generation, request_of
from tests.golden.cases import GoldenCase, golden_cases

LOGPROB_TOLERANCE = 1e-3
CHIPS = (1, 2, 3)
CHUNKS = (16, 512)
CACHES = ("cold", "warm", "off")
COMPANY = (0, 15)
PRODUCT_CASES_STEP = 5
"""Every fifth case: four short prompts, a conversation and the longest prompt."""


@dataclass(frozen=True)
class Combination:
    """One way to compute a case."""

    chips: int
    chunk: int
    cache: str
    company: int

    def __str__(self) -> str:
        return f"tp{self.chips}-chunk{self.chunk}-{self.cache}-{1 + self.company}of"

    def options(self) -> tuple[str, ...]:
        """Options of the cluster; cold and warm share one."""
        return (
            *("--groups", str(self.chips), "--dtype", "float32"),
            *("--chunk-tokens", str(self.chunk)),
            *(("--prefix-cache", "off") if self.cache == "off" else ()),
        )


# What is not off is on the services of other tests where it can be: one and two chips, chunk 512.
COVERING_SET = (
    Combination(1, 512, "cold", 0),
    Combination(1, 512, "warm", 15),
    Combination(1, 16, "off", 0),
    Combination(2, 512, "cold", 15),
    Combination(2, 512, "warm", 0),
    Combination(2, 16, "off", 15),
    Combination(3, 16, "cold", 0),
    Combination(3, 16, "warm", 15),
    Combination(3, 512, "off", 0),
)

PRODUCT = tuple(itertools.starmap(Combination, itertools.product(CHIPS, CHUNKS, CACHES, COMPANY)))


def on_their_services(combinations: Iterable[Combination]) -> list[object]:
    """Parameters that the tests' order knows the services of."""
    return [
        pytest.param(each, marks=pytest.mark.service(*each.options()), id=str(each))
        for each in combinations
    ]


def test_covering_set_holds_every_pair() -> None:
    values = [CHIPS, CHUNKS, CACHES, COMPANY]
    rows = [astuple(combination) for combination in COVERING_SET]
    for first, second in itertools.combinations(range(len(values)), 2):
        wanted = set(itertools.product(values[first], values[second]))
        assert {(row[first], row[second]) for row in rows} == wanted


@pytest.mark.end_to_end
@pytest.mark.parametrize("combination", on_their_services(COVERING_SET))
def test_every_case_once(
    combination: Combination, clusters: Clusters, record_property: Callable[[str, object], None]
) -> None:
    cases = golden_cases()
    assert len(cases) == 28
    place = COVERING_SET.index(combination)
    chosen = cases[place :: len(COVERING_SET)]
    # For docs/verification.md: pytest --junitxml shows it.
    record_property("worst_logprob_difference", check_cases(chosen, combination, clusters))


@pytest.mark.end_to_end
@pytest.mark.long
@pytest.mark.parametrize("combination", on_their_services(PRODUCT))
def test_product_on_six_cases(
    combination: Combination, clusters: Clusters, record_property: Callable[[str, object], None]
) -> None:
    chosen = golden_cases()[::PRODUCT_CASES_STEP]
    assert len(chosen) == 6
    record_property("worst_logprob_difference", check_cases(chosen, combination, clusters))


def check_cases(cases: list[GoldenCase], combination: Combination, clusters: Clusters) -> float:
    """Fails on the first difference; returns the largest difference of log-probabilities."""
    largest = 0.0
    client = clusters.client(*combination.options())
    if combination.cache == "cold":
        client.flush()
    if combination.cache == "warm":
        for case in cases:
            client.generate(request_of(case.prompt_ids, 1))
    block = client.status().groups[0].block_tokens
    for case, answer in zip(cases, run(cases, combination.company, client), strict=True):
        assert tuple(answer.prompt_ids) == case.prompt_ids, case.name
        assert tuple(answer.ids) == case.output_ids, case.name
        worst = max(
            abs(ours - theirs) for ours, theirs in zip(answer.logprobs, case.logprobs, strict=True)
        )
        assert worst < LOGPROB_TOLERANCE, f"{case.name}: log-probability off by {worst}"
        largest = max(largest, worst)
        assert answer.usage is not None
        whole_blocks = (len(case.prompt_ids) - 1) // block * block
        if combination.cache == "warm":
            assert answer.usage.cached_tokens == whole_blocks
        if combination.cache == "off":
            assert answer.usage.cached_tokens == 0
    return largest


def run(cases: list[GoldenCase], company: int, client: Client) -> list[Generation]:
    """The cases' answers, each computed alone or beside `company` others, the cases among them."""
    requests = [asked(case) for case in cases]
    if not company:
        return [client.generate(request) for request in requests]
    others = [other for other in golden_cases() if other not in cases]
    requests += [
        request_of(other.prompt_ids[:100], 24 + number % 7)
        for number, other in enumerate(others[: company + 1 - len(cases)])
    ]
    return client.generate_all(requests)[: len(cases)]


def asked(case: GoldenCase) -> inference_pb2.GenerateRequest:
    prompt = case.prompt if case.chat and case.prompt is not None else case.prompt_ids
    return request_of(prompt, len(case.output_ids))
