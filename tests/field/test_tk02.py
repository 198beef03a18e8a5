"""TK02: half characters at the end of a delta, and spaces lost between deltas."""

from dataclasses import dataclass

import pytest

from tests.fakes.field_models import Chain, FieldModel
from tests.fakes.field_tokenizers import FieldTokenizer
from tests.field.field_cluster import PROTOCOLS, ClusterSpec, FieldCluster

pytestmark = pytest.mark.end_to_end

Piece = str | bytes
THUMB = "👍".encode()
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Scripts:
    """Answers by the letter the prompt ends with; pieces are tokens."""

    name: str
    sentencepiece: bool
    answers: tuple[tuple[Piece, ...], ...]

    def spec(self) -> ClusterSpec:
        """A Chain that knows all of them; pieces the vocabulary lacks are added to it."""
        pieces = tuple(dict.fromkeys(each for script in self.answers for each in script[1:]))
        own = tuple(each for each in pieces if not isinstance(each, bytes) or len(each) > 1)
        tokenizer = FieldTokenizer(self.sentencepiece, pieces=own)
        return ClusterSpec(FieldModel(Chain(self.answers), tokenizer))


def single_bytes(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


# No token may follow itself or come twice, so the family's repeated bytes are cut unevenly.
BYTE_LEVEL = Scripts(
    "bytes",
    False,
    (
        ("A", *single_bytes("👍"), " the"),
        (
            "B",
            b"\xf0\x9f\x91",
            b"\xa9\xe2",
            b"\x80\x8d\xf0\x9f",
            b"\x91\xa9\xe2\x80",
            b"\x8d\xf0\x9f\x91\xa7",
            b"\xe2\x80\x8d",
            b"\xf0\x9f\x91\xa6",
            " dog",
        ),
        ("C", b"\xe4\xbd", b"\xa0", b"\xe5", b"\xa5", b"\xbd", " fox"),
        (":", " lazy", " ", " over", "!"),
    ),
)
SENTENCEPIECE = Scripts(
    "sentencepiece",
    True,
    (
        ("A", *single_bytes("👍"), " the"),
        ("B", "👨", "\u200d", "👩\u200d", "👧", " dog"),
        ("C", "你", *single_bytes("世"), " fox"),
        (":", " lazy", " ", " over", "!"),
    ),
)
CASES = [
    pytest.param(scripts.spec(), index, id=f"{scripts.name}-{script[0]!r}")
    for scripts in (BYTE_LEVEL, SENTENCEPIECE)
    for index, script in enumerate(scripts.answers)
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("field", "index"), CASES, indirect=["field"])
def test_every_budget_gives_whole_characters(
    field: FieldCluster, protocol: str, index: int
) -> None:
    """Each answer is cut after every token: what is delivered is the text of these tokens."""
    weights = field.spec.model.weights
    assert isinstance(weights, Chain)
    trigger, *pieces = weights.scripts[index]
    ids = [field.tokenizer.id_of(piece) for piece in pieces]
    prompt = field.ids_of(f"the quick {trigger}")
    assert prompt[-1] == field.tokenizer.id_of(trigger)
    for tokens_count in range(1, len(ids) + 1):
        answer = field.ask(protocol, prompt, max_tokens=tokens_count)
        raw = b"".join(map(field.tokenizer.text_bytes, ids[:tokens_count]))
        assert answer.ids == ids[:tokens_count]
        assert answer.text == raw.decode(errors="replace")
        assert answer.finish == "length"
        whole = is_whole(raw)
        shown = answer.deltas if whole else answer.deltas[:-1]
        assert not any(REPLACEMENT in delta for delta in shown)
        if whole:
            # The library's own text of both, less that of the prompt.
            both = field.tokenizer.decode([*prompt, *answer.ids])
            assert both == field.tokenizer.decode(prompt) + answer.text
        else:
            assert answer.text.count(REPLACEMENT) == 1
            assert answer.text.endswith(REPLACEMENT)


def is_whole(raw: bytes) -> bool:
    return REPLACEMENT not in raw.decode(errors="replace")


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "field",
    [BYTE_LEVEL.spec(), SENTENCEPIECE.spec()],
    ids=["bytes", "sentencepiece"],
    indirect=True,
)
def test_a_conversation_keeps_its_spaces(field: FieldCluster, protocol: str) -> None:
    answer = field.ask(protocol, [{"role": "user", "content": "the  fox "}], max_tokens=4)
    assert answer.text == " lazy  over!"
    assert field.tokenizer.decode([*answer.prompt_ids, *answer.ids]).endswith(
        "assistant: lazy  over!"
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("field", [SENTENCEPIECE.spec()], ids=["sentencepiece"], indirect=True)
def test_output_may_complete_what_the_prompt_began(field: FieldCluster, protocol: str) -> None:
    """A prompt of ids may end inside a character; only all of it is a character."""
    prompt = [*field.ids_of("the"), *field.tokenizer.ids_of(*single_bytes("👍")[:2])]
    answer = field.ask(protocol, prompt, max_tokens=3)
    assert answer.text == "👍 the"
