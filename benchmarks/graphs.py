"""The blocks of a Llama as CUDA graphs: a call replays all kernels of a block's forward with one launch, or backward's.

    capture(model, batch, length)   before the optimizer is made ─▶ model(…) as before, for batches of that shape alone

Activations are kept in the graphs' memory: what is recomputed would be replayed, too, and save nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hytrain.model.layers import find_blocks


class Positional(nn.Module):
    """A block with tensors alone as arguments and results, as graphs want it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self._forward = block, block.forward

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Hidden states, shape (batch, length, hidden), and what turns queries and keys, (1, length, head)."""
        result: Tensor = self._forward(hidden, position_embeddings=(cosine, sine), attention_mask=None, use_cache=False)
        return result


def capture(model: Any, batch: int, length: int) -> None:
    """Replace the forward of each block by its graph, for causal attention over whole sequences."""
    blocks, config = find_blocks(model), model.config
    like = partial(torch.randn, device=model.device, dtype=model.dtype)
    turns = [like(1, length, config.hidden_size // config.num_attention_heads) for _ in range(2)]
    positional = tuple(Positional(block) for block in blocks)
    torch.cuda.make_graphed_callables(
        positional, tuple((like(batch, length, config.hidden_size, requires_grad=True), *turns) for _ in blocks)
    )
    for block, graphed in zip(blocks, positional, strict=True):
        block.forward = _called_as_before(graphed)


def _called_as_before(graphed: nn.Module) -> Callable[..., Tensor]:
    def forward(hidden: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **unused: Any) -> Tensor:
        found: Tensor = graphed(hidden, *position_embeddings)
        return found

    return forward
