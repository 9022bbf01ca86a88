"""Several examples in one sequence, none of which sees another.

The positions begin anew with each example. Transformers' attention masks follow them if the model gets no mask and no
cache, whichever attention it computes with. `refuse_leaks` asks the model itself; `context` asks it by `leaks`, too.
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hytrain.errors import ConfigError
from hytrain.recipe.sharding import inference

ROUNDING = 1e-5  # of the outputs' norm: equal rows of one product may round otherwise, by less than a leak of 1e-4
LEAK = "packed examples would see each other in this model; set data.packing: false"


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of examples, by sequence of at most `capacity` tokens: best fit, longest example first."""
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, sequence), sorted
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        best = bisect.bisect_left(room, (lengths[i], 0))
        if best == len(room):
            sequences.append([i])
            free, chosen = capacity, len(sequences) - 1
        else:
            free, chosen = room.pop(best)
            sequences[chosen].append(i)
        bisect.insort(room, (free - lengths[i], chosen))
    return sequences


def refuse_leaks(model: Any, device: torch.device) -> None:
    """Raises ConfigError if an example changes the outputs of the one that follows it in a sequence."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"The model takes no position_ids, so {LEAK}.")
    if leaks(model, device, position_ids=torch.arange(8, device=device).repeat(2)[None]):
        raise ConfigError(f"The model mixes the tokens of a sequence whatever their positions, so {LEAK}.")


def leaks(model: Any, device: torch.device, **inputs: Tensor) -> bool:
    """Whether 8 tokens change the outputs of 8 others behind them, by more than rounding does.

    One forward has both, as two sequences: with other numbers of tokens, experts' products would round otherwise.
    """
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.arange(16, device=device).remainder(vocabulary)[None]
    others = torch.cat([(tokens[:, :8] + 1).remainder(vocabulary), tokens[:, 8:]], dim=1)
    with inference(model):
        one, other = model(input_ids=torch.cat([tokens, others]), use_cache=False, **inputs).logits[:, 8:]
    return bool((one - other).norm() > ROUNDING * one.norm())
