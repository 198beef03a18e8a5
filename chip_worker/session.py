"""The worker's state: takes commands one by one on the compute thread, reports back.

                 FormGroup                      Rendezvous
    idle ─────────────────────▶ waiting ─────────────────────▶ serving ── Step ──▶ serving
     ▲       rank 0, or alone: straight to serving                │
     └──────────── ResetEpoch, Shutdown, or any Fault ◀───────────┘

Whatever goes wrong becomes one Fault, here and nowhere else; the session then drops the epoch,
keeps the weights, and takes no step until the next FormGroup.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns

import structlog

from backends.checked import require_alike
from backends.errors import BackendUnavailable, CommunicatorError
from backends.interface import Backend, BackendRuntime, Communicator, GroupPlace
from backends.plugin import FaultEvent
from backends.probes import probe_communicator
from chip_worker.batch import (
    Command,
    Fault,
    FaultKind,
    FormGroup,
    Ready,
    Rendezvous,
    Report,
    ResetEpoch,
    Shutdown,
    Step,
    StepAck,
    StepResult,
    StepTimes,
)
from chip_worker.checkpoint import ModelFingerprint
from chip_worker.config import WorkerConfig
from chip_worker.errors import DivergedError
from chip_worker.faults import fault_kind, is_fatal
from chip_worker.formation import Formation
from chip_worker.joining import Joining
from chip_worker.shard_loader import ShardLoader

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Position:
    """Where in the protocol a command stands; step_id is 0 outside a step."""

    term: int
    epoch: int
    step_id: int = 0


class Session:
    """The computing half of a worker. All methods but `abort` belong to one thread.

    loader: the open checkpoint, closed by `close`. report: called on that thread; must not block
    for long. clock_ns: monotonic; the same clock as `Step.received_ns`. on_fault: called first
    thing at every fault. The constructor opens the chip and raises a BackendError if it fails, or
    ConfigurationError if it is not for such weights; later errors become Fault reports.
    """

    def __init__(
        self,
        config: WorkerConfig,
        backend: Backend,
        runtime: BackendRuntime,
        loader: ShardLoader,
        report: Callable[[Report], None],
        clock_ns: Callable[[], int] = monotonic_ns,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._backend = backend
        self._runtime = runtime
        self._report = report
        self._clock_ns = clock_ns
        self._on_fault = on_fault
        self._loader = loader
        self._dtype = runtime.dtype()
        acquired = runtime.acquire(1)
        if not acquired.granted:
            reasons = [f"chip {index}: {why}" for index, why in acquired.rejected.items()]
            raise BackendUnavailable(f"no chip could be opened: {'; '.join(reasons)}")
        self._device = acquired.granted[0]
        self.chip = self._device.chip
        loader.check_device(self._device)
        self._form: FormGroup | None = None
        """The epoch this rank is in, or on its way to."""
        self._ended: dict[str, _Position] = {}
        """Of each group, the last epoch that `abort` named; written by another thread."""
        self._joining: Joining | None = None
        self._probed: Communicator | None = None
        """What is being probed; read by other threads."""
        self._formation: Formation | None = None
        self._formed: dict[str, _Position] = {}
        self._faulted: _Position | None = None
        self._term_highest = 0
        self._step_last = 0
        self._finished_ns: int | None = None

    @property
    def fingerprint(self) -> ModelFingerprint:
        """Identity of the model this worker can load."""
        return self._loader.fingerprint()

    @property
    def kv_windows(self) -> tuple[int, ...]:
        """Of every KV group of the model the tokens its layers see, 0 for all."""
        return self._loader.kv_groups.windows

    @property
    def dtype_name(self) -> str:
        """The dtype the model is computed in, such as "float32"."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def is_probing(self) -> bool:
        """Whether the compute thread is in the probe of a new communicator; for any thread."""
        return self._probed is not None

    def handle(self, command: Command) -> None:
        """Carries out a command and reports; never raises for what a Fault can say."""
        position = _position_of(command)
        try:
            self._dispatch(command)
        except Exception as error:  # noqa: BLE001 - the one place where errors become Faults
            self._fail(error, position)

    def abort(self, ended: FormGroup) -> None:
        """Ends a wait for other ranks that the compute thread hangs in; from any thread.

        Call it before handing over the ResetEpoch that ends the epoch. `ended` may be a command
        this session is only about to handle: then it will not wait for ranks that do not come.
        """
        # First the mark, then the waits: whoever begins to wait looks at the mark afterwards.
        self._ended[ended.group_id] = _Position(ended.term, ended.epoch)
        joining, probed, formation = self._joining, self._probed, self._formation
        if joining is not None:
            joining.give_up()
        if probed is not None:
            probed.abort()
        if formation is not None:
            formation.abort()

    def close(self) -> None:
        """Ends the epoch, gives chip and checkpoint back, calls `on_shutdown`; call once, last."""
        self._drop_epoch()
        self._loader.close()
        self._device.close()
        self._backend.on_shutdown()

    def _dispatch(self, command: Command) -> None:
        match command:
            case Step():
                self._step(command)
            case FormGroup():
                self._form_group(command)
            case Rendezvous():
                self._join(command)
            case ResetEpoch():
                self._reset(command)
            case Shutdown():
                self._drop_epoch()

    # ------------------------------------------------------------ forming

    def _form_group(self, form: FormGroup) -> None:
        self._fence_formation(form)
        self._drop_epoch()
        self._form = form
        self._faulted = None
        shard = self._loader.plan(form.rank, form.world_size, form.kv_policy)
        address = b""
        if form.rank == 0 and form.world_size > 1:
            address = self._runtime.open_rendezvous(_place(form))
            self._report(Rendezvous(form.term, form.epoch, address))
        self._backend.on_model_load(self._loader.load_plan(shard, self._device, self._dtype))
        self._loader.load(shard, self._device, self._dtype)
        if form.rank == 0:
            self._enter(form, address)

    def _join(self, rendezvous: Rendezvous) -> None:
        form = self._form
        if (
            form is None
            or self._formation is not None
            or (form.term, form.epoch) != (rendezvous.term, rendezvous.epoch)
        ):
            # An epoch that was reset meanwhile: nobody waits for this rank any more.
            _log.info("session.rendezvous_ignored", epoch=rendezvous.epoch)
            return
        self._enter(form, rendezvous.address)

    def _fence_formation(self, form: FormGroup) -> None:
        last = self._formed.get(form.group_id)
        if form.term < self._term_highest or (
            last is not None and (form.term, form.epoch) <= (last.term, last.epoch)
        ):
            raise DivergedError(
                f"group {form.group_id} epoch {form.epoch} of term {form.term} is not newer than "
                f"{last} and term {self._term_highest}"
            )
        self._term_highest = form.term
        self._formed[form.group_id] = _Position(form.term, form.epoch)

    def _enter(self, form: FormGroup, address: bytes) -> None:
        loaded = self._loader.loaded
        communicator = self._join_ranks(form, address)
        try:
            if form.world_size > 1:
                self._probe(communicator, form)
            formation = Formation(
                form, self._config, self._runtime, self._device, loaded, communicator
            )
        except Exception:
            communicator.close()
            raise
        self._formation = formation
        self._check_not_ended(form)
        warm = formation.warm_up()
        self._step_last = 0
        self._finished_ns = None
        self._report(
            Ready(
                term=form.term,
                epoch=form.epoch,
                blocks=formation.blocks,
                prefill_tokens_per_s=warm.prefill_tokens_per_s,
                decode_step_s=warm.decode_step_s,
                step_credit=self._config.step_credit,
                weight_bytes=loaded.weights.bytes_total,
            )
        )

    def _join_ranks(self, form: FormGroup, address: bytes) -> Communicator:
        def create() -> Communicator:
            return self._runtime.create_communicator(self._device, _place(form), address)

        if form.world_size == 1:
            return create()
        joining = self._joining = Joining(create)
        try:
            self._check_not_ended(form)
            return joining.wait()
        finally:
            self._joining = None
            joining.give_up()

    def _probe(self, communicator: Communicator, form: FormGroup) -> None:
        """A chip that works alone may fail in a group, and should before any request is in it."""
        self._probed = communicator
        try:
            self._check_not_ended(form)
            probe_communicator(communicator, self._device, form.probe_deadline_s)
            checked = self._config.debug_backend is not None
            require_alike(communicator, self._device, checked, form.probe_deadline_s)
        finally:
            self._probed = None

    def _check_not_ended(self, form: FormGroup) -> None:
        ended = self._ended.get(form.group_id)
        if ended is not None and (form.term, form.epoch) <= (ended.term, ended.epoch):
            raise CommunicatorError("the epoch ended while the group was forming")

    # ------------------------------------------------------------ steps

    def _step(self, step: Step) -> None:
        if self._faulted == _Position(step.term, step.epoch):
            return  # Sent before the control plane saw the Fault.
        formation = self._fence_step(step)
        started_ns = self._clock_ns()
        waited_ns = formation.waited_ns
        outcome = formation.run(step)
        self._step_last = step.step_id
        finished_ns = self._clock_ns()
        times = StepTimes(
            step_id=step.step_id,
            queue_ns=max(0, started_ns - step.received_ns) if step.received_ns else 0,
            device_ns=finished_ns - started_ns,
            communication_ns=formation.waited_ns - waited_ns,
            gap_ns=0 if self._finished_ns is None else started_ns - self._finished_ns,
        )
        self._finished_ns = finished_ns
        if formation.form.rank == 0:
            self._report(
                StepResult(
                    step.term, step.epoch, step.step_id, outcome.rows, times, outcome.prompt_scores
                )
            )
        else:
            self._report(StepAck(step.term, step.epoch, (times,)))

    def _fence_step(self, step: Step) -> Formation:
        formation = self._formation
        if formation is None:
            raise DivergedError(f"step {step.step_id} of epoch {step.epoch}, but no epoch is open")
        form = formation.form
        if (step.term, step.epoch) != (form.term, form.epoch):
            raise DivergedError(
                f"step {step.step_id} of term {step.term} epoch {step.epoch}; this worker is in "
                f"term {form.term} epoch {form.epoch}"
            )
        if step.step_id != self._step_last + 1:
            raise DivergedError(f"step {step.step_id} came after step {self._step_last}")
        return formation

    # ------------------------------------------------------------ ends

    def _reset(self, reset: ResetEpoch) -> None:
        current = self._position()
        if current is not None and (reset.term, reset.epoch) < (current.term, current.epoch):
            _log.info("session.reset_ignored", epoch=reset.epoch, current=current.epoch)
            return
        _log.info("session.epoch_reset", epoch=reset.epoch, reason=reset.reason)
        self._drop_epoch()

    def _position(self) -> _Position | None:
        form = self._form
        return None if form is None else _Position(form.term, form.epoch)

    def _drop_epoch(self) -> None:
        """Drops keys, values and communicator; weights stay."""
        formation, self._formation = self._formation, None
        self._form = None
        if formation is None:
            return
        formation.close()
        for slot in formation.occupied_slots():
            self._backend.on_request_end(slot)

    def _fail(self, error: Exception, position: _Position) -> None:
        kind = fault_kind(error)
        if kind is FaultKind.INTERNAL:
            _log.error("session.internal_error", epoch=position.epoch, exc_info=error)
        else:
            _log.warning("session.fault", kind=kind.value, epoch=position.epoch, error=str(error))
        # What ends is the epoch this worker is in, whatever the refused command said.
        ended = self._position() or position
        # Before anything is given back, which would be among the last calls too.
        self._on_fault()
        self._backend.on_fault(FaultEvent(error, position.step_id))
        self._drop_epoch()
        self._faulted = _Position(ended.term, ended.epoch)
        self._report(
            Fault(
                term=ended.term,
                epoch=ended.epoch,
                step_id=position.step_id,
                kind=kind,
                message=str(error) or type(error).__name__,
                exiting=is_fatal(error),
            )
        )
        _release_frames(error)


def _release_frames(error: BaseException) -> None:
    """Lets go of what the frames of a traceback worked on: keys, values, sockets.

    An error that is kept by one of them, as a failed collective keeps it, would hold them until the
    garbage collector comes by, and the next epoch wants the memory now.
    """
    linked: BaseException | None = error
    while linked is not None:
        traceback.clear_frames(linked.__traceback__)
        linked = linked.__cause__ or linked.__context__


def _place(form: FormGroup) -> GroupPlace:
    return GroupPlace(
        rank=form.rank,
        world_size=form.world_size,
        key=f"{form.group_id}.{form.term}.{form.epoch}",
        join_deadline_s=form.deadline_s,
        step_deadline_s=form.step_deadline_s,
    )


def _position_of(command: Command) -> _Position:
    match command:
        case Step():
            return _Position(command.term, command.epoch, command.step_id)
        case FormGroup() | Rendezvous() | ResetEpoch():
            return _Position(command.term, command.epoch)
        case Shutdown():
            return _Position(0, 0)
