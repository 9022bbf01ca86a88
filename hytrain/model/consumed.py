"""The placeholder in `p.grad` after HyTrain has consumed the gradient.

It is a tensor of the parameter's shape without storage. Setting `p.grad` to None works as usual (`zero_grad()`).
Anything that would read the gradient or add to it raises, and the message says what to do instead. So nothing trains
silently on a gradient that is gone: `clip_grad_norm_`, a second backward, another optimizer or a gradient scaler.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final, Self

import torch

from hytrain.errors import UsageError

_aten = torch.ops.aten

SCALER: Final = (
    'a GradScaler unscales gradients after backward, when HyTrain\'s are gone: pass loss_scale="dynamic" to '
    "hytrain.AdamW and call opt.scale(loss).backward(), without a GradScaler"
)

_ADVICE: Final = {
    "accumulate": "a second backward before step() and zero_grad() would add to gradients that are gone: to accumulate "
    "over n backwards, pass grad_accumulation=n to hytrain.AdamW; else call opt.step() and opt.zero_grad() after each",
    "clip": "gradient clipping after backward comes too late for HyTrain, which updates while backward runs: "
    "pass max_grad_norm to hytrain.AdamW in place of clip_grad_norm_; clip_grad_value_ has no counterpart. "
    "The norm of all is opt.grad_norm then; one parameter's is read in a hook of your own (Tensor.register_hook)",
    "scale": SCALER,
    "zero": "zero_grad(set_to_none=False) needs the gradient: use zero_grad(), which sets it to None",
    "read": "read gradients in a hook of your own (Tensor.register_hook) while backward runs",
    "optimizer": "another optimizer was asked to update this parameter too: give each parameter to one optimizer",
}

#: The key of the advice for an operation, by a part of the operation's name.
_WORDS: Final = (("scale", "_amp_"), ("clip", "norm"), ("clip", "clamp"), ("zero", "zero_"), ("optimizer", "_fused_"))


def _advice(operation: str, into_gradient: bool) -> str:
    """The advice for an operation. `into_gradient`: the operation would change the consumed gradient."""
    for key, word in _WORDS:
        if word in operation:
            return _ADVICE[key]
    if "add" in operation:
        return _ADVICE["accumulate" if into_gradient else "optimizer"]
    return _ADVICE["optimizer" if "_foreach" in operation or "lerp" in operation else "read"]


class ConsumedGradient(torch.Tensor):
    """A gradient that HyTrain has consumed. Only `p.grad = None` is allowed."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device, strides=parameter.stride()
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.detach.default:
            return args[0]
        operation = func.overloadpacket.__name__
        advice = _advice(operation, into_gradient=bool(args) and isinstance(args[0], cls))
        raise UsageError(f"{operation} on a gradient that HyTrain has already consumed: {advice}")

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(f"a gradient that HyTrain has already consumed was read: {_ADVICE['read']}")

    numpy = tolist = __array__ = __dlpack__ = _refuse

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


NO_STATE: Final = (
    "opt.state is empty, as HyTrain keeps moments in planes of its own: read them in opt.state_dict(), change them "
    "with opt.load_state_dict(), and begin anew with a new optimizer"
)


class NoState(defaultdict[torch.Tensor, Any]):
    """The value of `opt.state`: empty. Reading or writing an entry raises."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(NO_STATE)

    __missing__ = __setitem__ = __delitem__ = clear = pop = popitem = update = setdefault = _refuse
