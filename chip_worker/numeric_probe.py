"""Before a chip is ready: every bound operation on this shard's weights, against the reference.

    bound operation on the chip   ─┐
                                   ├─ cosine, relative error, ids  ─▶  ready, or ProbeFailed
    reference on the host, float32 ┘

Some kernels are right for one row and wrong for many, or wrong only beyond some size of a matrix,
so real shapes are taken at several batch sizes, the largest one a step can have included.
"""

import math

import torch

from backends.interface import BackendRuntime, KernelTable, MemoryPool
from chip_worker.batch import FormGroup
from chip_worker.models.layers import activation_operation
from chip_worker.models.rope import rotary_table
from chip_worker.numeric_check import NumericCheck, Operand, compared_rows
from chip_worker.numeric_step_probe import VOCABULARY_MAX, probe_attention, probe_sampling
from chip_worker.shard_loader import LoadedShard
from chip_worker.step_memory import StepMemory

SMALL_BATCHES = (1, 2, 7)
ROWS_MAX = 1024
"""Kernels are known that are wrong from here on. One layer of so many rows is a small part of the
prefill that a step of as many tokens is."""
LOGIT_ROWS_MAX = 16
"""Of the LM head, by far the largest matrix of a small model."""
SAMPLED_VOCABULARY = 2000
"""Rows of the LM head that the reference multiplies; one wrong row among them lowers the cosine
below its limit."""
BEYOND_RANGE_MAX = 256
"""Tokens ruled out by weights that overflow; more than a model would have are a mistake."""
LAST_VOCABULARY = 64
"""Of them, rows at the very end, where a kernel meets what fills no whole tile."""
POSITIONS_MAX = 4096
"""Of the rotary table: the tables of very long contexts take longer to make than to check."""


def probe_numerics(
    form: FormGroup,
    runtime: BackendRuntime,
    kernels: KernelTable,
    memory: StepMemory,
    pool: MemoryPool,
    loaded: LoadedShard,
) -> None:
    """Raises ProbeFailed naming operation, batch size and cosine; the pool must not be in use.

    Calls no collective: every rank is checked for itself.
    """
    rows_max = form.chunk_tokens + form.slots
    check = NumericCheck(runtime, kernels, memory, loaded.dtype, rows_max)
    probe = _WeightProbe(check, loaded)
    for rows in _batch_sizes(min(rows_max, ROWS_MAX)):
        probe.rows_alone(rows, min(form.context_tokens, POSITIONS_MAX))
        memory.end()
    for rows in _batch_sizes(min(rows_max, LOGIT_ROWS_MAX)):
        probe.logits(rows)
        if loaded.config.logit_soft_cap:
            probe.soft_cap(rows, loaded.config.logit_soft_cap)
        memory.end()
    vocabulary = form.vocabulary_tokens or loaded.config.vocabulary_size
    # All there are: only so the last one is among them.
    blocks = pool.allocate(pool.capacity)
    try:
        for rows in _batch_sizes(form.slots):
            probe_attention(check, pool, loaded, blocks, rows, form.context_tokens)
            memory.end()
            probe_sampling(check, rows, vocabulary)
            memory.end()
    finally:
        pool.release(blocks)


def _batch_sizes(rows_max: int) -> list[int]:
    return [*(rows for rows in SMALL_BATCHES if rows < rows_max), rows_max]


class _WeightProbe:
    """The operations over weights, and those between them."""

    def __init__(self, check: NumericCheck, loaded: LoadedShard) -> None:
        self._check = check
        self._loaded = loaded
        layer = loaded.weights.layers[0]
        self._matrices = [
            check.matrix(each)
            for each in (
                layer.attention.query_key_value,
                layer.attention.output,
                layer.mlp.gate_up,
                layer.mlp.down,
            )
        ]
        self._biases = [
            None if each is None else check.vector(each)
            for each in (
                layer.attention.query_key_value_bias,
                layer.attention.output_bias,
                layer.mlp.gate_up_bias,
                layer.mlp.down_bias,
            )
        ]
        self._norm = check.vector(layer.attention_norm)
        self._head_norms = [
            check.vector(each)
            for each in (layer.attention.query_norm, layer.attention.key_norm)
            if each is not None
        ]
        self._sampled_head = self._sample_head()

    def rows_alone(self, rows: int, positions_max: int) -> None:
        """All that treats every token for itself: lookup, norms, products, rotation, activation."""
        check, config = self._check, self._loaded.config
        self._embedding(rows)
        hidden, epsilon = check.random(rows, config.hidden_size), config.norm_epsilon
        residual = 3 * check.random(rows, config.hidden_size).float()
        check.rows("rms_norm", (hidden,), self._norm, epsilon)
        check.rows("add_rms_norm", (hidden, residual), self._norm, epsilon)
        for matrix, bias in zip(self._matrices, self._biases, strict=True):
            x = check.eight_bits(rows, matrix.on_chip.shape[1])
            check.rows("linear", (x,), matrix, bias, None)
        self._heads(rows, positions_max)
        gate_up = check.random(rows, 2 * len(self._loaded.shard.intermediate))
        check.rows(activation_operation(config.activation), (gate_up,))

    def _heads(self, rows: int, positions_max: int) -> None:
        """What is done to the heads of queries and keys: norms of their own, rotation."""
        check, config, shard = self._check, self._loaded.config, self._loaded.shard
        counts = len(shard.query_heads), len(shard.kv_heads)
        for norm, count in zip(self._head_norms, counts, strict=False):
            heads = check.random(rows, count, config.head_size)
            check.rows("rms_norm", (heads,), norm, config.norm_epsilon)
        heads = check.random(rows, sum(counts), config.head_size)
        positions = torch.randint(positions_max, (rows,), generator=check.generator)
        positions[-1] = positions_max - 1
        for rope in dict.fromkeys((config.rope, config.window_rope or config.rope)):
            table = rotary_table(rope, config.head_size, positions_max)
            placed = check.memory.place("rotary", table)
            check.rows("rotary", (heads, positions), Operand(placed, table))

    def _embedding(self, rows: int) -> None:
        """First and last row of this shard, others, and ids of the other ranks."""
        check, held = self._check, self._loaded.shard.vocabulary_rows
        weight = self._loaded.weights.embedding
        size = self._loaded.config.vocabulary_size
        ids = torch.randint(size, (rows,), generator=check.generator)
        ids[0], ids[rows // 2] = held[0], held[-1]
        scale = self._loaded.config.embedding_scale
        found = check.call("embedding", ids, Operand(weight, None), held.start, scale)
        compared = compared_rows(rows)
        local = [int(ids[row]) - held.start for row in compared]
        table = check.matrix_rows(weight, [each % len(held) for each in local])
        # In the small table the reference looks up, foreign ids stay outside.
        places = [
            place if 0 <= each < len(held) else len(local) for place, each in enumerate(local)
        ]
        expected = check.runtime.fallback("embedding", torch.tensor(places), table, 0, scale)
        check.same_rows("embedding", rows, found, expected, compared)

    def _sample_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Some rows of the LM head, every so many and the last ones: their numbers, and them."""
        head = self._loaded.weights.head
        last = max(0, head.shape[0] - LAST_VOCABULARY)
        # An odd stride meets every place in a tile.
        stride = last // SAMPLED_VOCABULARY | 1
        start = int(torch.randint(stride, (1,), generator=self._check.generator))
        parts = (range(start, last, stride), range(last, head.shape[0]))
        rows = [self._check.matrix_rows(head, part) for part in parts if part]
        return torch.tensor([*parts[0], *parts[1]]), torch.cat(rows)

    def logits(self, rows: int) -> None:
        """The whole shard of the LM head; the reference sees a sample and what came out largest."""
        check, head = self._check, self._loaded.weights.head
        numbers, sampled = self._sampled_head
        hidden = check.eight_bits(rows, self._loaded.config.hidden_size)
        found = check.call("logits", hidden, Operand(head, None))
        compared = compared_rows(rows)
        wide = hidden[compared].float()
        expected = check.runtime.fallback("logits", wide, sampled)
        # The reference may overflow, in its order of sums, where the chip does not.
        theirs = numbers[~torch.isfinite(expected).all(dim=0)]
        beyond = torch.cat([self._beyond_range(found, hidden, rows), theirs])
        found[:, beyond] = 0.0
        chosen = found[compared]
        expected[:, torch.isin(numbers, beyond)] = 0.0
        check.same_rows("logits", rows, chosen[:, numbers], expected)
        chosen[:, beyond] = -torch.inf
        largest = chosen.argmax(dim=1)
        their_rows = check.matrix_rows(head, largest.tolist())
        claimed = check.runtime.fallback("logits", wide, their_rows).diagonal()
        # Near ties are no mistake: as much as rounding explains may lie between the two.
        slack = 1e-3 * expected.norm(dim=1) / expected.shape[1] ** 0.5
        if bool((claimed < expected.max(dim=1).values - slack).any()):
            raise check.failed("logits", rows, "its largest logit is not the reference's")

    def soft_cap(self, rows: int, cap: float) -> None:
        """Logits far below the cap, near it, and beyond."""
        check = self._check
        width = min(self._loaded.config.vocabulary_size, VOCABULARY_MAX)
        check.rows("soft_cap", (cap * check.random(rows, width).float(),), cap)

    def _beyond_range(self, found: torch.Tensor, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """Tokens whose logits leave the range of float32 by their weights.

        A model may rule a token out so. Whether a sum overflows depends on the order in which it is
        added: it may where the sizes of its products together leave the range. Raises ProbeFailed
        for any other that is not finite.
        """
        check, head = self._check, self._loaded.weights.head
        if all(math.isfinite(each) for each in found.aminmax()):
            return torch.empty(0, dtype=torch.int64)
        tokens = (~torch.isfinite(found)).any(dim=0).nonzero().flatten()
        if len(tokens) <= BEYOND_RANGE_MAX:
            weights = check.matrix_rows(head, tokens.tolist())
            sizes = hidden.double().abs() @ weights.double().abs().T
            within = sizes <= torch.finfo(torch.float32).max
            if bool((torch.isfinite(found[:, tokens]) | ~within).all()):
                return tokens
        raise check.failed("logits", rows, "its result is not finite")
