"""HyTrain: train a model whose optimizer state does not fit the GPU, at the speed of a machine where it does.

    opt = hytrain.AdamW(model, lr=3e-4, weight_decay=0.1)

Names are loaded when first used, so that the optimizer process can use the parts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import protocol as _protocol

if not hasattr(_protocol, "HYTRAIN"):
    raise ImportError(
        f"hytrain needs its own package 'protocol', but Python found {_protocol.__file__} first: "
        "rename that file, or move it out of the script's folder"
    )

if TYPE_CHECKING:
    from hytrain.errors import HyTrainError
    from hytrain.model.blueprint import deferred_init
    from hytrain.model.split_batch import split_batch
    from hytrain.optim import SGD, Adam, AdamW, Lion, Muon

__version__ = "0.1.0"
__all__ = ["SGD", "Adam", "AdamW", "HyTrainError", "Lion", "Muon", "__version__", "deferred_init", "split_batch"]

_HOMES = {
    "Adam": "hytrain.optim",
    "AdamW": "hytrain.optim",
    "SGD": "hytrain.optim",
    "HyTrainError": "hytrain.errors",
    "Lion": "hytrain.optim",
    "Muon": "hytrain.optim",
    "deferred_init": "hytrain.model.blueprint",
    "split_batch": "hytrain.model.split_batch",
}


if not TYPE_CHECKING:  # a type checker would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            from hytrain.extras import importing

            with importing():
                return getattr(importlib.import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'hytrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What completion offers: the public names."""
    return sorted(__all__)
