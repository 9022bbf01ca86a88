"""Repeated blocks in forward and backward: their offloaded weights come, and what autograd saves of them can leave.

    forward    enter ─▶ fetch, if offloaded, and save under hooks ─▶ compute ─▶ leave ─▶ a pre-hook of its output
    backward   this pre-hook, or unpacking what was saved ─▶ enter_backward ─▶ fetch

`offload` fetches and frees, `activations` has what is saved. Graphs keep these hooks, so they refer to this weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hytrain.errors import UsageError
from hytrain.memory.transfer import Transfer
from hytrain.model import graphs
from hytrain.model.block_life import Pin
from hytrain.model.trained import Gate, OffloadedBlock
from hytrain.model.watched import unwatched
from hytrain.step.activations import MODIFIED, Activations, Saved
from hytrain.step.autograd import in_backward
from hytrain.step.common import Common
from hytrain.step.gradient import RoundTrip
from hytrain.step.offload import Offload
from hytrain.tensors import has_memory, saves_with_other_hooks, version
from hytrain.uncompiled import Weakly, uncompiled

_REPLAYED: Final = (
    "the block of {} is a CUDA graph, which reads weights where they were when it was made, so that they cannot be "
    "offloaded: leave out offload_weights="
)


class Blocks:
    """The blocks of one model, and what its whole forward saves, if `activations` go to host memory."""

    def __init__(self, common: Common, trip: RoundTrip) -> None:
        self._health, self._meter = common.health, common.meter
        self._trip, self._offload, self._activations = trip, common.offload, common.activations
        self._hooks: dict[bool, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {}  # by whether in backward
        self._no_graphs = set[OffloadedBlock]()  # that have been seen to be no CUDA graphs
        self._measured: dict[OffloadedBlock, tuple[Transfer, int]] = {}  # the last copy that the meter got, its step
        self._saving: dict[Gate | None, list[saved_tensors_hooks]] = {}  # by gates that run forward; None: the root's

    def enter(self, gate: Gate, *, inside: bool, measured: bool) -> None:
        """The module is about to compute, in forward or, with `inside`, again in backward."""
        if gate.is_block and not inside and (activations := self._saving_activations) is not None:
            activations.enter_block()
        if gate.block is not None:
            self._fetch(gate.block, inside=inside, measured=measured)
            if gate.block.life.is_offloaded and not gate.block.is_gathered and _may_save_with_hooks():
                self._save_with_hooks(gate)

    def enter_backward(self, gate: Gate, *_: Any) -> None:
        """The gate's module computes in backward, on the current stream. Not if it has been updated there already."""
        if self._trip.updated_in_this_backward(gate) is not None:
            return
        for layer in gate.layers:
            self._trip.wait_for(layer)
        if gate.block is not None:
            self._fetch(gate.block, inside=True, measured=False)

    def _fetch(self, block: OffloadedBlock, *, inside: bool, measured: bool) -> None:
        """A block computes: wait for its weights, if they are offloaded. Of a step's copies, one is `measured`."""
        life = block.life
        waits = inside and life.is_offloaded and Pin.COMPUTES not in life.pins and not block.is_gathered
        arrived = self._meter.mark() if waits else None
        self._offload.enter(block, inside)
        if waits:
            self._meter.fetched(block.layers[0].lid, arrived)
        arrival, step = block.arrival, self._health.life.step
        before, measured_in = self._measured.get(block, (None, -1))
        if arrival is None or arrival is before or not life.is_offloaded:
            return
        if measured and measured_in < step:
            self._measured[block] = arrival, step
            self._meter.span("h2d_s", block.gate.lids, step, arrival.span)
        elif self._meter.draws and not any(layer.life.placement.visits for layer in block.layers):  # or it may stay
            self._measured[block] = arrival, measured_in
            self._meter.span("again_s", block.gate.lids, step, arrival.span)

    def leave(self, gate: Gate, output: Any) -> None:
        """The module's forward has ended, and returned `output`."""
        inside, block = in_backward(), gate.block
        if gate.is_block and not inside and (activations := self._saving_activations) is not None:
            activations.leave_block()
        if block is None or block.is_gathered:
            return
        if saving := self._saving.get(gate):
            saving.pop().__exit__()
        if not block.life.is_offloaded:
            return
        saves = torch.is_grad_enabled()
        returned = list(tensors_in(output)) if saves else []
        made = [tensor for tensor in returned if tensor.grad_fn is not None]
        if made and block not in self._no_graphs:
            if graphs.replays(made, [known.parameter for known in gate.parameters]):
                raise UsageError(_REPLAYED.format(gate.parameters[0].name))
            self._no_graphs.add(block)
        if inside:
            return
        if saves:
            again = Weakly(self.enter_backward, gate)  # its backward is likely to begin: weights come
            for tensor in returned:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(again)
                if self._offload.block_of(tensor) is block:
                    block.life.pin(Pin.VIEWED)
        self._offload.leave(block)

    # ------------------------------------------------------------ what autograd saves

    def enter_root(self) -> None:
        """The whole model is about to compute: from here on, what autograd saves goes to host memory, if asked for."""
        if self._activations is not None and not in_backward() and _may_save_with_hooks():
            self._activations.begin_forward()
            self._save_with_hooks(None)

    def leave_root(self) -> None:
        if (activations := self._saving_activations) is not None and not in_backward():
            self._saving[None].pop().__exit__()
            activations.end_forward()

    @property
    def _saving_activations(self) -> Activations | None:
        """Whoever takes what autograd saves now."""
        return self._activations if self._activations is not None and self._saving.get(None) else None

    @contextmanager
    def during_use(self, block: OffloadedBlock) -> Iterator[None]:
        """An operation outside of the block's forward uses one of its weights."""
        saves = torch.is_grad_enabled() and not saves_with_other_hooks()
        with self._offload.using(block), self._saving_hooks() if saves else nullcontext():
            yield

    def _save_with_hooks(self, gate: Gate | None) -> None:
        saving = self._saving_hooks()
        saving.__enter__()
        self._saving.setdefault(gate, []).append(saving)

    def _saving_hooks(self) -> saved_tensors_hooks:
        """Hooks under which autograd may save offloaded weights, and activations go to host memory.

        Those of a forward that backward runs again are about to be used, so they stay.
        """
        inside = in_backward()
        if inside not in self._hooks:
            self._hooks[inside] = _packing(self, self._offload, None if inside else self._activations)
        return saved_tensors_hooks(*self._hooks[inside])


def _may_save_with_hooks() -> bool:
    return torch.is_grad_enabled() and not saves_with_other_hooks() and not torch.compiler.is_compiling()


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """A tensor that autograd has saved, and its version then: of an offloaded weight, whose `gate` that is, or any."""

    tensor: Tensor
    version: int
    gate: Gate | None


def _packing(
    blocks: Blocks, offload: Offload, activations: Activations | None
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """What autograd does with a tensor that it saves, and with what it has saved when it needs it."""
    me, block_of = weakref.ref(blocks), offload.block_of

    @uncompiled
    def pack(tensor: Tensor) -> Any:
        block = block_of(tensor)
        if block is not None:
            return _OnDevice(tensor, version(tensor), block.gate)
        with unwatched():
            alias = tensor.detach()  # or a tensor that its own node saves would never be freed
        is_own = type(alias) is Tensor  # what a subclass has elsewhere stays
        saved = activations.save(tensor, alias) if activations is not None and is_own else None
        return _OnDevice(alias, version(alias), None) if saved is None else saved

    @uncompiled
    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Saved):
            assert activations is not None, "has made it"
            return activations.restore(saved)
        if not isinstance(saved, _OnDevice):
            return cast(Tensor, saved)
        if version(saved.tensor) != saved.version:
            raise RuntimeError(MODIFIED)
        if saved.gate is None:
            return saved.tensor
        if (blocks := me()) is not None:
            blocks.enter_backward(saved.gate)
            if torch.is_grad_enabled() and saved.gate.block is not None:
                saved.gate.block.life.pin(Pin.GRAPH)  # `create_graph`: what this backward saves is not seen
        if not has_memory(saved.tensor):
            raise UsageError(f"layer {saved.gate.layers[0].name} is used again after its update has begun")
        return saved.tensor

    return pack, unpack


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors_in(list(output.values()))
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors_in(part)
