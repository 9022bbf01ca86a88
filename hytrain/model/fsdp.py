"""FSDP2 (`fully_shard`): who reads a shard, and when.

    pre-forward, prefetches, pre-backward, model.unshard() ─▶ FSDPParamGroup.unshard ─▶ the all-gather copies the shards
                                                              ├─ first: BeforeUnshard ─▶ waits for the group's layers
                                                              └─ then: what it has returned, which ends a measurement

Modules never read a shard: they compute with what an all-gather made of it. So a parameter group is the reader of its
shards. It reads them on the stream that this wait blocks. torch has no public hook there: `set_custom_all_gather` comes
after shards were cast. What is used of torch's private names is checked when hooks are attached.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from hytrain.errors import UnsupportedError

_NEEDED: Final = ("unshard", "is_unsharded", "fsdp_params", "mesh_info", "comm_ctx", "_all_gather_result")


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
        if missing := [name for name in _NEEDED if not hasattr(group, name)]:
            raise UnsupportedError(
                f"HyTrain does not know fully_shard of torch {torch.__version__}, which has no {missing[0]}: install "
                "torch 2.13"
            )
        if type(group.offload_policy).__name__ == "CPUOffloadPolicy":
            raise UnsupportedError(
                "fully_shard(offload_policy=CPUOffloadPolicy()) beside HyTrain: leave it out, HyTrain offloads the "
                "optimizer's state by itself"
            )
    return list(found.values())


def reshard(model: nn.Module) -> None:
    """Give modules their shards back as parameters: after evaluation, FSDP2's root still has whole ones."""
    for module in _sharded_modules(model):
        module.reshard()


def _sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was applied to. Their class takes a second to import, so it is not named here."""
    return [module for module in model.modules() if hasattr(type(module), "_get_fsdp_state")]


def readers(model: nn.Module) -> dict[int, Any]:
    """By id of a sharded parameter, the group that gathers it."""
    return {id(parameter): group for group in param_groups(model) for parameter in sharded(group)}


def sharded(group: Any) -> list[nn.Parameter]:
    """A group's parameters, as shards."""
    return [known.sharded_param for known in group.fsdp_params]


Call = Callable[[], None]


class Unshard:
    """In the place of a group's `unshard`: calls `before` first, on the stream that reads the shards.

    What these return is called afterwards, on the stream that has the whole parameters.
    """

    def __init__(self, group: Any) -> None:
        self._group, self._plain = group, group.unshard
        self.before: list[Callable[[], Call | None]] = []

    def __call__(self, async_op: bool = False) -> Any:
        group = self._group
        if group.is_unsharded or group._all_gather_result is not None:
            return self._plain(async_op)
        with self._stream(async_op, 0):
            after = [call() for call in self.before]
        result = self._plain(async_op)
        with self._stream(async_op, 1):
            for end in filter(None, after):
                end()
        return result

    def _stream(self, async_op: bool, which: int) -> AbstractContextManager[Any]:
        """The context of the stream that reads shards (0) or gathers them (1): the current one if there is only one."""
        group = self._group
        if group.device.type != "cuda" or getattr(group.mesh_info, "shard_mesh_size", 1) == 1:
            return nullcontext()
        return torch.cuda.stream(group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[which])


class UnshardHandle:
    """Removes what `before_unshard` registered."""

    def __init__(self, group: Any, call: Callable[[], Call | None]) -> None:
        self._group, self._call = group, call

    def remove(self) -> None:
        unshard = vars(self._group).get("unshard")
        if isinstance(unshard, Unshard) and self._call in unshard.before:
            unshard.before.remove(self._call)
            if not unshard.before:
                del self._group.unshard


def before_unshard(group: Any, call: Callable[[], Call | None]) -> UnshardHandle:
    """Call `call` before each all-gather of a group's shards, and what it returns after it."""
    if not isinstance(vars(group).get("unshard"), Unshard):
        group.unshard = Unshard(group)
    group.unshard.before.append(call)
    return UnshardHandle(group, call)
