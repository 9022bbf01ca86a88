"""The CPU trainer and the ranks that share it. Every method of `Team` is a collective: all ranks call it.

rank 0    ─ Partner ─ the CPU trainer ┐ weights, gradients: memory that all of them share (`whole`)
rank r    ────────────────────────────┘
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from examples.studies.cotraining.partner import Partner
from examples.studies.cotraining.told import Told
from examples.studies.cotraining.weights import Gathered, InPlace, Weights
from examples.studies.cotraining.whole import Gradients, Layout, Shared
from examples.studies.cotraining.wire import Computed
from examples.studies.cotraining.work import Packed
from hytrain.errors import UnsupportedError, UsageError
from hytrain.optim import Optimizer
from hytrain.run.ranks import Ranks
from hytrain.tensors import local

NO_JOB: Final = 0
_UNLIKE: Final = (
    "the {} is not the same on all ranks, but they have one CPU trainer: make it the same on all of them, and call "
    "cotrain() then"
)
_REPEATED: Final = (
    "cotrain() with a pipeline: several stages have a {}, so the CPU trainer cannot tell them apart. Name all "
    "parameters as in the whole model, and train none on two stages"
)


class Team:
    """A CPU trainer for the parameters in `layout`, of which this rank trains its parts of `trained`.

    Each part of a batch has one of `slots`. It is one micro-batch: of each rank, or of the first one for a pipeline.
    `partner` is the CPU trainer as the first rank sees it; the others have none.
    """

    def __init__(
        self,
        opt: Optimizer,
        model: nn.Module,
        work: Mapping[str, Any],
        ranks: Ranks,
        *,
        layout: Layout,
        trained: Mapping[str, Tensor],
        slots: int,
        is_pipeline: bool,
    ) -> None:
        """Start the process. Raises `ClusterError` if it does not start, `UnsupportedError`, and `UsageError`."""
        self._ranks, self._opt, self._is_pipeline = ranks, opt, is_pipeline
        self._device = next(iter(trained.values())).device
        self.partner: Partner | None = None
        closing = ExitStack()
        self.close = weakref.finalize(self, _close, closing, os.getpid())
        self.close.atexit = False  # the process ends with this one
        try:
            with ranks.together():
                if is_pipeline and (repeated := [name for name, of in layout.owners.items() if len(of) > 1]):
                    raise UnsupportedError(_REPEATED.format(min(repeated)))
                self._told = Told(model, trained.keys())
            self._share(layout, trained, slots, closing)
            told = {"evaluated": self._evaluated()}
            cores = sorted({*chain(*ranks.gather(self._own_cores()))})
            with ranks.together():
                if ranks.rank == 0:
                    self._start({**work, **told}, cores, closing)
        except BaseException:
            self.close()
            raise

    def _share(self, layout: Layout, trained: Mapping[str, Tensor], slots: int, closing: ExitStack) -> None:
        """Share memory, and write into it what the CPU trainer is told once."""

        def shared(name: str, layout: Layout, count: int = 1) -> Shared:
            made = Shared(self._ranks, name, layout, count)
            closing.callback(made.close)
            return made

        others = Layout(self._ranks, self._told.others)
        has_all = 1 if self._is_pipeline else self._ranks.world
        _require_none(f"value of {name}" for name, of in others.owners.items() if len(of) < has_all or len({*of}) > 1)
        self._others = shared("others", others)
        copies = self._others.own()
        with self._ranks.together():  # at its end, nobody writes them any more
            for name, into in copies.items():
                into.copy_(local(self._told.others[name]).detach())
        with self._ranks.together():
            _require_none(f"value of {name}" for name in self._told.unlike(copies))
        self._weights: Weights = InPlace(self._opt)
        if self._ranks.world > 1:
            self._weights = Gathered(shared("weights", layout), trained)
        self.gradients = Gradients(shared("gradients", layout, slots), self._device)
        closing.callback(self.gradients.close)

    def _evaluated(self) -> list[str]:
        """The modules in evaluation mode. Raises `UsageError` on all ranks if one is in training mode elsewhere."""
        told = self._ranks.gather((self._told.evaluated, self._told.training))
        evaluated, training = (set[str]().union(*names) for names in zip(*told, strict=True))
        _require_none(f"mode of {name or 'the model'}" for name in sorted(evaluated & training))
        return sorted(evaluated)

    def _own_cores(self) -> list[int]:
        """Those of this rank's optimizer process; none if the model is on a CPU."""
        if self._device.type != "cuda":
            return []
        [cores] = [[*of] for role, _, of in self._opt.processes() if role == "optimizer"]
        return cores

    def _start(self, work: dict[str, Any], cores: list[int], closing: ExitStack) -> None:
        self.partner = Partner(
            work | {"path": [each for each in sys.path if isinstance(each, str)]},
            self.gradients.shared,
            self._others,
            cores=cores or sorted(os.sched_getaffinity(0)),
            threads=len(cores) or torch.get_num_threads(),
            log=self._opt.run_dir / "logs" / "cpu_trainer-0.log",
        )
        closing.callback(self.partner.close)

    def require(self) -> None:
        """Raise `UsageError` on all ranks if something has changed on one that the CPU trainer was told."""
        with self._ranks.together():
            self._told.require(self._others.own(), self._device)

    def hand_over(self, batches: Mapping[int, tuple[Any, int]]) -> dict[int, int]:
        """Have parts computed: each has a micro-batch of this rank's, and its seed of torch. Returns their jobs.

        Raises `UnsupportedError` if a micro-batch cannot be sent.
        """
        if not batches:
            return {}
        with self._ranks.together():  # at its end, all weights are there, and nobody copies the last step's gradients
            self.gradients.wait()
            gives = self._ranks.rank == 0 or not self._is_pipeline
            own = [(Packed(batch), seed) for batch, seed in batches.values() if gives]
            lent = self._weights.lend()
        everyones = [each for each in self._ranks.gather(own) if each]
        jobs = [NO_JOB] * len(batches)
        with self._ranks.together():  # the first rank may wait for a CPU trainer that hangs: nobody goes on meanwhile
            if self.partner is not None:
                jobs = self.partner.hand_over(lent, [*zip(*everyones, strict=True)])
        return dict(zip(batches, jobs, strict=True))

    def receive(self, job: int) -> tuple[float, Computed] | None:
        """This rank's loss of a part, and the answer; None if the CPU trainer is lost."""
        computed: Computed | None = self._ranks.gather(self.partner and self.partner.receive(job))[0]
        return None if computed is None else (computed.losses[0 if self._is_pipeline else self._ranks.rank], computed)

    def take_back(self) -> None:
        """The CPU trainer uses the weights no more, unless for a trial, of which only the time is used."""
        self._weights.take_back()


def _require_none(unlike: Iterable[str]) -> None:
    """Raise `UsageError` if there is anything that ranks have of their own."""
    for what in unlike:
        raise UsageError(_UNLIKE.format(what))


def _close(closing: ExitStack, pid: int) -> None:
    """End the process, and free what is shared. Not in a forked child."""
    if os.getpid() == pid:
        closing.close()
