"""The ranks of a recipe: their process group, the mesh, and what all of them decide or add up together.

    torchrun ─ environment ─▶ start ─▶ torch.distributed
    recipe.parallel ─────────▶ Job ── mesh: data_replicate x data_shard x context x tensor
                                └──── total, mean, decided: collectives, which all ranks call in one order

`workers.train.trainer` calls `start`; the loop makes the `Job`. One rank is a job without torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from hytrain.config import Launch
from hytrain.errors import ConfigError
from hytrain.recipe import config
from hytrain.recipe.config import Recipe
from hytrain.run.ranks import Ranks

T = TypeVar("T")
DATA = ("data_replicate", "data_shard")  # dimensions of the mesh whose ranks have samples of their own
SPOKEN = "hytrain/spoken"


def is_first(store: Store) -> bool:
    """Whether this rank tells the user what all have found: no other has asked before. Nobody waits for anybody."""
    try:
        return bool(store.add(SPOKEN, 1) == 1)
    except dist.DistError:  # its host is gone, so perhaps nobody has spoken
        return True


def start(launch: Launch) -> Store:
    """Starts torch.distributed with what torchrun has set: gloo, and on a machine with GPUs NCCL on this rank's own."""
    store: Store
    store, rank, world = next(rendezvous("env://"))
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", store=store, rank=rank, world_size=world
    )
    return store


@dataclass(frozen=True, slots=True)
class Job:
    """The ranks that train a recipe together. The default is one rank, for which nothing here does anything."""

    ranks: Ranks = field(default_factory=Ranks)
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device) -> Job:
        """The job of torch.distributed's default group. Raises ConfigError if its ranks do not fit the recipe."""
        ranks = Ranks.of_job()
        config.check_ranks(recipe, ranks.world)
        if ranks.world == 1:
            return cls()
        sizes = recipe.parallel.sizes(ranks.world)
        if device.type == "cuda":
            _refuse_shared(ranks)
        return cls(ranks, init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)))

    @property
    def speaks(self) -> bool:
        """Whether this rank writes the files and tells the user how training goes."""
        return self.ranks.rank == 0

    @property
    def data_ranks(self) -> int:
        """How many ranks have samples of their own."""
        return 1 if self.mesh is None else self.mesh["data_replicate"].size() * self.mesh["data_shard"].size()

    @property
    def data_rank(self) -> int:
        if self.mesh is None:
            return 0
        replica, shard = (self.mesh.get_local_rank(name) for name in DATA)
        return replica * self.mesh["data_shard"].size() + shard

    @property
    def context(self) -> DeviceMesh | None:
        """The ranks that have parts of the same sequences as this one; None if each has whole ones."""
        return None if self.mesh is None or self.mesh["context"].size() == 1 else self.mesh["context"]

    def seed(self, *seeds: int) -> int:
        """A seed for this rank's dropout: ranks with other samples, or other parts of them, have other seeds."""
        part = 0 if self.mesh is None else self.data_ranks * self.mesh.get_local_rank("context")
        return int(np.random.SeedSequence((*seeds, self.data_rank + part)).generate_state(1, np.uint64)[0])

    def total(self, number: Tensor) -> Tensor:
        """The sum over the data ranks, in place of the tensor that is given."""
        if self.mesh is not None:
            for name in DATA:
                if self.mesh[name].size() > 1:
                    dist.all_reduce(number, group=self.mesh.get_group(name))
        return number

    def mean(self, number: Tensor, *wishes: bool) -> tuple[Tensor, Tensor | None]:
        """The mean over the data ranks, and, in the same collective, each wish's number of ranks; None on one rank."""
        if self.mesh is None:
            return number, None
        summed = self.total(torch.stack([number, *(number.new_full((), float(wish)) for wish in wishes)]))
        total, wished = summed[0], summed[1:]
        for name in ("context", "tensor"):
            if self.mesh[name].size() > 1:
                dist.all_reduce(wished, group=self.mesh.get_group(name))
        return total / self.data_ranks, wished

    def first(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in host memory, in place of the one that is given."""
        if self.mesh is not None:
            dist.broadcast(tensor, src=0)
        return tensor

    def decided(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides, on all ranks: its result, or its error."""
        result: list[T] = []
        with self.ranks.together():
            if self.speaks:
                result = [decide()]
        decision: T = self.ranks.gather(result)[0][0]
        return decision


def _refuse_shared(ranks: Ranks) -> None:
    """One GPU for each rank of this machine."""
    gpus, here = torch.cuda.device_count(), len(ranks.node)
    with ranks.together():
        if here > gpus:
            raise ConfigError(
                f"{here} ranks on a machine with {gpus} GPU{'s' if gpus > 1 else ''}: start one rank per GPU, "
                f"with --nproc-per-node {gpus}."
            )
