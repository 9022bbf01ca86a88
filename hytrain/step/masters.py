"""Weights written from outside (surgery, projection, loading, swapping in an EMA) become the master weights.

Autograd's version counter reveals a write. Whatever writes to a parameter between two steps has waited for its update
(`Reads.use`), so the next step begins from the written weights. A write that may have come while an update was under
way would be lost in part, so it is refused (I6).
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from hytrain.errors import UsageError
from hytrain.kernels.split import clear_remainder, fit_remainder
from hytrain.memory.planes import ArenaPlanes
from hytrain.memory.transfer import Copy, Transfer
from hytrain.model.lifecycle import State
from hytrain.model.trained import OffloadedBlock, TrainedLayer, TrainedParameter, changed
from hytrain.model.watched import unwatched
from hytrain.step.common import Common
from hytrain.step.reads import WRITTEN_EARLY, Reads
from hytrain.step.uses import Uses
from hytrain.tensors import address, flat, laid_out, local

SAMPLED: Final = 8
SAMPLED_ELEMENTS: Final = 64


@dataclass(frozen=True, slots=True)
class _Sample:
    """Elements of parameters as an update left them, and as they were found when the next one was to begin.

    Those of offloaded weights are found when their memory is freed, and then nowhere else.
    """

    looked_at: list[tuple[TrainedParameter, Tensor, Tensor]]  # what has landed, and what was found
    copied: Transfer
    is_freed: bool


class Masters:
    """Writes from outside to one model's weights.

    `state_was_loaded`: a loaded state had remainders, and weights that are loaded before the next step belong to them.
    """

    def __init__(self, common: Common, reads: Reads, uses: Uses) -> None:
        self._parameters, self._transfers, self._health = common.parameters, common.transfers, common.health
        self._reads, self._uses, self._offload, self._lending = reads, uses, common.offload, common.lending
        self.state_was_loaded = False
        self._next = 0
        self._samples: list[_Sample] = []
        self._chance = random.Random(0)
        self._freed = self._freed_before = 0  # blocks, in this step and in the one before

    def loading(self) -> AbstractContextManager[None]:
        """Around changes of state: an exception inside ends training."""
        return self._health.undivided("loading")

    def import_all(self, *, keep_remainder: bool) -> None:
        self._import(self._parameters, keep_remainder=keep_remainder)

    def begin_with(self, known: TrainedParameter, values: Tensor) -> None:
        """The parameter's first values, in its shape and on any device. They go to where its weights rest."""
        elements = flat(laid_out(values.to(known.own.dtype), known.own))
        copies = [(layer.values[index], layer.segments[index].part(elements)) for layer, index in known.places]
        self._transfers.state_out(copies).synchronize()
        self._import([known], keep_remainder=False)

    def import_written(self) -> None:
        """Make parameters that were written, or whose storage was replaced, the masters.

        Raises `UsageError` for a parameter that was written while its update was under way, and for one with storage
        that cannot be trained.
        """
        replaced, found = self._changed()
        if replaced:
            self._follow(replaced)
        for known in found:
            if not all(layer.life.is_current for layer, _ in known.places):
                raise UsageError(WRITTEN_EARLY.format(known.name))
        if found or replaced:
            self._import([*found, *replaced], keep_remainder=self.state_was_loaded)

    def begin_step(self) -> None:
        """Called before the step's updates begin."""
        self._uses.require_unwritten_copies()
        self.import_written()
        if self.state_was_loaded:  # a loaded float16 master may belong to other weights than those that were here
            self._import([p for p in self._parameters if p.parameter.dtype is torch.float16], keep_remainder=True)
        self.state_was_loaded = False
        self._sample()

    def _sample(self) -> None:
        """Compare some elements of some parameters with what the CPU's last update left there.

        This finds writes that autograd does not count: through a NumPy array, or `.data` within forward. A device's
        elements are compared a step later, so nothing waits. A parameter that was never updated has lost nothing: its
        present values become the master. Raises `UsageError` for a difference in any other.
        """
        self._compare()
        looked_at, landed = [], dict[TrainedLayer, list[Tensor]]()
        for _ in range(min(SAMPLED, len(self._parameters))):
            known = self._parameters[self._next % len(self._parameters)]
            self._next += 1
            if not known.places or not known.awaited:  # or this rank has an empty shard of it
                continue
            layer, index = known.places[0]
            if layer not in landed:
                landed[layer] = _landed(layer)
            if landed[layer]:
                looked_at.append((known, layer.segments[index].weights, landed[layer][index]))
        if looked_at:
            copied = self._look_at(looked_at, is_freed=False)
            for block in {layer.block for layer in landed if layer.block is not None and landed[layer]}:
                block.is_left_by(copied)
            if copied.done is None:
                self._compare()
        self._freed, self._freed_before = 0, self._freed

    def sample_freed(self, block: OffloadedBlock) -> None:
        """The block's memory is about to be freed: look at a parameter of it, in about `SAMPLED` cases a step."""
        self._freed += 1
        if self._chance.random() * self._freed_before > SAMPLED:
            return
        known = self._chance.choice(block.parameters)
        layer, index = known.places[0]
        out = block.leaving if layer.returned is None else [*block.leaving, layer.returned]
        if _is_here(layer) and layer.life.is_current and all(copy.has_ended for copy in out):
            present, landed = layer.segments[index].weights, layer.arena.weights[index]
            block.is_left_by(self._look_at([(known, present, landed)], is_freed=True))

    def _look_at(self, chosen: list[tuple[TrainedParameter, Tensor, Tensor]], *, is_freed: bool) -> Transfer:
        """Copy some elements of each of these parameters, which are present and have landed."""
        looked_at, copies = [], []
        for known, present, landed in chosen:
            start = self._next * 31 % max(1, present.numel() - SAMPLED_ELEMENTS + 1)
            part = slice(start, start + SAMPLED_ELEMENTS)
            found = torch.empty_like(landed[part], pin_memory=present.is_cuda)
            copies.append((found, present[part]))
            looked_at.append((known, landed[part].clone(), found))
        copied = replace(self._transfers.weights_out(copies), keep=())  # no view stays
        self._samples.append(_Sample(looked_at, copied, is_freed))
        return copied

    def _compare(self) -> None:
        samples, self._samples = self._samples, []
        for sample in samples:
            if sample.copied.done is not None:
                sample.copied.synchronize()
            for known, landed, found in sample.looked_at:
                if not torch.equal(landed.view(torch.uint8), found.view(torch.uint8)):
                    self._on_write(known, is_lost=sample.is_freed)

    def _on_write(self, known: TrainedParameter, *, is_lost: bool) -> None:
        """Somebody has written the parameter where autograd does not count it."""
        where = f"{known.name} was written where HyTrain cannot see it (through a NumPy array, or .data in forward)"
        if is_lost:
            raise UsageError(
                f"{where}, and offloaded weights lose such a write: write outside of forward, or keep them on the GPU"
            )
        if known.count:
            raise UsageError(
                f"{where}, so the CPU goes on from other values: call opt.import_weights() after such a write"
            )
        self._import([known], keep_remainder=False)

    def _follow(self, moved: list[TrainedParameter]) -> None:
        """Train parameters in the storage that they have now (`p.data = …`); whoever kept the old one has it alone."""
        with unwatched():
            present = [address(known.parameter) for known in self._parameters]
            for known in moved:
                now, own = local(known.parameter).data, known.own
                if (now.dtype, now.device) != (own.dtype, own.device):
                    raise UsageError(
                        f"{known.name} is {now.dtype} on {now.device} now: move and convert the model before "
                        "hytrain.AdamW is made, or call opt.close() first"
                    )
                if (now.shape, now.stride()) != (own.shape, own.stride()):
                    raise UsageError(
                        f"{known.name} has another shape or other strides now: set .data to a tensor laid out as "
                        "before, and call model.to(memory_format=…) before hytrain.AdamW is made"
                    )
                if present.count(address(now)) > 1:
                    raise UsageError(
                        f"{known.name} shares memory with another parameter now: tie them as one Parameter"
                    )
            for known in moved:
                for layer, _ in known.places:
                    if layer.block is not None:
                        self._offload.replace(layer.block, [known.own])
                known.follow()
            self._offload.note_storages()

    def _import(self, parameters: list[TrainedParameter], *, keep_remainder: bool) -> None:
        """Make the values of `parameters` the masters: exactly, or with the remainders that belong to them."""
        self._reads.synchronize()
        self._lending.before_writes()
        self._transfers.drain()
        copies: list[Copy] = []
        for known in parameters:
            for layer, index in known.places:
                segment, remainder = layer.segments[index], layer.part("remainder", index)
                if remainder is not None:
                    (fit_remainder if keep_remainder else clear_remainder)(remainder, layer.values[index])
                if layer.keeps_weights and layer.values[index] is segment.weights:
                    copies.append((layer.arena.weights[index], segment.weights))
        self._transfers.state_out(copies).synchronize()
        for parameter in parameters:
            parameter.note_all_writes()

    def _changed(self) -> tuple[list[TrainedParameter], list[TrainedParameter]]:
        """The parameters with other storage, and those that others have written, by autograd's version counter.

        While weights are arriving, their own write may not be counted yet. Such a parameter is checked the next time.
        """
        with self._health.changed, unwatched():
            replaced, written = changed(self._parameters)
            return replaced, [known for known in written if not any(layer.is_arriving for layer, _ in known.places)]


def _landed(layer: TrainedLayer) -> list[Tensor]:
    """The layer's weights on the host, of which those on the device are a copy; none if they are not that now."""
    source = layer.source
    if not isinstance(source, ArenaPlanes) or source is not layer.holds or layer.life.state is not State.CURRENT:
        return []
    return source.weights if _is_here(layer) else []


def _is_here(layer: TrainedLayer) -> bool:
    """Whether the layer's current weights are on the device, and not still on their way there."""
    block = layer.block
    return block is None or (not block.life.is_away and (block.arrival is None or block.arrival.has_ended))
