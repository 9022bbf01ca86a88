"""FSDP2 (`fully_shard`): who reads a shard, and when.

    pre-forward, prefetches, pre-backward, model.unshard() ─▶ FSDPParamGroup.unshard ─▶ the all-gather copies the shards
                                                              ├─ before: waits for the group's layers, and
                                                              │          fetches them, if they are offloaded
                                                              └─ after: they can leave; ends a measurement
    pre-forward, pre-backward, handle.wait()               ─▶ FSDPParamGroup.wait_for_unshard: modules may compute

Modules never read a shard: they compute with what an all-gather made of it. So a parameter group is the reader of its
shards. It reads them on the stream that this wait blocks. torch has no public hook there: `set_custom_all_gather` comes
after shards were cast. What is used of torch's private names is checked when hooks are attached.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hytrain.errors import UnsupportedError
from hytrain.tensors import is_distributed

_NEEDED: Final = """
    unshard wait_for_unshard is_unsharded fsdp_params mesh_info comm_ctx device _training_state _all_gather_result
    lazy_init _sharded_param_data
""".split()


def param_groups(model: nn.Module) -> list[Any]:
    """The `FSDPParamGroup`s of a model, in the order of its modules. Raises `UnsupportedError` for an unknown torch."""
    found: dict[int, Any] = {}
    for module in _sharded_modules(model):
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group per state
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                found[id(group)] = group
    for group in found.values():
        has_them = [group, *getattr(group, "fsdp_params", [])[:1]]
        if missing := [name for name in _NEEDED if not any(hasattr(each, name) for each in has_them)]:
            raise UnsupportedError(
                f"HyTrain does not know fully_shard of torch {torch.__version__}, which has no {missing[0]}: install "
                "torch 2.13"
            )
        if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
            raise UnsupportedError(
                "fully_shard(offload_policy=CPUOffloadPolicy()) with HyTrain: leave the policy out, because HyTrain "
                "itself offloads the optimizer's state"
            )
    return list(found.values())


def reshard(model: nn.Module) -> None:
    """Give modules their shards back as parameters: after evaluation, FSDP2's root still has whole ones."""
    for module in _sharded_modules(model):
        module.reshard()


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to it, or to a part of it."""
    return bool(_sharded_modules(module))


def _sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was applied to. Their class takes a second to import, so it is not named here."""
    return [module for module in model.modules() if hasattr(type(module), "_get_fsdp_state")]


def require_reduced(model: nn.Module, trained: Set[int]) -> None:
    """Raise `UnsupportedError` for a trained parameter outside of what `fully_shard` was applied to.

    Nobody reduces its gradient over the ranks of FSDP2's groups. Inside, parameters that no group has are
    `ignored_params`, whose gradients their user reduces.
    """
    sharing = set().union(*(_ranks_of(group.mesh_info.mesh) for group in param_groups(model)))
    inside = {id(parameter) for module in _sharded_modules(model) for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if len(sharing) < 2 or id(parameter) in inside or id(parameter) not in trained:
            continue
        if not (_ranks_of(parameter.device_mesh) if is_distributed(parameter) else set()) >= sharing:
            raise UnsupportedError(
                f"{name} is in no module that fully_shard was applied to, so each rank would train it on its own "
                "gradient: apply fully_shard to the whole model too, after its blocks; if you reduce this gradient "
                "yourself, name the parameter in fully_shard's ignored_params there"
            )


def _ranks_of(mesh: Any) -> set[int]:
    return {int(rank) for rank in torch.flatten(mesh.mesh)}


def is_mean_over(group: Any, world: int) -> bool:
    """Whether a group's gradients are means over all of `world` ranks, and all in its parameters' own dtype."""
    policy, others = group.mp_policy, {each.device_mesh.size() for each in sharded(group) if is_distributed(each)}
    own = policy.param_dtype is policy.reduce_dtype is policy.output_dtype is None
    return own and others <= {group.mesh_info.mesh.size()} == {world} and group.gradient_divide_factor is None


def readers(model: nn.Module) -> dict[int, Any]:
    """By id of a sharded parameter, the group that gathers it."""
    return {id(parameter): group for group in param_groups(model) for parameter in sharded(group)}


def sharded(group: Any) -> list[nn.Parameter]:
    """A group's parameters, as shards."""
    return [known.sharded_param for known in group.fsdp_params]


def prepare(model: nn.Module) -> None:
    """Let groups have the storages from which they will gather: in its first forward, FSDP2 would pad some anew."""
    for group in param_groups(model):
        group.lazy_init()


def kept(group: Any) -> dict[int, Callable[[], Any]]:
    """By id of a parameter, a weak reference to what a group keeps of it, for `gathered`."""
    return {id(known.sharded_param): weakref.ref(known) for known in group.fsdp_params}


def gathered(kept: Any) -> list[Tensor]:
    """What all-gathers read: all of a shard's storage, which may be padded, shape (numel,). Nothing of None."""
    return [] if kept is None else [kept._sharded_param_data]


class Unshard:
    """In the place of a group's `unshard`; its `wait` is in the place of `wait_for_unshard`."""

    def __init__(self, group: Any) -> None:
        self._group, self._plain, self._plain_wait = group, group.unshard, group.wait_for_unshard
        self.readers: OrderedDict[int, Any] = OrderedDict()

    def __call__(self, async_op: bool = False) -> Any:
        group = self._group
        if group.is_unsharded or group._all_gather_result is not None:
            return self._plain(async_op)
        modules = torch.cuda.current_stream(group.device) if group.device.type == "cuda" else None
        with self._stream(async_op, 0):
            for reader in [*self.readers.values()]:
                reader.before_gather(modules)
        result = self._plain(async_op)
        if not self._is_alone:
            with self._stream(async_op, 0):
                self._have_read()
        with self._stream(async_op, 1):
            for reader in [*self.readers.values()]:
                reader.after_gather()
        return result

    def _have_read(self) -> None:
        for reader in [*self.readers.values()]:
            reader.after_read()

    def wait(self) -> Any:
        for reader in [*self.readers.values()]:
            reader.before_use()
        result = self._plain_wait()
        if self._is_alone:
            self._have_read()
        for reader in [*self.readers.values()]:
            reader.after_use()
        return result

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank has a part: then nothing is gathered, and `wait` copies the shards."""
        return bool(getattr(self._group.mesh_info, "shard_mesh_size", 1) == 1)

    def _stream(self, async_op: bool, which: int) -> AbstractContextManager[Any]:
        """The context of the stream that reads shards (0) or gathers them (1): the current one if there is only one."""
        group = self._group
        if group.device.type != "cuda" or self._is_alone:
            return nullcontext()
        return torch.cuda.stream(group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[which])


def read_by(group: Any, reader: Any) -> RemovableHandle:
    """Call `reader`, a `hooks.OnGather`, at each all-gather of a group's shards. Without one, it works as before."""
    if not isinstance(vars(group).get("unshard"), Unshard):
        group.unshard = Unshard(group)
        group.wait_for_unshard = group.unshard.wait
    handle = RemovableHandle(group.unshard.readers)
    group.unshard.readers[handle.id] = reader
    return handle
