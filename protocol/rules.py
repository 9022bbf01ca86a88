"""The update rules: the hyperparameters that each one reads, and the moments that it keeps from step to step.

All that depends on the rule follows from this table: the planes of arenas and slots, their bytes, the planner's sizes,
and what a checkpoint has. `hytrain.kernels` has the arithmetic of each rule, `hytrain.algorithms` its options.

Muon orthogonalizes whole matrices, which takes a GPU: `ON_DEVICE` has the rules whose updates the trainer's device
makes, and never the optimizer process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

#: Elements that the optimizer process updates at a time: then it looks whether another layer is more urgent.
TILE_NUMEL: Final = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """One parameter group's hyperparameters: what all rules have."""

    lr: float
    weight_decay: float
    maximize: bool = False

    @property
    def rule(self) -> str:
        """The rule that reads them."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWHyper(Hyper):
    """Those of `torch.optim.AdamW`; of `torch.optim.Adam`, if the weight decay is not `decoupled` from the gradient."""

    rule: ClassVar[str] = "adamw"
    beta1: float
    beta2: float
    eps: float
    decoupled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SGDHyper(Hyper):
    """Those of `torch.optim.SGD`. Without momentum it is a rule of its own, which keeps nothing."""

    momentum: float
    dampening: float
    nesterov: bool

    @property
    def rule(self) -> str:
        return "sgd_momentum" if self.momentum else "sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class LionHyper(Hyper):
    """Those of Lion (Chen et al., 2023)."""

    rule: ClassVar[str] = "lion"
    beta1: float
    beta2: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonHyper(Hyper):
    """Those of `torch.optim.Muon`. `a`, `b` and `c` are its `ns_coefficients`, `adjust` is its `adjust_lr_fn`."""

    rule: ClassVar[str] = "muon"
    momentum: float
    nesterov: bool
    a: float = 3.4445
    b: float = -4.775
    c: float = 2.0315
    eps: float = 1e-7
    ns_steps: int = 5
    adjust: str = "original"


#: The moments of each rule, in the order in which its kernels take them. The names are those of torch's state, and
#: of Lion's published implementation.
MOMENTS: Final[dict[str, tuple[str, ...]]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "sgd_momentum": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
}
ON_DEVICE: Final = frozenset({"muon"})
#: The moments of all rules.
MOMENT_PLANES: Final = tuple(dict.fromkeys(plane for planes in MOMENTS.values() for plane in planes))
#: By their names, which they have on the wire.
HYPERS: Final[dict[str, type[Hyper]]] = {kind.__name__: kind for kind in (AdamWHyper, SGDHyper, LionHyper, MuonHyper)}
