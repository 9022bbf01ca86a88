"""The placements of a layer: where its weights and its optimizer state rest, and who runs its update.

Messages contain the name of each layer's placement, as `Places`. The planner chooses them, the trainer's planes
implement them, and all other code looks names up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final


@dataclass(frozen=True, slots=True)
class Placement:
    """`weights`, `state`: where they rest, "gpu" or "host". `updates`: who runs the update, "gpu" or "cpu".

    Weights that rest on the host come to the GPU for forward and backward. If the GPU updates state that rests on the
    host, the state `visits` it: it is fetched for each update.
    """

    name: str
    weights: str
    state: str
    updates: str
    visits: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "visits", self.state == "host" and self.updates == "gpu")

    @property
    def resident(self) -> Placement:
        """The same with weights that rest on the GPU."""
        return self.weights_on("gpu")

    def weights_on(self, where: str) -> Placement:
        """The same with weights that rest there. ValueError if no placement has it so."""
        found = _BY_FACTS.get((where, self.state, self.updates))
        if found is None:
            raise ValueError(f"no placement has weights on {where!r} and is otherwise like {self.name!r}")
        return found


GPU: Final = Placement("gpu", weights="gpu", state="gpu", updates="gpu")
CPU: Final = Placement("cpu", weights="gpu", state="host", updates="cpu")
VISIT: Final = Placement("visit", weights="gpu", state="host", updates="gpu")
CPU_OFFLOADED: Final = Placement("cpu-offloaded", weights="host", state="host", updates="cpu")
VISIT_OFFLOADED: Final = Placement("visit-offloaded", weights="host", state="host", updates="gpu")
PLACEMENTS: Final[dict[str, Placement]] = {
    placement.name: placement for placement in (GPU, CPU, VISIT, CPU_OFFLOADED, VISIT_OFFLOADED)
}
_BY_FACTS: Final = {(each.weights, each.state, each.updates): each for each in PLACEMENTS.values()}


@dataclass(frozen=True)
class Places:
    """The placement of each layer, by LID. Its sets contain LIDs, and are found once."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.names) - PLACEMENTS.keys()):
            raise ValueError(f"unknown placements {unknown}; known: {', '.join(PLACEMENTS)}")

    @classmethod
    def of(cls, placements: Iterable[Placement]) -> Places:
        return cls(tuple(placement.name for placement in placements))

    @classmethod
    def chosen(
        cls, layers: int, gpu: Set[int], visiting: Set[int] = frozenset(), offloaded: Set[int] = frozenset()
    ) -> Places:
        """The GPU owns the layers `gpu`, these visit it, and the CPU updates the rest."""
        owned = (GPU if lid in gpu else VISIT if lid in visiting else CPU for lid in range(layers))
        return cls.of(owned).offload(offloaded)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Placement]:
        return (PLACEMENTS[name] for name in self.names)

    def __getitem__(self, lid: int) -> Placement:
        return PLACEMENTS[self.names[lid]]

    @cached_property
    def gpu(self) -> frozenset[int]:
        """The layers whose state rests on the GPU."""
        return self._where(lambda placement: placement.state == "gpu")

    @cached_property
    def visiting(self) -> frozenset[int]:
        """The layers whose state comes to the GPU for each update."""
        return self._where(lambda placement: placement.visits)

    @cached_property
    def cpu(self) -> frozenset[int]:
        """The layers that the CPU updates."""
        return self._where(lambda placement: placement.updates == "cpu")

    @cached_property
    def offloaded(self) -> frozenset[int]:
        """The layers whose weights rest on the host."""
        return self._where(lambda placement: placement.weights == "host")

    def _where(self, has: Callable[[Placement], bool]) -> frozenset[int]:
        return frozenset(lid for lid, placement in enumerate(self) if has(placement))

    def moved(self, lids: Set[int], to: Placement) -> Places:
        """These layers have the state and the updates of `to` now. Weights rest where they did, if they can."""
        return Places.of(_like(placement, to) if lid in lids else placement for lid, placement in enumerate(self))

    def offload(self, lids: Set[int]) -> Places:
        """Of these layers, but not of others, weights rest on the host. They do not where the GPU owns the layer."""
        return Places.of(
            one.weights_on("host" if lid in lids and one.state == "host" else "gpu") for lid, one in enumerate(self)
        )

    def gpu_fraction(self, numels: Sequence[int]) -> float:
        """k: the fraction of the parameters whose state rests on the GPU. `numels` is by LID."""
        return sum(numels[lid] for lid in self.gpu) / sum(numels)


def _like(now: Placement, to: Placement) -> Placement:
    return to.weights_on(now.weights) if to.state == "host" else to
