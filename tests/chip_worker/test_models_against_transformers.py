"""Every architecture gives the log-probabilities of transformers, however text and model are cut.

Text goes through in chunks, across borders of blocks, and is longer than the window of models that
have one, whose blocks behind it are given back meanwhile.
"""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from chip_worker.kv_groups import model_kv_groups
from chip_worker.models.registry import find_model
from chip_worker.tensor_parallel import KV_POLICIES
from chip_worker.weights import open_checkpoint
from tests.fakes.compute_group import ComputeGroup
from tests.fakes.gguf_models import write_gguf_model
from tests.fakes.reference_models import MODELS, WINDOW
from tests.fakes.sequence_scores import sequence_logprobs

CLOSE = 1e-3
# As GGUF files have them; the others have windows, or scales, that the format cannot express.
IN_GGUF = ("llama", "llama-biased", "qwen2-plain", "qwen3-plain", "gemma3-new")
# Chips, policy, chunk: of blocks of 4, across them, all at once.
GROUPS = ((1, "cover", 7), (2, "replicate", 5), (3, "shard", 8), (3, "cover", 32))


def kv_heads(model):
    return int(model.config["num_key_value_heads"])


def assert_agrees(path, model, chips, policy, chunk):
    group = ComputeGroup.open(str(path), chips).form(kv_policy=policy)
    expected = model.logprobs()
    found = sequence_logprobs(group, model.ids, expected.shape[1], chunk)
    worst = (found - expected[:-1]).abs().max()
    assert worst < CLOSE, f"{model.name}: log-probabilities differ by {worst}"


def cases():
    return [
        pytest.param(name, *group, id=f"{name}-{group[0]}-{group[1]}-{group[2]}")
        for name, model in MODELS.items()
        for group in GROUPS
        if group[1] != "shard" or group[0] <= kv_heads(model)
    ]


@pytest.mark.parametrize(("name", "chips", "policy", "chunk"), cases())
def test_a_directory_agrees(name, chips, policy, chunk):
    assert_agrees(MODELS[name].path, MODELS[name], chips, policy, chunk)


@pytest.mark.parametrize("chips", [1, 2])
@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_agrees(name, chips, tmp_path):
    path = write_gguf_model(tmp_path / "model.gguf", MODELS[name])
    assert_agrees(path, MODELS[name], chips, "cover", 7)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", KV_POLICIES)
@pytest.mark.parametrize("chips", [1, 2, 3, 5])
def test_every_model_agrees_in_every_group(name, policy, chips):
    most = kv_heads(MODELS[name]) if policy == "shard" else 6
    for chunk in (1, 3, 4, 7, 32):
        if chips <= most:
            assert_agrees(MODELS[name].path, MODELS[name], chips, policy, chunk)


def test_windows_are_where_the_configuration_says():
    def windows(name):
        _, config = find_model(open_checkpoint(str(MODELS[name].path)))
        groups = model_kv_groups(config)
        return [groups.windows[place.group] for place in groups.places]

    assert windows("llama") == [0, 0, 0]
    assert windows("mistral") == [WINDOW] * 3
    assert windows("qwen2") == [0, 0, WINDOW]
    assert windows("qwen2-plain") == [0, 0, 0]
    assert windows("qwen3") == [WINDOW, 0, WINDOW]
    assert windows("gemma3") == [WINDOW, WINDOW, 0, WINDOW, WINDOW]
    assert windows("gemma3-new") == [WINDOW] * 5 + [0, WINDOW]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_part_of_a_model_with_images_agrees(prefix, tmp_path):
    """As older checkpoints of Gemma 3 and those of transformers 5 are laid out."""
    model = MODELS["gemma3"]
    outer = {"model_type": "gemma3", "text_config": model.config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = {}
    for part in model.path.glob("*.safetensors"):
        tensors |= load_file(part)
    renamed = {prefix + name.removeprefix("model."): each for name, each in tensors.items()}
    other = next(iter(tensors.values()))
    tower = {"vision_tower.vision_model.encoder.layers.0.layer_norm1.weight": other.clone()}
    save_file(renamed | tower, tmp_path / "model.safetensors")
    assert_agrees(tmp_path, model, 1, "cover", 32)


def test_a_head_of_its_own_is_used_though_the_configuration_ties_it(tmp_path):
    """Files that hold both mean both, as transformers has it."""
    model = MODELS["mistral"]
    shutil.copytree(model.path, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(model.config | {"tie_word_embeddings": True}))
    assert_agrees(tmp_path / "model", model, 2, "cover", 32)


def test_scores_are_bounded_where_the_configuration_says_so(tmp_path):
    """transformers has this field for Gemma 3 and does not use it, so this compares chips."""
    model = MODELS["gemma3"]
    for part in model.path.glob("*.safetensors*"):
        (tmp_path / part.name).symlink_to(part)

    def logprobs(cap, chips=1):
        changed = model.config | {"attn_logit_softcapping": cap}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        group = ComputeGroup.open(str(tmp_path), chips).form()
        return sequence_logprobs(group, model.ids, 83, 7)

    bounded = logprobs(0.5)
    assert (logprobs(1e6) - model.logprobs()[:-1]).abs().max() < CLOSE
    assert (bounded - model.logprobs()[:-1]).abs().max() > 100 * CLOSE
    assert (logprobs(0.5, chips=3) - bounded).abs().max() < CLOSE
