"""TP01: heads do not divide by the chips of a group; it loads and fails in the first forward.

Here heads are split unevenly, and keys and values copied where that takes it; a group of more chips
than can share the heads is refused when it starts, with the sizes that work.
"""

from pathlib import Path

import pytest

from chip_worker.batch import Fault, FaultKind
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, form_command, open_rank, token_ids
from tests.fakes.dense_llama import dense_greedy
from tests.fakes.field_models import FieldModel, Mix
from tests.field.refused_starts import refused_start

MODEL = TinyLlama(query_heads=8, kv_heads=2, vocabulary=256, tied=False, seed=4)
PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32]
TOKENS = 12


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_hugging_face(tmp_path_factory.mktemp("tp01"), MODEL)


@pytest.mark.parametrize(
    ("chips", "policy"),
    [
        *((chips, "cover") for chips in (1, 2, 3, 4, 8)),
        *((chips, "replicate") for chips in (2, 3, 8)),
        *((chips, "shard") for chips in (1, 2)),
    ],
)
def test_a_group_of_any_size_that_works_answers_as_one_chip(
    path: str, chips: int, policy: str
) -> None:
    group = ComputeGroup.open(path, chips).form(kv_policy=policy)
    found = token_ids(group.generate(PROMPT, TOKENS, chunk=4))
    assert found == dense_greedy(MODEL, MODEL.tensors(), PROMPT, TOKENS)


@pytest.mark.parametrize(
    ("chips", "policy", "says"),
    [
        (9, "cover", "9 chips cannot share 8 query heads (kv policy 'cover'); use 1 to 8 chips"),
        (9, "replicate", "use 1 to 8 chips"),
        (3, "shard", "3 chips cannot share 2 key/value heads (kv policy 'shard'); use 1 to 2"),
        (8, "shard", "use 1 to 2 chips"),
    ],
)
def test_other_sizes_are_refused_with_those_that_work(
    path: str, chips: int, policy: str, says: str
) -> None:
    rank = open_rank(path)
    rank.session.handle(form_command(0, chips, kv_policy=policy))
    assert isinstance(rank.last, Fault)
    assert rank.last.kind is FaultKind.MODEL
    assert says in rank.last.message


@pytest.mark.end_to_end
def test_a_service_of_such_a_group_is_refused_at_once(tmp_path: Path) -> None:
    model = tmp_path / "model"
    FieldModel(Mix()).write(model)
    said = refused_start(model, tmp_path, "--groups", "3", "--kv-policy", "shard")
    assert "3 chips cannot share 2 key/value heads (kv policy 'shard'); use 1 to 2 chips" in said
    assert "worker" not in said, "nothing was started"
