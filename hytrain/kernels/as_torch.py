"""torch's own update of one parameter, on the CPU: what HyTrain's updates are compared with (`step.check`).

Only the rounding of 16-bit weights is HyTrain's, as torch has no masters. Of Lion, which torch lacks, these are the
published steps (Chen et al., 2023).
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor
from torch.optim._muon import muon
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from hytrain.kernels.split import nearest_half, split
from protocol.messages import Segment
from protocol.rules import MOMENTS, AdamWHyper, Hyper, LionHyper, MuonHyper, SGDHyper


@torch.no_grad()
def update(hyper: Hyper, spec: Segment, arrays: dict[str, Tensor], gradient: Tensor, count: int) -> None:
    """Update number `count`, in place, of a segment's `weights`, `master` if they have 16 bits, and moments.

    All are in host memory, and the gradient is in float32, of shape (numel,).
    """
    weights, moments = arrays["weights"], [arrays[plane] for plane in MOMENTS[spec.rule]]
    master, options = arrays.get("master", weights), asdict(hyper)
    match hyper:
        case AdamWHyper():
            options["decoupled_weight_decay"] = options.pop("decoupled")
            before = torch.tensor(count - 1, dtype=torch.float32, device="cpu")
            adam([master], [gradient], moments[:1], moments[1:], [], [before], fused=True, amsgrad=False, **options)
        case SGDHyper():
            buffers: list[Tensor | None] = [moments[0] if moments and count > 1 else None]
            sgd([master], [gradient], buffers, foreach=False, **options)
            if moments and buffers[0] is not None:
                moments[0].copy_(buffers[0])
        case LionHyper(beta1=beta1, beta2=beta2):
            [average], gradient = moments, -gradient if hyper.maximize else gradient
            direction = (average * beta1 + gradient * (1 - beta1)).sign()
            master.mul_(1 - hyper.lr * hyper.weight_decay).add_(direction, alpha=-hyper.lr)
            average.mul_(beta2).add_(gradient, alpha=1 - beta2)
        case MuonHyper(a=a, b=b, c=c):
            rows, columns = spec.shape
            flat = (master, gradient, moments[0])
            lies = [[t.view(columns, rows).T if spec.by_columns else t.view(rows, columns)] for t in flat]
            own = ("a", "b", "c", "adjust", "maximize")
            options = {name: value for name, value in options.items() if name not in own}
            with torch.autocast("cpu", enabled=False):
                muon(*lies, **options, ns_coefficients=(a, b, c), adjust_lr_fn=hyper.adjust, has_complex=False)
    if master is not weights:
        weights.copy_(nearest_half(master) if weights.dtype is torch.float16 else split(master)[0])
