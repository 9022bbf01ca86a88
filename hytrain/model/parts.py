"""Several modules that one optimizer trains: the parts of a pipeline's rank, or modules that are called one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from torch import Tensor, nn

from hytrain.errors import UnsupportedError


class Parts(nn.Module):
    """Modules that are called one by one. Names are those of the parts' own, unless two parts have the same one."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            if not isinstance(part, nn.Module):
                raise UnsupportedError(f"HyTrain needs the model itself or its parts, not {type(part).__name__}")
            self.add_module(str(index), part)
        names = [name for part in parts for name, _ in part.named_parameters()]
        self._has_own_names = len(names) == len(set(names))

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        if not self._has_own_names:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        memo = set() if memo is None else memo
        for part in self.children():
            yield from part.named_modules(memo, prefix, remove_duplicate)


class Loose(nn.Module):
    """Parameters that belong to no module that is known."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        # Not by `register_parameter`: torch's optimizers take other tensors, too.
        self._parameters.update((f"loose_{index}", parameter) for index, parameter in enumerate(parameters))  # type: ignore[misc]


def joined(parts: Sequence[nn.Module], parameters: Sequence[Tensor]) -> nn.Module:
    """The model that has these parts, and those of these parameters that no part has.

    They come in the parameters' order, so their names do not depend on which is called first. A parameter of several
    parts is the first one's.
    """
    inside = {id(parameter) for part in parts for parameter in part.parameters()}
    loose = [parameter for parameter in parameters if id(parameter) not in inside]
    found = [*parts, *([Loose(loose)] if loose else [])]
    place, first = {id(parameter): index for index, parameter in enumerate(parameters)}, list[int]()
    for part in found:
        own = [place.pop(id(parameter), len(parameters)) for parameter in part.parameters()]
        first.append(min(own, default=len(parameters)))
    found = [part for _, part in sorted(zip(first, found, strict=True), key=itemgetter(0))]
    return found[0] if len(found) == 1 and not loose else Parts(found)


def roots(model: nn.Module) -> list[nn.Module]:
    """The modules whose call is a forward of the whole model."""
    return list(model.children()) if isinstance(model, Parts) else [model]
