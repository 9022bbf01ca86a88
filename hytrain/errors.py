"""Every exception that HyTrain raises on purpose, where the docs explain it, and how it warns.

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

import re
import sys
import warnings
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final

#: The packages whose lines are not the user's.
_OURS: Final = ("hytrain", "torch")
#: The page that explains messages: beside this file in a wheel, in `docs` in a checkout.
_PAGES: Final = (Path(__file__).with_name("errors.md"), Path(__file__).parent.parent / "docs/errors.md")
#: A row or a heading of the page: its anchor, and the message, which ends it.
_ROW: Final = re.compile(r'^(?:\||###) <span id="([\w-]+)"></span>(?:.* \| )?(.+?)(?: †)?(?: \|)?$', re.MULTILINE)


@cache
def _rows() -> list[tuple[str, re.Pattern[str]]]:
    """The page's anchors and messages, the longest first. NAME and … in a message stand for anything."""
    page = next(page for page in _PAGES if page.is_file()).read_text(encoding="utf-8")
    found = [(anchor, re.split("NAME|…", said)) for anchor, said in _ROW.findall(page, page.index("\n## Messages"))]
    found.sort(key=lambda row: -sum(map(len, row[1])))
    return [(anchor, re.compile(".*?".join(map(re.escape, filter(None, said))), re.DOTALL)) for anchor, said in found]


def _explained_at(message: str) -> str | None:
    """The anchor of docs/errors.md that explains this message; None if there is none, or the page cannot be read."""
    try:
        return next((anchor for anchor, said in _rows() if said.search(message)), None)
    except (OSError, StopIteration):  # no descriptor may be free
        return None


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
        anchor = _explained_at(str(self)) if type(self) is public else None
        self.add_note(f"docs/errors.md#{anchor or public.__name__.lower()} says more.")


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
