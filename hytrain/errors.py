"""Every exception that HyTrain raises on purpose.

HyTrainError
├── ConfigError         (ValueError)    a setting that cannot be: recipe, flag, environment, argument
├── UnsupportedError    (ValueError)    a model or practice that is refused at construction
├── UsageError          (RuntimeError)  a call that would have trained something else than asked for
├── StaleReadError      (RuntimeError)  weights were read that an update had not reached yet
├── CapacityError       (MemoryError)   what cannot fit, with the arithmetic
├── BackendUnavailable  (RuntimeError)  an update backend that this machine cannot run
└── ClusterError        (RuntimeError)  the processes of a run
    ├── WorkerDied                      one ended; says which, and what it said last
    └── ClusterTimeout                  one did not answer in time
"""

from __future__ import annotations


class HyTrainError(Exception):
    """The root of all of HyTrain's exceptions."""


class ConfigError(HyTrainError, ValueError):
    """A setting that cannot be."""


class UnsupportedError(HyTrainError, ValueError):
    """A model or practice that HyTrain refuses, with what to do instead."""


class UsageError(HyTrainError, RuntimeError):
    """A call that would have trained something else than was asked for."""


class StaleReadError(HyTrainError, RuntimeError):
    """Weights were read that an update had not reached yet."""


class CapacityError(HyTrainError, MemoryError):
    """What cannot fit into memory, with the arithmetic."""


class BackendUnavailable(HyTrainError, RuntimeError):
    """An update backend that this machine cannot run."""


class NonFiniteGradients(HyTrainError):
    """A gradient was infinite or not a number; the step was left out, and every bit of the state is as before."""


class ClusterError(HyTrainError, RuntimeError):
    """The processes of a run, or the way to them, failed."""


class WorkerDied(ClusterError):
    """A process of the run ended before its time."""


class ClusterTimeout(ClusterError):
    """A process of the run did not answer before the deadline."""
