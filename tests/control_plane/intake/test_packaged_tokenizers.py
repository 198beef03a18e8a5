"""The packaged models' tokenizers, rebuilt from GGUF, against those of other programs."""

import pytest

from control_plane.intake.detokenizer import Detokenizer
from control_plane.intake.model_files import ModelFiles
from control_plane.intake.tokenizer import Tokenizer
from scripts.topology import PACKAGED_MODELS
from tests.golden.tokenizer_cases import tokenizer_cases


@pytest.fixture(scope="module", params=["default", "gemma3"])
def loaded(request):
    """The packaged model's facts, its tokenizer and what is expected of them."""
    packaged = PACKAGED_MODELS[request.param]
    path = packaged.path()
    if path is None:
        assert request.param != "default"
        pytest.skip(f"the model is not installed; {packaged.install} brings it")
    model = ModelFiles.load(path)
    return model, Tokenizer(model.tokenizer, request.param), tokenizer_cases(request.param)


def test_ids_are_those_of_the_reference(loaded):
    _, tokenizer, cases = loaded
    assert len(cases.texts) >= 200
    for text, ids in zip(cases.texts, cases.ids, strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text


def test_start_and_end_tokens_are_those_of_the_file(loaded):
    model, tokenizer, cases = loaded
    assert model.special_tokens.items() >= cases.special_tokens.items()
    assert model.end_token_ids == cases.end_token_ids
    for text, ids in zip(cases.texts, cases.ids, strict=True):
        # Where the text begins with the start token itself, one of them is enough.
        whole = (*cases.start_ids, *ids)
        expected = ids if cases.start_ids and ids[:1] == cases.start_ids else whole
        assert tokenizer.encode(text, add_special=True) == expected, text


def test_a_stream_gives_back_the_text(loaded):
    """Special tokens give no text, SentencePiece writes a space for its mark; the rest stays."""
    _, tokenizer, cases = loaded
    for text, ids in zip(cases.texts, cases.ids, strict=True):
        detokenizer = Detokenizer(tokenizer, cases.start_ids)
        pieces = [*map(detokenizer.feed, ids), detokenizer.flush()]
        assert "".join(pieces) == tokenizer.decode(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces), text
        if not any(tokenizer.text_bytes(each) == b"" for each in ids) and "▁" not in text:
            assert "".join(pieces) == text
