"""Weights written from outside (surgery, loading, swapping in an EMA) become the master weights.

Autograd's version counter reveals a write. An announced write (`import_weights`, a loaded state dict) is imported
before the next update. Any other write would be lost, so it is refused (I6).
"""

from __future__ import annotations

import torch

from hytrain.errors import UsageError
from hytrain.kernels.split import clear_remainder, fit_remainder
from hytrain.memory.planes import ArenaPlanes
from hytrain.memory.transfer import Copy, Transfers
from hytrain.model.trained import TrainedParameter
from hytrain.step.health import Health
from hytrain.step.reads import Reads


class Masters:
    """Writes from outside to one model's weights.

    `were_written`: parameters were written, and this was announced. `state_was_loaded`: a loaded state had remainders,
    and weights that are loaded before the next step belong to them.
    """

    def __init__(
        self, parameters: list[TrainedParameter], *, transfers: Transfers, health: Health, reads: Reads
    ) -> None:
        self._parameters, self._transfers = parameters, transfers
        self._health, self._reads = health, reads
        self.were_written = self.state_was_loaded = False
        self._looked_in = -1  # the step in which foreign writes were last looked for

    def require_landed(self) -> None:
        """Raise `UsageError` for a parameter that was written while its update was under way."""
        self._health.check()
        for parameter in self._written():
            if not all(layer.life.is_current for layer, _ in parameter.places):
                raise UsageError(f"{parameter.name} was written before its update: opt.synchronize() before writing")

    def import_all(self, *, keep_remainder: bool) -> None:
        self._import(self._parameters, keep_remainder=keep_remainder)

    def import_written(self) -> None:
        if self.were_written:
            self._reads.synchronize()
            self._import(self._written(), keep_remainder=self.state_was_loaded)

    def refuse_foreign_writes(self) -> None:
        """Raise `UsageError` for a write that the next update would overwrite."""
        for parameter in self._written():
            raise UsageError(f"{parameter.name} was written from outside: call opt.import_weights() after writing")
        self._looked_in = self._health.life.step

    def begin_step(self) -> None:
        """Called before the step's updates begin. Raises `UsageError` for a write that they would overwrite."""
        self.import_written()
        if self._looked_in != self._health.life.step:  # forward did not call the whole model, which looks for them
            self.refuse_foreign_writes()
        if self.state_was_loaded:  # a loaded float16 master may belong to other weights than those that were here
            self._import([p for p in self._parameters if p.parameter.dtype is torch.float16], keep_remainder=True)
        self.state_was_loaded = False

    def _import(self, parameters: list[TrainedParameter], *, keep_remainder: bool) -> None:
        """Make the values of `parameters` the masters: exactly, or with the remainders that belong to them."""
        self._reads.synchronize()
        self.were_written = False
        self._transfers.drain()
        copies: list[Copy] = []
        for known in parameters:
            for layer, index in known.places:
                segment, remainder = layer.segments[index], layer.state("remainder")[index]
                if remainder is not None:
                    (fit_remainder if keep_remainder else clear_remainder)(remainder, segment.weights)
                if isinstance(layer.planes, ArenaPlanes):
                    copies.append((layer.planes.weights[index], segment.weights))
        self._transfers.state_out(copies).synchronize()
        for parameter in parameters:
            parameter.note_all_writes()

    def _written(self) -> list[TrainedParameter]:
        """The parameters that others have written, by autograd's version counter.

        While weights are arriving, their own write may not be counted yet. Such a parameter is checked the next time.
        """
        with self._health.changed:
            return [
                known
                for known in self._parameters
                if known.was_written() and not any(layer.is_arriving for layer, _ in known.places)
            ]
