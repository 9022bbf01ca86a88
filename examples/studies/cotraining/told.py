"""What the CPU trainer is told of a model once, at its start: buffers, frozen parameters, modes, what is trained.

`shares` asks before each step whether that still holds. If not, the step is refused, since the result would depend on
who computes a part. It costs a comparison for each module and parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hytrain.errors import UnsupportedError, UsageError
from hytrain.model import fsdp
from hytrain.model.hooks import OnGradient
from hytrain.model.layers import clean
from hytrain.tensors import local, version


class Told:
    """What was told of `model`, of which the parameters with these names are `trained`.

    `others`: buffers and frozen parameters, by name. `evaluated`, `training`: the modules in these modes.
    """

    def __init__(self, model: nn.Module, trained: Collection[str]) -> None:
        """Raises `UnsupportedError` for what a CPU trainer cannot know."""
        self._model = model
        self._modules = [(clean(name), module) for name, module in model.named_modules()]
        self._places = [*model.named_modules(remove_duplicate=False)]  # a module may have several names
        self._parameters = [(clean(name), parameter) for name, parameter in model.named_parameters()]
        self._frozen = [(name, parameter) for name, parameter in self._parameters if name not in trained]
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UnsupportedError(
                    f"{name} needs gradients, but this optimizer does not train it: give it to it, or freeze it, so "
                    "that the CPU trainer knows its values"
                )
        for name, parameter in self._parameters:
            if _has_hooks(parameter):
                raise UnsupportedError(
                    f"{name} has a hook, which gradients of the CPU trainer do not go through: remove it, or leave "
                    "cotrain() out"
                )
        self.others = self._others()
        self.evaluated = {name for name, module in self._modules if not module.training}
        self.training = {name for name, _ in self._modules} - self.evaluated
        self._flags = self._now()
        self._seen = {name: (tensor, version(tensor)) for name, tensor in self.others.items()}

    def require(self, copies: Mapping[str, Tensor], device: torch.device) -> None:
        """Raise `UsageError` if something has changed since.

        `copies` are the values that the CPU trainer has, of what is distributed this rank's parts.
        """
        fsdp.reshard(self._model)  # or else some parameters are not there
        changed = next(self._changed(copies), None)
        if changed is not None:
            raise UsageError(
                f"{changed} has changed since cotrain() was called, and the CPU trainer does not know: close what "
                "cotrain() returned, and call it again. A model whose forward writes buffers, as BatchNorm does, "
                "cannot share its batches with the CPU"
            )
        if torch.is_autocast_enabled(device.type):
            raise UsageError(
                "backward() is called under autocast, and the CPU trainer does not know: enter autocast in the "
                "function that computes the loss"
            )

    def unlike(self, copies: Mapping[str, Tensor]) -> Iterator[str]:
        """The names of `others` that are not as another rank has written them into the copies."""
        return (name for name, copy in copies.items() if not _has_bits(self.others[name], copy))

    def _changed(self, copies: Mapping[str, Tensor]) -> Iterator[str]:
        now = self._now()
        if now != self._flags:
            names = [f"the mode of {name or 'the model'}" for name, _ in self._modules]
            names += [f"{what} of {name}" for what in ("requires_grad", "hooks") for name, _ in self._parameters]
            names += [f"a parameter of {name or 'the model'}" for name, _ in self._modules]
            yield from (name for name, old, new in zip(names, self._flags, now, strict=True) if old != new)
        others = self._others()
        yield from (f"{name}, a buffer," for name in others.keys() ^ self._seen.keys())
        for name, tensor in others.items():
            seen, count = self._seen[name]
            if tensor is seen and version(tensor) == count:
                continue
            if not _has_bits(tensor, copies[name]):
                yield f"the values of {name}"
            self._seen[name] = tensor, version(tensor)  # the same values, written again

    def _now(self) -> list[Any]:
        trained = [parameter.requires_grad for _, parameter in self._parameters]
        hooks = [_has_hooks(parameter) for _, parameter in self._parameters]
        own = [[*map(id, module._parameters.values())] for _, module in self._modules]  # ties
        return [*(module.training for _, module in self._modules), *trained, *hooks, *own]

    def _others(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = dict(self._frozen)
        for path, module in self._places:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    found[clean(f"{path}.{name}" if path else name)] = buffer
        return found


def _has_bits(tensor: Tensor, copy: Tensor) -> bool:
    """Whether this rank's part of the tensor is the copy, also where it is NaN."""
    own = local(tensor).detach().to(copy)
    bits = [each.reshape(-1).view(torch.uint8) for each in (own, copy)]
    return own.shape == copy.shape and torch.equal(*bits)


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether the user has hooks on its gradient."""
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return bool(parameter._backward_hooks) or not all(isinstance(hook, OnGradient) for hook in after.values())
