"""Host memory with a budget, for torch's device "cpu" (budget.cpp): a stand-in for a GPU's allocator."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hytrain.kernels.build import opened
from hytrain.memory import reclaim

UNBOUNDED = (1 << 63) - 1


class Budget:
    """torch's allocator while it is installed. `limit`: bytes that may be used of it, beyond which torch raises."""

    def __init__(self) -> None:
        self._library = opened(Path(__file__).with_name("budget.cpp"), reclaim.torch_flags())
        self._library.budget_install()
        for name, *arguments in (("set", ctypes.c_int64), ("used",), ("peak",), ("refusals",)):
            function = getattr(self._library, f"budget_{name}")
            function.restype, function.argtypes = ctypes.c_int64, arguments
        self._served = reclaim.serving(torch.device("cpu"))
        self._limit = UNBOUNDED

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        """The peak begins anew."""
        self._limit = nbytes
        self._library.budget_set(nbytes)

    def begin(self) -> None:
        """Without a limit, and without garbage, which would be freed later and make room then."""
        gc.collect()
        self.limit = UNBOUNDED

    @property
    def used(self) -> int:
        return int(self._library.budget_used())

    @property
    def peak(self) -> int:
        return int(self._library.budget_peak())

    @property
    def evictions(self) -> int:
        """How many layers' state has left in this process."""
        return int(self._served.hytrain_reclaim_evictions())

    @property
    def refusals(self) -> int:
        """How often there was no memory."""
        return int(self._library.budget_refusals())

    def press(self, nbytes: int = 1) -> None:
        """Ask for so much more than there is."""
        limit, self.limit = self.limit, self.used
        try:
            torch.empty(nbytes, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            pass
        finally:
            self.limit = limit


@contextmanager
def budgeted() -> Iterator[Budget]:
    """While it is installed, HyTrain serves it as it would serve a GPU's."""
    budget = Budget()
    patches = pytest.MonkeyPatch()
    patches.setattr("hytrain.build._reclaim_library", lambda device: budget._served)
    try:
        yield budget
    finally:
        patches.undo()
        budget._library.budget_remove()
