"""Which rank has which part of each parameter, so that a sum over all ranks counts replicas once.

    rank r: (stage, name, spans) of each part ── gather ──▶ the first rank that has a part counts it
                                                        └─▶ who has the rest of a matrix of Muon's (`rounds`)

Ranks of one pipeline stage train the same parameters, and share them out by the DTensors' meshes. Stages differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from hytrain.errors import UnsupportedError, UsageError, warn
from hytrain.run.ranks import Ranks
from hytrain.tensors import Spans, is_distributed, spans

_COPIES: Final = (
    "{} has other values on rank {} than on the first rank that has it, though name and shape are the same: HyTrain "
    "takes them for copies of one parameter, which counts once in the norm and is saved once. If they are to be "
    "copies, broadcast the first one; if not, make them one DTensor, of which each rank has a part"
)

Named = Sequence[tuple[str, nn.Parameter]]
Part = tuple[str, Spans]


@dataclass(frozen=True, slots=True)
class Sharing:
    """The ids of the parameters whose parts this rank counts, and each rank's part of each parameter, by its name.

    `parts` has the ranks of this one's stage, in ascending order, and no parts without elements.
    """

    counted: Set[int]
    parts: Mapping[int, Mapping[str, Spans]] = field(default_factory=dict)


def shared_out(ranks: Ranks, stage: int, named: Named, hyper: Sequence[tuple[object, ...]]) -> Sharing:
    """How the parameters are shared out. All ranks call it.

    `hyper` has each parameter's hyperparameters.

    Raises `UnsupportedError` if ranks of a stage train copies instead of shares of a model, and `UsageError` if they
    train different models, or one model in different ways. Warns of copies that differ.
    """
    if ranks.world == 1:
        return Sharing({id(parameter) for _, parameter in named})
    whole: list[object] = [
        (name, tuple(parameter.shape), str(parameter.dtype), *numbers)
        for (name, parameter), numbers in zip(named, hyper, strict=True)
    ]
    parts = {id(parameter): (name, spans(parameter)) for name, parameter in named}
    found = ranks.gather((stage, whole, list(parts.values()), _meshes(named)))
    first: dict[tuple[int, Part], int] = {}
    for rank, (its_stage, _, theirs, _) in enumerate(found):
        for part in theirs:
            first.setdefault((its_stage, part), rank)
    ranks.agree(next((error for rank in range(ranks.world) if (error := _why_not(rank, found))), None))
    sums = {parts[id(parameter)]: _checksum(parameter) for _, parameter in named if not is_distributed(parameter)}
    everyones = ranks.gather(sums)
    others = {part: rank for part in sums if (rank := first[stage, part]) != ranks.rank}
    if differing := [part[0] for part, rank in others.items() if everyones[rank][part] != sums[part]]:
        warn(_COPIES.format(differing[0], ranks.rank))
    return Sharing(
        {identity for identity, part in parts.items() if first[stage, part] == ranks.rank},
        {
            rank: {name: its for name, its in theirs if all(begin < end for begin, end in its)}
            for rank, (its_stage, _, theirs, _) in enumerate(found)
            if its_stage == stage
        },
    )


def _checksum(parameter: nn.Parameter) -> int:
    """Of all bits, on the device, without a copy of the parameter."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[parameter.element_size()]
    return int(parameter.detach().view(bits).sum(dtype=torch.int64))


def _why_not(rank: int, found: list[tuple[int, list[object], list[Part], set[int]]]) -> Exception | None:
    """Why a rank cannot train together with the others of its stage; None if it can."""
    stage, whole, _, covered = found[rank]
    others = [other for other, (its_stage, *_) in enumerate(found) if its_stage == stage]
    if any(found[other][1] != whole for other in others):
        return UsageError(
            "ranks have different models, train different parameters, or have different values in param_groups: give "
            "all ranks the same. The stages of a pipeline differ, so pass their process group: hytrain.AdamW(…, "
            "pipeline_group=…)"
        )
    if len(others) > 1 and not covered.issuperset(others):
        return UnsupportedError(
            f"{len(others)} ranks have the model, but it is sharded over {len(covered) or 1}: apply fully_shard to "
            "it (reshard_after_forward=False keeps whole weights on each rank between forward and backward, as "
            "DistributedDataParallel does), or parallelize_module; for a pipeline, pass pipeline_group"
        )
    return None


def _meshes(named: Named) -> set[int]:
    """The ranks over which some parameter is shared out or replicated."""
    meshes = {parameter.device_mesh for _, parameter in named if is_distributed(parameter)}
    return {int(rank) for mesh in meshes for rank in torch.flatten(mesh.mesh)}
