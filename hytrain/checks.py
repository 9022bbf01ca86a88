"""What a `hytrain.AdamW` is asked for, checked before anything is started: options, groups, the model.

`optim` calls this; each refusal is one sentence that says what to do.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from hytrain.errors import ConfigError, UnsupportedError
from hytrain.kernels import choice as backends
from hytrain.planner.policies import POLICIES
from protocol.messages import OBJECTIVES


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is the same for all parameters; see `hytrain.AdamW`. `k` is None for "auto"."""

    k: float | None
    policy: str
    objective: str
    backend: str
    gradient_dtype: torch.dtype | None
    grad_accumulation: int
    accumulate_on: str
    max_grad_norm: float | None
    clip: str
    on_nonfinite: str | None
    speculate: bool | None
    loss_scale: float | str | None
    overlap: bool

    @property
    def awaits_verdict(self) -> bool:
        """Whether steps wait for the norm of all gradients."""
        return (self.max_grad_norm is not None and self.clip == "global") or self.skips_nonfinite

    @property
    def skips_nonfinite(self) -> bool:
        """Whether steps are left out whose gradients are not finite."""
        return self.on_nonfinite is not None or self.loss_scale is not None

    @property
    def may_speculate(self) -> bool:
        """Whether the CPU may be ahead of that. Two banks of planes are not for those who want little host memory.

        A verdict with a scaled loss's scale in it is never the one that updates ahead of it assume.
        """
        wanted = self.speculate if self.speculate is not None else self.objective != "host-memory"
        return wanted and self.awaits_verdict and self.overlap and self.loss_scale is None


#: Options of torch's AdamW that HyTrain does not have. Other keys are whoever's: schedulers keep theirs in groups.
_NOT_OFFERED: Final = ("amsgrad", "foreach", "capturable", "differentiable", "fused")


def check_options(*, k: float | str, **others: Any) -> Options:
    """The options of a `hytrain.AdamW`. Raises `ConfigError`."""
    if k != "auto" and (isinstance(k, str) or not (_is_number(k) and 0.0 <= k <= 1.0)):
        raise ConfigError(f'k is {k!r}: a fraction in [0, 1], or "auto"')
    for name in ("speculate", "overlap"):
        if not (isinstance(others[name], bool) or (name == "speculate" and others[name] is None)):
            raise ConfigError(f"{name} is {others[name]!r}: True or False" + " or None" * (name == "speculate"))
    if not (others["max_grad_norm"] is None or _is_number(others["max_grad_norm"])):
        raise ConfigError(f"max_grad_norm is {others['max_grad_norm']!r}: a number above 0, or None")
    options = Options(k=None if isinstance(k, str) else float(k), **others)
    if options.objective not in OBJECTIVES:
        raise ConfigError(f"objective {options.objective!r} is unknown: choose one of {', '.join(OBJECTIVES)}")
    if options.policy not in POLICIES:
        raise ConfigError(f"policy {options.policy!r} is unknown: choose one of {', '.join(POLICIES)}")
    if options.backend != "auto" and options.backend not in backends.BACKENDS:
        raise ConfigError(f"backend {options.backend!r} is unknown: choose auto, {', '.join(backends.BACKENDS)}")
    if options.gradient_dtype not in (None, torch.bfloat16, torch.float32):
        raise ConfigError(
            f"gradient_dtype {options.gradient_dtype}: gradients travel in torch.float32 or torch.bfloat16"
        )
    if options.policy == "fixed" and options.k is None:
        raise ConfigError('policy="fixed" needs a k: a fraction in [0, 1] in place of "auto"')
    backwards = options.grad_accumulation
    if not isinstance(backwards, int) or isinstance(backwards, bool) or backwards < 1:
        raise ConfigError(f"grad_accumulation is {options.grad_accumulation!r}: a whole number of backwards, from 1 on")
    if options.accumulate_on not in ("auto", "device", "host"):
        raise ConfigError(f'accumulate_on is {options.accumulate_on!r}: "device", "host", or "auto" for either')
    if options.max_grad_norm is not None and not options.max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm is {options.max_grad_norm!r}: a number above 0, or None")
    if options.clip not in ("global", "per_layer"):
        raise ConfigError(f'clip is {options.clip!r}: "global" or "per_layer"')
    if options.clip == "per_layer" and options.max_grad_norm is None:
        raise ConfigError('clip="per_layer" clips nothing without max_grad_norm: pass it too')
    if options.on_nonfinite not in (None, "skip", "raise"):
        raise ConfigError(f'on_nonfinite is {options.on_nonfinite!r}: "skip", "raise" or None')
    if options.speculate is not None and not options.awaits_verdict:
        raise ConfigError(
            f"speculate is {options.speculate!r}, but no step waits for the norm of its gradients: pass max_grad_norm "
            'with clip="global", or on_nonfinite; or leave speculate out'
        )
    if options.speculate and not options.overlap:
        raise ConfigError("speculate=True with overlap=False: leave one out, as nothing is updated before step() then")
    _check_loss_scale(options)
    return options if options.k is None else replace(options, policy="fixed")


def _check_loss_scale(options: Options) -> None:
    wanted = options.loss_scale
    if wanted is None:
        return
    if wanted != "dynamic" and (isinstance(wanted, bool | str) or not 1e-20 <= wanted <= 1e20):
        raise ConfigError(f'loss_scale is {wanted!r}: "dynamic", a number from 1e-20 to 1e20, or None')
    if wanted == "dynamic" and options.on_nonfinite == "raise":
        raise ConfigError(
            'on_nonfinite="raise" with loss_scale="dynamic", which finds its scale by steps that are not finite: leave '
            "on_nonfinite out, they are skipped and counted"
        )
    if options.speculate:
        raise ConfigError(
            "speculate=True with loss_scale: leave one out, as every update needs the verdict's scale then"
        )


def check_model(model: nn.Module) -> torch.device:
    """The device that the model is on. Raises `UnsupportedError` for what cannot be trained here."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"hytrain.AdamW needs the model itself, not {type(model).__name__}: AdamW(model, …)")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world = torch.distributed.get_world_size()
        if world > 1:
            raise UnsupportedError(
                "more than one rank is not supported yet, as hooks would see unreduced gradients: train on one GPU"
            )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UnsupportedError("DistributedDataParallel is not supported, also with one rank: pass model.module")
    if isinstance(model, nn.DataParallel):
        raise UnsupportedError("DataParallel replicates the model behind HyTrain's back: train on one GPU")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UnsupportedError(f"{name or 'the model'} makes sparse gradients: construct it with sparse=False")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()]
    if not trainable:
        raise UnsupportedError(f"{type(model).__name__} has no parameter that needs a gradient: nothing to train")
    devices = {parameter.device for parameter in trainable}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"parameters are on {', '.join(map(str, devices))}: HyTrain needs one cpu or cuda device"
        )
    return next(iter(devices))


def check_free(parameters: Iterable[Tensor], taken: Container[int]) -> None:
    """Raise `UnsupportedError` if others train one of these."""
    if any(id(parameter) in taken for parameter in parameters):
        raise UnsupportedError(
            "the model has parameters that another hytrain.AdamW trains: close() that one first, or give one optimizer "
            "all of them, in as many param_groups as wanted"
        )


def named_groups(model: nn.Module, param_groups: Iterable[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The groups as dictionaries of lists, without empty ones; frozen parameters stay in theirs, as with torch."""
    if param_groups is None:
        param_groups = [{"params": list(model.parameters())}]
    if isinstance(param_groups, int | float):
        raise ConfigError(f"the second argument is param_groups: write lr={param_groups!r}")
    groups = []
    ours = {id(parameter) for parameter in model.parameters()}
    for group in param_groups:
        if not isinstance(group, dict):
            raise UnsupportedError('param_groups must be dictionaries with "params", over parameters of the model')
        given = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        given = [entry[1] if isinstance(entry, tuple) else entry for entry in given]  # (name, parameter)
        if any(id(parameter) not in ours for parameter in given):
            raise UnsupportedError("param_groups names a parameter that the model does not have")
        groups.append({**group, "params": given})
    return [group for group in groups if group["params"]]


def check_group(group: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for options of torch's AdamW that HyTrain lacks, `ConfigError` for impossible values."""
    for key in _NOT_OFFERED:
        if group.get(key):
            raise UnsupportedError(f"hytrain.AdamW has no option {key!r}")
    if any(isinstance(value, Tensor) for value in (group["lr"], *(value for _, value in _betas(group["betas"])))):
        raise UnsupportedError("tensor learning rates and betas are not supported: pass numbers")
    for name, value in (*((name, group[name]) for name in ("lr", "eps", "weight_decay")), *_betas(group["betas"])):
        if not _is_number(value):
            raise ConfigError(f"{name} is {value!r}: a number")
    if not isinstance(group["maximize"], bool):
        raise ConfigError(f"maximize is {group['maximize']!r}: True or False")
    beta1, beta2 = group["betas"]
    if group["lr"] < 0 or group["eps"] < 0 or group["weight_decay"] < 0 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ConfigError("lr, eps and weight_decay must not be negative, betas lie in [0, 1)")


def _betas(betas: Any) -> list[tuple[str, Any]]:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"betas is {betas!r}: two numbers in [0, 1), such as (0.9, 0.999)")
    return [(f"betas[{index}]", beta) for index, beta in enumerate(betas)]


def _is_number(value: Any) -> bool:
    """Whether it is a finite one; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
