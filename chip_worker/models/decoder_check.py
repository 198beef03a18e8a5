"""A decoder's checkpoint looked through when it is opened, before any chip is touched."""

import itertools
import re

import torch

from chip_worker.checkpoint import Checkpoint
from chip_worker.errors import ModelError
from chip_worker.model_config import ModelConfig
from chip_worker.models.decoder_weights import EMBEDDING, HEAD, DecoderPlan
from chip_worker.tensor_parallel import plan_shard

# A layer's or the decoder's own tensors, as files of either format call them.
_OF_DECODER = re.compile(
    r"((language_model\.)?model\.(language_model\.)?layers|blk)\.(?P<layer>\d+)\..*\.(weight|bias)"
    r"|((language_model\.)?model\.(language_model\.)?(norm|embed_tokens)"
    r"|(language_model\.)?lm_head|output_norm|output|token_embd)\.(weight|bias)"
)
_COMPARED_ROWS = 1024


def tables_are_one(checkpoint: Checkpoint) -> bool:
    """True if the output head in the checkpoint is the embedding; if not, both are needed, though
    the configuration ties them: transformers decides so too."""
    shape = checkpoint.shape(EMBEDDING)
    if checkpoint.shape(HEAD) != shape:
        return False
    parts = (
        range(n, min(n + _COMPARED_ROWS, shape[0])) for n in range(0, shape[0], _COMPARED_ROWS)
    )
    return all(
        torch.equal(checkpoint.read(EMBEDDING, rows), checkpoint.read(HEAD, rows)) for rows in parts
    )


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """All the model needs is there, in shapes and types that can be read, and nothing is there that
    would change its answers. Raises ModelError naming the tensor."""
    if not config.tied_embeddings and not checkpoint.has(HEAD):
        raise ModelError(
            f"{checkpoint.path}: tensor {checkpoint.stored_name(HEAD)} is missing and "
            "tie_word_embeddings is not set: the model has no output head; set it in config.json "
            "if the head is the embedding"
        )
    # One chip holds everything.
    plan = DecoderPlan(config, plan_shard(config, 0, 1, "cover"))
    types: set[str] = set()
    names = {EMBEDDING, HEAD}
    for piece in itertools.chain.from_iterable(plan.tensors()):
        checkpoint.expect(piece.name, piece.shape)
        names.add(piece.name)
        type_name = checkpoint.entries[checkpoint.stored_name(piece.name)].type_name
        if type_name not in types:
            checkpoint.check_type(piece.name)
            types.add(type_name)
    for stored in checkpoint.others(names):
        found = _OF_DECODER.fullmatch(stored)
        if found and int(found["layer"] or 0) < config.layers_count:
            raise ModelError(
                f"{checkpoint.path}: tensor {stored} is none of architecture "
                f"{config.architecture!r} as the configuration describes it, and without it every "
                "answer would be another"
            )
