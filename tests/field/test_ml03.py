"""ML03: variants of config.json are misread: explicit head sizes, scaled rotary embeddings.

Every kind of scaling, under the names of old and new versions, with heads of a size that does not
follow from the model's and one key/value head: equal to transformers or refused by name.
"""

from pathlib import Path

import pytest

from chip_worker.errors import ModelError
from chip_worker.shard_loader import ShardLoader
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup
from tests.fakes.reference_models import ORIGINAL, ROPES
from tests.fakes.sequence_scores import sequence_logprobs

PLACES = (1, ORIGINAL - 1, ORIGINAL + 1)
"""Positions; the context that the model was trained with ends between the last two."""


@pytest.mark.parametrize("name", ROPES)
def test_scaled_positions_are_those_of_transformers(name: str) -> None:
    model = ROPES[name]
    assert model.config["head_dim"] != 48 // 6
    assert model.config["num_key_value_heads"] == 1
    group = ComputeGroup.open(str(model.path)).form()
    expected = model.logprobs()
    found = sequence_logprobs(group, model.ids, expected.shape[1], 32)
    differences = (found - expected[:-1]).abs().amax(dim=-1)
    for place in PLACES:
        assert differences[place] < 1e-3, f"at position {place}"
    assert differences.max() < 1e-3


def test_kinds_are_told_apart() -> None:
    """The comparison would notice one kind computed as another."""
    kinds = {name.removesuffix("-new"): model for name, model in ROPES.items() if "-new" in name}
    plain = kinds.pop("default").logprobs()
    for name, model in kinds.items():
        assert model.seed == ROPES["default-new"].seed
        assert (model.logprobs() - plain)[ORIGINAL + 1].abs().max() > 0.01, name


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("kind", "says"),
    [("dynamic", "no key could be cached"), ("fancy", "unknown rotary embedding 'fancy'; known: ")],
)
def test_other_kinds_are_refused_by_name(
    tmp_path: Path, field: str, key: str, kind: str, says: str
) -> None:
    changes = {field: {key: kind, "factor": 2.0}}
    path = write_hugging_face(tmp_path, TinyLlama(), config_changes=changes)
    with pytest.raises(ModelError, match=says):
        ShardLoader(path)
