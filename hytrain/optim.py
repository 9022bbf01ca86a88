"""`hytrain.AdamW`, `Adam`, `SGD`, `Lion` and `Muon`, the user's interface.

    opt = hytrain.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()

Each has the arguments and defaults of torch's class of the same name. `optimizer` has what they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

from torch import nn
from torch.optim.optimizer import ParamsT

from hytrain import algorithms
from hytrain.checks import groups_for_torch, muon_groups
from hytrain.errors import ConfigError
from hytrain.optimizer import Optimizer
from hytrain.options import SharedOptions, TorchsOptions, described

__all__ = ["SGD", "Adam", "AdamW", "Lion", "Muon", "Optimizer"]


class Adam(Optimizer):
    """Adam (Kingma & Ba, 2015), as in `torch.optim.Adam`.

    The other options are those of `Optimizer`, which also says what is raised.

    Args:
        params: As for `Optimizer`.
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Added to the gradient, times the weight: it is not decoupled.
        amsgrad: HyTrain has only False.
        maximize: Maximize the objective instead of minimizing it.
        param_groups: As for `Optimizer`.
    """

    algorithm = algorithms.ADAM

    def __init__(
        self,
        params: nn.Module | Sequence[nn.Module] | ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        param_groups: ParamsT | None = None,
        **options: Unpack[TorchsOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, param_groups=param_groups, amsgrad=amsgrad, **options)


class AdamW(Adam):
    """AdamW (Loshchilov & Hutter, 2019), as in `torch.optim.AdamW`: Adam with decoupled weight decay.

    Its arguments are those of `Adam`.
    """

    algorithm = algorithms.ADAMW

    def __init__(
        self,
        params: nn.Module | Sequence[nn.Module] | ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        param_groups: ParamsT | None = None,
        **options: Unpack[TorchsOptions],
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, param_groups=param_groups, **options
        )


class SGD(Optimizer):
    """Stochastic gradient descent, as in `torch.optim.SGD`.

    With momentum, it has 4 bytes of state per parameter, and none without, besides the masters of 16-bit weights.
    A group's momentum may change, but not between 0 and other numbers.

    The other options are those of `Optimizer`, which also says what is raised.

    Args:
        params: As for `Optimizer`.
        lr: Learning rate.
        momentum: How much of the momentum buffer is kept in each step.
        dampening: The gradient's part in the buffer is 1 - dampening, from the second step on.
        weight_decay: Added to the gradient, times the weight: it is not decoupled.
        nesterov: Nesterov's momentum. It needs a momentum, and no dampening.
        maximize: Maximize the objective instead of minimizing it.
        param_groups: As for `Optimizer`.
    """

    algorithm = algorithms.SGD

    def __init__(
        self,
        params: nn.Module | Sequence[nn.Module] | ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        param_groups: ParamsT | None = None,
        **options: Unpack[TorchsOptions],
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        defaults |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, defaults, param_groups=param_groups, **options)


class Lion(Optimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), with 4 bytes of state per parameter.

    Each weight moves by the learning rate, in the direction of a sign. So the authors advise a learning rate 3 to 10
    times smaller than AdamW's, and a weight decay as many times larger.

    The other options are those of `Optimizer`, which also says what is raised.

    Args:
        params: As for `Optimizer`.
        lr: Learning rate.
        betas: The momentum's part in the sign of the step; its decay rate.
        weight_decay: Decoupled weight decay.
        maximize: Maximize the objective instead of minimizing it.
        param_groups: As for `Optimizer`.
    """

    algorithm = algorithms.LION

    def __init__(
        self,
        params: nn.Module | Sequence[nn.Module] | ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        param_groups: ParamsT | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, param_groups=param_groups, **options)


class Muon(Optimizer):
    """Muon (Jordan et al., 2024) for matrices, as in `torch.optim.Muon`, and AdamW for the rest.

    A matrix moves by its momentum, made orthogonal. That takes the whole matrix and a GPU: the momentum is on the GPU,
    or visits it from host memory. With 4 bytes of state per parameter, no optimizer process updates it. If ranks share
    matrices, `step()` gathers each one on one rank: call it on all of them.

    The other options are those of `Optimizer`, which also says what is raised.

    Args:
        params: As for `Optimizer`. Each group is Muon's, with parameters of two dimensions, or AdamW's, with
            `use_muon=False`. Of a model without `param_groups`, Muon has the matrices of the repeated blocks except
            embeddings, and AdamW has all other parameters: embeddings, the head, norms and biases.
        lr: Learning rate of Muon's groups.
        weight_decay: Their decoupled weight decay.
        momentum: How much of the momentum buffer is kept in each step.
        nesterov: Nesterov's momentum.
        ns_coefficients: Of the Newton-Schulz iteration that makes a matrix orthogonal: a, b and c.
        eps: The least norm by which a matrix is divided before that.
        ns_steps: The number of its steps.
        adjust_lr_fn: "original", or None, multiplies the learning rate of a matrix by sqrt(max(1, rows / columns));
            "match_rms_adamw" by 0.2 sqrt(max(rows, columns)), so that learning rates of AdamW fit.
        param_groups: As for `Optimizer`.
        adamw: Hyperparameters of AdamW's groups, where they are not those of `torch.optim.AdamW`: `lr`, `betas`, `eps`,
            `weight_decay` and `maximize`.
    """

    algorithm = algorithms.MUON

    def __init__(
        self,
        params: nn.Module | Sequence[nn.Module] | ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        param_groups: ParamsT | None = None,
        adamw: Mapping[str, Any] | None = None,
        **options: Unpack[SharedOptions],
    ) -> None:
        torchs = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "maximize": False}
        rest = dict(adamw or {})
        if unknown := rest.keys() - torchs.keys():
            raise ConfigError(f"adamw has {min(unknown)!r}: it takes {', '.join(torchs)}")
        own: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        own |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        self._defaults_of = {False: {"use_muon": False, **torchs, **rest}, True: {"use_muon": True, **own}}
        super().__init__(params, {}, param_groups=param_groups, **options)

    def _groups_from(self, param_groups: ParamsT | None) -> list[dict[str, Any]]:
        if self._model is not None and param_groups is None:
            param_groups = muon_groups(self._model)
        groups = groups_for_torch(self._model, param_groups)
        return [{**self._defaults_of[bool(group.get("use_muon", True))], **group} for group in groups]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_defaults_of": self._defaults_of}


for _each in (Adam, AdamW, SGD, Lion, Muon):  # not on pages, which have a table of them
    _each.__doc__ = f"{(_each.__doc__ or '').rstrip()}\n\nOptions:\n{described()}\n"
