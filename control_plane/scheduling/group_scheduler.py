"""One serving group: its queue, its slots, its steps on their way, from admission to release.

    waiting --admit--> running --remove--> (over)
       ^                  |
       '--- retracting <--'   until the results of its last steps are back

Lives as long as one epoch of the group.
"""

from bisect import insort
from collections import Counter

from control_plane.config import SchedulingConfig
from control_plane.scheduling import step_planner
from control_plane.scheduling.chip_load_table import ChipLoadTable
from control_plane.scheduling.chunk_budget import ChunkBudget
from control_plane.scheduling.group_speed import PACE_CHUNK_TOKENS
from control_plane.scheduling.live_request import LiveRequest, Stage
from control_plane.scheduling.messages import (
    Admission,
    PromptDelta,
    StepDone,
    StepPlan,
    TokenDelta,
    Tokens,
)
from control_plane.scheduling.radix_index import RadixIndex
from control_plane.scheduling.request_blocks import RequestBlocks
from control_plane.scheduling.residency import GroupTree, Residency
from control_plane.scheduling.row_outcomes import is_finite, new_scores, token_delta
from control_plane.scheduling.slot_table import SlotTable
from control_plane.scheduling.step_planner import PlannedRow
from control_plane.scheduling.step_time import StepTimeModel
from control_plane.scheduling.steps_in_flight import StepsInFlight
from control_plane.scheduling.table_room import TableChange
from control_plane.scheduling.waiting_queue import WaitingQueue


class GroupScheduler:
    """Plans the steps of a group and takes their results; decides who runs, waits and gives way."""

    def __init__(
        self,
        config: SchedulingConfig,
        group_id: str,
        epoch: int,
        slots_count: int,
        index: RadixIndex,
        tree: GroupTree,
        load: ChipLoadTable,
        step_time: StepTimeModel,
    ) -> None:
        self.group_id = group_id
        self.epoch = epoch
        self.tree = tree
        self.step_time = step_time
        self.steps_count = 0
        self.retracted_count = 0
        self.in_flight = StepsInFlight(step_time)
        self.waiting = WaitingQueue(config.policy, config.ageing_s)
        self.running: list[LiveRequest] = []
        self.retracting: list[LiveRequest] = []
        self.slots = SlotTable(slots_count)
        self.blocks = RequestBlocks(
            index, tree, reserve_after=config.retractions_before_reservation
        )
        self._config = config
        self._load = load
        self._admitted_at: dict[str, float] = {}

    # ------------------------------------------------------------ requests in and out

    def enqueue(self, live: LiveRequest) -> None:
        """A request begins to wait here; its load is counted by the caller."""
        live.group_id = self.group_id
        live.stage = Stage.WAITING
        self.waiting.add(live)

    def withdraw(self, live: LiveRequest) -> None:
        """Takes a waiting request back before its first step here is planned."""
        was_waiting = self.waiting.remove(live)
        assert was_waiting, live.request_id
        self._load.release(live.request_id)

    def remove(
        self, live: LiveRequest, now: float, *, valid_tokens: int | None, trusted: bool = True
    ) -> None:
        """A request is over, at whatever stage.

        valid_tokens: how many of its tokens may stay cached; None means all that are computed.
        trusted: False forgets the blocks it wrote.
        """
        self.waiting.remove(live)
        placement = live.placement
        if placement:
            valid = placement.computed_count
            if valid_tokens is not None:
                valid = min(valid, valid_tokens)
            if trusted:
                self.blocks.release(live, placement, valid, now)
            else:
                self.blocks.discard(live, placement, now)
            self._leave_slot(live, now)
        self._load.release(live.request_id)
        live.stage = Stage.OVER

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits or is on its way, and the workers' tables are empty."""
        return not (
            self.running
            or self.retracting
            or self.waiting
            or self.in_flight
            or self.slots.has_releases
        )

    @property
    def has_room(self) -> bool:
        """Whether a request from elsewhere could start here at once."""
        shares = not any(live.alone for live in self.running)
        return shares and not self.waiting and self.slots.free_count > 0

    # ------------------------------------------------------------ planning

    def plan_at(self) -> float | None:
        """When the next step is to be planned; None: at once, or not before a result is back."""
        if len(self.in_flight) >= self._config.pipeline_depth:
            return None
        return self.in_flight.plan_at(self._config.plan_lead_s)

    def plan(self, now: float) -> StepPlan | None:
        """The next step, if one is due and there is something to do."""
        if len(self.in_flight) >= self._config.pipeline_depth:
            return None
        when = self.plan_at()
        if when is not None and now < when:
            return None
        self._retract_for_blocks(now)
        decodes, changes = self._ready_decodes(now)
        decoding = any(
            live.placement and step_planner.wants_decode(live, live.placement)
            for live in self.running
        )
        budget = ChunkBudget(self._config, self.step_time, decodes, decoding)
        admissions, admitted = self._admit(budget, now)
        extensions = self._extend_admissions(admitted)
        changes += [self._own_blocks(live) for live in admitted]
        prefills = self._prefills()
        chunk_tokens = budget.tokens([live.placement for live in prefills if live.placement])
        rows = step_planner.plan_rows(
            decodes, prefills, chunk_tokens, self._config.oldest_prefill_share
        )
        changes += [self._cover_prefill(row, now) for row in rows if row.is_prefill]
        at_rest = not (self.running or self.retracting or self.in_flight)
        only_releases = at_rest and self.slots.has_releases
        if not (rows or admissions or extensions or changes or only_releases):
            return None
        step_planner.commit_rows(rows)
        return self._send(rows, admissions, extensions, changes, now)

    def _send(
        self,
        rows: list[PlannedRow],
        admissions: list[Admission],
        extensions: list[tuple[int, tuple[int, ...]]],
        changes: list[tuple[int, TableChange]],
        now: float,
    ) -> StepPlan:
        self.steps_count += 1
        self.in_flight.add(self.steps_count, rows, now)
        has_digest = self.steps_count % self._config.digest_interval_steps == 0
        return StepPlan(
            group_id=self.group_id,
            epoch=self.epoch,
            step_id=self.steps_count,
            releases=self.slots.take_releases(),
            admissions=tuple(admissions),
            extensions=tuple(extensions),
            drops=tuple((slot, *drop) for slot, change in changes for drop in change.drops),
            new_blocks=tuple((slot, *new) for slot, change in changes for new in change.new_blocks),
            rows=tuple(row.message() for row in rows),
            digest=self.slots.digest() if has_digest else None,
        )

    def _prefills(self) -> list[LiveRequest]:
        return [
            live
            for live in self.running
            if live.placement and step_planner.is_prefill(live.placement)
        ]

    def _ready_decodes(self, now: float) -> tuple[list[LiveRequest], list[tuple[int, TableChange]]]:
        """Requests that decode in this step, with what changes in their tables; oldest first."""
        ready: list[LiveRequest] = []
        changes: list[tuple[int, TableChange]] = []
        for live in self.running:
            placement = live.placement
            assert placement, live.request_id
            if not step_planner.wants_decode(live, placement):
                continue
            stop = placement.planned_count + 1
            if stop > placement.covered_count:
                change = self.blocks.cover(live, placement, stop, self._headroom, now)
                if change is None:
                    continue  # Skips this step: someone retracted or ending gives way soon.
                changes.append((placement.slot, change))
            ready.append(live)
        return ready, changes

    def _cover_prefill(self, row: PlannedRow, now: float) -> tuple[int, TableChange]:
        """What changes in the tables of a prefill: with a window they follow its rows."""
        placement, stop = row.placement, row.start + row.tokens_count
        if stop <= placement.covered_count:
            return placement.slot, TableChange()
        change = self.blocks.cover(row.live, placement, stop, self._headroom, now)
        assert change is not None, "a prefill gives up as many blocks as it takes"
        return placement.slot, change

    def _own_blocks(self, live: LiveRequest) -> tuple[int, TableChange]:
        """The blocks that a request brought from its admission beside the cached ones."""
        placement = live.placement
        assert placement, live.request_id
        cached_count = len(placement.residencies)
        new_blocks = [
            (group, block_id)
            for group, table in enumerate(placement.tables)
            for block_id in table.since(cached_count)
        ]
        return placement.slot, TableChange(new_blocks=tuple(new_blocks))

    # ------------------------------------------------------------ admission

    def _admit(self, budget: ChunkBudget, now: float) -> tuple[list[Admission], list[LiveRequest]]:
        """Fills slots from the queue in order; for a while, who fits passes who lacks blocks."""
        admitted: list[LiveRequest] = []
        lacking: list[LiveRequest] = []
        messages: list[Admission] = []
        if not self.waiting or not self.slots.free_count:
            return messages, admitted
        if any(live.alone for live in self.running):
            return messages, admitted
        prefills = [live.placement for live in self._prefills() if live.placement]
        has_chunk_left = budget.has_left(prefills)
        for live in self.waiting.ordered(now, self.blocks.matched_tokens):
            if not self.slots.free_count:
                break
            if not has_chunk_left:
                break
            if live.alone and (self.running or self.retracting):
                break
            if lacking and not self.waiting.may_pass(live, lacking, now):
                break
            if self.blocks.is_claimed(live):
                continue  # Its prefix is being computed: it comes in when that is resident.
            message = self._try_admit(live, now)
            if message is None:
                lacking.append(live)
                continue
            admitted.append(live)
            messages.append(message)
            assert live.placement, live.request_id
            prefills.append(live.placement)
            has_chunk_left = budget.has_left(prefills)
            if live.alone:
                break
        return messages, admitted

    def _try_admit(self, live: LiveRequest, now: float) -> Admission | None:
        placement = self.blocks.admit(live, self._headroom(), now)
        if placement is None:
            return None
        placement.slot = self.slots.occupy(live)
        # The ids of a cached prefix come at once, so that a slot is never longer than its ids.
        first_ids = max(self._config.admission_tokens_max, placement.planned_count + 1)
        placement.sent_count = min(len(live.token_ids), first_ids)
        live.placement = placement
        live.stage = Stage.RUNNING
        live.match = None
        if live.cached_tokens is None:
            live.cached_tokens = placement.planned_count
        if live.admitted_at is None:
            live.admitted_at = now
        live.renew_facts()
        self.waiting.remove(live)
        insort(self.running, live, key=lambda other: other.arrival)
        self._admitted_at[live.request_id] = now
        self._load.admit(live.request_id, len(live.token_ids) - placement.planned_count)
        request = live.request
        return Admission(
            slot=placement.slot,
            token_ids=tuple(live.token_ids[: placement.sent_count]),
            output_start=live.prompt_count,
            cached_count=placement.planned_count,
            block_tables=tuple(
                table.before(len(placement.residencies)) for table in placement.tables
            ),
            sampling=request.sampling,
            wants_logprobs=request.wants_logprobs,
            top_tokens=request.top_tokens,
            prompt_top_tokens=request.prompt_top_tokens if placement.scoring else None,
            wants_logits=request.wants_logits,
            adapter=request.adapter,
        )

    def _headroom(self) -> int:
        """Blocks to leave, a row of them for every request that may grow: so a new one does not
        cause a retraction."""
        placements = [live.placement for live in self.running if live.placement]
        return sum(self.blocks.tables.growth(each) for each in placements if not each.reserved)

    def _extend_admissions(self, admitted: list[LiveRequest]) -> list[tuple[int, tuple[int, ...]]]:
        """The next ids of requests too long for one admission."""
        extensions: list[tuple[int, tuple[int, ...]]] = []
        for live in self.running:
            placement = live.placement
            assert placement, live.request_id
            if placement.sent_count >= placement.admitted_count or live in admitted:
                continue
            sent = placement.sent_count
            until = min(sent + self._config.admission_tokens_max, placement.admitted_count)
            extensions.append((placement.slot, tuple(live.token_ids[sent:until])))
            placement.sent_count = until
        return extensions

    # ------------------------------------------------------------ retraction

    def _retract_for_blocks(self, now: float) -> None:
        """Retracts until the decodes that lack a block get one, now or when results are back."""
        lacking = {
            live.request_id: self.blocks.tables.lack(live.placement)
            for live in self.running
            if live.placement
            and live.placement.planned_count >= live.placement.covered_count
            and step_planner.wants_decode(live, live.placement)
        }
        if sum(lacking.values()) <= self.tree.ledger.available_count:
            return
        leaving = [*self.retracting, *(live for live in self.running if self._only_ends(live))]
        pending = sum(self._exclusive_count(live) for live in leaving)
        while sum(lacking.values()) > self.tree.ledger.available_count + pending:
            victim = self._cheapest_victim()
            if victim is None:
                return
            lacking.pop(victim.request_id, None)
            self._retract(victim, now)
            if victim.stage is Stage.RETRACTING:
                pending += self._exclusive_count(victim)

    def _exclusive_count(self, live: LiveRequest) -> int:
        return self.blocks.tables.exclusive_count(live.placement) if live.placement else 0

    def _only_ends(self, live: LiveRequest) -> bool:
        """Whether all its tokens are planned: its blocks come back with intake's End."""
        placement = live.placement
        assert placement, live.request_id
        return placement.planned_count >= live.computed_max

    def _cheapest_victim(self) -> LiveRequest | None:
        """The running request with least to redo; never the oldest, nor one with a reservation."""
        victims = [
            live
            for live in self.running[1:]
            if live.placement and not live.placement.reserved and not self._only_ends(live)
        ]
        return min(victims, key=_redo_cost, default=None)

    def _retract(self, live: LiveRequest, now: float) -> None:
        live.retractions += 1
        self.retracted_count += 1
        live.renew_facts()
        live.stage = Stage.RETRACTING
        self.running.remove(live)
        self.retracting.append(live)
        assert live.placement, live.request_id
        if not live.placement.rows_in_flight:
            self._finish_retraction(live, now)

    def _finish_retraction(self, live: LiveRequest, now: float) -> None:
        """Its last results are back: full blocks to the index, the rest free, back to its place."""
        placement = live.placement
        assert placement, live.request_id
        self.blocks.release(live, placement, placement.computed_count, now)
        self._leave_slot(live, now)
        self._load.release(live.request_id)
        known_count = len(live.token_ids)
        blocks_count = self.blocks.kv.cost(known_count)
        self._load.dispatch(
            live.request_id, self.group_id, known_count, live.tokens_left, blocks_count
        )
        live.stage = Stage.WAITING
        if not live.is_complete:
            self.waiting.add(live)

    def _leave_slot(self, live: LiveRequest, now: float) -> None:
        placement = live.placement
        assert placement, live.request_id
        (self.running if live.stage is Stage.RUNNING else self.retracting).remove(live)
        self.slots.vacate(placement.slot)
        live.placement = None
        group = self._load.groups[self.group_id]
        stayed_s = now - self._admitted_at.pop(live.request_id, now)
        group.request_s += 0.1 * (stayed_s - group.request_s)

    # ------------------------------------------------------------ results

    def accept(self, done: StepDone, now: float) -> tuple[Tokens, list[LiveRequest]]:
        """Takes what the oldest step brought, as `in_flight.expects` it: its new tokens and scores,
        and the requests it failed."""
        step = self.in_flight.take(now, done.device_s)
        if step.work.chunk_tokens:
            self._measure_speed(step.work.chunk_tokens)
        deltas: list[TokenDelta] = []
        prompt_deltas: list[PromptDelta] = []
        failed: list[LiveRequest] = []
        outcomes, scores = iter(done.results), iter(done.prompt_scores)
        for row in step.rows:
            result = next(outcomes) if row.sampled else None
            scored = next(scores) if row.scores_count is not None else None
            if row.live.placement is not row.placement:
                continue  # It ended meanwhile: a row after the end counts for nothing.
            self._count_row(row)
            if not is_finite(result, scored):
                failed.append(row.live)
                continue
            if scored:
                prompt_deltas += new_scores(row, scored)
            if result:
                deltas.append(token_delta(row.live, result))
                row.live.token_ids.extend(result.token_ids)
            if row.is_prefill:  # No other row computes anything of the prompt.
                self.blocks.acknowledge(row.live, row.placement, now)
            if row.live.stage is Stage.RETRACTING and not row.placement.rows_in_flight:
                self._finish_retraction(row.live, now)
        return Tokens(tuple(deltas), tuple(prompt_deltas)), failed

    def _count_row(self, row: PlannedRow) -> None:
        row.placement.rows_in_flight -= 1
        row.placement.computed_count += row.tokens_count
        if row.is_prefill:
            self._load.progress(row.live.request_id, row.tokens_count)

    def _measure_speed(self, chunk_tokens: int) -> None:
        """A step with a chunk ended, and the model of steps learned from it."""
        rate = self.step_time.prefill_tokens_per_s(
            min(PACE_CHUNK_TOKENS, self._config.chunk_tokens)
        )
        if rate:
            self._load.groups[self.group_id].speed.measure(1 / rate, chunk_tokens)

    def publish(self) -> None:
        """Brings its line of the load table up to date."""
        group = self._load.groups[self.group_id]
        group.available_blocks = self.tree.ledger.available_count
        group.running_count = len(self.running)

    def check_integrity(self) -> None:
        """Asserts that ledger, tables and stages agree."""
        placed = [*self.running, *self.retracting]
        held_ids: list[int] = []
        pins: Counter[Residency] = Counter()
        for live in placed:
            placement = live.placement
            assert placement, live.request_id
            assert self.slots.occupants[placement.slot] is live, live.request_id
            self.blocks.tables.check_integrity(placement)
            held_ids += [block_id for table in placement.tables for block_id in table.block_ids]
            pins.update(placement.residencies)
        assert len(placed) == len(self.slots.occupants)
        arrivals = [live.arrival for live in self.running]
        assert arrivals == sorted(arrivals), "running stands in order of arrival"
        pinned = {
            residency: residency.pins for residency in self.tree.residencies if residency.pins
        }
        assert pins == pinned, "who holds a place has it pinned"
        self.tree.ledger.check_integrity(held_ids, set(self.tree.by_block))


def _redo_cost(live: LiveRequest) -> tuple[int, int]:
    assert live.placement, live.request_id
    return (live.placement.planned_count, -live.arrival)
