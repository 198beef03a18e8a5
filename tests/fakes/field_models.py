"""Tiny Llama models for the field scenarios, as Hugging Face directories.

Chain   attention and MLP write nothing, so that the next token depends on the last one only:
        answers are scripted token by token (probability 1.0). It cannot show faults of KV memory.
Mix     random, with sharp logits: every token depends on all before it, so such faults change the
        text. Its flat version suits what is drawn; it can have rows beyond the tokenizer, or ties.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.fakes.checkpoints import TinyLlama
from tests.fakes.field_tokenizers import END, SIZE, SPECIAL_TEXTS, START, TURN_END, FieldTokenizer

PADDING_ROWS = 16
"""Logit rows beyond the tokenizer of a padded Mix; enough that one of them is always large."""
PADDING_SCALE = 10.0
CHAIN_HIDDEN = 128
CHAIN_LOGIT = CHAIN_HIDDEN / 2
"""Logit of the scripted token. The others' are within half of it, so that a bias of 100 forces any
other token, and one of -100 excludes the scripted one."""
IMPOSSIBLE_WEIGHT = 3e38
"""Finite in float32; twice as much is not."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}<|turn_end|>\n"
    "{% endfor %}assistant:"
)
NO_SYSTEM_TEMPLATE = (
    "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('a system role is not supported') }}{% endif %}" + CHAT_TEMPLATE
)
ALTERNATING_TEMPLATE = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
    + CHAT_TEMPLATE
)


@dataclass(frozen=True)
class Chain:
    """scripts: runs of tokens, by id or text; each is the successor of the one before it. A run may
    end with one of its own tokens: a loop. A token has one successor, so no other may come twice.

    All other printable tokens follow each other in a ring, in the order of their ids, and every
    token that is not printable leads to the ring's first: whatever the prompt, the answer is
    legible and has no end.

    impossible: texts of tokens whose logit is always minus infinity; they follow none.
    """

    scripts: tuple[tuple[int | str | bytes, ...], ...] = ()
    impossible: tuple[str, ...] = ()

    def successors(self, tokenizer: FieldTokenizer) -> list[int]:
        """For every token the one that follows it."""
        scripted: dict[int, int] = {}
        last_ids: set[int] = set()
        impossible = tokenizer.ids_of(*self.impossible)
        for script in self.scripts:
            ids = [each if isinstance(each, int) else tokenizer.id_of(each) for each in script]
            last_ids.add(ids[-1])
            for token_id, follower in itertools.pairwise(ids):
                assert token_id not in scripted, f"token {token_id} has two successors"
                scripted[token_id] = follower
        ring = [
            token_id
            for token_id in range(SIZE)
            if token_id not in scripted
            and token_id not in last_ids
            and token_id not in impossible
            and _is_legible(tokenizer.text_bytes(token_id))
        ]
        following = dict(zip(ring, [*ring[1:], ring[0]], strict=True)) | scripted
        return [following.get(token_id, ring[0]) for token_id in range(SIZE)]

    def answer(
        self, tokenizer: FieldTokenizer, last_id: int, count: int, ends: Sequence[int] = ()
    ) -> list[int]:
        """The script's own answer to a prompt that ends with `last_id`, its end token included."""
        successors = self.successors(tokenizer)
        ids: list[int] = []
        while len(ids) < count and not (ids and ids[-1] in ends):
            last_id = successors[last_id]
            ids.append(last_id)
        return ids

    def tensors(self, shape: TinyLlama, tokenizer: FieldTokenizer) -> dict[str, torch.Tensor]:
        """A token's embedding is the output row of its successor; rows are random signs."""
        generator = torch.Generator().manual_seed(shape.seed)
        signs = torch.randint(0, 2, (SIZE, shape.hidden), generator=generator) * 2.0 - 1.0
        tensors = shape.tensors()
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            elif name.endswith("norm.weight"):
                tensor.fill_(1.0)
        if self.impossible:
            signs[:, :2] = 1.0
        head = signs * (CHAIN_LOGIT / shape.hidden)
        if self.impossible:
            # Two products of one sign, finite each, whose sum is beyond float32.
            head[tokenizer.ids_of(*self.impossible), :2] = -IMPOSSIBLE_WEIGHT
        tensors["model.embed_tokens.weight"] = signs[self.successors(tokenizer)]
        tensors["lm_head.weight"] = head
        return tensors


@dataclass(frozen=True)
class Mix:
    """flat: logits so close that draws at temperature 1 differ. padded: PADDING_ROWS more logits
    than the tokenizer has tokens, one of them always the largest. tied: tokens 2i and 2i + 1 always
    have equal logits.
    """

    seed: int = 0
    flat: bool = False
    padded: bool = False
    tied: bool = False

    def tensors(self, shape: TinyLlama, tokenizer: FieldTokenizer) -> dict[str, torch.Tensor]:
        """Random weights; see TinyLlama."""
        del tokenizer
        tensors = shape.tensors()
        head = tensors["lm_head.weight"]
        if self.flat:
            head *= 0.1
        if self.tied:
            head[1::2] = head[0::2]
        if self.padded:
            padding = head[SIZE:]
            padding *= PADDING_SCALE
            padding[1::2] = -padding[0::2]
        return tensors


@dataclass(frozen=True)
class FieldModel:
    """One model directory; equal ones are written once a session.

    end_ids: the generation config's end tokens; none at all leaves the model without an end token.
    template: None for a model without a chat template. template_apart: it stands in a .jinja file.
    layers, context: sizes. config_changes: entries of config.json as JSON text, key by key.
    """

    weights: Chain | Mix = field(default_factory=Mix)
    tokenizer: FieldTokenizer = field(default_factory=FieldTokenizer)
    end_ids: tuple[int, ...] = (END, TURN_END)
    template: str | None = CHAT_TEMPLATE
    template_apart: bool = False
    layers: int = 2
    context: int = 256
    config_changes: tuple[tuple[str, str], ...] = ()

    @property
    def vocabulary_size(self) -> int:
        """Tokens that may come: those the tokenizer knows."""
        return SIZE

    @cached_property
    def shape(self) -> TinyLlama:
        """Sizes of the model: 8 query and 2 key/value heads."""
        shape = TinyLlama(
            layers=self.layers,
            query_heads=8,
            kv_heads=2,
            head_size=8,
            hidden=64,
            intermediate=128,
            vocabulary=SIZE,
            context=self.context,
            tied=False,
        )
        if isinstance(self.weights, Chain):
            return replace(shape, hidden=CHAIN_HIDDEN)
        padding = PADDING_ROWS if self.weights.padded else 0
        return replace(shape, seed=self.weights.seed, vocabulary=SIZE + padding)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights, by their names in a checkpoint."""
        return self.weights.tensors(self.shape, self.tokenizer)

    def write(self, folder: Path) -> None:
        """Writes the directory, which must not exist."""
        folder.mkdir(parents=True)
        files: dict[str, object] = {
            "config.json": self._config(),
            "generation_config.json": {"eos_token_id": list(self.end_ids)},
            "tokenizer_config.json": self._tokenizer_config(),
        }
        if not self.end_ids:
            del files["generation_config.json"]
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        (folder / "tokenizer.json").write_text(self.tokenizer.to_json())
        if self.template is not None and self.template_apart:
            (folder / "chat_template.jinja").write_text(self.template)
        save_file(self.tensors(), folder / "model.safetensors")

    def _config(self) -> dict[str, object]:
        config = self.shape.hugging_face_config()
        if self.end_ids:
            config["eos_token_id"] = self.end_ids[0]
        if self.tokenizer.starts:
            config["bos_token_id"] = START
        return config | {key: json.loads(value) for key, value in self.config_changes}

    def _tokenizer_config(self) -> dict[str, object]:
        config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self.tokenizer.starts:
            config["bos_token"] = SPECIAL_TEXTS[START]
        if END in self.end_ids:
            config["eos_token"] = SPECIAL_TEXTS[END]
        if self.template is not None and not self.template_apart:
            config["chat_template"] = self.template
        return config


def _is_legible(text: bytes) -> bool:
    return text.isascii() and text.decode().isprintable() and text != b""
