"""What autograd is doing in this thread."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

import torch
from torch.utils.checkpoint import CheckpointFunction

#: What helps where a backward is made of several.
REENTRANT: Final = ": reentrant checkpointing makes a backward of several, so pass use_reentrant=False to checkpoint()"


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def inside_reentrant_checkpoint() -> bool:
    """Whether this thread runs a backward that reentrant activation checkpointing started inside another one."""
    code: Final = CheckpointFunction.backward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
