"""Weights read back are the weights written, whole or in part, from every file format."""

import math
import re

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import chip_worker.weights as weights_module
from backends.device import Device
from backends.plugin import ChipDescription
from chip_worker.errors import ModelError
from chip_worker.gguf_checkpoint import GgufCheckpoint, HeaderReader
from chip_worker.model_config import ConfigFields
from chip_worker.models.registry import find_model
from chip_worker.models.rope import read_rope
from chip_worker.safetensors_checkpoint import SafetensorsCheckpoint
from chip_worker.shard_loader import ShardLoader
from chip_worker.tensor_parallel import plan_shard
from chip_worker.weights import ShardReader, open_checkpoint
from tests.fakes.checkpoints import TinyLlama, write_gguf, write_hugging_face
from tests.fakes.compute_group import open_rank

MODEL = TinyLlama()
CHIP = ChipDescription(0, "main memory", 1 << 30)
QUERY = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(params=["directory", "directory-of-three", "gguf", "gguf-untied"])
def written(request, tmp_path):
    model = TinyLlama(tied=request.param != "gguf-untied")
    if request.param.startswith("gguf"):
        return model, write_gguf(tmp_path / "model.gguf", model)
    count = 3 if request.param == "directory-of-three" else 1
    return model, write_hugging_face(tmp_path, model, files_count=count)


def described(path):
    return find_model(open_checkpoint(path))[1]


def test_every_tensor_is_read_back_whole(written):
    model, path = written
    checkpoint = open_checkpoint(path)
    for name, tensor in model.tensors().items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(name), tensor), name
    checkpoint.close()


def test_the_configuration_is_the_same_from_every_format(written):
    model, path = written
    config = described(path)
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
    both = checkpoint.read(DOWN, rows=range(3, 9), columns=range(64, 96))
    assert torch.equal(both, tensors[DOWN][3:9, 64:])


def test_tensors_outlive_their_checkpoint(written):
    model, path = written
    checkpoint = open_checkpoint(path)
    norm = checkpoint.read("model.norm.weight")
    checkpoint.close()
    assert torch.equal(norm, model.tensors()["model.norm.weight"])


def dequantizable():
    """Every type of the gguf package; of those it cannot write, blocks are made up."""
    kinds = []
    for kind in gguf.GGMLQuantizationType:
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.quants.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        kinds.append(pytest.param(kind, block_elements, block_bytes, id=kind.name))
    return kinds


def stored_matrix(kind, block_bytes, rows, blocks):
    """Blocks whose scales, wherever they are, are small numbers, and what they mean."""
    data = np.random.default_rng(5).integers(0, 60, (rows, blocks * block_bytes)).astype(np.uint8)
    if kind == gguf.GGMLQuantizationType.F32:
        data = data.view(np.float32)
    elif kind == gguf.GGMLQuantizationType.F16:
        data = data.view(np.float16)
    return data, gguf.quants.dequantize(data, kind)


@pytest.mark.parametrize(("kind", "block_elements", "block_bytes"), dequantizable())
def test_rows_and_columns_of_every_type_are_dequantized_alone(
    tmp_path, kind, block_elements, block_bytes
):
    blocks = max(2, 48 // block_elements)
    columns = blocks * block_elements
    data, expected = stored_matrix(kind, block_bytes, 41, blocks)
    path = write_matrix(tmp_path / "model.gguf", data, kind)
    checkpoint = open_checkpoint(path)
    name = "model.embed_tokens.weight"
    assert checkpoint.shape(name) == (41, columns)

    def same(found, wanted):
        return np.array_equal(found.numpy(), wanted, equal_nan=True)

    assert same(checkpoint.read(name), expected)
    assert same(checkpoint.read(name, rows=range(7, 24)), expected[7:24])
    part = range(columns // 3, columns - 5)
    assert same(checkpoint.read(name, columns=part), expected[:, part.start : part.stop])


def test_there_are_types_to_dequantize():
    names = {each.id for each in dequantizable()}
    assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"} <= names


def write_matrix(file, data, kind):
    """A file of one matrix, the embedding."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_embedding_length(64)
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(file)


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
    model, config = find_model(checkpoint)
    shard = plan_shard(config, rank, world_size, "cover")
    weights = model.load(config, shard, ShardReader(checkpoint, HostDevice(CHIP), dtype))
    return model, config, shard, weights


class HostDevice(Device):
    def allocate(self, shape, dtype):
        return torch.full(tuple(shape), float("nan"), dtype=dtype)

    def copy(self, source, target):
        assert source.dtype == target.dtype
        target.copy_(source)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_rank_holds_what_was_announced_and_nothing_is_left_unfilled(written, world_size):
    checkpoint = open_checkpoint(written[1])
    for rank in range(world_size):
        model, config, shard, weights = load(checkpoint, world_size, rank, torch.bfloat16)
        pieces = model.weight_pieces(config, shard)
        announced = sum(math.prod(weights_module.stacked_shape(each)) for each in pieces)
        assert weights.bytes_total == 2 * announced
        layer = weights.layers[1]
        for tensor in (weights.embedding, layer.attention.query_key_value, layer.mlp.down):
            assert torch.isfinite(tensor).all()


def test_large_tensors_are_read_some_rows_after_the_other(written, monkeypatch):
    """Whole heads at a time, and the same in the end."""
    model, path = written
    expected = load(open_checkpoint(path), 2, 1)[-1]
    monkeypatch.setattr(weights_module, "READ_ELEMENTS_MAX", 16 * model.hidden)
    read = []
    plain_read = GgufCheckpoint.read if path.endswith("gguf") else SafetensorsCheckpoint.read

    def watched(self, name, rows=None, columns=None):
        if name.endswith("proj.weight"):
            read.append(len(rows))
        return plain_read(self, name, rows, columns)

    checkpoint = open_checkpoint(path)
    monkeypatch.setattr(type(checkpoint), "read", watched)
    found = load(checkpoint, 2, 1)[-1]
    assert max(read) == 16
    assert torch.equal(found.embedding, expected.embedding)
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert torch.equal(one.attention.query_key_value, other.attention.query_key_value)
        assert torch.equal(one.attention.output, other.attention.output)
        assert torch.equal(one.mlp.down, other.mlp.down)


def digest(path, weights="bf16"):
    checkpoint = open_checkpoint(path)
    return checkpoint.fingerprint(find_model(checkpoint)[1], weights).digest


def test_both_formats_give_the_same_digest_only_for_themselves(tmp_path):
    directory = write_hugging_face(tmp_path / "a", MODEL)
    again = write_hugging_face(tmp_path / "b", MODEL)
    other = write_hugging_face(tmp_path / "c", TinyLlama(intermediate=64))
    assert digest(again) == digest(directory)
    assert digest(other) != digest(directory)
    assert digest(directory, "int8") != digest(directory), "partial sums of the two do not add up"


def refusal(path):
    """Of a worker that starts: nothing is known of a chip."""
    with pytest.raises(ModelError) as caught:
        ShardLoader(str(path))
    return str(caught.value)


def test_a_missing_tensor_is_named(tmp_path):
    for path in (
        write_hugging_face(tmp_path / "directory", MODEL, without=(DOWN,)),
        write_gguf(tmp_path / "model.gguf", MODEL, without=(DOWN,)),
    ):
        assert re.search(r"layers\.0\.mlp\.down_proj\.weight.* is missing", refusal(path))


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    path = write_hugging_face(tmp_path, MODEL, config_changes={"intermediate_size": 128})
    assert re.search(r"gate_proj.* \(96, 32\), expected \(128, 32\)", refusal(path))


SCALED = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mamba"}, "'mamba'; known: llama, mistral, qwen2, qwen3, gemma3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "no key could be cached"),
        ({"rope_scaling": {"type": "ntk"}}, "'ntk'; known: default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": SCALED | {"factor": -1}}, r"rope_scaling\.factor is -1, not above 0"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"partial_rotary_factor": 0.5}, "4 of 8 dimensions"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported; known: silu"),
        ({"attention_bias": True}, r"q_proj\.bias is missing"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', neither true nor false"),
        ({"num_key_value_heads": 4}, "6 query heads"),
        ({"head_dim": 7}, "needs an even one"),
        ({"model_type": "qwen2"}, r"q_proj\.bias is missing"),
        ({"model_type": "qwen3"}, r"q_norm\.weight is missing"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "not one for each of 2"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "chunked"]},
            "'chunked' is none of full_attention, sliding_attention",
        ),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]},
            "no sliding_window is set",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention is set",
        ),
    ],
)
def test_what_is_not_supported_is_refused_before_loading(tmp_path, changes, says):
    path = write_hugging_face(tmp_path, MODEL, config_changes=changes)
    assert re.search(says, refusal(path))


def test_a_tensor_that_would_change_answers_is_refused_and_another_is_not(tmp_path):
    path = write_hugging_face(tmp_path, MODEL)
    tensors = MODEL.tensors()
    harmless = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "model.layers.2.mlp.up_proj.weight": torch.zeros(3, 3),
        "visual.head.weight": torch.zeros(3, 3),
    }
    save_file(tensors | harmless, tmp_path / "model.safetensors")
    assert described(path).layers_count == 2
    bias = "model.layers.1.self_attn.v_proj.bias"
    save_file(tensors | {bias: torch.zeros(16)}, tmp_path / "model.safetensors")
    assert f"tensor {bias} is none of architecture 'llama'" in refusal(path)


def test_quantized_safetensors_are_refused_by_type(tmp_path):
    path = write_hugging_face(tmp_path, MODEL)
    tensors = MODEL.tensors()
    tensors[DOWN] = tensors[DOWN].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    assert re.search(rf"{DOWN} has type F8_E4M3.*use a float checkpoint", refusal(path))


def test_a_gguf_type_that_nobody_can_read_is_refused_by_name(tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_K
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    path = write_matrix(tmp_path / "m.gguf", np.zeros((8, block_bytes), dtype=np.uint8), kind)
    with pytest.raises(ModelError, match=r"token_embd\.weight has type Q8_K, which cannot"):
        open_checkpoint(path).check_type("model.embed_tokens.weight")


def test_a_gguf_whose_values_have_another_size_than_its_keys_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", MODEL, metadata={"llama.attention.value_length": 16})
    assert "llama.attention.value_length is 16, and the size of a key is 8" in refusal(path)


def test_part_of_a_split_gguf_is_refused_with_the_remedy(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", MODEL, metadata={"split.count": 3})
    assert "one of 3 parts of a model; join them" in refusal(path)


@pytest.mark.parametrize(
    ("metadata", "kind", "factor"),
    [
        ({}, "default", 1.0),
        ({"type": "none", "factor": 4.0}, "default", 4.0),
        ({"type": "linear"}, "default", 1.0),
        ({"factor": 4.0}, "linear", 4.0),
        ({"type": "yarn", "factor": 4.0}, "yarn", 4.0),
    ],
)
def test_scaled_rope_in_a_gguf_is_read_as_llama_cpp_does(tmp_path, metadata, kind, factor):
    named = {f"llama.rope.scaling.{name}": value for name, value in metadata.items()}
    rope = described(write_gguf(tmp_path / "m.gguf", MODEL, metadata=named)).rope
    assert (rope.kind, rope.factor) == (kind, factor)


def test_divisors_for_other_heads_are_refused():
    fields = ConfigFields("m.gguf", {"rope_type": "llama3", "divisors": [1, 2, 3]})
    with pytest.raises(ModelError, match=r"3 divisors .*rope_freqs\.weight\), expected 4"):
        read_rope(fields, base=1e4, head_size=8, context_tokens=64)


def test_an_unknown_rope_in_a_gguf_is_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", MODEL, metadata={"llama.rope.scaling.type": "longrope"})
    assert "'longrope'; known: default, linear" in refusal(path)


def test_a_window_that_no_text_exceeds_is_none(tmp_path):
    """A context is 128 tokens here."""
    windows = []
    for window in (127, 128, None):
        changes = {"model_type": "mistral", "sliding_window": window}
        windows.append(described(write_hugging_face(tmp_path, MODEL, config_changes=changes)))
    assert [config.layer_windows for config in windows] == [(127, 127), (), ()]


@pytest.mark.parametrize("content", [b"", b"not a model at all", b"GGUF" + b"\xff" * 60])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.gguf"):
        open_checkpoint(str(file))


def test_paths_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(ModelError, match="/dev/null': it is neither a file nor a directory"):
        open_checkpoint("/dev/null")
    with pytest.raises(ModelError, match="no such file"):
        open_checkpoint(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(str(tmp_path))


def test_a_session_over_a_bad_model_does_not_start(tmp_path):
    path = write_hugging_face(tmp_path, MODEL, config_changes={"model_type": "mamba"})
    with pytest.raises(ModelError, match="mamba"):
        open_rank(path)
