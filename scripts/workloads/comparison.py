"""Several servers under the same load, in turn: run 1 of each, then run 2 of each, and so on."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import anyio

from scripts.workloads.figures import Figures, doubts_about, figures_of
from scripts.workloads.machine import Load
from scripts.workloads.probe import MachineProbe, probe_machine
from scripts.workloads.prompts import PromptMaker
from scripts.workloads.server import KEY_REMEDY, Server
from scripts.workloads.streaming import RequestFailed
from scripts.workloads.workload import WARM_UP, Outcome, Workload

CLIENT_CPU_PERCENT_MAX = 25.0
"""A client that takes more of a core is part of what it measures."""
STATUSES_OF_TOO_LONG = (400, 413, 422)
STATUSES_OF_UNKNOWN_FIELDS = (400, 422)
OPTIONAL_FIELDS = ("ignore_eos", "stream_options")


class WorkloadFailed(Exception):
    """A request of a workload failed; the message says where, in which and why."""


class ContextTooSmall(WorkloadFailed):
    """The server's context is smaller than the workload needs; the message says why."""


@dataclass
class Run:
    """One run of all workloads at one server.

    server_index, number: from 0 and from 1. probe: of this machine just before; None: not probed.
    blocks_freed: by the flush before it; None: no flush,
    only new prompts. skipped: why, by workload. doubts: why figures may not be comparable.
    """

    server_index: int
    number: int
    seed: int
    probe: MachineProbe | None
    blocks_freed: int | None
    figures: dict[str, Figures] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, list[str]] = field(default_factory=dict)


class Watcher(ABC):
    """Is told how far a comparison is."""

    @abstractmethod
    def on_workload(self, run: Run, name: str, requests_done: int) -> None:
        """A workload, or the warm-up, begins after so many requests of the comparison."""

    @abstractmethod
    def on_answer(self) -> None:
        """One more request is answered."""

    @abstractmethod
    def on_run(self, run: Run) -> None:
        """A run is complete."""


@dataclass(frozen=True)
class Comparison:
    """What is measured.

    seed: of the first run's prompts; every further run has one of its own. probes: this machine,
    before each run.
    """

    servers: Sequence[Server]
    workloads: Mapping[str, Workload]
    runs_count: int
    seed: int
    maker: PromptMaker
    probes: bool = True

    @property
    def requests_each(self) -> int:
        """Of one run at one server, with the warm-up."""
        return sum(workload.requests for workload in (*WARM_UP, *self.workloads.values()))

    @property
    def requests(self) -> int:
        """Of the whole comparison."""
        return self.requests_each * self.runs_count * len(self.servers)

    async def measure(self, watcher: Watcher) -> list[Run]:
        """Runs in the order they were made.

        Raises WorkloadFailed at the first failure, and what flushing a cache and making prompts do.
        """
        runs: list[Run] = []
        for number in range(1, self.runs_count + 1):
            for index, server in enumerate(self.servers):
                probe = await anyio.to_thread.run_sync(probe_machine) if self.probes else None
                run = Run(index, number, self.seed + len(runs), probe, server.flush_cache())
                await self._measure_run(run, watcher, len(runs) * self.requests_each)
                watcher.on_run(run)
                runs.append(run)
        return runs

    async def _measure_run(self, run: Run, watcher: Watcher, requests_done: int) -> None:
        server = self.servers[run.server_index]
        random = Random(run.seed)
        for workload in (*WARM_UP, *self.workloads.values()):
            watcher.on_workload(run, workload.name, requests_done)
            requests_done += workload.requests
            load = Load()
            try:
                outcome = await self._outcome(server, workload, random, watcher.on_answer)
            except ContextTooSmall as error:
                if workload in WARM_UP:
                    raise WorkloadFailed(f"{server.label}: {workload.name}: {error}") from error
                run.skipped[workload.name] = str(error)
                continue
            if workload not in WARM_UP:
                figures = figures_of(outcome) | load.figures()
                run.figures[workload.name] = figures
                run.doubts[workload.name] = [*doubts_about(outcome), *_doubts_of_client(figures)]

    async def _outcome(
        self, server: Server, workload: Workload, random: Random, on_answer: Callable[[], None]
    ) -> Outcome:
        needed = workload.context_tokens + self.maker.start_tokens_count
        if server.context_tokens is not None and server.context_tokens < needed:
            raise ContextTooSmall(
                f"needs a context of {needed} tokens, the server has {server.context_tokens}"
            )
        try:
            return await workload.run(server.endpoint, self.maker, random, on_answer)
        except RequestFailed as error:
            # Servers that do not tell their context say it when it is exceeded, each in own words.
            if error.status in STATUSES_OF_TOO_LONG and "context" in str(error).lower():
                raise ContextTooSmall(str(error)) from error
            where = f"{server.label}: {workload.name}: {error}"
            raise WorkloadFailed(where + _remedy(error)) from error


def _remedy(error: RequestFailed) -> str:
    if error.status == 401:
        return KEY_REMEDY
    unknown = [name for name in OPTIONAL_FIELDS if name in str(error)]
    if error.status in STATUSES_OF_UNKNOWN_FIELDS and unknown:
        return f"; --no-ignore-eos leaves {' and '.join(OPTIONAL_FIELDS)} out"
    return ""


def _doubts_of_client(figures: Figures) -> list[str]:
    percent = figures["client_cpu_percent"] or 0
    if percent <= CLIENT_CPU_PERCENT_MAX:
        return []
    return [
        f"this client took {percent:.0f} % of a core; if the server runs on this machine, measure "
        "from another one"
    ]
