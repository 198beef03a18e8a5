"""ML01: a shard named in the index is missing or cut short, and the model serves garbage.

Here every tensor the model needs is looked for before a chip is touched: the start fails and names
the file or the tensor. A weight file that the index does not name is ignored.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from chip_worker.errors import ModelError
from chip_worker.shard_loader import ShardLoader
from tests.fakes.checkpoints import TinyLlama, write_gguf, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, token_ids
from tests.fakes.field_models import FieldModel
from tests.field.refused_starts import refused_start

FILES = 3
SECOND = "model-00002-of-00003.safetensors"
CUT_BYTES = 1024
LOST = "model.layers.1.mlp.up_proj.weight"
PROMPT = [3, 141, 59, 26, 5, 35]


def delete_shard(path: Path) -> str:
    (path / SECOND).unlink()
    return SECOND


def cut_shard(path: Path) -> str:
    content = (path / SECOND).read_bytes()
    (path / SECOND).write_bytes(content[:-CUT_BYTES])
    return SECOND


def cut_to_nothing(path: Path) -> str:
    (path / SECOND).write_bytes(b"")
    return SECOND


def without_lost(path: Path) -> Path:
    """Drops the tensor from its file; returns the file."""
    index = json.loads((path / "model.safetensors.index.json").read_text())
    file = path / index["weight_map"][LOST]
    tensors = load_file(file)
    del tensors[LOST]
    save_file(tensors, file)
    return file


def drop_tensor(path: Path) -> str:
    return f"{without_lost(path).name}: tensor {LOST}"


def drop_tensor_and_entry(path: Path) -> str:
    """Even the index does not know of it."""
    without_lost(path)
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    del index["weight_map"][LOST]
    file.write_text(json.dumps(index))
    return f"tensor {LOST} is missing"


DAMAGES = (delete_shard, cut_shard, cut_to_nothing, drop_tensor, drop_tensor_and_entry)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    path = write_hugging_face(tmp_path, TinyLlama(), files_count=FILES)
    named = damage(tmp_path)
    with pytest.raises(ModelError) as refused:
        ShardLoader(path)
    assert named in str(refused.value)


@pytest.mark.parametrize("kept", [0.99, 0.5, 0.02, 0.001])
def test_a_gguf_cut_short_is_refused_by_name(tmp_path: Path, kept: float) -> None:
    """In its tensors, its tensor table, its metadata."""
    path = Path(write_gguf(tmp_path / "model.gguf", TinyLlama()))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelError, match=r"model\.gguf: .*cut short"):
        ShardLoader(str(path))


def test_a_shard_that_the_index_does_not_name_is_ignored(tmp_path: Path) -> None:
    path = write_hugging_face(tmp_path, TinyLlama(), files_count=FILES)
    expected = token_ids(ComputeGroup.open(path).form().generate(PROMPT, 8))
    other = TinyLlama(seed=9).tensors()
    save_file(other, tmp_path / "model-00004-of-00004.safetensors")
    assert token_ids(ComputeGroup.open(path).form().generate(PROMPT, 8)) == expected


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    "damage",
    [
        cut_shard,
        *(pytest.param(each, marks=pytest.mark.long) for each in (delete_shard, drop_tensor)),
    ],
)
def test_a_service_on_it_ends_and_is_never_ready(
    tmp_path: Path, damage: Callable[[Path], str]
) -> None:
    model = FieldModel()
    path = tmp_path / "model"
    model.write(path)
    (path / "model.safetensors").unlink()
    sharded(path, model.tensors())
    named = damage(path)
    said = refused_start(path, tmp_path, "--groups", "1")
    assert named in said
    assert "MODEL_FAILED" in said


def sharded(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    weight_map: dict[str, str] = {}
    for number in range(FILES):
        name = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        part = {each: tensors[each] for each in sorted(tensors)[number::FILES]}
        save_file(part, path / name)
        weight_map |= dict.fromkeys(part, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
