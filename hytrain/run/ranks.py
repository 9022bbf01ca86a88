"""The ranks of a job: the processes of `torch.distributed`, each with an optimizer of its own for its shards.

    rank r ── gather: everyone's value, by rank ──▶ which ranks share this machine, who replicates what, is all the same

One process is rank 0 of 1, and needs no `torch.distributed`. Every method here is a collective: all ranks call it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Self

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from hytrain.errors import HyTrainError, UsageError

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's `rank` of `world`, and `node`, the ranks on this machine in ascending order.

    `group`: what torch's collectives use; None is the default group.
    """

    rank: int = 0
    world: int = 1
    node: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_job(cls) -> Self:
        """The ranks of torch.distributed's default group; one rank if there is none."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        world: list[Any] = [None] * dist.get_world_size()
        here = (socket.gethostname(), _BOOT.read_text().strip())
        dist.all_gather_object(world, here)
        return cls(dist.get_rank(), len(world), tuple(rank for rank, place in enumerate(world) if place == here))

    def apart(self, longer_s: float = 0.0) -> Self:
        """The same ranks over a group of their own, for the collectives of another thread. Host memory only.

        A rank may be so much later than torch otherwise waits for one.
        """
        timeout = default_pg_timeout + timedelta(seconds=longer_s)
        return self if self.world == 1 else replace(self, group=dist.new_group(backend="gloo", timeout=timeout))

    def among(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """The group of some ranks, this one among them, for collectives on their devices. All of these call it."""
        return None if len(ranks) == self.world else dist.new_group([*ranks], use_local_synchronization=True)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank. They travel as pickles: numbers, strings and tuples of them."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that succeeds on all ranks or on none: one rank's error is raised on all, so none waits for it."""
        try:
            yield
        except Exception as error:
            self.agree(error)
        else:
            self.agree(None)

    def agree(self, error: Exception | None) -> None:
        """Raise this rank's error, or else that of the first rank that has one."""
        theirs = error and (type(error) if isinstance(error, HyTrainError) else HyTrainError, str(error))
        found = [(rank, one) for rank, one in enumerate(self.gather(theirs)) if one]
        if error is not None:
            raise error
        if found:
            rank, (kind, sentence) = found[0]
            raise kind(f"rank {rank}: {sentence}")

    def require_same(self, value: Any, sentence: str) -> None:
        """Raise `UsageError` with `sentence` on all ranks unless all have the same `value`."""
        values = self.gather(value)
        if any(other != values[0] for other in values):
            raise UsageError(sentence)
