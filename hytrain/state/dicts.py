"""The optimizer's state as a dictionary in torch's form: by parameter index, tensors as views of the planes.

The state of a sharded parameter is a DTensor over this rank's planes, with the parameter's mesh and placements, as with
`torch.optim.AdamW`. The dictionary is complete, and its bytes do not depend on k. `folders` has the files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from hytrain.algorithms import Algorithm
from hytrain.errors import ConfigError
from hytrain.kernels import float8
from hytrain.kernels.split import REMAINDERS, clear_remainder, fit_remainder
from hytrain.model.layers import clean
from hytrain.model.trained import TrainedParameter, plane_dtypes
from hytrain.step.scaling import LossScale
from hytrain.tensors import distributed, flat, is_distributed, laid_out, local, local_like, part_of, shaped, version
from protocol.handles import DTYPE_BYTES, STATE_PLANES, Precision
from protocol.rules import MOMENT_PLANES, MOMENTS

_log = logging.getLogger(__name__)

#: Collectives know no int16, the dtype of a `remainder`, so a DTensor of the same numbers has another one.
SENT_AS: Final = {torch.int16: torch.int32}


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Where all of an optimizer's state is, while the engine has exposed it."""

    groups: list[dict[str, Any]]
    parameters: list[TrainedParameter]
    resting: Resting
    loss_scale: LossScale | None = None


def state_dict(of: OptimizerState) -> dict[str, Any]:
    """The state in torch's form. A parameter that was never updated has no entry, as in torch.

    Before the first step, every trained parameter has one, of zeros, because torch's distributed checkpoints only read
    what has an entry. The first group has the loss scale. All tensors are on one device, which these checkpoints need;
    those of DTensors are in host memory, since all ranks need the same device, and k differs between them.
    A remainder is a copy: they read a file into these tensors before they load them, and loading the file's weights
    clears the remainders in the planes.
    """
    index, packed = _numbered(of.groups, of.resting.algorithm)
    if of.loss_scale is not None:
        packed[0]["loss_scale"] = of.loss_scale.state()
    entries: list[tuple[nn.Parameter, int, dict[str, Tensor]]] = []
    is_new = not any(known.count for known in of.parameters)
    for known in of.parameters:
        if not (known.count or is_new):
            continue
        planes = {plane: gather(known, plane) for plane in known.plane_dtypes}
        if "remainder" in planes:
            planes["remainder"] = planes["remainder"].clone()
        entries.append((known.parameter, known.count, planes))
    entries += [(rest.parameter, rest.count, rest.planes) for rest in of.resting]
    on_host = len({tensor.device for _, _, planes in entries for tensor in planes.values()}) > 1
    on_host = on_host or any(is_distributed(parameter) for parameter, _, _ in entries)
    state: dict[int, dict[str, Tensor]] = {}
    for parameter, count, planes in entries:
        parts = {plane: tensor.cpu() if on_host else tensor for plane, tensor in planes.items()}
        if is_distributed(parameter):
            parts = {
                plane: distributed(part.to(SENT_AS.get(part.dtype, part.dtype)), parameter)
                for plane, part in parts.items()
            }
        step = torch.tensor(float(count), dtype=torch.float32, device="cpu")  # as torch has it, whatever its defaults
        state[index[id(parameter)]] = {"step": step, **parts}
    return {"state": dict(sorted(state.items())), "param_groups": packed}


def load_state_dict(
    loaded: dict[str, Any],
    into: OptimizerState,
    named: list[tuple[str, nn.Parameter]],
    when_checked: Callable[[], None],
) -> None:
    """Write a state in torch's form into the planes. Raises `ConfigError` before anything is changed.

    Its keys are numbers, or names as in torch's distributed checkpoints. `named` are all names of all the model's
    parameters. `when_checked` is called before the first change.
    """
    theirs, groups, resting = loaded["param_groups"], into.groups, into.resting
    algorithm = resting.algorithm
    entries = {
        key: {name: value for name, value in loaded["state"].get(label, {}).items() if value is not None}
        for key, label in _labels(theirs, groups, named, algorithm).items()
    }
    names = {id(parameter): name for name, parameter in reversed(named)}
    given = [parameter for group in groups for parameter in group["params"]]
    rules = rules_of(groups, algorithm)
    check_groups(groups, theirs, algorithm)
    for group in groups:
        for parameter in group["params"]:
            name, entry = names.get(id(parameter), "a parameter"), entries[id(parameter)]
            _check_entry(name, parameter, entry, MOMENTS[rules[id(parameter)]], algorithm.of(group))
    found = {
        _saved_as(moment, plane, resting.precision)
        for entry in entries.values()
        for plane in MOMENT_PLANES
        if (moment := _tensor(entry, plane)) is not None
    }
    has_masters = any(
        parameter.dtype is torch.bfloat16 and _tensor(entries[id(parameter)], "remainder") is not None
        for parameter in given
    )
    tell_of_conversion("the loaded state", found, has_masters, resting.precision)
    when_checked()
    numbers = [deepcopy(hyper(other, algorithm.of(group))) for group, other in zip(groups, theirs, strict=True)]
    groups[:] = [{**group, **given} for group, given in zip(groups, numbers, strict=True)]  # new ones, as in torch
    for known in into.parameters:
        entry = entries[id(known.parameter)]
        known.restore(count_of(entry))
        for plane in STATE_PLANES:
            scatter(known, plane, _part(entry, plane, known.parameter, known.plane_dtypes))
    trained = {id(known.parameter) for known in into.parameters}
    resting.clear()
    for parameter in given:
        if (entry := entries[id(parameter)]) and id(parameter) not in trained:
            resting.load(names[id(parameter)], parameter, rules[id(parameter)], entry)
    if into.loss_scale is not None:
        into.loss_scale.load(theirs[0].get("loss_scale"))


def _saved_as(moment: Tensor, plane: str, own: Precision) -> str:
    """The `state_dtype` that a loaded moment had. float8's numbers are in bfloat16."""
    if own.state_dtype == "float8" and moment.dtype is torch.bfloat16:
        if float8.are_numbers(local(moment).flatten().cpu(), plane):
            return "float8"
    return str(moment.dtype).removeprefix("torch.")


def tell_of_conversion(source: str, moments: set[str], has_masters: bool, own: Precision) -> None:
    """Log that moments become another dtype than they had where they were saved, or that masters are left out."""
    wanted = own.state_dtype
    for dtype in moments - {wanted}:
        nbytes = DTYPE_BYTES.get(dtype) or getattr(torch, dtype).itemsize  # of somebody else's, perhaps float64
        narrower = ", rounded to nearest" if DTYPE_BYTES[wanted] < nbytes else ""
        _log.warning("the moments in %s are %s: they become %s%s", source, dtype, wanted, narrower)
    if has_masters and own.master_dtype == "bfloat16":
        _log.warning("the float32 masters in %s are left out: bfloat16 weights are their own masters here", source)


@dataclass(slots=True)
class Rest:
    """This rank's part of the state of a parameter that is in no layer. `version` is the parameter's version counter.

    It is None for loaded state, because the weights that belong to it may be loaded later.
    """

    name: str
    of: TensorWeakRef
    count: int
    planes: dict[str, Tensor]
    version: int | None

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.of()
        assert parameter is not None, f"the optimizer keeps {self.name}"
        return parameter  # type: ignore[no-any-return]


class Resting:
    """The state of parameters that are frozen, or in no layer while layers are rebuilt. Host planes are not copied."""

    def __init__(self, algorithm: Algorithm, precision: Precision) -> None:
        self.algorithm, self.precision = algorithm, precision
        self._of: dict[int, Rest] = {}  # by the parameter's identity: its name may become another's

    def take(self, parameters: list[TrainedParameter]) -> None:
        for known in parameters:
            if known.count:
                planes = {plane: gather(known, plane).cpu() for plane in known.plane_dtypes}
                rest = Rest(known.name, TensorWeakRef(known.parameter), known.count, planes, version(known.parameter))
                self._of[id(known.parameter)] = rest

    def give(self, parameters: list[TrainedParameter]) -> None:
        """Write the kept state of these parameters into their planes.

        A remainder belongs to the weights it was kept with. If they were written since, it is dropped.
        """
        for known in parameters:
            rest = self._of.pop(id(known.parameter), None)
            if rest is None:
                continue
            known.restore(rest.count)
            if (remainder := rest.planes.get("remainder")) is not None:
                if rest.version not in (None, known.found):
                    del rest.planes["remainder"]
                else:
                    fit_remainder(remainder, known.values())
            for plane in STATE_PLANES:
                scatter(known, plane, rest.planes.pop(plane, None))

    def __iter__(self) -> Iterator[Rest]:
        return iter(self._of.values())

    def load(self, name: str, parameter: nn.Parameter, rule: str, entry: dict[str, Any]) -> None:
        dtypes = plane_dtypes(parameter, rule, self.precision)
        parts = {plane: _part(entry, plane, parameter, dtypes) for plane in dtypes}
        planes = {plane: part.cpu() for plane, part in parts.items() if part is not None}
        self._of[id(parameter)] = Rest(name, TensorWeakRef(parameter), count_of(entry), planes, None)

    def begin(self, groups: list[dict[str, Any]]) -> None:
        """The state before the first step, of all parameters that need gradients."""
        rules = rules_of(groups, self.algorithm)
        for parameter in (p for group in groups for p in group["params"] if p.requires_grad and p.numel()):
            own, planes = local(parameter).detach(), dict[str, Tensor]()
            for plane, dtype in plane_dtypes(parameter, rules[id(parameter)], self.precision).items():
                planes[plane] = torch.zeros_like(own, dtype=dtype, device="cpu")
                if plane == "remainder":
                    clear_remainder(planes[plane], own)
            self._of[id(parameter)] = Rest("", TensorWeakRef(parameter), 0, planes, None)

    def drop_remainders(self) -> None:
        """Make the weights the masters."""
        for rest in self:
            rest.planes.pop("remainder", None)

    def drop(self, parameters: list[TrainedParameter]) -> None:
        for known in parameters:
            self._of.pop(id(known.parameter), None)

    def clear(self) -> None:
        self._of.clear()


def gather(known: TrainedParameter, plane: str) -> Tensor:
    """This rank's part of a parameter's state in one plane, in its shape: a view, or a copy of pieces or of codes."""
    parts = [
        float8.from_plane(part, plane) if part.dtype is torch.uint8 else part
        for layer, index in known.places
        if (part := layer.part(plane, index)) is not None
    ]
    if not parts:  # other ranks have all of it
        return torch.empty_like(known.own, dtype=known.plane_dtypes[plane])
    return shaped(parts[0] if len(parts) == 1 else torch.cat([part.cpu() for part in parts]), known.own)


def scatter(known: TrainedParameter, plane: str, value: Tensor | None) -> None:
    """Write this rank's part of a parameter's state in one plane.

    None writes the initial state: zeros, or the weights as masters.
    """
    if value is not None:
        value = flat(laid_out(value.cpu(), known.own))
    for layer, index in known.places:
        part, segment = layer.part(plane, index), layer.segments[index]
        if part is None:
            continue
        if value is None and plane == "remainder":
            clear_remainder(part, layer.values[index])
        elif value is None:
            part.zero_()
        else:
            values = value[segment.start : segment.start + segment.spec.numel]
            part.copy_(float8.to_plane(values, plane) if part.dtype is torch.uint8 else values)


def _tensor(entry: dict[str, Any], plane: str) -> Tensor | None:
    """None for what is not there. In a flattened state of torch's distributed checkpoints, that is `{}`."""
    value = entry.get(plane)
    return value if isinstance(value, Tensor) else None


def _part(entry: dict[str, Any], plane: str, parameter: nn.Parameter, dtypes: dict[str, torch.dtype]) -> Tensor | None:
    """This rank's part of a loaded array, which may be distributed in another way or be whole."""
    value = _tensor(entry, plane)
    if value is None:
        return None
    if is_distributed(value):
        value = local_like(value, parameter) if is_distributed(parameter) else value.full_tensor()
    else:
        value = part_of(value, parameter)
    return value.to(dtypes.get(plane, value.dtype))


def _check_entry(
    name: str, parameter: nn.Parameter, entry: dict[str, Any], moments: Sequence[str], algorithm: Algorithm
) -> None:
    """Raise `ConfigError` for another algorithm's state, of another shape, or of weights with another 16-bit dtype."""
    lacks = any(_tensor(entry, plane) is None for plane in moments) or (algorithm.counts_steps and "step" not in entry)
    count_of(entry)
    if entry and (lacks or entry.keys() & ({*MOMENT_PLANES} - algorithm.moments)):
        raise ConfigError(f"the loaded state of {name} is not {algorithm.name}'s: it has {', '.join(map(str, entry))}")
    for plane in STATE_PLANES:
        if (tensor := _tensor(entry, plane)) is None:
            continue
        if tensor.shape != parameter.shape:
            raise ConfigError(f"{plane} of {name} has shape {tuple(tensor.shape)}")
        expected = REMAINDERS.get(parameter.dtype, tensor.dtype)
        if plane == "remainder" and tensor.dtype not in (expected, SENT_AS.get(expected)):
            raise ConfigError(f"{plane} of {name} has dtype {tensor.dtype}: it is that of weights of another dtype")


def _labels(
    theirs: list[dict[str, Any]],
    groups: list[dict[str, Any]],
    named: list[tuple[str, nn.Parameter]],
    algorithm: Algorithm,
) -> dict[int, int | str]:
    """What a loaded state calls each parameter, by `id`: a number or a name."""
    index, packed = _numbered(groups, algorithm)
    labels = [group["params"] for group in theirs]
    if labels == [group["params"] for group in packed]:
        return dict(index)
    ids = {clean(name): id(parameter) for name, parameter in named}
    if [{ids.get(label) for label in group} for group in labels] != [{*map(id, group["params"])} for group in groups]:
        raise ConfigError("the loaded state's parameter groups are not those of this optimizer")
    return {ids[label]: label for group in labels for label in group}


def hyper(group: dict[str, Any], algorithm: Algorithm) -> dict[str, Any]:
    """A group's hyperparameters, and what a scheduler has added to them."""
    return {key: value for key, value in group.items() if key not in ("params", "loss_scale", *algorithm.as_torch)}


def check_groups(groups: list[dict[str, Any]], theirs: list[dict[str, Any]], algorithm: Algorithm) -> None:
    """Raise `ConfigError` if loaded groups are of another algorithm, or have state that these groups have not."""
    for group, other in zip(groups, theirs, strict=True):
        if sentence := algorithm.of(group).wrong(other):
            raise ConfigError(sentence)
        if algorithm.rule({**group, **hyper(other, algorithm.of(group))}) != algorithm.rule(group):
            raise ConfigError(f"in the loaded state, {algorithm.rule_changed}")


def count_of(entry: dict[str, Any]) -> int:
    """The number of a parameter's updates. Not all of torch's optimizers count; then one stands for several.

    Raises `ConfigError` for what is no number of updates.
    """
    given = entry.get("step", 1) if entry else 0
    count = float(given)
    if not (count.is_integer() and count >= 0):
        raise ConfigError(f"a step in the loaded state is {count}: whole numbers of updates, from 0 on")
    return int(given)


def rules_of(groups: list[dict[str, Any]], algorithm: Algorithm) -> dict[int, str]:
    """The rule of each parameter, by its identity."""
    return {id(parameter): algorithm.rule(group) for group in groups for parameter in group["params"]}


def _numbered(groups: list[dict[str, Any]], algorithm: Algorithm) -> tuple[dict[int, int], list[dict[str, Any]]]:
    """Each parameter's index by `id`, and the groups with indices instead of parameters."""
    index: dict[int, int] = {}
    packed = []
    for group in groups:
        for parameter in group["params"]:
            index[id(parameter)] = len(index)
        params = [index[id(parameter)] for parameter in group["params"]]
        packed.append({**group, **algorithm.of(group).as_torch, "params": params})
    return index, packed
