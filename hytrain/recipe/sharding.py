"""A model of which each rank has its shard only: split by torch's own tensor parallelism and FSDP2, then filled.

    recording ─▶ fake model ─▶ meta model ─▶ parallelize_module ─▶ fully_shard ─▶ to_empty ─▶ values
                                                                                             ├─ replayed: a new model
                                                                                             └─ read: a folder's weights
New values are those of one rank, bit for bit. No rank holds more than one whole tensor beside its shard.
`model` builds and shards; `task` and `report` call `inference` around a forward without a backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hytrain.errors import ConfigError
from hytrain.model.blueprint import Blueprint, Read
from hytrain.tensors import local, spans

#: Transformers' names in a model's plan, as torch's styles.
STYLES: Final[Mapping[str, Callable[[], ParallelStyle]]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),  # norms of heads
}
SPLIT: Final = {"colwise": 0, "rowwise": 1}  # the dimension of the weight that is divided evenly
HEADS: Final = ("num_attention_heads", "num_key_value_heads")


def fill_in(model: Any, blueprint: Blueprint, device: torch.device) -> None:
    """Gives the sharded model its memory, and the values of the blueprint."""
    model.to_empty(device=device)
    for planned in blueprint.planned:
        first, *tied = planned.names  # which that has untied
        for name in tied:
            prefix, _, leaf = name.rpartition(".")
            model.get_submodule(prefix)._parameters[leaf] = model.get_parameter(first)
    blueprint.make(lambda planned, read: fill(model.get_parameter(planned.names[0]), read))


def apply(model: Any, mesh: DeviceMesh) -> None:
    """Splits the model over the mesh: by its own plan for tensor parallelism, then block by block by FSDP2.

    For FSDP2, ranks that divide sequences are like those that divide samples: only they need groups of their own.
    Raises ConfigError if the model has no plan for tensor parallelism, or none that torch's styles can express.
    """
    replicas, tensor = mesh["data_replicate"].size(), mesh["tensor"].size()
    shards = mesh["data_shard"].size() * mesh["context"].size()
    if mesh["context"].size() > 1:
        names = ("data_replicate", "data_shard", "tensor")
        mesh = init_device_mesh(mesh.device_type, (replicas, shards, tensor), mesh_dim_names=names)
    if tensor > 1:
        parallelize_module(model, mesh["tensor"], _plan(model, tensor))
    if replicas * shards == 1:
        return
    data = mesh["data_replicate", "data_shard"] if replicas > 1 else mesh["data_shard"]
    for block in blocks(model):
        fully_shard(block, mesh=data)
    fully_shard(model, mesh=data)


def blocks(model: Any) -> list[nn.Module]:
    """The modules that FSDP2 gathers one at a time: those that Transformers keeps on one device, innermost first."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """Forwards without gradients and dropout. FSDP2 would keep the root's parameters whole after them."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def fill(parameter: Tensor, read: Read) -> None:
    """Copies into a parameter, or into this rank's shard of it, that part of the whole tensor."""
    if (own := local(parameter)).numel():
        own.copy_(read(tuple(slice(*span) for span in spans(parameter))))


def _plan(model: Any, ranks: int) -> dict[str, ParallelStyle]:
    text = model.config.get_text_config()
    for name in HEADS:
        heads = getattr(text, name, None) or ranks
        if heads % ranks:
            raise ConfigError(f"parallel.tensor is {ranks}, which does not divide the model's {name}, {heads}.")
    wanted = model.tp_plan
    if not wanted:
        raise ConfigError(
            f"parallel.tensor needs a plan of the model's, and a {text.model_type} has none in Transformers: "
            "use data_shard in its place."
        )
    plan: dict[str, ParallelStyle] = {}
    tied = model.get_input_embeddings().weight is getattr(model.get_output_embeddings(), "weight", None)
    kept = {model.get_input_embeddings(), model.get_output_embeddings()} if tied else set()
    for name, module in model.named_modules():
        style = wanted.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or module in kept:
            continue
        if style not in STYLES:
            raise ConfigError(
                f'parallel.tensor: the plan of a {text.model_type} has the style "{style}" for {name}, which torch '
                "has no counterpart for: use data_shard in its place."
            )
        if style in SPLIT and (width := module.weight.shape[SPLIT[style]]) % ranks:
            raise ConfigError(f"parallel.tensor is {ranks}, which does not divide the width {width} of {name}.")
        plan[name] = STYLES[style]()
    return plan
