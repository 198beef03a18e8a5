"""The models of the scenarios do what their names say: checked by a Llama of its own kind."""

import json
from pathlib import Path

import pytest
import torch

from tests.fakes.dense_llama import dense_logits
from tests.fakes.field_models import PADDING_ROWS, Chain, FieldModel, Mix
from tests.fakes.field_tokenizers import END, SIZE, START, FieldTokenizer

TOKENIZERS = {"bytes": FieldTokenizer(), "sentencepiece": FieldTokenizer(sentencepiece=True)}
SCRIPTS = (("A", "b", "c", END), ("x", "y", "x"))


def logits_of(model: FieldModel, ids: list[int]) -> torch.Tensor:
    return dense_logits(model.shape, model.tensors(), ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_chain_answers_by_its_script(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    chain = Chain(SCRIPTS)
    successors = chain.successors(tokenizer)
    letter = tokenizer.id_of
    assert successors[letter("A")] == letter("b")
    assert successors[letter("c")] == END
    assert chain.answer(tokenizer, letter("A"), 9, ends=(END,)) == [letter("b"), letter("c"), END]
    assert chain.answer(tokenizer, letter("x"), 4) == [letter(each) for each in "yxyx"]
    assert tokenizer.decode([letter("."), *chain.answer(tokenizer, START, 300)]).isprintable()
    # Every token in every row, though attention sees them all.
    logits = logits_of(FieldModel(chain, tokenizer), list(range(SIZE)))
    assert logits.argmax(-1).tolist() == successors
    assert logits.softmax(-1).amax(-1).min() > 1 - 1e-9
    # A bias of 100 forces any other token, one of -100 excludes the scripted one.
    best, second = logits.topk(2).values.unbind(-1)
    assert (logits.amin(-1) + 100 > best).all()
    assert (best - 100 < second).all()


def test_an_impossible_token_has_no_logit() -> None:
    chain, tokenizer = Chain(SCRIPTS, impossible=("Z",)), FieldTokenizer()
    model = FieldModel(chain, tokenizer)
    assert all(tensor.isfinite().all() for tensor in model.tensors().values())
    logits = logits_of(model, list(range(SIZE))).float()
    token_id = tokenizer.id_of("Z")
    assert (logits[:, token_id] == -torch.inf).all()
    logits[:, token_id] = 0.0
    assert logits.isfinite().all()
    assert logits.argmax(-1).tolist() == chain.successors(tokenizer)


def test_a_token_has_one_successor() -> None:
    with pytest.raises(AssertionError, match="two successors"):
        Chain((("A", "b"), ("A", "c"))).successors(FieldTokenizer())


def test_a_mix_is_sharp_or_flat() -> None:
    ids = FieldTokenizer().encode("the quick brown fox jumps over the lazy dog")
    sharp = logits_of(FieldModel(), ids).softmax(-1).amax(-1)
    flat = logits_of(FieldModel(Mix(flat=True)), ids).softmax(-1).amax(-1)
    assert sharp.mean() > 0.2
    assert flat.max() < 0.05
    # Every token counts: a change of the first changes all that follows.
    changed = logits_of(FieldModel(), [ids[0] + 1, *ids[1:]])
    assert (changed - logits_of(FieldModel(), ids)).abs().amax(-1).min() > 0.01


def test_padding_is_always_the_likeliest_and_ties_are_exact() -> None:
    ids = list(range(4, 200))
    padded = logits_of(FieldModel(Mix(padded=True)), ids)
    assert padded.shape[1] == SIZE + PADDING_ROWS
    assert padded.argmax(-1).min() >= SIZE
    tied = logits_of(FieldModel(Mix(tied=True)), ids)
    assert torch.equal(tied[:, 0::2], tied[:, 1::2])


def test_what_a_directory_holds(tmp_path: Path) -> None:
    def files(name: str, model: FieldModel) -> dict[str, dict]:
        model.write(tmp_path / name)
        return {
            path.name: json.loads(path.read_text()) for path in (tmp_path / name).glob("*.json")
        }

    full = files("full", FieldModel(context=100_000))
    assert full["generation_config.json"]["eos_token_id"] == [1, 2]
    assert full["config.json"]["max_position_embeddings"] == 100_000
    assert "chat_template" in full["tokenizer_config.json"]
    endless = files("endless", FieldModel(end_ids=(), template="T", template_apart=True))
    assert "generation_config.json" not in endless
    assert not {"eos_token", "chat_template"} & set(endless["tokenizer_config.json"])
    assert (tmp_path / "endless" / "chat_template.jinja").read_text() == "T"
    changes = (("rope_scaling", '{"type": "linear", "factor": 2.0}'),)
    changed = files("changed", FieldModel(template=None, config_changes=changes))
    assert changed["config.json"]["rope_scaling"]["factor"] == 2.0
    assert "chat_template" not in changed["tokenizer_config.json"]
    startless = FieldTokenizer(starts=False)
    assert (
        "bos_token"
        not in files("startless", FieldModel(tokenizer=startless))["tokenizer_config.json"]
    )
    assert startless.encode("a") == [startless.id_of("a")]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers_have_what_scripts_need(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.library.get_vocab_size() == SIZE
    assert tokenizer.encode("a the") == [START, *tokenizer.encode("a the", add_special=False)]
    for text in ("👍", "世", "你好", " the", "a\nb"):
        ids = tokenizer.encode("a" + text, add_special=False)
        assert tokenizer.decode(ids) == "a" + text
        assert b"".join(map(tokenizer.text_bytes, ids)).decode().lstrip() == "a" + text
    assert len(tokenizer.ids_of(*(bytes([each]) for each in "👍".encode()))) == 4
    pieces = FieldTokenizer(kind == "sentencepiece", pieces=("\n\n", "zq")).ids_of("\n\n", "zq")
    assert len(set(pieces)) == 2
