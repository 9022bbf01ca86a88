"""The AdamW update by DeepSpeedCPUAdam's operator, for those who want DeepSpeed's arithmetic or its speed.

The operator takes fp32 alone and checks nothing: gradients of another dtype or views with gaps are silent
garbage. TorchBackend's chunks hand it contiguous fp32 of a fitting length. It holds the GIL, and it computes
the bias corrections in float32, so its results agree with the other backends' closely but not to the bit.

DeepSpeed compiles the operator at first use, in about a minute. A build that was killed leaves a lock in
torch's extension folder, and the next one waits on it.
"""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

from torch import Tensor

from hytrain.errors import BackendUnavailable
from hytrain.kernels.scalars import Scalars
from hytrain.kernels.torch_backend import TorchBackend

# The operator keeps its optimizers in a table of the process; DeepSpeed's own count up from 0.
_ids = count(start=1_000_000)


class DeepSpeedBackend(TorchBackend):
    """AdamW by DeepSpeed's operator."""

    name = "deepspeed"

    def __init__(self, threads: int) -> None:
        self._operator = _load_operator()
        self._optimizer = next(_ids)
        # Every call brings its own hyperparameters; the ones given here are never used.
        self._operator.create_adam(self._optimizer, 1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
        self._openmp = ctypes.CDLL(self._operator.__file__)
        super().__init__(threads)

    def _set_threads(self, threads: int) -> None:
        """Also in the OpenMP runtime that the operator is linked with, be it torch's own or the system's."""
        super()._set_threads(threads)
        self._openmp.omp_set_num_threads(threads)

    def _adamw(self, master: Tensor, grads: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Scalars) -> None:
        hyper = scalars.hyper
        self._operator.adam_update(
            self._optimizer,
            scalars.step,
            hyper.lr,
            hyper.beta1,
            hyper.beta2,
            hyper.eps,
            hyper.weight_decay,
            True,
            master,
            -grads if hyper.maximize else grads,
            exp_avg,
            exp_avg_sq,
        )


def _load_operator() -> Any:
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder
    except ImportError as error:
        raise BackendUnavailable(
            "deepspeed is not installed: pip install deepspeed, or choose backend='native' or backend='torch'"
        ) from error
    try:
        return CPUAdamBuilder().load()
    except Exception as error:  # whatever a foreign build can raise
        raise BackendUnavailable(
            "DeepSpeed could not build its CPU Adam operator: it needs a C++ compiler and ninja on the PATH; "
            f"or choose backend='native' or backend='torch'. It said: {error}"
        ) from error
