"""HyTrain under Lightning's Trainer, where it accumulates or clips.

    def configure_optimizers(self):
        return adopt(self, self.net, lr=3e-4)       # was: torch.optim.AdamW(self.net.parameters(), …)

Lightning's Trainer takes `hytrain.AdamW` like any other optimizer. One that was adopted follows its arguments:

    accumulate_grad_batches ──▶ the Trainer's loop says which backward is a step's last
    gradient_clip_val ────────▶ max_grad_norm; where the Trainer clips, HyTrain has clipped already

Knows Lightning by the attributes of a module's trainer: the package `pytorch_lightning` has the same ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

from torch import nn
from torch.optim.optimizer import ParamsT

import hytrain
from hytrain.errors import UnsupportedError, UsageError
from hytrain.optim import Optimizer


def adopt(
    module: Any,
    model: nn.Module | Sequence[nn.Module] | None = None,
    param_groups: ParamsT | None = None,
    *arguments: Any,
    optimizer: type[Optimizer] = hytrain.AdamW,
    **options: Any,
) -> Optimizer:
    """Create `hytrain.AdamW(model, …)`, or another optimizer, in `configure_optimizers` of a LightningModule.

    It also raises what the optimizer raises.

    Args:
        module: The LightningModule.
        model: What to train; by default, the module itself.
        param_groups: As for the optimizer.
        arguments: Further positional arguments of the optimizer.
        optimizer: `hytrain.AdamW`, `hytrain.SGD`, `hytrain.Lion` or `hytrain.Muon`.
        options: Keyword arguments of the optimizer.

    Returns:
        The optimizer.

    Raises:
        UnsupportedError: HyTrain cannot follow an argument of the Trainer. Nothing has been started.
    """
    trainer, max_norm = module.trainer, module.trainer.gradient_clip_val or None
    if clips_by_value := trainer.gradient_clip_algorithm not in (None, "norm"):
        max_norm = None  # the Trainer goes on clipping, after backward
    if (given := options.get("max_grad_norm", max_norm)) != max_norm and max_norm is not None:
        raise UnsupportedError(f"max_grad_norm={given} beside gradient_clip_val={max_norm}: leave one of them out")
    if getattr(trainer.precision_plugin, "scaler", None) is not None:  # which unscales gradients after backward
        options["updates"] = "step"
    opt: Optimizer = optimizer(
        module if model is None else model, *arguments, param_groups=param_groups, **options | {"max_grad_norm": given}
    )
    loop = weakref.ref(trainer.fit_loop.epoch_loop)
    opt._accumulation.ask(lambda: (running := loop()) is not None and running._should_accumulate())
    if clips_by_value:
        return opt
    if not isinstance(vars(trainer.precision_plugin).get("clip_gradients"), _Clipping):
        trainer.precision_plugin.clip_gradients = _Clipping(trainer.precision_plugin)
    trainer.precision_plugin.clip_gradients.limits[opt] = given
    return opt


class _Clipping:
    """In place of a precision plugin's `clip_gradients`, which still clips for other optimizers.

    `limits` is what adopted optimizers have clipped to.
    """

    def __init__(self, plugin: Any) -> None:
        self._plugin: Final = weakref.ref(plugin)
        self.limits: weakref.WeakKeyDictionary[Optimizer, float | None] = weakref.WeakKeyDictionary()

    def __call__(self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """Raises `UsageError` for another norm than the one that an adopted optimizer clips to."""
        made = getattr(optimizer, "optimizer", optimizer)  # without Lightning's wrapper
        if made not in self.limits:
            plugin = self._plugin()
            type(plugin).clip_gradients(plugin, optimizer, clip_val, gradient_clip_algorithm)  # type: ignore[union-attr]
        elif clip_val and (gradient_clip_algorithm != "norm" or clip_val != self.limits[made]):
            raise UsageError(
                f"clip_gradients to {clip_val} comes too late for HyTrain, which clips to {self.limits[made]}: pass "
                f"Trainer(gradient_clip_val={clip_val}), or max_grad_norm={clip_val} to adopt"
            )
