"""Uses of parameters outside of their module's forward: each one waits for this parameter's update.

a watched parameter is used ─▶ use        waits, and fetches an offloaded one
… in an operation           ─▶ around     it stays on the device, and what autograd saves of it is fetched again
model.state_dict()          ─▶ away       a copy in host memory of an offloaded one
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from hytrain.errors import HyTrainError, UsageError
from hytrain.model import graphs
from hytrain.model.consumed import refuse
from hytrain.model.trained import TrainedParameter
from hytrain.step.autograd import in_backward
from hytrain.step.blocks import Blocks
from hytrain.step.common import Common
from hytrain.step.gradient import RoundTrip
from hytrain.step.life import IN_BACKWARD, Event, State
from hytrain.step.reads import Reads
from hytrain.step.timing import SEEN
from hytrain.tensors import distributed, is_distributed, is_plain, local, version

_USED_EARLY: Final = (
    "{} is used between backward and step(), but its update has already begun, which torch would make in step(): use "
    'it before backward, or after opt.step(), or pass updates="step"'
)


class Uses:
    """The parameters of one model, by the tensors that are used.

    `copies`: those that `away` has made, with their versions and their parameters' names.
    """

    def __init__(self, common: Common, trip: RoundTrip, reads: Reads, blocks: Blocks) -> None:
        self._of = {id(known.parameter): known for known in common.parameters}
        self._health, self._overlap = common.health, common.overlap
        self._trip, self._reads, self._blocks, self._offload = trip, reads, blocks, common.offload
        self.copies: list[tuple[weakref.ref[Tensor], int, str]] = []

    def use(self, tensor: Tensor) -> None:
        """A parameter's value is used: make the current stream wait for its update.

        Raises `UsageError` if this step's update of it has begun, before `step()` was called; but not while an error of
        HyTrain is handled, so that whoever cleans up (`model.cpu()`) does not hide it.
        """
        known = self._of.get(id(tensor))
        if known is None:  # a new parameter, made of a watched one
            tensor.__class__ = tensor.plain  # type: ignore[attr-defined]
            return
        if not self._may_use(known):
            return
        if known.awaited and in_backward() and graphs.is_captured(tensor):
            return  # forward has waited, and does so before each replay
        layers = [layer for layer, _ in known.places]
        for layer in layers:
            self._trip.wait_for(layer)
            self._offload.use(layer)
        if torch.is_grad_enabled():
            self._reads.note_order(layers)
        self._reads.mark_awaited([known], inside=False)

    def with_memory_of(self, tensors: Iterable[Tensor]) -> list[nn.Parameter]:
        """The parameters of which some of these tensors show the memory. In backward, nobody may write them."""
        if in_backward():
            return []
        memory = {local(tensor).untyped_storage()._cdata for tensor in tensors if is_plain(tensor)}
        return [known.parameter for known in self._of.values() if known.own.untyped_storage()._cdata in memory]

    def around(self, tensor: Tensor) -> AbstractContextManager[Any]:
        """A context for an operation on a parameter."""
        known = self._of.get(id(tensor))
        block = None if known is None or not known.places else known.places[0][0].block
        if block is None or not block.life.is_offloaded:
            return nullcontext()
        return self._blocks.during_use(block)

    def away(self, tensor: Tensor) -> Tensor | None:
        """A copy of a parameter's value in host memory, if it is offloaded; all updates have been waited for."""
        known = self._of.get(id(tensor))
        if known is None or not self._is_copied(known, tensor) or not self._may_use(known) or not known.is_in_place:
            return None
        for layer, _ in known.places:
            self._offload.land(layer)
        with torch.inference_mode(False):  # no such tensor counts what is written to it
            copied = distributed(known.values().clone(), tensor)
        self.copies.append((weakref.ref(copied), version(copied), known.name))
        return copied

    def _is_copied(self, known: TrainedParameter, tensor: Tensor) -> bool:
        """Of shards, all are: `full_tensor()` needs them on one device on all ranks, which have plans of their own."""
        if is_distributed(tensor):
            return self._offload.may_offload
        return any(layer.rests_on_host for layer, _ in known.places)

    def before_loading(self, tensors: Iterable[Tensor]) -> None:
        """Weights are loaded: what was written to copies of them is loaded now, as after DCP, or not meant to be.

        Shards that are not loaded come, too: FSDP2 looks at all of them after that.
        """
        self.copies.clear()
        for known in [self._of[id(tensor)] for tensor in tensors if is_distributed(tensor) and id(tensor) in self._of]:
            for layer, _ in known.places:
                self._offload.use(layer)

    def require_unwritten_copies(self) -> None:
        """Raise `UsageError` if a copy was written, as one would write weights in torch."""
        self.copies = [known for known in self.copies if known[0]() is not None]
        for copied, before, name in self.copies:
            if (tensor := copied()) is not None and version(tensor) != before:
                self.copies.clear()
                raise UsageError(
                    f"{name} of model.state_dict() was written, but it is offloaded, so this is a copy in host memory: "
                    "call model.load_state_dict() with what you have written"
                )

    def _may_use(self, known: TrainedParameter) -> bool:
        """Whether a parameter can be used now; False while an error is handled. Raises what `use` does."""
        life = self._health.life
        if life.state is State.PARKED_WEIGHTS:
            self._health.require(Event.OUTSIDE)
        if life.state in IN_BACKWARD:
            self._health.end_dropped(0.0)
        if life.state is State.SUMMED or (life.state is State.SUMMING and known.backward == life.backward):
            self._health.timing.saw(SEEN[Event.OUTSIDE])
        if known.step != life.step:
            return True
        cleans_up = isinstance(sys.exc_info()[1], HyTrainError)  # not any: a whole loop may be in an `except`
        if life.state in IN_BACKWARD:
            if cleans_up:
                return False
            refuse(
                f"{known.name} is used while backward runs, which has updated it already: use it before, or after "
                'opt.step(), or pass updates="step"'
            )
        if self._overlap and not cleans_up:
            raise UsageError(_USED_EARLY.format(known.name))
        return True
