"""Counters of the control plane, plain numbers that only grow."""

from dataclasses import dataclass


@dataclass(slots=True)
class DispatchCounters:
    """What happened on the plane to the workers since the start."""

    streams_opened: int = 0
    streams_refused: int = 0
    """Attach calls that ended before Welcome."""
    streams_lost: int = 0
    """Streams that ended without Goodbye."""
    messages_stale: int = 0
    """Messages of another term or epoch, dropped."""
    messages_refused: int = 0
    """Messages that broke the protocol; each cost its stream."""
    steps_sent: int = 0
    step_bytes: int = 0
    """Bytes of steps, counted once a step, not once a rank."""
    steps_acknowledged: int = 0
    """Acknowledgements of ranks other than 0."""
    terms_raised: int = 0
