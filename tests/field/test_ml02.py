"""ML02: a checkpoint has no output head, it stays random, and every answer is noise.

Here a model that ties its head to the embedding uses that, and one that does not is refused.
"""

from pathlib import Path

import pytest
import torch

from chip_worker.errors import ModelError
from chip_worker.shard_loader import ShardLoader
from tests.fakes.checkpoints import TinyLlama, write_gguf, write_hugging_face
from tests.fakes.compute_group import ComputeGroup
from tests.fakes.dense_llama import dense_logits
from tests.fakes.reference_models import MODELS
from tests.fakes.sequence_scores import sequence_logprobs

IDS = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38]
TIED, UNTIED = TinyLlama(), TinyLlama(tied=False)
HEAD = "lm_head.weight"


def assert_gives(path: str, model: TinyLlama) -> None:
    found = sequence_logprobs(ComputeGroup.open(path).form(), IDS, model.vocabulary, 32)
    expected = dense_logits(model, model.tensors(), IDS).log_softmax(dim=-1)[:-1]
    assert torch.allclose(found.double(), expected, atol=1e-3)


@pytest.mark.parametrize("write", [write_hugging_face, write_gguf])
def test_a_tied_model_without_a_head_uses_the_embedding(tmp_path: Path, write) -> None:
    assert_gives(write(tmp_path / "model", TIED), TIED)


@pytest.mark.parametrize("write", [write_hugging_face, write_gguf])
def test_an_untied_model_uses_its_head(tmp_path: Path, write) -> None:
    assert_gives(write(tmp_path / "model", UNTIED), UNTIED)


@pytest.mark.parametrize("flag", [False, None])
def test_an_untied_model_without_a_head_is_refused(tmp_path: Path, flag: bool | None) -> None:
    """An absent flag is false, as transformers has it for this architecture."""
    changes = {"tie_word_embeddings": flag}
    path = write_hugging_face(tmp_path, UNTIED, config_changes=changes, without=(HEAD,))
    with pytest.raises(ModelError, match=rf"{HEAD} is missing and tie_word_embeddings is not set"):
        ShardLoader(path)


def test_an_architecture_that_always_ties_needs_no_flag() -> None:
    model = MODELS["gemma3"]
    assert "tie_word_embeddings" not in model.config
    group = ComputeGroup.open(str(model.path)).form()
    found = sequence_logprobs(group, model.ids, 83, 32)
    assert torch.allclose(found, model.logprobs()[:-1], atol=1e-3)
