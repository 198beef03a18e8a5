"""One chip against two and three on the same weights: logits, distributions and greedy text."""

import numpy as np
import pytest

from tests.end_to_end.cluster import Clusters
from tests.end_to_end.generation import Client
from tests.golden.cases import golden_cases

COSINE_MIN = 0.9999
TOTAL_VARIATION_MAX = 1e-4
GREEDY_TOKENS = 12
OPTIONS = ("--groups", "1,2,3", "--dtype", "float32", "--debug-api")


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def greedy(client: Client, prompt: tuple[int, ...], group: str) -> list[int]:
    ids = list(prompt)
    for _ in range(GREEDY_TOKENS):
        ids.append(int(np.argmax(client.logits(ids, group))))
    return ids[len(prompt) :]


@pytest.mark.end_to_end
def test_one_chip_against_two_and_three(clusters: Clusters) -> None:
    client = clusters.client(*OPTIONS)
    for case in golden_cases()[::9]:
        one = np.array(client.logits(case.prompt_ids, "g0"), dtype=np.float64)
        for group in ("g1", "g2"):
            several = np.array(client.logits(case.prompt_ids, group), dtype=np.float64)
            cosine = one @ several / np.linalg.norm(one) / np.linalg.norm(several)
            assert cosine > COSINE_MIN, (case.name, group)
            total_variation = np.abs(softmax(one) - softmax(several)).sum() / 2
            assert total_variation < TOTAL_VARIATION_MAX, (case.name, group)
    prompt = golden_cases()[0].prompt_ids
    texts = {group: greedy(client, prompt, group) for group in ("g0", "g1", "g2")}
    assert texts["g0"] == texts["g1"] == texts["g2"]
    assert texts["g0"] == list(golden_cases()[0].output_ids[:GREEDY_TOKENS])
