"""The groups that serve: their schedulers, the index and load table they share, their planning."""

from collections import defaultdict
from collections.abc import Callable
from itertools import islice

from control_plane.config import SchedulingConfig
from control_plane.scheduling.block_ledger import BlockLedger
from control_plane.scheduling.chip_load_table import ChipLoadTable, GroupLoad
from control_plane.scheduling.global_scheduler import (
    MOVE_GAIN_S,
    Choice,
    can_hold,
    choose_group,
    even_speeds,
    weigh_group,
)
from control_plane.scheduling.group_members import ChipGroup
from control_plane.scheduling.group_scheduler import GroupScheduler
from control_plane.scheduling.group_speed import GroupSpeed, MakeSpeed
from control_plane.scheduling.kv_groups import KVGroups
from control_plane.scheduling.live_request import LiveRequest
from control_plane.scheduling.messages import (
    BlockCounts,
    Effect,
    GroupSnapshot,
    SendStep,
    ServingChanged,
)
from control_plane.scheduling.name_order import name_order
from control_plane.scheduling.radix_index import RadixIndex
from control_plane.scheduling.residency import GroupTree, Residency, usable_prefix
from control_plane.scheduling.step_time import StepTimeModel
from control_plane.scheduling.timers import Timers
from control_plane.scheduling.worker_table import Worker

CROWDED_MAX = 8
"""Groups with a queue that a group with room looks at per step."""

MOVES_PER_STEP_MAX = 4
"""Waiting requests of one of them that it looks at."""


class ServingGroups:
    """One scheduler for every group that serves; each lives as long as its group's epoch.

    Whoever changes something in a group touches it; `plan_touched` then plans for those only.
    """

    def __init__(
        self, config: SchedulingConfig, timers: Timers, emit: Callable[[Effect], None]
    ) -> None:
        self.schedulers: dict[str, GroupScheduler] = {}
        self.load = ChipLoadTable()
        self._config = config
        self._timers = timers
        self._emit = emit
        self._index = RadixIndex(config.block_tokens)
        self._makes: dict[tuple[str, str, int], MakeSpeed] = defaultdict(MakeSpeed)
        self._worker_ids: dict[str, tuple[str, ...]] = {}
        self._contexts_tokens: dict[str, int] = {}
        self._touched: dict[str, None] = {}
        self._crowded: dict[str, None] = {}

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and output together that every serving group can hold."""
        return min(self._contexts_tokens.values())

    def memory_tokens(self, target_group: str | None) -> int:
        """Most tokens of one request that the groups it may use hold; 0 if none serves."""
        loads = [x for name, x in self.load.groups.items() if target_group in (None, name)]
        if not loads:
            return 0
        return min(self.context_tokens, max(load.tokens_max for load in loads))

    # ------------------------------------------------------------ groups come and go

    def open(self, group: ChipGroup, ranks: list[Worker]) -> None:
        """A group begins to serve, with an empty ledger."""
        reports = [rank.ready for rank in ranks if rank.ready]
        blocks_total = min(report.blocks for report in reports)
        decode_step_s = max(report.decode_step_s for report in reports)
        rate = min(report.prefill_tokens_per_s for report in reports)
        kv = KVGroups(ranks[0].info.kv_windows, group.block_tokens, self._config.chunk_tokens)
        tree = GroupTree(group.group_id, BlockLedger(blocks_total), kv)
        contexts = [rank.info.context_tokens for rank in ranks]
        if self._config.context_tokens is not None:
            contexts.append(self._config.context_tokens)
        context_tokens = min(contexts)
        load = GroupLoad(
            group_id=group.group_id,
            kv=kv,
            total_blocks=blocks_total,
            tokens_max=kv.tokens_max(blocks_total, context_tokens),
            slots_count=group.slots_count,
            speed=GroupSpeed(self._makes[_make_of(ranks)], rate),
            available_blocks=blocks_total,
        )
        self.load.add_group(load)
        self._worker_ids[group.group_id] = group.ranks
        self.schedulers[group.group_id] = GroupScheduler(
            self._config,
            group.group_id,
            group.epoch,
            group.slots_count,
            self._index,
            tree,
            self.load,
            StepTimeModel(decode_step_s, rate),
        )
        self._contexts_tokens[group.group_id] = context_tokens
        self._changed()
        self.touch(group.group_id)

    def close(self, group_id: str, orphans: list[LiveRequest]) -> None:
        """A group serves no more; its requests' load is released, they belong to nobody now."""
        scheduler = self.schedulers.pop(group_id)
        del self._contexts_tokens[group_id], self._worker_ids[group_id]
        self._crowded.pop(group_id, None)
        self._index.drop(scheduler.tree)
        self._timers.clear(("plan", group_id))
        self._timers.clear(("step", group_id))
        for live in orphans:
            self.load.release(live.request_id)
        self.load.drop_group(group_id)
        self._changed()

    def _changed(self) -> None:
        self._emit(ServingChanged(tuple(sorted(self.schedulers, key=name_order))))

    # ------------------------------------------------------------ requests

    def dispatch(self, live: LiveRequest) -> bool:
        """Sends a request to the group that is through first; False if none can hold it."""
        choice = choose_group(live, self.load.groups.values(), self._resident(live))
        if choice is None:
            return False
        self._count(live, choice)
        # Those that are busy measure themselves.
        for load in self.load.groups.values():
            if not load.requests_count:
                load.speed.pass_by(len(self.load.groups))
        self.schedulers[choice.group_id].enqueue(live)
        self.touch(choice.group_id)
        return True

    def _count(self, live: LiveRequest, choice: Choice) -> None:
        """Counts a request where it is to wait."""
        self.load.dispatch(
            live.request_id, choice.group_id, choice.tokens, live.tokens_left, choice.blocks
        )

    def flush(self) -> int:
        """Frees every cached block nobody references and returns how many there were."""
        count = 0
        for group_id, scheduler in self.schedulers.items():
            count += scheduler.blocks.flush()
            self.touch(group_id)
        return count

    def _resident(self, live: LiveRequest) -> dict[str, Residency]:
        """The end of the prefix that it could use in each group."""
        if not live.uses_cache:
            return {}
        found: dict[str, Residency] = {}
        for group_id, deepest in self._index.match(live.root_key, live.token_ids).items():
            matchable = live.matchable_blocks(deepest.tree.kv.block_tokens)
            usable = usable_prefix(deepest, matchable)
            if usable:
                found[group_id] = usable
        return found

    def forgive(self, stall_s: float) -> None:
        """The control plane itself stood still so long: no step took that time."""
        for scheduler in self.schedulers.values():
            scheduler.in_flight.forgive(stall_s)

    # ------------------------------------------------------------ planning

    def touch(self, group_id: str) -> None:
        """Something happened to a group: it may have a step to plan."""
        self._touched[group_id] = None

    def plan_touched(self, now: float) -> None:
        """Plans for every group something happened to; planning may touch others by moves."""
        while self._touched:
            group_id = next(iter(self._touched))
            del self._touched[group_id]
            scheduler = self.schedulers.get(group_id)
            if scheduler:
                self._plan(scheduler, now)

    def _plan(self, scheduler: GroupScheduler, now: float) -> None:
        group_id = scheduler.group_id
        scheduler.publish()
        if self._crowded and scheduler.has_room:
            self._move_here(scheduler, now)
        worker_ids = self._worker_ids[group_id]
        while (plan := scheduler.plan(now)) is not None:
            self._emit(SendStep(worker_ids, plan))
            if not self._timers.has(("step", group_id)):
                self._timers.set(("step", group_id), now + self._config.step_deadline_s)
        scheduler.publish()
        if scheduler.waiting:
            self._crowded[group_id] = None
        else:
            self._crowded.pop(group_id, None)
        if scheduler.is_idle:
            held_count = scheduler.tree.ledger.counts().referenced
            assert not held_count, f"{group_id} is idle, but {held_count} blocks are referenced"
        when = scheduler.plan_at()
        if when is not None and when > now:
            self._timers.set(("plan", group_id), when)

    def _move_here(self, scheduler: GroupScheduler, now: float) -> None:
        """Takes waiting requests over from the busiest group if they would start sooner here."""
        here = self.load.groups[scheduler.group_id]
        crowded = [self.schedulers[name] for name in islice(self._crowded, CROWDED_MAX)]
        others = [other for other in crowded if other is not scheduler]
        if not others:
            return
        busiest = max(others, key=lambda s: self.load.groups[s.group_id].queued_tokens)
        there = self.load.groups[busiest.group_id]
        if busiest.slots.free_count and there.queued_blocks <= there.available_blocks:
            return  # It lacks nothing; who waits there waits for a prefix or the next step.
        for live in busiest.waiting.ordered(now, lambda _: 0)[:MOVES_PER_STEP_MAX]:
            if here.running_count + len(scheduler.waiting) >= here.slots_count:
                return
            if not can_hold(live, here):
                continue
            resident = self._resident(live)
            busiest.withdraw(live)
            there_s, here_s = even_speeds((there, here))
            stays = weigh_group(live, there, resident.get(there.group_id), there_s)
            moves = weigh_group(live, here, resident.get(here.group_id), here_s)
            if moves.work_s + MOVE_GAIN_S < stays.work_s:
                choice, target = moves, scheduler
            else:
                choice, target = stays, busiest
            self._count(live, choice)
            target.enqueue(live)

    # ------------------------------------------------------------ looking in

    def snapshot(self, group: ChipGroup) -> GroupSnapshot:
        """A group as `status` shows it."""
        scheduler = self.schedulers.get(group.group_id)
        return GroupSnapshot(
            group_id=group.group_id,
            epoch=group.epoch,
            worker_ids=group.ranks or group.worker_ids,
            state=group.state.value,
            running=len(scheduler.running) + len(scheduler.retracting) if scheduler else 0,
            waiting=len(scheduler.waiting) if scheduler else 0,
            retracted=scheduler.retracted_count if scheduler else 0,
            blocks=scheduler.tree.ledger.counts() if scheduler else BlockCounts(0, 0, 0, 0),
            block_tokens=group.block_tokens,
            steps=scheduler.steps_count if scheduler else 0,
            steps_in_flight=len(scheduler.in_flight) if scheduler else 0,
            predicted_s=scheduler.in_flight.predicted_s if scheduler else 0.0,
            chunk_step_error=scheduler.step_time.chunk_error if scheduler else 0.0,
            decode_step_error=scheduler.step_time.decode_error if scheduler else 0.0,
        )

    def check_integrity(self) -> None:
        """Asserts conservation of blocks, references, loads and stages."""
        for scheduler in self.schedulers.values():
            scheduler.check_integrity()
        self._index.check_integrity([s.tree for s in self.schedulers.values()])
        self.load.check_integrity()


def _make_of(ranks: list[Worker]) -> tuple[str, str, int]:
    """Groups of one make are expected to be equally fast."""
    info = ranks[0].info
    return info.backend, info.dtype, len(ranks)
