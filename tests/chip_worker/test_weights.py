"""In which form weights are held: as the setting says, as the file has them, as the chip can."""

import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import structlog
import torch
import torch.nn.functional as functional
from safetensors.torch import load_file, save_file

from backends.cpu.device import CpuDevice
from backends.cpu.host import CpuChip
from backends.cpu.kernel_library import Engine, load_library
from backends.cpu.plugin import CpuBackend
from backends.errors import BackendUnavailable
from backends.interface import WeightForm
from chip_worker.config import WorkerConfig
from chip_worker.errors import ConfigurationError, ModelError
from chip_worker.representable_weights import ROUNDED_MAX, check_rounded
from chip_worker.shard_loader import SHARD_EXPANDED, SHARD_NOT_NATIVE, ShardLoader
from chip_worker.weights import Piece, ShardReader, open_checkpoint
from tests.fakes.checkpoints import TinyLlama, write_gguf, write_hugging_face
from tests.fakes.compute_group import ComputeGroup

MODEL = TinyLlama(head_size=16, kv_heads=2, hidden=64, intermediate=96)
"""Two chips share its MLP in whole blocks, its 6 heads of 16 only in pairs."""
PROMPT = [5, 17, 3, 140, 77, 8, 9, 23, 61, 2]
BLOCKS = ("Q8_0", "Q4_0", "Q4_1")


def built():
    try:
        load_library()
    except BackendUnavailable:
        return False
    return True


pytestmark = pytest.mark.skipif(not built(), reason="the native kernels are not built")


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")

    def path(kind, model=MODEL):
        file = folder / f"{kind}-{hash(model)}.gguf"
        return write_gguf(file, model, gguf.GGMLQuantizationType[kind])

    return path


@pytest.fixture(scope="module")
def device():
    cores = tuple(sorted(CpuBackend()._cores))
    return CpuDevice(CpuChip(0, "cores", 1 << 30, "", cores), None, Engine(2))


def load(path, device, weights, world_size=1, rank=0, dtype=torch.float32):
    loader = ShardLoader(path, weights)
    shard = loader.plan(rank, world_size, "cover")
    planned = loader.load_plan(shard, device, dtype)
    loader.load(shard, device, dtype)
    assert planned.weight_bytes == loader.loaded.weights.bytes_total
    return loader.loaded.weights


def matrices(weights):
    layers = [
        (each.attention.query_key_value, each.attention.output, each.mlp.gate_up, each.mlp.down)
        for each in weights.layers
    ]
    return [weights.embedding, *(each for layer in layers for each in layer)]


def rows(device, matrix):
    return device.read_rows(matrix, range(matrix.shape[0]))


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_native_is_what_the_file_has(gguf_path, device, kind, world_size):
    """The numbers are those that the file stands for, rows of heads in their order, parts of it."""
    path = gguf_path(kind)
    for rank in range(world_size):
        native = load(path, device, "native", world_size, rank)
        plain = load(path, device, "bf16", world_size, rank)
        assert {each.form for each in matrices(native)} == {WeightForm[kind]}
        for found, expected in zip(matrices(native), matrices(plain), strict=True):
            assert torch.equal(rows(device, found), rows(device, expected))
        assert native.bytes_total < 0.4 * plain.bytes_total


def test_what_a_chip_cuts_within_a_block_is_expanded_and_said_once(gguf_path, device):
    """4 heads of 16 are whole blocks; 3 are not."""
    with structlog.testing.capture_logs() as logs:
        native = load(gguf_path("Q4_1"), device, "native", 2)
    for layer in native.layers:
        assert layer.attention.output.form is WeightForm.PLAIN
        assert layer.mlp.down.form is WeightForm.Q4_1
    (said,) = [each for each in logs if each["event"] == SHARD_EXPANDED]
    assert (said["log_level"], said["matrices"]) == ("warning", MODEL.layers)
    assert said["first"] == "model.layers.0.self_attn.o_proj.weight"


def test_a_matrix_made_of_several_types_is_expanded(gguf_path, device):
    checkpoint = open_checkpoint(gguf_path("Q4_1"))
    name = "model.layers.0.mlp.gate_proj.weight"
    other = name.replace("gate", "up")
    stored = checkpoint.stored_name(other)
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(checkpoint.read(other).numpy(), kind)
    tensor = checkpoint._tensors[stored]._replace(data=blocks, tensor_type=kind)
    checkpoint._tensors[stored] = tensor
    checkpoint.entries[stored] = replace(checkpoint.entries[stored], type_name="Q8_0")
    reader = ShardReader(checkpoint, device, torch.float32, "native")
    pieces = tuple(Piece(each, (MODEL.intermediate, MODEL.hidden)) for each in (name, other))
    assert reader.read(pieces[:1]).form is WeightForm.Q4_1
    both = reader.read(pieces)
    assert both.form is WeightForm.PLAIN
    expected = torch.cat([checkpoint.read(each) for each in (name, other)])
    assert torch.equal(device.read_rows(both, range(2 * MODEL.intermediate)), expected)


@pytest.mark.parametrize("kind", ["F16", "Q5_0"])
def test_other_types_are_expanded(gguf_path, device, kind):
    native = load(gguf_path(kind), device, "native", dtype=torch.bfloat16)
    assert {(each.form, each.dtype) for each in matrices(native)} == {
        (WeightForm.PLAIN, torch.bfloat16)
    }


def test_native_with_nothing_native_is_said(tmp_path, gguf_path, device):
    folder = write_hugging_face(tmp_path, MODEL)

    def warned(path, weights):
        with structlog.testing.capture_logs() as logs:
            load(path, device, weights)
        return [each for each in logs if each["event"] == SHARD_NOT_NATIVE]

    for path in (folder, gguf_path("F16")):
        (said,) = warned(path, "native")
        assert (said["log_level"], said["model"]) == ("warning", path)
        assert "--weights int8" in said["reason"]
    assert not warned(folder, "bf16")
    assert not warned(gguf_path("Q4_1"), "native")


@pytest.mark.parametrize("world_size", [1, 2])
def test_int8_rounds_any_checkpoint(tmp_path, device, world_size):
    path = write_hugging_face(tmp_path, MODEL)
    found = load(path, device, "int8", world_size)
    plain = load(path, device, "bf16", world_size)
    for one, exact in zip(matrices(found), matrices(plain), strict=True):
        assert one.form is WeightForm.Q8_0
        error = (rows(device, one) - rows(device, exact)).norm() / rows(device, exact).norm()
        assert 0 < error < 0.01


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), 1e30, -1e30])
@pytest.mark.parametrize("where", ["model.embed_tokens", "model.layers.1.mlp.down_proj"])
def test_int8_refuses_what_8_bits_cannot_hold(tmp_path, device, wrong, where):
    """Rounded, it would be a number like any other, and answers nonsense without a word."""
    path = write_hugging_face(tmp_path, MODEL)
    file = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[f"{where}.weight"][3, 5] = wrong
    save_file(tensors, file)
    said = f"{where}.weight has a weight of {wrong:g}; int8 holds"
    with pytest.raises(ModelError, match=re.escape(said)):
        load(path, device, "int8")
    load(path, device, "bf16")


def test_int8_takes_the_largest_numbers_it_can_hold(device):
    matrix = device.allocate_matrix((1, 32), torch.float32, WeightForm.Q8_0)
    numbers = torch.full((1, 32), ROUNDED_MAX)
    check_rounded("it", numbers)
    device.write_rows(matrix, 0, numbers)
    assert torch.equal(rows(device, matrix), numbers)
    with pytest.raises(ModelError, match="it has a weight of"):
        check_rounded("it", numbers * 1.001)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("weights", ["native", "bf16", "int8"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_blocks_with_scales_that_are_no_numbers_are_refused(tmp_path, device, kind, weights, wrong):
    path = Path(write_gguf(tmp_path / "model.gguf", MODEL, gguf.GGMLQuantizationType[kind]))
    name, form = "model.layers.1.mlp.up_proj.weight", WeightForm[kind]
    checkpoint = open_checkpoint(str(path))
    blocks = checkpoint.read_blocks(name).numpy()
    broken = blocks.copy()
    # The last that a block begins with: of Q4_1 its minimum.
    at = 2 if form is WeightForm.Q4_1 else 0
    broken[7, at : at + 2] = np.array([wrong], np.float16).view(np.uint8)
    checkpoint.close()
    content = path.read_bytes()
    assert content.count(blocks.tobytes()) == 1
    path.write_bytes(content.replace(blocks.tobytes(), broken.tobytes()))
    with pytest.raises(ModelError, match=f"{name} has a "):
        load(str(path), device, weights)


@pytest.mark.parametrize("weights", ["auto", "bf16"])
def test_otherwise_weights_have_the_dtype(gguf_path, device, weights):
    found = load(gguf_path("Q4_1"), device, weights, dtype=torch.bfloat16)
    assert {each.form for each in matrices(found)} == {WeightForm.PLAIN}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("weights", ["native", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_group_answers_as_with_plain_weights(gguf_path, weights, world_size, tied):
    """Probes included, which every rank passes before it is ready."""
    path = gguf_path("Q8_0", replace(MODEL, tied=tied))
    expected, found = (
        ComputeGroup.open(path, world_size, weights=each).form().generate(PROMPT, 1, chunk=4)[0]
        for each in ("bf16", weights)
    )
    logits = [
        torch.frombuffer(bytearray(each.logits), dtype=torch.float32) for each in (expected, found)
    ]
    # Small random models make more of what is rounded; of a real one see test_weights_accuracy.
    assert functional.cosine_similarity(*logits, dim=0) > 0.99


def test_a_chip_that_cannot_says_so(gguf_path):
    chip = CpuDevice(CpuChip(0, "cores", 1 << 30, "", tuple(sorted(CpuBackend()._cores))), None)
    for weights in ("int8", "native"):
        with pytest.raises(ConfigurationError, match=f"--weights is {weights}.*choose --weights"):
            ShardLoader(gguf_path("Q8_0"), weights).check_device(chip)
    for weights in ("auto", "bf16"):
        ShardLoader(gguf_path("Q8_0"), weights).check_device(chip)


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="weights is 'int4'; choose auto, bf16, int8"):
        WorkerConfig("chip0", "", "model", weights="int4")


def test_workers_with_other_weights_are_not_of_one_model(gguf_path):
    path = gguf_path("Q8_0")
    digests = {ShardLoader(path, each).fingerprint().digest for each in ("bf16", "int8", "native")}
    assert len(digests) == 3
    assert ShardLoader(path).fingerprint() == ShardLoader(path, "bf16").fingerprint()
