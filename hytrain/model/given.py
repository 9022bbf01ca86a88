"""A model's tensors by name, and a model of the same kind, made without memory, that gets them. For another process.

tensors_of   all that a forward reads: parameters, frozen ones too, and buffers, also those that no state_dict has
give         puts them into the other model, in place of what it has
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from hytrain.errors import ConfigError
from hytrain.model.layers import clean


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers, each by all of its names."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {clean(name): tensor for name, tensor in named}


def give(
    model: nn.Module, trained: Mapping[str, Tensor], others: Mapping[str, Tensor], *, who: str
) -> dict[str, nn.Parameter]:
    """Give a model that was built without memory its tensors: `trained` parameters, and frozen ones and buffers.

    Returns the trained ones by name. Raises `ConfigError` if the model has other ones than these: `who` has made it.
    """
    parameters = {clean(name): parameter for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    needed, given = parameters | {clean(name): buffer for name, buffer in buffers.items()}, {**trained, **others}
    for name in sorted(needed.keys() | given.keys()):
        if _kind(needed.get(name)) != _kind(given.get(name)):
            raise ConfigError(
                f"{who} makes another model than the one that is trained: its {name} is {_kind(needed.get(name))} "
                f"in place of {_kind(given.get(name))}"
            )
    made = {old: nn.Parameter(given[name], requires_grad=name in trained) for name, old in parameters.items()}
    for path, owner in model.named_modules():
        owner._parameters.update({name: made[old] for name, old in owner._parameters.items() if old is not None})
        lost = [name for name, value in vars(owner).items() if isinstance(value, Tensor) and value.is_meta]
        if lost:
            raise ConfigError(
                f"{f'{path}.{lost[0]}'.lstrip('.')} is a tensor that is no buffer, and has no values if the model is "
                "built without memory: make it one with register_buffer"
            )
    for name in buffers:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = given[clean(name)]
    return {name: made[parameters[name]] for name in trained}


def _kind(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"
