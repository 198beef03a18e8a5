"""A tiny model, 256 byte tokens and three special ones, and an intake that serves it."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from control_plane.intake.model_files import ModelFiles
from tests.control_plane.intake.fake_core import (
    CONTEXT_TOKENS,
    END,
    OTHER_END,
    FakeCore,
    bytes_to_letters,
    running,
)

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'robot' %}"
    "{{ raise_exception('no robots') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model_directory(tmp_path_factory):
    """A Hugging Face directory whose token ids are bytes; 257 and 258 end answers."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    alphabet = bytes_to_letters()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        ]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    files = {
        "config.json": {
            "model_type": "llama",
            "vocab_size": 300,
            "max_position_embeddings": CONTEXT_TOKENS,
            "eos_token_id": 7,
        },
        "generation_config.json": {"eos_token_id": [END, OTHER_END]},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": TEMPLATE},
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


@pytest.fixture(scope="session")
def tiny_model(tiny_model_directory) -> ModelFiles:
    return ModelFiles.load(tiny_model_directory)


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def start(tiny_model, core):
    return lambda model=tiny_model, **settings: running(model, core, **settings)
