"""Orthogonalizes a matrix by Newton-Schulz iterations, as `torch.optim.Muon` does, on the device that has the matrix.

`memory.passes` calls it between the two passes of Muon's update, and `step.shared` if ranks share the matrix. Its
products are torch's, in bfloat16.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from protocol.rules import MuonHyper

#: Bytes per element that are there at once, at most: the matrix in float32; two iterates and two products in bfloat16.
WORK_BYTES: Final = 12
#: Besides, of a matrix that ranks share: parts that come and go, in bfloat16, beside copies to send and to join.
SHARED_BYTES: Final = 8


def orthogonalized(matrix: Tensor, hyper: MuonHyper) -> Tensor:
    """A matrix near to the orthogonal one that is closest to `matrix`, of the same shape, in bfloat16.

    In each step X becomes a X + (b A + c A A) X, with A = X X^T (Jordan et al., 2024). The operations are those of
    torch's Muon, in the same order. An autocast around it changes nothing.
    """
    with torch.no_grad(), torch.autocast(matrix.device.type, enabled=False):
        x = matrix.to(torch.bfloat16)
        is_tall = matrix.shape[0] > matrix.shape[1]
        if is_tall:
            x = x.T
        x = x / x.norm().clamp(min=hyper.eps)
        for _ in range(hyper.ns_steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=hyper.b, alpha=hyper.c), x, beta=hyper.a)
        return x.T if is_tall else x
