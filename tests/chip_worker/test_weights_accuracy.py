"""The packaged model in every form of weights: its logits and its loss against float32's.

`pytest --log-cli-level=info` shows the figures that docs/kernels.md has.
"""

import logging
from functools import cache

import pytest
import torch
import torch.nn.functional as functional

from chip_worker.batch import Ready, StepRow
from control_plane.intake.model_files import ModelFiles
from control_plane.intake.tokenizer import Tokenizer
from scripts.topology import default_model_path
from tests.fakes.compute_group import BLOCK_TOKENS, ComputeGroup, admission

_log = logging.getLogger(__name__)
MODEL = default_model_path()
CHIPS = {"bf16": 0.005, "int8": 0.01, "native": 0.01}
"""Forms in bfloat16, and by what part the loss may differ."""
TEXT = """\
The lighthouse on the northern point of the island was built in 1871, after three ships had been \
lost on the rocks within a single winter. For the first forty years its lamp burned whale oil, \
then paraffin, and a keeper lived in the small stone house beside it with his family. They kept a \
goat, a vegetable garden behind a wall that broke the wind, and a logbook in which every passing \
vessel was written down together with the weather and the state of the sea. The logbooks are now \
in the museum of the town across the bay, and historians use them to learn how the climate of the \
region has changed.

A ship that comes from the open ocean sees the light at a distance of about eighteen miles. It \
turns once every ten seconds and gives two short flashes, so that no captain can mistake it for \
the light on the mainland, which burns steadily. When fog covers the coast the light is of little \
use. For this reason a horn was added in 1903. It was driven by compressed air and could be heard \
on the island so loudly that, according to one of the keepers, the goat stopped giving milk.

What makes a light visible from so far away is not only the strength of the lamp. A French \
engineer named Augustin Fresnel found that a lens does not need to be thick in order to bend light \
strongly: what matters is the angle of its surface at each point. He cut the lens into rings, left \
out the glass between them, and placed the rings one inside another like the layers of an onion. \
The result weighs a small part of what a solid lens would, and it sends nearly all of the light in \
the direction of the horizon. The same idea is used today in cameras, in traffic signals and in \
the flat plastic sheets that collect sunlight for solar cells.

In 1962 the station was made automatic. An electric motor turns the lens, a sensor switches the \
lamp on at dusk, and if the bulb fails another one moves into its place. Nobody lives in the stone \
house any more, but in summer volunteers paint the walls white and show visitors the staircase of \
one hundred and twelve steps. From the gallery at the top you can see seals on the sand bank, the \
ferry on its way to the town, and, on clear evenings, the light of the mainland answering across \
the water.
"""

pytestmark = pytest.mark.skipif(MODEL is None, reason="the packaged model is not installed")


@cache
def token_ids() -> tuple[int, ...]:
    tokenizer = Tokenizer(ModelFiles.load(MODEL).tokenizer, "default")
    return tuple(tokenizer.encode(TEXT, add_special=False))


def logits_of(dtype, weights):
    """[T, V] of all tokens of the text, from one step."""
    ids = list(token_ids())
    group = ComputeGroup.open(str(MODEL), dtype=dtype, weights=weights)
    group.form(chunk_tokens=len(ids), context_tokens=len(ids) + 1, slots=1)
    assert isinstance(group.ranks[0].last, Ready), group.ranks[0].last
    runner = group.ranks[0].session._formation._runner
    forward, found = runner.forward, []

    def watched(batch):
        hidden = forward(batch)
        found.append(runner.logits(hidden, range(len(ids))).clone())
        return hidden

    runner.forward = watched
    blocks = -(-len(ids) // BLOCK_TOKENS)
    group.step(
        admissions=(admission(ids),),
        new_blocks=tuple((0, 0, block) for block in range(blocks)),
        rows=(StepRow(0, len(ids), True),),
    )
    group.ranks[0].session.close()
    (logits,) = found
    return logits


@pytest.fixture(scope="module")
def exact():
    return logits_of("float32", "bf16")


def loss_of(logits):
    return float(functional.cross_entropy(logits[:-1], torch.tensor(token_ids()[1:])))


@pytest.mark.parametrize("weights", CHIPS)
def test_logits_and_loss_are_those_of_float32(exact, weights):
    assert len(token_ids()) > 400
    found = logits_of("bfloat16", weights)
    cosines = functional.cosine_similarity(found, exact, dim=1)
    together = functional.cosine_similarity(*(x.double().flatten() for x in (found, exact)), dim=0)
    loss, right = loss_of(found), loss_of(exact)
    same = (found.argmax(dim=1) == exact.argmax(dim=1)).float().mean()
    _log.info(
        "%s: %d tokens, cosine %.5f of all logits, %.5f of a token's on average; loss %.4f, in "
        "float32 %.4f (%+.2f %%); same argmax %.1f %%",
        *(weights, len(found), together, cosines.mean(), loss, right),
        *(100 * (loss / right - 1), 100 * same),
    )
    assert together > 0.999
    assert cosines.mean() > 0.999
    assert abs(loss / right - 1) < CHIPS[weights]
    assert same > 0.9
