"""Which steps are measured, in which order, and on which blocks.

chunks    one chunk of each size, in the middle of a prompt as long as the largest chunk, so that
          a token of every chunk attends to as many tokens on average
batches   rows that decode behind `position` tokens
others    the same at other positions, and chunks beside rows, to tell the terms of the cost model
          apart

Blocks are filled by computing prompts first: memory that was never written reads faster. Then all
steps are made once, which pays for what is set up on demand, and then in rounds: what disturbs the
machine for a while disturbs all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import NamedTuple

from typing_extensions import override

from control_plane.request import Sampling
from control_plane.scheduling.kv_groups import KVGroups
from control_plane.scheduling.messages import Admission, StepPlan, StepRow
from control_plane.scheduling.step_time import StepWork, context_of_chunk
from scripts.calibration.calibration_file import Point
from scripts.calibration.measured_group import CalibrationFailed, MeasuredGroup

FILL_TOKENS = 128
"""Of a step that fills blocks: the warm-up computed as many, so that the chip has the memory."""
SHORT_SHARE = 8
"""The other position of rows that decode is this part of `position`."""
DEADLINE_SHARE = 0.5
"""No chunk is measured that would take more of --step-deadline."""
SPREAD_MAX = 1.3
"""Usual ratio of a step's longest time to its shortest beyond which the machine counts as busy."""
SAMPLING = Sampling(temperature=1.0, seed=0)


@dataclass(frozen=True)
class Extent:
    """What is asked for; sizes ascending. position: tokens before the one that a row decodes.

    repeats: how often each step is measured.
    """

    chunks: tuple[int, ...]
    batches: tuple[int, ...]
    position: int
    repeats: int

    @property
    def slots(self) -> int:
        """Most rows of a step."""
        return self.batches[-1] + 1


class Task(NamedTuple):
    """A step to be measured: rows that decode behind `position` tokens, and maybe a chunk."""

    decode_rows: int = 0
    position: int = 0
    chunk_tokens: int = 0
    chunk_start: int = 0

    @property
    def computed_tokens(self) -> int:
        """Tokens of the step."""
        return self.decode_rows + self.chunk_tokens

    @property
    def work(self) -> StepWork:
        """As the cost model counts it."""
        return StepWork(
            self.chunk_tokens,
            context_of_chunk(self.chunk_start, self.chunk_tokens),
            self.decode_rows,
            self.decode_rows * (self.position + 1),
        )

    @override
    def __str__(self) -> str:
        """In words, for people."""
        parts = []
        if self.decode_rows:
            rows = "row" if self.decode_rows == 1 else "rows"
            parts.append(f"{self.decode_rows} {rows} behind {self.position} tokens")
        if self.chunk_tokens:
            parts.append(f"a chunk of {self.chunk_tokens} tokens from {self.chunk_start} on")
        return " and ".join(parts)


class Watcher:
    """Is told how far the sweep is; does nothing by itself."""

    def on_begin(self, tokens_count: int, prefill_tokens_per_s: float) -> None:
        """So many tokens are to be computed, and the warm-up computed so many a second."""

    def on_next(self, part: str, what: str = "") -> None:
        """This is done now; a part has many steps."""

    def on_step(self, tokens_count: int) -> None:
        """A step of so many tokens is done."""


@dataclass(frozen=True)
class Sweep:
    """What was measured, sizes ascending, and remarks on what was not.

    prompt_tokens, position: where. rows_held: requests of so many tokens that KV memory holds at
    once; None where it holds all that were asked for. limited: options, such as "--chunks", of
    which no larger sizes can be measured; the remarks say why.
    """

    chunks: tuple[Point, ...]
    batches: tuple[Point, ...]
    others: tuple[Point, ...]
    prompt_tokens: int
    position: int
    rows_held: int | None
    limited: frozenset[str]
    remarks: tuple[str, ...]

    @property
    def points(self) -> tuple[Point, ...]:
        """All of them."""
        return self.chunks + self.batches + self.others


class Sweeper:
    """Measures one group. What does not fit it is cut to what does. Raises CalibrationFailed where
    KV memory does not hold a single row."""

    def __init__(
        self, group: MeasuredGroup, extent: Extent, step_deadline_s: float, watcher: Watcher
    ) -> None:
        self._group = group
        self._repeats = extent.repeats
        self._watcher = watcher
        self._step_max_s = DEADLINE_SHARE * step_deadline_s
        self._step_deadline_s = step_deadline_s
        self._limited: set[str] = set()
        self._remarks: list[str] = []
        self._occupied: tuple[int, ...] = ()
        worker = group.worker
        self._kv = KVGroups(worker.kv_windows, group.block_tokens, extent.chunks[-1])
        self._position = self._fitting_position(extent.position)
        self._row_blocks = self._blocks_for(self._position + 1)
        self._chunks = self._fitting_chunks(extent.chunks)
        self._prompt_tokens = self._chunks[-1]
        self._batches = self._fitting_batches(extent.batches)
        random = Random(0)
        count = max(self._prompt_tokens, self._position + 1)
        self._ids = tuple(random.randrange(worker.vocabulary_size) for _ in range(count))
        wanted = group.slots * self._kv.cost(worker.context_tokens)
        held = group.blocks // self._kv.cost(self._position + 1)
        self._rows_held = held if group.blocks < wanted else None

    # ------------------------------------------------------------ what fits

    def _fitting_position(self, asked: int) -> int:
        context = self._group.worker.context_tokens
        most = context - 1
        if asked > most:
            self._remarks.append(
                f"--position {asked} is more than the model's context of {context} tokens allows; "
                f"{most} was taken"
            )
        return min(asked, most)

    def _fitting_chunks(self, asked: Sequence[int]) -> list[int]:
        group = self._group
        held = group.blocks // len(self._kv.windows) * group.block_tokens
        most = min(group.worker.context_tokens, held)
        return self._fitting(asked, most, "--chunks", "tokens", "the context and KV memory hold")

    def _fitting_batches(self, asked: Sequence[int]) -> list[int]:
        group = self._group
        most = min(group.blocks // self._row_blocks, group.slots)
        return self._fitting(asked, most, "--batches", "rows", "the chips and KV memory take")

    def _fitting(
        self, asked: Sequence[int], most: int, option: str, what: str, limit: str
    ) -> list[int]:
        why = f"{option}: {limit} {most} {what}"
        if most < 1:
            raise CalibrationFailed(f"{why}; give more --kv-blocks or a smaller --position")
        beyond = [size for size in asked if size > most]
        if beyond:
            left_out = ", ".join(str(size) for size in beyond)
            self._remarks.append(f"{why}, which was measured instead of {left_out}")
            self._limited.add(option)
        return sorted({min(size, most) for size in asked})

    def _blocks_for(self, tokens_count: int) -> int:
        """Blocks of all KV groups: none drops any, because a prompt is measured again and again."""
        return len(self._kv.windows) * self._kv.blocks_for(tokens_count)

    # ------------------------------------------------------------ measuring

    async def measure(self) -> Sweep:
        """Measures everything. Raises CalibrationFailed."""
        self._watcher.on_begin(self._tokens_count(), self._group.prefill_tokens_per_s)
        self._watcher.on_next("filling KV memory")
        await self._fill()
        await self._try_chunks()
        chunks = [self._chunk_task(size) for size in self._chunks]
        batches = [Task(size, self._position) for size in self._batches]
        others = self._other_tasks()
        for task in (*batches, *others):
            await self._run(task, "first run")
        times: dict[Task, list[float]] = {task: [] for task in (*chunks, *batches, *others)}
        for number in range(1, self._repeats + 1):
            for task, seconds in times.items():
                seconds.append(await self._run(task, f"run {number} of {self._repeats}"))
        self._remark_on_deadline({task: median(seconds) for task, seconds in times.items()})
        self._remark_on_spread(median(max(seconds) / min(seconds) for seconds in times.values()))

        def points(tasks: Sequence[Task]) -> tuple[Point, ...]:
            return tuple(Point(task.work, median(times[task])) for task in tasks)

        return Sweep(
            points(chunks),
            points(batches),
            points(others),
            self._prompt_tokens,
            self._position,
            self._rows_held,
            frozenset(self._limited),
            tuple(self._remarks),
        )

    def _remark_on_deadline(self, seconds: Mapping[Task, float]) -> None:
        longest = max(seconds, key=lambda task: seconds[task])
        if seconds[longest] > self._step_max_s:
            self._remarks.append(
                f"{longest} takes {seconds[longest]:.3g} s, more than half of --step-deadline "
                f"{self._step_deadline_s:g}: a service may take such a step for one that never "
                "ends; allow more"
            )

    def _remark_on_spread(self, spread: float) -> None:
        if spread > SPREAD_MAX:
            self._remarks.append(
                f"a step takes {spread:.1f} times as long at one time as at another: something "
                "else uses this machine; measure again when it is idle, or with more --repeats"
            )

    def _tokens_count(self) -> int:
        """Tokens that are computed in all, about."""
        filled = self._prompt_tokens + self._batches[-1] * self._position
        measured = sum(self._chunks) + sum(self._batches)
        measured += sum(task.computed_tokens for task in self._other_tasks())
        return filled + (1 + self._repeats) * measured

    def _chunk_task(self, size: int) -> Task:
        return Task(chunk_tokens=size, chunk_start=(self._prompt_tokens - size) // 2)

    def _other_tasks(self) -> list[Task]:
        prompt, longest = self._prompt_tokens, self._batches[-1]
        chunk, rows = self._chunks[len(self._chunks) // 2], self._batches[len(self._batches) // 2]
        short = max(1, self._position // SHORT_SHARE)
        tasks = [
            Task(chunk_tokens=chunk),
            Task(chunk_tokens=chunk, chunk_start=prompt - chunk),
            Task(longest, short),
            Task(1, short),
        ]
        for decode_rows, size in ((rows, chunk), (longest, self._chunks[0])):
            left = self._group.blocks - self._blocks_for(prompt)
            beside = min(decode_rows, self._group.slots - 1, left // self._row_blocks)
            if beside:
                tasks.append(Task(beside, self._position, size, prompt - size))
        known = {self._chunk_task(size) for size in self._chunks}
        known |= {Task(size, self._position) for size in self._batches}
        return [task for task in dict.fromkeys(tasks) if task not in known]

    async def _try_chunks(self) -> None:
        """Computes one of each size, as long as a step stays well within its deadline."""
        for i, size in enumerate(self._chunks):
            seconds = await self._run(self._chunk_task(size), "first run")
            following = self._chunks[i + 1 :][:1]
            if following and seconds * following[0] / size > self._step_max_s:
                self._remarks.append(
                    f"chunks from {following[0]} tokens on were left out: they would take more "
                    f"than {self._step_max_s:g} s, half of --step-deadline"
                )
                self._limited.add("--chunks")
                del self._chunks[i + 1 :]
                return

    async def _run(self, task: Task, part: str) -> float:
        """Seconds of the step."""
        self._watcher.on_next(part, str(task))
        # Rows that decode do so step after step: the second one finds everything as they will.
        before = task.position if task.chunk_tokens else task.position - 1
        entries = {slot: _Entry(self._row(slot), before, 1) for slot in range(task.decode_rows)}
        rows = [StepRow(slot, 1, sampled=True) for slot in entries]
        if task.chunk_tokens:
            slot = task.decode_rows
            entries[slot] = _Entry(self._prompt(), task.chunk_start, task.chunk_tokens)
            rows.append(StepRow(slot, task.chunk_tokens, sampled=True))
        await self._enter(entries)
        if not task.chunk_tokens:
            await self._compute(*rows)
        return await self._compute(*rows)

    # ------------------------------------------------------------ steps

    async def _fill(self) -> None:
        """Computes what the measured steps attend to."""
        self._watcher.on_next("filling KV memory")
        rows = [(self._row(i), self._position) for i in range(self._batches[-1])]
        piece = min(FILL_TOKENS, self._prompt_tokens)
        for tables, length in [(self._prompt(), self._prompt_tokens), *rows]:
            await self._enter({0: _Entry(tables, 0, length)})
            for start in range(0, length, piece):
                await self._compute(StepRow(0, min(piece, length - start), sampled=False))

    async def _compute(self, *rows: StepRow) -> float:
        seconds = await self._group.compute(StepPlan("", 0, 0, rows=rows))
        if not seconds > 0:
            raise CalibrationFailed(
                f"{self._group.worker.worker_id} does not tell how long its chip works on a step"
            )
        self._watcher.on_step(sum(row.tokens_count for row in rows))
        return seconds

    async def _enter(self, entries: "Mapping[int, _Entry]") -> None:
        """Puts requests into slots; those that were there leave."""
        leaving, self._occupied = self._occupied, tuple(entries)
        admissions, new_blocks = [], []
        for slot, entry in entries.items():
            cached_blocks = self._kv.blocks_for(entry.cached)
            tables = tuple(tuple(table[:cached_blocks]) for table in entry.tables)
            count = entry.cached + entry.further
            admissions.append(
                Admission(slot, self._ids[:count], count, entry.cached, tables, SAMPLING)
            )
            new_blocks += [
                (slot, kv_group, block)
                for kv_group, table in enumerate(entry.tables)
                for block in table[cached_blocks:]
            ]
        await self._group.compute(
            StepPlan(
                *("", 0, 0),
                releases=leaving,
                admissions=tuple(admissions),
                new_blocks=tuple(new_blocks),
            )
        )

    def _prompt(self) -> list[range]:
        """The blocks of the prompt whose chunks are measured, in every KV group."""
        return self._tables(0, self._kv.blocks_for(self._prompt_tokens))

    def _row(self, index: int) -> list[range]:
        """The blocks of a row that decodes: from the back, so that they may be those of the prompt
        only where the memory does not hold both."""
        first = self._group.blocks - (index + 1) * self._row_blocks
        return self._tables(first, self._row_blocks // len(self._kv.windows))

    def _tables(self, first: int, count: int) -> list[range]:
        starts = [first + kv_group * count for kv_group in range(len(self._kv.windows))]
        return [range(start, start + count) for start in starts]


class _Entry(NamedTuple):
    """A request for a slot: its blocks, the tokens they hold, and how many more are known."""

    tables: list[range]
    cached: int
    further: int
