"""torch's own update of one parameter, on the CPU: what HyTrain's updates are compared with (`step.check`).

Only the rounding of 16-bit weights is HyTrain's, as torch has no masters. Of Lion, which torch lacks, these are the
published steps (Chen et al., 2023).
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor
from torch.optim._muon import muon

from hytrain.kernels.scalars import scalars
from hytrain.kernels.split import nearest_half, split
from hytrain.kernels.torch_backend import STEPS
from protocol.messages import Segment
from protocol.rules import MOMENTS, Hyper, MuonHyper


@torch.no_grad()
def update(hyper: Hyper, spec: Segment, arrays: dict[str, Tensor], gradient: Tensor, count: int) -> None:
    """Update number `count`, in place, of a segment's `weights`, `master` if they have 16 bits, and moments.

    All are in host memory, and the gradient is in float32, of shape (numel,).
    """
    weights, moments = arrays["weights"], [arrays[plane] for plane in MOMENTS[spec.rule]]
    master = arrays.get("master", weights)
    if isinstance(hyper, MuonHyper):
        rows, columns = spec.shape
        flat = (master, gradient, moments[0])
        lies = [[t.view(columns, rows).T if spec.by_columns else t.view(rows, columns)] for t in flat]
        own = ("a", "b", "c", "adjust", "maximize")
        options = {name: value for name, value in asdict(hyper).items() if name not in own}
        coefficients = (hyper.a, hyper.b, hyper.c)
        with torch.autocast("cpu", enabled=False):
            muon(*lies, **options, ns_coefficients=coefficients, adjust_lr_fn=hyper.adjust, has_complex=False)
    else:
        STEPS[spec.rule](master, gradient, *moments, scalars=scalars(hyper, count))
    if master is not weights:
        weights.copy_(nearest_half(master) if weights.dtype is torch.float16 else split(master)[0])
