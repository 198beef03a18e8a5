"""Clusters that several scenarios run on: a start takes seconds, so what can be shared is."""

from tests.fakes.field_models import (
    ALTERNATING_TEMPLATE,
    NO_SYSTEM_TEMPLATE,
    Chain,
    FieldModel,
)
from tests.fakes.field_tokenizers import END, SPECIAL, TURN_END, FieldTokenizer
from tests.field.field_cluster import ClusterSpec

MIX = ClusterSpec()
"""The default: random, byte-level, with a chat template that takes every role."""

PAIR = ClusterSpec(
    FieldModel(context=1024), ("--groups", "1,1", "--context", "1024", "--max-running", "2")
)
"""Two groups with few slots, and answers long enough to be left: it is easy to make others wait."""

LARGE_CONTEXT = 2_300_000
LARGE_LETTERS = 4000
LARGE_TOPS = 500
LARGE_HTTP_BYTES = 16 << 20
LARGE_GRPC_BYTES = 32 << 20
"""A list of an answer may take a quarter of it in one message."""
LARGE_STALL_S = 12
LARGE = ClusterSpec(
    FieldModel(
        tokenizer=FieldTokenizer(long_letters=LARGE_LETTERS), layers=1, context=LARGE_CONTEXT
    ),
    (
        *("--context", str(LARGE_CONTEXT), "--block-tokens", "128", "--kv-blocks", "18000"),
        *("--chunk-tokens", "2048", "--admission-tokens", str(LARGE_CONTEXT)),
        *("--max-top-logprobs", str(LARGE_TOPS), "--stream-stall", str(LARGE_STALL_S)),
        *("--http-body-bytes", str(LARGE_HTTP_BYTES)),
        *("--client-message-bytes", str(LARGE_GRPC_BYTES)),
        *("--lease", "20", "--heartbeat-timeout", "30", "--max-queue", "64"),
    ),
)
"""Messages of many megabytes on every hop. A prompt of millions of ids holds up the control plane
for seconds where others compute too: it and its worker get more time to hear of each other."""

SENTENCEPIECE_NO_SYSTEM = ClusterSpec(
    FieldModel(
        tokenizer=FieldTokenizer(sentencepiece=True),
        template=NO_SYSTEM_TEMPLATE,
        template_apart=True,
    )
)
"""SentencePiece style; the template stands in a file of its own and refuses a system message."""

STARTLESS_ALTERNATING = ClusterSpec(
    FieldModel(tokenizer=FieldTokenizer(starts=False), template=ALTERNATING_TEMPLATE)
)
"""No start token; the template wants roles to alternate."""

NO_TEMPLATE = ClusterSpec(FieldModel(template=None))
"""No chat template."""

ENDS_CHAIN = ClusterSpec(
    FieldModel(
        Chain(
            (
                # A stop string "STOPNOW" off the edges of tokens, near misses, two newlines.
                ("A", " the", "xST", "OPN", "O", "Wy", " dog"),
                ("B", " fox", "STO", "PNO", "X", " over"),
                ("C", " lazy", "\n\n", " and"),
                ("D", " brown", ".\n", "\n", " then"),
                ("E", " jumps", "STOST", "OPNOW", " away"),
                # End tokens: the second, the first, and a special one that is none.
                ("F", " runs", " from", " ", TURN_END),
                ("G", " here", END, " there"),
                ("H", " some", " other", SPECIAL, " small", " animals"),
            )
        ),
        FieldTokenizer(pieces=("xST", "OPN", "Wy", "STO", "PNO", "\n\n", ".\n", "STOST", "OPNOW")),
        end_ids=(END, TURN_END),
    )
)
"""Answers by the last letter of the prompt, for what ends an answer."""

ENDLESS_CHAIN = ClusterSpec(
    FieldModel(Chain((("x", "y", "x"),), impossible=("Z",)), end_ids=()),
)
"""No end token; "x" and "y" follow each other for ever, and "Z" has the probability 0."""

SCARCE = ClusterSpec(
    FieldModel(context=512), ("--context", "512", "--kv-blocks", "24", "--max-queue", "64")
)
"""Blocks for 384 tokens where the context holds 512: three requests of 128 fill them."""
