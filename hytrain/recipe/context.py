"""Context parallelism: each rank of a group has a part of every sequence, and in attention all of it for some heads.

    whole sequences ─ inputs ─▶ the model's body over a part ─▶ loss of the part ─ summed ─▶ that of the whole
                                   │              ▲
                                   └─ attention ──┘  (batch, heads, part) ─ all-to-all ─▶ (batch, heads / ranks, length)
                                                     ─ Transformers' sdpa ─ all-to-all ─▶ (batch, part, heads, …)

`task` asks `check` whether a model can be divided so, and `loss` calls the rest. FSDP2 shards the parameters over these
ranks, too, and takes the mean of their gradients. So what `summed` gives back is multiplied by their number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hytrain.errors import ConfigError
from hytrain.recipe.packing import leaks

SDPA: Final = "sdpa"
DIVIDED: Final = "hytrain_divided"  # Transformers makes no masks for names that are new to it
ALONE: Final = "hytrain_alone"
HEADS, SEQUENCE = 1, 2  # of what Transformers gives to attention: (batch, heads, sequence, width)


@dataclass(slots=True)
class Context:
    """The ranks that have parts of the same sequences: `mesh` has one dimension. All of them get whole sequences."""

    mesh: DeviceMesh
    length: int | None = None  # of the sequences that the model has parts of now

    def part(self, whole: Tensor, fill: int) -> Tensor:
        """This rank's part of (batch, length): (batch, length / ranks, rounded up); `fill` follows the last ones."""
        ranks = self.mesh.size()
        mine = pad(whole, (0, -whole.shape[1] % ranks), value=fill).chunk(ranks, 1)[self.mesh.get_local_rank()]
        return mine.contiguous()

    def inputs(self, input_ids: Tensor, attention_mask: Tensor | None = None, **others: Any) -> dict[str, Any]:
        """What the model's forward takes of (batch, length) tokens on this rank.

        A mask is left out: padding is behind what is learnt, where causal attention sees nothing of it.
        """
        places = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return {**others, "input_ids": self.part(input_ids, 0), "position_ids": self.part(places, 0)}

    def summed(self, own: Tensor) -> Tensor:
        """The sum over the ranks, whose gradient is that of each rank's own part, times the ranks."""
        total: Tensor = _Sum.apply(own, self.mesh)  # type: ignore[no-untyped-call]
        return total

    def divide(self, model: Any) -> None:
        """Makes the model one that can compute parts. `enter` says when it does."""
        ALL_ATTENTION_FUNCTIONS[DIVIDED] = self.attention
        for module in model.modules():
            kinds = str(getattr(module, "rope_type", ""))
            if "dynamic" in kinds or "longrope" in kinds:
                module.forward = partial(self._rotated, module.forward)

    def enter(self, model: Any, length: int | None) -> None:
        """From now on, the model has parts of sequences of this length, or whole ones; also if backward recomputes."""
        self.length = length
        model.config._attn_implementation = SDPA if length is None else DIVIDED

    def _rotated(self, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        """What a rotary embedding makes of the part's places (…, part). Its frequencies depend on the last place given.

        That of the whole sequence is given, too, and what it makes of it is left out.
        """
        if self.length is None:
            return forward(x, position_ids, *args, **options)
        places = pad(position_ids, (0, 1), value=self.length - 1)
        return tree_map(lambda found: found[..., :-1, :], forward(x, places, *args, **options))

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
    ) -> tuple[Tensor, None]:
        """Of (batch, heads, part, width) each: (batch, part, heads, width), as Transformers' functions return it."""
        assert attention_mask is None, "there is none for this name"
        of_heads = [self._moved(each, SEQUENCE, HEADS) for each in (query, key, value)]
        seen, _ = ALL_ATTENTION_FUNCTIONS[SDPA](module, *of_heads, None, **options)
        return self._moved(seen, 2, 1), None

    def _moved(self, own: Tensor, divided: int, dim: int) -> Tensor:
        """What was divided along one dimension, divided along another one: an all-to-all."""
        whole = DTensor.from_local(own, self.mesh, [Shard(divided)], run_check=False)
        return whole.redistribute(placements=[Shard(dim)]).to_local()

    def check(self, model: Any, device: torch.device, length: int) -> None:
        """Raises ConfigError if sequences of this length cannot be divided so. The ranks of the job call it together.

        The model is asked itself, with an attention in which no token sees another one.
        """
        name, ranks = model.config.model_type, self.mesh.size()
        kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}
        found = {f"has {kind} layers" for kind in kinds - {"full_attention", "sliding_attention"}}
        if "position_ids" not in inspect.signature(model.forward).parameters:
            found.add("takes no position_ids")
        if (before := model.config._attn_implementation) != SDPA:
            found.add(f"computes with {before} attention")

        def alone(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **options: Any) -> Any:
            if (window := options.get("sliding_window") or length) < length:
                found.add(f"has a window of {window}")
            if options.get("position_bias") is not None:
                found.add("adds a bias for their places")
            causal = options.get("is_causal")
            if not (getattr(module, "is_causal", True) if causal is None else causal):
                found.add("lets them see later ones")
            for heads in (query.shape[HEADS], key.shape[HEADS]):
                if heads % ranks:
                    raise ConfigError(f"parallel.context is {ranks}, which does not divide a {name}'s {heads} heads.")
            return value.repeat_interleave(query.shape[HEADS] // value.shape[HEADS], HEADS).transpose(1, 2), None

        ALL_ATTENTION_FUNCTIONS[ALONE] = alone
        model.config._attn_implementation = ALONE
        try:
            if leaks(model, device):
                found.add("lets them do so elsewhere")
        except (AttributeError, TypeError):
            model.config._attn_implementation = before
            leaks(model, device)  # with a mask: if that fails too, the model has another fault
            found.add("needs a mask")
        finally:
            model.config._attn_implementation = before
            ALL_ATTENTION_FUNCTIONS.pop(ALONE)
        if found:
            raise ConfigError(
                "parallel.context: tokens of one sequence may influence each other only through full causal attention "
                f"by Transformers' sdpa, but a {name} {' and '.join(sorted(found))}: use data_shard in its place."
            )


class _Sum(torch.autograd.Function):
    """The sum over a mesh's ranks. Each has all of it, so the mean of their gradients is that of one sum."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.ranks = mesh.size()
        total = own.clone()
        dist.all_reduce(total, group=mesh.get_group())
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        [gradient] = gradients
        return gradient * ctx.ranks, None
