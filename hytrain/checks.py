"""Checks of what an optimizer is given: options, groups and the model, before anything is started.

`optim` calls them. Each error is one sentence that says what to do.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from hytrain.algorithms import ADAMW, Algorithm, is_number
from hytrain.errors import ConfigError, UnsupportedError, UsageError
from hytrain.kernels import choice as backends
from hytrain.kernels.torch_backend import vectors
from hytrain.model.blueprint import blueprints_of
from hytrain.model.layers import find_blocks
from hytrain.run.ranks import Ranks
from protocol.handles import Precision
from protocol.messages import MASTER_DTYPES, OBJECTIVES, POLICIES, STATE_DTYPES
from protocol.rules import Hyper


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options that all parameters share; see `hytrain.optim.Optimizer`. `k` is None for "auto"."""

    algorithm: Algorithm
    k: float | None
    policy: str
    objective: str
    backend: str
    gradient_dtype: torch.dtype | None
    state_dtype: str
    master_dtype: str
    grad_accumulation: int
    accumulate_on: str
    max_grad_norm: float | None
    clip: str
    on_nonfinite: str | None
    speculate: bool | None
    loss_scale: float | str | None
    overlap: bool
    visit: float | None = 0.0
    offload_weights: float | None = 0.0
    offload_activations: bool = False

    @property
    def precision(self) -> Precision:
        return Precision(self.state_dtype, self.master_dtype)

    @property
    def awaits_verdict(self) -> bool:
        """Whether updates wait for the norm of all gradients."""
        return (self.max_grad_norm is not None and self.clip == "global") or self.skips_nonfinite

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step with gradients that are not finite is skipped."""
        return self.on_nonfinite is not None or self.loss_scale is not None

    @property
    def may_speculate(self) -> bool:
        """Whether the CPU may update before the norm is known. That takes a second bank of planes in host memory.

        With a scaled loss it may not: an early update assumes a scale of 1.
        """
        wanted = self.speculate if self.speculate is not None else self.objective != "host-memory"
        return wanted and self.awaits_verdict and self.overlap and self.loss_scale is None


def check_options(
    *,
    k: float | str,
    visit: float | str,
    offload_weights: float | str,
    state_dtype: torch.dtype | str,
    master_dtype: torch.dtype | str,
    **others: Any,
) -> Options:
    """The options of an optimizer. Raises `ConfigError`."""
    options = Options(
        k=_fraction("k", k),
        visit=_fraction("visit", visit),
        offload_weights=_fraction("offload_weights", offload_weights),
        state_dtype=str(state_dtype).removeprefix("torch."),
        master_dtype=str(master_dtype).removeprefix("torch."),
        **others,
    )
    for is_wrong, sentence in chain(_wrong_values(options), _wrong_combinations(options)):
        if is_wrong:
            raise ConfigError(sentence)
    return options if options.k is None else replace(options, policy="fixed")


def _fraction(name: str, given: float | str) -> float | None:
    """The number; None for "auto". Raises `ConfigError`."""
    if given == "auto":
        return None
    if isinstance(given, str) or not (is_number(given) and 0.0 <= given <= 1.0):
        raise ConfigError(f'{name} is {given!r}: a fraction in [0, 1], or "auto"')
    return float(given)


def _wrong_values(o: Options) -> Iterator[tuple[bool, str]]:
    """(Whether an option is wrong by itself, what to say then)."""
    backwards, scale = o.grad_accumulation, o.loss_scale
    norm_fits = o.max_grad_norm is None or (is_number(o.max_grad_norm) and o.max_grad_norm > 0)
    dtype_fits = o.gradient_dtype in (None, torch.bfloat16, torch.float32)
    count_fits = isinstance(backwards, int) and not isinstance(backwards, bool) and backwards >= 1
    scale_fits = scale in (None, "dynamic") or not (isinstance(scale, bool | str) or not 1e-20 <= scale <= 1e20)
    yield (
        o.speculate is not None and not isinstance(o.speculate, bool),
        f"speculate is {o.speculate!r}: True, False or None",
    )
    for name, flag in (("overlap", o.overlap), ("offload_activations", o.offload_activations)):
        yield not isinstance(flag, bool), f"{name} is {flag!r}: True or False"
    yield not norm_fits, f"max_grad_norm is {o.max_grad_norm!r}: a number above 0, or None"
    for name, value, known in (("objective", o.objective, OBJECTIVES), ("policy", o.policy, POLICIES)):
        yield value not in known, f"{name} {value!r} is unknown: choose one of {', '.join(known)}"
    choices = ("auto", *backends.BACKENDS)
    is_adamw = o.algorithm is ADAMW
    yield o.backend == "deepspeed" and not is_adamw, 'backend "deepspeed" has AdamW alone: leave backend out'
    yield o.backend not in choices, f"backend {o.backend!r} is unknown: choose {', '.join(choices)}"
    yield not dtype_fits, f"gradient_dtype {o.gradient_dtype}: gradients travel in torch.float32 or torch.bfloat16"
    for name, given, offered in (
        ("state_dtype", o.state_dtype, STATE_DTYPES),
        ("master_dtype", o.master_dtype, MASTER_DTYPES),
    ):
        yield given not in offered, f"{name} is {given}: choose one of {', '.join(offered)}"
    yield not count_fits, f"grad_accumulation is {backwards!r}: a whole number of backwards, from 1 on"
    either = f'accumulate_on is {o.accumulate_on!r}: "device", "host", or "auto" for either'
    yield o.accumulate_on not in ("auto", "device", "host"), either
    yield o.clip not in ("global", "per_layer"), f'clip is {o.clip!r}: "global" or "per_layer"'
    yield o.on_nonfinite not in (None, "skip", "raise"), f'on_nonfinite is {o.on_nonfinite!r}: "skip", "raise" or None'
    yield not scale_fits, f'loss_scale is {scale!r}: "dynamic", a number from 1e-20 to 1e20, or None'


def _wrong_combinations(o: Options) -> Iterator[tuple[bool, str]]:
    """(Whether options contradict each other, what to say then)."""
    yield (
        bool(o.visit) and (o.k is None or o.k + (o.visit or 0.0) > 1.0),
        f"visit is {o.visit!r} with k={'auto' if o.k is None else o.k}: give a number for k too, both 1 at most",
    )
    yield (
        o.visit is None and (o.k is not None or o.policy != "deadline"),
        'visit="auto" needs k="auto" and policy="deadline", which decides both',
    )
    yield o.policy == "fixed" and o.k is None, 'policy="fixed" needs a k: a fraction in [0, 1] in place of "auto"'
    yield (
        o.clip == "per_layer" and o.max_grad_norm is None,
        'clip="per_layer" clips nothing without max_grad_norm: pass it too',
    )
    yield (
        o.speculate is not None and not o.awaits_verdict,
        f"speculate is {o.speculate!r}, but no step waits for the norm of its gradients: pass max_grad_norm "
        'with clip="global", or on_nonfinite; or leave speculate out',
    )
    yield (
        bool(o.speculate) and not o.overlap,
        "speculate=True with overlap=False: leave one out, as nothing is updated before step() then",
    )
    yield (
        o.loss_scale == "dynamic" and o.on_nonfinite == "raise",
        'on_nonfinite="raise" with loss_scale="dynamic", which finds its scale by steps that are not finite: leave '
        "on_nonfinite out, they are skipped and counted",
    )
    yield (
        bool(o.speculate) and o.loss_scale is not None,
        "speculate=True with loss_scale: leave one out, as every update needs the verdict's scale then",
    )


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
    if ranks.world > 1 and options.offload_weights != 0.0:
        raise UnsupportedError(
            "offload_weights with several ranks: FSDP2 shares the weights out there, so leave it out"
        )


def check_device(given: torch.device | str | None, ranks: Ranks) -> torch.device | None:
    """The device to train on, with its number; None for the model's own. Raises `ConfigError`, `UnsupportedError`."""
    if given is None:
        return None
    try:
        device = torch.device(given)
        is_there = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < torch.cuda.device_count())
    except (RuntimeError, TypeError):
        is_there = False
    if not is_there:
        raise ConfigError(f'device is {given!r}: "cpu", or "cuda" with a GPU that is there')
    if ranks.world > 1:
        raise UnsupportedError("device with several ranks: shard the model on the ranks' GPUs, and leave device out")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


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
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"HyTrain needs the model itself, not {type(model).__name__}: hytrain.AdamW(model, …)")
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


def check_free(parameters: Iterable[Tensor], taken: Container[int]) -> None:
    """Raise `UnsupportedError` if another optimizer trains one of these."""
    if any(id(parameter) in taken for parameter in parameters):
        raise UnsupportedError(
            "the model has parameters that another optimizer of HyTrain trains: give each its own part as the model "
            "(AdamW(model.part)), or one optimizer all of them, in as many param_groups as wanted; or close() that one"
        )


def groups_for_torch(model: nn.Module, param_groups: ParamsT | None) -> list[dict[str, Any]]:
    """What torch's constructor takes, as lists. Frozen parameters stay in theirs, as in torch.

    Names stay beside their parameters: torch reads them. Empty groups stay, too: schedulers count them.
    """
    if param_groups is None:
        return [{"params": list(model.parameters())}]
    if isinstance(param_groups, int | float):
        raise ConfigError(f"the second argument is param_groups: write lr={param_groups!r}")
    entries: list[Any] = [param_groups] if isinstance(param_groups, Tensor | dict) else list(param_groups)
    groups = []
    ours = {id(parameter) for parameter in model.parameters()}
    for group in entries if entries and isinstance(entries[0], dict) else [{"params": entries}]:
        if not isinstance(group, dict) or "params" not in group:
            raise UnsupportedError('param_groups must be parameters of the model, or dictionaries with "params"')
        given = group["params"]
        given = [given] if isinstance(given, Tensor) else given if isinstance(given, set) else list(given)
        if any(id(entry[1] if isinstance(entry, tuple) else entry) not in ours for entry in given):
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


def group_ids(param_groups: list[dict[str, Any]]) -> list[list[int]]:
    """The identity of each group's parameters."""
    return [[id(parameter) for parameter in group["params"]] for group in param_groups]


def read_groups(
    algorithm: Algorithm, param_groups: list[dict[str, Any]], ids: list[list[int]], rules: Sequence[str]
) -> tuple[Hyper, ...]:
    """The current hyperparameters. The user may have replaced the list of groups since `ids` and `rules` were taken.

    Raises `UsageError` for other groups or parameters, and for hyperparameters that cannot be.
    """
    if len(param_groups) != len(ids):
        raise UsageError(f"opt.param_groups has {len(param_groups)} groups in place of {len(ids)}: use add_param_group")
    if group_ids(param_groups) != ids:
        raise UsageError(
            "opt.param_groups has other parameters than it was made with: add some with add_param_group, freeze some "
            "with requires_grad_(False), or make the optimizer anew"
        )
    for group in param_groups:
        try:
            algorithm.of(group).check_kinds(group)
        except (ConfigError, UnsupportedError) as error:
            raise UsageError(f"in opt.param_groups, {error}") from None
        if not algorithm.of(group).betas_fit(group):
            raise UsageError(f"betas in opt.param_groups are {tuple(group['betas'])}: they lie in [0, 1)")
    hypers = tuple(map(algorithm.hyper, param_groups))
    if [hyper.rule for hyper in hypers] != list(rules):
        raise UsageError(algorithm.rule_changed)
    return hypers
