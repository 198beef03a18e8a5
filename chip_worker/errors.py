"""Errors of the chip worker, one tree; the session turns each into a Fault, in one place.

WorkerError
├── ConfigurationError   a setting is out of range
├── ModelError           the checkpoint cannot be served as asked; trying again does not help
├── Unreachable          there is no stream to the control plane; trying again may help
└── DivergedError        a command does not match this worker's tables: the epoch is over
"""


class WorkerError(Exception):
    """Something the worker could not do."""


class ConfigurationError(WorkerError):
    """A setting is out of range; the message names it and its limits."""


class ModelError(WorkerError):
    """The checkpoint is missing, malformed or of a kind this worker does not know."""


class Unreachable(WorkerError):
    """There is no stream to the control plane now; trying again may help."""


class DivergedError(WorkerError):
    """Worker and control plane no longer agree on the state of the group."""
