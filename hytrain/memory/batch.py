"""The memory that a transformer's step takes beside what is placed, by its tokens, and the largest batch that fits.

    fixed       gradients on their way                     of two blocks
    per token   what enters each block                     with checkpointing; or else what every block keeps
                one block's own, forward and backward
                logits, in 16 and 32 bits, their gradient  of a part of each sequence

An estimate: what attention that is not fused keeps, or a model of another kind, is not in it. Pure.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: Bytes per logit: as it is computed, in float32, and its gradient.
LOGIT_BYTES: Final = 10


class StepMemory(NamedTuple):
    """Of a model whose blocks have `block_numel` parameters. `width`: bytes of a weight, and of an activation.

    `keeps`: blocks keep their activations for backward. `on_host`: what enters blocks goes to host memory meanwhile.
    `parts`: of the batch, which blocks compute one after another.
    """

    hidden: int
    intermediate: int
    blocks: int
    block_numel: int
    vocabulary: int
    width: int = 2
    loss_chunks: int = 1
    keeps: bool = False
    on_host: bool = False
    parts: int = 1

    @property
    def fixed_bytes(self) -> int:
        return 2 * self.width * self.block_numel

    def token_bytes(self, tokens: int = 1) -> int:
        """Of so many tokens."""
        of_block = self.width * tokens * (8 * self.hidden + 3 * self.intermediate)
        entering = 0 if self.on_host else self.width * tokens * self.hidden * self.blocks
        kept = of_block * self.blocks if self.keeps and not self.on_host else entering
        return kept + 2 * of_block // self.parts + LOGIT_BYTES * tokens * self.vocabulary // self.loss_chunks

    def most_tokens(self, free_bytes: int) -> int:
        """How many fit into so much."""
        return max(free_bytes - self.fixed_bytes, 0) // max(self.token_bytes(), 1)
