"""The vendor's library of one chip: kernels under the vendor's names, which reject what it rejects.

Nothing here is made right for the caller: that is what the adapters are for. A call checks its
arguments at once and queues the arithmetic; outputs are filled when the chip gets to it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from backends.sim import arithmetic, sampling_arithmetic
from backends.sim.arithmetic import Scores
from backends.sim.launcher import Launcher, size_bytes
from backends.simulator.kernel_rules import KernelRejected, spoiled


@dataclass(frozen=True, eq=False)
class RowLengths:
    """Lengths of some rows, for the launch on the host and for the kernel on the chip.

    starts: one more than rows, where in the step each row's queries start; contexts: tokens of each
    row before them. on_chip: [rows, 2] int32, both of each row.
    """

    starts: tuple[int, ...]
    contexts: tuple[int, ...]
    on_chip: torch.Tensor

    @property
    def rows(self) -> int:
        """How many rows."""
        return len(self.contexts)

    def seen_tokens(self, window: int) -> int:
        """Tokens that some query of a row sees, of all rows."""
        return sum(
            count + (min(context, window - 1) if window else context)
            for count, context in zip(self._counts(), self.contexts, strict=True)
        )

    def pairs(self, window: int) -> int:
        """Query-key pairs: a query sees its context and the queries up to itself, or a window."""
        total = 0
        for count, context in zip(self._counts(), self.contexts, strict=True):
            # The first queries see less than a window, one token more each.
            growing = min(count, max(0, window - context)) if window else count
            total += growing * context + growing * (growing + 1) // 2 + (count - growing) * window
        return total

    def _counts(self) -> Iterator[int]:
        return (stop - start for start, stop in pairwise(self.starts))


class SimDriver(Launcher):
    """The kernels of one chip. Every call raises KernelRejected for what its kernel refuses."""

    # ------------------------------------------------------------ dense

    def embedding(
        self, ids: torch.Tensor, weight: torch.Tensor, first_row: int, output: torch.Tensor
    ) -> None:
        """output[t] = weight[ids[t] - first_row], zeros where there is no such row."""
        self.launch(
            "embedding",
            lambda: arithmetic.embed(ids, weight, first_row, output),
            (weight,),
            (output,),
            indices=(ids,),
            moved_bytes=2 * size_bytes(output),
        )

    def rmsnorm(
        self, x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, eps: float
    ) -> None:
        """output = x / rms(x) * weight."""
        self.launch(
            "rms_norm",
            lambda: arithmetic.normalize(x, weight, eps, output),
            (x, weight),
            (output,),
        )

    def add_rmsnorm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        output: torch.Tensor,
        eps: float,
        residual_output: torch.Tensor,
    ) -> None:
        """residual_output = x + y; output = its norm."""
        self.launch(
            "add_rms_norm",
            lambda: arithmetic.add_and_normalize(x, y, weight, eps, output, residual_output),
            (x, y, weight),
            (output, residual_output),
        )

    def matmul(
        self,
        name: str,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """out = x w^T + bias; `name` is the operation it is done for."""
        self.launch(
            name,
            lambda: arithmetic.multiply(x, w, bias, out),
            (x, w) if bias is None else (x, w, bias),
            (out,),
            flops=2.0 * x.shape[0] * w.numel(),
        )

    def rotary_embedding(
        self, positions: torch.Tensor, x: torch.Tensor, cos_sin_cache: torch.Tensor
    ) -> None:
        """Rotates x [T, n, d] in place."""
        self.launch(
            "rotary",
            lambda: arithmetic.rotate(x, positions, cos_sin_cache, x),
            (x, cos_sin_cache),
            (x,),
            indices=(positions,),
            moved_bytes=2 * size_bytes(x) + positions.numel() * x.shape[-1] * 4,
        )

    def swiglu(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """y [T, I] = silu of the first half of x [T, 2I], times the second."""
        self.launch(
            "silu_mul",
            lambda: arithmetic.gate(x, y),
            (x,),
            (y,),
            whole_words=True,
            exact_rows=x.shape[0],
        )

    def gelu_tanh_and_mul(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """y [T, I] = gelu of the first half of x [T, 2I], times the second."""
        if not self.profile.gelu_gate.value:
            raise KernelRejected(f"{self.profile.name} has no kernel gelu_tanh_and_mul")
        self.launch("gelu_mul", lambda: arithmetic.gelu_gate(x, y), (x,), (y,))

    def multiply(self, x: torch.Tensor, number: float) -> None:
        """x times a number, in place, rounded once."""
        self.launch("multiply", lambda: arithmetic.multiply_by(x, number), (x,), (x,))

    # ------------------------------------------------------------ keys, values, attention

    def reshape_and_cache(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Token t of k and v [T, kv_heads, d] goes to place places[t] of block blocks[t]."""

        def write(key: torch.Tensor, value: torch.Tensor) -> None:
            arithmetic.write_slots(k_cache, v_cache, blocks, places, key, value)

        self.launch(
            "write_kv",
            lambda: write(k, v),
            (k, v),
            (),
            indices=(blocks, places),
            caches=(k_cache, v_cache),
            moved_bytes=4 * size_bytes(k),
            wrong=lambda: write(spoiled(k), spoiled(v)),
        )

    def speculative_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: RowLengths,
        scale: float,
        out: torch.Tensor,
        max_window_size: int = -1,
        logits_soft_cap: float = 0.0,
    ) -> None:
        """Decode attention, one query a row, over so many rows only.

        max_window_size: how many tokens a query sees, itself included; -1 is all.
        """
        window = max(0, max_window_size)
        scores = Scores(scale, window, logits_soft_cap)
        self._attend("decode", q, k_cache, v_cache, block_tables, lengths, scores, out)

    def prefill_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: RowLengths,
        alpha: float,
        out: torch.Tensor,
        swa_left: int = -1,
        logits_soft_cap: float = 0.0,
    ) -> None:
        """Causal attention, any number of queries a row; divides alpha by sqrt(d) itself.

        swa_left: how many tokens before itself a query sees; -1 is all.
        """
        scores = Scores(alpha / math.sqrt(q.shape[-1]), swa_left + 1, logits_soft_cap)
        self._attend("prefill", q, k_cache, v_cache, block_tables, lengths, scores, out)

    def _attend(
        self,
        kind: str,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: RowLengths,
        scores: Scores,
        out: torch.Tensor,
    ) -> None:
        self._check_scores(kind, scores)
        _, heads, size = q.shape
        kv_heads = k_cache.shape[2]
        if heads % kv_heads:
            raise ValueError(
                f"head_num {heads} is not a multiple of kv_head_num {kv_heads}: every key head "
                "must have as many query heads"
            )

        def run() -> None:
            starts, contexts = lengths.on_chip.T.tolist()
            first = starts[0] if starts else 0
            ends = [*starts[1:], first + q.shape[0]]
            for row, (start, context) in enumerate(zip(starts, contexts, strict=True)):
                tokens = slice(start - first, ends[row] - first)
                arithmetic.attend(
                    q[tokens], k_cache, v_cache, block_tables[row], context, scores, out[tokens]
                )

        seen = lengths.seen_tokens(scores.window)
        self.launch(
            "attention",
            run,
            (q,),
            (out,),
            indices=(block_tables, lengths.on_chip),
            caches=(k_cache, v_cache),
            moved_bytes=2 * size_bytes(q) + 2 * seen * kv_heads * size * q.element_size(),
            flops=4.0 * heads * size * lengths.pairs(scores.window),
            decode_rows=lengths.rows if kind == "decode" else 0,
        )

    def _check_scores(self, kind: str, scores: Scores) -> None:
        if scores.window and not self.profile.attention_window.value:
            raise KernelRejected(f"{self.profile.name}: {kind} attention has no window")
        if scores.soft_cap and not self.profile.attention_soft_cap.value:
            raise KernelRejected(f"{self.profile.name}: {kind} attention has no soft cap")

    def take_heads(self, x: torch.Tensor, heads: tuple[int, ...], out: torch.Tensor) -> None:
        """out[:, i] = x[:, heads[i]], zeros where that is -1."""

        def run() -> None:
            for place, head in enumerate(heads):
                if head < 0:
                    out[:, place] = 0
                else:
                    out[:, place] = x[:, head]

        self.launch("take_heads", run, (x,), (out,))

    # ------------------------------------------------------------ tokens

    def adjust_logits(
        self, adjusted: torch.Tensor, row: torch.Tensor, token: torch.Tensor, *columns: torch.Tensor
    ) -> None:
        """Changes the logits of some tokens in place; columns as in the operation."""
        bias, output_count, presence, frequency, repetition = columns
        self.launch(
            "adjust_logits",
            lambda: sampling_arithmetic.adjust(
                adjusted, row, token, bias, output_count, presence, frequency, repetition
            ),
            columns,
            (adjusted,),
            indices=(row, token),
            moved_bytes=2 * row.numel() * 4,
        )

    def top_k_top_p_sampling(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        ids: torch.Tensor,
        finite: torch.Tensor,
    ) -> None:
        """One token a row; keys: seed, choice and index, which take 64 bits."""
        self.launch(
            "sample",
            lambda: sampling_arithmetic.draw(
                logits, temperature, keys, top_k, top_p, min_p, ids, finite
            ),
            (logits, temperature, *keys, top_p, min_p),
            (ids, finite),
            indices=(top_k,),
        )

    def token_logprobs(
        self,
        logits: torch.Tensor,
        ids: torch.Tensor,
        chosen: torch.Tensor,
        tops: torch.Tensor,
        top_ids: torch.Tensor,
    ) -> None:
        """Log-probabilities of `ids` and of the likeliest tokens."""
        self.launch(
            "token_logprobs",
            lambda: sampling_arithmetic.list_likeliest(logits, ids, chosen, tops, top_ids),
            (logits,),
            (chosen, tops, top_ids),
            indices=(ids,),
        )

    # ------------------------------------------------------------ bytes

    def fill(self, out: torch.Tensor, value: float) -> None:
        """Every element becomes `value`."""
        self.launch("fill", lambda: _fill(out, value), (), (out,))


def _fill(out: torch.Tensor, value: float) -> None:
    out.fill_(value)
