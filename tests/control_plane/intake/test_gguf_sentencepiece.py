"""GGUF tokenizers of the SentencePiece style, against its rule written out plainly."""

import random
from dataclasses import replace

import pytest

from control_plane.errors import ConfigurationError
from control_plane.intake.detokenizer import Detokenizer
from control_plane.intake.model_files import GgufVocabulary
from control_plane.intake.tokenizer import Tokenizer

UNKNOWN, START, END = "<unk>", "<s>", "</s>"
LETTERS = "▁abcdeé好"
WORDS = (
    *("ab", "bc", "cd", "abc", "bcd", "abcd", "▁a", "▁ab", "▁abc", "▁b", "de", "cde", "ee", "eee"),
    *("eeee", "▁▁", "▁▁▁", "a▁", "é好", "好▁", "dede"),
)
TYPES = {UNKNOWN: 2, START: 3, END: 3}


def vocabulary(**changes) -> GgufVocabulary:
    """Special tokens, all bytes, words with scores in random order, letters, user-defined ones."""
    generator = random.Random(3)
    scores = generator.sample(range(1, 100), len(WORDS))
    entries = [
        *((text, 0.0, kind) for text, kind in TYPES.items()),
        *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
        *((text, -float(score), 1) for text, score in zip(WORDS, scores, strict=True)),
        *((text, -100.0 - place, 1) for place, text in enumerate(LETTERS)),
        *((text, -1000.0, 4) for text in ("\n", "\n\n", "    ", "<b>")),
        ("<x>", -1000.0, 3),
    ]
    texts, numbers, kinds = map(list, zip(*entries, strict=True))
    plain = GgufVocabulary(
        model="llama",
        pre="default",
        tokens=texts,
        token_types=kinds,
        merges=[],
        scores=numbers,
        bos_id=1,
        eos_id=2,
        unknown_id=0,
        add_bos=True,
        add_eos=False,
        add_space_prefix=False,
    )
    return replace(plain, **changes)


def joined_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece: of all neighbours that make a token, the best score joins, leftmost first."""
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[pieces[at] + pieces[at + 1]], at)
            for at in range(len(pieces) - 1)
            if pieces[at] + pieces[at + 1] in scores
        ]
        if not pairs:
            break
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    known = [[each] if each in scores else byte_names(each) for each in pieces]
    return [piece for several in known for piece in several]


def byte_names(character: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in character.encode()]


@pytest.fixture(scope="module")
def source():
    return vocabulary()


@pytest.fixture(scope="module")
def tokenizer(source):
    return Tokenizer(source, "test")


def pieces_of(tokenizer: Tokenizer, source: GgufVocabulary, text: str) -> list[str]:
    return [source.tokens[each] for each in tokenizer.encode(text, add_special=False)]


def test_merges_follow_the_scores(tokenizer, source):
    entries = zip(source.tokens, source.scores, source.token_types, strict=True)
    scores = {text: score for text, score, kind in entries if kind == 1}
    generator = random.Random(11)
    for _ in range(500):
        # At most three spaces in a row: four are a token of their own.
        drawn = "".join(generator.choices("aabbccddee é好x👍", k=generator.randint(1, 30)))
        text = drawn.replace("    ", " ")
        assert pieces_of(tokenizer, source, text) == joined_by_score(text, scores), text


def test_equal_scores_join_in_the_order_of_ids(source):
    """Converters that know no scores write one number for all; the ids then tell the order."""
    texts = ["<unk>", "a", "b", "c", "ab", "bc"]
    kinds = [2, 1, 1, 1, 1, 1]
    for tokens, expected in ((texts, ["ab", "c"]), ([*texts[:4], "bc", "ab"], ["a", "bc"])):
        flat = replace(source, tokens=tokens, scores=[-1.0] * 6, token_types=kinds, add_bos=False)
        assert pieces_of(Tokenizer(flat, "flat"), flat, "abc") == expected


def test_special_and_user_defined_tokens_in_a_text(tokenizer, source):
    assert pieces_of(tokenizer, source, "ab</s><x> a\n\n\nb<b>") == [
        *("ab", "</s>", "<x>", "▁a", "\n\n", "\n", "b", "<b>"),
    ]
    assert pieces_of(tokenizer, source, "a     b") == ["a", "    ", "▁b"]
    assert pieces_of(tokenizer, source, "<unk>") == [UNKNOWN]
    # Control tokens give no text, user-defined ones do.
    ids = tokenizer.encode("<x>a\n<b><unk>", add_special=False)
    assert tokenizer.decode(ids) == "a\n<b>"
    # A name of a byte in the text is text.
    assert "<0x41>" not in pieces_of(tokenizer, source, "<0x41>")


def test_start_and_end_tokens(source):
    begun = Tokenizer(source, "test").encode("a", add_special=True)
    assert begun[0] == 1
    assert len(begun) == 2
    assert Tokenizer(source, "test").encode("<s>a", add_special=True) == begun
    both = replace(source, add_eos=True)
    assert Tokenizer(both, "test").encode("a", add_special=True) == (*begun, 2)
    assert Tokenizer(both, "test").encode("a", add_special=False) == begun[1:]
    neither = replace(source, add_bos=False, bos_id=None)
    assert Tokenizer(neither, "test").encode("a", add_special=True) == begun[1:]


def test_a_space_before_the_text_comes_and_goes(source):
    spaced = replace(source, add_space_prefix=True)
    tokenizer = Tokenizer(spaced, "test")
    assert pieces_of(tokenizer, spaced, "ab") == ["▁ab"]
    # After a special token too, as in llama.cpp and in the tokenizers of the makers.
    assert pieces_of(tokenizer, spaced, "a<x>b") == ["▁a", "<x>", "▁b"]
    for text in ("ab", " ab", "  a", "abcd e", "é好👍"):
        ids = tokenizer.encode(text, add_special=True)
        assert tokenizer.decode(ids) == text
        detokenizer = Detokenizer(tokenizer, ())
        assert "".join([*map(detokenizer.feed, ids), detokenizer.flush()]) == text
    # What goes on after a prompt keeps its space.
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("ab", add_special=True))
    assert detokenizer.feed(spaced.tokens.index("▁ab")) == " ab"


def test_characters_of_several_tokens_are_shown_whole(tokenizer):
    ids = tokenizer.encode("a👍好 👩‍👧", add_special=False)
    assert len(ids) > 10
    detokenizer = Detokenizer(tokenizer)
    pieces = [*map(detokenizer.feed, ids), detokenizer.flush()]
    assert "".join(pieces) == "a👍好 👩‍👧"
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[:5] == ["a", "", "", "", "👍"]


def test_fewest_tokens_of_a_text(tokenizer):
    for text in ("a" * 900, " " * 900, "👍" * 300, "<x>" * 100, "abcd" * 200, "dede" * 100):
        assert (
            0
            < tokenizer.tokens_min(text.encode())
            <= len(tokenizer.encode(text, add_special=False))
        )


def test_what_is_unknown_without_byte_tokens_is_the_unknown_token(source):
    kept = [at for at, kind in enumerate(source.token_types) if kind != 6]
    holed = replace(
        source,
        tokens=[source.tokens[at] for at in kept],
        scores=[source.scores[at] for at in kept],
        token_types=[source.token_types[at] for at in kept],
    )
    assert pieces_of(Tokenizer(holed, "test"), holed, "aX👍b") == ["a", UNKNOWN, "b"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "t5"}, "tokenizer model 't5' is not supported; .* 'llama'"),
        ({"pre": "tekken"}, "'tekken' is not supported with tokenizer model 'llama'"),
        ({"scores": []}, "scores 0"),
        ({"token_types": [1]}, "token_type 1"),
        ({"bos_id": None}, r"tokenizer\.ggml\.bos_token_id"),
        ({"add_eos": True, "eos_id": None}, r"tokenizer\.ggml\.eos_token_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(source, changes, problem):
    with pytest.raises(ConfigurationError, match=f"model test: .*{problem}"):
        Tokenizer(replace(source, **changes), "test")
