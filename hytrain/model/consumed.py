"""The placeholder in `p.grad` after HyTrain has consumed the gradient.

It is a tensor of the parameter's shape without storage. Setting `p.grad` to None works as usual (`zero_grad()`).
Anything that would read the gradient or add to it raises, and the message says what to do instead. So nothing trains
silently on a gradient that is gone: `clip_grad_norm_`, a second backward, another optimizer or a gradient scaler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Self

import torch

from hytrain.errors import UsageError

_aten = torch.ops.aten

SCALER: Final = (
    'a GradScaler unscales gradients after backward, when HyTrain\'s are gone: pass updates="step" to hytrain.AdamW; '
    'or loss_scale="dynamic", and call opt.scale(loss).backward(), without a GradScaler'
)

_ADVICE: Final = {
    "change": 'pass updates="step" to hytrain.AdamW, or change gradients in a hook of your own (Tensor.register_hook) '
    "while backward runs; for a sum over n backwards, pass grad_accumulation=n",
    "clip": "gradient clipping after backward comes too late for HyTrain, which updates while backward runs: "
    "pass max_grad_norm to hytrain.AdamW in place of clip_grad_norm_, and the norm of all is opt.grad_norm; or pass "
    'updates="step"',
    "scale": SCALER,
    "divide": "divide the loss instead; a schedule of torch.distributed.pipelining divides gradients after backward "
    "unless it has scale_grads=False: pass that, and divide in its loss_fn by the number of micro-batches",
    "zero": "zero_grad(set_to_none=False) needs the gradient: use zero_grad(), which sets it to None",
    "reduce": "to reduce a gradient over ranks, return the reduced one from a hook of your own (Tensor.register_hook), "
    "which runs in backward",
    "read": 'pass updates="step" to hytrain.AdamW, or read gradients in a hook of your own (Tensor.register_hook) '
    "while backward runs",
    "optimizer": "another optimizer was asked to update this parameter too: give each parameter to one optimizer",
}

#: The key of the advice for an operation, by a part of the operation's name.
_WORDS: Final = (
    ("scale", "_amp_"),
    ("clip", "norm"),
    ("clip", "clamp"),
    ("divide", "div"),
    ("zero", "zero_"),
    ("optimizer", "_fused_"),
    ("reduce", "reduce"),
)


#: What reading it says where no operation sees it.
CONSUMED: Final = f"a gradient that HyTrain has already consumed was read: {_ADVICE['read']}"


def _advice(operation: str, into_gradient: bool) -> str:
    """The advice for an operation. `into_gradient`: the operation would change the consumed gradient."""
    for key, word in _WORDS:
        if word in operation:
            return _ADVICE[key]
    if "add" in operation:
        return _ADVICE["change" if into_gradient else "optimizer"]
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
        raise UsageError(CONSUMED)

    numpy = tolist = __array__ = __dlpack__ = __reduce_ex__ = _refuse

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


NO_STATE: Final = (
    "opt.state is empty, as HyTrain keeps moments in planes of its own: read them in opt.state_dict(), change them "
    "with opt.load_state_dict(), begin anew with a new optimizer, and keep what is yours in a dictionary of your own"
)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise UsageError(NO_STATE)


class NoEntry:
    """The value of `opt.state[parameter]`: names only, which torch's distributed checkpoints read."""

    def __init__(self, planes: Iterable[str]) -> None:
        self._names = ("step", *planes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    __getitem__ = __setitem__ = __delitem__ = __getattr__ = _refuse


class NoState(defaultdict[torch.Tensor, Any]):
    """The value of `opt.state`: empty. Writing an entry raises, and so does reading it.

    `planes` is the state of each parameter, by its identity.
    """

    planes: Mapping[int, Iterable[str]] = {}

    def __bool__(self) -> bool:
        """True: else `torch.distributed.checkpoint` would call `step()` with gradients of zero, to create the state."""
        return True

    def __missing__(self, parameter: torch.Tensor) -> NoEntry:
        return NoEntry(self.planes.get(id(parameter), ()))

    __setitem__ = __delitem__ = clear = pop = popitem = update = setdefault = _refuse
