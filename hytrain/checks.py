"""Checks of what an optimizer is given, before anything is started: the model, groups, and options that depend on them.

`optim` calls them. Each error is one sentence that says what to do. `options` has the checks of each option by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from hytrain.algorithms import Algorithm
from hytrain.errors import ConfigError, UnsupportedError, UsageError
from hytrain.kernels.torch_backend import vectors
from hytrain.model.blueprint import blueprints_of
from hytrain.model.layers import find_blocks
from hytrain.options import Options
from hytrain.run.ranks import Ranks
from protocol.rules import Hyper


def check_same(ranks: Ranks, options: Options) -> None:
    """Raise `UsageError` on all ranks if what decides about a step differs between them; k and its like may."""
    ranks.require_same(
        vectors(),
        "torch rounds differently on the CPUs of some ranks, so replicas would drift apart: set ATEN_CPU_CAPABILITY to "
        "the same on all of them, or train on equal CPUs",
    )
    names = ["grad_accumulation", "max_grad_norm", "clip", "on_nonfinite", "loss_scale", "overlap", "offload_weights"]
    names += ["state_dtype", "master_dtype"]
    ranks.require_same(
        tuple(getattr(options, name) for name in names),
        f"ranks have different options: give all of them the same {', '.join(names)}",
    )
    if ranks.world > 1 and options.clip == "per_layer":  # on all ranks alike
        raise UnsupportedError('clip="per_layer" with several ranks: a layer is in shards there, so use "global"')
    if ranks.world > 1 and options.device is not None:
        raise UnsupportedError("device with several ranks: shard the model on the ranks' GPUs, and leave device out")


def check_masters(model: nn.Module, options: Options) -> None:
    """Raise `ConfigError` if masters of bfloat16 weights are to be left out, but there are no such weights."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if options.master_dtype == "bfloat16" and torch.bfloat16 not in dtypes:
        raise ConfigError(
            'master_dtype="bfloat16" leaves out the masters of bfloat16 weights, and the model has none: convert it '
            "with model.bfloat16(), or leave master_dtype out"
        )


def check_model(model: nn.Module) -> torch.device:
    """The device that the model is on. Raises `UnsupportedError` for what cannot be trained here."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            "with DistributedDataParallel, every rank would hold all state: apply fully_shard(…, "
            "reshard_after_forward=False) to the blocks of the model and to the model itself instead, which also keeps "
            "whole weights; with one rank, pass model.module"
        )
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError("DataParallel replicates the model behind HyTrain's back: use torchrun and fully_shard")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(p.requires_grad for p in module.parameters()):
            raise UnsupportedError(
                f"{name or 'the model'} is TorchScript, which reads weights where HyTrain cannot wait for their "
                "updates: train the module that it was made of (torch.compile makes it fast), or freeze it"
            )
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedError(f"{name or 'the model'} makes sparse gradients: construct it with sparse=False")
    if any(map(is_lazy, model.parameters())):
        raise UnsupportedError(
            f"{type(model).__name__} has lazy modules, whose parameters have no shape before their first forward: call "
            "it once before, or give its parameters, hytrain.AdamW(model.parameters(), …)"
        )
    made_on = {p.parameter: p.device for blueprint in blueprints_of(model) for p in blueprint.planned}
    trainable = [p for p in model.parameters() if p.requires_grad and (p.numel() or p in made_on)]
    if not trainable:
        raise UnsupportedError(f"{type(model).__name__} has no parameter that needs a gradient: nothing to train")
    devices = {made_on.get(parameter, parameter.device) for parameter in trainable}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"parameters are on {', '.join(map(str, devices))}: HyTrain needs one cpu or cuda device (without memory: "
            "hytrain.deferred_init, not torch.device('meta'))"
        )
    return next(iter(devices))


def groups_for_torch(model: nn.Module | None, param_groups: ParamsT | None) -> list[dict[str, Any]]:
    """What torch's constructor takes, as lists. Frozen parameters stay in theirs, as in torch.

    Names stay beside their parameters: torch reads them. Empty groups stay, too: schedulers count them.
    """
    if model is not None and param_groups is None:
        return [{"params": list(model.parameters())}]
    if model is None and (isinstance(param_groups, Tensor | dict) or not isinstance(param_groups, Iterable)):
        kind = type(param_groups).__name__
        raise TypeError(f"params is a {kind}: parameters in a list or another iterable, groups of them, or the model")
    assert param_groups is not None
    entries: list[Any] = [param_groups] if isinstance(param_groups, Tensor | dict) else list(param_groups)
    if model is None and not entries:
        return []
    groups = []
    ours = None if model is None else {id(parameter) for parameter in model.parameters()}
    for group in entries if entries and isinstance(entries[0], dict) else [{"params": entries}]:
        if not isinstance(group, dict) or "params" not in group:
            raise UnsupportedError('param_groups must be parameters of the model, or dictionaries with "params"')
        given = group["params"]
        given = [given] if isinstance(given, Tensor) else given if isinstance(given, set) else list(given)
        if ours is not None and any(id(e[1] if isinstance(e, tuple) else e) not in ours for e in given):
            raise UnsupportedError("param_groups names a parameter that the model does not have")
        groups.append({**group, "params": given})
    return groups


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The matrices of the model's repeated blocks, for Muon, and all its other parameters, for AdamW.

    Raises `ConfigError` if there are no such blocks.
    """
    hidden = {
        id(parameter)
        for block in find_blocks(model)
        for module in block.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim == 2
    }
    if not hidden:
        raise ConfigError(
            f"{type(model).__name__} has no repeated blocks with matrices for Muon: name them in param_groups, and all "
            "other parameters in a group with use_muon=False"
        )
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [(name, parameter) for name, parameter in named if (id(parameter) in hidden) is of_muon]}
        | {"use_muon": of_muon}
        for of_muon in (True, False)
    ]
    return [group for group in groups if group["params"]]


class Groups:
    """The parameter groups of an optimizer, and what they were when they were noted last.

    Without the optimizer, which it refers to weakly, there are none. The user may replace the list of groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, algorithm: Algorithm) -> None:
        self._optimizer, self._algorithm = weakref.ref(optimizer), algorithm
        self.note()

    @property
    def now(self) -> list[dict[str, Any]]:
        return [] if (optimizer := self._optimizer()) is None else optimizer.param_groups

    def note(self) -> None:
        """Remember them, to notice when the loop changes more than it may. The caller keeps the parameters."""
        self.ids = self._ids()
        self.rules = [self._algorithm.rule(group) for group in self.now]

    def _ids(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.now]

    def read(self) -> tuple[Hyper, ...]:
        """The current hyperparameters.

        Raises `UsageError` for other groups or parameters, and for hyperparameters that cannot be.
        """
        if self._optimizer() is None:
            return ()
        groups, algorithm = self.now, self._algorithm
        if len(groups) != len(self.ids):
            raise UsageError(
                f"opt.param_groups has {len(groups)} groups in place of {len(self.ids)}: use add_param_group"
            )
        if self._ids() != self.ids:
            raise UsageError(
                "opt.param_groups has other parameters than it was made with: add some with add_param_group, freeze "
                "some with requires_grad_(False), or make the optimizer anew"
            )
        hypers = algorithm.current(groups)
        if [hyper.rule for hyper in hypers] != self.rules:
            raise UsageError(algorithm.rule_changed)
        return hypers
