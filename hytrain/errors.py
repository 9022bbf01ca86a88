"""Every exception that HyTrain raises on purpose, and how it warns.

`except HyTrainError` catches them all. The built-in base class of each is in parentheses.

    HyTrainError
    ├── ConfigError         (ValueError)    a setting is invalid: recipe, flag, environment, argument
    │   └── MissingPackage  (ImportError)   a part of HyTrain needs a package that is not installed
    ├── UnsupportedError    (ValueError)    HyTrain refuses a model or practice at construction
    ├── UsageError          (RuntimeError)  a call would have trained something else than asked for
    ├── StaleReadError      (RuntimeError)  weights were read before their update had reached them
    ├── CapacityError       (MemoryError)   something cannot fit into memory; shows the arithmetic
    ├── SavingError         (OSError)       a state or checkpoint could not be written; earlier ones are whole
    ├── BackendUnavailable  (RuntimeError)  this machine cannot run an update backend
    ├── NonFiniteGradients                  gradients had inf or NaN, with on_nonfinite="raise"
    ├── Diverged                            a recipe's training diverged, with on_divergence: stop
    └── ClusterError        (RuntimeError)  the processes of a run
        ├── WorkerDied                      a process ended; says which, and its last words
        └── ClusterTimeout                  a process did not answer in time
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Final

#: The packages whose lines are not the user's.
_OURS: Final = ("hytrain", "torch")


def warn(sentence: str) -> None:
    """Warn of the line that called HyTrain, directly or through torch, which wraps `step()`."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, stacklevel=level)


class HyTrainError(Exception):
    """The base class of all of HyTrain's exceptions. Below the message, a traceback names the page's anchor."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        public = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        self.add_note(f"docs/errors.md#{public.__name__.lower()} says more.")


class ConfigError(HyTrainError, ValueError):
    """A setting is invalid."""


class MissingPackage(ConfigError, ImportError):
    """A part of HyTrain needs a package that is not installed. The message says how to install it."""


class UnsupportedError(HyTrainError, ValueError):
    """HyTrain refuses a model or a practice. The message says what to do instead."""


class UsageError(HyTrainError, RuntimeError):
    """A call would have trained something else than was asked for."""


class StaleReadError(HyTrainError, RuntimeError):
    """Weights were read before an update had reached them."""


class CapacityError(HyTrainError, MemoryError):
    """Something cannot fit into memory. The message shows the arithmetic."""


class SavingError(HyTrainError, OSError):
    """A state or a checkpoint could not be written. What was saved before is whole, and training can go on."""


class BackendUnavailable(HyTrainError, RuntimeError):
    """This machine cannot run an update backend."""


class NonFiniteGradients(HyTrainError):
    """A gradient was inf or NaN. The step was skipped, and no bit of the state has changed."""


class Diverged(HyTrainError):
    """A recipe's training has diverged. The message says at which step."""


class ClusterError(HyTrainError, RuntimeError):
    """The processes of a run, or the connections to them, failed."""


class WorkerDied(ClusterError):
    """A process of the run ended too early."""


class ClusterTimeout(ClusterError):
    """A process of the run did not answer before the deadline."""
