"""How the CPU trainer gets the weights of a step: `shares` lends them once all updates have ended.

InPlace   one rank: where the optimizer process keeps them
Gathered  several ranks: each copies its parts into memory that has the whole model
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from examples.studies.cotraining.whole import Shared
from hytrain.memory.lending import Lent, Loan
from hytrain.optim import Optimizer
from hytrain.tensors import local


class InPlace:
    """The weights of `opt` where they are."""

    def __init__(self, opt: Optimizer) -> None:
        self._opt = opt
        self._loan: Loan | None = None

    def lend(self) -> Mapping[str, Lent]:
        """Wait for all updates, and say where the weights are."""
        self._loan = self._opt.lend_weights()
        return self._loan

    def take_back(self) -> None:
        """The CPU trainer uses them no more, unless for a trial, of which only the time is used."""
        if self._loan is not None:
            self._loan.close()
            self._loan = None


class Gathered:
    """The weights of all ranks in `shared`: this rank's are `trained`."""

    def __init__(self, shared: Shared, trained: Mapping[str, Tensor]) -> None:
        self._shared, self._trained = shared, trained

    def lend(self) -> Mapping[str, Lent]:
        """Copy this rank's weights, each of which waits for its update. All are there once all ranks have done so."""
        for name, into in self._shared.own().items():
            into.copy_(local(self._trained[name].detach()))
        return self._shared.lent() if self._shared.made is not None else {}

    def take_back(self) -> None:
        """They are copies, which nobody else writes."""


Weights = InPlace | Gathered
