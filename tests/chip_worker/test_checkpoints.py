"""Weights read back are the weights written, whole or in part, from every file format."""

import gguf
import numpy as np
import pytest
import torch

from chip_worker.errors import ModelError
from chip_worker.gguf_checkpoint import HeaderReader
from chip_worker.models.registry import find_model
from chip_worker.tensor_parallel import plan_shard
from chip_worker.weights import ShardReader, open_checkpoint
from tests.fakes.checkpoints import TinyLlama, write_gguf, write_hugging_face
from tests.fakes.compute_group import open_rank

MODEL = TinyLlama()
QUERY = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(params=["directory", "directory-of-three", "gguf", "gguf-untied"])
def written(request, tmp_path):
    model = TinyLlama(tied=request.param != "gguf-untied")
    if request.param.startswith("gguf"):
        return model, write_gguf(tmp_path / "model.gguf", model)
    count = 3 if request.param == "directory-of-three" else 1
    return model, write_hugging_face(tmp_path, model, files_count=count)


def test_every_tensor_is_read_back_whole(written):
    model, path = written
    checkpoint = open_checkpoint(path)
    for name, tensor in model.tensors().items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor), name
    checkpoint.close()


def test_the_configuration_is_the_same_from_every_format(written):
    model, path = written
    config = open_checkpoint(path).config
    assert (config.query_heads, config.kv_heads, config.head_size) == (6, 2, 8)
    assert (config.hidden_size, config.intermediate_size, config.layers_count) == (32, 96, 2)
    assert (config.vocabulary_size, config.context_tokens) == (197, 128)
    assert config.norm_epsilon == pytest.approx(1e-5)
    assert (config.rope.kind, config.rope.base) == ("default", 10000.0)
    assert config.tied_embeddings is model.tied


def test_parts_are_cut_from_the_whole(written):
    model, path = written
    checkpoint = open_checkpoint(path)
    tensors = model.tensors()
    heads = range(2 * 8, 5 * 8)
    assert torch.equal(checkpoint.read(QUERY, rows=heads), tensors[QUERY][16:40])
    assert torch.equal(checkpoint.read(DOWN, columns=range(5, 71)), tensors[DOWN][:, 5:71])


def test_tensors_outlive_their_checkpoint(written):
    model, path = written
    checkpoint = open_checkpoint(path)
    norm = checkpoint.read("model.norm.weight")
    checkpoint.close()
    assert torch.equal(norm, model.tensors()["model.norm.weight"])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantized_rows_are_dequantized_alone(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", MODEL, kind))
    tensor = MODEL.tensors()["model.embed_tokens.weight"]
    expected = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
    whole = checkpoint.read("model.embed_tokens.weight")
    assert np.array_equal(whole.numpy(), expected)
    part = checkpoint.read("model.embed_tokens.weight", rows=range(7, 111))
    assert np.array_equal(part.numpy(), expected[7:111])


def test_the_quick_reader_agrees_with_the_plain_one(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODEL, gguf.GGMLQuantizationType.Q8_0)
    quick, plain = HeaderReader(path), gguf.GGUFReader(path)
    assert list(quick.fields) == list(plain.fields)
    for name, field in plain.fields.items():
        assert quick.fields[name].types == field.types
        if field.types[:2] != [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING]:
            assert quick.fields[name].contents() == field.contents(), name
    for found, expected in zip(quick.tensors, plain.tensors, strict=True):
        assert (found.name, found.tensor_type) == (expected.name, expected.tensor_type)
        assert found.data_offset == expected.data_offset
        assert np.array_equal(found.data, expected.data)


def load(checkpoint, world_size, rank, dtype=torch.float32):
    device = open_device()
    shard = plan_shard(checkpoint.config, rank, world_size, "cover")
    reader = ShardReader(checkpoint, device, dtype, shard)
    return find_model(checkpoint.config), shard, find_model(checkpoint.config).load(reader)


def open_device():
    class HostDevice:
        def allocate(self, shape, dtype):
            return torch.full(tuple(shape), float("nan"), dtype=dtype)

        def copy(self, source, target):
            assert source.dtype == target.dtype
            target.copy_(source)

    return HostDevice()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_rank_holds_what_was_announced_and_nothing_is_left_unfilled(written, world_size):
    checkpoint = open_checkpoint(written[1])
    for rank in range(world_size):
        model, shard, weights = load(checkpoint, world_size, rank, torch.bfloat16)
        assert weights.bytes_total == 2 * model.weight_elements(checkpoint.config, shard)
        layer = weights.layers[1]
        for tensor in (weights.embedding, layer.attention.query_key_value, layer.mlp.down):
            assert torch.isfinite(tensor).all()


def test_both_formats_give_the_same_digest_only_for_themselves(tmp_path):
    directory = write_hugging_face(tmp_path / "a", MODEL)
    again = write_hugging_face(tmp_path / "b", MODEL)
    other = write_hugging_face(tmp_path / "c", TinyLlama(intermediate=64))
    digest = open_checkpoint(directory).fingerprint().digest
    assert open_checkpoint(again).fingerprint().digest == digest
    assert open_checkpoint(other).fingerprint().digest != digest


def test_a_missing_tensor_is_named(tmp_path):
    for path in (
        write_hugging_face(tmp_path / "directory", MODEL, without=(DOWN,)),
        write_gguf(tmp_path / "model.gguf", MODEL, without=(DOWN,)),
    ):
        with pytest.raises(ModelError, match=r"layers\.0\.mlp\.down_proj\.weight.* is missing"):
            load(open_checkpoint(path), 1, 0)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    path = write_hugging_face(tmp_path, MODEL, config_changes={"intermediate_size": 128})
    with pytest.raises(ModelError, match=r"gate_proj.* \(96, 32\), expected \(128, 32\)"):
        load(open_checkpoint(path), 1, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, "'mamba'; known: llama"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"partial_rotary_factor": 0.5}, "4 of 8 dimensions"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attention_bias": True}, "biases"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_key_value_heads": 4}, "6 query heads"),
    ],
)
def test_what_is_not_supported_is_refused_before_loading(tmp_path, changes, says):
    path = write_hugging_face(tmp_path, MODEL, config_changes=changes)
    with pytest.raises(ModelError, match=says):
        find_model(open_checkpoint(path).config)


def test_rope_base_is_found_where_newer_files_put_it(tmp_path):
    changes = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    path = write_hugging_face(tmp_path, MODEL, config_changes=changes)
    assert open_checkpoint(path).config.rope.base == 5e5


def test_scaled_rope_in_a_gguf_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", MODEL, metadata={"llama.rope.scaling.type": "linear"})
    with pytest.raises(ModelError, match="'linear'"):
        find_model(open_checkpoint(path).config)


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"GGUF" + b"\xff" * 60])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.gguf"):
        open_checkpoint(str(file))


def test_paths_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        open_checkpoint(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(str(tmp_path))


def test_a_session_over_a_bad_model_does_not_start(tmp_path):
    path = write_hugging_face(tmp_path, MODEL, config_changes={"model_type": "mamba"})
    with pytest.raises(ModelError, match="mamba"):
        open_rank(path)
