"""The AdamW and Adam updates with DeepSpeedCPUAdam's operator, for those who want DeepSpeed's arithmetic.

The operator takes only fp32 and checks nothing: other dtypes or views with gaps give wrong results silently.
TorchBackend's chunks are contiguous fp32 of a suitable length. The operator holds the GIL. It computes the bias
corrections in float32, so its results are close to the other backends', but not bit-identical.

DeepSpeed compiles the operator at first use, in about a minute. A killed build leaves a lock in torch's extension
folder, and the next build waits for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import count
from typing import Any

from torch import Tensor

from hytrain.errors import BackendUnavailable
from hytrain.kernels.scalars import Scalars
from hytrain.kernels.torch_backend import TorchBackend
from protocol.rules import AdamWHyper

# The operator keeps its optimizers in a table per process. DeepSpeed's own numbers start at 0.
_ids = count(start=1_000_000)


class DeepSpeedBackend(TorchBackend):
    name = "deepspeed"

    def __init__(self, threads: int) -> None:
        self._operator = _load_operator()
        self._optimizers = {decoupled: next(_ids) for decoupled in (True, False)}
        for decoupled, optimizer in self._optimizers.items():
            # Each call passes its own hyperparameters, but for the kind of weight decay; the others are never used.
            self._operator.create_adam(optimizer, 1e-3, 0.9, 0.999, 1e-8, 0.0, decoupled, False)
        self._openmp = ctypes.CDLL(self._operator.__file__)
        super().__init__(threads)

    def _set_threads(self, threads: int) -> None:
        """Set torch's threads, and those of the OpenMP runtime that the operator is linked with."""
        super()._set_threads(threads)
        self._openmp.omp_set_num_threads(threads)

    def _step(self, master: Tensor, grads: Tensor, moments: Sequence[Tensor], scalars: Scalars) -> None:
        hyper = scalars.hyper
        assert isinstance(hyper, AdamWHyper), "the operator has no other rule"
        numbers = (hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, True)
        planes = (master, -grads if hyper.maximize else grads, *moments)
        self._operator.adam_update(self._optimizers[hyper.decoupled], scalars.step, *numbers, *planes)


def _load_operator() -> Any:
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder
    except ImportError as error:
        raise BackendUnavailable(
            "deepspeed is not installed: pip install deepspeed, or choose backend='native' or backend='torch'"
        ) from error
    try:
        return CPUAdamBuilder().load()
    except Exception as error:  # DeepSpeed's build can raise anything
        raise BackendUnavailable(
            "DeepSpeed could not build its CPU Adam operator: it needs a C++ compiler and ninja on the PATH; "
            f"or choose backend='native' or backend='torch'. It said: {error}"
        ) from error
