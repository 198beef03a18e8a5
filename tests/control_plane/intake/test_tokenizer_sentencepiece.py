"""Tokenizers of the SentencePiece style against the `tokenizers` library itself."""

import json
import random

import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from control_plane.errors import ConfigurationError
from control_plane.intake.detokenizer import Detokenizer
from control_plane.intake.model_files import TokenizerJson
from control_plane.intake.tokenizer import Tokenizer
from tests.fakes.field_tokenizers import END, SIZE, SPECIAL, START, FieldTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it runs away again.",
    "Wait: a list with  two spaces\nand a line of its own; 12345 numbers!",
    "你好, 世界! 今天天气很好.",
    "the thing that they thought there was then",
] * 4
TEXTS = [
    *CORPUS[:4],
    "a",
    " ",
    "   three before and after   ",
    "tab\tnewline\n\nend",
    "👍",
    "ok 👍🏽 then 👩‍👩‍👧‍👦.",
    "数学 नमस्ते e\u0301",
    "▁ the mark itself ▁▁",
]


def trained(metaspace: bool) -> LibraryTokenizer:
    """A BPE with byte fallback, trained on the corpus; as Llama's, or with the Metaspace stages."""
    library = LibraryTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if metaspace:
        library.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first")
        library.decoder = decoders.Metaspace("▁", "first")
    else:
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        library.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    library.train_from_iterator(CORPUS, trainer)
    # Training knows no byte tokens: they join the vocabulary as a converter would write them.
    content = json.loads(library.to_str())
    vocabulary = content["model"]["vocab"]
    for text in byte_tokens:
        vocabulary[text] = len(vocabulary)
    return LibraryTokenizer.from_str(json.dumps(content))


def of(library: LibraryTokenizer, tmp_path, **changes) -> Tokenizer:
    """Our tokenizer of the library's, with parts of its file exchanged."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(library.to_str()) | changes))
    return Tokenizer(TokenizerJson(path), "test")


@pytest.fixture(scope="module", params=["trained", "by hand"])
def library(request):
    return trained(metaspace=False) if request.param == "trained" else FieldTokenizer(True).library


@pytest.fixture(scope="module")
def tokenizer(library, tmp_path_factory):
    return of(library, tmp_path_factory.mktemp("tokenizer"))


def pieces_after(tokenizer, prompt_ids, ids):
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [*(detokenizer.feed(each) for each in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_the_library(library, tokenizer, text):
    ids = library.encode(text).ids
    assert tokenizer.encode(text, add_special=True) == tuple(ids)
    assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_every_cut_of_a_text_gives_prompt_and_output(library, tokenizer, text):
    """Wherever a text is cut into prompt and output, no space and no character gets lost."""
    ids = library.encode(text).ids
    whole = library.decode(ids)
    for cut in range(len(ids)):
        before, after = tokenizer.decode(ids[:cut]), pieces_after(tokenizer, ids[:cut], ids[cut:])
        assert "\ufffd" not in "".join(after)
        if "\ufffd" in before:  # the prompt ends inside a character, which the output completes
            assert whole.endswith("".join(after))
        else:
            assert before + "".join(after) == whole


def test_random_tokens_equal_the_library(library, tokenizer):
    """Tokens that are whole characters, in any order: what the library gives, piece by piece."""
    generator = random.Random(5)
    whole = [
        index
        for text, index in library.get_vocab().items()
        if not text.startswith("<0x") or int(text[3:5], 16) < 128
    ]
    for _ in range(300):
        ids = generator.choices(whole, k=12)
        assert tokenizer.decode(ids) == library.decode(ids)
        cut = generator.randrange(1, 12)
        first = library.decode(ids[:cut])
        assert first + "".join(pieces_after(tokenizer, ids[:cut], ids[cut:])) == library.decode(ids)


def test_a_continuation_keeps_its_first_space(tokenizer):
    """Also where nobody says what stands before; only a text of its own begins without it."""
    space_the = tokenizer.encode("the", add_special=False)
    prompt = tokenizer.encode("over", add_special=True)
    assert "".join(pieces_after(tokenizer, None, space_the)) == " the"
    assert "".join(pieces_after(tokenizer, prompt, space_the)) == " the"
    assert "".join(pieces_after(tokenizer, (), space_the)) == "the"
    special = tokenizer.special_id("<unk>")
    assert "".join(pieces_after(tokenizer, (special, special), space_the)) == "the"


def test_an_emoji_comes_whole_and_a_cut_one_as_one_replacement(tokenizer):
    ids = tokenizer.encode("ok 👍", add_special=False)
    assert [tokenizer.token_bytes(each) for each in ids[-4:]] == [
        bytes([byte]) for byte in "👍".encode()
    ]
    *pieces, last = pieces_after(tokenizer, (), ids)
    assert pieces[-4:] == ["", "", "", "👍"]
    assert last == ""
    *pieces, last = pieces_after(tokenizer, (), ids[:-1])
    assert ("".join(pieces), last) == ("ok ", "\ufffd")
    # The output completes what the prompt began.
    assert "".join(pieces_after(tokenizer, ids[:-2], ids[-2:])) == "👍"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_metaspace(tmp_path, scheme):
    library = trained(metaspace=True)
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme)
    library.decoder = decoders.Metaspace("▁", scheme)
    tokenizer = of(library, tmp_path)
    for text in CORPUS[1], CORPUS[3], "then there":
        ids = library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids) == text
        assert "".join(pieces_after(tokenizer, (), ids)) == text
    assert tokenizer.strips_first_space == (scheme != "never")


def test_a_decoder_without_strip_keeps_every_space(library, tmp_path):
    decoder = json.loads(library.to_str())["decoder"]
    decoder["decoders"].pop()
    kept = of(library, tmp_path, decoder=decoder)
    ids = library.encode("then").ids
    assert kept.decode(ids) == kept._library.decode(ids) == " then"


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (None, "decoder null"),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "decoder WordPiece"),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "_"}, "content": " "},
                    {"type": "Fuse"},
                ],
            },
            "decoder Replace, Fuse",
        ),
        (
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                    {"type": "Fuse"},
                ],
            },
            "decoder Replace, Strip, Fuse",
        ),
    ],
)
def test_other_decoders_are_refused_by_name(tmp_path, decoder, named):
    with pytest.raises(ConfigurationError, match=f"{named}; supported are ByteLevel, Metaspace"):
        of(FieldTokenizer(True).library, tmp_path, decoder=decoder)


def test_size_and_special_ids(tmp_path):
    for sentencepiece in (False, True):
        tokenizer = of(FieldTokenizer(sentencepiece).library, tmp_path)
        assert tokenizer.size == SIZE
        assert tokenizer.special_id("<|end|>") == END
        assert tokenizer.special_id("<|special|>") == SPECIAL
        assert tokenizer.special_id(" the") is None
        assert tokenizer.text_bytes(SIZE) == b""
        assert tokenizer.decode([START, END, SIZE, 10**9]) == ""
        assert tokenizer.encode("<|start|>the", add_special=True).count(START) == 1


def test_fewest_tokens_of_a_text(library, tokenizer):
    """A bound no text may break, and near enough to be of use."""
    for text in (
        *TEXTS,
        " " * 900,
        "▁" * 900,
        "\x00" * 900,
        "<unk>" * 300,
        " the" * 300,
        "数" * 300,
    ):
        assert tokenizer.tokens_min(text.encode()) <= len(library.encode(text).ids), text[:20]
    assert tokenizer.tokens_min(b"x" * 1_000_000) > 1000


def test_fewest_tokens_where_text_may_vanish(tmp_path):
    library = FieldTokenizer(True).library
    content = json.loads(library.to_str())
    text = b"x" * 2600
    assert of(library, tmp_path).tokens_min(text) > 0
    assert of(library, tmp_path, normalizer={"type": "NFKC"}).tokens_min(text) == 0
    no_bytes = content["model"] | {"byte_fallback": False}
    assert of(library, tmp_path, model=no_bytes).tokens_min(text) == 0
    greedy = [content["added_tokens"][0] | {"rstrip": True}, *content["added_tokens"][1:]]
    assert of(library, tmp_path, added_tokens=greedy).tokens_min(text) == 0
    vocabulary = {
        text if text != "<0x41>" else "AAAA": index
        for text, index in content["model"]["vocab"].items()
    }
    holed = content["model"] | {"vocab": vocabulary}
    assert of(library, tmp_path, model=holed).tokens_min(text) == 0
