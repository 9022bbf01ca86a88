"""The optimizers by their parameter groups: what a group has, which values can be, and what updates read of it.

`optim` has a class for each. `protocol.rules` says what each update keeps, `kernels` what it computes.

    param_groups ─ check, when they are given ─▶ hyper, at a step's first gradient ─▶ Hyper ─▶ `kernels.scalars`
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, Final

from torch import Tensor

from hytrain.errors import ConfigError, UnsupportedError, UsageError
from protocol.rules import MOMENTS, AdamWHyper, Hyper, LionHyper, MuonHyper, SGDHyper

#: Hyperparameters of several parts, and what updates call these.
_PARTS: Final = {"betas": ("beta1", "beta2"), "ns_coefficients": ("a", "b", "c")}
#: By the names of types, as annotations have them.
_KINDS: Final[dict[str, Callable[[Any], Any]]] = {"float": float, "bool": bool, "int": int, "str": str}
#: Said where the state that an update keeps would have to come or go.
MOMENTUM: Final = (
    "the momentum of a parameter group has changed to 0 or from 0, but only updates with momentum have a buffer: keep "
    "it at 0, or above 0, as it was, or make the optimizer anew"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One optimizer. `name` is that of its class, `rules` are those that its hyperparameters choose from.

    `numbers`, `signed`, `flags`: the hyperparameters of a group that are numbers from 0 on, any numbers, and True or
    False. `others`: further ones. `check_others` checks these, and which ones fit together, as `check` does. `reads`:
    what updates read of all these, and `fixed` what they read besides.
    `counts_steps`: whether torch's state has the number of each parameter's updates. HyTrain's always has.
    `not_offered`: options of torch's class of which HyTrain has only the default. `implementations`: those that choose
    one of torch's, which HyTrain takes and ignores. Other keys are allowed: schedulers keep theirs.
    `as_torch`: what else a group of torch's class has, so that it continues with the same arithmetic.
    `wrong`: what is wrong with a group of another optimizer that is loaded, or None.
    `beside`: the algorithm of the groups with `use_muon=False`, where groups have that key.
    `rule_changed`: what is said if a group's rule has become another.
    """

    name: str
    rules: tuple[str, ...]
    reads: type[Hyper]
    numbers: tuple[str, ...]
    flags: tuple[str, ...]
    signed: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    counts_steps: bool = False
    not_offered: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    as_torch: Mapping[str, Any] = field(default_factory=dict)
    wrong: Callable[[Mapping[str, Any]], str | None] = lambda group: None
    check_others: Callable[[Mapping[str, Any]], None] = lambda group: None
    beside: Algorithm | None = None
    rule_changed: str = MOMENTUM

    def of(self, group: Mapping[str, Any]) -> Algorithm:
        """The algorithm of a group."""
        return self if self.beside is None or group.get("use_muon", True) else self.beside

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """All of a group's."""
        return (*self.numbers, *self.signed, *self.flags, *self.others)

    @property
    def has_betas(self) -> bool:
        return "betas" in self.others

    @property
    def moments(self) -> set[str]:
        """What an entry of its state may have."""
        return {plane for rule in self.rules for plane in MOMENTS[rule]}

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """The hyperparameters of a group."""
        algorithm = self.of(group)
        found = {**{name: group[name] for name in algorithm.hyperparameters}, **algorithm.fixed}
        for name, parts in _PARTS.items():
            found.update(zip(parts, found.pop(name, ()), strict=False))
        if "adjust_lr_fn" in found:
            found["adjust"] = found.pop("adjust_lr_fn") or "original"
        kinds = {each.name: _KINDS[str(each.type)] for each in fields(algorithm.reads)}
        return algorithm.reads(**{name: _as(kinds[name], value) for name, value in found.items()})

    def current(self, groups: Sequence[Mapping[str, Any]]) -> tuple[Hyper, ...]:
        """The hyperparameters that groups have now. Raises `UsageError` for some that cannot be."""
        for group in groups:
            algorithm = self.of(group)
            try:
                algorithm.check_kinds(group)
            except ConfigError as error:
                raise UsageError(f"in opt.param_groups, {error}") from None
            if not algorithm.betas_fit(group):
                raise UsageError(f"betas in opt.param_groups are {tuple(group['betas'])}: they lie in [0, 1)")
        return tuple(map(self.hyper, groups))

    def rule(self, group: Mapping[str, Any]) -> str:
        """The rule that updates the parameters of a group."""
        return self.hyper(group).rule

    def check(self, group: Mapping[str, Any]) -> None:
        """Raise `UnsupportedError` for options that HyTrain lacks, `ConfigError` for impossible values."""
        if self.beside is not None and not isinstance(group.get("use_muon", True), bool):
            raise ConfigError(f"use_muon is {group['use_muon']!r}: True or False")
        if (algorithm := self.of(group)) is not self:
            algorithm.check(group)
            return
        self.check_as_torch(group)
        self.check_kinds(group)
        if any(number(group[name]) < 0 for name in self.numbers) or not self.betas_fit(group):
            *some, last = self.numbers
            betas_lie = ", betas lie in [0, 1)" if self.has_betas else ""
            raise ConfigError(f"{', '.join(some)} and {last} must not be negative{betas_lie}")
        self.check_others(group)

    def check_as_torch(self, given: Mapping[str, Any]) -> None:
        """Raise `UnsupportedError` or `ConfigError` if options that are torch's alone ask for what HyTrain lacks."""
        if unknown := next((key for key in self.not_offered if given.get(key)), None):
            raise UnsupportedError(f"hytrain.{self.name} has no option {unknown!r}")
        for key in self.implementations:
            if given.get(key) not in (None, True, False):
                raise ConfigError(f"{key} is {given[key]!r}: True, False or None")
        if given.get("fused") and given.get("foreach"):
            raise ConfigError("fused and foreach cannot be True together, as in torch: leave one out")

    def check_kinds(self, group: Mapping[str, Any]) -> None:
        """Raise `ConfigError` unless hyperparameters are numbers, flags and pairs of betas."""
        given = {name: group[name] for name in (*self.numbers, *self.signed)}
        if self.has_betas:
            betas = group["betas"]
            if not isinstance(betas, tuple | list) or len(betas) != 2:
                raise ConfigError(f"betas is {betas!r}: two numbers in [0, 1), such as (0.9, 0.999)")
            given.update((f"betas[{index}]", beta) for index, beta in enumerate(betas))
        for name, value in given.items():
            if not is_number(number(value)):
                raise ConfigError(f"{name} is {value!r}: a number")
        for name in self.flags:
            if not isinstance(group[name], bool):
                raise ConfigError(f"{name} is {group[name]!r}: True or False")

    def betas_fit(self, group: Mapping[str, Any]) -> bool:
        """Whether `betas`, if a group has them, can be."""
        return not self.has_betas or all(0.0 <= float(number(beta)) < 1.0 for beta in group["betas"])


def number(value: Any) -> Any:
    """The number that a tensor of one element has now, which torch takes in its place; all else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _as(kind: Callable[[Any], Any], value: Any) -> Any:
    """The value, or one object for all that come to the same: a hyperparameter that is another object was set anew."""
    return value if type(value) is kind else _same(kind(number(value)))


@lru_cache(maxsize=1024, typed=True)
def _same(value: Any) -> Any:
    return value


def is_number(value: Any) -> bool:
    """Whether it is a finite number, as torch's updates take them. True and False are none, fractions neither."""
    try:
        return isinstance(value, numbers.Real) and not isinstance(value, bool | Fraction) and math.isfinite(value)
    except OverflowError:  # a whole number beyond the floats
        return False


def _no_adam(group: Mapping[str, Any], *, decoupled: bool = False) -> str | None:
    name, other = ("AdamW", "Adam") if decoupled else ("Adam", "AdamW")
    if group.get("amsgrad"):
        return f"the loaded state is one of amsgrad=True, which hytrain.{name} does not have"
    if group.get("decoupled_weight_decay") is (not decoupled) and group.get("weight_decay"):
        return f"the loaded state is one of {other} with its weight decay, not of {name}: go on with hytrain.{other}"
    return None


ADAMW: Final = Algorithm(
    name="AdamW",
    rules=("adamw",),
    reads=AdamWHyper,
    numbers=("lr", "eps", "weight_decay"),
    flags=("maximize",),
    others=("betas",),
    counts_steps=True,
    not_offered=("amsgrad", "capturable", "differentiable"),
    implementations=("foreach", "fused"),
    as_torch={
        "amsgrad": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": True,
        "decoupled_weight_decay": True,
    },
    wrong=partial(_no_adam, decoupled=True),
)
ADAM: Final = replace(
    ADAMW,
    name="Adam",
    not_offered=(*ADAMW.not_offered, "decoupled_weight_decay"),
    as_torch={**ADAMW.as_torch, "decoupled_weight_decay": False},
    fixed={"decoupled": False},
    wrong=_no_adam,
)


def _check_sgd(group: Mapping[str, Any]) -> None:
    if group["nesterov"] and (not group["momentum"] or group["dampening"]):
        raise ConfigError("nesterov=True needs a momentum above 0, and no dampening")


SGD: Final = Algorithm(
    name="SGD",
    rules=("sgd", "sgd_momentum"),
    reads=SGDHyper,
    numbers=("lr", "momentum", "weight_decay"),
    signed=("dampening",),
    flags=("nesterov", "maximize"),
    not_offered=("differentiable",),
    implementations=("foreach", "fused"),
    as_torch={"foreach": None, "differentiable": False, "fused": None},
    check_others=_check_sgd,
)


#: Published without a class of torch.
LION: Final = Algorithm(
    name="Lion",
    rules=("lion",),
    reads=LionHyper,
    numbers=("lr", "weight_decay"),
    flags=("maximize",),
    others=("betas",),
)


def _check_muon(group: Mapping[str, Any]) -> None:
    steps, adjust, coefficients = group["ns_steps"], group["adjust_lr_fn"], group["ns_coefficients"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < 100:
        raise ConfigError(f"ns_steps is {steps!r}: a whole number of Newton-Schulz steps, from 0 to 99")
    if adjust not in (None, "original", "match_rms_adamw"):
        raise ConfigError(f'adjust_lr_fn is {adjust!r}: "original", "match_rms_adamw", or None for the first one')
    if not isinstance(coefficients, tuple | list) or len(coefficients) != 3 or not all(map(is_number, coefficients)):
        raise ConfigError(f"ns_coefficients is {coefficients!r}: three numbers")
    for parameter in group["params"]:
        if parameter.ndim != 2:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} is in a group of Muon, which updates matrices: put it "
                "into a group with use_muon=False, which AdamW updates"
            )


#: Its matrices. All other parameters are AdamW's.
MUON: Final = Algorithm(
    name="Muon",
    rules=("muon",),
    reads=MuonHyper,
    numbers=("lr", "eps", "momentum", "weight_decay"),
    flags=("nesterov",),
    not_offered=("maximize",),
    others=("ns_coefficients", "ns_steps", "adjust_lr_fn"),
    check_others=_check_muon,
    beside=ADAMW,
    rule_changed=(
        "use_muon of a parameter group has changed, but its state is that of one algorithm: set it back, or make the "
        "optimizer anew"
    ),
)
