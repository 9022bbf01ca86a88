"""Finds the blocks whose weights can rest in host memory, and brings a model to a GPU that cannot hold them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hytrain.model import fsdp
from hytrain.model.blueprint import Planned, Unmade
from hytrain.model.trained import Gate, OffloadedBlock, TrainedParameter
from hytrain.tensors import allocate, free, has_memory, has_own_storage, is_distributed, storage_of


def offloadable_blocks(gates: Sequence[tuple[Any, Gate]], blocks: Sequence[nn.Module]) -> list[OffloadedBlock]:
    """Those of `blocks`, in their order, that can be offloaded. Gives their layers and gates the block.

    Of sharded blocks, those are FSDP2's groups of nothing else. A block that shares parameters with other modules, or
    memory with other tensors, is left out.
    """
    readers: dict[int, int] = {}
    for _, gate in gates:
        for layer in gate.layers:
            readers[layer.lid] = readers.get(layer.lid, 0) + 1
    gate_of = {id(reader): gate for reader, gate in gates}
    own = [(gate_of[id(block)], False) for block in blocks if id(block) in gate_of]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    for group, gate in gates:
        if not isinstance(group, nn.Module) and inside.issuperset(map(id, fsdp.sharded(group))):
            own.append((gate, True))
            kept = fsdp.kept(group)
            for known in gate.parameters:
                known.shard = kept[id(known.parameter)]
    return [_offloaded(gate, is_gathered) for gate, is_gathered in own if _is_apart(gate, readers)]


def _is_apart(gate: Gate, readers: dict[int, int]) -> bool:
    alone = all(readers[layer.lid] == 1 for layer in gate.layers)
    owners = {id(segment.owner) for layer in gate.layers for segment in layer.segments}
    return alone and owners == {id(known) for known in gate.parameters} and all(map(_has_own_memory, gate.parameters))


def _has_own_memory(known: TrainedParameter) -> bool:
    """Not so a shard without an all-gather of such a group: modules compute with it."""
    if is_distributed(known.parameter) and known.memory is known.own:
        return False
    return has_own_storage(known.memory) and storage_of(known.memory) == storage_of(known.own)


def _offloaded(gate: Gate, is_gathered: bool = False) -> OffloadedBlock:
    parameters = list({id(known): known for known in gate.parameters}.values())
    block = OffloadedBlock(gate, parameters, is_gathered)
    gate.block = block
    for layer in gate.layers:
        layer.block = block
    for known in block.parameters:
        known.block = block
    return block


def take_to(
    model: nn.Module,
    device: torch.device,
    blocks: Sequence[nn.Module],
    deferred: Sequence[Planned],
    values: dict[nn.Parameter, Tensor],
) -> None:
    """Bring a model to the device, but for the values of the parameters of `blocks`, which are added to `values`.

    Those get storages without memory there, to be filled by `load`. The other parameters and all buffers are moved.
    Those that are `deferred` get storages as well: blueprints make their values later.
    """
    within = {id(parameter) for block in blocks for parameter in block.parameters() if parameter.requires_grad}
    planned_of = {planned.parameter: planned for planned in deferred}
    for parameter in model.parameters():
        planned = planned_of.get(parameter)
        if planned is not None:
            empty = planned.meta()
            planned.embody(device)
            values[parameter] = empty
        elif id(parameter) in within and has_own_storage(parameter):
            values[parameter] = parameter.data
            parameter.data = torch.empty_like(parameter, device=device)
        else:
            parameter.data = parameter.data.to(device)
            continue
        if id(parameter) in within:
            free(parameter)
    _move_buffers(model, device)


def load(parameter: nn.Parameter, values: Tensor) -> None:
    """Give a parameter that `take_to` has left without memory its values, unless a blueprint makes them."""
    if not has_memory(parameter):
        allocate(parameter)
    if not values.is_meta:
        parameter.data.copy_(values)  # for autograd this is no write


def take_back(model: nn.Module, device: torch.device, values: dict[nn.Parameter, Tensor]) -> None:
    """Undo `take_to`: bring the model to the `device` that it came from. Deferred parameters are empty then."""
    for parameter in model.parameters():
        value = values.get(parameter)
        if value is None:
            if not parameter.is_meta:  # as deferred ones are that were not reached
                parameter.data = parameter.data.to(device)
        else:
            parameter.data = parameter.data.new_empty(0) if value.is_meta else value
    _move_buffers(model, device)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not isinstance(buffer, Unmade):  # or else it comes with the values
                setattr(module, name, buffer.to(device))
